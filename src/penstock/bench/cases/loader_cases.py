"""The cases of ``penstock bench loader``, loaders x batch sizes x threads and ladder rungs; and of
``penstock bench queue``, workers x queue sizes and launches that only read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...base import BenchLoaderConfig, BenchQueueConfig, UsageError, plural
from ...instruments import Record
from ...loading import CONTENDERS
from ..launch.sweep import Launcher, ask_worker, in_turn

Case = dict[str, Any]
RUNGS = ("L1", "L2", "L3", "L4", "L5")


def loader_cases(config: BenchLoaderConfig, data: str) -> list[Case]:
    """The cases: loaders x batch sizes x threads, each once.

    Args:
        config: the knobs of the benchmark.
        data: a folder of this machine, or a URL.

    Returns:
        A case of scenario ``loader`` for each point.

    Raises:
        UsageError: a loader is not known, or a setting does not fit the data.
    """
    for name in config.loaders:
        if name not in CONTENDERS:
            raise UsageError(
                f"--loaders {name}: there is no such loader; known are {', '.join(CONTENDERS)}"
            )
    remote = "://" in data
    for flag, given, does in (
        ("--patch", config.patch, "needs a folder of this machine"),
        ("--cache cold", config.cache == "cold", "drops files of this machine"),
    ):
        if given and remote:
            raise UsageError(f"{flag} {does}, but DATA is {data}")
    common: Case = {
        "data": data if remote else str(Path(data).absolute()),
        "shuffle": config.shuffle,
        "window": config.window if config.shuffle == "block" else None,
        "seed": config.seed,
        "cache": "as-is" if remote else config.cache,
        "batches": config.batches,
        "warmup": config.warmup,
        **({"patch": list(config.patch)} if config.patch else {}),
    }
    points = itertools.product(
        dict.fromkeys(config.batch_sizes),
        dict.fromkeys(config.threads),
        dict.fromkeys(config.loaders),
    )
    return [
        {**common, "loader": loader, "batch": batch, "threads": threads}
        for batch, threads, loader in points
    ]


def checked_loader_cases(
    cases: Sequence[Case],
    config: BenchLoaderConfig,
    say: Callable[[str], None],
    launcher: Launcher = in_turn,
) -> list[Case]:
    """Add the hash of the data set to the cases; a fresh process reads it for each batch size.

    Args:
        cases: the cases, as `loader_cases` made them.
        config: the knobs of the benchmark.
        say: is called with a sentence on the cost of the order of each batch size.
        launcher: runs the processes that read it.

    Returns:
        The cases in the same order.

    Raises:
        UsageError: the data cannot be read in such batches.
    """
    answers: dict[int, Record] = {}
    for case in cases:
        if case["batch"] not in answers:
            answer = ask_worker("loader", case, config.timeout, launcher)
            answers[case["batch"]] = answer
            say(
                f"Batches of {case['batch']}, shuffle {case['shuffle']}: "
                f"{answer.facts['decoded_per_used']:.2f} bytes decoded for each that is used"
            )
            _check_enough(case, answer.facts["samples"], config)
    return [{**case, "dataset": answers[case["batch"]].case["dataset"]} for case in cases]


def _check_enough(case: Case, samples: int, config: BenchLoaderConfig) -> None:
    need = (1 + config.warmup + config.batches) * case["batch"]
    if config.cache == "cold" and need > samples:
        most = samples // case["batch"] - 1 - config.warmup
        cure = f"lower --batches to {most}" if most > 0 else "lower --batch-sizes or --warmup"
        raise UsageError(
            f"--cache cold reads each sample once: the first batch, {config.warmup} to warm up and "
            f"--batches {config.batches} at --batch-sizes {case['batch']} are "
            f"{plural(need, 'sample')}, and DATA has {samples}; {cure}"
        )


def ladder_cases(cases: Sequence[Case]) -> list[Case]:
    """The cases of the ladder: every rung for every batch size and number of threads.

    Args:
        cases: cases of scenario ``loader``.

    Returns:
        Cases of scenario ``ladder``.
    """
    points = {(case["batch"], case["threads"]): case for case in cases}.values()
    shared = [{knob: value for knob, value in case.items() if knob != "loader"} for case in points]
    return [{**case, "rung": rung} for case, rung in itertools.product(shared, RUNGS)]


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
