"""The suffixes that are opened: by a format's own room, as a store, or by another package.

Other packages add stores by entry points, each named by the suffix that it opens.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

from ...base import UsageError, extension_names, find_extension
from .protocols import ZIPS, suffix_of

_GROUP = "penstock.stores"


@dataclass(frozen=True)
class Format:
    """A format of files. Its room has a function ``open_array``."""

    title: str
    """The words for one such file in messages."""
    room: str
    takes: str = ""
    """The choices of a part of it, among ``level``, ``series`` and ``inside``."""


TIFF = Format("TIFF file", "ometiff", "level series")
PLANES = "planes"
"""The room of files that are stacked, each of them of one format."""
SLICES = Format("DICOM file", "dicom", "series")
RASTER = Format("raster", "raster", "level")
_NIFTI = Format("NIfTI file", "nifti")
FORMATS = {
    **dict.fromkeys((".tif", ".tiff", ".btf", ".lsm", ".stk", ".svs"), TIFF),
    **dict.fromkeys((".dcm", ".dicom", ".ima"), SLICES), ".nii": _NIFTI, ".gz": _NIFTI,
    **dict.fromkeys((".mgh", ".mgz"), Format("MGH file", "nifti")),
    **dict.fromkeys((".img", ".hdr"), Format("NIfTI or Analyze file", "nifti")),
    ".npy": Format(".npy array", "in_memory"),
    ".czi": Format("CZI file", "czi", "level series"),
    ".nd2": Format("ND2 file", "nd2", "series"),
    ".lif": Format("LIF file", "lif", "series inside"),
    **dict.fromkeys((".vrt", ".jp2", ".png", ".jpg", ".jpeg", ".bmp", ".webp"), RASTER),
    **dict.fromkeys((".nc", ".nc4"), Format("NetCDF file", "hdf5", "level inside")),
    **dict.fromkeys(
        (".h5", ".hdf5", ".hdf", ".nwb", ".ims"), Format("HDF5 file", "hdf5", "level inside")
    ),
}  # fmt: skip
"""The format of a file, by suffix."""
_READ = (".json", *ZIPS, *FORMATS)
OURS = {"": True, ".n5": True, ".zarr": True, **dict.fromkeys(_READ, False)}
"""The suffixes that Penstock opens itself, and whether an output may have them."""


def format_of(place: str) -> Format | None:
    """The format of a path or URL; None for a store. GDAL reads a TIFF that is behind a URL,
    tifffile one on this machine."""
    form = FORMATS.get(suffix_of(place))
    return RASTER if form is TIFF and "://" in place else form


def added_store(place: str) -> EntryPoint | None:
    """The entry point of the store that opens a path or URL; None where that is one of ours."""
    suffix = suffix_of(place)
    return None if suffix in OURS else find_extension(_GROUP, suffix[1:])


def titles() -> str:
    """What Penstock itself reads of files, as a text."""
    return ", ".join(f"{title}s" for title in dict.fromkeys(f.title for f in FORMATS.values()))


def and_added() -> str:
    """The suffixes that other packages open, as a text that follows a list of ours."""
    names = ", ".join(f"*.{n}" for n in extension_names(_GROUP) if f".{n}" not in OURS)
    return f" (and of other packages: {names})" if names else ""


def checked(opened: Any, protocol: type, where: str) -> Any:
    """An object that another package opened; `UsageError` where it lacks parts of the protocol."""
    parts = (vars(kind) for kind in protocol.__mro__)
    names = [name for part in parts for name in (*part.get("__annotations__", ()), *part)]
    if lacking := [n for n in dict.fromkeys(names) if n[0] != "_" and not hasattr(opened, n)]:
        kind = type(opened).__name__
        raise UsageError(
            f"{where}: the opened object is of type {kind} and lacks {', '.join(lacking)}"
        )
    return opened
