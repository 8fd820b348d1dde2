"""Rasters of 500 m between their pixels: small, held whole, and interpolated for windows of 10 m.

A raster is laid where its coordinates say. One whose axes are those of the radar is kept as it is;
any other is warped by rasterio onto the radar's axes, with pixels a quarter as large. A place that
lies outside, or whose nearest pixel is missing, has no value.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, as_usage_error, describe, require
from .rasters import FloatArray, check_comparable, decoded, is_placed, map_of, places_in

FINER = 4
"""Pixels of a warped raster for one of the file, along a side."""
STRAIGHT = 0.01
"""Pixels of 500 m by which a line of the radar may leave theirs, over all of a scene."""


@dataclass(frozen=True, slots=True)
class Coarse:
    """A raster of 500 m, held whole within a border of missing pixels, and the places of 10 m
    pixels in it.

    Pixel ``i`` of an axis lies at ``origin + step * i``, counted between the centres of the pixels
    of 500 m.
    """

    kind: str
    values: FloatArray
    origin: tuple[float, float]
    step: tuple[float, float]

    def read(self, rows: tuple[int, int], columns: tuple[int, int]) -> FloatArray:
        """A window of 10 m pixels."""
        down, right = self._at(rows, 0), self._at(columns, 1)
        # Take only the 500 m pixels around the window.
        top, bottom = _around(down, self.values.shape[0])
        left, end = _around(right, self.values.shape[1])
        values = np.asarray(self.values[top:bottom, left:end])
        places = zip((down - top, right - left), values.shape, strict=True)
        nearest = np.ix_(*(np.clip(at + 0.5, 0, n - 1).astype(np.intp) for at, n in places))
        if self.kind == "nearest":
            return values[nearest]
        window = _smooth(self.kind, values, lambda of: _linear(of, down - top, right - left))
        if (missing := np.isnan(values)).any():
            window[missing[nearest]] = np.nan
        return window

    def count_valid(self, size: tuple[int, int]) -> int:
        """The pixels of 10 m that have a value.

        Args:
            size: rows and columns of the scene.

        Returns:
            Their number.
        """
        per_pixel = []
        for axis, length in enumerate(self.values.shape):
            near = np.floor(self._at((0, size[axis]), axis) + 0.5)
            inside = near[(near >= 0) & (near < length)].astype(np.intp)
            per_pixel.append(np.bincount(inside, minlength=length))
        return int(per_pixel[0] @ ~np.isnan(self.values) @ per_pixel[1])

    def _at(self, window: tuple[int, int], axis: int) -> NDArray[np.float64]:
        return self.origin[axis] + self.step[axis] * np.arange(*window, dtype=np.float64)


def read_coarse(
    path: Path, coarse: Any, fine_path: Path, fine: Any, *, kind: str, zero_is_missing: bool
) -> Coarse:
    """A raster of 500 m, laid under a raster of 10 m by the coordinates of both.

    If both have none, they are taken to cover the same ground.

    Args:
        path: the path of the raster.
        coarse: the raster, open in rasterio.
        fine_path: the path of the raster of 10 m.
        fine: that raster.
        kind: ``linear``, ``nearest`` or ``degrees``.
        zero_is_missing: whether 0 stands for no value.

    Returns:
        The raster.

    Raises:
        UsageError: it cannot be read, or does not lie where the radar does.
    """
    check_comparable(path, coarse, fine_path, fine)
    try:
        values = decoded(coarse, coarse.read(1, masked=True))
    except require("rasterio.errors", "scenes").RasterioError as error:
        raise UsageError(f"{path} cannot be read: {describe(error.__cause__ or error)}") from error
    if zero_is_missing:
        values[values == 0] = np.nan
    at, covered = np.linalg.inv(map_of(coarse)) @ map_of(fine), np.zeros_like(values)
    if not is_placed(fine):
        at = np.diag([coarse.width / fine.width, coarse.height / fine.height, 1])
    elif fine.crs != coarse.crs or (
        max(abs(at[0, 1]) * fine.height, abs(at[1, 0]) * fine.width) > STRAIGHT
    ):
        # The errors of GDAL are of many types.
        with as_usage_error(f"{path} cannot be warped to where {fine_path.name} lies"):
            values, covered, at = _warped(values, coarse, fine, kind)
    origin, step = [at[1, 2], at[0, 2]], [at[1, 1], at[0, 0]]
    for axis in (0, 1):
        if step[axis] < 0:  # such as a raster with south at the top
            values = np.ascontiguousarray(np.flip(values, axis))
            origin[axis], step[axis] = values.shape[axis] - origin[axis], -step[axis]
    # From edges to centres: pixel i of 10 m has its centre at i + 1/2.
    # The border is one pixel wide: what lies outside is missing.
    centres = [float(origin[axis] + step[axis] / 2 - 0.5 + 1) for axis in (0, 1)]
    values, covered = (np.pad(each, 1, constant_values=np.nan) for each in (values, covered))
    places = (centres[0], centres[1]), (float(step[0]), float(step[1]))
    if not Coarse(kind, covered, *places).count_valid(fine.shape):
        raise UsageError(f"{path} lies elsewhere: it covers no pixel of {fine_path}")
    return Coarse(kind, values, *places)


def _warped(
    values: FloatArray, coarse: Any, fine: Any, kind: str
) -> tuple[FloatArray, FloatArray, NDArray[np.float64]]:
    """Values on the axes of the radar, where the raster has pixels at all (NaN elsewhere), and the
    map from pixels of 10 m to them."""
    warp, enums = require("rasterio.warp", "scenes"), require("rasterio.enums", "scenes")
    column, row = fine.width / 2, fine.height / 2
    around = places_in(coarse, fine, [column, column + 1, column], [row, row, row + 1])
    step = float(np.hypot(*(around[:, 1:] - around[:, :1])).max())
    if not np.isfinite(step):
        raise ValueError("no way leads from one coordinate system to the other")
    every = max(1, int(1 / (FINER * step)))
    # A pixel more on all sides, so that nothing lies beyond the last centres.
    at = np.linalg.inv([[every, 0, -every], [0, every, -every], [0, 0, 1]])
    grid = require("rasterio", "scenes").Affine(*(map_of(fine) @ np.linalg.inv(at)).ravel()[:6])
    shape = [-(-side // every) + 2 for side in fine.shape]

    def warped(of: FloatArray, how: str) -> FloatArray:
        onto = np.full(shape, np.nan, np.float32)
        warp.reproject(
            of, onto,
            src_transform=coarse.transform, src_crs=coarse.crs or SOME_CRS, src_nodata=np.nan,
            dst_transform=grid, dst_crs=fine.crs or SOME_CRS, dst_nodata=np.nan,
            resampling=enums.Resampling[how],
        )  # fmt: skip
        return onto

    nearest = warped(values, "nearest")
    smooth = nearest
    if kind != "nearest":
        smooth = _smooth(kind, values, lambda of: warped(of, "bilinear"))
        smooth[np.isnan(nearest)] = np.nan
    return smooth, warped(np.zeros_like(values), "nearest"), at


SOME_CRS = "EPSG:3857"
"""Stands for the coordinates that two rasters share and do not name."""


def _smooth(
    kind: str, values: FloatArray, between: Callable[[FloatArray], FloatArray]
) -> FloatArray:
    """Values between pixels. The function ``between`` takes their mean."""
    if kind == "degrees":  # angles: halfway from 350 to 10 is 0, not 180
        turns = np.deg2rad(values)
        east, north = between(np.sin(turns)), between(np.cos(turns))
        return np.asarray(np.rad2deg(np.arctan2(east, north)) % 360, np.float32)
    return between(values)


def _around(at: NDArray[np.float64], length: int) -> tuple[int, int]:
    """The half-open range of pixels, of ``length``, around all places ``at``, which ascend."""
    first = min(max(math.floor(at[0]), 0), length - 1)
    return first, max(min(math.floor(at[-1]) + 2, length), first + 1)


def _linear(
    values: FloatArray, down: NDArray[np.float64], right: NDArray[np.float64]
) -> FloatArray:
    """Values between pixels. A missing pixel is left out of the mean."""
    missing = np.isnan(values)
    if not missing.any():
        return _between(values, down, right)
    weights = _between((~missing).astype(np.float32), down, right)
    sums = _between(np.where(missing, np.float32(0), values), down, right)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(sums / weights)


def _between(
    values: FloatArray, down: NDArray[np.float64], right: NDArray[np.float64]
) -> FloatArray:
    """Values between pixels, linear along both axes; beyond the ends, the end's value."""
    weights = []
    for at, length in zip((down, right), values.shape, strict=True):
        away = np.abs(np.clip(at, 0, length - 1)[:, None] - np.arange(length))
        weights.append(np.maximum(1 - away, 0).astype(np.float32))
    return np.asarray(weights[0] @ values @ weights[1].T)
