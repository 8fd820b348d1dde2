"""Series of DICOM slices by pydicom: the files of a folder, in the order of their places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, plural, require
from .cf_packing import packing_of, same_in_all
from .protocols import chosen_of, readable
from .sliced import Asked, FrameStack, OpenedArray

_NEEDED = (
    *("Rows", "Columns", "BitsAllocated", "PixelRepresentation", "PhotometricInterpretation"),
    *("ImageOrientationPatient", "ImagePositionPatient", "PixelSpacing"),
)
_OTHERS = (
    *("SeriesInstanceUID", "SeriesDescription", "NumberOfFrames", "PixelPaddingValue"),
    *("RescaleSlope", "RescaleIntercept"),
)
_TOLERANCE = 0.01
"""The part of a voxel by which slices may lie beside their places."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """What the header of a file says."""

    file: Path
    series: str
    description: str
    kind: tuple[Any, ...]
    """Shape, bits, sign and photometric interpretation."""
    axes: tuple[float, ...]
    """The directions of rows and of columns."""
    spacing: tuple[float, ...]
    position: tuple[float, ...]
    slope: float
    intercept: float
    padding: Any


def open_array(asked: Asked, cache_bytes: int) -> OpenedArray:
    """Open a series of slices: the files of a folder or pattern, or one file."""
    by_series = defaultdict[str, list[_Slice]](list)
    for file in asked.files or [asked.file]:
        where = f"{asked.where}: {file.name}" if asked.files else asked.where
        with readable("DICOM file", where):
            header = _header(file, where)
        by_series[header.series].append(header)
    all_series = list(by_series.values())
    words = {
        number: f"{each[0].description} {plural(len(each), 'slice')}".strip()
        for number, each in enumerate(all_series)
    }
    slices = all_series[chosen_of(words, asked.series, "series", asked.where)]
    return _opened(_in_order(slices, asked.where), asked, cache_bytes)


def _header(file: Path, where: str) -> _Slice:
    pydicom = require("pydicom", "dicom")
    with file.open("rb") as stream:
        says = pydicom.dcmread(stream, stop_before_pixels=True, specific_tags=[*_NEEDED, *_OTHERS])
        left = file.stat().st_size - stream.tell()
    if lacking := [tag for tag in _NEEDED if says.get(tag) in (None, "")]:
        raise UsageError(f"{where}: is no slice of an image: it lacks {', '.join(lacking)}")
    if int(says.get("NumberOfFrames") or 1) > 1:
        raise UsageError(
            f"{where}: holds {says.NumberOfFrames} frames; files of one slice each are read"
        )
    kind = (
        says.Rows, says.Columns, says.BitsAllocated, says.PixelRepresentation,
        str(says.PhotometricInterpretation),
    )  # fmt: skip
    syntax = says.file_meta.TransferSyntaxUID
    # Before the pixels are their tag, their kind unless it is implied, and their length.
    needed = says.Rows * says.Columns * says.BitsAllocated // 8
    needed += 8 if syntax.is_implicit_VR else 12
    if not syntax.is_compressed and left < needed:
        raise UsageError(f"{where}: is truncated: {left} bytes of {needed} are there")
    return _Slice(
        file=file,
        series=str(says.get("SeriesInstanceUID", "")),
        description=str(says.get("SeriesDescription", "")),
        kind=kind,
        axes=tuple(map(float, says.ImageOrientationPatient)),
        spacing=tuple(map(float, says.PixelSpacing)),
        position=tuple(map(float, says.ImagePositionPatient)),
        slope=float(says.get("RescaleSlope", 1)),
        intercept=float(says.get("RescaleIntercept", 0)),
        padding=says.get("PixelPaddingValue"),
    )


def _in_order(slices: Sequence[_Slice], where: str) -> list[_Slice]:
    """The slices along their normal; refused are those unlike the first, and gaps."""
    first = slices[0]
    if first.kind[-1] not in ("MONOCHROME1", "MONOCHROME2"):
        raise UsageError(f"{where}: is {first.kind[-1]}; pictures of one sample a pixel are read")
    for each in slices:
        alike = {
            "size or dtype": each.kind == first.kind,
            "spacing": np.allclose(each.spacing, first.spacing, rtol=_TOLERANCE),
            "orientation": np.allclose(each.axes, first.axes, atol=1e-3),
        }
        if differs := [member for member, same in alike.items() if not same]:
            raise UsageError(
                f"{where}: {each.file.name} has another {differs[0]} than {first.file.name}"
            )
    ordered = sorted(slices, key=_place)
    steps = [_place(b) - _place(a) for a, b in pairwise(ordered)]
    step = float(np.median(steps)) if steps else 1.0
    for (a, b), apart in zip(pairwise(ordered), steps, strict=True):
        if apart < _TOLERANCE * step or not step:
            raise UsageError(f"{where}: {a.file.name} and {b.file.name} lie at one place")
        if abs(apart - step) > _TOLERANCE * step:
            raise UsageError(
                f"{where}: {a.file.name} and {b.file.name} lie {apart:g} mm apart, where others "
                f"lie {step:g} mm apart: slices are missing between them, or are not evenly spaced"
            )
    return ordered


def _place(each: _Slice) -> float:
    """Where a slice lies along the normal of the first."""
    return float(np.dot(np.cross(each.axes[:3], each.axes[3:]), each.position))


def _opened(slices: Sequence[_Slice], asked: Asked, cache_bytes: int) -> OpenedArray:
    pydicom, first, packing = require("pydicom", "dicom"), slices[0], None

    def read(place: tuple[int, ...]) -> NDArray[Any]:
        stored: NDArray[Any] = pydicom.dcmread(slices[place[0]].file).pixel_array
        return stored

    dtype = read((0,)).dtype
    if not asked.raw:
        place = (asked.where, "slices")
        says = {
            "scale_factor": same_in_all([each.slope for each in slices], "RescaleSlope", *place),
            "add_offset": same_in_all(
                [each.intercept for each in slices], "RescaleIntercept", *place
            ),
        }
        packing = packing_of(says, dtype, asked.where)
    steps = [_place(b) - _place(a) for a, b in pairwise(slices)]
    straight = np.allclose(first.axes, (1, 0, 0, 0, 1, 0))
    x, y, z = first.position if straight else (0.0, 0.0, 0.0)
    down, across = first.spacing
    sizes = {"y": (down, "millimeter", y), "x": (across, "millimeter", x)}
    if steps:
        sizes["z"] = float(np.mean(steps)), "millimeter", z
    frame = first.kind[:2]
    return OpenedArray(
        array=FrameStack([len(slices)], frame, dtype, read, cache_bytes),
        labels="zyx",
        chunks=(1, *frame),
        sizes=sizes,
        packing=packing,
        notes=list(_notes(slices, straight)),
        cache_bytes=cache_bytes,
        again=partial(_opened, slices, asked),
    )


def _notes(slices: Sequence[_Slice], straight: bool) -> Iterator[str]:
    first = slices[0]
    if not straight:
        yield "the input's slices are turned or flipped in space; only their sizes go further"
    moved = np.subtract(slices[-1].position, first.position)
    aside = np.abs(np.dot(np.reshape(first.axes, (2, 3)), moved)).max()
    if aside > _TOLERANCE * min(first.spacing):
        yield "the input's slices are shifted against each other, as by a tilted gantry"
    if first.kind[-1] == "MONOCHROME1":
        yield "the input is MONOCHROME1, white at 0, and its numbers are read as stored"
    if first.padding is not None:
        yield f"the input's PixelPaddingValue {first.padding} counts as a value"
