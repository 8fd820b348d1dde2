"""The files that an output may become: which one a path names, and what each can hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from ...base import UsageError, format_bytes, require
from ..box import Box
from .frames import METERS
from .protocols import AXES, DTYPES, Source, is_n5

Kind = Literal["cog", "ome", "nifti"]
TITLES: dict[Kind, str] = {
    "cog": "a Cloud Optimized GeoTIFF",
    "ome": "an OME-TIFF",
    "nifti": "a NIfTI file",
}
ENDINGS = (".ome.tif", ".ome.tiff", ".tif", ".tiff", ".nii", ".nii.gz")
_EXTRAS: dict[Kind, tuple[str, str]] = {
    "cog": ("rasterio", "scenes"),
    "ome": ("tifffile", "infer"),
    "nifti": ("nibabel", "nifti"),
}
"""The library that writes a kind, and the extra that has it."""
_DTYPES = "uint8 int8 uint16 int16 uint32 int32 float32 float64".split()
"""Dtypes that all of these formats have, and their readers take."""
N5_DTYPES = [name for name in DTYPES if name not in ("bool", "float16")]
_NEAREST = {"bool": "uint8", "float16": "float32", "uint64": "uint32", "int64": "int32"}
"""The nearest of these dtypes to each of the others."""
OME_UNITS = {
    "picometer": "pm", "angstrom": "Å", "nanometer": "nm", "micrometer": "µm", "millimeter": "mm",
    "centimeter": "cm", "meter": "m", "kilometer": "km", "microsecond": "µs", "millisecond": "ms",
    "second": "s", "minute": "min", "hour": "h", "day": "d",
}  # fmt: skip
"""Units in full, and the symbols of OME's schema."""
LENGTHS = {unit: size for unit, size in METERS.items() if unit != "picometer"}
"""The metres of each unit that NIfTI holds, or that can be said in one that it holds."""
TIMES = {"second": 1.0, "millisecond": 1e-3, "microsecond": 1e-6, "minute": 60.0, "hour": 3600.0}
"""The seconds of each unit, likewise."""


_FILLS = (-9999.0, -99999.0, -(2.0**15), -(2.0**31))
"""Values that stand for no data in many files."""
_HIGHEST = 3.39e38
"""The size from which a number of 32 bits does so too."""
_SEEN = (1, 1, 1, 512, 512)
"""The corner of a raster in which they are looked for."""
_MUCH = 0.01
"""The share of it that makes one."""


def ending_of(place: str) -> str | None:
    """The ending by which a path or URL names such a file; None where it names none."""
    lower = (place.partition("?")[0] if "://" in place else place).lower()
    return next((ending for ending in ENDINGS if lower.endswith(ending)), None)


def kind_of(ending: str, like: Source | None) -> Kind:
    """What a file becomes: a ``.tif`` of a raster that has a place in the world is a GeoTIFF."""
    if ending.startswith(".nii"):
        return "nifti"
    placed = getattr(like, "georeferenced", False)
    return "cog" if placed and not ending.startswith(".ome") else "ome"


def check_holds(
    kind: Kind, shape: Sequence[int], dtype: np.dtype[Any], units: Sequence[str | None], where: str
) -> None:
    """Refuse an array (t c z y x) that a kind of file cannot hold.

    Raises:
        UsageError: Its dtype, its axes or a unit; or the library that writes it is missing.
    """
    require(*_EXTRAS[kind])
    title = TITLES[kind]
    check_dtype_of(title, _DTYPES, dtype, where)
    sides = dict(zip(AXES, shape, strict=True))
    longer = [f"{sides[axis]} along {axis}" for axis in "tz" if sides[axis] > 1]
    if kind == "cog" and longer:
        raise UsageError(
            f"{where}: {title} holds bands, y and x, and this output has {' and '.join(longer)}; "
            "give OME-TIFF (*.ome.tif) or OME-Zarr (*.zarr)"
        )
    for axis, unit in zip(AXES, units, strict=True):
        of_nifti = TIMES if axis == "t" else LENGTHS
        taken = list(OME_UNITS if kind == "ome" else of_nifti)
        if kind != "cog" and axis != "c" and unit is not None and unit not in taken:
            raise UsageError(
                f"{where}: {title} has no unit {unit!r}, as axis {axis} has; give OME-Zarr (*.zarr)"
            )


