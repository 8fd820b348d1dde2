"""A job cut into blocks and parts, and the ways to cut it.

A part is what one process computes by itself, wherever and whenever it runs: a box of whole blocks
of one volume, so no two parts write the same chunk. A patch on the border of two parts is computed
by both. So a part depends on nothing but the input: done twice, or by two processes at once, it
writes the same bytes. That is why sharing a job needs no leases. Parts are numbered in visiting
order, the last axis first, and are never listed in memory.

A `Plan` is made for each way to cut, and the cheapest one that fits the memory is taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ...base import InferConfig, UsageError
from ...data import Box, in_words
from ..tiling.geometry import Brick, Geometry, PatchShape, per_axis
from .memory import Facts

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
        size = len(self)
        return range((element - 1) * size // elements, element * size // elements)


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


BRICK_VOXELS = 3_000_000
"""Most voxels that a brick reads. Small bricks take little memory while they are under way;
below this size the fixed cost of a brick begins to show."""
BLOCK_VOXELS = 2**22
"""Most voxels in a block whose size is chosen here. Small blocks are written sooner, so a kill
loses less."""
OWN_BLOCK_VOXELS = 2**24
"""Most voxels of a block that has its own percentiles, and so its own patches (256 cubed). With
smaller blocks too many patches would be computed twice."""


def cuts(
    config: InferConfig, facts: Facts, shape: PatchShape, part: tuple[int, ...] | None
) -> Iterator[Geometry]:
    """The cuts to compare, the largest parts first. ``part`` is the shape of parts of a run that
    other processes may work on.

    Raises `UsageError` for a block that does not match the output's chunks.
    """
    grid = tuple(math.lcm(*axis) for axis in zip(*facts.write_grids, strict=True))
    # A block is held on the network's grid, which may have more voxels.
    most = BLOCK_VOXELS * facts.written.size // max(facts.written.size, facts.domain.size)
    most = OWN_BLOCK_VOXELS if config.normalize == "percentile" else most
    block = block_shape(config.block, grid, facts.written.shape, most)
    geometry = _geometry(config, facts, shape, block)
    if part is not None:
        yield replace(geometry, part=part)
    elif config.normalize == "percentile":  # each block has percentiles, and so patches, of its own
        yield geometry
    elif config.shared_by is None:
        for part in _parts_of_one_process(facts, block):
            yield replace(geometry, part=part)
    else:
        least, count = config.parts or 1, 0
        while count < least:
            part = fit_parts(geometry, facts.num_volumes, config.shared_by, least)
            yield (cut := replace(geometry, part=part))
            count = len(Parts(cut, facts.num_volumes))
            # Each block is a part, or no way to cut gives more.
            if count < least or part == block:
                return
            # Next, parts of half the size, which hold less: these may not fit into the memory.
            least = 2 * count


def _parts_of_one_process(facts: Facts, block: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Shapes of parts to compare: the whole volume, and smaller ones that hold fewer open blocks.
    They are not cut along z, as bricks sweep it."""
    # One more, as the corner of the chunk grid may lie within the volume, which then begins with a
    # cut block.
    blocks = [-(-n // u) + 1 for n, u in zip(facts.written.shape, block, strict=True)]
    while True:
        yield tuple(n * u for n, u in zip(blocks, block, strict=True))
        # The longer one of y and x is halved, as long as it has several blocks.
        axis = 1 if blocks[1] * block[1] >= blocks[2] * block[2] else 2
        if blocks[axis] == 1:
            axis = 3 - axis
        if blocks[axis] == 1:
            return
        blocks[axis] = -(-blocks[axis] // 2)


def block_shape(
    said: Sequence[int] | None, grid: Sequence[int], extent: Sequence[int], most: int
) -> tuple[int, ...]:
    """The shape of a block, z y x.

    Args:
        said: What --block says, None if it is left open.
        grid: The least shape of whole chunks of every output.
        extent: The shape of the outputs.
        most: Most voxels of a block that is chosen here.

    Returns:
        What is said, cut to the outputs. Without it, whole chunks that are nearly a cube.

    Raises:
        UsageError: What is said is not whole chunks.
    """
    if said is None:
        block = list(grid)
        while True:
            growing = [a for a in range(3) if block[a] < extent[a]]
            axis = min(growing, key=lambda a: (block[a], -a), default=None)
            if axis is None or math.prod(block) * 2 > most:
                return tuple(block)
            block[axis] *= 2
    asked = per_axis(said, plane=False, thin=grid[0])
    whole = tuple(-(-min(b, n) // g) * g for b, g, n in zip(asked, grid, extent, strict=True))
    if any(b % g and b < n for b, g, n in zip(asked, grid, extent, strict=True)):
        words, fit = (" ".join(map(str, sides)) for sides in (said, whole[len(said) == 2 :]))
        raise UsageError(
            f"--block {words}: a block is whole chunks (or shards) of the output, and these are "
            f"{in_words(grid)} voxels, z y x; give --block {fit}"
        )
    return whole


def _geometry(
    config: InferConfig,
    facts: Facts,
    shape: PatchShape,
    block: tuple[int, ...],
) -> Geometry:
    """The geometry in which each block is a part."""
    blended = config.seam_mode == "blend" and facts.summed
    geometry = Geometry(
        domain=facts.domain,
        back=facts.back,
        patch=shape.patch,
        overlap=shape.overlap,
        seam="blend" if blended else "trim",
        block=block,
        anchor=facts.anchor,
        part=block,
        patches_per_brick=(1, 1, 1),
        steps=facts.steps,
        inner=facts.inner,
    )
    stride, counts = geometry.stride, geometry.patches.shape
    if config.normalize == "percentile":
        # Each part is one brick, as its percentiles are needed before its first patch. Bricks end
        # at multiples of this in the global grid, so it must cover the whole grid.
        per_brick = [*counts]
    else:
        per_brick = [1, 1, 1]
        while growing := [a for a in range(3) if per_brick[a] < counts[a]]:
            axis = min(growing, key=lambda a: (per_brick[a] * stride[a], -a))
            per_brick[axis] += 1
            read = (n * s + o for n, s, o in zip(per_brick, stride, shape.overlap, strict=True))
            if math.prod(read) * facts.in_channels > BRICK_VOXELS:
                per_brick[axis] -= 1
                break
    return replace(geometry, patches_per_brick=tuple(per_brick))
