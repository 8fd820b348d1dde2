"""``penstock report LEDGER``: the tables, sentences and figures of a ledger, as a page."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "ledgers",
        type=Path,
        nargs="+",
        metavar="LEDGER",
        help="what a benchmark left: a .ledger folder, or a file of records (.jsonl, .jsonl.gz)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where report.md and its figures go (default: the first LEDGER with .report)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a report that is there")


def run(args: argparse.Namespace) -> int:
    from .. import ledger, page

    first: Path = args.ledgers[0]
    stem = first.name.removesuffix(".gz").removesuffix(".jsonl").removesuffix(".ledger")
    folder = args.output or first.with_name(f"{stem}.report")
    records = [record for path in args.ledgers for record in ledger.read(path)]
    for path in page.write(records, folder, " and ".join(p.name for p in args.ledgers),
                           args.overwrite):  # fmt: skip
        print(path)
    return 0
