"""``penstock explain RUN|LEDGER``: what limited a run, and what would help."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..base import check_local
from ..reports import Section, clipped, in_text, places_of, reports_of_places

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


def run(args: argparse.Namespace) -> int:
    for place in args.places:
        check_local(place, "RUN")
    places = [place for path in args.places for place in places_of(path)]
    verdicts = (Section(each.title, (), each.verdict) for each in reports_of_places(places))
    print(*in_text(map(clipped, verdicts)), sep="\n")
    return 0
