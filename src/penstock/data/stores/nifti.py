"""NIfTI, MGH and Analyze files by nibabel: they are mapped, and ``.nii.gz`` and ``.mgz`` are
decompressed into memory once."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, format_bytes, require
from .cf_packing import packing_of
from .frames import said_of, sizes_of, unit_name
from .sliced import Asked, OpenedArray

_AXES = "xyztc"
"""The axes in the order of NIfTI: space, time, and what a vector holds."""
_STREAMS = (".gz", ".mgz")
"""The endings of files that are one compressed stream."""
_DEFLATES = 1032
"""The bytes that one byte of gzip holds at most."""
_UNITS = {"sec": "second", "msec": "millisecond", "usec": "microsecond", "unknown": ""}


def open_array(asked: Asked, cache_bytes: int) -> OpenedArray:
    """Open such a file, or two with a header and its voxels. Unless they are to be raw, numbers are
    as ``scl_slope`` and ``scl_inter`` say."""
    image, where = require("nibabel", "nifti").load(asked.file), asked.where
    if not hasattr(image, "affine"):
        raise UsageError(f"{where}: is a {type(image).__name__} without places in space")
    header, affine = image.header, image.affine
    if not np.isfinite(header.get_zooms()).all() or not np.isfinite(affine).all():
        raise UsageError(f"{where}: its header has a size or an affine that is not finite")
    file = Path(image.file_map["image"].filename)
    stored = _stored(file, image.dataobj, where)
    rank = stored.ndim
    says = {"scale_factor": image.dataobj.slope, "add_offset": image.dataobj.inter}
    # MGH and Analyze have these.
    lengths, times = getattr(header, "get_xyzt_units", lambda: ("mm", "msec"))()
    space = unit_name("mm" if lengths == "unknown" else lengths)
    time = unit_name(_UNITS.get(times, times))
    # Without a direction of its own, a voxel's place is size times index and an origin.
    straight = np.allclose(affine[:3, :3], np.diag(np.diag(affine)[:3]))
    turned = not straight or (np.diag(affine)[:3] < 0).any()
    said = header.get_zooms()[:3]
    by_affine = np.linalg.norm(affine[:3, : len(said)], axis=0)
    differ = not np.allclose(by_affine, said, rtol=1e-3)
    notes = {
        "the header's affine and pixdim say different sizes; those of pixdim are taken": differ,
        "the header names no unit; sizes are taken as millimeters, as elsewhere": (
            lengths == "unknown"
        ),
        "the input is one compressed stream, so all of it is in memory: "
        f"{format_bytes(stored.nbytes)}; penstock convert IN OUT.zarr makes an array of it that "
        "is read in parts": file.suffix.lower() in _STREAMS,
    }
    units = (space, space, space, time, None)
    origin = (*((0.0,) * 3 if turned else affine[:3, 3]), 0.0, 0.0)
    each = zip(_AXES, header.get_zooms(), units, origin, strict=False)
    return OpenedArray(
        array=stored,
        labels=_AXES[:rank],
        chunks=(*stored.shape[:2], *(1,) * (rank - 2)),
        sizes=sizes_of((axis, size, unit, float(place)) for axis, size, unit, place in each),
        packing=None if asked.raw else packing_of(says, stored.dtype.newbyteorder("="), where),
        affine=affine.tolist() if turned else None,
        notes=said_of(notes),
    )


def _stored(file: Path, proxy: Any, where: str) -> NDArray[Any]:
    """The stored numbers, in Fortran's order, as NIfTI has them."""
    shape, dtype, offset = proxy.shape, proxy.dtype, proxy.offset
    needed = math.prod(shape) * dtype.itemsize
    if file.suffix.lower() not in _STREAMS:
        if (size := file.stat().st_size) < offset + needed:
            raise UsageError(
                f"{where}: is shorter than its header says: {size} bytes of {offset + needed}"
            )
        return np.memmap(file, dtype, "r", offset, shape, "F")
    if needed > _DEFLATES * file.stat().st_size:
        raise UsageError(
            f"{where}: cannot hold the {format_bytes(needed)} that its header says: it has "
            f"{format_bytes(file.stat().st_size)}"
        )
    flat = np.empty(needed, np.uint8)
    with gzip.open(file) as stream:
        stream.seek(offset)
        filled = stream.readinto(flat)  # type: ignore[arg-type]
    if filled < needed:
        raise UsageError(f"{where}: is truncated: it holds {filled} bytes of {needed}")
    return flat.view(dtype).reshape(shape, order="F")