def check_dtype_of(title: str, dtypes: Sequence[str], dtype: np.dtype[Any], where: str) -> None:
    """Refuse a dtype that a format does not hold.

    Args:
        title: The words for one such file or array in messages.
        dtypes: Those that it holds.
        dtype: The dtype of the output.
        where: What messages begin with.

    Raises:
        UsageError: The format does not hold it; the sentence names the nearest that it does.
    """
    if dtype.name not in dtypes:
        raise UsageError(
            f"{where}: {title} does not hold {dtype}; give --out-dtype {_NEAREST[dtype.name]}, or "
            "OME-Zarr (*.zarr)"
        )


def held_dtype(place: str, dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of a new output: the nearest to that of its values which its format has, if that
    holds them all.

    Args:
        place: The path or URL of the output.
        dtype: The dtype of its values.

    Returns:
        The dtype, which is that of the values where none that the format has holds them all.

    >>> held_dtype("a.nii", np.dtype("bool")), held_dtype("a.nii", np.dtype("int64"))
    (dtype('uint8'), dtype('int64'))
    """
    held = N5_DTYPES if is_n5(place) else _DTYPES if ending_of(place) else DTYPES
    nearest = dtype if dtype.name in held else np.dtype(_NEAREST[dtype.name])
    return nearest if np.can_cast(dtype, nearest) else dtype


def no_block_again(name: str) -> str:
    """A sentence on a file of which a block is lost.

    Args:
        name: The file.

    Returns:
        What it lacks, and the command that makes it.
    """
    return (
        f"{name} is one file, in which no block can be written again; its own command with "
        "--overwrite makes all of it anew"
    )


def _undeclared(source: Any) -> Iterator[str]:
    """A sentence on a raster that declares no value for no data, and seems to have one."""
    declares = getattr(source, "packing", None) is not None or getattr(source, "raw", True)
    if declares or math.prod(source.chunks) > 16 * math.prod(_SEEN):  # to decode them takes long
        return
    try:
        seen = source.read(source.domain & Box.of(source.domain.start, _SEEN))
    except (OSError, ValueError):  # which the run says, with the place
        return
    for value in (np.fmin.reduce(seen, None), np.fmax.reduce(seen, None)):  # without NaN
        share = np.count_nonzero(seen == value) / seen.size
        if share >= _MUCH and (float(value) in _FILLS or abs(float(value)) >= _HIGHEST):
            yield (
                f"{100 * share:.0f} % of the input's upper left corner is {value!s}, and it "
                "declares no value for no data, so these count as values; "
                f"gdal_edit -a_nodata {value!s} declares it"
            )


def file_notes(source: Source, sinks: Sequence[Any], *, look: bool) -> Iterator[str]:
    """Sentences on the outputs that become files, and on what an input says of its place in the
    world that outputs do not get.

    Args:
        source: The input.
        sinks: The outputs.
        look: Whether to look at the values of a raster.

    Yields:
        The sentences.
    """
    kinds = {getattr(sink, "kind", None) for sink in sinks}
    georeferenced = getattr(source, "georeferenced", False)
    if look and georeferenced:
        yield from _undeclared(source)
    if georeferenced and kinds != {"cog"}:
        without = source.scale is not None and source.units[4] is None
        unit = ", and sizes of its pixels go there without their unit" * without
        yield (
            f"the output does not get the raster's CRS, transform and no-data value{unit}; "
            "a GeoTIFF (*.tif) does"
        )
    if getattr(source, "affine", None) is not None and kinds != {"nifti"}:
        yield (
            "the input's affine turns or flips its axes, and only its sizes go further; to NIfTI "
            "(*.nii) all of it goes"
        )
    if "ome" in kinds and any(source.translation):
        yield "an OME-TIFF does not hold the position of the first voxel"
    for sink in sinks:
        if (place := getattr(sink, "georeference", None)) is not None and place.note:
            yield place.note
        if getattr(sink, "kind", None) is not None:
            yield (
                f"{sink.name} is made at the end, as {TITLES[sink.kind]}, from a scratch Zarr "
                f"beside it, which takes {format_bytes(sink.scratch_bytes)} on disk at most"
            )
