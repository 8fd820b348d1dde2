"""``penstock report RUN|LEDGER|FOLDER``: what was measured as a page: verdict, figures, tables.

penstock report denoised.zarr --output report.html        a run of infer, by its output or folder
penstock report logs/stage2_bench.ledger --output report.html
penstock report logs --output report.html                 all records in a folder
penstock report logs/stage2_bench.ledger                  report.md, figures and CSVs in a folder
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..base import Replacing, add_flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "places",
        type=Path,
        nargs="+",
        metavar="RUN|LEDGER|FOLDER",
        help="an output of infer or its run folder; records of a benchmark, a .ledger folder or a "
        "file (.jsonl, .jsonl.gz); or a folder that is searched for these",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE|FOLDER",
        help="a file, .html (all in one), .md or .json; or a folder of report.md and its figures "
        "(default: the folder named after the first RUN or LEDGER, with .report)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier report")
    parser.add_argument(
        "--csv", type=Path, metavar="FILE", help="also write a CSV with a row for each launch"
    )
    parser.add_argument(
        "--parquet", type=Path, metavar="FILE", help="also write the same rows as Parquet"
    )
    add_flags(parser, Replacing)


def run(args: argparse.Namespace) -> int:
    from ..base import UsageError, check_local, check_outputs, from_flags
    from ..instruments import ledger_to_csv, ledger_to_parquet
    from ..reports import (
        REPORT_SUFFIXES,
        check_report,
        places_of,
        records_of,
        report_of_places,
        report_of_records,
        write_page,
        write_report,
    )

    for place in args.places:
        check_local(place, "RUN")
    replace = from_flags(Replacing, args).replace
    exports = (("--csv", args.csv), ("--parquet", args.parquet))
    check_outputs(*exports, replace=replace, inputs=args.places)
    output = args.output or _usual(args.places[0])
    if alone := output.suffix in REPORT_SUFFIXES and not output.is_dir():
        files = [path for path in args.places if path.is_file()]
        check_report(output, args.overwrite, replace, files)
    places = [place for path in args.places for place in places_of(path)]
    named = all(place.path in args.places for place in places)
    source = " and ".join(path.name or str(path) for path in args.places)
    records = records_of(places)
    if not records and (args.csv or args.parquet):
        raise UsageError(f"--csv and --parquet are of records of a benchmark; {source} holds none")
    if named and all(place.kind == "ledger" for place in places):
        if alone:
            report = report_of_records(records, source, args.places)
            written = write_report(report, output, args.overwrite, replace)
        else:
            written = write_page(records, output, source, args.overwrite, replace, args.places)
    else:
        report = report_of_places(places, source)
        written = write_report(report, output, args.overwrite, replace)
    for export, path in ((ledger_to_csv, args.csv), (ledger_to_parquet, args.parquet)):
        if path is not None:
            export(records, path, replace)
            written.append(path)
    print(*written, sep="\n")
    return 0


def _usual(first: Path) -> Path:
    """The folder of a report, beside what it is of."""
    stem = first.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".ledger")
    return first.with_name(f"{stem.removesuffix('.penstock')}.report")
