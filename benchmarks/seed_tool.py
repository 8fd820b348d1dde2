"""`penstock infer` beside the tool whose command line it takes: aind_torch_utils, on this machine.

    git clone https://github.com/AllenNeuralDynamics/aind-torch-utils /tmp/aind
    python benchmarks/seed_tool.py /tmp/aind/src        256 cubed, three rounds; README.md's table
    python benchmarks/seed_tool.py /tmp/aind/src --side 128 --rounds 1 --models three_conv

Each launch is a fresh process, timed from its start to its end, and the sides take turns, so that a
busy machine slows all. Both run the networks of ``models.py`` with the same flags; Penstock runs
them by its own defaults, too. After each launch of Penstock comes one of its forwards alone: as
many, of the same patches and as many at a time, of zeros. No tool that computes these patches can
take less time. The outputs are compared voxel by voxel. The seed's tool knows CUDA
alone: stand-ins without effect take the place of streams and events, so that it runs on a CPU.
Samples go to ``results/seed-tool.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import readme
from contenders import CHUNK, CODEC, spec
from infer import make_volume

HERE = Path(__file__).resolve().parent
SAMPLES = HERE / "results" / "seed-tool.jsonl"
AS_SEED = """
import contextlib, sys, torch

class Nothing:
    def __init__(self, *args, **knobs): pass
    def __getattr__(self, name): return lambda *args, **knobs: self

torch.cuda.Stream = torch.cuda.Event = Nothing
torch.cuda.current_stream = torch.cuda.set_device = torch.cuda.synchronize = Nothing
torch.cuda.device = torch.cuda.stream = lambda which: contextlib.nullcontext()
torch.Tensor.record_stream = lambda tensor, stream: None
from aind_torch_utils.model_registry import ModelRegistry
from aind_torch_utils.run import main
import models
name = sys.argv[1]
ModelRegistry.register(name)(lambda weights_path=None: getattr(models, name)().eval())
main(["--model-type", name, "--no-amp", "--metrics-json", "metrics.json", *sys.argv[2:]])
"""
FORWARDS = """
import json, os, sys
from penstock.base import InferConfig, one_heap
from penstock.inference.opening.job import Job
from penstock.models import placed

