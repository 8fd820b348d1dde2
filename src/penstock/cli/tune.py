"""``penstock tune loader DATA --step-time 0.2``: the least that keeps the accelerator fed.

memory -> queues that fit -> short launches that only read, by threads -> settings as YAML
                                          or the ladder's rungs -> the ceiling in a sentence
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from ..config import LoaderConfig, TuneLoaderConfig, add_flags, build, from_flags
from ..errors import UsageError
from ..flow import usable_cores
from ..units import format_bytes, format_seconds
from . import bench_queue
from .bench import shown_progress, writable

if TYPE_CHECKING:
    from ..ledger import Ledger
    from ..loader_report import LoaderCell
    from ..record import Record

QUEUES = (1, 2, 4, 8)
"""Of these, as many as fit into memory. The launches that only read have ahead of them the deepest
that leaves them enough batches to be timed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    about = "workers, queue and batch of a loader for steps of a given time"
    loader = kinds.add_parser("loader", help=about, description=about, allow_abbrev=False)
    loader.add_argument("data", metavar="DATA", help="a packed data set, or an array")
    loader.add_argument("--config", type=Path, metavar="FILE.yaml", help="settings; flags win")
    add_flags(loader, TuneLoaderConfig)


def run(args: argparse.Namespace) -> int:
    """0 with settings, 1 where nothing keeps the accelerator fed."""
    config = from_flags(TuneLoaderConfig, args, args.config)
    from .. import loader_tune
    from ..ledger import Ledger

    ledger = Ledger(config.ledger or config.output.with_suffix(".ledger"))
    writable(("--output", config.output), ("--ledger", ledger.path))
    threads = threads_of(config)
    batch, batch_bytes, queues = fitting(args.data, config, max(threads))
    # A smaller batch is a shorter step, in proportion.
    step_s = config.step_time * batch / config.batch_size
    goal = loader_tune.Goal(step_s, batch, config.utilisation)
    if batch < config.batch_size:
        print(
            f"Batches of {config.batch_size} do not fit; batches of {batch} do, for which a step "
            f"of {format_seconds(config.step_time)} is taken to last {format_seconds(step_s)}."
        )
    records = _read_alone(args.data, config, threads, batch, max(queues), ledger)
    reads = loader_tune.readings(records)
    if not reads:
        failure = next((record.error for record in records if record.error is not None), None)
        raise UsageError(f"{args.data}: {failure.message if failure else 'nothing was measured'}")
    advice = loader_tune.recommend_loader(reads, goal, queues, batch_bytes)
    if advice.settings is None:
        best = min(reads, key=lambda reading: reading.interval.value)
        rungs: dict[str, LoaderCell] = {}
        if best.interval.value > goal.most_s:
            rungs = _ladder(args.data, config, best.workers, batch, ledger)
        advice = loader_tune.recommend_loader(reads, goal, queues, batch_bytes, rungs)
        print("", *advice.sentences, "", f"Written: {ledger.path}", sep="\n")
        return 1
    build(LoaderConfig, advice.settings)  # what is written is what a loader takes
    loader_tune.write_yaml(advice, config.output)
    written = [config.output, ledger.path]
    print("", *advice.sentences, "", *(f"Written: {path}" for path in written), sep="\n")
    return 0


def threads_of(config: TuneLoaderConfig) -> list[int]:
    """1, 2, 4, ... and the most.

    >>> threads_of(TuneLoaderConfig(step_time=1, threads_up_to=6))
    [1, 2, 4, 6]
    """
    most = config.threads_up_to or usable_cores()
    powers = [2**n for n in range(most.bit_length())]
    return [*(count for count in powers if count < most), most]


def fitting(data: str, config: TuneLoaderConfig, threads: int) -> tuple[int, int, list[int]]:
    """The batch size, the bytes of a batch, and the queues that fit into memory.

    The batch is halved until at least a queue of one fits. Raises `UsageError` where none does.
    """
    from ..loader import Loader

    memory = config.max_memory or psutil.virtual_memory().available // 2
    batch = config.batch_size
    while True:
        with Loader(data, batch_size=batch, workers=threads, shuffle=config.shuffle) as loader:
            batch_bytes, samples = loader.batch_bytes, loader.order.num_samples
            engine = loader.engine
            scratch = {n: engine.scratch_bytes + engine.bytes_in_flight(batch, n) for n in QUEUES}
        if batch > samples:
            raise UsageError(f"--batch-size {batch} is more than the {samples} samples of {data}")
        queues = [n for n in QUEUES if (n + 1) * batch_bytes + scratch[n] <= memory]
        if queues:
            return batch, batch_bytes, queues
        if batch == 1:
            raise UsageError(
                f"--max-memory {format_bytes(memory)} holds no two batches of one sample, "
                f"{format_bytes(batch_bytes)} each, and {format_bytes(scratch[1])} of scratch"
            )
        batch //= 2


def _read_alone(
    data: str,
    config: TuneLoaderConfig,
    threads: Sequence[int],
    batch: int,
    deepest: int,
    ledger: Ledger,
) -> list[Record]:
    queue = min(deepest, config.batches // 3)
    cases = [
        bench_queue.reading_alone(
            data,
            workers=workers,
            queue=queue,
            batch=batch,
            iterations=config.batches + queue + 1,
            shuffle=config.shuffle,
            seed=config.seed,
        )
        for workers in threads
    ]
    return _sweep("queue", cases, config, ledger, cases[0]["iterations"])


def _ladder(
    data: str, config: TuneLoaderConfig, workers: int, batch: int, ledger: Ledger
) -> dict[str, LoaderCell]:
    """Files, decode and scatter, where DATA is a packed data set on this machine."""
    from .. import loader_report, loader_tune

    if not Path(data, "dataset.json").is_file():
        return {}
    common = {
        "data": str(Path(data).absolute()),
        "shuffle": config.shuffle,
        "window": None,
        "seed": config.seed,
        "cache": "as-is",
        "batches": config.batches,
        "warmup": 1,
        "endpoint": None,
        "latency_ms": 0.0,
        "batch": batch,
        "threads": workers,
    }
    cases = [{**common, "rung": rung} for rung in loader_tune.CEILINGS]
    records = _sweep("ladder", cases, config, ledger, config.batches, warmup=1)
    return {str(cell.case["rung"]): cell for cell in loader_report.cells(records, "ladder")}


def _sweep(
    scenario: str,
    cases: list[dict[str, Any]],
    config: TuneLoaderConfig,
    ledger: Ledger,
    series: int,
    warmup: int = 0,
) -> list[Record]:
    from ..sweep import sweep

    naming = bench_queue.name_of if scenario == "queue" else _rung
    with shown_progress(naming, bench_queue.outcome) as progress:
        return sweep(
            scenario,
            cases,
            config.launches,
            ledger,
            rules=bench_queue.rules(series) | {"warmup_samples": warmup},
            timeout_s=config.timeout,
            memory_limit=None,
            seed=config.seed,
            resume=False,
            progress=progress,
        )


def _rung(case: Any) -> str:
    return f"ladder {case['rung']}, batch {case['batch']}, {case['threads']} threads"
