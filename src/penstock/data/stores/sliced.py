"""An array that a library slices: what the reader of a format returns, and the source over it."""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...base import scrub
from ..box import Box
from .cf_packing import Packing
from .frames import Framed, canonical, source_axes, to_five, to_tczyx
from .in_memory import HoldsAll, give_back, mapped_file
from .protocols import check_dtype, file_stamp, source_fingerprint


class Sliced(Protocol):
    """An array of which a library reads a part. It may be sliced by many threads at once."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    def __getitem__(self, index: tuple[slice, ...], /) -> Any: ...


_LOCKS = 64
"""Frames that are decoded at once: more than there are threads."""
Decoded = TypeVar("Decoded")


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


class FrameStack:
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
        self._rank = len(lead)
        kept = cache_bytes // (math.prod(frame) * self.dtype.itemsize)
        self._read = decoded_once(read, kept)

    def __getitem__(self, index: tuple[slice, ...]) -> NDArray[Any]:
        chosen = [range(*part.indices(side)) for part, side in zip(index, self.shape, strict=True)]
        out = np.empty([len(part) for part in chosen], self.dtype)
        inside = index[self._rank :]
        for to, place in zip(
            np.ndindex(out.shape[: self._rank]), product(*chosen[: self._rank]), strict=True
        ):
            frame = self._read(place)
            out[to] = frame[inside]
            give_back(mapped_file(frame))
        return out


@dataclass(frozen=True, kw_only=True)
class OpenedArray:
    """What a format's reader says of an array. Members by axis are in the order of the array's."""

    array: Sliced
    labels: Sequence[str] | None
    """A letter or a name for each axis; None where the file says nothing."""
    chunks: Sequence[int]
    """The smallest region that is decoded once."""
    scale: Sequence[float] | None = None
    units: Sequence[str | None] = ()
    translation: Sequence[float] = ()
    omero: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    packing: Packing | None = None
    codec: str = ""
    """See `Framed.codec`."""
    bands: bool = False
    georeferenced: bool = False
    affine: Sequence[Sequence[float]] | None = None
    """These three as in `Framed`."""
    cache_bytes: int = 0
    """The most decoded bytes that the library keeps."""
    takes_cache: bool = False
    """True if it keeps as many as it is asked to."""


Sizes = dict[str, tuple[float, str | None, float]]
"""The size of a voxel, its unit, and the position of the first one, by axis."""


def placed(labels: Sequence[str], sizes: Sizes) -> dict[str, Any]:
    """The members of `OpenedArray` that place voxels in the world.

    Args:
        labels: The letter of each axis.
        sizes: What is said of them; empty where nothing is.
    """
    if not sizes:
        return {}
    each = [sizes.get(label, (1.0, None, 0.0)) for label in labels]
    scale, units, translation = zip(*each, strict=True)
    return {"scale": scale, "units": units, "translation": translation}


@dataclass(eq=False, repr=False, kw_only=True)
class SlicedSource(HoldsAll, Framed):
    """Reads an array that a library slices; made by `open_sliced`."""

    name: str
    array: Sliced
    stored_axes: str
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]
    address: str
    fingerprint: str
    packing: Packing | None
    cache_bytes: int
    reopen: Callable[[int], SlicedSource] | None
    """Gives this source with a cache of so many bytes; None where it takes none."""

    def __post_init__(self) -> None:
        self.axes = canonical(self.stored_axes)
        self.domain = Box((0,) * 5, to_tczyx(self.array.shape, self.stored_axes, 1))
        self.packed_itemsize = 0 if self.packing is None else self.packing.stored.itemsize

    def fill(self, box: Box, out: NDArray[Any]) -> None:
        places = ["tczyx".index(axis) for axis in self.stored_axes]
        stored = np.asarray(self.array[tuple(box.slices[place] for place in places)])
        five = to_five(stored, self.stored_axes)
        if self.packing is None:
            out[...] = five
        else:
            self.packing.decode(np.ascontiguousarray(five, self.packing.stored), out)
        give_back(self._mapped)

    @cached_property
    def _mapped(self) -> mmap.mmap | None:
        return mapped_file(self.array)

    def with_cache(self, num_bytes: int) -> SlicedSource:
        return self if self.reopen is None else self.reopen(num_bytes)


def open_sliced(
    read: Callable[[int], OpenedArray], *, path: str, inside: str, axes: str | None,
    cache_bytes: int, where: str, files: Sequence[Path] = (),
) -> SlicedSource:  # fmt: skip
    """A source over what a format's reader opens.

    Args:
        read: Opens the array with a cache of so many bytes.
        path: The file that it is in, or its URL.
        inside: Its name in the file; may be empty.
        axes: The letters of its axes, as the user says.
        cache_bytes: The most decoded bytes that are kept.
        where: What messages begin with.
        files: The files that it is made of, where ``path`` is a folder or a pattern.

    Raises:
        UsageError: It has axes or a dtype that Penstock cannot take.
    """
    opened = read(cache_bytes)

    def reopen(num_bytes: int) -> SlicedSource:
        return open_sliced(
            read, path=path, inside=inside, axes=axes, cache_bytes=num_bytes, where=where,
            files=files,
        )  # fmt: skip

    rank = len(opened.array.shape)
    letters, taken = source_axes(axes, opened.labels, rank, where)
    dtype = check_dtype(np.dtype(opened.array.dtype).name, where)
    remote, packing = "://" in path, opened.packing
    file = Path(path).expanduser()
    address = path if remote else str((files[0].parent if files else file).resolve())
    stamp = [] if remote else [fact for each in files or [file] for fact in file_stamp(each)]
    return SlicedSource(
        name=scrub(path),
        array=opened.array,
        stored_axes=letters,
        dtype=dtype if packing is None else packing.dtype,
        chunks=to_tczyx(opened.chunks, letters, 1),
        address=address,
        fingerprint=source_fingerprint(address, *stamp, inside, letters),
        packing=packing,
        cache_bytes=opened.cache_bytes,
        reopen=reopen if opened.takes_cache else None,
        scale=None if opened.scale is None else to_tczyx(opened.scale, letters, 1.0),
        units=to_tczyx(opened.units or (None,) * rank, letters, None),
        translation=to_tczyx(opened.translation or (0.0,) * rank, letters, 0.0),
        omero=opened.omero,
        bands=opened.bands,
        georeferenced=opened.georeferenced,
        affine=opened.affine,
        codec=opened.codec,
        notes=(*taken, *opened.notes, *([packing.note] if packing else ())),
    )
