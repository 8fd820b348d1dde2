"""The pixels of a scene's rasters: windows of 10 m pixels, and 500 m rasters between their pixels.

A raster of 10 m is read only where a window lies. One of 500 m is small: it is held whole and
interpolated for the window, so that it never grows to the scene. A missing value is NaN. A raster
that cannot be read is an error, never zeros.

Coordinates on Earth and the small rasters are read by rasterio. The pixels of the large ones are
read by tifffile: they are 16-bit floats, and GDAL would widen each, at several times the cost of
reading.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, describe, require

FloatArray = NDArray[np.float32]
Values = NDArray[Any]
"""16-bit floats where the raster holds them, 32-bit ones otherwise; NaN is missing."""

NODATA = -32768.0


SLAB = 64
"""Rows of a scene that stay in the processor's cache while they are worked on."""
ENDS_EARLY = "the file ends before its pixels do"


class Pixels:
    """The pixels of a TIFF, in strips or tiles, deflated or not: only those that a window needs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        tifffile = require("tifffile", "scenes")
        self._file = path.open("rb")
        try:
            self._tiff = tifffile.TiffFile(self._file)
            self._page: Any = self._tiff.pages[0]
        except Exception as error:  # a damaged header may raise anything
            self.close()
            raise UsageError(f"{path} is not a TIFF that can be read: {describe(error)}") from error
        page = self._page
        if page.samplesperpixel != 1:
            self.close()
            raise UsageError(f"{path} has {page.samplesperpixel} values a pixel; a scene has one")
        self.dtype = np.dtype(np.float16 if page.dtype == np.float16 else np.float32)
        height, self._width = page.imagelength, page.imagewidth
        self._piece = (
            (page.tilelength, page.tilewidth)
            if page.is_tiled
            else (min(page.rowsperstrip, height), self._width)
        )

        tall = self._piece[0]
        self.rows_at_once: int = tall if page.is_tiled else max(1, SLAB // tall) * tall

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
            if self._page.is_final:
                values = self._lines(rows)[:, slice(*columns)]
            else:
                values = self._pieces(rows, columns)
        except Exception as error:  # damaged pixels may raise anything too
            raise UsageError(
                f"{self._path} cannot be read at rows {rows[0]} to {rows[1]}: {describe(error)}"
            ) from error
        return _marked(values.astype(self.dtype, copy=False))

    def _lines(self, rows: tuple[int, int]) -> Values:
        """Whole rows of a raster that is stored uncompressed and contiguous, in one read."""
        stored = self._page.dtype.newbyteorder(self._tiff.byteorder)
        lines: Values = np.empty((rows[1] - rows[0], self._width), stored)
        file = self._tiff.filehandle
        file.seek(self._page.dataoffsets[0] + rows[0] * lines.strides[0])
        if file.readinto(lines) != lines.nbytes:
            raise EOFError(ENDS_EARLY)
        return lines

    def _pieces(self, rows: tuple[int, int], columns: tuple[int, int]) -> Values:
        """A window, read from the strips or tiles that it touches."""
        (tall, wide), page = self._piece, self._page
        window: Values = np.empty((rows[1] - rows[0], columns[1] - columns[0]), page.dtype)
        across = -(-self._width // wide)
        pieces = [
            down * across + right
            for down in range(rows[0] // tall, -(-rows[1] // tall))
            for right in range(columns[0] // wide, -(-columns[1] // wide))
        ]
        offsets, counts = (
            [of[i] for i in pieces] for of in (page.dataoffsets, page.databytecounts)
        )
        for data, index in self._tiff.filehandle.read_segments(offsets, counts, pieces):
            if data is None or len(data) != page.databytecounts[index]:
                raise EOFError(ENDS_EARLY)
            values, (_, _, top, left, _), (_, height, width, _) = page.decode(data, index)
            first, stop = max(top, rows[0]), min(top + height, rows[1])
            begin, end = max(left, columns[0]), min(left + width, columns[1])
            part = values[0, first - top : stop - top, begin - left : end - left, 0]
            window[first - rows[0] : stop - rows[0], begin - columns[0] : end - columns[0]] = part
        return window

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _marked(values: Values) -> Values:
    """Replace the raster's no-data value and infinities by NaN, in place."""
    if values.dtype == np.float16:  # by its bits, five times as fast
        bits = values.view(np.uint16)
        bits[(bits == _NODATA_BITS) | (bits & _INFINITE == _INFINITE)] = _NAN_BITS
    else:
        values[(values == NODATA) | ~np.isfinite(values)] = np.nan
    return values


def is_missing(values: Values) -> NDArray[np.bool_]:
    """Where values are NaN."""
    if values.dtype == np.float16:
        return np.asarray(values.view(np.uint16) & np.uint16(0x7FFF) > _INFINITE)
    return np.isnan(values)


_NODATA_BITS, _INFINITE, _NAN_BITS = np.array([NODATA, np.inf, np.nan], np.float16).view(np.uint16)