one_heap()
run = json.load(open(sys.argv[1]))
job = Job(InferConfig(**run["settings"]), trial=True)
net = placed(job.net.model.module, job.devices[0], job.net.footprint.channels_last)
for _ in range(-(-run["plan"]["num_patches"] // job.net.forward)):
    job.net.forward_zeros(net, job.devices[0])
os._exit(0)  # at once, as the command ends
"""
OVERLAP = {"identity": 10, "three_conv": 10, "unet": 16}
MARGIN = 16
"""Voxels at each face that are not compared: there each pads in its own way."""


def five(path: str, side: int, *, create: bool = False) -> dict[str, Any]:
    """The spec of a volume with the five axes that the seed's tool wants."""
    said = spec(path, side)
    if create:
        said |= {"create": True, "delete_existing": True, "metadata": {
            "shape": [1, 1, *[side] * 3], "chunks": [1, 1, *[CHUNK] * 3], "dtype": "<u2",
            "compressor": CODEC,
        }}  # fmt: skip
    return said


def commands(model: str, side: int, tool: Path) -> dict[str, list[str]]:
    """The command of each side."""
    spoken = ["--in-spec", json.dumps(five("in.zarr", side)), "--devices", "cpu"]
    spoken += ["--out-spec"]
    cut = ["--patch", *["64"] * 3, "--overlap", str(OVERLAP[model]), "--block", *["256"] * 3]
    cut += ["--trim-voxels", str(OVERLAP[model] // 2)]
    plain = model == "identity"
    seed = [
        sys.executable,
        "-c",
        AS_SEED,
        model,
        *spoken,
        json.dumps(five("seed.zarr", side, create=True)),
    ]
    penstock = [
        sys.executable,
        "-m",
        "penstock",
        "infer",
        "--model-type",
        f"{HERE}/models.py:{model}",
    ]
    penstock += [
        "--head-kind",
        "intensity",
        *spoken,
        json.dumps(five("ours.zarr", side, create=True)),
    ]
    same = ["--normalize", "none"] if plain else ["--normalize", "percentile", "--halo", "5"]
    made = {}
    for batch in ("2", "8"):
        size = ["--batch", batch]
        made[f"seed's tool, batch {batch}"] = [
            *seed, *cut, *size, *(["--normalize", "false"] if plain else ["--halo", "5"]),
        ]  # fmt: skip
        made[f"penstock, the same flags, batch {batch}"] = [*penstock, *cut, *size, *same]
    made["penstock by default"] = [*penstock, *(same if plain else [])]
    return made


def launch(command: Sequence[str], tool: Path) -> dict[str, Any]:
    """The seconds of a fresh process, and those of the processor."""
    paths = os.pathsep.join([str(tool), str(HERE), str(HERE.parent / "src")])
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)[:300]}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "cpu_seconds": cpu, "load": os.getloadavg()[0]}


def differ(side: int) -> int:
    """The most that a voxel of the two outputs differs, away from the faces."""
    import tensorstore as ts

    ours, seeds = (
        ts.open(five(name, side), read=True).result().read().result()[0, 0].astype(np.int64)
        for name in ("ours.zarr", "seed.zarr")
    )
    inner = (slice(MARGIN, -MARGIN),) * 3
    return int(np.abs(ours - seeds)[inner].max())


def measure(models: Sequence[str], side: int, rounds: int, tool: Path) -> list[dict[str, Any]]:
    import tensorstore as ts

    make_volume(Path("plain.zarr"), side)
    plain = ts.open(spec("plain.zarr", side), read=True).result()
    ts.open(five("in.zarr", side, create=True)).result()[0, 0].write(plain).result()
    samples = []
    for number in range(rounds):
        for model in models:
            for name, command in commands(model, side, tool).items():
                named = {"model": model, "side": name, "round": number, "voxels": side**3}
                sample = named | launch(command, tool)
                if "same flags" in name:
                    sample["differ"] = differ(side)
                samples.append(sample)
                print(json.dumps(sample), flush=True)
                if "penstock" in name:
                    run = [sys.executable, "-c", FORWARDS, "ours.zarr.penstock/run.json"]
                    named |= {"side": f"{name}: forwards alone"}
                    samples.append(named | launch(run, tool))
    return samples


def table(samples: Sequence[dict[str, Any]]) -> str:
    """The table of README.md: times of the seed's tool over those of Penstock, round by round."""
    rounds = max(sample["round"] for sample in samples) + 1
    load = statistics.median(sample["load"] for sample in samples)
    lines = [
        f"{samples[0]['voxels']:,} voxels; rounds: {rounds}; median load: {load:.1f}. How many",
        "times as fast as the seed's tool: median [least to most].",
        "",
        "| network | | seconds | as fast as it at batch 2 | at batch 8 | most difference |",
        "|---|---|---|---|---|---|",
    ]
    by = {(s["model"], s["side"], s["round"]): s for s in samples}
    for model, name in dict.fromkeys((s["model"], s["side"]) for s in samples):
        mine = [by[model, name, n] for n in range(rounds)]
        cells = []
        for batch in (2, 8):
            ratios = sorted(
                by[model, f"seed's tool, batch {batch}", n]["seconds"] / mine[n]["seconds"]
                for n in range(rounds)
            )
            cells.append(f"{statistics.median(ratios):.2f} [{ratios[0]:.2f} to {ratios[-1]:.2f}]")
        seconds = statistics.median(s["seconds"] for s in mine)
        apart = max((s["differ"] for s in mine if "differ" in s), default="")
        lines.append(f"| {model} | {name} | {seconds:.1f} | {' | '.join(cells)} | {apart} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool", type=Path, help="the folder that holds aind_torch_utils")
    parser.add_argument("--side", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=list(OVERLAP), choices=list(OVERLAP))
    args, here = parser.parse_args(), Path.cwd()
    tool = args.tool.resolve()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        samples = measure(args.models, args.side, args.rounds, tool)
        os.chdir(here)
    print(table(samples))
    if args.side == 256 and list(args.models) == list(OVERLAP):
        machine = {"machine": platform.platform(), "cores": os.cpu_count()}
        SAMPLES.write_text("".join(json.dumps(s | machine) + "\n" for s in samples))
        readme.write("seed-tool", table(samples))


if __name__ == "__main__":
    main()
