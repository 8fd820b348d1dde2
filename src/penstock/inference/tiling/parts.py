"""A job cut into parts. One worker computes each part.

A part is a box of whole regions of one volume, and so of whole write units: no two parts write the
same chunk. A patch on the border of two parts is computed by both, or only by one, which spills the
other's share; then a part is one region. Parts are visited like regions, the last axis first, and
are never listed in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from ...base import UsageError, plural
from ...data import Box, Grid, flatten, indices
from .geometry import Block, Geometry

IDLE_PARTS = 0.5
"""Time for which a worker idles at the end of a job and while pipelines fill and drain, as a share
of the time of a part."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker computes and writes at a time."""

    number: int
    """Index in the visiting order of the job, from 0."""
    volume: int
    """Index of its volume in the job."""
    box: Box
    """The voxels that it writes, z y x."""

    def __str__(self) -> str:
        return f"part {self.number} {self.box} of volume {self.volume}"


@dataclass(frozen=True, slots=True)
class Extent:
    """How much a job, or a share of it, computes and writes."""

    units: int
    patches: int
    """Number of patches computed. One on a border counts once for each side that computes it."""
    voxels: int
    """Number of voxels of all volumes, with each channel group counted once."""


@dataclass(frozen=True)
class Parts:
    """A lazy sequence of the parts of a job."""

    geometry: Geometry
    step: tuple[int, ...]
    """Shape of a part, z y x, in whole regions."""
    num_volumes: int
    workers: int = 1
    """Number of workers that the parts are cut for."""

    @cached_property
    def grid(self) -> Grid:
        """The parts of one volume."""
        return Grid(self.geometry.domain, self.step, self.geometry.anchor)

    def __len__(self) -> int:
        return len(self.grid) * self.num_volumes

    def __getitem__(self, number: int) -> Part:
        if not 0 <= number < len(self):
            raise IndexError(number)
        volume, flat = divmod(number, len(self.grid))
        return Part(number, volume, self.grid[flat])

    def __iter__(self) -> Iterator[Part]:
        return map(self.__getitem__, range(len(self)))

    def blocks(self, part: Part) -> Iterator[Block]:
        """The blocks of a part, numbered from 0."""
        return self.geometry.blocks_in(part.box, volume=part.volume)

    def units(self, part: Part) -> Box:
        """The indices of the units that a part writes."""
        return self.geometry.units.touching(part.box)

    def number_of(self, volume: int, unit: Sequence[int]) -> int:
        """The number of the part that writes a unit."""
        cell = self.grid.touching(self.geometry.units.cell(unit)).start
        return self._number(volume, cell)

    def sources(self, part: Part) -> list[int]:
        """The numbers of the parts whose blocks contribute to the units of a part."""
        geometry, axes = self.geometry, []
        lines = geometry.block_lines(part.box)
        for axis in range(3):
            step = geometry.patches_per_block[axis] * geometry.stride[axis]
            begins = geometry.domain.start[axis] + step * np.arange(
                lines.start[axis], lines.stop[axis], dtype=np.int64
            )
            axes.append(np.unique((begins - self.grid.anchor[axis]) // self.step[axis]).tolist())
        return [self._number(part.volume, cell) for cell in itertools.product(*axes)]

    def targets(self, part: Part) -> list[int]:
        """The numbers of the parts with units that the blocks of a part contribute to."""
        patches = self.geometry.patches_of(part.box)
        if not patches.size:
            return []
        cells = self.grid.touching(self.geometry.support_of(patches))
        return [self._number(part.volume, cell) for cell in indices(cells)]

    def _number(self, volume: int, cell: Sequence[int]) -> int:
        return volume * len(self.grid) + flatten(cell, self.grid.cells)

    def extent(self, numbers: Iterable[int]) -> Extent:
        """What some parts compute and write together."""
        units = patches = voxels = 0
        for part in map(self.__getitem__, numbers):
            units += self.units(part).size
            voxels += part.box.size
            for index in indices(self.geometry.regions.touching(part.box)):
                region = self.geometry.regions.cell(index)
                patches += self.geometry.patches_of(region).size
        return Extent(units, patches, voxels)

    def share(self, element: int, elements: int) -> range:
        """The numbers of the parts of one element of an array.

        Args:
            element: The element, counted from 1.
            elements: Number of elements.

        Returns:
            Consecutive numbers. Shares differ by one part at most.

        Raises:
            UsageError: There are more elements than parts.
        """
        if elements > len(self):
            raise UsageError(
                f"--part {element}/{elements}: the job has {plural(len(self), 'part')} of whole "
                "blocks; take no more elements than that"
            )
        size = len(self)
        return range((element - 1) * size // elements, element * size // elements)


def fit_parts(geometry: Geometry, num_volumes: int, workers: int, least: int | None) -> Parts:
    """The cut into parts that equally fast workers finish soonest.

    Args:
        geometry: The cut of one volume.
        num_volumes: Number of volumes.
        workers: Number of workers that share the parts.
        least: Least number of parts; None for any.

    Returns:
        Parts in whole units. If there are fewer units than ``least``, each is a part.
    """
    wanted = min(least or 1, len(geometry.units) * num_volumes)

    uncut = replace(geometry, region=geometry.unit)  # equal for all regions that are compared
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
    step = tuple(cuts[place].step for cuts, place in zip(axes, places, strict=True))
    return Parts(geometry, step, num_volumes, workers)


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
    """Ways to cut an axis into 1, 2, 3, 4, 6, 8 ... pieces of whole units. Only the last piece may
    be shorter."""
    units = geometry.units.cells.shape[axis]
    counts = {1, 2, 3, *(k * 2**i for i in range(1, 12) for k in (2, 3)), units}
    steps = {-(-units // count) for count in counts if count <= units}
    cuts = []
    for step in sorted(steps, reverse=True):
        size = tuple(step * u if a == axis else u for a, u in enumerate(geometry.unit))
        first, stop = replace(geometry, region=size).patches_along(axis)
        cuts.append(_AxisCut(size[axis], len(first), int(np.max(stop - first))))
    return cuts