@dataclass(frozen=True, slots=True)
class Coarse:
    """A raster of 500 m, held whole, and the places of 10 m pixels in it.

    Pixel ``i`` of an axis lies at ``origin + step * i``, counted between the centres of the pixels
    of 500 m.
    """

    kind: str
    values: FloatArray
    origin: tuple[float, float]
    step: tuple[float, float]

    def read(self, rows: tuple[int, int], columns: tuple[int, int]) -> FloatArray:
        """A window of 10 m pixels."""
        down, right = (
            self.origin[axis] + self.step[axis] * np.arange(*window, dtype=np.float64)
            for axis, window in enumerate((rows, columns))
        )
        # Take only the 500 m pixels around the window.
        top, bottom = _around(down, self.values.shape[0])
        left, end = _around(right, self.values.shape[1])
        values = np.asarray(self.values[top:bottom, left:end])
        down, right = down - top, right - left
        if self.kind == "nearest":
            nearest = [
                np.clip(np.rint(at), 0, length - 1).astype(np.intp)
                for at, length in zip((down, right), values.shape, strict=True)
            ]
            return np.ascontiguousarray(values[nearest[0][:, None], nearest[1]])
        if self.kind == "degrees":  # angles: halfway from 350 to 10 is 0, not 180
            turns = np.deg2rad(values)
            east, north = (_linear(part(turns), down, right) for part in (np.sin, np.cos))
            return np.asarray(np.rad2deg(np.arctan2(east, north)) % 360, np.float32)
        return _linear(values, down, right)


def read_coarse(path: Path, coarse: Any, fine: Any, *, kind: str, zero_is_missing: bool) -> Coarse:
    """A raster of 500 m, aligned with a 10 m raster by the coordinates in both open files. Without
    coordinates both are taken to cover the same ground."""
    if fine.crs and coarse.crs:
        if fine.crs != coarse.crs:
            raise UsageError(f"{path} is in {coarse.crs}, and the radar in {fine.crs}")
        ours, theirs = fine.transform, coarse.transform
        if any((ours.b, ours.d, theirs.b, theirs.d)):
            raise UsageError(f"{path} and the radar must both have north at the top")
        origin = ((ours.f - theirs.f) / theirs.e, (ours.c - theirs.c) / theirs.a)
        step = (ours.e / theirs.e, ours.a / theirs.a)
    else:
        origin, step = (0.0, 0.0), (coarse.height / fine.height, coarse.width / fine.width)
    try:
        values = _marked(coarse.read(1, out_dtype=np.float32))
    except require("rasterio.errors", "scenes").RasterioError as error:
        raise UsageError(f"{path} cannot be read: {describe(error.__cause__ or error)}") from error
    if zero_is_missing:
        values[values == 0] = np.nan
    # From edges to centres: pixel i of 10 m has its centre at i + 1/2.
    centres = (origin[0] + step[0] / 2 - 0.5, origin[1] + step[1] / 2 - 0.5)
    return Coarse(kind, values, centres, step)


def _around(at: NDArray[np.float64], length: int) -> tuple[int, int]:
    """The half-open range of pixels, of ``length``, around all places ``at``, which ascend."""
    first = min(max(math.floor(at[0]), 0), length - 1)
    return first, max(min(math.floor(at[-1]) + 2, length), first + 1)


def _linear(
    values: FloatArray, down: NDArray[np.float64], right: NDArray[np.float64]
) -> FloatArray:
    """Values between pixels. A missing pixel is left out of the mean and does not spread: the
    result is missing only where the missing pixel is the nearest.
    """
    missing = np.isnan(values)
    if not missing.any():
        return _between(values, down, right)
    weights = _between((~missing).astype(np.float32), down, right)
    sums = _between(np.where(missing, np.float32(0), values), down, right)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(weights >= 0.5, sums / weights, np.float32(np.nan))


def _between(
    values: FloatArray, down: NDArray[np.float64], right: NDArray[np.float64]
) -> FloatArray:
    """Values between pixels, linear along both axes; beyond the ends, the end's value."""
    lower, upper, part = _neighbours(right, values.shape[1])
    lines = values[:, lower] + (values[:, upper] - values[:, lower]) * part
    lower, upper, part = _neighbours(down, len(values))
    between = np.empty((len(down), len(right)), np.float32)
    # All lines between the same two at once: they stay in the processor's cache.
    edges = [0, *np.flatnonzero(np.diff(lower)) + 1, len(down)]
    for first, stop in pairwise(edges):
        line, step = lines[lower[first]], lines[upper[first]] - lines[lower[first]]
        between[first:stop] = line + step * part[first:stop, None]
    return between


def _neighbours(
    at: NDArray[np.float64], length: int
) -> tuple[NDArray[np.intp], NDArray[np.intp], FloatArray]:
    """The pixels on both sides of each place, and its distance from the first one as a share of a
    pixel."""
    at = np.clip(at, 0, length - 1)
    lower = np.floor(at).astype(np.intp)
    return lower, np.minimum(lower + 1, length - 1), (at - lower).astype(np.float32)
