"""``penstock tune loader DATA --step-time 0.2``: settings that keep the accelerator fed.

for each batch, from the smallest on:
    memory -> queues that fit -> short launches that only read, by threads -> fed? settings as YAML
and if none is fed:                           the ladder's rungs -> the ceiling in a sentence
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base import (
    BenchLoaderConfig,
    LoaderConfig,
    TuneLoaderConfig,
    UsageError,
    add_flags,
    add_kinds,
    build,
    check_outputs,
    format_bytes,
    format_seconds,
    from_flags,
    usable_cores,
)
from ..bench import (
    ladder_cases,
    loader_case_name,
    loader_cases,
    loader_rules,
    queue_case_name,
    queue_rules,
    reading_alone,
)
from ..instruments import Ledger, Record, available_memory
from ..reports import (
    CEILINGS,
    Advice,
    BatchTrial,
    Goal,
    fastest_rungs,
    flags_of,
    join_readings,
    loader_cells,
    nearest_of,
    readings_of,
    recommend_batch,
    rungs_slower_than_whole,
    step_of,
    write_loader_yaml,
)
from .bench_queue import outcome
from .benchmarks import Name, check_ledger, labelled, print_written, sweep

LEAST_LAUNCHES = 3
"""Fewest launches of each part of a loader before one part is called the ceiling."""
UTILISATION = 0.9
"""Share of the time that the accelerator must be computing: MLPerf Storage asks for 0.9 of most
workloads."""
QUEUES = (1, 2, 4, 8)
"""Queue sizes to choose from, if they fit into memory. Launches that only read use the largest that
leaves enough batches to time."""


EXAMPLES = """
penstock tune loader data/ufs --step-time 0.2
penstock tune loader data/ufs --step-time 4=0.05 16=0.15   # the time of a step, by its batch
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "workers, queue and batch of a loader for steps of a given time"
    loader = add_kinds(parser, {"loader": about})["loader"]
    loader.add_argument("data", metavar="DATA", help="a packed data set, or an array")
    add_flags(loader, TuneLoaderConfig, config_file=True)


def run(args: argparse.Namespace) -> int:
    """Run the verb. Returns exit code 0 with settings, 1 if none keep the accelerator fed."""
    config = from_flags(TuneLoaderConfig, args, args.config)

    ledger = Ledger(config.ledger or config.output.with_suffix(".ledger"))
    check_ledger(ledger, [Path(args.data)])
    labelled(ledger, config, f"tune-loader-{Path(args.data).stem}")
    read = [Path(args.data), ledger.path]
    check_outputs(("--output", config.output), replace=config.overwrite, inputs=read)
    tried: list[BatchTrial] = []
    for fit in fitting(args.data, config, max(threads_of(config))):
        tried.append(_measure(args.data, config, fit, ledger))
        if tried[-1].advice().settings is not None:
            break
    advice = recommend_batch(tried)
    if advice.settings is None and nearest_of(tried).behind > 1:
        advice = _with_ceiling(args.data, config, tried, ledger)
    if advice.settings is None:
        print("", *advice.sentences, "", f"Written: {ledger.path}", sep="\n")
        return 1
    if config.missing != "error":  # the default of a loader
        advice = replace(advice, settings={**advice.settings, "missing": config.missing})
    assert advice.settings is not None
    build(LoaderConfig, advice.settings)  # check that a loader takes these settings
    write_loader_yaml(advice, config.output, config.overwrite)
    batch = advice.settings["batch_size"]
    step_s = next(each.goal.step_s for each in tried if each.goal.batch == batch)
    flags = flags_of(advice.settings, step_s, args.data)
    print("", *advice.sentences, "", "As flags:", *(f"  {line}" for line in flags), sep="\n")
    print_written([config.output, ledger.path])
    return 0


def _measure(data: str, config: TuneLoaderConfig, fit: Fit, ledger: Ledger) -> BatchTrial:
    """Measure how fast batches of one size come, for each number of threads."""
    step_s, given_batch = step_of(fit.batch, config.steps)
    print(f"Batches of {fit.batch}, steps of {format_seconds(step_s)}:")
    records = _read_alone(data, config, threads_of(config), fit.batch, max(fit.memory), ledger)
    reads = readings_of(records)
    if not reads:
        failure = next((record.error for record in records if record.error is not None), None)
        raise UsageError(f"{data}: {failure.message if failure else 'nothing was measured'}")
    goal = Goal(step_s, fit.batch, UTILISATION)
    given_s = config.steps[given_batch]
    return BatchTrial(goal, given_batch, given_s, fit.batch_bytes, fit.memory, reads)


def threads_of(config: TuneLoaderConfig) -> list[int]:
    """The numbers of threads to try: 1, 2, 4, ... and the largest allowed.

    >>> threads_of(TuneLoaderConfig(step_time=1, threads_up_to=6))
    [1, 2, 4, 6]
    """
    most = config.threads_up_to or usable_cores()
    powers = [2**n for n in range(most.bit_length())]
    return [*(count for count in powers if count < most), most]


@dataclass(frozen=True)
class Fit:
    """A batch size with the queues that fit into memory."""

    batch: int
    batch_bytes: int
    memory: dict[int, int]
    """Total bytes of memory that a loader takes, by queue size."""


