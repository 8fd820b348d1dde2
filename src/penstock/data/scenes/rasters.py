"""The pixels of a scene's rasters of 10 m, by windows, and what their files say of them.

A file says where it has values (a no-data value, a mask, an alpha band; NaN and infinities are
missing anyhow), how its numbers become values (scale and offset) and in which unit, and where it
lies on Earth. All of it holds, or the file is refused. A missing value is NaN. A raster that cannot
be read is an error, never zeros.

rasterio reads the pixels, but for 16-bit floats, as xView3 has them: GDAL would widen each, at
several times the cost of reading, so the store of TIFF files reads these.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, describe, plural, require
from ..box import Box
from ..stores.open import open_source
from ..stores.protocols import Source

FloatArray = NDArray[np.float32]
Values = NDArray[Any]
"""16-bit floats where the raster holds them, 32-bit ones otherwise; NaN is missing."""

NODATA = -32768.0
"""No value, in the rasters of xView3 and in any file that names no other."""


SLAB = 64
"""Rows of a scene that stay in the processor's cache while they are worked on."""
OFF_GRID = 0.1
"""Pixels by which rasters of 10 m may lie apart."""


def check_raster(path: Path, file: Any, units: Collection[str]) -> None:
    """Refuse a raster that is not one band of real numbers in the channel's unit.

    Args:
        path: its path.
        file: the raster, open in rasterio.
        units: spellings of the channel's unit, in small letters; none where it has no unit.

    Raises:
        UsageError: the raster is another one.
    """
    alpha = require("rasterio.enums", "scenes").ColorInterp.alpha
    bands = [band for band, of in zip(file.indexes, file.colorinterp, strict=True) if of != alpha]
    unit = (file.units[0] or "").strip()
    if file.subdatasets:
        raise UsageError(
            f"{path} holds {plural(len(file.subdatasets), 'image')}, and a channel is one"
        )
    if bands != [1]:
        raise UsageError(f"{path} has {plural(len(bands), 'band')}, and a channel is one")
    if file.dtypes[0].startswith("complex"):
        raise UsageError(
            f"{path} has complex samples ({file.dtypes[0]}); a channel of radar is real, in dB"
        )
    if unit and units and unit.lower() not in units:
        raise UsageError(f"{path} is in {unit!r}, and the model takes {next(iter(units))}")


def is_placed(file: Any) -> bool:
    """Whether a raster has a place on Earth or on another plane, and not pixels alone."""
    return not file.transform.is_identity


def places_in(other: Any, of: Any, columns: Any, rows: Any) -> NDArray[np.float64]:
    """Where places of one raster lie in another one.

    Args:
        other: the raster to find them in, open in rasterio.
        of: the raster that they are given in.
        columns: pixels, from the left edge.
        rows: likewise from the upper edge.

    Returns:
        Columns and rows in ``other``, shape (2, n); NaN where there is none.
    """
    x, y, ones = map_of(of) @ [columns, rows, np.ones(len(columns))]
    if of.crs != other.crs:
        try:
            transform = require("rasterio.warp", "scenes").transform
            x, y = np.asarray(transform(of.crs, other.crs, x.tolist(), y.tolist()))
        except Exception:  # of GDAL, which has many kinds
            x = y = np.full(len(columns), np.nan)
        x, y = np.where(np.isfinite([x, y]), [x, y], np.nan)
    return np.asarray(np.linalg.inv(map_of(other)) @ [x, y, ones])[:2]


def map_of(file: Any) -> NDArray[np.float64]:
    """The map from columns and rows of a raster to its coordinates.

    Args:
        file: the raster, open in rasterio.

    Returns:
        The affine map as a matrix, shape (3, 3).
    """
    return np.reshape(file.transform, (3, 3))


def check_same_grid(path: Path, file: Any, first_path: Path, first: Any) -> None:
    """Refuse a raster of 10 m whose pixels are not those of the first one.

    Args:
        path: the path of the raster.
        file: the raster, open in rasterio.
        first_path: the path of the first raster.
        first: that raster.

    Raises:
        UsageError: size, place or coordinates differ.
    """
    if file.shape != first.shape:
        raise UsageError(
            f"{path} has {file.height} x {file.width} pixels and "
            f"{first_path.name} {first.height} x {first.width}"
        )
    check_comparable(path, file, first_path, first)
    if not is_placed(first):
        return
    corners = np.array([[0, file.width, 0, file.width], [0, 0, file.height, file.height]])
    apart = np.abs(places_in(first, file, *corners) - corners).max()
    if not apart <= OFF_GRID:
        away = f": a corner is {apart:,.4g} pixels away" if apart > 0 else " on Earth"
        raise UsageError(f"{path} lies elsewhere than {first_path.name}{away}")


def check_comparable(path: Path, file: Any, first_path: Path, first: Any) -> None:
    """Refuse a raster if it and the first one do not both lie on Earth, or both not.

    Args:
        path: the path of the raster.
        file: the raster, open in rasterio.
        first_path: the path of the first raster.
        first: that raster.

    Raises:
        UsageError: one has a place and the other has none.
    """
    for what, one, other in (
        ("place on Earth (no transform)", is_placed(file), is_placed(first)),
        ("coordinate system (CRS)", bool(file.crs), bool(first.crs)),
    ):
        if one != other:
            lacks, has = (first_path, path) if one else (path, first_path)
            points = (first if one else file).gcps[0]
            but = ", but ground control points: warp it to a grid first" if points else ""
            raise UsageError(f"{lacks} has no {what}{but}, and {has.name} has one")


