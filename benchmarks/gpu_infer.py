"""How near ``penstock infer`` comes to what one device computes, moves, reads and writes alone.

    python benchmarks/gpu_infer.py --device cuda             part of gpu.sh
    python benchmarks/gpu_infer.py --device cpu --smoke      a smoke test, 64 cubed

Nets are run over one volume of random 16-bit values at fp32, tf32, fp16 and bf16, eager and
compiled: a process for each, round after round. The same nets then compute alone, on a batch that
lies on the device. Both are voxels of the volume in a second, without the first forward, which
compiles. The trace of a run tells this, and how much of its copies to and from the device lay
beside forwards. Every sample goes to FOLDER/infer.jsonl, and the table is computed from it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
OVERLAP = {"identity": 10, "three_conv": 10, "denoise_net": 16}
ARITHMETIC = {
    "fp32": ["--amp", "off"],
    "tf32": ["--amp", "off", "--tf32"],
    "fp16": ["--amp", "fp16"],
    "bf16": ["--amp", "bf16"],
}
OF_COMPUTE_ALONE = 0.9
"""The target for denoise-net."""
PATCH, CHUNK = 64, 64
SMOKE_NETS, SMOKE_ARITHMETIC = ("identity", "three_conv"), ("fp32",)

Record = dict[str, Any]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--folder", type=Path, default=HERE / "results" / "gpu")
    parser.add_argument("--work", type=Path, default=Path("/tmp/penstock-gpu"))
    parser.add_argument("--size", type=int, default=1024, help="side of the volume: 2 GiB of 1024")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {args.device}: torch sees no CUDA device here; there is cpu")
    return args


def main() -> int:
    args = parsed()
    if args.alone is not None:
        print(json.dumps(compute_alone(args.device, *args.alone)))
        return 0
    size, rounds = (64, 1) if args.smoke else (args.size, args.rounds)
    nets = SMOKE_NETS if args.smoke else tuple(OVERLAP)
    arithmetics = SMOKE_ARITHMETIC if args.smoke else tuple(ARITHMETIC)
    args.folder.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    source, records = volume(args.work / f"volume-{size}.zarr", size), list[Record]()
    with (args.folder / "infer.jsonl").open("a") as file:
        for record in measured(args, source, rounds, nets, arithmetics):
            records.append(record)
            file.write(json.dumps({**record, "device": args.device, "size": size}) + "\n")
            file.flush()
    print("\n".join(report(records)))
    return int(any("error" in record for record in records))


def volume(path: Path, size: int) -> Path:
    """A volume of random 16-bit values, which no codec makes smaller."""
    if not path.exists():
        half = path.with_suffix(".part")
        sink = opened(half, size)
        for number, place in enumerate(boxes(size)):
            shape = [side.stop - side.start for side in place]
            values = np.random.default_rng(number).normal(900, 200, shape)
            sink[place].write(values.astype("uint16")).result()
        half.rename(path)
    return path


def opened(path: Path, size: int | None = None) -> Any:
    """An array of 16 bits that is there, or a new one of this side."""
    import tensorstore as ts

    spec: dict[str, Any] = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(path)}}
    if size is None:
        return ts.open(spec).result()
    metadata = {"shape": [size] * 3, "chunks": [CHUNK] * 3, "dtype": "<u2", "compressor": None}
    return ts.open({**spec, "metadata": metadata}, create=True, delete_existing=True).result()


def boxes(size: int) -> Iterator[tuple[slice, ...]]:
    """Whole chunks, 256 cubed at most."""
    side = min(size, 256)
    for corner in np.ndindex(*[-(-size // side)] * 3):
        yield tuple(slice(i * side, min(size, (i + 1) * side)) for i in corner)


def measured(
    args: argparse.Namespace,
    source: Path,
    rounds: int,
    nets: tuple[str, ...],
    arithmetics: tuple[str, ...],
) -> Iterator[Record]:
    for number in range(rounds):
        rates = limits(args.device, source, args.work)
        for name, rate in rates.items():
            yield {"round": number, "kind": "limit", "name": name, "bytes_per_second": rate}
        for net in nets:
            # Without arithmetic all of them are one.
            for arithmetic in arithmetics if net != "identity" else arithmetics[:1]:
                for how in ("eager", "compiled") if net != "identity" else ("eager",):
                    case = {"round": number, "net": net, "arithmetic": arithmetic, "how": how}
                    limit = {"voxels_per_second": rates["copy"] / 2}  # of the net that copies
                    if net != "identity":
                        limit = alone(args, net, arithmetic, how)
                    yield {**case, "kind": "alone", **limit}
                    yield {**case, "kind": "infer", **infer(args, source, net, arithmetic, how)}


# --- limits --------------------------------------------------------------------------------------


def limits(device: str, source: Path, work: Path) -> dict[str, float]:
    """Bytes per second of reading, writing and copying the volume, and of the bus each way."""
    volume = opened(source)
    size = volume.shape[-1]
    out = opened(work / "written.zarr", size)
    values = np.random.default_rng(0).integers(0, 999, (256,) * 3, "uint16")

    def fetch(place: tuple[slice, ...]) -> Any:
        return volume[place].read().result()

    def store(place: tuple[slice, ...], array: Any = None) -> None:
        part = values[tuple(slice(side.stop - side.start) for side in place)]
        out[place].write(part if array is None else array).result()

    nbytes = 2 * size**3
    rates = {
        "read": nbytes / seconds_of(fetch, size),
        "write": nbytes / seconds_of(store, size),
        "copy": nbytes / seconds_of(lambda place: store(place, fetch(place)), size),
    }
    return {**rates, **bus(device)}


def seconds_of(work: Callable[[tuple[slice, ...]], Any], size: int) -> float:
    began = time.perf_counter()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, boxes(size)))
    return time.perf_counter() - began


def bus(device: str, nbytes: int = 2**28, times: int = 10) -> dict[str, float]:
    """Bytes per second between pinned memory and the device, each way. Nothing without a GPU."""
    if device == "cpu":
        return {}
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    there = host.to(device)
    rates = {}
    for name, (to, of) in {"up": (there, host), "down": (host, there)}.items():
        to.copy_(of, non_blocking=True)
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(times):
            to.copy_(of, non_blocking=True)
        torch.cuda.synchronize(device)
        rates[name] = times * nbytes / (time.perf_counter() - began)
    return rates


def alone(args: argparse.Namespace, net: str, arithmetic: str, how: str) -> Record:
    """What the net computes with nothing else to do, in a process of its own."""
    seconds = "0.2" if args.smoke else "10"
    words = ["--device", args.device, "--alone", net, arithmetic, how, seconds]
    return said_by([sys.executable, __file__, *words])


def compute_alone(device: str, net: str, arithmetic: str, how: str, seconds: str) -> Record:
    """Voxels of a volume per second: those that a patch owns, of a batch that stays there."""
    from torch import nn

    from penstock.inference.opening.net import GPU_BATCH
    from penstock.models.devices import CHANNELS_LAST, set_cuda_flags

    sys.path.insert(0, str(HERE))
    from models import make

    set_cuda_flags(arithmetic == "tf32")
    layout, count = CHANNELS_LAST[5], GPU_BATCH if device != "cpu" else 2
    module: nn.Module = make(net).to(device).to(memory_format=layout)
    run: Any = torch.compile(module) if how == "compiled" else module
    batch = torch.rand(count, 1, *[PATCH] * 3, device=device).to(memory_format=layout)
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(arithmetic)
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    with torch.no_grad(), torch.autocast(torch.device(device).type, half, half is not None):
        for _ in range(3):  # the first one compiles, and chooses kernels
            run(batch)
        wait()
        began, forwards = time.perf_counter(), 0
        while time.perf_counter() - began < float(seconds):
            for _ in range(4):
                run(batch)
            wait()
            forwards += 4
    took = time.perf_counter() - began
    owned = (PATCH - OVERLAP[net]) ** 3
    return {"voxels_per_second": forwards * count * owned / took}


# --- runs ----------------------------------------------------------------------------------------


def infer(args: argparse.Namespace, source: Path, net: str, arithmetic: str, how: str) -> Record:
    """A run of ``penstock infer``, and how its copies lay beside its forwards."""
    out, trace = args.work / "out.zarr", args.work / "trace.json"
    words = ["--in-spec", source, "--out-spec", out, "--model-type", f"{HERE / 'models.py'}:{net}",
             "--patch", PATCH, "--overlap", OVERLAP[net], "--chunks", CHUNK, "--overwrite",
             "--devices", args.device, "--trace", trace, "--head-kind", "intensity",
             "--normalize", "none" if net == "identity" else "global",
             *ARITHMETIC[arithmetic], *["--compile"] * (how == "compiled")]  # fmt: skip
    done = run([sys.executable, "-m", "penstock", "infer", *map(str, words)])
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    summary = json.loads((args.work / "out.zarr.penstock" / "summary.json").read_text())
    kept = args.folder / f"trace-{net}-{arithmetic}-{how}.json"
    trace.replace(kept)
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in json.loads(kept.read_text()):
        if event.get("cat") == "busy":
            span = (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
            spans.setdefault(event["name"], []).append(span)
    forwards, last = (
        sorted(spans["forward"]),
        max(end for each in spans.values() for _, end in each),
    )
    seconds = last - forwards[0][1]
    return {
        "voxels_per_second": summary["voxels"] * (1 - 1 / len(forwards)) / seconds,
        "seconds": summary["seconds"],
        "busy": {name: stage["busy"] for name, stage in summary["stages"].items()},
        "overlap": overlap_of([*spans.get("upload", ()), *spans.get("download", ())], forwards),
    }


def overlap_of(
    copies: list[tuple[float, float]], forwards: list[tuple[float, float]]
) -> float | None:
    """The share of the time of all copies in which a forward ran; None without copies. Forwards of
    one device follow each other."""
    if not copies:
        return None
    both = sum(
        max(0.0, min(end, to) - max(begin, since))
        for begin, end in copies
        for since, to in forwards
    )
    return both / sum(end - begin for begin, end in copies)


def run(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)


def said_by(words: list[str]) -> Record:
    done = run(words)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    record: Record = json.loads(done.stdout.splitlines()[-1])
    return record


# --- the report ----------------------------------------------------------------------------------


def report(records: list[Record]) -> Iterator[str]:
    """The limits, a line for each case, and how far the target is reached."""
    for name in dict.fromkeys(r["name"] for r in records if r["kind"] == "limit"):
        rates = [r["bytes_per_second"] for r in records if r.get("name") == name]
        yield f"{name:<12} {statistics.median(rates) / 1e9:.2f} GB/s"
    yield "net          arithmetic  how         Mvox/s    alone  share copies beside forwards"
    for case in dict.fromkeys(map(case_of, (r for r in records if "net" in r))):
        mine = [r for r in records if "net" in r and case_of(r) == case]
        if errors := [r["error"] for r in mine if "error" in r]:
            yield f"{case[0]:<12} {case[1]:<11} {case[2]:<9} {errors[0]}"
            continue
        runs, alones = (median_of(mine, kind) for kind in ("infer", "alone"))
        overlaps = [r["overlap"] for r in mine if r.get("overlap") is not None]
        beside = f"{statistics.median(overlaps):.0%}" if overlaps else "no copies"
        yield (
            f"{case[0]:<12} {case[1]:<11} {case[2]:<9} {runs / 1e6:>8.2f} {alones / 1e6:>8.2f} "
            f"{share_of(mine):>6.2f} {beside}"
        )
        if case[0] == "denoise_net":
            met = "met" if share_of(mine) >= OF_COMPUTE_ALONE else "missed"
            yield f"  target {OF_COMPUTE_ALONE} of compute alone: {met}"


def case_of(record: Mapping[str, Any]) -> tuple[str, str, str]:
    return record["net"], record["arithmetic"], record["how"]


def median_of(records: list[Record], kind: str) -> float:
    return statistics.median(r["voxels_per_second"] for r in records if r["kind"] == kind)


def share_of(records: list[Record]) -> float:
    """The median over rounds of a run's rate over that of computing alone."""
    rates: dict[int, Record] = {}
    for record in records:
        rates.setdefault(record["round"], {})[record["kind"]] = record["voxels_per_second"]
    return statistics.median(rate["infer"] / rate["alone"] for rate in rates.values())


if __name__ == "__main__":
    raise SystemExit(main())
