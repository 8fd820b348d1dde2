"""``penstock report RUN|LEDGER|FOLDER``: a page of what was measured: verdict, figures, tables."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..base import (
    RESULTS,
    Overwriting,
    UsageError,
    add_flags,
    check_local,
    check_outputs,
    from_flags,
)
from ..instruments import Record, ledger_to_csv
from ..reports import (
    PAGE_SUFFIXES,
    REPORT_SUFFIXES,
    Catalogue,
    RecordPlace,
    Report,
    beside_output,
    check_report,
    joined,
    page_data,
    places_of,
    records_of,
    report_of_records,
    reports_of_places,
    trainings_of,
    write_report,
)
from ..scaling import TrainingRun, kept_below, read_runs, report_of_scaling, runs_of_others
from .progress import say

EXAMPLES = """
penstock report denoised.ome.zarr --output report.html   # a run of infer
penstock report logs/stage2_bench.ledger --output report.html
penstock report outputs --output report.html             # trainings, and how they scale
penstock report slurm-*.out --output report.html         # logs of SLURM jobs, as a study
penstock report logs --html runs.html                    # runs to pick and to compare
penstock report logs/stage2_bench.ledger                 # a folder: report.md, figures, CSVs
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "places",
        type=Path,
        nargs="+",
        metavar="RUN|LEDGER|FOLDER",
        help="an output of infer or its run folder; the folder of a training; records of a "
        "benchmark, a .ledger folder or a file (.jsonl, .jsonl.gz); the output of SLURM jobs, or "
        "what MLflow or Comet kept; or a folder that is searched for these. Several "
        "trainings are a scaling study, too",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE|FOLDER",
        help="a file, .html (all in one), .md or .json; or a folder of report.md and its figures "
        "(default: the folder named after the first RUN or LEDGER, with .report)",
    )
    parser.add_argument(
        "--html", type=Path, metavar="PAGE", help="write this page, too; alone, write it only"
    )
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="also write a CSV with a row for each launch"
    )
    add_flags(parser, Overwriting)


def run(args: argparse.Namespace) -> int:
    for place in args.places:
        check_local(place, "RUN")
    overwrite = from_flags(Overwriting, args).overwrite
    check_outputs(("--csv", args.csv), replace=overwrite, inputs=args.places)
    outputs = [args.output] if args.output or args.html else [_usual(args.places[0])]
    outputs = [path for path in (*outputs, args.html) if path is not None]
    if args.html is not None and args.html.suffix not in PAGE_SUFFIXES:
        raise UsageError(f"--html {args.html}: the name of a page ends with .html")
    for output in outputs:
        if output.suffix in REPORT_SUFFIXES and not output.is_dir():
            check_report(output, overwrite, [path for path in args.places if path.is_file()])
    places, others, searched = _sorted(args.places)
    records = records_of(places)
    if not records and args.csv:
        source = " and ".join(map(str, args.places))
        raise UsageError(f"--csv needs records of a benchmark; {source} holds none")
    kept, written = _kept(searched, places), []
    for output in outputs:
        written += _write(args, places, records, others, kept, output, overwrite)
    if args.csv is not None:
        ledger_to_csv(records, args.csv, overwrite)
        written.append(args.csv)
    print(*written, sep="\n")
    return 0


def _sorted(paths: Sequence[Path]) -> tuple[list[RecordPlace], list[Path], list[Path]]:
    """Sort paths into places of records, other files (logs, and what trackers kept), and folders
    that hold places and may hold other files, too."""
    places: list[RecordPlace] = []
    others, searched = [], []
    for path in paths:
        records = path.name.endswith((".jsonl", ".jsonl.gz")) or beside_output(path)
        if path.is_file() and not records:
            others.append(path)
            continue
        try:
            inside = places_of(path)
        except UsageError:
            if not path.is_dir() or path.suffix in (".penstock", ".ledger"):
                raise
            others.append(path)
        else:
            places += inside
            searched += [path] * any(path in place.path.parents for place in inside)
    return places, others, searched


def _kept(folders: Sequence[Path], places: Sequence[RecordPlace]) -> list[TrainingRun]:
    """The runs that only logs and trackers in these folders know: those without a training among
    ``places``."""
    if not folders:
        return []

    kept = [run for folder in folders for run in kept_below(folder, _say)]
    trainings = [place.path for place in places if (place.path / RESULTS).is_file()]
    sources = {run.source for run in kept}
    runs = read_runs(trainings, _say, kept) if kept else []
    return [run for run in runs if run.source in sources]


def _say(line: str) -> None:
    say(f"penstock report: {line}")


def _write(
    args: argparse.Namespace,
    places: Sequence[RecordPlace],
    records: Sequence[Record],
    others: Sequence[Path],
    kept: Sequence[TrainingRun],
    output: Path,
    overwrite: bool,
) -> list[Path]:
    """Write the report. If it is a folder and all records are ledgers, CSVs lie beside it."""
    source = " and ".join(path.name or str(path) for path in args.places)
    given = all(place.kind == "ledger" and place.path in args.places for place in places)
    ledgers = given and not others
    if ledgers:
        report = report_of_records(records, source, args.places)
    else:
        parts = reports_of_places(places)
        trainings = trainings_of(places)
        if len(trainings) > 1 or others:
            parts.insert(0, _scaling([*trainings, *others]))
        if kept:
            parts.append(report_of_scaling([], "Logs and trackers", _say, kept))
        report = joined(parts, source)
        if len(parts) == 1 and trainings and trainings != args.places:
            report = replace(report, title=source)  # that of a training is a number
    runs = _runs(args.places) if output.suffix in PAGE_SUFFIXES else None
    return write_report(report, output, overwrite, runs, records if ledgers else ())


def _runs(places: Sequence[Path]) -> dict[str, Any] | None:
    """The runs that a reader may compare; None if there is only one."""
    catalogue = Catalogue(places, runs_of_others)
    return page_data(catalogue) if len(catalogue.runs) > 1 else None


def _scaling(paths: Sequence[Path]) -> Report:
    """The scaling study of several trainings, or of logs."""
    try:
        return report_of_scaling(paths, "Scaling", _say)
    except UsageError:
        if len(paths) == 1 and paths[0].is_dir():
            places_of(paths[0])  # raises an error that lists all that may lie there
        raise


def _usual(first: Path) -> Path:
    """The default folder of a report: beside the first place, with the same name."""
    if first.name in ("", ".."):  # . and the like have no name
        return first / "runs.report"
    stem = first.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".ledger")
    return first.with_name(f"{stem.removesuffix('.penstock')}.report")