def fitting(data: str, config: TuneLoaderConfig, threads: int) -> list[Fit]:
    """The batches to try, smallest first.

    Batches that do not fit into memory are left out, and a line says so. If none fits, the smallest
    is halved until it fits. Raises `UsageError` if not even a batch of one sample fits.
    """
    memory = config.max_memory or available_memory() // 2
    asked = config.candidates
    tried = [fit for batch in asked if (fit := _fit(data, config, batch, threads, memory))]
    fits = [fit for fit in tried if fit.memory]
    if len(fits) < len(tried):
        sizes = ", ".join(str(fit.batch) for fit in tried if not fit.memory)
        print(f"Batches of {sizes} do not fit into {format_bytes(memory)} and are left out.")
    batch = asked[0]
    while not fits:
        batch //= 2
        fit = _fit(data, config, max(batch, 1), threads, memory)
        assert fit is not None
        if fit.memory:
            print(f"Batches of {batch} do fit.")
            fits = [fit]
        elif batch <= 1:
            raise UsageError(
                f"--max-memory {format_bytes(memory)} holds no two batches of one sample, "
                f"{format_bytes(fit.batch_bytes)} each, and what reading them takes"
            )
    return fits


def _fit(data: str, config: TuneLoaderConfig, batch: int, threads: int, memory: int) -> Fit | None:
    """The queues that fit for a batch size. If the data has fewer samples: None, or `UsageError` if
    the user gave the size."""
    from ..loading import Loader

    with Loader(
        data, batch_size=batch, workers=threads, shuffle=config.shuffle, patch=config.patch
    ) as loader:
        size, samples, engine = loader.batch_bytes, loader.order.num_items, loader.engine
        if batch > samples:
            if "batch_size" in config.model_fields_set or batch in dict(config.step_time):
                raise UsageError(
                    f"--batch-size {batch} is more than the {samples} samples of {data}"
                )
            return None
        taken = {
            n: (n + 1) * size + engine.scratch_bytes + engine.bytes_in_flight(batch, n)
            for n in QUEUES
        }
    return Fit(batch, size, {n: total for n, total in taken.items() if total <= memory})


def _read_alone(
    data: str,
    config: TuneLoaderConfig,
    threads: Sequence[int],
    batch: int,
    deepest: int,
    ledger: Ledger,
) -> list[Record]:
    queue = min(deepest, config.batches // 3)
    iterations = config.batches + queue + 1
    cases = [
        reading_alone(
            data,
            workers=workers,
            queue=queue,
            batch=batch,
            iterations=iterations,
            shuffle=config.shuffle,
            seed=config.seed,
            missing=config.missing,
            patch=config.patch,
        )
        for workers in threads
    ]
    return _sweep("queue", cases, config, ledger, queue_rules(iterations), queue_case_name)


def _with_ceiling(
    data: str, config: TuneLoaderConfig, tried: list[BatchTrial], ledger: Ledger
) -> Advice:
    """The advice, with the ceiling of the batch size that comes nearest to being fed.

    If a part of the loader took longer than the whole, other work disturbed one of the launches, so
    both are launched again.
    """
    nearest = nearest_of(tried)
    batch, workers = nearest.goal.batch, nearest.fastest.workers
    # Reading files may need more threads than the fastest loader has.
    threads = sorted({workers, max(threads_of(config))})
    config = config.model_copy(update={"launches": max(config.launches, LEAST_LAUNCHES)})
    records = _ladder(data, config, threads, batch, ledger)
    rungs = fastest_rungs(loader_cells(records, "ladder"))
    if rungs_slower_than_whole(rungs, nearest.fastest):
        print("A part of the loader took longer than the whole, so both are launched again:")
        more = _read_alone(data, config, [workers], batch, max(nearest.memory), ledger)
        reads = join_readings(nearest.reads, readings_of(more))
        tried[tried.index(nearest)] = replace(nearest, reads=reads)
        records += _ladder(data, config, threads, batch, ledger)
        rungs = fastest_rungs(loader_cells(records, "ladder"))
    return recommend_batch(tried, rungs)


def _ladder(
    data: str, config: TuneLoaderConfig, threads: Sequence[int], batch: int, ledger: Ledger
) -> list[Record]:
    """Launch reading, decoding and scattering alone if DATA is a packed data set on this
    machine."""
    if not Path(data, "dataset.json").is_file():
        return []
    whole = build(
        BenchLoaderConfig,
        {"loaders": "penstock", "batch_sizes": batch, "threads": threads, "cache": "as-is"},
        {"batches": config.batches, "warmup": 1, "shuffle": config.shuffle},
        {"seed": config.seed, "patch": config.patch},
    )
    cases = ladder_cases(loader_cases(whole, data), tuple(CEILINGS))
    rules = loader_rules(config.batches, warmup=1)
    return _sweep("ladder", cases, config, ledger, rules, lambda c: f"ladder {loader_case_name(c)}")


def _sweep(
    scenario: str,
    cases: list[dict[str, Any]],
    config: TuneLoaderConfig,
    ledger: Ledger,
    rules: Mapping[str, Any],
    name: Name,
) -> list[Record]:
    return sweep(
        scenario,
        cases,
        config,
        ledger,
        rules=rules,
        name=name,
        outcome=outcome,
        launches=config.launches,
    )
