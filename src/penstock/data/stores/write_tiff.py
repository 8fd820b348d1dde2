"""Writes OME-TIFF by tifffile, and Cloud Optimized GeoTIFF by GDAL, from arrays of any size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base import require, usable_cores
from ..levels import Rule
from .file_formats import OME_UNITS
from .georeference import GDAL_OPTIONS, Georeference
from .plane_rows import TILE, rows_of
from .protocols import AXES

if TYPE_CHECKING:
    from .tensorstore import TensorStoreSource

_ENCODED_AT_ONCE = 2**26
"""Bytes of tiles that tifffile encodes at a time."""
_LEVEL = 1
"""The level of deflate. With a predictor, level 6 takes 1.5 times as long for files as large."""
_CLASSIC_BYTES = 2**32 - 2**26
"""The size, before compression, above which a TIFF file gets 64-bit offsets."""


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
        "compression": "zlib", "compressionargs": {"level": _LEVEL}, "predictor": True,
        "maxworkers": usable_cores(), "buffersize": _ENCODED_AT_ONCE,
    }  # fmt: skip
    size = sum(level.domain.size for level in levels) * first.dtype.itemsize
    with tifffile.TiffWriter(path, ome=True, bigtiff=size > _CLASSIC_BYTES) as file:
        for level in levels:
            of_first = {"subifds": len(below), "metadata": _ome_metadata(first)}
            more = of_first if level is first else {"subfiletype": 1}
            shape = [level.domain.shape[AXES.index(axis)] for axis in first.axes]
            file.write(_tiles(level, progress), shape=shape, **more, **options)


def _tiles(level: TensorStoreSource, progress: Any) -> Iterator[Any]:
    for _, rows in rows_of(level, "tcz", progress):
        for row in range(0, rows.shape[0], TILE):
            for column in range(0, rows.shape[1], TILE):
                yield np.ascontiguousarray(rows[row : row + TILE, column : column + TILE])


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


def write_cog(
    path: Path, image: TensorStoreSource, place: Georeference, rule: Rule,
    count: int | str | None, progress: Any,
) -> None:  # fmt: skip
    """Write a Cloud Optimized GeoTIFF, whose bands are the channels.

    GDAL makes one only as a copy, as the overviews come first in the file. So a plain GeoTIFF is
    written beside it, and removed.

    Args:
        path: The file, which is made.
        image: The bands.
        place: Their place in the world.
        rule: How pixels become one of an overview.
        count: The number of levels in all, or ``none``; None for as many as GDAL makes.
        progress: Told the number of voxels that are written.
    """
    rasterio = require("rasterio", "scenes")
    shutil = require("rasterio.shutil", "scenes")
    draft = path.with_name("plain.tif")
    bands, (height, width) = image.domain.shape[1], image.domain.shape[3:]
    profile = {
        "driver": "GTiff", "width": width, "height": height, "count": bands,
        "dtype": image.dtype.name, "crs": place.crs,
        "transform": rasterio.Affine(*place.transform),
        "nodata": None if place.nodata is None else float(place.nodata),
        "tiled": True, "blockxsize": TILE, "blockysize": TILE, "interleave": "band",
        "BIGTIFF": "IF_SAFER",
    }  # fmt: skip
    with rasterio.Env(**GDAL_OPTIONS):
        with rasterio.open(draft, "w", **profile) as plain:
            for number, shown in enumerate(image.omero, 1):
                plain.set_band_description(number, shown.get("label", ""))
            for box, rows in rows_of(image, "cz", progress):
                window = rasterio.windows.Window(0, box.start[3], width, rows.shape[0])
                plain.write(rows, box.start[1] + 1, window=window)
        shutil.copy(draft, path, driver="COG", **_cog_options(rule, count))
    draft.unlink()


def _cog_options(rule: Rule, count: int | str | None) -> Mapping[str, str]:
    options = {
        "BLOCKSIZE": str(TILE), "BIGTIFF": "IF_SAFER", "PREDICTOR": "YES",
        "COMPRESS": "DEFLATE", "LEVEL": str(_LEVEL),
        "OVERVIEW_RESAMPLING": {"mean": "AVERAGE", "mode": "MODE"}[rule],
        "NUM_THREADS": str(usable_cores()),
    }  # fmt: skip
    if count in ("none", 1):
        options["OVERVIEWS"] = "NONE"
    elif count is not None:
        options["OVERVIEW_COUNT"] = str(int(count) - 1)
    return options
