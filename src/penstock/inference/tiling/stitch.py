"""Join patches to a volume: which patch owns a voxel (trim), or how much each counts (blend).

`shares` gives the weights of a patch along one axis; the weight of a voxel is the product over its
axes. `Assembly` joins bricks into blocks in host memory and returns a block once its
last voxel has arrived. It must get bricks in visiting order, so that sums of overlapping patches
are always taken in the same order, and the result is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ...data import Box, indices
from ...models import Sliding
from .geometry import Brick, Geometry
from .traffic import bricks_along

_PLANES_BYTES = 2**24
"""Most bytes of planes that are finished at once, if they are several."""


def window(
    sliding: Sliding, axis: int, patch: int, overlap: int, floor: float
) -> NDArray[np.float64]:
    """The raw blending window along z, y or x (0, 1 or 2), shape (patch,).

    ``floor`` is the least weight of a cosine, so that each voxel of a patch counts a little.
    """
    if sliding.window == "gaussian":
        middle = (patch - 1) / 2 if sliding.centred else patch // 2
        away = (np.arange(patch) - middle) / (patch * sliding.sigma[axis])
        return np.exp(-(away**2) / 2)
    ramp = np.ones(patch)
    if sliding.window == "constant":
        return ramp
    if overlap:
        # Squared, as the rise of a patch and the fall of its neighbour then add up to one.
        rise = np.sin(np.pi * (np.arange(overlap) + 0.5) / (2 * overlap)) ** 2
        ramp[:overlap] = rise
        # Both may lie on one voxel, if the overlap is more than half of the patch.
        ramp[-overlap:] = np.minimum(ramp[-overlap:], rise[::-1])
    return np.maximum(ramp, floor)


def shares(raw: NDArray[Any], neighbours: Sequence[Sequence[int]]) -> NDArray[Any]:
    """The weights of a patch, of which those of all patches that cover a voxel add up to one.

    Args:
        raw: The window of every patch, on some axes.
        neighbours: For each axis how far behind the patch those begin that share voxels with it,
            itself among them.

    Returns:
        An array like ``raw``.
    """
    total = np.zeros_like(raw)
    for shift in product(*neighbours):
        sides = list(zip(shift, raw.shape, strict=True))
        there = tuple(slice(max(0, by), min(side, by + side)) for by, side in sides)
        total[there] += raw[tuple(slice(max(0, -by), min(side, side - by)) for by, side in sides)]
    return np.divide(raw, total)


@dataclass(slots=True)
class Block:
    """A block that is being filled, which is one box of one volume. Where outputs lie on another
    grid than patches, it is made of what its arrays hold once all of it is there."""

    volume: int
    index: tuple[int, ...]
    box: Box
    held: Box
    """The voxels of the volume that it is made of; itself where the grids are the same."""
    missing: int
    """Voxels of brick support that have not arrived yet."""
    arrays: Sequence[NDArray[Any]] = ()
    """One array for each head, shape (channels, z, y, x). There is none as long as no brick of the
    block holds sample, so that a block without any costs little."""
    waiting: list[tuple[Brick, Sequence[NDArray[Any] | None]]] = field(default_factory=list)
    """Bricks that have arrived and are not merged, with their heads."""


def planes_at_once(depth: int, num_bytes: int) -> int:
    """How many planes of a block are finished at once, of ``depth`` planes that have so many bytes
    over all their channels, of which there may be a hundred."""
    return max(1, depth * _PLANES_BYTES // num_bytes)


@dataclass(slots=True)
class Assembly:
    """Takes bricks in visiting order, and returns complete blocks."""

    geometry: Geometry
    empty: Callable[[int, tuple[int, ...]], NDArray[Any]]
    """A function of a head and a spatial shape that makes the array of a block, with zeros for a
    head that is summed."""
    summed: Sequence[bool]
    """True for each head whose bricks are added up. In other heads each voxel comes from the patch
    that owns it."""
    placed: Callable[[int, Box], Box] = lambda head, box: box
    """A function of a head and a box that gives the box in the grid of the head."""
    wanted: Callable[[int, tuple[int, ...]], bool] = lambda volume, index: True
    """A function of a volume and an index that is false for a block that is written already."""
    takes_over: bool = False
    """True if a block may take over the arrays of a brick that is all of it, and not copy them."""
    open: dict[tuple[int, tuple[int, ...]], Block] = field(default_factory=dict)

    def add(self, brick: Brick, heads: Sequence[NDArray[Any] | None]) -> Iterator[Block]:
        """Merge the heads of a brick, and yield each block that is complete by then.

        A head has the shape (channels, z, y, x) of the brick's support if it is summed, else of
        its core. None adds nothing. The first is None if nothing of the brick is sample. A block
        that takes them over has ``heads`` itself as its arrays.
        """
        reach = self.geometry.reach(brick)
        for index in indices(self.geometry.blocks.touching(reach)):
            if not self.wanted(brick.volume, index):
                continue
            block = self._block(brick.volume, index)
            if self.takes_over and brick.core == block.held:
                block.arrays = cast("Sequence[NDArray[Any]]", heads)  # without sample, none is None
            else:
                block.waiting.append((brick, heads))
                if block.arrays or heads[0] is not None:
                    self._merge(block)
            block.missing -= (reach & block.box).size
            if block.missing == 0:
                yield self.open.pop((brick.volume, index))

    def _block(self, volume: int, index: tuple[int, ...]) -> Block:
        key = (volume, index)
        if key not in self.open:
            box = self.geometry.blocks.cell(index)
            held = self.geometry.needed(box)
            self.open[key] = Block(volume, index, box, held, self._contributions(box))
        return self.open[key]

    def _merge(self, block: Block) -> None:
        """Put the waiting bricks of a block into its arrays."""
        boxes = [self.placed(number, block.held) for number in range(len(self.summed))]
        if not block.arrays:
            block.arrays = [self.empty(number, box.shape) for number, box in enumerate(boxes)]
        for brick, heads in block.waiting:
            for number, (summed, box) in enumerate(zip(self.summed, boxes, strict=True)):
                head, reach = heads[number], brick.support if summed else brick.core
                share = self.placed(number, reach & block.held)
                # The patches of a brick may own no voxel of a block that they contribute to.
                if head is not None and share.size:
                    values = head[(slice(None), *share.within(self.placed(number, reach)))]
                    there = block.arrays[number][(slice(None), *share.within(box))]
                    if summed:
                        np.add(there, values, out=there)
                    else:
                        there[...] = values
        block.waiting.clear()

    def _contributions(self, box: Box) -> int:
        """How many voxels bricks will contribute to a block, summed over the bricks.

        Bricks form a product grid, so the count is a product of one sum for each axis.
        """
        parts = self.geometry.parts
        places = zip(parts.touching(box).start, parts.cells.start, strict=True)
        total = 1
        for axis, (cell, first) in enumerate(places):
            along = bricks_along(self.geometry, axis)
            part, reach = along.part, along.reach
            stop = np.minimum(reach.stop, box.stop[axis])
            covered = stop - np.maximum(reach.start, box.start[axis])
            # Bricks of another part may reach into the block, too. What they would add is computed
            # again by those of its own part.
            total *= int(covered[part == cell - first].clip(0).sum())
        return total
