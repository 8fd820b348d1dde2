"""``penstock info PATH``: what an input or a model holds, as ``infer`` would read it."""

from __future__ import annotations

import argparse
import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any

from ..base import format_bytes
from ..data import SeveralArrays, coarser_levels, open_source
from ..models import REGISTRY, package_kind

EXAMPLES = """
penstock info noisy.ome.zarr
penstock info brain.ims
penstock info run.nwb::acquisition/TwoPhotonSeries/data
penstock info denoise-tiny
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a file, a folder, a store or a URL; a model")
    parser.add_argument("--series", type=int, metavar="N", help="the image to take of several")
    parser.add_argument("--axes", metavar="AXES", help="the letters of the stored axes: tyx, zcyx")
    parser.add_argument("--test", action="store_true", help="run a model on its test tensors")
    parser.add_argument("--trust-model", action="store_true", help="run code of a model's package")


def run(args: argparse.Namespace) -> int:
    if args.path in REGISTRY or package_kind(args.path) is not None:
        return _show_model(args)
    return _show_array(args)


def _show_model(args: argparse.Namespace) -> int:
    """Say what a model holds, and whether its test tensors come out. Returns the exit code."""
    from ..models import load_model, model_lines, run_test

    model = load_model(args.path, untrained=True, trust=args.trust_model)
    print(f"{'model':<9} {package_kind(args.path) or 'of the registry'}")
    for word, text in model_lines(model):
        print(f"{word:<9} {text}")
    equal, line = run_test(model) if args.test else (True, "")
    if line:
        print(f"{'test':<9} {line}")
    trusted = ["--trust-model"] if args.trust_model else []
    command = ["penstock", "infer", "IN", "OUT.ome.zarr", "--model", args.path, *trusted]
    print(f"{'infer':<9} {shlex.join(command)}")
    return 0 if equal else 1


def _show_array(args: argparse.Namespace) -> int:
    chosen = {"axes": args.axes, "series": args.series, "name": "PATH"}
    try:
        first = open_source(args.path, **chosen)
    except SeveralArrays as several:
        print(f"{args.path} holds several; name one:")
        for place, words in several.places:
            named = f"{args.path} {place}" if place.startswith("--") else place
            print(f"  penstock info {named}  {words}".rstrip())
        return 0
    print(*_of_array(first), sep="\n")
    for level, source in coarser_levels(args.path, first, **chosen):
        print(f"level {level:<3} {_sides(source.domain.shape, source)}, {_voxel(source)}")
    for note in getattr(first, "notes", ()):
        print(f"note      {note}")
    ending = "tif" if getattr(first, "georeferenced", False) else "ome.zarr"
    print(f"infer     {infer_line(args, ending=ending)}")
    return 0


def infer_line(args: argparse.Namespace, more: Sequence[str] = (), ending: str = "ome.zarr") -> str:
    """The command of ``infer`` that takes the input of a verb, with its flags and others."""
    place = "" if args.path.startswith("{") else args.path.partition("::")[0].partition("?")[0]
    name = PurePosixPath(place).name.lstrip(".-").partition(".")[0] or "input"
    command = ["penstock", "infer", "--in-spec", args.path, "--out-spec", f"{name}-out.{ending}"]
    for flag in ("axes", "series"):
        if (said := getattr(args, flag)) is not None:
            command += [f"--{flag}", str(said)]
    return shlex.join([*command, "--model-type", "MODEL", *more])


def _of_array(source: Any) -> Iterator[str]:
    size = math.prod(source.domain.shape) * source.dtype.itemsize
    yield f"array     {_sides(source.domain.shape, source)} {source.dtype}, {format_bytes(size)}"
    if source.chunks != (1,) * 5:  # of an array in one piece
        codec = getattr(source, "codec", "")
        yield f"chunks    {_sides(source.chunks, source)}{f', {codec}' if codec else ''}"
    yield f"voxel     {_voxel(source)}"
    names = [str(each.get("label", "")) for each in getattr(source, "omero", ())]
    if any(names):
        yield f"channels  {', '.join(names)}"


def _sides(sides: Sequence[int], source: Any) -> str:
    shown = [str(side) for side, axis in zip(sides, "tczyx", strict=True) if axis in source.axes]
    return f"{source.axes} {' x '.join(shown)}"


def _voxel(source: Any) -> str:
    """The size of a voxel along the axes that have one: 1 stands for one that is not known."""
    if source.scale is None:
        return "of unknown size"
    each = zip(source.scale, source.units, "tczyx", strict=True)
    return ", ".join(
        f"{axis} {size:g}{f' {unit}' if unit else ''}"
        for size, unit, axis in each
        if axis in source.axes and axis != "c" and (unit or size != 1 or not any(source.units))
    )
