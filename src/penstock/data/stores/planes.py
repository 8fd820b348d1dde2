"""A folder or a pattern of files of one format, each a plane of a volume, or a volume of one time,
in the order of their numbers."""

from __future__ import annotations

import copy
import glob
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from importlib import import_module
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import (
    STORE_FILES,
    UsageError,
    as_usage_error,
    at_home,
    in_order,
    natural,
    plural,
    system_errors,
    usable_cores,
)
from .added import TIFF, format_of
from .frames import axis_letter, said_of, shown_channel
from .name_times import UNEVEN, are_apart, counted_times
from .protocols import AXES, in_words
from .sliced import Asked, OpenedArray, Readable, decoded_once, read_into

_OPEN = 256
"""Planes that are kept open. Each is a file, of which a process may have about a thousand."""
_NUMBER = re.compile(r"([A-Za-z]*)[\W_]*(\d+)")
"""A number in a file's name, and the word before it."""
_COUNTED = {"B": "c", "ch": "c", "chan": "c", "w": "c", "tp": "t"}
"""Words in names of files that count along an axis, besides those that name it."""
_SHOWN = 6  # names in a message
_PICTURES = ((".tif", ".tiff"), (".png", ".bmp"), (".jpg", ".jpeg"))
"""The endings of files that a folder means; others in it count only where it has none of these."""
_WHOLE = (".png", ".bmp", ".jpg", ".jpeg", ".webp")
"""The endings of pictures that are decoded from the top, whichever part is read."""
_STACKED = ("ometiff", "raster", "in_memory", "nifti")
"""The rooms of formats that may be planes of a volume."""


def plane_files(path: str) -> list[Path] | None:
    """The files that a pattern means, or the pictures in a folder, else its DICOM files, in natural
    order; None for anything else."""
    place = at_home(path)
    if "://" in path:
        return None
    if glob.has_magic(path) and not place.exists():
        names = glob.glob(str(place))  # noqa: PTH207 -- absolute ones too
        files = [file for file in map(Path, names) if file.is_file()]
    elif place.is_dir() and not any((place / marker).exists() for marker in (*STORE_FILES, "info")):
        inside = [file for file in place.iterdir() if file.is_file()]
        named = ([file for file in inside if file.suffix.lower() in each] for each in _PICTURES)
        files = next(filter(None, named), [])
        files = files or [file for file in inside if is_slice(file)]
    else:
        return None
    if not files and not glob.has_magic(path):
        return None
    return sorted(files, key=lambda file: natural(file.name))


def is_slice(file: Path) -> bool:
    """True for a DICOM file of pictures, and not for the index of a medium."""
    if file.name == "DICOMDIR":
        return False
    with system_errors(str(file)), file.open("rb") as stream:
        return stream.read(132)[128:] == b"DICM"


