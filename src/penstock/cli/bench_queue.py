"""``penstock bench queue DATA``: what a queue between a loader and a step does, and what it cannot.

workers x queue sizes -> cases, and for each number of workers one that only reads
    -> sweep -> CSV, table beside the model's and the seed's, figure
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base import (
    BenchQueueConfig,
    PenstockError,
    UsageError,
    add_flags,
    format_seconds,
    from_flags,
)
from ..instruments import Record
from ..models import check_model_name as check_model

Case = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", metavar="DATA", help="a packed data set, or an array")
    parser.add_argument("--config", type=Path, metavar="FILE.yaml", help="settings; flags win")
    add_flags(parser, BenchQueueConfig)


def run(args: argparse.Namespace) -> int:
    config = from_flags(BenchQueueConfig, args, args.config)
    check_model(config.model, "--model")
    from ..base import check_outputs
    from ..bench import ask_worker, launches_of, run_sweep
    from ..instruments import Ledger
    from ..reports import QUEUE_NEEDS, append_queue_csv, in_text, queue_sections
    from .bench import check_csv, check_ledger, make_way
    from .progress import shown_progress

    cases = cases_of(args.data, config)
    if not config.output.name:
        raise UsageError(f"--output {config.output} cannot be written: it names no file")
    ledger = Ledger(config.ledger or config.output.with_suffix(".ledger"))
    check_csv(config.output, config.replace, QUEUE_NEEDS)
    figure = config.output.with_suffix(".png")
    check_outputs(("the figure of --output", figure), replace=config.replace)
    check_ledger(ledger)
    answer = ask_worker("queue", cases[0], config.timeout)
    if answer.error is not None:  # data that cannot be read in such batches
        raise PenstockError(answer.error.message)
    launches = launches_of(config.effort)
    print(
        f"{len(cases)} cases, {launches} launch{'es' * (launches != 1)} of each, "
        f"{config.iterations} iterations in each"
    )
    with shown_progress(name_of, outcome) as progress:
        records = run_sweep(
            "queue",
            cases,
            launches,
            ledger,
            rules=rules(config.iterations),
            timeout_s=config.timeout,
            memory_limit=None,
            seed=config.seed,
            resume=config.resume,
            progress=progress,
        )
    make_way(config.output, config.replace, QUEUE_NEEDS)
    append_queue_csv(records, config.output)
    print("", *in_text(queue_sections(records)), sep="\n")
    written = [config.output, ledger.path, *_figures(config.output, config.replace)]
    print("", *(f"Written: {path}" for path in written), sep="\n")
    return int(any(not record.ok and not _lacks_package(record) for record in records))


def _lacks_package(record: Record) -> bool:
    """Whether a launch said no more than that a package is not installed; see `errors.require`.

    All cases read the same data with the same loader, so that whatever else is unsupported is a
    mistake of who asked.
    """
    said = record.error.message if record.error is not None else ""
    return record.status == "unsupported" and "run: pip install" in said


def cases_of(data: str, config: BenchQueueConfig) -> list[Case]:
    """For each number of workers one case that only reads, then one for each size of the queue."""
    if "://" not in data and not Path(data).exists():
        raise UsageError(f"{data}: there is no such folder")
    train = config.compute == "train"
    common: Case = {
        "data": data,
        "batch": config.batch_size,
        "iterations": config.iterations,
        "shuffle": config.shuffle,
        "seed": config.seed,
        "missing": config.missing,
        "model": config.model if train else None,
        "tile": config.tile_size if train else None,
        "device": config.device if train else "cpu",
        **({"trust_model": True} if config.trust_model else {}),
    }
    beside = {"compute": config.compute, "compute_time": None if train else config.compute_time}
    deepest = max(config.queue_sizes)
    if config.iterations < deepest + 4:
        raise UsageError(
            f"--iterations {config.iterations} must be 4 more at least than the deepest of "
            f"--queue-sizes, {deepest}: all of that is read beforehand"
        )
    cases: list[Case] = []
    for workers in dict.fromkeys(config.workers):
        sizes = dict.fromkeys(config.queue_sizes) if workers else (0,)
        cases.append(
            reading_alone(
                data,
                workers=workers,
                queue=deepest,
                batch=config.batch_size,
                iterations=config.iterations,
                shuffle=config.shuffle,
                seed=config.seed,
                missing=config.missing,
            )
        )
        cases += [{**common, **beside, "workers": workers, "queue": size} for size in sizes]
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
    """A case that computes nothing, with a queue so deep that its readers never stand still."""
    return {
        **({"patch": list(patch)} if patch else {}),
        "data": data,
        "batch": batch,
        "iterations": iterations,
        "shuffle": shuffle,
        "seed": seed,
        "missing": missing,
        "model": None,
        "tile": None,
        "device": "cpu",
        "compute": "none",
        "compute_time": 0.0,
        "workers": workers,
        "queue": queue if workers else 0,
    }


def rules(iterations: int) -> dict[str, Any]:
    """Every iteration is a sample; what comes before the first is the prefill."""
    return {"seconds": 0.0, "precision": 0.0, "warmup_samples": 0, "series": iterations}


def name_of(case: Mapping[str, Any]) -> str:
    doing = "reading alone" if case["compute"] == "none" else f"beside {case['compute']}"
    queue = f", queue {case['queue']}" if case["workers"] else ""
    return f"workers {case['workers']}{queue}, {doing}"


def outcome(record: Record) -> str:
    """A launch in a few words."""
    from ..reports import first_empty

    if not record.ok:
        return record.status + (f" ({record.error.message})" if record.error else "")
    said = format_seconds(statistics.mean(record.samples_s["step"]))
    if record.case.get("compute", "none") == "none":
        return f"{said} a batch"
    if not record.facts["left"]:
        return f"{said} an iteration"
    at = first_empty(record.facts["left"])
    end = "never cleared" if at is None else f"cleared at {at}"
    return f"{said} an iteration, queue {end}"


def _figures(output: Path, replace: bool) -> list[Path]:
    from ..reports import plot_queue

    try:
        return plot_queue(output, output.with_suffix(""), replace)
    except UsageError as error:  # matplotlib is not installed, or no case was measured
        print(f"No figure: {error}", file=sys.stderr)
        return []
