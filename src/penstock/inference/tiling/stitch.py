"""How patches become a volume again: who owns a voxel (trim), or how much each counts (blend).

``axis_weights`` says what each patch along one axis contributes; the weight of a voxel is the
product over its axes. `Assembly` joins blocks into write units in host memory and gives a unit
out when its last voxel has arrived. It must be fed blocks in visiting order: then a sum of
overlapping patches is always taken in the same order and the result is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...data import Box, indices
from .geometry import Block, Geometry
from .traffic import blocks_along


def window(patch: int, overlap: int, floor: float) -> NDArray[np.float64]:
    """The raw blending window of one axis, shape (patch,): a raised cosine over the overlap.

    ``floor`` is the least weight, so that no voxel of a patch is thrown away altogether.
    """
    ramp = np.ones(patch)
    if overlap:
        rise = np.sin(np.pi * (np.arange(overlap) + 0.5) / (2 * overlap)) ** 2
        ramp[:overlap] = rise
        ramp[-overlap:] = np.minimum(ramp[-overlap:], rise[::-1])
    return np.maximum(ramp, floor)


def axis_weights(
    patch: int, overlap: int, floor: float, index: int, count: int
) -> NDArray[np.float64]:
    """Weights of patch ``index`` of ``count`` along one axis, shape (patch,), float64.

    Over the patches that cover a voxel they add up to one, at the volume's edges as well.
    """
    return _axis_weights(patch, overlap, floor, *place_in_row(patch, overlap, index, count))


def place_in_row(patch: int, overlap: int, index: int, count: int) -> tuple[int, int]:
    """Index and count of a patch in the shortest row that gives it the same weights: patches far
    from both edges all have the same.
    """
    reach = (patch - 1) // (patch - overlap)
    left, right = min(index, reach), min(count - 1 - index, reach)
    return left, left + right + 1


@lru_cache(maxsize=256)
def _axis_weights(
    patch: int, overlap: int, floor: float, index: int, count: int
) -> NDArray[np.float64]:
    raw = window(patch, overlap, floor)
    stride = patch - overlap
    total = np.zeros(patch)
    for other in range(count):
        shift = (other - index) * stride
        low, high = max(0, shift), min(patch, shift + patch)
        total[low:high] += raw[low - shift : high - shift]
    return np.divide(raw, total)


@dataclass(slots=True)
class Unit:
    """A write unit that is being filled: one box of one volume, an array for each head."""

    volume: int
    index: tuple[int, ...]
    box: Box
    arrays: list[NDArray[Any]]
    """One array for each head, shape (channels, z, y, x)."""
    missing: int
    """Voxels of block support that have not arrived yet."""


def share_of(geometry: Geometry, block: Block, unit: Box, *, blended: bool) -> Box:
    """The voxels of a unit that a block brings to a head."""
    return (block.support if blended else block.core) & geometry.reach(block) & unit


def merge(unit: Unit, head: int, share: Box, values: NDArray[Any], *, blended: bool) -> None:
    """Put what a block brings to a head, (channels, z, y, x) of its share, into a unit."""
    there = unit.arrays[head][(slice(None), *share.within(unit.box))]
    if blended:
        np.add(there, values, out=there)
    else:
        there[...] = values


@dataclass(slots=True)
class Assembly:
    """Takes blocks in visiting order, and gives out whole units."""

    geometry: Geometry
    empty: Callable[[int, tuple[int, ...]], NDArray[Any]]
    """A function (head, spatial shape) that makes the array of a unit: zeros for a blended head."""
    blended: Sequence[bool]
    """True for each head whose patches are added up. In any other each voxel comes from the patch
    that owns it."""
    wanted: Callable[[int, tuple[int, ...]], bool] = lambda volume, index: True
    """A function (volume, index) that is false for a unit that an earlier run has written."""
    open: dict[tuple[int, tuple[int, ...]], Unit] = field(default_factory=dict)

    def add(self, block: Block, heads: Sequence[NDArray[Any]]) -> Iterator[Unit]:
        """Merge the heads of a block, and yield each unit that is whole by then.

        A head has the shape (channels, z, y, x) of the block's support if it is blended, else of
        its core.
        """
        geometry = self.geometry
        support = block.support & geometry.reach(block)
        for index in indices(geometry.units.touching(support)):
            if not self.wanted(block.volume, index):
                continue
            unit = self._unit(block.volume, index)
            for number, blended in enumerate(self.blended):
                share = share_of(geometry, block, unit.box, blended=blended)
                if share.size:  # else its patches own nothing here
                    held = block.support if blended else block.core
                    values = heads[number][(slice(None), *share.within(held))]
                    merge(unit, number, share, values, blended=blended)
            unit.missing -= (support & unit.box).size
            if unit.missing == 0:
                yield self.open.pop((block.volume, index))

    def _unit(self, volume: int, index: tuple[int, ...]) -> Unit:
        key = (volume, index)
        if key not in self.open:
            box = self.geometry.units.cell(index)
            arrays = [self.empty(head, box.shape) for head in range(len(self.blended))]
            self.open[key] = Unit(volume, index, box, arrays, self._contributions(box))
        return self.open[key]

    def _contributions(self, box: Box) -> int:
        """How many voxels blocks will bring to a unit, the share of each block counted.

        Blocks form a product grid, so the count factors into one sum for each axis.
        """
        regions = self.geometry.regions
        places = zip(regions.touching(box).start, regions.cells.start, strict=True)
        total = 1
        for axis, (cell, first) in enumerate(places):
            region, _, support = blocks_along(self.geometry, axis)
            stop = np.minimum(support.stop, box.stop[axis])
            covered = stop - np.maximum(support.start, box.start[axis])
            total *= int(covered[region == cell - first].clip(0).sum())
        return total
