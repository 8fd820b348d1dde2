"""``penstock pyramid PATH [OUT]``: adds the levels that an image lacks, and windows.

OME-Zarr ──▶ its levels, in place
any array ──▶ convert ──▶ OUT, an OME-Zarr of the array and its levels
"""

from __future__ import annotations

import argparse
import math
import shlex

from ..base import InferConfig, UsageError, add_flags, usable_cores
from ..data import (
    LevelBelow,
    OutputLock,
    Rule,
    add_levels,
    add_windows,
    levels_below,
    open_source,
    open_written,
)
from . import convert
from .progress import counted_progress, say

EXAMPLES = """
penstock pyramid denoised.ome.zarr                       # until y and x have at most 256 voxels
penstock pyramid cells.ome.zarr --rule mode              # labels: the most frequent of each eight
penstock pyramid planes/ planes.ome.zarr                 # of any other array, beside it
"""
_RULES = {"mean": "intensity", "mode": "labels"}
"""The kind of values for which a rule is made."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", help="an OME-Zarr group (0.4 or 0.5); with OUT, any array"
    )
    parser.add_argument(
        "out", metavar="OUT", nargs="?",
        help="write the array and its levels here, as penstock convert does, and leave PATH alone",
    )  # fmt: skip
    parser.add_argument(
        "--rule", choices=tuple(_RULES),
        help="how voxels become one: mean, without NaN; mode, for labels (default: as the levels "
        "that are there, mode for a label image, else mean)",
    )  # fmt: skip
    parser.add_argument(
        "--levels", type=int, metavar="N",
        help="levels in all (default: until y and x have at most 256 voxels)",
    )  # fmt: skip
    add_flags(parser, InferConfig, only={"overwrite", "resume", "take_over"})


def run(args: argparse.Namespace) -> int:
    return _add_in_place(args) if args.out is None else _write_beside(args)


def _write_beside(args: argparse.Namespace) -> int:
    """Write an OME-Zarr of the array and its levels."""
    more = {} if args.rule is None else {"head_kind": _RULES[args.rule]}
    vars(args).update(in_spec=args.path, out_spec=args.out, dry_run=False, **more)
    return convert.run(args)


def _add_in_place(args: argparse.Namespace) -> int:
    given = vars(args)
    if args.levels is not None and args.levels < 1:
        raise UsageError(f"--levels {args.levels}: an image has 1 or more")
    if given.get("resume"):
        raise UsageError("--resume goes with OUT; levels in place always go on where they ended")
    if getattr(open_source(args.path, raw=True, name="PATH"), "ome_version", None) is None:
        beside = shlex.join(["penstock", "pyramid", args.path])
        raise UsageError(
            f"PATH {args.path}: is no OME-Zarr image; {beside} OUT.ome.zarr writes one of it with "
            "its levels"
        )
    again, over = given.get("overwrite") or None, given.get("take_over", False)
    levels = make_levels(args.path, args.levels, rule=args.rule, again=again, take_over=over)
    for number, level in enumerate(levels, 1):
        print(f"level {number}: {' x '.join(map(str, level.shape))} (t c z y x)")
    return 0


def make_levels(
    path: str, count: int | None, *, rule: Rule | None = None, again: bool | None = True,
    take_over: bool = False, name: str = "PATH",
) -> list[LevelBelow]:  # fmt: skip
    """Make levels of an image, and windows, while no run writes it. See `add_levels`."""
    first = open_source(path, raw=True, name=name)
    levels = levels_below(first.domain.shape, first.scale, count)
    total = sum(math.prod(level.shape) for level in levels)
    with (
        OutputLock.briefly([open_written(path, name)], take_over) as lock,
        counted_progress(total, "voxel", "adding levels") as show,
    ):
        for reason in lock.lacking:
            say(f"{reason}; make sure that nobody else writes it")
        done = 0

        def add(size: int) -> None:
            nonlocal done
            done += size
            lock.check()
            show(done)

        add_levels(
            path, rule=rule, count=count, again=again, threads=usable_cores(),
            progress=add, name=name,
        )  # fmt: skip
        add_windows(path, name=name)
    return levels
