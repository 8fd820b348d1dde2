"""Series of DICOM slices by pydicom: the files of a folder, in the order of their places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, as_usage_error, plural, require
from .cf_packing import packing_of, same_in_all
from .frames import said_of, sizes_of
from .protocols import chosen_of
from .sliced import Asked, FrameStack, OpenedArray

_NEEDED = (
    *("Rows", "Columns", "BitsAllocated", "PixelRepresentation", "PhotometricInterpretation"),
    *("ImageOrientationPatient", "ImagePositionPatient", "PixelSpacing"),
)
_OTHERS = (
    *("SeriesInstanceUID", "SeriesDescription", "NumberOfFrames", "PixelPaddingValue"),
    *("RescaleSlope", "RescaleIntercept", "DoseGridScaling", "ModalityLUTSequence"),
    *("InstanceNumber", "ImageType"),
)
_RESCALED = (("scale_factor", "RescaleSlope", 1), ("add_offset", "RescaleIntercept", 0))
_TOLERANCE = 0.01
"""The part of a voxel by which slices may lie beside their places."""
_DIGITS = 6
"""The digits of millimeters that tell places apart."""


def open_array(asked: Asked, cache_bytes: int) -> OpenedArray:
    """Open a series of slices: the files of a folder or pattern, or one file."""
    by_series = defaultdict[str, list[Any]](list)
    for file in asked.files or [asked.file]:
        where = f"{asked.where}: {file.name}" if asked.files else asked.where
        with as_usage_error(f"{where}: not a readable DICOM file"):
            header = _header(file, where)
        by_series[str(header.get("SeriesInstanceUID", ""))].append(header)
    all_series = list(by_series.values())
    words = {
        number: f"{each[0].get('SeriesDescription', '')} {plural(len(each), 'slice')}".strip()
        for number, each in enumerate(all_series)
    }
    slices = all_series[chosen_of(words, asked.series, "series", asked.where)]
    return _opened(_in_order(slices, asked.where), asked, cache_bytes)


def _header(file: Path, where: str) -> Any:
    """What the header of a slice says."""
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
    if "MOSAIC" in (says.get("ImageType") or ()):
        raise UsageError(f"{where}: is a mosaic of slices, of Siemens, which is not read")
    if "DoseGridScaling" in says:  # the slope of a dose
        says.RescaleSlope = says.DoseGridScaling
    syntax = says.file_meta.TransferSyntaxUID
    # Before the pixels are their tag, their kind unless it is implied, and their length.
    needed = says.Rows * says.Columns * says.BitsAllocated // 8
    needed += 8 if syntax.is_implicit_VR else 12
    if not syntax.is_compressed and left < needed:
        raise UsageError(f"{where}: is truncated: {left} bytes of {needed} are there")
    return says


def _kind(each: Any) -> tuple[Any, ...]:
    """Shape, bits, sign and photometric interpretation of a slice."""
    bits = (each.BitsAllocated, each.PixelRepresentation)
    return (each.Rows, each.Columns, *bits, str(each.PhotometricInterpretation))


def _in_order(slices: Sequence[Any], where: str) -> list[list[Any]]:
    """The slices of each time along their normal; refused are those unlike the first, and gaps."""
    first = slices[0]
    if (kind := _kind(first)[-1]) not in ("MONOCHROME1", "MONOCHROME2"):
        raise UsageError(f"{where}: is {kind}; pictures of one sample a pixel are read")
    for each in slices:
        alike = {
            "size or dtype": _kind(each) == _kind(first),
            "spacing": np.allclose(each.PixelSpacing, first.PixelSpacing, rtol=_TOLERANCE),
            "orientation": np.allclose(_axes(each), _axes(first), atol=1e-3),
        }
        if differs := [member for member, same in alike.items() if not same]:
            raise UsageError(f"{where}: {_name(each)} has another {differs[0]} than {_name(first)}")
    by_place = groupby(sorted(slices, key=_place), key=lambda each: round(_place(each), _DIGITS))
    places = [list(each) for _, each in by_place]
    fewest = min(map(len, places))
    for each in places:
        each.sort(key=_number)
        if len(each) > fewest or len({*map(_number, each)}) < len(each):
            raise UsageError(f"{where}: {_name(each[-2])} and {_name(each[-1])} lie at one place")
    _check_even([each[0] for each in places], where)
    return list(map(list, zip(*places, strict=True)))


def _number(each: Any) -> int:
    """The number of a slice in its series."""
    return int(each.get("InstanceNumber") or 0)


def _check_even(slices: Sequence[Any], where: str) -> None:
    """Refuse slices of which one is missing, or that are not evenly spaced."""
    steps = [_place(b) - _place(a) for a, b in pairwise(slices)]
    step = float(np.median(steps)) if steps else 1.0
    for (a, b), apart in zip(pairwise(slices), steps, strict=True):
        if abs(apart - step) > _TOLERANCE * step:
            raise UsageError(
                f"{where}: {_name(a)} and {_name(b)} lie {apart:g} mm apart, where others "
                f"lie {step:g} mm apart: slices are missing between them, or are not evenly spaced"
            )


def _place(each: Any) -> float:
    """Where a slice lies along the normal of the first."""
    rows, columns = _axes(each)
    return float(np.dot(np.cross(rows, columns), each.ImagePositionPatient))


def _axes(each: Any) -> NDArray[np.float64]:
    """The directions of the rows and of the columns of a slice."""
    return np.reshape(each.ImageOrientationPatient, (2, 3)).astype(float)


def _name(each: Any) -> str:
    return Path(each.filename).name


def _opened(times: Sequence[Sequence[Any]], asked: Asked, cache_bytes: int) -> OpenedArray:
    """The slices of each time, by their headers."""
    pydicom, slices, where = require("pydicom", "dicom"), times[0], asked.where
    first, every = slices[0], [each for slices in times for each in slices]
    lead = [len(times), len(slices)] if len(times) > 1 else [len(slices)]

    def read(place: tuple[int, ...]) -> NDArray[Any]:
        number = int(np.ravel_multi_index(place, lead))
        stored: NDArray[Any] = pydicom.dcmread(every[number].filename).pixel_array
        return stored

    dtype = read((0,) * len(lead)).dtype

    def all_of(tag: str, plain: float) -> float:
        values = [plain if each.get(tag) is None else float(each.get(tag)) for each in every]
        return float(same_in_all(values, tag, where, "slices"))

    says = {} if asked.raw else {name: all_of(tag, plain) for name, tag, plain in _RESCALED}
    steps = [_place(b) - _place(a) for a, b in pairwise(slices)]
    straight = np.allclose(first.ImageOrientationPatient, (1, 0, 0, 0, 1, 0))
    x, y, z = map(float, first.ImagePositionPatient) if straight else (0.0, 0.0, 0.0)
    down, across = map(float, first.PixelSpacing)
    each = {"z": (np.mean(steps) if steps else None, z), "y": (down, y), "x": (across, x)}
    frame = (first.Rows, first.Columns)
    return OpenedArray(
        array=FrameStack(lead, frame, dtype, read, cache_bytes),
        labels="tzyx"[-2 - len(lead) :],
        chunks=(*(1,) * len(lead), *frame),
        sizes=sizes_of((axis, size, "millimeter", at) for axis, (size, at) in each.items()),
        packing=packing_of(says, dtype, where),
        notes=_notes(times, straight),
        cache_bytes=cache_bytes,
        again=partial(_opened, times, asked),
    )


def _notes(times: Sequence[Sequence[Any]], straight: bool) -> list[str]:
    slices, first = times[0], times[0][0]
    moved = np.subtract(slices[-1].ImagePositionPatient, first.ImagePositionPatient)
    aside = np.abs(np.dot(_axes(first), moved)).max()
    padding = first.get("PixelPaddingValue")
    return said_of({
        f"the input has {len(times)} slices at each place, which are taken for times, in the order "
        "of their InstanceNumber": len(times) > 1,
        "the input's slices are turned or flipped in space; only their sizes go further": (
            not straight
        ),
        "the input's slices are shifted against each other, as by a tilted gantry": (
            aside > _TOLERANCE * min(first.PixelSpacing)
        ),
        "the input is MONOCHROME1, white at 0, and its numbers are read as stored": (
            first.PhotometricInterpretation == "MONOCHROME1"
        ),
        "the input's ModalityLUTSequence is not applied: its numbers are read as stored": (
            "ModalityLUTSequence" in first
        ),
        f"the input's PixelPaddingValue {padding} counts as a value": padding is not None,
    })  # fmt: skip
