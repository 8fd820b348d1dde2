"""Runs, logs and folders of scaling studies that never were, and how tests read them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.base import TRAIN_DEFAULTS, TrainConfig, build
from penstock.cli import main
from penstock.cluster.place import Place
from penstock.scaling import Study, scaling_sections, studies
from penstock.scaling.runs import A_GPU, Rank, TrainingRun
from penstock.scaling.sources.slurm_log import read_log
from penstock.training.log_lines import first_lines, last_lines

SEED = {1: 362.45, 4: 95.23, 8: 57.14}
"""Devices and seconds of the seed's table."""
NODES = {1: 1, 2: 1, 4: 1, 8: 2, 16: 4, 32: 8}
LOSS = {1: 0.1187, 4: 0.1192, 8: 0.1190}
ACCURACY = {1: 0.9530, 4: 0.9525, 8: 0.9527}


def run(devices: int = 1, seconds: float | None = 10.0, **fields: Any) -> TrainingRun:
    """A run of a hybrid study: 10,000 samples, 32 on each device."""
    given: dict[str, Any] = {
        "source": f"slurm-{devices}.out",
        "job": str(100 + devices),
        "name": "spiral",
        "devices": devices,
        "nodes": NODES.get(devices, 1),
        "seconds": seconds,
        "epochs": 50,
        "planned_epochs": 50,
        "samples": 10000,
        "batch": 32,
        "global_batch": 32 * devices,
        "device": A_GPU,
    }
    return TrainingRun(**(given | fields))


def seed_runs() -> list[TrainingRun]:
    settings = {"workload": "spiral_mlp", "hidden layers": "[64, 32, 16]"}
    return [
        run(
            n,
            seconds,
            job=str(123456 + i),
            epoch_seconds=round(seconds / 50, 2),
            val_loss=LOSS[n],
            val_acc=ACCURACY[n],
            settings=settings,
        )
        for i, (n, seconds) in enumerate(SEED.items())
    ]


def repeated(
    speedup: Callable[[float], float],
    sizes: tuple[int, ...],
    runs: int = 5,
    noise: float = 0.01,
    seed: int = 0,
    **fields: Any,
) -> list[TrainingRun]:
    """Runs whose true speed-up is known, each with its noise."""
    rng = np.random.default_rng(seed)
    return [
        run(n, 1000 / speedup(n) * rng.lognormal(0, noise), job=f"{n}-{i}", **fields)
        for n in sizes
        for i in range(runs)
    ]


def only(runs: list[TrainingRun], anyway: bool = False) -> Study:
    (study,) = studies(runs, anyway)
    return study


def sentences(runs: list[TrainingRun]) -> str:
    (section,) = scaling_sections(only(runs))
    return "\n".join(section.sentences)


def phased(devices: int, seconds: float, **phases: float) -> TrainingRun:
    """A run of 100 s of steps on each rank, split by phases."""
    totals = {"step": sum(phases.values()), **phases}
    return run(devices, seconds, ranks=tuple(Rank(i, totals) for i in range(devices)))


def log(
    job: str,
    devices: int,
    seconds: float | None,
    *,
    nodes: int = 1,
    epochs: int = 50,
    batch: int = 32,
    samples: int = 10000,
    ranks: int = 1,
    done: int | None = None,
    first: int = 0,
    rate: str = "0.001",
    end: str = "",
) -> str:
    """What the seed's training prints, every rank's blocks and a bar of progress."""
    head = (
        f"SLURM Job Information\nJob ID: {job}              Job Name: mlp\nNode(s): raven0123\n"
        f"Number of nodes: {nodes}          Number of tasks: {devices}            "
        f"Tasks per node: {devices // nodes}      CPUs per task: 18\n"
    )
    block = (
        "=" * 70 + "\nENVIRONMENT INFORMATION\n" + f"  SLURM_JOB_ID: {job}\n  WORLD_SIZE: 1\n"
        "  GPU 0: NVIDIA A100-SXM4-40GB\n"
        f"Max epochs: {epochs}\nBatch size (per GPU): {batch}\nLearning rate: {rate}\n"
        f"Hidden dimensions: [64, 32, 16]\nNumber of samples: {samples}\n\n"
        f"Effective batch size (batch_size × num_gpus): {batch * devices}\nStarting training...\n"
    )
    steps = max(1, round(0.7 * samples / batch / devices))
    bars = "".join(
        f"\rEpoch {e}:  50%|█████     | {steps // 2}/{steps} [00:01<00:01, 99it/s, v_num=1]"
        f"\rEpoch {e}: 100%|██████████| {steps}/{steps} [00:02<00:00, 99it/s, v_num=1, "
        f"val_loss=0.{200 - min(e, 80):03d}, val_acc=0.{900 + min(e, 53):03d}]\x1b[A\n"
        for e in range(first, epochs if done is None else done)
    )
    tail = ""
    if seconds is not None:
        for rank in range(ranks):
            elapsed = seconds - 0.1 * rank
            tail += (
                f"\nTRAINING COMPLETE\nTotal training time: {elapsed:.2f} seconds "
                f"({elapsed / 60:.2f} minutes)\nTime per epoch: {elapsed / epochs:.2f} seconds\n"
                "Best checkpoint: outputs/spiral_mlp-epoch=42-val_loss=0.1187.ckpt\n"
                "Best validation loss: 0.1187\n"
            )
    return head + block * ranks + bars + tail + end


