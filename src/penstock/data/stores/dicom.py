"""Series of DICOM slices by pydicom, in the order of their places: the files of a folder, or the
frames of a file."""

from __future__ import annotations

import threading
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, as_usage_error, plural, require
from .cf_packing import packing_of
from .frames import said_of, sizes_of
from .protocols import chosen_of
from .sliced import Asked, FrameStack, OpenedArray

_NEEDED = (
    *("Rows", "Columns", "BitsAllocated", "PixelRepresentation", "PhotometricInterpretation"),
    *("ImageOrientationPatient", "ImagePositionPatient", "PixelSpacing"),
)
_GROUPS = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
"""The members of a file of several frames that say what others say of a slice."""
_OTHERS = (
    *("SeriesInstanceUID", "SeriesDescription", "NumberOfFrames", "PixelPaddingValue"),
    *("RescaleSlope", "RescaleIntercept", "DoseGridScaling", "ModalityLUTSequence"),
    *("InstanceNumber", "ImageType", "SamplesPerPixel", "ImagerPixelSpacing"),
    *("GridFrameOffsetVector", *_GROUPS),
)
_COLOURS = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_RCT", "YBR_ICT")
"""Pictures of three samples a pixel, which pydicom gives as red, green and blue."""
_RESCALED = (("scale_factor", "RescaleSlope", 1), ("add_offset", "RescaleIntercept", 0))
_TOLERANCE = 0.01
"""The part of a voxel by which slices may lie beside their places."""
_OPENING = threading.Lock()  # as filters of warnings belong to the process
_DIGITS = 6
"""The digits of millimeters that tell places apart."""


def open_array(asked: Asked, cache_bytes: int) -> OpenedArray:
    """Open a series of slices: the files of a folder or pattern, or one file.

    One file alone may have no place in space, as an X-ray or a film of ultrasound. Its frames are
    times. What pydicom warns of is one note.
    """
    with _OPENING, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        opened = _of_files(asked, cache_bytes)
    texts = list(dict.fromkeys(str(each.message).partition("\n")[0] for each in said))
    more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
    warned = [f"pydicom warns of the input: {text}{more}" for text in texts[:1]]
    return replace(opened, notes=[*opened.notes, *warned])


def _of_files(asked: Asked, cache_bytes: int) -> OpenedArray:
    by_series = defaultdict[str, list[Any]](list)
    for file in asked.files or [asked.file]:
        where = f"{asked.where}: {file.name}" if asked.files else asked.where
        with as_usage_error(f"{where}: not a readable DICOM file"):
            frames = _frames(file, where, alone=len(asked.files) < 2)
        by_series[str(frames[0].get("SeriesInstanceUID", ""))] += frames
    all_series = list(by_series.values())
    words = {
        number: f"{each[0].get('SeriesDescription', '')} {plural(len(each), 'slice')}".strip()
        for number, each in enumerate(all_series)
    }
    slices = all_series[chosen_of(words, asked.series, "series", asked.where)]
    return _opened(_in_order(slices, asked.where), asked, cache_bytes)


def _frames(file: Path, where: str, *, alone: bool) -> list[Any]:
    """What the header of a file says of each slice that it holds."""
    pydicom = require("pydicom", "dicom")
    with file.open("rb") as stream:
        says = pydicom.dcmread(stream, stop_before_pixels=True, specific_tags=[*_NEEDED, *_OTHERS])
        left = file.stat().st_size - stream.tell()
    if "MOSAIC" in (says.get("ImageType") or ()):
        raise UsageError(f"{where}: is a mosaic of slices, of Siemens, which is not read")
    if "DoseGridScaling" in says:  # the slope of a dose
        says.RescaleSlope = says.DoseGridScaling
    if (count := int(says.get("NumberOfFrames") or 1)) > max(1, left):
        raise UsageError(
            f"{where}: is truncated: it cannot hold {plural(count, 'frame')} in {left} bytes"
        )
    frames = [_frame(says, number, count) for number in range(count)]
    for frame in frames:
        if alone and frame.get("ImageOrientationPatient") is None:
            frame.ImageOrientationPatient, frame.ImagePositionPatient = [1, 0, 0, 0, 1, 0], [0] * 3
            sizes = frame.get("PixelSpacing") or frame.get("ImagerPixelSpacing")
            frame.PixelSpacing = sizes or [0, 0]
        if lacking := [tag for tag in _NEEDED if frame.get(tag) in (None, "")]:
            raise UsageError(f"{where}: is no slice of an image: it lacks {', '.join(lacking)}")
    syntax = says.file_meta.TransferSyntaxUID
    # Before the pixels are their tag, their kind unless it is implied, and their length.
    samples = 2 if "422" in says.PhotometricInterpretation else says.get("SamplesPerPixel", 1)
    needed = count * says.Rows * says.Columns * says.BitsAllocated * samples // 8
    needed += 8 if syntax.is_implicit_VR else 12
    if not (syntax.is_compressed or syntax.is_deflated) and left < needed:
        raise UsageError(f"{where}: is truncated: {left} bytes of {needed} are there")
    return frames


