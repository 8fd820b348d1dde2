"""The limits of values, by channel and slice, which interpolated values are kept within."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .normalize import Scaling


class ValueLimits:
    """The least and the largest value of each channel, in the whole or in each slice along an axis,
    of data that streams by in pieces in any order."""

    def __init__(self, channels: int, slices: int) -> None:
        """``slices`` is 1 for the whole."""
        self.done = False
        """True once all pieces are added."""
        self._ends = np.full((2, channels, slices), [[[np.inf]], [[-np.inf]]])
        self._bare = np.zeros((channels, slices), np.bool_)
        """True where some voxel does not count."""

    def add(
        self,
        array: NDArray[Any],
        where: Sequence[NDArray[np.bool_]],
        axis: int | None,
        first: int,
    ) -> None:
        """Count the values of a piece.

        Args:
            array: Of shape (channels, z, y, x).
            where: True for the voxels that count, for each channel.
            axis: That of slices, 0 to 2; None for the whole.
            first: The first slice of the piece.
        """
        others = tuple(each for each in range(3) if each != axis)
        stop = first + (1 if axis is None else array.shape[axis + 1])
        least, most = -np.inf, np.inf
        if array.dtype.kind != "f":
            least, most = np.iinfo(array.dtype).min, np.iinfo(array.dtype).max
        for channel, (values, some) in enumerate(zip(array, where, strict=True)):
            at = (channel, slice(first, stop))
            low = np.fmin.reduce(values, others, initial=most, where=some)
            high = np.fmax.reduce(values, others, initial=least, where=some)
            counted = some.any(others)
            self._ends[(0, *at)] = np.fmin(self._ends[(0, *at)], np.where(counted, low, np.inf))
            self._ends[(1, *at)] = np.fmax(self._ends[(1, *at)], np.where(counted, high, -np.inf))
            self._bare[at] |= ~some.all(others)

    @property
    def counts(self) -> dict[str, NDArray[Any]]:
        """The counts: arrays that `merge` adds to those of another one."""
        return {"ends": self._ends, "bare": self._bare}

    def merge(self, counts: Mapping[str, NDArray[Any]]) -> None:
        """Add the `counts` of another one."""
        least, most = counts["ends"]
        self._ends = np.stack([np.fmin(self._ends[0], least), np.fmax(self._ends[1], most)])
        self._bare |= counts["bare"]

    def advance(self) -> None:
        """End the only pass."""
        self.done = True

    def normalised(
        self, channel: int, scaling: Scaling, dtype: np.dtype[Any]
    ) -> NDArray[np.float64]:
        """The limits of a channel once it is normalised in floats of a dtype, shape (2, slices).
        What does not count is 0 then."""
        ends = self._ends[:, channel].astype(dtype)
        ends = (ends - dtype.type(scaling.lower)) / dtype.type(scaling.scale)
        counted = np.isfinite(ends[0])
        if scaling.clip is not None:
            ends = ends.clip(*scaling.clip)
        ends = np.where(counted, ends, 0)
        zero = self._bare[channel] & scaling.keeps_zeros
        ends[0] = np.where(zero, np.minimum(ends[0], 0), ends[0])
        ends[1] = np.where(zero, np.maximum(ends[1], 0), ends[1])
        return ends.astype(np.float64)
