"""An array that a library slices: what the reader of a format returns, and the source over it."""

from __future__ import annotations

import math
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import count, product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...base import as_usage_error, at_home, scrub
from ..box import Box
from .cf_packing import Packing
from .frames import (
    Described,
    Framed,
    Sizes,
    canonical,
    sized_axes,
    source_axes,
    to_five,
    to_tczyx,
)
from .protocols import AXES, BoxReader, check_dtype, source_fingerprint


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked of a file."""

    path: str
    """The file, its URL, or the folder or pattern of several files."""
    where: str
    """The flag and the path, with which messages begin."""
    inside: str = ""
    """The name of an array in the file."""
    level: int = 0
    series: int | None = None
    raw: bool = False
    """True for the numbers that are stored, whatever the file says of them."""
    axes: str | None = None
    """The letters of the stored axes, as the user says."""
    files: Sequence[Path] = ()
    """The files of a folder or pattern, in natural order."""

    @property
    def file(self) -> Path:
        """The file on this machine."""
        return at_home(self.path)


class Readable(ABC):
    """An array that is read frame by frame into another one."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rank: int
    """The number of leading axes, along which frames are stacked."""
    is_absent: Any = None
    """Tells of an index whether the file lacks all of it; False if it may lack parts and cannot
    say which; None if it lacks none."""

    @cached_property
    def _turns(self) -> Iterator[int]:
        return count()

    def read_into(self, index: tuple[slice, ...], out: NDArray[Any]) -> None:
        """Read a part into an array of its shape."""
        places = zip(np.ndindex(out.shape[: self.rank]), self.places(index), strict=True)
        for to, place in in_turn(places, next(self._turns)):
            self.read_frame(place, index[self.rank :], out[to])

    def places(self, index: tuple[slice, ...]) -> product[tuple[int, ...]]:
        """The places of the frames that a part touches."""
        sides = zip(index[: self.rank], self.shape, strict=False)
        return product(*(range(*part.indices(side)) for part, side in sides))

    @abstractmethod
    def read_frame(
        self, place: tuple[int, ...], inside: tuple[slice, ...], out: NDArray[Any]
    ) -> None:
        """Read a part of the frame at a place in the stack."""


