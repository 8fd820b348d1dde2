"""``penstock explain RUN|LEDGER``: what limited a run, and what would help."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..base import Overwriting, add_flags

EXAMPLES = """
penstock explain denoised.ome.zarr                       # a run of infer
penstock explain outputs/1                               # a training
penstock explain logs/loader_bench.ledger                # a benchmark
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "places",
        type=Path,
        nargs="+",
        metavar="RUN|LEDGER",
        help="an output of infer or its run folder, the folder of a training, a ledger, or a "
        "folder that is searched for these",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write it to this file")
    add_flags(parser, Overwriting)


def run(args: argparse.Namespace) -> int:
    from ..base import check_local, check_outputs, from_flags, write_output
    from ..reports import clipped, explanation_of, in_text, places_of, reports_of_places

    for place in args.places:
        check_local(place, "RUN")
    replace = from_flags(Overwriting, args).overwrite
    check_outputs(("--json", args.json), replace=replace, inputs=args.places)
    places = [place for path in args.places for place in places_of(path)]
    explained = [explanation_of(report) for report in reports_of_places(places)]
    if args.json is not None:
        runs = [[each._asdict() for each in sections] for sections in explained]
        document = {"format": "penstock-explain", "version": 1, "runs": runs}
        write_output("--json", args.json, json.dumps(document, indent=1) + "\n", replace=replace)
    lines = [clipped(section) for sections in explained for section in sections]
    print(*in_text(lines), sep="\n")
    return 0