def results(
    devices: int,
    seconds: float,
    *,
    samples: int = 7008,
    batch: int = 32,
    epochs: int = 3,
    job: str | None = None,
    nodes: int = 1,
    phases: Mapping[str, float] | None = None,
    status: str = "complete",
) -> dict[str, Any]:
    """`training_results.json`; ``phases`` are seconds of a step."""
    steps = epochs * -(-samples // (batch * devices))
    by_phase = {
        name: {"total_s": each * steps, "median_s": each} for name, each in (phases or {}).items()
    }
    if by_phase:
        step = sum(phases.values()) if phases else 0.0
        by_phase["step"] = {"total_s": step * steps, "median_s": step}
    return {
        "workload": "spiral",
        "status": status,
        "parameters": 2834,
        "device": "cpu",
        "world_size": devices,
        "batch_size": batch,
        "global_batch_size": batch * devices,
        "epochs": epochs,
        "steps": steps,
        "samples": samples * epochs,
        "training_s": seconds,
        "validation_s": 0.5,
        "history": [{"epoch": e, "val_loss": 0.7 - e / 100, "val_acc": 0.5} for e in range(epochs)],
        "ranks": [{"rank": rank, "host": "n1", "phases": by_phase} for rank in range(devices)],
        "launch": {"nodes": nodes, "job_id": job, "job_name": None, "restarts": 0},
    }


def write(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    paths = [folder / name for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    return paths


def run_folder(path: Path, document: dict[str, Any], epochs: int = 3, **args: Any) -> Path:
    path.mkdir(parents=True)
    (path / "training_results.json").write_text(json.dumps(document))
    asked = {"epochs": epochs, "learning_rate": 0.001, "max_steps": None} | args
    (path / "args.json").write_text(json.dumps(asked))
    return path


def our_log(facts: dict[str, Any], environ: dict[str, str], **knobs: Any) -> str:
    """What `penstock train spiral` prints where no terminal is."""
    given = {"epochs": facts["epochs"], "batch_size": facts["batch_size"], "learning_rate": 0.001}
    config = build(TrainConfig, TRAIN_DEFAULTS["spiral"], given, knobs)
    place = Place(world_size=facts["world_size"], nodes=facts["launch"]["nodes"])
    lines = first_lines("spiral", config, place, environ)
    return "\n".join([*lines, *last_lines({**facts, "best": None}, Path("out"))]) + "\n"


MEASURED = (
    "spiral: 2,834 parameters, 2 x cpu, 132 steps of 64 samples\n"
    "8,360 samples/s: 8,400 samples in 1.00 s, and 90.1 ms of validation\n"
    "rank 0: 5.00 ms a step: data_wait 11%, transfer 1%, forward 11%, backward 17%, "
    "communication 50%, optimizer 10%\n"
    "rank 0: at most 421 MiB of host memory\n"
    "rank 1: 1.25 s a step: data_wait 40%, communication 40%, unheard 20%\n"
)
"""What our own training prints before its times."""


def one(path: Path) -> TrainingRun:
    (run,) = read_log(path)
    return run


def read_text(folder: Path, text: str, name: str = "slurm-77.out") -> list[TrainingRun]:
    (path,) = write(folder, {name: text})
    return read_log(path)


def seed_logs(folder: Path) -> list[Path]:
    """The seed's three jobs as their logs."""
    jobs = ((1, 362.45, 1), (4, 95.23, 1), (8, 57.14, 2))
    return write(
        folder,
        {
            f"slurm-{123456 + i}.out": log(str(123456 + i), n, seconds, nodes=nodes, ranks=n)
            for i, (n, seconds, nodes) in enumerate(jobs)
        },
    )


def said(argv: list[str], capsys) -> tuple[int, str, str]:
    code = main(["scaling", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def weak(n: int, seconds: float) -> TrainingRun:
    return run(n, seconds, samples=10000 * n, job=f"w{n}")


def strong(n: int, seconds: float) -> TrainingRun:
    return run(n, seconds, batch=32 // n, global_batch=32, job=f"s{n}")
