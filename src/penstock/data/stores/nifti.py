"""NIfTI files by nibabel: ``.nii`` is mapped, ``.nii.gz`` is decompressed into memory once."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, describe, format_bytes, require
from .cf_packing import packing_of
from .frames import unit_name
from .protocols import local_file
from .sliced import OpenedArray, SlicedSource, open_sliced

_AXES = "xyztc"
"""The axes in the order of NIfTI: space, time, and what a vector holds."""
_UNITS = {"sec": "second", "msec": "millisecond", "usec": "microsecond", "unknown": ""}


def open_nifti_source(
    path: str, *, inside: str, level: int, cache_bytes: int, name: str, raw: bool,
    axes: str | None, series: int | None,
) -> SlicedSource:  # fmt: skip
    """Open a NIfTI file.

    Args:
        path: The file, ``.nii`` or ``.nii.gz``.
        inside: Empty, as a file holds one array.
        level: 0, as it has no levels.
        cache_bytes: Not used: nothing is decoded twice.
        name: The flag that messages name.
        raw: Read what is stored, whatever ``scl_slope`` and ``scl_inter`` say.
        axes: The letters of the stored axes, as the user says.
        series: None, as a file holds one image.

    Raises:
        UsageError: It cannot be read.
    """
    where, file = local_file(path, name)
    if level or series or inside:
        raise UsageError(f"{where}: a NIfTI file holds one array, without levels and series")
    image = _image(file, where)
    stored = _stored(file, image.dataobj, where)

    def read(num_bytes: int) -> OpenedArray:
        return _opened(image, stored, file, raw, where)

    return open_sliced(read, path=path, inside="", axes=axes, cache_bytes=cache_bytes, where=where)


def _image(file: Path, where: str) -> Any:
    nibabel = require("nibabel", "nifti")
    wrong = nibabel.filebasedimages.ImageFileError, nibabel.spatialimages.HeaderDataError
    try:
        image = nibabel.load(file)
    except (*wrong, OSError, ValueError, zlib.error) as error:
        raise UsageError(f"{where}: not a readable NIfTI file: {describe(error)}") from error
    sizes = image.header.get_zooms()
    if not np.isfinite(sizes).all() or not np.isfinite(image.affine).all():
        raise UsageError(f"{where}: its header has a size or an affine that is not finite")
    return image


def _stored(file: Path, proxy: Any, where: str) -> NDArray[Any]:
    """The stored numbers, in Fortran's order, as NIfTI has them."""
    shape, dtype, offset = proxy.shape, proxy.dtype, proxy.offset
    needed = math.prod(shape) * dtype.itemsize
    if file.suffix.lower() != ".gz":
        if (size := file.stat().st_size) < offset + needed:
            raise UsageError(
                f"{where}: is shorter than its header says: {size} bytes of {offset + needed}"
            )
        return np.memmap(file, dtype, "r", offset, shape, "F")
    flat = np.empty(needed, np.uint8)
    try:
        with gzip.open(file) as stream:
            stream.seek(offset)
            filled = stream.readinto(flat)  # type: ignore[arg-type]
    except (EOFError, OSError, zlib.error) as error:
        raise UsageError(f"{where}: is truncated or corrupt: {describe(error)}") from error
    if filled < needed:
        raise UsageError(f"{where}: is truncated: it holds {filled} bytes of {needed}")
    return flat.view(dtype).reshape(shape, order="F")


def _opened(image: Any, stored: NDArray[Any], file: Path, raw: bool, where: str) -> OpenedArray:
    rank, notes, header = stored.ndim, [], image.header
    says = {"scale_factor": image.dataobj.slope, "add_offset": image.dataobj.inter}
    packing = None if raw else packing_of(says, stored.dtype.newbyteorder("="), where)
    space, time = header.get_xyzt_units()
    units = [_UNITS.get(each, each) for each in (*[space] * 3, time, "")]
    affine = header.get_best_affine()
    # Without a direction of its own, a voxel's place is size times index and an origin.
    straight = np.allclose(affine[:3, :3], np.diag(np.diag(affine)[:3]))
    turned = not straight or (np.diag(affine)[:3] < 0).any()
    if file.suffix.lower() == ".gz":
        size = format_bytes(stored.nbytes)
        notes.append(
            f"the input is one compressed stream, so all of it is in memory: {size}; "
            "penstock convert IN OUT.zarr makes an array of it that is read in parts"
        )
    origin = (0.0,) * 3 if turned else affine[:3, 3]
    pad = (0.0, 0.0)
    return OpenedArray(
        array=stored,
        labels=list(_AXES[:rank]),
        chunks=(*stored.shape[:2], *(1,) * (rank - 2)),
        scale=[float(size) or 1.0 for size in header.get_zooms()],
        units=[unit_name(unit) for unit in units[:rank]],
        translation=[float(place) for place in (*origin, *pad)][:rank],
        packing=packing,
        affine=affine.tolist() if turned else None,
        notes=tuple(notes),
    )
