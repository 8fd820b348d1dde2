"""Arrays in memory, and memory-mapped files. There is no cache, since nothing is decoded.

A page of a mapped file counts as this process's memory once it is read, so each read gives the
pages back; they stay in the system's page cache. A thread that reads them at that moment just maps
them again.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, describe
from ..box import Box
from .frames import Framed, canonical, name_axes, source_axes, to_five
from .protocols import (
    check_dtype,
    file_stamp,
    local_file,
    source_fingerprint,
)


class HoldsAll(ABC):
    """A source that lacks no chunk, and whose grid begins at 0."""

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

    @property
    def tells_absent(self) -> None:
        return None

    def absent(self, cells: Sequence[Box]) -> list[Box]:
        return []


def give_back(mapped: mmap.mmap | None) -> None:
    """Give the pages of a mapped file back, which count as memory of this process once they are
    read. None is no file."""
    if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED)


def mapped_file(array: Any) -> mmap.mmap | None:
    """The mapped file that an array is a view of; None where it is none."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, mmap.mmap) else None


@dataclass(eq=False, repr=False)
class MemorySource(HoldsAll, Framed):
    """Reads a numpy array; made by `open_array_source`."""

    name: str
    array: NDArray[Any]
    """Along t c z y x, a view of the caller's array."""
    dtype: np.dtype[Any]
    axes: str
    address: str
    fingerprint: str
    mapped: mmap.mmap | None = None
    """The mapped file that ``array`` views; None for an array in memory."""
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        self.domain = Box((0,) * 5, self.array.shape)
        self.chunks: tuple[int, ...] = (1,) * 5

    def fill(self, box: Box, out: NDArray[Any]) -> None:
        out[...] = self.array[box.slices]
        give_back(self.mapped)

    def with_cache(self, num_bytes: int) -> MemorySource:
        return self


@dataclass(eq=False, repr=False)
class MemorySink:
    """Writes a numpy array in place; made by `open_array_sink`."""

    name: str
    array: NDArray[Any]
    """Along t c z y x, a view of the caller's array."""
    dtype: np.dtype[Any]
    address: str
    local_path: Path | None = None
    exists: bool = True
    root: Any = None

    def __post_init__(self) -> None:
        self.domain = Box((0,) * 5, self.array.shape)
        self.write_grid: tuple[int, ...] = (1,) * 5
        self.grid_origin: tuple[int, ...] = (0,) * 5
        self.fingerprint = source_fingerprint(self.address, self.domain.shape)

    def check(self) -> None:
        """Nothing to do: nothing is deleted."""

    def create(self) -> None:
        """Nothing to do: the array is the caller's."""

    def write(self, box: Box, array: NDArray[Any]) -> None:
        assert box in self.domain, f"{box} is not in {self.domain}"
        assert array.dtype == self.dtype, f"{array.dtype} is not {self.dtype}"
        self.array[box.slices] = array

    def close(self) -> None:
        """Nothing to do: the array holds all."""


def open_array_source(array: NDArray[Any], *, name: str, axes: str | None = None) -> MemorySource:
    """A source over ``array``. Without ``axes`` its rank decides: yx, zyx, czyx or tczyx."""
    address = _address(array)
    return _source(array, name, name, address, source_fingerprint(address, array.shape), axes)


def open_npy(path: str, *, name: str, axes: str | None = None) -> MemorySource:
    """A source over a ``.npy`` file, mapped and so read on demand. Pickled objects are refused."""
    where, file = local_file(path, name)
    try:
        with np.errstate(over="ignore"):  # a shape that overflows raises an error as well
            array = np.lib.format.open_memmap(file, mode="r")
    except (ValueError, EOFError, OSError) as error:
        if "mmap length" in str(error):
            raise UsageError(f"{where}: the file ends before the array does") from error
        raise UsageError(f"{where}: not a .npy array: {describe(error)}") from error
    address = str(file.resolve())
    return _source(
        array, path, where, address, source_fingerprint(address, *file_stamp(file)), axes,
        array.base,
    )  # fmt: skip


def open_array_sink(array: NDArray[Any], *, name: str) -> MemorySink:
    """A sink over ``array``; its axes follow from its rank: yx, zyx, czyx or tczyx."""
    view = to_five(array, name_axes(None, array.ndim, name))
    return MemorySink(name, view, check_dtype(array.dtype, name), _address(array))


def _source(
    array: NDArray[Any], name: str, where: str, address: str, fingerprint: str, said: str | None,
    mapped: Any = None,
) -> MemorySource:  # fmt: skip
    axes, _ = source_axes(said, None, array.ndim, where)
    dtype = check_dtype(array.dtype, where)
    five = to_five(array, axes)
    fingerprint = f"{fingerprint}{(said and f' {said}') or ''}"
    return MemorySource(name, five, dtype, canonical(axes), address, fingerprint, mapped)


def _address(array: NDArray[Any]) -> str:
    return f"memory:{array.__array_interface__['data'][0]:#x}"