def in_turn(parts: Iterable[Part], turn: int) -> list[Part]:
    """The parts of a read, in an order of its own: every second read goes backwards, and others
    begin elsewhere. So threads that read neighbours decode different segments, and have those of
    the others; in one order each would wait for the one before it.

    >>> in_turn("abcd", 0), in_turn("abcd", 1), in_turn("abcd", 2)
    (['a', 'b', 'c', 'd'], ['d', 'c', 'b', 'a'], ['c', 'd', 'a', 'b'])
    """
    ordered = list(parts)
    first = int(turn // 2 * _GOLDEN % 1 * len(ordered))
    return (ordered[first:] + ordered[:first])[:: -1 if turn % 2 else 1]


def read_into(array: Any, index: tuple[slice, ...], out: NDArray[Any]) -> None:
    """Read a part of an array into another one."""
    if isinstance(array, Readable):
        array.read_into(index, out)
    else:
        out[...] = array[index]
        give_back(array)


def give_back(array: Any) -> None:
    """Give back the pages of the mapped file that an array is a view of, if it is one.

    A page counts as memory of this process once it is read. It stays in the system's page cache,
    and a thread that reads it at that moment just maps it again.
    """
    may_change = False
    while isinstance(array, np.ndarray):
        may_change, array = array.flags.writeable, array.base
    # Of a private map, which its owner may change, the changes would be lost.
    if isinstance(array, mmap.mmap) and not may_change and hasattr(mmap, "MADV_DONTNEED"):
        array.madvise(mmap.MADV_DONTNEED)


_RGB = tuple({"color": color} for color in ("FF0000", "00FF00", "0000FF"))
"""The channels of a colour picture, where nothing more is known of them."""
_GOLDEN = (5**0.5 - 1) / 2
"""A share whose multiples, less whole ones, lie evenly."""
_LOCKS = 64
"""Frames that are decoded at once: more than there are threads."""
Decoded = TypeVar("Decoded")
Part = TypeVar("Part")


def decoded_once(decode: Callable[..., Decoded], kept: int) -> Callable[..., Decoded]:
    """A function that keeps what it has decoded, for which threads wait that ask at the same time.

    Args:
        decode: Decodes what its arguments name.
        kept: How many results are kept; 0 for a function that keeps none.
    """
    if not kept:
        return decode
    cached, locks = lru_cache(kept)(decode), [threading.Lock() for _ in range(_LOCKS)]

    def once(*place: Any) -> Decoded:
        with locks[hash(place) % _LOCKS]:
            return cached(*place)

    return once


class FrameStack(Readable):
    """Frames that a library reads one at a time, as one array; those last decoded are kept."""

    def __init__(
        self, lead: Sequence[int], frame: Sequence[int], dtype: Any,
        read: Callable[[tuple[int, ...]], NDArray[Any]], cache_bytes: int = 0,
    ) -> None:  # fmt: skip
        """
        Args:
            lead: The shape of the stack.
            frame: The shape of a frame.
            dtype: The dtype of all.
            read: Reads the frame at a place in the stack. Many threads call it at once.
            cache_bytes: The most bytes of frames that are kept.
        """
        self.shape, self.dtype = (*lead, *frame), np.dtype(dtype)
        self.rank = len(lead)
        kept = cache_bytes // (math.prod(frame) * self.dtype.itemsize)
        self._read = decoded_once(read, kept)

    def read_frame(
        self, place: tuple[int, ...], inside: tuple[slice, ...], out: NDArray[Any]
    ) -> None:
        frame = self._read(place)
        out[...] = frame[inside]
        give_back(frame)


@dataclass(eq=False, repr=False, kw_only=True)
class OpenedArray(Described):
    """What a format's reader says of an array. Members by axis are in the order of the array's;
    ``omero`` counts only if it has all channels."""

    array: Any
    """A `Readable`, or what a library slices as numpy does, with ``shape`` and ``dtype``. Many
    threads read it at once."""
    labels: Sequence[str] | None
    """A letter or a name for each axis; None where the file says nothing."""
    chunks: Sequence[int]
    """The smallest region that is decoded once."""
    sizes: Sizes = field(default_factory=dict)
    """Empty where the file says nothing."""
    packing: Packing | None = None
    cache_bytes: int = 0
    """The most decoded bytes that the library keeps."""
    again: Callable[[int], OpenedArray] | None = None
    """Opens it with a cache of so many bytes; None where it keeps as many as it does."""


class SlicedSource(BoxReader, Framed):
    """Reads an array that a library slices."""

    def __init__(
        self, opened: OpenedArray, asked: Asked, address: str, stamps: Sequence[Any]
    ) -> None:
        """
        Args:
            opened: The array, as a format's reader returns it.
            asked: What was asked of the file.
            address: See `Source.address`.
            stamps: What changes when the file is another one.

        Raises:
            UsageError: It has axes or a dtype that Penstock cannot take.
        """
        array, packing, rank = opened.array, opened.packing, len(opened.array.shape)
        axes, taken = source_axes(asked.axes, opened.labels, rank, asked.where)
        sized, turned = sized_axes(opened.sizes, axes, opened.labels or axes)
        scale, units, translation = zip(*sized, strict=True)
        self.domain = Box((0,) * 5, to_tczyx(array.shape, axes, 1))
        whole = len(opened.omero) == self.domain.shape[1] and any(opened.omero)
        said = {key: getattr(opened, key) for key in Described.__dataclass_fields__}
        of_samples = _RGB if opened.bands and self.domain.shape[1] == len(_RGB) else ()
        said["omero"] = tuple(opened.omero) if whole else of_samples
        said["notes"] = (*taken, *turned, *opened.notes, *([packing.note] if packing else ()))
        placed = scale if opened.sizes else None
        super().__init__(scale=placed, units=units, translation=translation, **said)
        self._is_absent = getattr(array, "is_absent", None)
        self._again, self._place = opened.again, (asked, address, stamps)
        self.name, self.address, self.array = scrub(asked.path), address, array
        self.raw, self.files = asked.raw, asked.files
        stored = check_dtype(np.dtype(array.dtype).name, asked.where)
        self.dtype, self.packing = packing.dtype if packing else stored, packing
        self.packed_itemsize = packing.stored.itemsize if packing else 0
        self.stored_axes, self.axes = axes, canonical(axes)
        self.chunks, self.cache_bytes = to_tczyx(opened.chunks, axes, 1), opened.cache_bytes
        facts = (asked.inside, asked.level, asked.series, axes)
        self.fingerprint = source_fingerprint(address, *stamps, *facts)

    def fill(self, box: Box, out: NDArray[Any]) -> None:
        if self.packing is None:
            # Without axes that the array lacks: the others have one voxel each.
            others = [place for place, axis in enumerate(AXES) if axis not in self.stored_axes]
            seen = out.transpose(*others, *self._places)[(0,) * len(others)]
            read_into(self.array, self._index(box), seen)
        else:
            stored = np.empty([box.shape[place] for place in self._places], self.array.dtype)
            read_into(self.array, self._index(box), stored)
            five = to_five(stored, self.stored_axes)
            self.packing.decode(np.ascontiguousarray(five, self.packing.stored), out)

    @property
    def _places(self) -> list[int]:
        """The places of the stored axes among t c z y x."""
        return [AXES.index(axis) for axis in self.stored_axes]

    def _index(self, box: Box) -> tuple[slice, ...]:
        return tuple(box.slices[place] for place in self._places)

    @property
    def tells_absent(self) -> bool | None:
        return None if self._is_absent is None else bool(self._is_absent)

    def absent(self, cells: Sequence[Box]) -> list[Box]:
        is_absent = self._is_absent
        return [cell for cell in cells if is_absent(self._index(cell))] if is_absent else []

    def with_cache(self, num_bytes: int) -> SlicedSource:
        if self._again is None:
            return self
        with as_usage_error(f"{self._place[0].where}: not a readable file"):
            return SlicedSource(self._again(num_bytes), *self._place)