def _frame(says: Any, number: int, count: int) -> Any:
    """What a header says of one of its frames, also in its groups of all frames and of this one."""
    frame = require("pydicom", "dicom").Dataset()
    frame.update(says)
    for name, place in zip(_GROUPS, (0, number), strict=True):
        for member in says[name][place] if says.get(name) else ():
            if member.VR == "SQ" and member.value:
                frame.update(member.value[0])
    if count > 1 and (offsets := says.get("GridFrameOffsetVector")):  # of a dose
        along = np.cross(*_axes(says)) * (float(offsets[number]) - float(offsets[0]))
        place = np.add(says.ImagePositionPatient, along).tolist()
        frame.add_new("ImagePositionPatient", "DS", place)  # its others are the header's
    frame.filename, frame.number = says.filename, number if count > 1 else None
    return frame


def _kind(each: Any) -> tuple[Any, ...]:
    """Shape, bits, sign and photometric interpretation of a slice."""
    bits = (each.BitsAllocated, each.PixelRepresentation)
    return (each.Rows, each.Columns, *bits, str(each.PhotometricInterpretation))


def _in_order(slices: Sequence[Any], where: str) -> list[list[Any]]:
    """The slices of each time along their normal; refused are those unlike the first, and gaps."""
    first = slices[0]
    if (kind := _kind(first)[-1]) not in ("MONOCHROME1", "MONOCHROME2", *_COLOURS):
        raise UsageError(f"{where}: is {kind}; pictures of grey values or RGB are read")
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
    """The number of a slice in its series, of a frame in its file."""
    return int(each.get("InstanceNumber") or 0) if each.number is None else int(each.number)


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
    file = Path(each.filename).name
    return file if each.number is None else f"frame {each.number} of {file}"


def _opened(times: Sequence[Sequence[Any]], asked: Asked, cache_bytes: int) -> OpenedArray:
    """The slices of each time, by their headers."""
    pydicom, slices, where = require("pydicom", "dicom"), times[0], asked.where
    frame_of = require("pydicom.pixels", "dicom").pixel_array
    first, every = slices[0], [each for slices in times for each in slices]
    lead = [len(times)] * (len(times) > 1) + [len(slices)] * (len(slices) > 1 or len(times) == 1)
    values = {name: [_value(each, tag, plain) for each in every] for name, tag, plain in _RESCALED}
    alike = asked.raw or all(len(set(each)) == 1 for each in values.values())
    says = {} if asked.raw or not alike else {name: each[0] for name, each in values.items()}

    def read(place: tuple[int, ...]) -> NDArray[Any]:
        number = int(np.ravel_multi_index(place, lead))
        each = every[number]
        stored: NDArray[Any] = (
            pydicom.dcmread(each.filename).pixel_array
            if each.number is None
            else frame_of(each.filename, index=each.number)
        )
        if alike:
            return stored
        slope, offset = (values[name][number] for name, *_ in _RESCALED)
        return (stored * slope + offset).astype(np.float32)

    sample = read((0,) * len(lead))
    steps = [_place(b) - _place(a) for a, b in pairwise(slices)]
    straight = np.allclose(first.ImageOrientationPatient, (1, 0, 0, 0, 1, 0))
    x, y, z = map(float, first.ImagePositionPatient) if straight else (0.0, 0.0, 0.0)
    down, across = map(float, first.PixelSpacing)
    each = {"z": (np.mean(steps) if steps else None, z), "y": (down, y), "x": (across, x)}
    axes = "tz" if len(lead) == 2 else "z" if len(times) == 1 else "t"
    return OpenedArray(
        array=FrameStack(lead, sample.shape, sample.dtype, read, cache_bytes),
        labels=axes + "yxc"[: sample.ndim],
        chunks=(*(1,) * len(lead), *sample.shape),
        sizes=sizes_of((axis, size, "millimeter", at) for axis, (size, at) in each.items()),
        packing=packing_of(says, sample.dtype, where),
        bands=sample.ndim > 2,
        notes=_notes(times, straight, alike),
        cache_bytes=cache_bytes,
        again=partial(_opened, times, asked),
    )


def _value(each: Any, tag: str, plain: float) -> float:
    return plain if each.get(tag) is None else float(each.get(tag))


def _notes(times: Sequence[Sequence[Any]], straight: bool, alike: bool) -> list[str]:
    slices, first = times[0], times[0][0]
    moved = np.subtract(slices[-1].ImagePositionPatient, first.ImagePositionPatient)
    aside = np.abs(np.dot(_axes(first), moved)).max()
    padding = first.get("PixelPaddingValue")
    return said_of({
        f"the input has {plural(len(times), 'slice')} at each place, which are taken for times, "
        "in the order of their numbers": len(times) > 1,
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
        "each of the input's slices has a RescaleSlope of its own, which is applied; --raw reads "
        "what is stored": not alike,
    })  # fmt: skip
