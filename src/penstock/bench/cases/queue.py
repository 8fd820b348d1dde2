"""The cases of ``penstock bench queue``: workers x queue sizes, and launches that only read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...base import BenchQueueConfig, UsageError
from ...instruments import Record

Case = dict[str, Any]


def queue_cases(data: str, config: BenchQueueConfig) -> list[Case]:
    """The cases: for each number of workers one that only reads, then one for each queue size.

    Args:
        data: a folder of this machine, or a URL.
        config: the knobs of the benchmark.

    Returns:
        Cases of scenario ``queue``.

    Raises:
        UsageError: the folder does not exist, or there are too few iterations.
    """
    if "://" not in data and not Path(data).exists():
        raise UsageError(f"{data}: there is no such folder")
    deepest = max(config.queue_sizes)
    if config.iterations < deepest + 4:
        raise UsageError(
            f"--iterations {config.iterations} must be 4 more at least than the deepest of "
            f"--queue-sizes, {deepest}: all of that is read beforehand"
        )
    step = {"compute": "sleep", "compute_time": config.compute_time}
    cases: list[Case] = []
    for workers in dict.fromkeys(config.workers):
        alone = reading_alone(
            data,
            workers=workers,
            queue=deepest,
            batch=config.batch_size,
            iterations=config.iterations,
            shuffle=config.shuffle,
            seed=config.seed,
            missing=config.missing,
        )
        sizes = dict.fromkeys(config.queue_sizes) if workers else (0,)
        cases += [alone, *({**alone, **step, "queue": size} for size in sizes)]
    return cases


def reading_alone(
    data: str,
    *,
    workers: int,
    queue: int,
    batch: int,
    iterations: int,
    shuffle: str,
    seed: int,
    missing: str,
    patch: Sequence[int] | None = None,
) -> Case:
    """A case that only reads, with a queue so deep that its workers never wait for room.

    Args:
        data: a folder of this machine, or a URL.
        workers: the number of threads that read; 0 if the step reads by itself.
        queue: the number of batches that may be prefetched.
        batch: the samples of a batch.
        iterations: the batches that are timed.
        shuffle: the order of samples: ``none``, ``sample``, ``block`` or ``global``.
        seed: the random seed of the order.
        missing: how to treat a missing chunk: ``error`` or ``fill``.
        patch: the shape of a patch, if samples are cut into patches.

    Returns:
        A case of scenario ``queue``.
    """
    return {
        **({"patch": list(patch)} if patch else {}),
        "data": data,
        "batch": batch,
        "iterations": iterations,
        "shuffle": shuffle,
        "seed": seed,
        "missing": missing,
        "compute": "none",
        "compute_time": 0.0,
        "workers": workers,
        "queue": queue if workers else 0,
    }


def lacks_package(record: Record) -> bool:
    """Whether a launch failed only because a package is not installed; see `errors.require`.

    All cases read the same data with the same loader, so any other status ``unsupported`` is a
    mistake in the command.
    """
    said = record.error.message if record.error is not None else ""
    return record.status == "unsupported" and "run: pip install" in said
