"""A job cut into parts: what one process computes by itself, wherever and whenever it runs.

A part is a box of whole blocks of one volume, so no two parts write the same chunk. A patch on
the border of two parts is computed by both. So a part depends on nothing but the input: done twice,
or by two processes at once, it writes the same bytes. That is why sharing a job needs no leases.
Parts are numbered in visiting order, the last axis first, and are never listed in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ...base import nth_share
from ...data import Box
from .geometry import Brick, Geometry

IDLE_PARTS = 0.5
"""Time for which a worker idles at the end of a job and while pipelines fill and drain, as a share
of the time of a part."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of whole blocks of one volume."""

    number: int
    """Index in the visiting order of the job, from 0."""
    volume: int
    """Index of its volume in the job."""
    index: int
    """Index in that volume."""
    box: Box
    """The voxels that it writes, z y x."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much a job, or a share of it, computes and writes."""

    blocks: int
    patches: int
    """Number of patches computed. One on a border counts once for each side that computes it."""
    voxels: int
    """Number of voxels of all volumes, with each channel group counted once."""


@dataclass(frozen=True)
class Parts:
    """A lazy sequence of the parts of a job."""

    geometry: Geometry
    num_volumes: int

    def __len__(self) -> int:
        return len(self.geometry.parts) * self.num_volumes

    def __getitem__(self, number: int) -> Part:
        volume, index = divmod(number, len(self.geometry.parts))
        return Part(number, volume, index, self.geometry.parts[index])

    def __iter__(self) -> Iterator[Part]:
        return map(self.__getitem__, range(len(self)))

    def blocks(self, part: Part) -> Box:
        """The indices of the blocks that a part writes."""
        return self.geometry.blocks.touching(part.box)

    def bricks(self, numbers: Iterable[int] | None = None) -> Iterator[Brick]:
        """The bricks of some parts, of all by default, in visiting order and numbered from 0."""
        number, geometry = itertools.count(), self.geometry
        for part in self if numbers is None else map(self.__getitem__, numbers):
            for patches in geometry.bricks_of(part.box):
                yield geometry.brick(next(number), part.volume, part.index, patches)

    def extent(self, numbers: Iterable[int]) -> Extent:
        """What some parts compute and write together."""
        blocks = patches = voxels = 0
        for part in map(self.__getitem__, numbers):
            blocks += self.blocks(part).size
            voxels += part.box.size
            patches += self.geometry.patches_for(part.box).size
        return Extent(blocks, patches, voxels)

    def share(self, element: int, elements: int) -> range:
        """The numbers of the parts of one share of the job: consecutive, and maybe none.

        Any number of shares covers each part once, so a run may be begun with one number and go on
        with another. ``element`` is counted from 1.
        """
        return nth_share(element - 1, elements, len(self))


def fit_parts(geometry: Geometry, num_volumes: int, workers: int, least: int) -> tuple[int, ...]:
    """The shape of parts, z y x, with which equally fast workers finish soonest.

    Args:
        geometry: The cut of one volume; its parts do not matter.
        num_volumes: Number of volumes.
        workers: Number of workers that share the parts.
        least: Least number of parts.

    Returns:
        A shape in whole blocks. If there are fewer blocks than ``least``, each is a part.
    """
    wanted = min(least, len(geometry.blocks) * num_volumes)

    uncut = replace(geometry, part=geometry.block)  # equal for all parts that are compared
    axes = [_cuts(uncut, axis) for axis in range(3)]
    count = np.full(1, num_volumes)
    patches = np.ones(1)
    for cuts in axes:  # both arrays have one value for each way to cut all three axes
        count = np.multiply.outer(count, [cut.count for cut in cuts]).ravel()
        patches = np.multiply.outer(patches, [cut.patches for cut in cuts]).ravel()
    missing = np.maximum(0, wanted - count)
    slowest = (-(-count // workers) + IDLE_PARTS) * patches  # what the last worker computes
    # Of the ways that lack the fewest parts, take the fastest.
    best = int(np.where(missing == missing.min(), slowest, np.inf).argmin())
    places = np.unravel_index(best, [len(cuts) for cuts in axes])
    return tuple(cuts[place].step for cuts, place in zip(axes, places, strict=True))


@dataclass(frozen=True, slots=True)
class _AxisCut:
    """One way to cut an axis."""

    step: int
    """Length of a piece in voxels."""
    count: int
    patches: int
    """Number of patches along the longest piece."""


@lru_cache(maxsize=16)
def _cuts(geometry: Geometry, axis: int) -> list[_AxisCut]:
    """Ways to cut an axis into 1, 2, 3, 4, 6, 8 ... pieces of whole blocks. Only the last piece may
    be shorter."""
    blocks = geometry.blocks.cells.shape[axis]
    # Few counts, as all ways to cut the three axes are compared. From 2 on, the next count is at
    # most half as many again.
    counts = {1, 2, 3, *(k * 2**i for i in range(1, 12) for k in (2, 3)), blocks}
    steps = {-(-blocks // count) for count in counts if count <= blocks}
    cuts = []
    for step in sorted(steps, reverse=True):
        size = tuple(step * u if a == axis else u for a, u in enumerate(geometry.block))
        first, stop = replace(geometry, part=size).patches_along(axis)
        cuts.append(_AxisCut(size[axis], len(first), int(np.max(stop - first))))
    return cuts
