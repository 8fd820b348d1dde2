"""``penstock report LEDGER``: make a page of the tables, sentences and figures of a ledger."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..base import Replacing, add_flags, check_outputs, from_flags
from ..instruments import ledger_to_csv, ledger_to_parquet, read_ledger
from ..reports import write_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "ledgers",
        type=Path,
        nargs="+",
        metavar="LEDGER",
        help="records of a benchmark: a .ledger folder, or a file (.jsonl, .jsonl.gz)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="folder of report.md and its figures (default: the first LEDGER with .report)",
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
    replace = from_flags(Replacing, args).replace
    exports = (("--csv", args.csv), ("--parquet", args.parquet))
    check_outputs(*exports, replace=replace, inputs=args.ledgers)
    first: Path = args.ledgers[0]
    stem = first.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".ledger")
    folder = args.output or first.with_name(f"{stem}.report")
    records = [record for path in args.ledgers for record in read_ledger(path)]
    source = " and ".join(path.name for path in args.ledgers)
    written = write_page(records, folder, source, args.overwrite, replace)
    for export, path in ((ledger_to_csv, args.csv), (ledger_to_parquet, args.parquet)):
        if path is not None:
            export(records, path, replace)
            written.append(path)
    print(*written, sep="\n")
    return 0
