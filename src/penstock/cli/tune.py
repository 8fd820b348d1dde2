"""``penstock tune``: settings that pay.

``penstock tune loader DATA --step-time 0.2``: settings that keep the accelerator fed.

memory -> queues that fit -> short launches that only read, by threads -> settings as YAML
"""

from __future__ import annotations

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path

from ..base import (
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
from ..bench import case_namer, reading_alone, series_rules
from ..instruments import Ledger, available_memory
from ..reports import (
    Goal,
    ReadAlone,
    flags_of,
    readings_of,
    recommend_loader,
    write_settings_yaml,
)
from . import tune_infer
from .bench_queue import outcome
from .benchmarks import check_ledger, labelled, print_written, sweep

UTILISATION = 0.9
"""Share of the time that the accelerator must be computing: MLPerf Storage asks for 0.9 of most
workloads."""
QUEUES = (1, 2, 4, 8)
"""Queue sizes to choose from, if they fit into memory. Launches that only read use the largest that
leaves enough batches to time."""


EXAMPLES = """
penstock tune loader data/ufs --step-time 4=0.2   # a step of 4 samples takes 0.2 s
penstock tune loader data/ufs --step-time 0.2 --batch-size 4
penstock tune infer noisy.ome.zarr denoised.ome.zarr --model denoise-tiny --output fast.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = {
        "loader": "workers and queue of a loader for steps of a given time",
        "infer": "patch, batch, threads and block of an inference",
    }
    kinds = add_kinds(parser, about)
    tune_infer.add_arguments(kinds["infer"])
    loader = kinds["loader"]
    loader.add_argument("data", metavar="DATA", help="a packed data set, or an array")
    add_flags(loader, TuneLoaderConfig, config_file=True)


def run(args: argparse.Namespace) -> int:
    """Run the verb. Returns exit code 0 with settings, 1 if none keep the accelerator fed."""
    if args.kind == "infer":
        return tune_infer.run(args)
    config = from_flags(TuneLoaderConfig, args, args.config)

    ledger = Ledger(config.ledger or config.output.with_suffix(".ledger"))
    check_ledger(ledger, [Path(args.data)])
    labelled(ledger, config, f"tune-loader-{Path(args.data).stem}")
    read = [Path(args.data), ledger.path]
    check_outputs(("--output", config.output), replace=config.overwrite, inputs=read)
    goal = Goal(config.step_time[1], config.batch, UTILISATION)
    fit = fitting(args.data, config, max(threads_of(config)))
    print(f"Batches of {goal.batch}, steps of {format_seconds(goal.step_s)}:")
    reads = _readings(args.data, config, max(fit.memory), ledger)
    advice = recommend_loader(reads, goal, list(fit.memory), fit.batch_bytes)
    settings = advice.settings
    if settings is None:
        threads = min(reads, key=lambda reading: reading.interval.value).workers
        limit = f"penstock bench loader {shlex.quote(args.data)} --loaders penstock"
        limit += f" --batch-sizes {goal.batch} --threads {threads} --shuffle {config.shuffle}"
        if config.patch:
            limit += f" --patch {' '.join(map(str, config.patch))}"
        print("", *advice.sentences, "", "Which step of reading limits it:", f"  {limit}", sep="\n")
        print_written([ledger.path])
        return 1
    if config.missing != "error":  # the default of a loader
        settings = {**settings, "missing": config.missing}
    build(LoaderConfig, settings)  # check that a loader takes these settings
    memory = format_bytes(fit.memory[settings["queue"]])
    sentences = (*advice.sentences, f"In all the loader takes {memory} of memory.")
    write_settings_yaml("--output", settings, sentences, config.output, config.overwrite)
    flags = flags_of(settings, goal.step_s, args.data)
    print("", *sentences, "", "As flags:", *(f"  {line}" for line in flags), sep="\n")
    print_written([config.output, ledger.path])
    return 0


def _readings(data: str, config: TuneLoaderConfig, deepest: int, ledger: Ledger) -> list[ReadAlone]:
    """Measure how fast batches come while nothing computes, for each number of threads."""
    queue = min(deepest, config.batches // 3)
    iterations = config.batches + queue + 1
    cases = [
        reading_alone(
            data,
            workers=workers,
            queue=queue,
            batch=config.batch,
            iterations=iterations,
            shuffle=config.shuffle,
            seed=config.seed,
            missing=config.missing,
            patch=config.patch,
        )
        for workers in threads_of(config)
    ]
    records = sweep(
        "queue",
        cases,
        config,
        ledger,
        rules=series_rules(iterations),
        name=case_namer(cases, "workers"),
        outcome=outcome,
        launches=config.launches,
    )
    if not (reads := readings_of(records)):
        failure = next((record.error for record in records if record.error is not None), None)
        raise UsageError(f"{data}: {failure.message if failure else 'nothing was measured'}")
    return reads


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
    """The queues that fit into memory."""

    batch_bytes: int
    memory: dict[int, int]
    """Total bytes of memory that a loader takes, by queue size."""


def fitting(data: str, config: TuneLoaderConfig, threads: int) -> Fit:
    """The queues that fit. Raises `UsageError` if none does, or if the data has fewer samples."""
    from ..loading import Loader

    batch, memory = config.batch, config.max_memory or available_memory() // 2
    with Loader(
        data, batch_size=batch, workers=threads, shuffle=config.shuffle, patch=config.patch
    ) as loader:
        size, samples, engine = loader.batch_bytes, loader.order.num_items, loader.engine
        if batch > samples:
            raise UsageError(f"--batch-size {batch} is more than the {samples} samples of {data}")
        taken = {
            n: (n + 1) * size + engine.scratch_bytes + engine.bytes_in_flight(batch, n)
            for n in QUEUES
        }
    fits = {n: total for n, total in taken.items() if total <= memory}
    if not fits:
        raise UsageError(
            f"--max-memory {format_bytes(memory)} holds no two batches of {batch} samples, "
            f"{format_bytes(size)} each, and what reading them takes: give a smaller --batch-size"
        )
    return Fit(size, fits)
