"""The protocols of inputs and outputs, Source and Sink, and what stores share.

Every store is seen as five axes, ``t c z y x``; an axis that the data lacks has length 1. A store
knows nothing of patches, models or devices, and does no blending: it reads a box and writes a box.
Both calls block and may be made from any number of threads at once.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ...base import (
    UsageError,
    redact,
    redacted,
    system_errors,
)
from ..box import Box

AXES = "tczyx"
Spec = str | Path | Mapping[str, Any]

DTYPES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "float32", "float64"),
)
"""Dtypes of arrays that are read and written."""


@runtime_checkable
class Source(Protocol):
    """An array to read from."""

    name: str
    """The user's name for it, for messages."""
    domain: Box
    """Five axes, literal coordinates; the origin may be non-zero."""
    dtype: np.dtype[Any]
    chunks: tuple[int, ...]
    """The smallest region that can be read without decoding the same bytes twice."""
    grid_origin: tuple[int, ...]
    """A coordinate on each axis where a chunk starts; it may lie outside ``domain``."""
    axes: str
    """The axes that the data really has, in order, e.g. ``"zyx"``."""
    scale: tuple[float, ...] | None
    """Physical size of a voxel along t c z y x, None where the store does not say."""
    units: tuple[str | None, ...]
    """The unit of each size in ``scale`` in full, e.g. ``"micrometer"``; None where unknown."""
    translation: tuple[float, ...]
    """Physical position of coordinate 0 along t c z y x; 0 where the store does not say."""
    address: str
    """The place of the bytes, the same however it is named; see `overlap`."""
    fingerprint: str
    """``address`` and a hash that changes when another window, level or array is meant, or when
    the file (of a chunked store: its metadata file) is another one or was written again."""
    cache_bytes: int
    """The most decoded bytes that the store keeps; 0 keeps none."""

    def read(self, box: Box, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """The voxels of a box.

        Args:
            box: the region to read, within ``domain``.
            out: an array of its shape and dtype to read into; a new one by default.

        Returns:
            Five axes in native byte order, the caller's to change.
        """

    @property
    def tells_absent(self) -> bool | None:
        """Whether the source can say which of its chunks it holds; None where it holds all."""

    def absent(self, cells: Sequence[Box]) -> list[Box]:
        """The chunks among ``cells``, boxes within ``domain``, that the store does not hold; they
        read as its fill value."""

    def with_cache(self, num_bytes: int) -> Source:
        """This source with a cache of up to ``num_bytes`` of decoded chunks.

        A cache that the user's own spec sets stays as it is, and memory needs none: see the
        result's ``cache_bytes``.
        """


class BoxReader(ABC):
    """A source that puts a box into an array, and whose grid begins at 0."""

    domain: Box
    dtype: np.dtype[Any]
    grid_origin: tuple[int, ...] = (0,) * 5

    def read(self, box: Box, out: NDArray[Any] | None = None) -> NDArray[Any]:
        assert box in self.domain, f"{box} is not in {self.domain}"
        if out is None:
            out = np.empty(box.shape, self.dtype)
        self.fill(box, out)
        return out

    @abstractmethod
    def fill(self, box: Box, out: NDArray[Any]) -> None:
        """Read a box within the domain into an array of its shape."""


class Located(Protocol):
    """The parts of a `Sink` that say where it lies."""

    name: str
    """The user's name for it, for messages."""
    local_path: Path | None
    """The folder of a local store (for an array in a group, the group's folder); else None."""
    address: str
    """The place of the store. `Sink.create` may delete everything at or below it; see `overlap`."""
    root: Any
    """TensorStore's key-value store at ``address``, None for an array in memory."""


@runtime_checkable
class Sink(Located, Protocol):
    """An array to write to. Opening one creates nothing: `create` does, once the plan stands."""

    domain: Box
    dtype: np.dtype[Any]
    write_grid: tuple[int, ...]
    """The smallest region that can be written without reading back: a shard, or else a chunk."""
    grid_origin: tuple[int, ...]
    """A coordinate on each axis where a cell of ``write_grid`` starts."""
    fingerprint: str
    """An address and a hash of the domain and of its map to the stored array: the same before
    and after `create`."""
    exists: bool
    """True if there is an array already; then `create` opens it for writing."""

    def check(self) -> None:
        """Raise `UsageError` where `create` would delete something and may not; changes nothing."""

    def create(self) -> None:
        """Create the array, or open an existing one for writing."""

    def write(self, box: Box, array: NDArray[Any]) -> None:
        """Write a box; on return it is durable as far as the store can say.

        Args:
            box: the region to write, within ``domain``.
            array: its voxels, five axes.
        """

    def close(self) -> None:
        """Finish metadata, after the last write of a job that succeeded. It may be called by a
        process that has written nothing, and without `create`.

        Raises `PenstockError` if the array was removed meanwhile.
        """


class SeveralArrays(UsageError):
    """An address that means several arrays, of which the user must name one."""

    def __init__(self, message: str, places: Sequence[tuple[str, str]]) -> None:
        super().__init__(message)
        self.places = places
        """The place of each, or the flag that takes it, and what it is."""


class NoSuchLevel(UsageError):
    """A level that an image does not have."""


def check_level(level: int, count: int, where: str) -> None:
    """Check that an image has a level.

    Args:
        level: The number of the level.
        count: How many levels the image has.
        where: What messages begin with.

    Raises:
        NoSuchLevel: It has not.
    """
    if not 0 <= level < count:
        which = "it has level 0 only" if count == 1 else f"0 to {count - 1} do"
        raise NoSuchLevel(
            f"{where}: level {level} does not exist; {which if count else 'it has none'}"
        )


_SHOWN = 12  # names in a message


def listed(names: Sequence[tuple[str, str]]) -> str:
    """Names, and in brackets what each is, as a part of a sentence; the first dozen of many.

    >>> listed([("raw", "5 x 37 x 41"), ("labels", "")])
    'raw (5 x 37 x 41), labels'
    """
    shown = ", ".join(f"{name} ({what})" if what else name for name, what in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def chosen_of(words: Mapping[int, str], said: int | None, kind: str, where: str) -> int:
    """The number of the image to read: the only one, or that of ``--series``.

    Args:
        words: What each image is, by its number.
        said: The number that the user gives.
        kind: What they are called, such as ``scenes``.
        where: What messages begin with.

    Raises:
        SeveralArrays: There are several, and none is asked for.
        UsageError: There is none, or none of that number.
    """
    if said is not None and said not in words:
        raise UsageError(f"{where}: --series {said} does not exist; it has {len(words)}")
    if not words:
        raise UsageError(f"{where}: holds no {kind}")
    if said is None and len(words) > 1:
        names = listed([(f"{number} {what}".strip(), "") for number, what in words.items()])
        raise SeveralArrays(
            f"{where}: holds {len(words)} {kind} ({names}); --series N takes one",
            [(f"--series {number}", what) for number, what in words.items()],
        )
    return next(iter(words)) if said is None else said


def in_words(shape: Sequence[int]) -> str:
    """A shape as messages have it.

    >>> in_words((5, 37, 41))
    '5 x 37 x 41'
    """
    return " x ".join(map(str, shape))


def overlap(a: Source | Sink, b: Source | Sink) -> bool:
    """Whether creating or writing one array would touch the other: they are the same, or one lies
    inside the other's folder.

    It does not recognise hard links, mounts, or two names of one server.

    Args:
        a: an input or an output.
        b: another one.

    Returns:
        True where they touch.
    """
    inner, outer = f"{a.address}/", f"{b.address}/"
    touch = inner.startswith(outer) or outer.startswith(inner)
    # The address of files of a pattern is the pattern.
    return touch or (fnmatch(b.address, a.address) and not Path(a.address).exists())


def refuse_overlap(flag: str, sink: Sink, others: Mapping[str, Source | Sink | None]) -> None:
    """Refuse an output that would touch another array of its command.

    Args:
        flag: What names the output.
        sink: The output.
        others: The other arrays, by what each is; None for one that there is not.

    Raises:
        UsageError: It is one of them, or one lies in the other.
    """
    for what, other in others.items():
        if other is not None and overlap(other, sink):
            raise UsageError(
                f"{flag} {sink.name}: is {what}, or one lies in the other; give another place"
            )


def source_fingerprint(address: str, *facts: Any) -> str:
    """``address`` and a hash of it and of facts that JSON can hold."""
    text = json.dumps(redacted([address, *facts]), sort_keys=True)
    return f"{redact(address)}#{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def file_stamp(path: Path) -> list[Any]:
    """The path, size and time of writing of a file, which differ from version to version."""
    stat = path.stat()
    return [str(path.resolve()), stat.st_size, stat.st_mtime_ns]


def is_file(path: Path, where: str) -> bool:
    """Whether a file is there.

    Args:
        path: the file.
        where: its name in messages.

    Returns:
        True for a file, False for anything else.

    Raises:
        UsageError: its folder may not be looked into.
    """
    with system_errors(where):
        return path.is_file()


def suffix_of(path: str) -> str:
    """The suffix of a path or URL in lower case, such as ``.zarr``; empty if it has none."""
    path = path.partition("?")[0] if "://" in path else path
    return Path(path.rstrip("/")).suffix.lower()


def is_n5(path: str) -> bool:
    """Whether a path or URL is that of an N5, or of an array in one."""
    stores = [part for part in path.split("/") if part.endswith((".n5", ".zarr"))]
    return bool(stores) and stores[-1].endswith(".n5")


def check_dtype(dtype: Any, where: str) -> np.dtype[Any]:
    """``dtype`` (or its name) in native byte order; `UsageError` where Penstock cannot take it."""
    dtype_name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    if dtype_name not in DTYPES:
        raise UsageError(f"{where}: dtype {dtype_name} is not one of {', '.join(DTYPES)}")
    return np.dtype(dtype_name)


ZIPS = (".zip", ".ozx")
"""The endings of zip files, in which stores are read."""

LONGEST = 2**31 - 1
"""The most voxels along an axis. Plans hold some bytes for each patch along an axis, and metadata
that claims more is damaged or hostile."""