def pixel_metres(file: Any) -> tuple[float, float] | None:
    """The height and width on the ground of the pixel in the middle of a raster, in metres.

    Args:
        file: the raster, open in rasterio.

    Returns:
        The sides, None where the place on Earth is not known.
    """
    if not (file.crs and is_placed(file)):
        return None
    column, row = file.width / 2, file.height / 2
    try:
        transform = require("rasterio.warp", "scenes").transform
        x, y, _ = map_of(file) @ [[column, column + 1, column], [row, row, row + 1], [1, 1, 1]]
        place = np.ravel(transform(file.crs, "EPSG:4326", x[:1], y[:1]))
        around = f"+proj=aeqd +lon_0={place[0]} +lat_0={place[1]} +datum=WGS84"
        metres = np.array(transform(file.crs, around, x, y))
    except Exception:  # of GDAL, which has many kinds
        return None
    width, height = np.hypot(*(metres[:, 1:] - metres[:, :1])).tolist()
    return height, width


def decoded(file: Any, read: Any) -> FloatArray:
    """The values of pixels that rasterio read with their mask.

    Args:
        file: the raster.
        read: numbers as the file stores them, a masked array.

    Returns:
        Values in the file's unit, NaN where it has none.
    """
    values: FloatArray = read.data.astype(np.float32)
    missing = np.ma.getmaskarray(read) | ~np.isfinite(values)
    # It has no no-data value, no mask and no alpha band.
    if require("rasterio.enums", "scenes").MaskFlags.all_valid in file.mask_flag_enums[0]:
        missing |= values == NODATA
    if (file.scales[0], file.offsets[0]) != (1, 0):
        values = (read.data * file.scales[0] + file.offsets[0]).astype(np.float32)
    values[missing] = np.nan
    return values


class Pixels:
    """The pixels of a raster of one band: only those that a window needs."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path, self._file = path, file
        self.dtype = np.dtype(np.float16 if _holds_halves(file) else np.float32)
        self._missing = _halves_of(NODATA if file.nodata is None else file.nodata)
        tall, wide = file.block_shapes[0]
        self.rows_at_once: int = max(1, SLAB // tall) * tall if wide >= file.width else tall

    @cached_property
    def _halves(self) -> Source:
        """The raster as 16-bit floats. A damaged one is an error of the read, as with rasterio."""
        return open_source(self._path, raw=True, name="scene")

    def read(self, rows: tuple[int, int], columns: tuple[int, int]) -> Values:
        """A window; NaN where a value is missing.

        Args:
            rows: half-open, inside the raster.
            columns: half-open, inside the raster.

        Returns:
            Values of shape (rows, columns).

        Raises:
            UsageError: the file cannot be read there.
        """
        try:
            if self.dtype == np.float32:
                return decoded(self._file, self._file.read(1, window=(rows, columns), masked=True))
            window = Box((0, 0, 0, rows[0], columns[0]), (1, 1, 1, rows[1], columns[1]))
            # GDAL, which reads what files beside it explain, widens halves.
            values: Values = self._halves.read(window)[0, 0, 0].astype(np.float16, copy=False)
        except Exception as error:  # damaged pixels may raise anything
            raise UsageError(
                f"{self._path} cannot be read at rows {rows[0]} to {rows[1]}: "
                f"{describe(error.__cause__ or error)}"
            ) from error
        bits = values.view(np.uint16)  # five times as fast as floats
        missing = bits & _INFINITE == _INFINITE
        for other in self._missing:
            missing |= bits == other
        bits[missing] = _NAN_BITS
        return values


def _holds_halves(file: Any) -> bool:
    """Whether a raster holds 16-bit floats, and no more to say of them than a no-data value."""
    flags = require("rasterio.enums", "scenes").MaskFlags
    plain = (file.scales[0], file.offsets[0]) == (1, 0) and file.mask_flag_enums[0] in (
        [flags.nodata], [flags.all_valid]
    )  # fmt: skip
    narrowed = file.tags(1, ns="IMAGE_STRUCTURE").get("NBITS") == "16"
    halves = file.dtypes[0] == "float16" or (file.dtypes[0] == "float32" and narrowed)
    return plain and halves and bool(file.driver == "GTiff")


def _halves_of(value: float) -> set[int]:
    """The bits of the 16-bit floats that may stand for a value: those on both sides of one that is
    none of them, and for 0 also -0."""
    with np.errstate(over="ignore"):
        half = np.float16(value)
    halves = [np.float16(0.0), np.float16(-0.0)] if value == 0 else [half]
    if float(half) != value and not np.isnan(value):  # GDAL rounds towards 0
        halves.append(np.nextafter(half, np.float16(np.copysign(np.inf, value - float(half)))))
    return {int(bits) for bits in np.array(halves).view(np.uint16)}


def is_missing(values: Values) -> NDArray[np.bool_]:
    """Where values are NaN."""
    if values.dtype == np.float16:
        return np.asarray(values.view(np.uint16) & np.uint16(0x7FFF) > _INFINITE)
    return np.isnan(values)


_INFINITE, _NAN_BITS = np.array([np.inf, np.nan], np.float16).view(np.uint16)
