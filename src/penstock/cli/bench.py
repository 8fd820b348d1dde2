"""``penstock bench``: measure a model, a loader or a queue.

model   flags -> cases -> check, in a process for each tile -> sweep -> CSV, table, recommendation
loader  flags -> cases -> check, in a process of its own -> sweeps of loaders and of the ladder
        (their parts alone) -> CSV, tables
queue   workers x queue sizes -> cases, and for each number of workers one that only reads -> sweep
        -> CSV, table with the prediction, figure

Every case is checked before anything is created. Only the processes that measure import torch, not
this one.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..base import (
    BenchLoaderConfig,
    BenchModelConfig,
    BenchQueueConfig,
    UsageError,
    add_flags,
    add_kinds,
    canonical,
    check_outputs,
    format_seconds,
    from_flags,
    group_by,
    plural,
)
from ..bench import (
    LAUNCHES,
    Case,
    Facts,
    Launcher,
    ask_worker,
    budget_note,
    case_namer,
    check_budget,
    check_same_work,
    checked_loader_cases,
    checked_model_cases,
    lacks_package,
    ladder_cases,
    loader_cases,
    model_cases,
    model_limits,
    queue_cases,
    series_rules,
)
from ..instruments import Ledger, Record
from ..models import check_model_name, model_files
from ..reports import (
    UNTIMED,
    Section,
    append_csv,
    first_empty,
    in_text,
    loader_sections,
    model_sections,
    plot_records,
    queue_sections,
    recommend,
    write_model_yaml,
)
from .benchmarks import (
    ended,
    launcher_of,
    launches_each,
    make_way,
    open_outputs,
    print_written,
    step_outcome,
    sweep,
)
from .progress import figures_of, say

KINDS = {
    "model": "a model's memory and throughput over tile size and batch size",
    "loader": "how fast batches come, by loader, threads and batch size, and what limits them",
    "queue": "how long a queue of batches keeps a step fed, measured and predicted",
}
MOST_BATCH = 2**16
"""The largest batch that --find-limit tries."""


EXAMPLES = """
penstock bench model --tile-sizes 64 128 --batch-sizes 1 2 4   # memory and throughput
penstock bench model --tile-sizes 64 --mode train --find-limit --budget 1GiB
penstock bench loader data/ufs --threads 1 2 --batch-sizes 4   # how fast batches come, and why
penstock bench queue data/ufs --workers 1 2 --queue-sizes 1 4 --compute-time 0.1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = add_kinds(parser, KINDS)
    kinds["loader"].add_argument(
        "data",
        metavar="DATA",
        help="a packed data set (a folder, or s3://...), or a Zarr, N5 or OME-Zarr array in a "
        "folder, whose axis 0 counts samples unless --patch cuts it",
    )
    kinds["queue"].add_argument("data", metavar="DATA", help="a packed data set, or an array")
    add_flags(kinds["model"], BenchModelConfig, config_file=True)
    add_flags(kinds["loader"], BenchLoaderConfig, config_file=True)
    add_flags(kinds["queue"], BenchQueueConfig, config_file=True)


def run(args: argparse.Namespace) -> int:
    return {"model": _model, "loader": _loader, "queue": _queue}[args.kind](args)


def _keep(
    scenario: str,
    records: Sequence[Record],
    config: Any,
    sections: Callable[[Sequence[Record]], Iterable[Section]],
) -> None:
    """Add what was measured to the CSV, and print it."""
    make_way(scenario, config.output, config.overwrite)
    append_csv(scenario, records, config.output)
    print("", *in_text(sections(records)), sep="\n")


def _model(args: argparse.Namespace) -> int:
    config = from_flags(BenchModelConfig, args, args.config)
    for model in config.model:
        check_model_name(model, "--model")

    cases = model_cases(config)
    read = [file for model in config.model for file in model_files(model)]
    read += filter(None, [config.weights])
    ledger = open_outputs(config, "model", config.model[0], read)
    read.append(ledger.path)
    settings_file = config.recommend or config.output.with_suffix(f".{config.mode}.yaml")
    check_outputs(("--recommend", settings_file), replace=config.overwrite, inputs=read)
    if config.find_limit and config.cluster is not None:
        raise UsageError(
            "--find-limit chooses each trial after the one before, so it cannot use --cluster; "
            "penstock slurm submit runs it on a node"
        )
    with launcher_of(config, read[:-1], ledger, config.device) as launcher:
        cases, facts, here = checked_model_cases(cases, config.timeout, launcher)
        if config.budget is not None:
            check_budget(config.budget, cases, facts)
        if config.find_limit:
            # These launches only try whether a batch fits, so they get a ledger of their own.
            limits = Ledger(ledger.path.parent / "limits", ledger.labels)
            return _find_limit(config, cases, facts, limits)
        if config.resume:
            check_same_work(ledger, cases, facts, here)
        records = _launched(config, cases, ledger, launcher)
    return _write_results(config, records, ledger, settings_file)


def _launched(
    config: BenchModelConfig,
    cases: Sequence[Case],
    ledger: Ledger,
    launcher: Launcher,
) -> list[Record]:
    launches, device = LAUNCHES[config.effort], cases[0]["device"]
    print(f"{plural(len(cases), 'case')} on {device}, {launches_each(launches)}")
    return sweep(
        "model",
        cases,
        config,
        ledger,
        rules={"seconds": config.launch_seconds, "precision": config.precision},
        name=case_namer(cases, "tile", "batch"),
        outcome=step_outcome,
        launches=launches,
        # On a GPU, torch's allocator enforces the budget, not the kernel.
        memory_limit=config.budget if device == "cpu" else None,
        launcher=launcher,
    )


