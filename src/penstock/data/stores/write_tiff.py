"""Writes OME-TIFF by tifffile, from arrays of any size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base import require, usable_cores
from .file_formats import OME_UNITS
from .plane_rows import CLASSIC_BYTES, DEFLATE_LEVEL, TILE, rows_of
from .protocols import AXES

if TYPE_CHECKING:
    from .tensorstore import TensorStoreSource

_ENCODED_AT_ONCE = 2**26
"""Bytes of tiles that tifffile encodes at a time."""


def write_ome_tiff(path: Path, levels: Sequence[TensorStoreSource], progress: Any) -> None:
    """Write an OME-TIFF, with the levels below the first as SubIFDs of its planes.

    Args:
        path: The file, which is made.
        levels: The image, and smaller copies of all of its planes.
        progress: Told the number of voxels that are written.
    """
    tifffile = require("tifffile", "infer")
    first, *below = levels
    options = {
        "dtype": first.dtype, "photometric": "minisblack", "tile": (TILE, TILE),
        "compression": "zlib", "compressionargs": {"level": DEFLATE_LEVEL}, "predictor": True,
        "maxworkers": usable_cores(), "buffersize": _ENCODED_AT_ONCE,
    }  # fmt: skip
    size = sum(level.domain.size for level in levels) * first.dtype.itemsize
    with tifffile.TiffWriter(path, ome=True, bigtiff=size > CLASSIC_BYTES) as file:
        for level in levels:
            of_first = {"subifds": len(below), "metadata": _ome_metadata(first)}
            more = of_first if level is first else {"subfiletype": 1}
            shape = [level.domain.shape[AXES.index(axis)] for axis in first.axes]
            file.write(_tiles(level, progress), shape=shape, **more, **options)


def _tiles(level: TensorStoreSource, progress: Any) -> Iterator[Any]:
    for _, rows in rows_of(level, "tcz", progress):
        for row in range(0, rows.shape[0], TILE):
            for column in range(0, rows.shape[1], TILE):
                # With its samples: of a tile one voxel wide, tifffile takes the rows for columns.
                yield np.ascontiguousarray(rows[row : row + TILE, column : column + TILE, None])


def _ome_metadata(image: TensorStoreSource) -> dict[str, Any]:
    """What OME's XML says of an image, in the words of tifffile."""
    says: dict[str, Any] = {"axes": image.axes.upper()}
    for axis, size, unit in zip(AXES, image.scale or (), image.units, strict=bool(image.scale)):
        key = "TimeIncrement" if axis == "t" else f"PhysicalSize{axis.upper()}"
        if axis != "c" and axis in image.axes and unit is not None:
            says |= {key: abs(size), f"{key}Unit": OME_UNITS[unit]}
    channels = {}
    if any("label" in each for each in image.omero):
        channels["Name"] = [each.get("label", "") for each in image.omero]
    if any("color" in each for each in image.omero):
        channels["Color"] = [_color(each.get("color", "FFFFFF")) for each in image.omero]
    return {**says, **({"Channel": channels} if channels else {})}


def _color(red_green_blue: str) -> int:
    """A colour as OME has it: red, green, blue and alpha in one signed integer."""
    value = (int(red_green_blue, 16) << 8) | 0xFF
    return value - 2**32 if value >= 2**31 else value
