"""Arrays in memory, and memory-mapped files. There is no cache, since nothing is decoded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..box import Box
from .frames import name_axes, to_five
from .protocols import check_dtype, source_fingerprint
from .sliced import Asked, OpenedArray, SlicedSource


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


def open_array_source(array: NDArray[Any], *, name: str, axes: str | None = None) -> SlicedSource:
    """A source over ``array``. Without ``axes`` its rank decides: yx, zyx, czyx or tczyx."""
    asked = Asked(path=name, where=name, axes=axes)
    return SlicedSource(_opened(array), asked, _address(array), array.shape)


def open_array(asked: Asked, cache_bytes: int) -> OpenedArray:
    """Open a ``.npy`` file, mapped and so read on demand. Pickled objects are refused."""
    with np.errstate(over="ignore"):  # a shape that overflows raises an error as well
        return _opened(np.lib.format.open_memmap(asked.file, mode="r"))


def open_array_sink(array: NDArray[Any], *, name: str) -> MemorySink:
    """A sink over ``array``; its axes follow from its rank: yx, zyx, czyx or tczyx."""
    view = to_five(array, name_axes(None, array.ndim, name))
    return MemorySink(name, view, check_dtype(array.dtype, name), _address(array))


def _opened(array: NDArray[Any]) -> OpenedArray:
    return OpenedArray(array=array, labels=None, chunks=(1,) * array.ndim)


def _address(array: NDArray[Any]) -> str:
    return f"memory:{array.__array_interface__['data'][0]:#x}"
