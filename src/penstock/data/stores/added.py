"""Stores that other packages add by entry points: each named by the suffix that it opens."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

from ...base import UsageError, extension_names, find_extension
from .protocols import suffix_of

_GROUP = "penstock.stores"
_TIFF, _HDF5 = "ometiff:open_ometiff_source", "hdf5:open_hdf5_source"
_NIFTI = "nifti:open_nifti_source"
READERS = {
    ".tif": _TIFF, ".tiff": _TIFF, ".nii": _NIFTI, ".gz": _NIFTI,
    **dict.fromkeys((".vrt", ".jp2", ".png", ".jpg", ".jpeg"), "raster:open_raster_source"),
    ".czi": "czi:open_czi_source", ".nd2": "nd2:open_nd2_source", ".lif": "lif:open_lif_source",
    ".dcm": "dicom:open_dicom_source",
    **dict.fromkeys((".h5", ".hdf5", ".hdf", ".nwb", ".ims", ".nc", ".nc4"), _HDF5),
}  # fmt: skip
"""The room and the function that opens a file of a format, by suffix."""
OURS = {
    "": True,
    ".n5": True,
    ".zarr": True,
    ".json": False,
    ".npy": False,
    **dict.fromkeys(READERS, False),
}
"""The suffixes that Penstock opens itself, and whether an output may have them."""


def reader_of(place: str) -> str | None:
    """The room and the function that opens a file of one of our formats; None for a store. GDAL
    reads a TIFF that is behind a URL, tifffile one on this machine."""
    suffix = suffix_of(place)
    return READERS.get(".vrt" if READERS.get(suffix) == _TIFF and "://" in place else suffix)


def added_store(place: str) -> EntryPoint | None:
    """The entry point of the store that opens a path or URL; None where that is one of ours."""
    suffix = suffix_of(place)
    return None if suffix in OURS else find_extension(_GROUP, suffix[1:])


def and_added() -> str:
    """The suffixes that other packages open, as a text that follows a list of ours."""
    names = ", ".join(f"*.{n}" for n in extension_names(_GROUP) if f".{n}" not in OURS)
    return f" (and of other packages: {names})" if names else ""


def checked(opened: Any, protocol: type, where: str) -> Any:
    """An object that another package opened; `UsageError` where it lacks parts of the protocol."""
    members = (*protocol.__annotations__, *(name for name in vars(protocol) if name[0] != "_"))
    if lacking := [name for name in members if not hasattr(opened, name)]:
        kind = type(opened).__name__
        raise UsageError(
            f"{where}: the opened object is of type {kind} and lacks {', '.join(lacking)}"
        )
    return opened
