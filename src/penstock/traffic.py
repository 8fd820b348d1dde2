"""What a geometry costs in traffic: voxels decoded for what is read, voxels held until written.

Arithmetic on boxes, axis by axis, in memory that does not grow with the volume. `plan` turns these
counts into bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .box import Box
from .grid import Geometry, Grid, reflect

CacheLevel = Literal["layer", "row", "none"]
"""What of the decoded chunks a read cache still holds when the next block wants them."""


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The boxes of a block that need not exist."""

    read: Box
    support: Box
    hull: Box
    """What is seen, and all that it is mirrored from at the volume's edges."""


def largest_block(geometry: Geometry) -> BlockShape:
    """A block at least as large as any, axis by axis.

    Of a region's blocks along an axis only the first, the last and those next to the volume's edge
    can differ from the others.
    """

    def longest(of: Callable[[Box], Box]) -> Box:
        def within(region: Box) -> tuple[int, ...]:
            blocks = geometry.blocks_of(region)
            first, stop = blocks.cells.start, blocks.cells.stop
            return tuple(
                max(
                    of(blocks.cell([*first[:axis], i, *first[axis + 1 :]])).shape[axis]
                    for i in {*range(first[axis], min(first[axis] + 3, stop[axis])), stop[axis] - 1}
                )
                for axis in range(3)
            )

        return Box.of((0, 0, 0), [max(lengths) for lengths in geometry.per_axis(within)])

    def hull(patches: Box) -> Box:
        read = geometry.read_of(patches)
        return read.hull(read_range(read, geometry.domain))

    return BlockShape(longest(geometry.read_of), longest(geometry.support_of), longest(hull))


def read_range(box: Box, domain: Box) -> Box:
    """The voxels of the volume that a read box needs once its outside is reflected."""
    if box in domain:
        return box
    mirrored = [
        reflect(np.arange(a, b), low, high)
        for a, b, low, high in zip(box.start, box.stop, domain.start, domain.stop, strict=True)
    ]
    return Box(tuple(int(m.min()) for m in mirrored), tuple(int(m.max()) + 1 for m in mirrored))


def reads(geometry: Geometry, chunk: tuple[int, ...], level: CacheLevel) -> tuple[int, int]:
    """Voxels that a cache level must hold, and voxels decoded under it, of one channel.

    Blocks are visited x fastest, z slowest. Chunks that several blocks share are decoded once
    along an axis if the cache still holds them when the next block along it comes: a row of
    blocks must fit for y, a whole layer for z. Shared chunks along x are always held as the
    next block follows at once, if there is a cache at all.
    """
    domain = geometry.domain
    chunks = Grid(domain, chunk)

    def span(box: Box) -> tuple[int, ...]:
        touched = chunks.touching(read_range(box, domain))
        first, last = chunks.cell(touched.start), chunks.cell([i - 1 for i in touched.stop])
        return tuple(b - a for a, b in zip(first.start, last.stop, strict=True))

    def whole(region: Box) -> Sequence[int]:
        return span(geometry.read_of(geometry.patches_for(region)))

    def by_block(region: Box) -> Sequence[int]:
        blocks = geometry.blocks_of(region)
        first = blocks.cells.start
        return tuple(
            sum(
                span(geometry.read_of(blocks.cell([*first[:a], i, *first[a + 1 :]])))[a]
                for i in range(first[a], blocks.cells.stop[a])
            )
            for a in range(3)
        )

    once, again = geometry.per_axis(whole), geometry.per_axis(by_block)
    kept = {"layer": 3, "row": 2, "none": 0}[level]
    voxels = math.prod(sum((again if a < 3 - kept else once)[a]) for a in range(3))
    extents = [max(axis) for axis in once]
    deepest = largest_block(geometry).read.shape
    deep = [min(n, d + 2 * (c - 1)) for n, d, c in zip(extents, deepest, chunk, strict=True)]
    held = {"layer": deep[0] * extents[1] * extents[2], "row": deep[0] * deep[1] * extents[2]}
    return held.get(level, 0), voxels


def open_peak(geometry: Geometry) -> int:
    """Most voxels in units under way at once, in the largest region.

    A unit is open from its first block to its last. Both are known for each axis apart, and blocks
    come in order, so along z a unit layer is, at one block layer, either open throughout, opening,
    closing or both; how far it has got is a running sum over the plane.
    """
    region = _interior(geometry)
    blocks, units = geometry.blocks_of(region), Grid(region, geometry.unit, geometry.anchor)
    first, last, thick = [], [], []
    for axis in range(3):
        spans = _spans(geometry, blocks, axis)
        index = list(units.cells.start)
        rows = []
        for i in range(units.cells.start[axis], units.cells.stop[axis]):
            index[axis] = i
            box = units.cell(index)
            low, high = box.start[axis], box.stop[axis]
            hits = np.flatnonzero((spans[:, 0] < high) & (spans[:, 1] > low))
            rows.append((hits[0], hits[-1], high - low))
        table = np.array(rows, dtype=np.int64)
        first.append(table[:, 0])
        last.append(table[:, 1])
        thick.append(table[:, 2])
    columns = blocks.cells.shape[2]
    area = np.multiply.outer(thick[1], thick[2]).ravel()
    opens = np.add.outer(first[1] * columns, first[2]).ravel()
    # The last block of a unit along a row or column is reached when both have been reached.
    closes = np.add.outer(last[1] * columns, last[2]).ravel()
    steps = blocks.cells.shape[1] * columns
    opened = np.cumsum(np.bincount(opens, area, steps))
    closed = np.concatenate(([0.0], np.cumsum(np.bincount(closes, area, steps))[:-1]))
    peak = 0.0
    for layer in range(blocks.cells.shape[0]):
        through = thick[0][(first[0] < layer) & (layer < last[0])].sum()
        opening = thick[0][(first[0] == layer) & (layer < last[0])].sum()
        closing = thick[0][(first[0] < layer) & (layer == last[0])].sum()
        both = thick[0][(first[0] == layer) & (layer == last[0])].sum()
        held = through * area.sum() + opening * opened + closing * (area.sum() - closed)
        peak = max(peak, float((held + both * (opened - closed)).max()))
    return int(peak)


def _spans(geometry: Geometry, blocks: Grid, axis: int) -> NDArray[np.int64]:
    """Start and stop of each block's support along an axis, shape (blocks, 2)."""
    rows = []
    index = list(blocks.cells.start)
    for i in range(blocks.cells.start[axis], blocks.cells.stop[axis]):
        index[axis] = i
        support = geometry.support_of(blocks.cell(index))
        rows.append((support.start[axis], support.stop[axis]))
    return np.array(rows, dtype=np.int64)


def _interior(geometry: Geometry) -> Box:
    """A region that touches no edge where there is one: these are the largest."""
    cells = geometry.regions.cells
    return geometry.regions.cell(
        [a + (b - a) // 2 for a, b in zip(cells.start, cells.stop, strict=True)]
    )
