"""The traffic of a geometry: voxels decoded to read it, and voxels held until they are written.

Every box of a geometry is a product of three intervals, so every count here comes from one short
table for each axis. Its rows are the bricks along the axis:

    axis x    ├────────── part 0 ──────────┼──────────── part 1 ────────────┤
    rows      ├── 0 ──┼── 1 ──┼── 2 ──┤    ┊
                                   ├── 3 ──┼── 4 ──┼── 5 ──┼── …     a brick that two parts share
                                                                     is computed and counted twice

A petabyte volume has about a thousand rows per axis. `plan` turns these counts into bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...data import Box, reflect
from .geometry import Geometry

CacheLevel = Literal["layer", "row", "none"]
"""The decoded chunks that a read cache still holds when the next brick needs them."""

Ints = NDArray[np.int64]


class Spans(NamedTuple):
    """Intervals along one axis, two arrays of shape (intervals,), in voxels or patch indices."""

    start: Ints
    stop: Ints

    @property
    def length(self) -> Ints:
        return self.stop - self.start


class Bricks(NamedTuple):
    """The bricks along one axis, part after part: arrays of shape (bricks,), in voxels."""

    part: Ints
    """Index of a brick's part along the axis, from 0."""
    read: Spans
    support: Spans
    reach: Spans
    """The voxels of the grid of blocks to which each contributes, also beyond its part."""


@dataclass(frozen=True, slots=True)
class BrickShape:
    """The boxes of the largest possible brick. There may be no real brick that has them."""

    read: Box
    support: Box
    hull: Box
    """The read box, and all voxels that it is reflected from at the volume's edges."""


@lru_cache(maxsize=8)
def largest_brick(geometry: Geometry) -> BrickShape:
    """A brick that is as long, on each axis, as the longest brick on that axis."""
    sides = []
    for axis in range(3):
        _, read, support, _ = bricks_along(geometry, axis)
        inside = _mirrored(read, geometry.domain.start[axis], geometry.domain.stop[axis])
        hull = Spans(np.minimum(read.start, inside.start), np.maximum(read.stop, inside.stop))
        sides.append([int(spans.length.max()) for spans in (read, support, hull)])
    return BrickShape(*(Box.of((0, 0, 0), each) for each in zip(*sides, strict=True)))


def read_range(box: Box, domain: Box) -> Box:
    """The voxels of the volume that a read box needs once its outside is reflected."""
    if box in domain:
        return box
    mirrored = [
        _mirrored(Spans(np.array([a]), np.array([b])), low, high)
        for a, b, low, high in zip(box.start, box.stop, domain.start, domain.stop, strict=True)
    ]
    return Box(tuple(int(m.start[0]) for m in mirrored), tuple(int(m.stop[0]) for m in mirrored))


def reads(
    geometry: Geometry,
    chunk: tuple[int, ...],
    level: CacheLevel,
    *,
    origin: tuple[int, ...] = (0, 0, 0),
) -> tuple[int, int]:
    """How many voxels a cache level must hold, and how many are decoded with it, for one channel.

    ``origin`` is a corner of the source's chunk grid, z y x.

    Bricks are visited x fastest, z slowest. Chunks that several bricks share along an axis are
    decoded once if the cache still holds them when the next brick along the axis is read. For y a
    row of bricks must fit into the cache, for z a whole layer. Along x any cache is enough, as the
    next brick follows at once.
    """
    once, again = _decoded(geometry, chunk, origin)
    kept = {"layer": 3, "row": 2, "none": 0}[level]
    voxels = math.prod(int((again if a < 3 - kept else once)[a].sum()) for a in range(3))
    extents = [int(lengths.max()) for lengths in once]
    deepest = largest_brick(geometry).read.shape
    # A brick may begin and end within a chunk, which is decoded whole.
    deep = [min(n, d + 2 * (c - 1)) for n, d, c in zip(extents, deepest, chunk, strict=True)]
    held = {"layer": deep[0] * extents[1] * extents[2], "row": deep[0] * deep[1] * extents[2]}
    return held.get(level, 0), voxels


@lru_cache(maxsize=8)
def open_peak(geometry: Geometry) -> int:
    """Most voxels that open blocks hold at once, in any part.

    A block is open from the first brick that touches it to the last. Along one axis, blocks of 4
    voxels and bricks of 3:

        blocks     ├──── a ────┼──── b ────┼──── c ────┤
        bricks     ├── 0 ───┼── 1 ───┼── 2 ───┼── 3 ───┤

        opened         4        8       12       12       voxels of blocks opened by then
        unclosed      12       12        8        4       voxels of blocks not closed before
        open           4        8        8        4       opened + unclosed - 12 (all blocks)

    So the peak is the maximum of ``opened + unclosed - all``, on three axes too. Each layer of
    blocks is opened before a brick, by it or after it. So ``opened`` of a volume is
    ``before * all + here * opened`` of a plane, and ``unclosed`` likewise. Bricks that open and
    close equally long blocks differ only in what is opened and closed before and after, of which
    the largest counts. There are few kinds of them, so two axes are gone through by kinds.
    """
    along_z, along_y, along_x = (_blocks_along(geometry, axis) for axis in range(3))
    peak = 0
    for opening_z, closing_z, z in along_z.kinds():
        planes = (z.before + z.after - z.whole).max()
        for opening_y, closing_y, y in along_y.kinds():
            rows = opening_z * y.before + closing_z * y.after + planes * y.whole
            opening, closing = opening_z * opening_y, closing_z * closing_y
            opened = opening * (along_x.before + along_x.opening)
            unclosed = closing * (along_x.after + along_x.closing)
            peak = max(peak, int((opened + unclosed + rows.max() * along_x.whole).max()))
    return peak


