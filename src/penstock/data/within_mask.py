"""Values within a mask: which voxels are set and which they enclose, with a bit for each in memory,
and the least and the largest value by channel and slice, which interpolation keeps within."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import groups_of, require
from .box import Box
from .normalize import Scaling


class FilledMask:
    """A mask of a box, z y x. Eight planes share a plane of bytes.

    `fill` sets what is enclosed: the voxels from which no way along the axes, through others that
    are not set, leads out of the box. This is `scipy.ndimage.binary_fill_holes`, plane by plane.
    """

    def __init__(self, box: Box, bits: NDArray[np.uint8] | None = None) -> None:
        """``bits`` are those of another mask of this box; without them nothing is set."""
        self.box = box
        depth, height, width = box.shape
        shape = (-(-depth // 8), height, width)
        self.bits = np.zeros(shape, np.uint8) if bits is None else bits.reshape(shape)

    @staticmethod
    def bytes_for(box: Box) -> int:
        """The most bytes that a mask takes while it is filled, with its planes of numbers."""
        plane = box.shape[1] * box.shape[2]
        return plane * (-(-box.shape[0] // 8) + 64)

    def put(self, box: Box, values: NDArray[np.bool_]) -> None:
        """Set the voxels of a box within the mask that are true."""
        planes, rows, columns = box.within(self.box)
        for z, plane in zip(range(planes.start, planes.stop), values, strict=True):
            self.bits[z // 8, rows, columns] |= plane.astype(np.uint8) << np.uint8(z % 8)

    def read(self, box: Box) -> NDArray[np.bool_]:
        """The voxels of any box; beyond the mask none is set."""
        made, there = np.zeros(box.shape, np.bool_), box & self.box
        if there.size:
            planes, rows, columns = there.within(self.box)
            part = made[there.within(box)]
            for z, plane in zip(range(planes.start, planes.stop), part, strict=True):
                plane[...] = self.bits[z // 8, rows, columns] >> np.uint8(z % 8) & 1
        return made

    def _numbered(self, z: int, count: int) -> tuple[NDArray[np.int64], int]:
        """The regions of a plane that are not set, numbered from ``count`` + 1, and the last of the
        numbers. What is set is 0."""
        unset = self.bits[z // 8] >> np.uint8(z % 8) & 1 == 0
        numbers, regions = require("scipy.ndimage", "nnunet").label(unset)
        return np.where(unset, numbers + np.int64(count), 0), count + regions

    def fill(self) -> None:
        """Set what is enclosed."""
        depth, count, before = self.box.shape[0], 0, None
        meet: list[NDArray[np.int64]] = []  # pairs of numbers; that of what lies outside is 0
        for z in range(depth):
            plane, count = self._numbered(z, count)
            rim = plane if z in (0, depth - 1) else plane[[0, -1]]
            for edge in (rim, plane[:, [0, -1]]):
                outer = np.unique(edge[edge > 0])
                meet.append(np.stack([np.zeros_like(outer), outer]))
            if before is not None:
                both = (plane > 0) & (before > 0)
                pairs = np.unique(before[both] * (count + 1) + plane[both])
                meet.append(np.stack(np.divmod(pairs, count + 1)))
            before = plane
        region = groups_of(count + 1, np.concatenate(meet, axis=1).T, "nnunet")
        enclosed = region != region[0]
        if not enclosed.any():
            return
        # Planes are numbered once more, as their numbers together would take far more than bits.
        count = 0
        for z in range(depth):
            plane, count = self._numbered(z, count)
            self.bits[z // 8] |= enclosed[plane].astype(np.uint8) << np.uint8(z % 8)


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
        zero = self._bare[channel] & (scaling.zeros is not None)
        ends[0] = np.where(zero, np.minimum(ends[0], 0), ends[0])
        ends[1] = np.where(zero, np.maximum(ends[1], 0), ends[1])
        return ends.astype(np.float64)
