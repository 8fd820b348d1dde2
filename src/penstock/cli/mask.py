"""``penstock mask PATH OUT``: a mask of the sample, which ``infer --mask`` takes."""

from __future__ import annotations

import argparse
from pathlib import Path, PurePosixPath

import numpy as np

from ..base import Overwriting, UsageError, add_flags, check_outputs, from_flags, plural
from ..data import CoarseView, SampleMask, coarse_view, mask_sink, sample_mask, write_mask
from .info import infer_line
from .progress import figures_of, picture

EXAMPLES = """
penstock mask brain.ome.zarr mask.ome.zarr
penstock mask slide.czi mask.ome.zarr --below 220 --keep 3   # three dark pieces on a bright slide
"""
_PLANES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="the volume or scene")
    parser.add_argument("out", metavar="OUT", help="the OME-Zarr to write; its picture is OUT.png")
    parser.add_argument(
        "--level", type=int, metavar="N",
        help="the level to look at (default: the coarsest with 256 voxels along y or x, and means "
        "of blocks of that where it has far more)",
    )  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--above", type=float, metavar="X",
        help="what is brighter is sample (default: Otsu's threshold)",
    )  # fmt: skip
    which.add_argument("--below", type=float, metavar="X", help="what is darker is sample")
    parser.add_argument(
        "--keep", type=int, metavar="N",
        help="keep the N largest parts (default: all of at least 1 %% of the largest)",
    )  # fmt: skip
    parser.add_argument(
        "--grow", type=int, default=1, metavar="N",
        help="grow them by N voxels of that level (default: 1)",
    )  # fmt: skip
    parser.add_argument("--t", type=int, metavar="N", help="time point (default: mean of all)")
    parser.add_argument("--c", type=int, metavar="N", help="channel (default: mean of all)")
    parser.add_argument("--series", type=int, metavar="N", help="the image to take of several")
    parser.add_argument("--axes", metavar="AXES", help="the letters of the stored axes: tyx, zcyx")
    add_flags(parser, Overwriting)


def run(args: argparse.Namespace) -> int:
    for flag, least in (("keep", 1), ("grow", 0)):
        if (said := getattr(args, flag)) is not None and said < least:
            raise UsageError(f"--{flag} {said}: at least {least}")
    replace = from_flags(Overwriting, args).overwrite
    drawing = Path(f"{PurePosixPath(args.out)}.png")
    if "://" not in args.out:
        check_outputs(("the picture", drawing), replace=replace)
    chosen = {name: getattr(args, name) for name in ("level", "t", "c", "axes", "series")}
    view = coarse_view(args.path, **chosen)
    sink = mask_sink(args.out, view, overwrite=replace)
    mask = sample_mask(view, below=args.below, above=args.above, keep=args.keep, grow=args.grow)
    write_mask(mask, sink)
    print(f"voxels    {' x '.join(map(str, view.array.shape))} (z y x)")
    by = "as given" if args.above is not None or args.below is not None else "by Otsu's method"
    print(f"sample    {'above' if mask.brighter else 'below'} {mask.threshold:g}, {by}")
    print(
        f"share     {mask.inside.mean():.1%} of all voxels, {mask.kept} of "
        f"{plural(mask.parts, 'part')}"
    )
    if "://" not in args.out:
        for file in figures_of(lambda: [_drawn(view, mask, drawing, replace)]):
            print(f"picture   {file}")
    print(f"infer     {infer_line(args, ('--mask', args.out))}")
    return 0


def _drawn(view: CoarseView, mask: SampleMask, file: Path, replace: bool) -> Path:
    """Draw the outline over some planes of the view."""
    depth, height, width = view.array.shape
    planes = sorted({(2 * n + 1) * depth // (2 * _PLANES) for n in range(_PLANES)})
    side = 4.0  # inches
    size = (side * len(planes), side * min(max(height / width, 0.2), 5.0) + 0.3)
    low, high = np.nanpercentile(view.array, (1, 99.8))
    with picture(file, size, columns=len(planes), replace=replace) as panels:
        for z, panel in zip(planes, panels.flat, strict=True):
            panel.imshow(view.array[z], cmap="gray", vmin=low, vmax=high)
            if 0 < mask.inside[z].mean() < 1:  # else there is no outline
                # One more voxel on each side, as an outline takes two rows and columns at least.
                inside = np.pad(mask.inside[z], 1, "edge")
                columns, rows = range(-1, width + 1), range(-1, height + 1)
                panel.contour(columns, rows, inside, levels=[0.5], colors="orange", linewidths=1)
                panel.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
            panel.set_title(f"z {z}: {mask.inside[z].mean():.0%} sample", fontsize=9)
    return file