class BlocksAlong(NamedTuple):
    """Blocks along an axis at each of its bricks: arrays of shape (bricks,), in voxels."""

    whole: Ints
    """Length of all blocks of the brick's part."""
    before: Ints
    """Length of the blocks of the part opened by earlier bricks."""
    opening: Ints
    """Length of the blocks that this brick is the first to touch."""
    after: Ints
    """Length of the blocks closed by later bricks."""
    closing: Ints
    """Length of the blocks that this brick is the last to touch."""

    def kinds(self) -> Iterator[tuple[int, int, BlocksAlong]]:
        """Yield (opening, closing, the bricks with these two). There are few kinds of bricks."""
        for opening, closing in {*zip(self.opening.tolist(), self.closing.tolist(), strict=True)}:
            rows = (self.opening == opening) & (self.closing == closing)
            yield opening, closing, BlocksAlong(*(column[rows] for column in self))


def _blocks_along(geometry: Geometry, axis: int) -> BlocksAlong:
    parts = Spans(*geometry.parts_along(axis))
    blocks = Spans(*replace(geometry, part=geometry.block).parts_along(axis))
    part, _, _, reach = bricks_along(geometry, axis)
    # Reaches step back at the start of a part. With each part shifted by more than the volume,
    # all are sorted, so that one search finds the bricks of each block's own part.
    shift = geometry.written.shape[axis] + 1
    home = np.searchsorted(parts.start, blocks.start, side="right") - 1
    first = np.searchsorted(reach.stop + shift * part, blocks.start + shift * home, side="right")
    last = np.searchsorted(reach.start + shift * part, blocks.stop + shift * home) - 1
    opening, closing = np.zeros_like(part), np.zeros_like(part)
    held = blocks
    if geometry.back is not None:
        held = Spans(*geometry.back.needed_along(axis, blocks.start, blocks.stop))
    np.add.at(opening, first, held.length)
    np.add.at(closing, last, held.length)
    whole = np.zeros_like(parts.start)
    np.add.at(whole, home, held.length)
    upto = np.cumsum(whole)
    return BlocksAlong(
        whole=whole[part],
        before=np.cumsum(opening) - opening - (upto - whole)[part],
        opening=opening,
        after=upto[part] - np.cumsum(closing),
        closing=closing,
    )


# Kept, as several numbers of a plan come from the same bricks, and so does one of each block.
@lru_cache(maxsize=6)
def bricks_along(geometry: Geometry, axis: int) -> Bricks:
    """The bricks of every part along one axis."""
    low, high = geometry.domain.start[axis], geometry.domain.stop[axis]
    edges, per_brick = geometry.row(axis).edges, geometry.patches_per_brick[axis]
    patches = Spans(*geometry.patches_along(axis))
    first = patches.start // per_brick
    count = -(-patches.stop // per_brick) - first
    part = np.repeat(np.arange(len(count)), count)
    # The bricks of each part are numbered from its first one on, in the grid of the whole axis.
    number = np.arange(len(part)) + (first - np.cumsum(count) + count)[part]
    patches = Spans(
        np.maximum(number * per_brick, patches.start[part]),
        np.minimum((number + 1) * per_brick, patches.stop[part]),
    )
    read = _read_of(geometry, axis, patches)
    if geometry.seam == "trim":
        support = Spans(edges[patches.start], edges[patches.stop])
    else:
        support = Spans(np.maximum(read.start, low), np.minimum(read.stop, high))
    reach = support
    if geometry.back is not None:
        reach = Spans(*geometry.back.given_along(axis, support.start, support.stop))
    return Bricks(part, read, support, reach)


def _read_of(geometry: Geometry, axis: int, patches: Spans) -> Spans:
    """Voxels that ranges of patches read along an axis; may reach past the volume's edge."""
    begins = geometry.row(axis).begins
    return Spans(begins[patches.start], begins[patches.stop - 1] + geometry.patch[axis])


@lru_cache(maxsize=8)
def _decoded(
    geometry: Geometry, chunk: tuple[int, ...], origin: tuple[int, ...]
) -> tuple[list[Ints], list[Ints]]:
    """Voxels decoded along each axis, by each of its parts and by each of its bricks."""
    once, again = [], []
    for axis in range(3):
        patches = Spans(*geometry.patches_along(axis))
        of_parts, of_bricks = _read_of(geometry, axis, patches), bricks_along(geometry, axis).read
        once.append(_touched(geometry, axis, of_parts, chunk[axis], origin[axis]))
        again.append(_touched(geometry, axis, of_bricks, chunk[axis], origin[axis]))
    return once, again


def _touched(geometry: Geometry, axis: int, read: Spans, chunk: int, origin: int) -> Ints:
    """Voxels along an axis of all chunks that each read touches, without those past the volume."""
    low, high = geometry.domain.start[axis], geometry.domain.stop[axis]
    inside = _mirrored(read, low, high)
    start = origin + (inside.start - origin) // chunk * chunk
    stop = origin - (origin - inside.stop) // chunk * chunk
    return np.minimum(stop, high) - np.maximum(start, low)


def _mirrored(spans: Spans, low: int, high: int) -> Spans:
    """The range of ``[low, high)`` that each interval covers once its outside is reflected.

    A reflected coordinate runs to and fro between two mirrors, the first and last voxel. Its range
    ends at each mirror that it meets, else at one end of the interval.
    """
    period = max(1, 2 * (high - low - 1))

    def meets(mirror: int) -> NDArray[np.bool_]:
        return (spans.stop - 1 - mirror) // period > (spans.start - 1 - mirror) // period

    ends = reflect(spans.start, low, high), reflect(spans.stop - 1, low, high)
    start = np.where(meets(low), low, np.minimum(*ends))
    return Spans(start, np.where(meets(high - 1), high - 1, np.maximum(*ends)) + 1)
