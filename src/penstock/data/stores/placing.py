"""How one array lies over another, by what the files of both say of the world: the georeference of
rasters, the affines of NIfTI. Arrays of other kinds lie by their frames."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, require
from .added import format_of
from .frames import METERS
from .protocols import Source
from .raster import georeference_of

_NOWHERE = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
"""The transform of a raster that has no place in the world."""
_ASIDE = 0.5
"""The most voxels by which axes of arrays that lie over each other may drift apart."""


def placed_over(
    array: Source, other: Source, where: str
) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """How an array lies over another one.

    Args:
        array: An array.
        other: Another one.
        where: What messages begin with.

    Returns:
        The size of a voxel of the array and the position of the first one, t c z y x, in the frame
        of the other one; None where their frames say that.

    Raises:
        UsageError: They have different CRS, or one is turned against the other.
    """
    if all(getattr(each, "georeferenced", False) for each in (array, other)):
        worlds = [_of_raster(each, where) for each in (array, other)]
    elif any(getattr(each, "affine", None) is not None for each in (array, other)):
        worlds = [_of_nifti(each) for each in (array, other)]
    else:
        return None
    (one, crs), (base, base_crs) = worlds
    if one is None or base is None:
        return None
    if crs and base_crs and crs != base_crs:
        raise UsageError(
            f"{where}: has another CRS than {other.name}; gdalwarp -t_srs gives it that one"
        )
    over = np.linalg.solve(base, one)[:3]
    factors, sides = np.diag(over).copy(), array.domain.shape[:1:-1]
    np.fill_diagonal(over, 0.0)
    if (np.abs(over[:, :3]) * sides).max() > _ASIDE:
        raise UsageError(f"{where}: is turned against {other.name}; resample it onto that one")
    sizes, place = other.scale or (1.0,) * 5, other.translation
    # Rounding must not move a centre over the border of a voxel.
    firsts, by = [0.0, 0.0, *over[::-1, 3].round(6).tolist()], [1.0, 1.0, *factors[::-1].tolist()]
    each = list(zip(sizes, by, firsts, place, strict=True))
    return tuple(n * f for n, f, _, _ in each), tuple(at + first * n for n, _, first, at in each)


def _of_raster(source: Source, where: str) -> tuple[NDArray[np.float64] | None, Any]:
    """From the voxel x y z of a raster to the place of its centre, and its CRS."""
    said = georeference_of(source, (0,) * 5, source.dtype, where)
    if said.transform == _NOWHERE:
        return None, None
    a, b, c, d, e, f = said.transform
    moved = [[a, b, 0, c + (a + b) / 2], [d, e, 0, f + (d + e) / 2], [0, 0, 1, 0], [0, 0, 0, 1]]
    read = require("rasterio.crs", "scenes").CRS.from_wkt
    return np.array(moved, float), None if said.crs is None else read(said.crs)


def _of_nifti(source: Source) -> tuple[NDArray[np.float64] | None, None]:
    """From the voxel x y z to the world, in metres where its unit is known; None for an array that
    is no such file."""
    form = format_of(source.address)
    if form is None or form.room != "nifti" or source.scale is None:
        return None, None
    if (affine := getattr(source, "affine", None)) is None:
        affine = np.diag([*source.scale[:1:-1], 1.0])
        affine[:3, 3] = source.translation[:1:-1]
    unit = METERS.get(source.units[4] or "", 1.0)
    return np.diag([unit, unit, unit, 1.0]) @ np.array(affine, float), None