def stacked(
    files: Sequence[Path], said: str, where: str
) -> tuple[Sequence[Path], str, tuple[int, ...], str]:
    """How files are stacked, by the numbers in which their names differ.

    Args:
        files: The files, in the order of their names.
        said: The letters of the axes along which they are stacked, as the user says; empty where
            the names decide. The word before a number says channel, time or z, else it is z.
        where: What messages begin with.

    Returns:
        The files in the order of the stack, its axes, its shape, and a sentence on what it was
        taken for, empty for planes along z.

    Raises:
        UsageError: Files are missing, or the numbers do not say what they count.
    """
    texts, uneven = counted_times([file.name for file in files])
    parts = {file: _NUMBER.findall(text) for file, text in zip(files, texts, strict=True)}
    numbers = {file: tuple(int(number) for _, number in each) for file, each in parts.items()}
    first = parts[files[0]]
    one_each = len(set(numbers.values())) == len(files)
    if not one_each or len({len(each) for each in numbers.values()}) > 1 or len(files) == 1:
        note = (
            "the names of the input's files have no numbers that count them, so they lie along "
            f"{said or 'z'} in the order of their names"
        )
        return files, said or "z", (len(files),), note * (len(files) > 1)
    columns = list(zip(*numbers.values(), strict=True))
    counted = [place for place, column in enumerate(columns) if len(set(column)) > 1]
    axes = said or "".join(_axis_of(first[place][0]) for place in counted)
    sides = tuple(len(set(columns[place])) for place in counted)
    if not len(set(axes)) == len(axes) == len(sides):
        raise UsageError(
            f"{where}: its {plural(len(files), 'file')} differ in {plural(len(counted), 'number')},"
            f" such as {files[0].name} and {files[-1].name}, which are taken for {', '.join(axes)}:"
            " planes of one channel and one time make a volume; name them by a pattern, in quotes, "
            "or let --axes, such as --axes tzyx, say all axes"
        )
    for place, axis in zip(counted, axes, strict=True):
        counts = sorted(set(columns[place]))
        if axis == "t" and are_apart(counts):
            uneven = UNEVEN
        elif axis != "c":
            _check_gaps(counts, files, where)
    if len(files) < math.prod(sides):
        there = {tuple(each[place] for place in counted) for each in numbers.values()}
        every = product(*(sorted(set(columns[place])) for place in counted))
        first_lacking = next(each for each in every if each not in there)
        words = ", ".join(f"{a} {n}" for a, n in zip(axes, first_lacking, strict=True))
        raise UsageError(
            f"{where}: files are missing: {len(files)} of {in_words(sides)} along "
            f"{', '.join(axes)} are there; the first that is not has {words}"
        )
    ordered = sorted(files, key=numbers.__getitem__)
    taken = f"by their names the input's files lie along {', '.join(axes)}; --axes says otherwise"
    notes = said_of({taken: axes != "z" and not said, uneven: uneven})
    return ordered, axes, sides, "; ".join(notes)


def _axis_of(word: str) -> str:
    """The axis that a word before a number in a file's name counts."""
    letter = _COUNTED.get(word) or _COUNTED.get(word.lower()) or axis_letter(word)
    return letter if letter in ("t", "c") else "z"


def _check_gaps(numbers: Sequence[int], files: Sequence[Path], where: str) -> None:
    """Refuse numbers between which some are missing."""
    if len({b - a for a, b in pairwise(numbers)}) > 1:  # every second plane is no gap
        count = numbers[-1] - numbers[0] + 1 - len(numbers)
        # One by one: between times in milliseconds there are more than fit into memory.
        lacking = (n for a, b in pairwise(numbers) for n in range(a + 1, b))
        shown = ", ".join(map(str, islice(lacking, _SHOWN))) + ", ..." * (count > _SHOWN)
        raise UsageError(
            f"{where}: {plural(count, 'plane')} missing between {files[0].name} and "
            f"{files[-1].name}: {shown}"
        )


class _WholePlane(Readable):
    """A plane that is one segment."""

    rank = 0

    def __init__(self, bands: Any) -> None:
        self.shape, self.dtype, self.most_open = bands.shape, bands.dtype, bands.most_open
        self.segment_bytes = math.prod(self.shape) * self.dtype.itemsize
        self._bands, self.decoded = bands, self.decode

    def decode(self) -> NDArray[Any]:
        """All of the plane."""
        whole: NDArray[Any] = self._bands[tuple(slice(0, side) for side in self.shape)]
        return whole

    def read_frame(
        self, place: tuple[int, ...], inside: tuple[slice, ...], out: NDArray[Any]
    ) -> None:
        out[...] = self.decoded()[inside]


class _Planes(Readable):
    """Planes that lie in a file each, along the axes of the stack and those of a plane."""

    def __init__(
        self, files: Sequence[Path], sides: tuple[int, ...],
        open_plane: Callable[[Path], OpenedArray], opened: Sequence[Any], cache_bytes: int,
    ) -> None:  # fmt: skip
        """``sides`` are those of the stack, ``opened`` the arrays of the first planes."""
        self.shape, self.dtype = (*sides, *opened[0].shape), opened[0].dtype
        self.rank = len(sides)
        # One cache for all planes, as a brick touches some of them, each in some segments.
        kept = cache_bytes // self.segment_bytes(opened) if self.segment_bytes(opened) else 0

        @lru_cache(len(opened))
        def plane(z: int) -> Any:
            array: Any = opened[z] if z < len(opened) else open_plane(files[z]).array
            if hasattr(array, "segment_bytes"):
                array = copy.copy(array)
                array.decoded = partial(decoded, z)
            return array

        decoded = decoded_once(lambda z, *place: plane(z).decode(*place), kept)
        self._plane = plane

    @staticmethod
    def segment_bytes(opened: Sequence[Any]) -> int:
        """The most bytes that a plane decodes at once; 0 if all are mapped."""
        return max(int(getattr(each, "segment_bytes", 0)) for each in opened)

    def read_frame(
        self, place: tuple[int, ...], inside: tuple[slice, ...], out: NDArray[Any]
    ) -> None:
        number = int(np.ravel_multi_index(place, self.shape[: self.rank]))
        read_into(self._plane(number), inside, out)


