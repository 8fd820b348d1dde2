"""The patches of each part of a job, and how much of a part is redone if its worker dies.

Parts are boxes of a grid, so the number of patches of a part is a product of three numbers, one for
each axis. A short table for each axis gives the patches of any part, of all parts before it, and of
all parts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .geometry import Geometry
from .parts import Parts
from .traffic import blocks_along

Shares = NDArray[np.float64]

_PLACES = 4096
"""Number of moments within a part at which the death of its worker is computed."""


@dataclass(frozen=True, slots=True)
class BlockLine:
    """The blocks and units of a region along an axis."""

    before: NDArray[np.int64]
    """Number of patches before each block, and then that of all; shape (blocks + 1,)."""
    first: NDArray[np.int64]
    """The first block that touches each unit, and then the number of blocks; shape (units + 1,)."""
    last: NDArray[np.int64]
    """The last block that touches each unit."""

    @property
    def patches(self) -> int:
        return int(self.before[-1])

    def block_at(self, done: Shares, layer: int) -> tuple[NDArray[np.int64], Shares]:
        """The block under way after ``done`` patches, and how much of it is done. A patch along
        this axis stands for ``layer`` patches."""
        done = done / layer
        block = np.searchsorted(self.before, done, side="right") - 1
        block = np.clip(block, 0, len(self.before) - 2)
        size = self.before[block + 1] - self.before[block]
        return block, (done - self.before[block]) / size * layer

    def open_units(self, block: NDArray[np.int64]) -> tuple[Any, Any]:
        """The first unit that the block closes, and the first that it leaves open."""
        return np.searchsorted(self.last, block), np.searchsorted(self.last, block, side="right")

    def patches_from(self, unit: NDArray[np.int64]) -> NDArray[np.int64]:
        """Number of patches from the first block of a unit to the last block of all."""
        return self.patches - self.before[self.first[unit]]


@dataclass(frozen=True)
class Redo:
    """The work that a dead worker leaves of a part. It is the blocks that touch a unit without a
    note."""

    lines: tuple[BlockLine, ...]
    """The blocks and units of one region, z y x."""
    regions: int
    """Number of regions in a part, visited one after the other."""

    def left(self, done: Shares | float) -> Shares:
        """The share of a part's patches that another worker computes.

        Args:
            done: The shares that were computed when the worker died.

        Returns:
            Shares of the part, of the same shape. They are never below ``1 - done``.
        """
        region, inside = np.divmod(np.clip(done, 0.0, 1.0) * self.regions, 1)
        left = (self.regions - region - 1 + self._of_region(inside)) / self.regions
        return np.asarray(np.clip(left, 1.0 - np.clip(done, 0.0, 1.0), 1.0))

    def _of_region(self, done: Shares) -> Shares:
        z, y, x = self.lines
        plane, whole = y.patches * x.patches, z.patches * y.patches * x.patches
        layer, rest = z.block_at(done * whole, plane)
        row, rest = y.block_at(rest, x.patches)
        place, _ = x.block_at(rest, 1)
        (z_closing, z_open), (y_closing, y_open) = z.open_units(layer), y.open_units(row)
        depth = z.patches_from(z_closing) - z.patches_from(z_open)
        height = y.patches_from(y_closing) - y.patches_from(y_open)
        in_row = height * x.patches_from(x.open_units(place)[0])
        in_layer = depth * (y.patches_from(y_open) * x.patches + in_row)
        return np.asarray((z.patches_from(z_open) * plane + in_layer) / whole)

    @cached_property
    def _lost(self) -> list[float]:
        """The share of a part that is computed twice, for each moment at which its worker dies."""
        done = (np.arange(_PLACES) + 0.5) / _PLACES
        lost: list[float] = (done + self.left(done) - 1).tolist()
        return lost

    def lost(self, done: float) -> float:
        """The share that is computed twice if the worker dies after the share ``done``. It is read
        from a table, which is fast enough for a simulation."""
        return self._lost[min(int(done * _PLACES), _PLACES - 1)]

    @cached_property
    def mean_lost(self) -> float:
        """The share of a part that is computed twice after a death, on average over all moments."""
        return sum(self._lost) / _PLACES


@dataclass(frozen=True)
class PartWork:
    """The patches of the parts of a job."""

    axes: tuple[Sequence[int], ...]
    """Numbers of patches of the parts along each axis."""
    num_volumes: int
    redo: Redo

    def __len__(self) -> int:
        z, y, x = map(len, self.axes)
        return z * y * x * self.num_volumes

    @cached_property
    def _before(self) -> tuple[list[int], ...]:
        """Number of patches before each part along an axis, and then that of all."""
        return tuple([0, *accumulate(axis)] for axis in self.axes)

    @cached_property
    def _of_volume(self) -> int:
        z, y, x = self._before
        return z[-1] * y[-1] * x[-1]

    @cached_property
    def total(self) -> int:
        """Patches of all parts."""
        return self._of_volume * self.num_volumes

    @property
    def mean(self) -> float:
        """Mean number of patches of a part."""
        return self.total / len(self)

    @property
    def largest(self) -> int:
        """Patches of the largest part."""
        z, y, x = map(max, self.axes)
        return z * y * x

    def of_last(self, count: int) -> float:
        """Mean number of patches of the last ``count`` parts."""
        count = min(count, len(self))
        return (self.total - self.before(len(self) - count)) / count

    def before(self, number: int) -> int:
        """Number of patches of the parts before part ``number``."""
        (z, y, x), (along_z, along_y, along_x) = self._before, self.axes
        rest, k = divmod(number, len(along_x))
        rest, j = divmod(rest, len(along_y))
        volume, i = divmod(rest, len(along_z))
        patches = volume * self._of_volume + z[i] * y[-1] * x[-1]
        return patches + along_z[i] * (y[j] * x[-1] + along_y[j] * x[k])

    def at(self, patches: float) -> int:
        """The part under way once ``patches`` are computed in visiting order."""
        (z, y, x), (along_z, along_y, along_x) = self._before, self.axes
        volume, rest = divmod(patches, self._of_volume)
        rest /= y[-1] * x[-1]
        i = min(bisect_right(z, rest), len(along_z)) - 1
        rest = (rest - z[i]) / (along_z[i] or 1) * y[-1]
        j = min(bisect_right(y, rest), len(along_y)) - 1
        rest = (rest - y[j]) / (along_y[j] or 1) * x[-1]
        k = min(bisect_right(x, rest), len(along_x)) - 1
        return ((int(volume) * len(along_z) + i) * len(along_y) + j) * len(along_x) + k


def part_work(parts: Parts) -> PartWork:
    """The patches of the parts of a job.

    Args:
        parts: The parts.

    Returns:
        Patches by axis, and the share of the largest part that is redone if its worker dies.
    """
    geometry, axes, regions = parts.geometry, [], 1
    for axis in range(3):
        first, stop = geometry.patches_along(axis)
        start, _ = geometry.regions_along(axis)
        part = (start - geometry.anchor[axis]) // parts.step[axis]
        _, number, count = np.unique(part, return_inverse=True, return_counts=True)
        patches = np.zeros(len(count), np.int64)
        np.add.at(patches, number, stop - first)
        axes.append(patches.tolist())
        regions *= int(count.max())
    # Parts that spill are counted as if they computed their borders. They lose less, since spilled
    # pieces survive.
    lines = tuple(_block_line(replace(geometry, spills=False), axis) for axis in range(3))
    return PartWork(tuple(axes), parts.num_volumes, Redo(lines, regions))


def _block_line(geometry: Geometry, axis: int) -> BlockLine:
    """The blocks of the longest region along an axis."""
    first, stop = geometry.patches_along(axis)
    longest = int(np.argmax(stop - first))
    low, high = (int(ends[longest]) for ends in geometry.regions_along(axis))
    region, read, support = blocks_along(geometry, axis)
    mine = region == longest
    patches = (read.length[mine] - geometry.patch[axis]) // geometry.stride[axis] + 1
    start, stop = replace(geometry, region=geometry.unit).regions_along(axis)
    inside = (low <= start) & (start < high)
    first = np.searchsorted(support.stop[mine], start[inside], side="right")
    return BlockLine(
        before=np.concatenate(([0], np.cumsum(patches))),
        first=np.append(first, len(patches)),
        last=np.searchsorted(support.start[mine], stop[inside]) - 1,
    )
