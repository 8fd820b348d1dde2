"""Writes NIfTI files, whose header nibabel makes, from arrays of any size."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base import require
from .file_formats import LENGTHS, TIMES
from .plane_rows import rows_of

if TYPE_CHECKING:
    from .tensorstore import TensorStoreSource

_LONGEST = 2**15 - 1
"""The most voxels along an axis in NIfTI-1; NIfTI-2 takes more."""


def write_nifti(
    path: Path, image: TensorStoreSource, affine: Sequence[Sequence[float]] | None, progress: Any
) -> None:
    """Write a NIfTI file, in one stream of gzip where its name ends in ``.gz``.

    Args:
        path: The file, which is made.
        image: The array, with axes x y z t c in the file.
        affine: From the voxel x y z to the world, in the units of the array; None: by its scale
            and position.
        progress: Told the number of voxels that are written.
    """
    header = _header(image, affine)
    with path.open("wb") as file:
        # Without a name and a time the same values are the same bytes.
        packed = gzip.GzipFile("", "wb", 1, file, mtime=0) if path.suffix == ".gz" else file
        header.write_to(packed)
        packed.write(bytes(header.single_vox_offset - packed.tell()))
        for _, rows in rows_of(image, "ctz", progress):
            packed.write(np.ascontiguousarray(rows).data)
        packed.flush()
        packed.close()


def _header(image: TensorStoreSource, affine: Sequence[Sequence[float]] | None) -> Any:
    nibabel = require("nibabel", "nifti")
    t, c, z, y, x = image.domain.shape
    shape = [x, y, z] + ([t, c] if c > 1 else [t] if t > 1 else [])
    scale = image.scale or (1.0,) * 5
    if affine is None:
        matrix = np.diag([*scale[:1:-1], 1.0])
        matrix[:3, 3] = image.translation[:1:-1]
    else:
        matrix = np.array(affine, np.float64)
    space, lengths = _in_one_unit([LENGTHS[unit] if unit else None for unit in image.units[:1:-1]])
    matrix[:3] *= np.array(lengths)[:, None]
    longest = max(shape) > _LONGEST
    kind = nibabel.Nifti2Image if longest else nibabel.Nifti1Image
    header = kind(np.broadcast_to(image.dtype.type(0), shape), matrix).header
    seconds = TIMES[image.units[0] or "second"]
    if len(shape) > 3:
        header.set_zooms((*header.get_zooms()[:3], scale[0] * seconds, *[1.0] * (len(shape) - 4)))
    header.set_xyzt_units(space, "sec" if image.units[0] else "unknown")
    header["vox_offset"] = header.single_vox_offset
    return header


def _in_one_unit(metres: Sequence[float | None]) -> tuple[str, list[float]]:
    """NIfTI's code for the unit of all axes, and what sizes are multiplied by to be in it."""
    said = {size for size in metres if size is not None}
    if not said:
        return "unknown", [1.0] * len(metres)
    code, unit = {1.0: ("meter", 1.0), 1e-3: ("mm", 1e-3)}.get(max(said), ("micron", 1e-6))
    if len(said) > 1:
        code, unit = "micron", 1e-6
    return code, [1.0 if size is None else size / unit for size in metres]
