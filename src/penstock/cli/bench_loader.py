"""``penstock bench loader``: how fast batches come, by loader, threads and batch size, and why.

flags -> cases -> check, in a process of its own -> sweeps of loaders and of the ladder (their parts
alone) -> CSV, tables
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from ..base import BenchLoaderConfig, add_flags, format_seconds, from_flags, plural
from ..bench import (
    Launcher,
    case_namer,
    checked_loader_cases,
    ladder_cases,
    launches_of,
    loader_cases,
    series_rules,
)
from ..instruments import Ledger, Record
from ..reports import LOADER_NEEDS, append_csv, in_text, loader_sections
from .benchmarks import launcher_of, launches_each, make_way, open_outputs, print_written, sweep


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "data",
        metavar="DATA",
        help="a packed data set (a folder, or s3://...), or a Zarr, N5 or OME-Zarr array in a "
        "folder, whose axis 0 counts samples unless --patch cuts it",
    )
    add_flags(parser, BenchLoaderConfig, config_file=True)


def run(args: argparse.Namespace) -> int:
    config = from_flags(BenchLoaderConfig, args, args.config)

    ledger = open_outputs(
        config, f"bench-loader-{Path(args.data).stem}", LOADER_NEEDS, [Path(args.data)]
    )
    asked, old = loader_cases(config, args.data), ledger if config.resume else None
    with launcher_of(config, [args.data], like=old) as launcher:
        cases = checked_loader_cases(asked, config, print, launcher)
        records = _sweep("loader", "case", cases, config, ledger, launcher)
        if config.ladder:
            steps = ladder_cases(cases)
            records += _sweep("ladder", "step", steps, config, ledger, launcher)
    make_way(config.output, config.overwrite, LOADER_NEEDS)
    append_csv("loader", records, config.output)
    print("", *in_text(loader_sections(records)), sep="\n")
    print_written([config.output, ledger.path])
    # A missing GPU and a loader that is not installed become rows; they fail nothing.
    return int(any(record.status not in ("ok", "unsupported") for record in records))


def _sweep(
    scenario: str,
    what: str,
    cases: list[dict[str, Any]],
    config: BenchLoaderConfig,
    ledger: Ledger,
    launcher: Launcher,
) -> list[Record]:
    launches = launches_of(config.effort)
    print(f"{plural(len(cases), what)} of the {scenario}, {launches_each(launches)}")
    return sweep(
        scenario,
        cases,
        config,
        ledger,
        rules=series_rules(config.batches, config.warmup),
        name=case_namer(cases, "batch", "threads"),
        outcome=_outcome,
        launches=launches,
        launcher=launcher,
    )


def _outcome(record: Record) -> str:
    seconds = record.samples_s["step"]
    return f"{format_seconds(statistics.mean(seconds))} a batch, {len(seconds)} batches"
