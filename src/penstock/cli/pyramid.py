"""``penstock pyramid PATH``: adds the levels of an OME-Zarr image that lacks them, and windows."""

from __future__ import annotations

import argparse
import math

from ..base import Overwriting, add_flags, from_flags, usable_cores
from .progress import counted_progress

EXAMPLES = """
penstock pyramid denoised.ome.zarr                       # until y and x have at most 256 voxels
penstock pyramid cells.ome.zarr --rule mode              # labels: the most frequent of each eight
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="the OME-Zarr group (0.4 or 0.5)")
    parser.add_argument(
        "--rule", choices=("mean", "mode"),
        help="how voxels become one: mean, without NaN; mode, for labels (default: as the levels "
        "that are there, else mean)",
    )  # fmt: skip
    parser.add_argument(
        "--levels", type=int, metavar="N",
        help="levels in all (default: until y and x have at most 256 voxels)",
    )  # fmt: skip
    add_flags(parser, Overwriting)


def run(args: argparse.Namespace) -> int:
    from ..data import add_levels, add_windows, levels_to_add

    replace = from_flags(Overwriting, args).overwrite
    levels = levels_to_add(args.path, args.levels, "PATH")
    total = sum(math.prod(level.shape) for level in levels)
    with counted_progress(total, "voxels", "adding levels") as show:
        count = 0

        def add(size: int) -> None:
            nonlocal count
            count += size
            show(count)

        add_levels(
            args.path, rule=args.rule, count=args.levels, again=replace or None,
            threads=usable_cores(), progress=add, name="PATH",
        )  # fmt: skip
    add_windows(args.path, name="PATH")
    for number, level in enumerate(levels, 1):
        print(f"level {number}: {' x '.join(map(str, level.shape))} (t c z y x)")
    return 0
