"""The georeference of a raster: its CRS, transform and no-data value, which a GeoTIFF gets too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...base import UsageError, describe, require, scrub
from .protocols import Source, suffix_of

GDAL_CACHE = 2**26
"""Bytes of decoded tiles that GDAL keeps. It takes this number once, for all of the process; its
own would be a share of all memory."""
GDAL_OPTIONS = {
    "GDAL_CACHEMAX": GDAL_CACHE,
    # Listing the folder of a remote file would ask for every file beside it.
    "GDAL_DISABLE_READDIR_ON_OPEN": "EMPTY_DIR",
}

POINTS_STAY = "the input's ground control points or RPCs are not carried to any output"
ALPHA_IS_READ = "a band of the input is alpha, and is read as one more channel; --c leaves it out"


@dataclass(frozen=True, slots=True)
class Georeference:
    """The place of a raster in the world, and its value for no data."""

    crs: str | None
    """The coordinate reference system as WKT."""
    transform: tuple[float, ...]
    """The numbers a, b, c, d, e, f of the affine transform from column and row to x and y."""
    nodata: str | None
    """The value as a text, as JSON has no NaN."""


def georeference_of(
    source: Source, at: Sequence[int], dtype: np.dtype[Any], where: str
) -> Georeference:
    """The georeference of an output of a raster.

    Args:
        source: The raster, one that is ``georeferenced``.
        at: The first voxel of the output in it, t c z y x.
        dtype: The dtype of the output.
        where: What messages begin with.

    Raises:
        UsageError: The CRS, or the file, cannot be read.
    """
    rasterio = require("rasterio", "scenes")
    errors = require("rasterio.errors", "scenes")
    try:
        with rasterio.Env(**GDAL_OPTIONS), rasterio.open(source.address) as dataset:
            crs, transform, nodata = dataset.crs, dataset.transform, dataset.nodata
            height, width = dataset.shape
    except (errors.RasterioError, ValueError, OSError) as error:
        raise UsageError(f"{where}: the input's CRS cannot be read: {describe(error)}") from error
    text = crs.to_wkt() if crs else None
    if _is_lost(text, source.address):
        raise UsageError(
            f"{where}: the CRS of {scrub(source.address)} cannot be read; gdal_edit -a_srs EPSG:N "
            "sets it, or give an output that has none, such as OME-Zarr (*.zarr)"
        )
    rows, columns = source.domain.shape[3:]  # fewer of an overview
    across, down = width / columns, height / rows
    a, b, c, d, e, f = (float(number) for number in tuple(transform)[:6])
    a, b, d, e = a * across, b * down, d * across, e * down
    moved = (a, b, c + a * at[4] + b * at[3], d, e, f + d * at[4] + e * at[3])
    value = _nodata(nodata, dtype, stored=getattr(source, "packing", None) is None)
    return Georeference(text, moved, value)


def _is_lost(crs: str | None, address: str) -> bool:
    """Whether a raster names a CRS that GDAL does not know."""
    if crs is not None:
        return crs.startswith(('LOCAL_CS["unnamed"', 'ENGCRS["unnamed"'))
    file = Path(address)
    return suffix_of(address) == ".vrt" and file.is_file() and b"<SRS" in file.read_bytes()


def _nodata(value: float | None, dtype: np.dtype[Any], *, stored: bool) -> str | None:
    """The value of an output for no data: NaN where values were decoded, as then no data is NaN;
    where numbers were read as ``stored`` that of the input, if the output's dtype has it."""
    if value is None or (not stored and dtype.kind != "f"):
        return None
    if not stored or math.isnan(value):
        return "nan" if dtype.kind == "f" else None
    with np.errstate(all="ignore"):
        return repr(value) if float(np.float64(value).astype(dtype)) == value else None
