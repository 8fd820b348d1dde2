"""``penstock view PATH [PATH]``: a picture of an array, or of two side by side; or a link."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..base import (
    Overwriting,
    UsageError,
    add_flags,
    check_outputs,
    from_flags,
    require,
)
from ..data import Box, Grid, coarsest_level, open_source
from ..reports import serve_stores
from .progress import picture

EXAMPLES = """
penstock view noisy.ome.zarr
penstock view noisy.ome.zarr denoised.ome.zarr --output before-after.png
penstock view noisy.ome.zarr denoised.ome.zarr --serve   # a link of Neuroglancer, until Ctrl-C
"""
_SIDE = 768
"""About the most pixels of a plane along each axis."""
_PIECE_BYTES = 64 * 2**20
"""Bytes of the chunks that are decoded at a time, if that is more than one."""
_INCHES = 6
"""The width of a plane on the picture."""
_GOLDEN = 0.618033988749895
"""Steps of this length around the circle of hues come near no earlier hue for longest."""
_WINDOW = (0.5, 99.8)
"""The percentiles that are black and white."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="one or two files, folders, stores or URLs"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("view.png"), metavar="FILE",
        help="the picture (default: view.png)",
    )  # fmt: skip
    for flag, what in (("t", "time point"), ("c", "channel"), ("series", "image of several")):
        parser.add_argument(f"--{flag}", type=int, metavar="N", help=f"{what} (default: the first)")
    parser.add_argument("--axes", metavar="AXES", help="the letters of the stored axes: tyx, zcyx")
    parser.add_argument(
        "--serve", action="store_true",
        help="draw nothing: serve stores of this machine to Neuroglancer, and print its link",
    )  # fmt: skip
    parser.add_argument(
        "--viewer", default="https://neuroglancer-demo.appspot.com/", metavar="URL",
        help="the page of Neuroglancer that your browser loads (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=0, help="port of --serve (default: a free one)")
    add_flags(parser, Overwriting)


def run(args: argparse.Namespace) -> int:
    if args.serve:
        return _serve(args)
    if len(args.paths) > 2:
        raise UsageError(f"a picture shows one array or two, not {len(args.paths)}")
    replace = from_flags(Overwriting, args).overwrite
    check_outputs(("--output", args.output), replace=replace, inputs=[Path(p) for p in args.paths])
    columns = [list(_planes(path, args)) for path in args.paths]
    rows = max(map(len, columns))
    longest = max(columns, key=len)
    heights = [plane.shape[0] * aspect / plane.shape[1] for _, plane, _, aspect in longest]
    heights = [min(max(height, 0.2), 2.0) for height in heights]
    size = (_INCHES * len(columns), _INCHES * (sum(heights) + 0.1 * rows))
    with picture(
        args.output, size, rows, len(columns), replace=replace, height_ratios=heights
    ) as panels:
        for column, planes in enumerate(columns):
            for row, (title, plane, (low, high), aspect) in enumerate(planes):
                panel = panels[row, column]
                panel.imshow(plane, cmap="gray", vmin=low, vmax=high, aspect=aspect)
                panel.set_title(title, fontsize=9)
    print(args.output)
    return 0


def _serve(args: argparse.Namespace) -> int:
    for path in args.paths:
        if not Path(path).is_dir():
            raise UsageError(f"PATH {path}: --serve takes Zarr stores of this machine: folders")
    if not args.viewer.startswith(("http://", "https://")):
        raise UsageError(f"--viewer {args.viewer}: give the address of a page, http:// or https://")
    serve_stores(list(map(Path, args.paths)), args.viewer, args.port, partial(print, flush=True))
    return 0


def _planes(path: str, args: argparse.Namespace) -> Iterator[tuple[str, Any, Any, float]]:
    """The middle planes of an array: title, pixels, black and white, height of a pixel by width."""
    chosen = {"name": "PATH", "series": args.series, "axes": args.axes}
    first = open_source(path, **chosen)
    source, level = coarsest_level(path, first, (2, 3, 4), _SIDE, **chosen)
    domain = source.domain
    place = [low + side // 2 for low, side in zip(domain.start, domain.shape, strict=True)]
    for axis, flag in ((0, "t"), (1, "c")):
        low, high = domain.start[axis], domain.stop[axis]
        place[axis] = low if (said := getattr(args, flag)) is None else said
        if not low <= place[axis] < high:
            raise UsageError(
                f"--{flag} {place[axis]} is out of range: {path} has {low} to {high - 1}"
            )
    across = [2, 3, 4] if source.domain.shape[2] > 1 else [2]
    colored = getattr(source, "bands", False) and args.c is None
    colored = colored and source.domain.shape[1:3] in ((3, 1), (4, 1))
    planes = [_plane(source, place, axis, 3 if colored else 1) for axis in across]
    if source.dtype.kind in "iu" and getattr(source, "holds_labels", False):
        planes = [(_in_colors(plane), steps) for plane, steps in planes]
    finite = np.concatenate([plane[np.isfinite(plane)] for plane, _ in planes])
    window = np.percentile(finite, _WINDOW) if finite.size else (0, 1)
    if colored:
        low, high = (0, 255) if source.dtype == np.uint8 else window
        planes = [(np.nan_to_num((p - low) / (high - low or 1)).clip(0, 1), n) for p, n in planes]
    sizes = source.scale or (1.0,) * 5
    for axis, (plane, (down, right)) in zip(across, planes, strict=True):
        rows, columns = (each for each in (2, 3, 4) if each != axis)
        aspect = abs(sizes[rows] * down / (sizes[columns] * right))
        where = f", {'tczyx'[axis]} {place[axis]}" if len(across) > 1 else ""
        yield f"{source.name}, level {level}{where}", plane, window, aspect


def _in_colors(labels: Any) -> Any:
    """Labels as red, green and blue: 0 is black, and numbers near each other look apart."""
    hsv_to_rgb = require("matplotlib.colors", "plot").hsv_to_rgb
    hues, pale = labels * _GOLDEN % 1, labels * _GOLDEN**2 % 1
    return hsv_to_rgb(np.stack([hues, 0.5 + 0.5 * pale, np.where(labels == 0, 0.0, 1.0)], axis=-1))


def _plane(
    source: Any, place: list[int], axis: int, channels: int = 1
) -> tuple[Any, tuple[int, int]]:
    """The pixels of a plane, of which some are left out so that they fit, and the steps along it.
    Several channels are its last axis. Some chunks are read at a time."""
    start, shape = list(place), [1, channels, 1, 1, 1]
    kept = [each for each in (2, 3, 4) if each != axis]
    for each in kept:
        start[each], shape[each] = source.domain.start[each], source.domain.shape[each]
    down, right = strides = [math.ceil(shape[each] / _SIDE) for each in kept]
    step, fit = list(shape), _PIECE_BYTES // (math.prod(source.chunks) * source.dtype.itemsize)
    for each, by, chunks in zip(kept, strides, (1, max(1, fit)), strict=True):
        step[each] = -(-source.chunks[each] * chunks // by) * by
    pixels = np.empty(
        (*(-(-shape[each] // by) for each, by in zip(kept, strides, strict=True)), channels)
    )
    for cell in Grid(Box.of(start, shape), tuple(step), tuple(start)):
        piece = np.moveaxis(source.read(cell)[0], 0, -1).squeeze(axis - 2)[::down, ::right]
        top, left = (
            (cell.start[each] - start[each]) // by for each, by in zip(kept, strides, strict=True)
        )
        pixels[top : top + len(piece), left : left + piece.shape[1]] = piece
    return pixels if channels > 1 else pixels[..., 0], (down, right)