def open_array(asked: Asked, cache_bytes: int) -> OpenedArray:
    """Open files of one format as the planes of one volume."""
    files, where = asked.files, asked.where
    if not files:
        raise UsageError(f"{where}: no file has such a name")
    form = format_of(files[0].name) or TIFF
    if form.room not in _STACKED or files[0].suffix.lower() == ".gz":  # in memory as a whole
        packed = "compressed " * (form.room in _STACKED)
        raise UsageError(f"{where}: {packed}{form.title}s are not stacked; name one of them")

    def plane(file: Path) -> OpenedArray:
        place = f"{where}: {file.name}"
        with as_usage_error(f"{place}: not a readable {form.title}"):
            of_file = replace(asked, path=str(file), where=place, files=())
            opened = import_module(f".{form.room}", __package__).open_array(of_file, 0)
        if file.suffix.lower() in _WHOLE:
            opened = replace(opened, array=_WholePlane(opened.array), chunks=opened.array.shape)
        said = (asked.axes or "")[-len(opened.array.shape) :]
        by_rank = AXES[-len(opened.array.shape) :].upper()
        return replace(opened, labels=said.upper() or opened.labels or by_rank)

    first, kept = plane(files[0]), list[Any]()
    most = getattr(first.array, "most_open", _OPEN)
    of_stack = (asked.axes or "")[: -len(first.array.shape)]
    files, axes, sides, note = stacked(files, of_stack, where)
    for file, opened in zip(files, in_order(plane, files, usable_cores()), strict=True):
        kept += [opened.array] if len(kept) < most else []
        if both := set(axes.upper()) & set(opened.labels or ()):
            raise UsageError(
                f"{where}: {file.name} holds several planes itself, along {min(both).lower()} as "
                "the files lie; name one such file, or a folder of single planes, or say all axes "
                "by --axes"
            )
        has, wanted = (_words(each) for each in (opened, first))
        if has != wanted:
            raise UsageError(f"{where}: {file.name}: has {has}, where {files[0].name} has {wanted}")
    first = replace(first, labels=[*axes.upper(), *(first.labels or ())])
    first = replace(first, notes=[*first.notes, *said_of({note: note})])
    if axes == "c":
        names = [shown_channel(file.stem) for file in files]
        first = replace(first, omero=names, bands=first.georeferenced)
    return _stacked(first, files, sides, plane, kept, cache_bytes)


def _stacked(
    first: OpenedArray, files: Sequence[Path], sides: tuple[int, ...],
    open_plane: Callable[[Path], OpenedArray], kept: Sequence[Any], cache_bytes: int,
) -> OpenedArray:  # fmt: skip
    """The volume of planes that are all like the first."""
    planes = _Planes(files, sides, open_plane, kept, cache_bytes)
    return replace(
        first,
        array=planes,
        chunks=(*(1,) * len(sides), *first.chunks),
        cache_bytes=cache_bytes if planes.segment_bytes(kept) else first.cache_bytes,
        again=partial(_stacked, first, files, sides, open_plane, kept),
    )


def _words(plane: OpenedArray) -> str:
    axes = f", axes {''.join(plane.labels or ())}" if len(plane.array.shape) > 2 else ""
    packing = f", {plane.packing}" if plane.packing else ""
    return f"{in_words(plane.array.shape)} of {plane.array.dtype}{axes}{packing}"
