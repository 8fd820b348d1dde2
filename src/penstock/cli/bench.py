"""``penstock bench model``: memory and throughput of a model over tile size and batch size.

    flags -> cases -> check, in a process for each tile -> sweep -> CSV, table, recommendation

Every case is checked before anything is created. Only the processes that measure import torch, not
this one.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ..base import (
    BenchModelConfig,
    UsageError,
    add_flags,
    add_kinds,
    check_outputs,
    from_flags,
    group_by,
    plural,
)
from ..bench import (
    Case,
    Launcher,
    budget_note,
    case_namer,
    check_budget,
    check_same_work,
    checked_model_cases,
    launches_of,
    model_cases,
    model_limits,
)
from ..instruments import Ledger, Record, canonical
from ..models import check_model_name, model_files
from ..reports import (
    UNTIMED,
    append_csv,
    in_text,
    model_sections,
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
from .progress import say

Facts = dict[str, Any]

KINDS = {
    "loader": "how fast batches come, by loader, threads and batch size, and what limits them",
    "queue": "how long a queue of batches keeps a step fed, measured and predicted",
}
"""Benchmarks with a module of their own: ``queue`` is ``bench_queue``."""

NEEDS = ("tile_size", "batch_size")
"""Columns that the CSV of ``bench model`` must have."""
MOST_BATCH = 2**16
"""The largest batch that --find-limit tries."""


EXAMPLES = """
penstock bench model --tile-sizes 64 128 --batch-sizes 1 2 4   # memory and throughput
penstock bench model --tile-sizes 64 --mode train --find-limit --budget 1GiB
penstock bench loader data/ufs --threads 1 2 --batch-sizes 4   # how fast batches come, and why
penstock bench queue data/ufs --workers 1 2 --queue-sizes 1 4 --compute-time 0.1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    about = "a model's memory and throughput over tile size and batch size"
    kinds = add_kinds(parser, {"model": about, **KINDS})
    add_flags(kinds["model"], BenchModelConfig, config_file=True)
    for kind in KINDS:
        import_module(f"{__package__}.bench_{kind}").add_arguments(kinds[kind])


def run(args: argparse.Namespace) -> int:
    if args.kind in KINDS:
        return import_module(f"{__package__}.bench_{args.kind}").run(args)
    config = from_flags(BenchModelConfig, args, args.config)
    for model in config.model:
        check_model_name(model, "--model")

    cases = model_cases(config)
    read = [file for model in config.model for file in model_files(model)]
    read += filter(None, [config.weights])
    ledger = open_outputs(config, f"bench-model-{config.model[0]}", NEEDS, read)
    read.append(ledger.path)
    settings_file = config.recommend or config.output.with_suffix(f".{config.mode}.yaml")
    check_outputs(("--recommend", settings_file), replace=config.overwrite, inputs=read)
    if config.find_limit and config.cluster is not None:
        raise UsageError(
            "--find-limit chooses each trial after the one before, so it cannot use --cluster; "
            "penstock slurm submit runs it on a node"
        )
    old = ledger if config.resume else None
    with launcher_of(config, read[:-1], config.device, old) as launcher:
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
    launches, device = launches_of(config.effort), cases[0]["device"]
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
    make_way(config.output, config.overwrite, NEEDS)
    append_csv("model", records, config.output)
    print("", *in_text(model_sections(records)), sep="\n")
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
