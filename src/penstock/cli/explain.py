"""``penstock explain RUN|LEDGER``: what limited a run, what to change, and whether that helped."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..base import Replacing, add_flags

EXAMPLES = """
penstock explain denoised.ome.zarr                       # a run of infer
penstock explain outputs/1                               # a training
penstock explain logs/loader_bench.ledger                # a benchmark
penstock explain run --tested elsewhere/run              # a test that does not lie beside the run
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
    parser.add_argument(
        "--tested",
        type=Path,
        action="append",
        default=[],
        metavar="RUN",
        help="a run that tested a change; those beside the run are found by their settings",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write it to this file")
    add_flags(parser, Replacing)


def run(args: argparse.Namespace) -> int:
    from ..base import check_local, check_outputs, from_flags, write_output
    from ..reports import (
        explain,
        explanation_document,
        explanation_sections,
        in_text,
        places_of,
    )

    for place in args.places:
        check_local(place, "RUN")
    replace = from_flags(Replacing, args).replace
    check_outputs(("--json", args.json), replace=replace, inputs=args.places)
    places = [place for path in args.places for place in places_of(path)]
    explanations = [explain(place, args.tested) for place in places]
    if args.json is not None:
        text = json.dumps(explanation_document(explanations), indent=1) + "\n"
        write_output("--json", args.json, text, replace=replace)
    print(*in_text(explanation_sections(explanations)), sep="\n")
    return 0