def _write_results(
    config: BenchModelConfig, records: Sequence[Record], ledger: Ledger, settings_file: Path
) -> int:
    """Write and print what was measured, and return the exit code."""
    _keep("model", records, config, model_sections)
    advice = recommend(records, config.budget)
    print("", *advice.lines, sep="\n")
    settings = write_model_yaml(advice, settings_file, config.overwrite)
    print_written([config.output, ledger.path, *settings])
    return int(any(record.status == "crash" for record in records))


def _find_limit(
    config: BenchModelConfig, cases: Sequence[Case], facts: Sequence[Facts], ledger: Ledger
) -> int:
    """Find the largest batch for each tile size and each variant of the model."""
    variants = group_by(
        zip(cases, facts, strict=True), lambda pair: canonical({**pair[0], "tile": 0, "batch": 0})
    )
    name = case_namer([same[0][0] for same in variants.values()], "tile", "batch")

    def tell(tried: list[Record], record: Record) -> None:
        tried.append(record)
        say(f"{name(record.case)}: {ended(record)}")

    for same in variants.values():
        first, counted = same[0]
        tried: list[Record] = []
        print(f"{name(first | {'tile': 'any', 'batch': 'any'})}, on {first['device']}")
        limits = model_limits(
            first,
            list(dict.fromkeys(case["tile"] for case, _ in same)),
            len(counted.get("tile_shape", (0, 0))),
            MOST_BATCH,
            config.budget,
            ledger,
            timeout_s=config.timeout,
            device_memory=counted.get("device_memory"),
            report=partial(tell, tried),
        )
        print("", *(limit.sentence for limit in limits), "", budget_note(first["device"]), sep="\n")
        sides = {
            (limit.tile, batch) for limit in limits for batch in (limit.batch, limit.failing_batch)
        }
        ends = [r for r in tried if (r.case["tile"], r.case["batch"]) in sides]
        append_csv("model", ends, config.output, **UNTIMED)
    print(*(f"Written: {path}" for path in (config.output, ledger.path)), sep="\n")
    return 0


def _loader(args: argparse.Namespace) -> int:
    config = from_flags(BenchLoaderConfig, args, args.config)

    ledger = open_outputs(config, "loader", Path(args.data).stem, [Path(args.data)])
    asked = loader_cases(config, args.data)
    with launcher_of(config, [args.data], ledger) as launcher:
        cases = checked_loader_cases(asked, config, print, launcher)
        records = _loader_sweep("loader", "case", cases, config, ledger, launcher)
        if config.ladder:
            steps = ladder_cases(cases)
            records += _loader_sweep("ladder", "step", steps, config, ledger, launcher)
    _keep("loader", records, config, loader_sections)
    print_written([config.output, ledger.path])
    # A missing GPU and a loader that is not installed become rows; they fail nothing.
    return int(any(record.status not in ("ok", "unsupported") for record in records))


def _loader_sweep(
    scenario: str,
    what: str,
    cases: list[dict[str, Any]],
    config: BenchLoaderConfig,
    ledger: Ledger,
    launcher: Launcher,
) -> list[Record]:
    launches = LAUNCHES[config.effort]
    print(f"{plural(len(cases), what)} of the {scenario}, {launches_each(launches)}")
    return sweep(
        scenario,
        cases,
        config,
        ledger,
        rules=series_rules(config.batches, config.warmup),
        name=case_namer(cases, "batch", "threads"),
        outcome=_loader_outcome,
        launches=launches,
        launcher=launcher,
    )


def _loader_outcome(record: Record) -> str:
    seconds = record.samples_s["step"]
    return f"{format_seconds(statistics.mean(seconds))} a batch, {plural(len(seconds), 'batch')}"


def _queue(args: argparse.Namespace) -> int:
    config = from_flags(BenchQueueConfig, args, args.config)
    cases = queue_cases(args.data, config)
    read = [Path(args.data)]
    ledger = open_outputs(config, "queue", Path(args.data).stem, read)
    read.append(ledger.path)
    figure = config.output.with_suffix(".png")
    check_outputs(("the figure of --output", figure), replace=config.overwrite, inputs=read)
    launches = LAUNCHES[config.effort]
    with launcher_of(config, [args.data], ledger) as launcher:
        ask_worker("queue", cases[0], config.timeout, launcher)
        counts = f"{launches_each(launches)}, {plural(config.iterations, 'iteration')} in each"
        print(f"{plural(len(cases), 'case')}, {counts}")
        records = sweep(
            "queue",
            cases,
            config,
            ledger,
            rules=series_rules(config.iterations),
            name=case_namer(cases, "workers", "queue"),
            outcome=queue_outcome,
            launches=launches,
            launcher=launcher,
        )
    _keep("queue", records, config, queue_sections)
    prefix = config.output.with_suffix("")
    figures = figures_of(lambda: plot_records("queue", records, prefix, config.overwrite))
    print_written([config.output, ledger.path, *figures])
    return int(any(not record.ok and not lacks_package(record) for record in records))


def queue_outcome(record: Record) -> str:
    """The mean seconds of an iteration, and the iteration at which the queue was first empty."""
    mean = format_seconds(statistics.mean(record.samples_s["step"]))
    if record.case.get("compute", "none") == "none":
        return f"{mean} a batch"
    if not record.facts["left"]:
        return f"{mean} an iteration"
    at = first_empty(record.facts["left"])
    end = "never cleared" if at is None else f"cleared at {at}"
    return f"{mean} an iteration, queue {end}"
