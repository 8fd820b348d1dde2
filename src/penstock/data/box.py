"""Box, a half-open region in literal coordinates; and Grid, a lazy sequence of boxes that tile one.

A box is independent of arrays, stores and devices. Its origin may be anywhere; ``slices`` and
``within`` turn it into indices of an array. Grids cut a volume into patches, blocks, parts and
bricks:

                 ├──────── block 0 ───────┼──────── block 1 ───────┤   what a sink writes at once
    volume    0  ├─────────┬─────────┬────┴────┬─────────┬─────────┤
    cores        │ patch 0 │ patch 1 │ patch 2 │ patch 3 │ patch 4 │   one stride each, no gaps
    reads     ╟╌╌├─────────┤╌╌╢                │         │         │   a core and its context
              before        after
    bricks       ├──── brick 0 (2 patches) ────┼──── brick 1 ─── …     what travels the pipeline

Patch ``k`` owns the core ``[k * stride, (k + 1) * stride)`` counted from the volume's origin and
reads ``overlap // 2`` voxels before it and the rest of ``overlap`` after it; past the volume's edge
the data is reflected. The patch grid does not depend on blocks, workers or devices, so the result
does not either. Nothing here is a list: a petabyte volume takes no more memory than a cube of ten
voxels. No array is read.

A `ScaledGrid` has more or fewer voxels than another by a constant factor, from one corner on:

    domain   │ 0 │ 1 │ 2 │ 3 │ 4 │
    1/2      │   0   │   1   │   2   │   the last voxel may reach past the domain
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Box:
    """The voxels x with ``start[a] <= x[a] < stop[a]`` on every axis a.

    >>> Box((0, 0), (4, 6)) & Box((2, 5), (9, 9))
    Box((2, 5), (4, 6))
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    def __post_init__(self) -> None:
        if any(a > b for a, b in zip(self.start, self.stop, strict=True)):
            raise ValueError(f"start {self.start} lies past stop {self.stop}")

    @classmethod
    def of(cls, start: Sequence[int], shape: Sequence[int]) -> Box:
        """The box of ``shape`` whose first voxel is ``start``.

        Args:
            start: The first coordinate along each axis.
            shape: The number of voxels along each axis.

        Returns:
            The box.
        """
        return cls(tuple(start), tuple(a + n for a, n in zip(start, shape, strict=True)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of voxels along each axis."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of voxels."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Indices of this box in an array whose origin is zero."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Indices of this box in an array that holds ``outer``."""
        return tuple(
            slice(a - origin, b - origin)
            for a, b, origin in zip(self.start, self.stop, outer.start, strict=True)
        )

    def shift(self, by: Sequence[int]) -> Box:
        """The box moved by so many voxels along each axis."""
        return Box(
            tuple(a + d for a, d in zip(self.start, by, strict=True)),
            tuple(b + d for b, d in zip(self.stop, by, strict=True)),
        )

    def grow(self, before: Sequence[int], after: Sequence[int]) -> Box:
        """The box with more voxels at each end.

        Args:
            before: how many more at the start of each axis.
            after: how many more at the end of each axis.

        Returns:
            The larger box.
        """
        return Box(
            tuple(a - d for a, d in zip(self.start, before, strict=True)),
            tuple(b + d for b, d in zip(self.stop, after, strict=True)),
        )

    def __and__(self, other: Box) -> Box:
        """The common part. Without one, the result is a box of size 0 somewhere in ``self``."""
        start = tuple(
            min(max(a, c), b) for a, b, c in zip(self.start, self.stop, other.start, strict=True)
        )
        stop = tuple(min(b, d) for b, d in zip(self.stop, other.stop, strict=True))
        return Box(start, tuple(max(a, b) for a, b in zip(start, stop, strict=True)))

    def hull(self, other: Box) -> Box:
        """The smallest box that holds both."""
        return Box(tuple(map(min, self.start, other.start)), tuple(map(max, self.stop, other.stop)))

    def __contains__(self, other: Box) -> bool:
        """Whether the other box lies within this one."""
        return (self & other) == other

    def __add__(self, other: Box) -> Box:
        """The box along the axes of both, those of ``self`` first."""
        return Box(self.start + other.start, self.stop + other.stop)

    def __getitem__(self, axes: slice) -> Box:
        """The box of some of the axes."""
        return Box(self.start[axes], self.stop[axes])

    def __repr__(self) -> str:
        return f"Box({self.start}, {self.stop})"


@dataclass(frozen=True, slots=True)
class Grid:
    """A lazy sequence of boxes of one ``step`` that tile ``domain``, clipped to it.

    Grid lines pass through ``anchor``, which may lie outside the domain.

    >>> list(Grid(Box((0,), (10,)), (4,)))
    [Box((0,), (4,)), Box((4,), (8,)), Box((8,), (10,))]
    """

    domain: Box
    step: tuple[int, ...]
    anchor: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.anchor:
            object.__setattr__(self, "anchor", (0,) * len(self.step))
        if any(s < 1 for s in self.step):
            raise ValueError(f"grid step {self.step} must be at least 1 on every axis")

    @property
    def cells(self) -> Box:
        """The cell indices, counted from the anchor, that the domain spans."""
        return self.touching(self.domain)

    def touching(self, box: Box) -> Box:
        """The cell indices whose boxes share a voxel with ``box``."""
        spans = [self._touching(box, axis) for axis in range(len(self.step))]
        return Box(tuple(first for first, _ in spans), tuple(stop for _, stop in spans))

    def span(self, axis: int) -> tuple[int, int]:
        """First and stop of `cells` along one axis, without the others."""
        return self._touching(self.domain, axis)

    def _touching(self, box: Box, axis: int) -> tuple[int, int]:
        step, anchor = self.step[axis], self.anchor[axis]
        first = (box.start[axis] - anchor) // step
        return first, -((anchor - box.stop[axis]) // step) if box.size else first

    def cell(self, index: Sequence[int]) -> Box:
        """The box of a cell, clipped to the domain."""
        start = [i * s + o for i, s, o in zip(index, self.step, self.anchor, strict=True)]
        return Box.of(start, self.step) & self.domain

    def __len__(self) -> int:
        return self.cells.size

    def __getitem__(self, flat: int) -> Box:
        return self.cell(unflatten(flat, self.cells))

    def __iter__(self) -> Iterator[Box]:
        return (self.cell(index) for index in indices(self.cells))


def indices(cells: Box) -> Iterator[tuple[int, ...]]:
    """Every index of an index box, last axis fastest, without a list of them."""
    return product(*map(range, cells.start, cells.stop))


def unflatten(flat: int, cells: Box) -> tuple[int, ...]:
    """The index at a place in a box of indices, the last axis fastest; the inverse of `flatten`.

    Args:
        flat: The number of indices before it.
        cells: The box.

    Returns:
        The index.
    """
    index = []  # not by numpy, whose integers end at 2**63: hostile shapes have more cells
    for start, length in zip(reversed(cells.start), reversed(cells.shape), strict=True):
        flat, rest = divmod(flat, length)
        index.append(start + rest)
    return tuple(reversed(index))


def flatten(index: Sequence[int], cells: Box) -> int:
    """The place of an index among those of a box of indices, the last axis fastest.

    Args:
        index: The index.
        cells: The box.

    Returns:
        The number of indices before it.
    """
    flat = 0  # numpy's own function takes twice as long for one index
    for i, start, length in zip(index, cells.start, cells.shape, strict=True):
        flat = flat * length + (i - start)
    return flat


def reflect(coordinates: NDArray[np.int_], low: int, high: int) -> NDArray[np.int_]:
    """Coordinates mirrored at the edges of ``[low, high)`` as often as it takes.

    The edge voxel is the mirror and is not repeated; a length of 1 repeats its only voxel.

    Args:
        coordinates: any integers, any shape.
        low: the first coordinate of the data.
        high: the coordinate past its last one.

    Returns:
        Coordinates within ``[low, high)``, of the same shape.

    >>> reflect(np.arange(-2, 6), 0, 4).tolist()
    [2, 1, 0, 1, 2, 3, 2, 1]
    """
    period = max(1, 2 * (high - low - 1))
    phase = (coordinates - low) % period
    return low + np.minimum(phase, period - phase)


SAME = (Fraction(1),) * 3


@dataclass(frozen=True, slots=True)
class ScaledGrid:
    """A grid with so many voxels for one of the domain, along z y x."""

    factors: tuple[Fraction, ...] = SAME
    origin: tuple[int, ...] = (0, 0, 0)
    """The corner of the domain, where a voxel of both grids begins. It has the same coordinates in
    both."""

    def box(self, box: Box) -> Box:
        """A box of the domain as a box of this grid."""
        if self.factors == SAME:  # a patch asks several times, and fractions take long
            return box
        axes = zip(box.start, box.stop, self.factors, self.origin, strict=True)
        ends = [(o + math.floor((a - o) * f), o + math.ceil((b - o) * f)) for a, b, f, o in axes]
        return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))

    def back(self) -> ScaledGrid:
        """The way from this grid to the domain."""
        return ScaledGrid(tuple(1 / factor for factor in self.factors), self.origin)

    def sides(self, lengths: Sequence[int]) -> tuple[int, ...]:
        """Numbers of voxels of the domain, as numbers of voxels here."""
        if self.factors == SAME:
            return tuple(lengths)
        return tuple(math.ceil(n * f) for n, f in zip(lengths, self.factors, strict=True))

    def mask(self, mask: NDArray[np.bool_], box: Box) -> NDArray[np.bool_]:
        """What is true of voxels of a box of the domain (its last three axes), for the voxels here
        that have their centres in them."""
        if self.factors == SAME:
            return mask
        places = []
        for length, side, factor in zip(self.box(box).shape, box.shape, self.factors, strict=True):
            p, q = factor.as_integer_ratio()
            places.append(np.minimum((2 * np.arange(length) + 1) * q // (2 * p), side - 1))
        z, y, x = np.ix_(*places)
        return mask[..., z, y, x]

    def density(self, domain: Box, stride: Sequence[int]) -> float:
        """Most voxels here for a voxel of a brick. One voxel at an edge may be cut."""
        axes = zip(self.factors, domain.shape, stride, strict=True)
        return math.prod(float(max(f, f + (1 - f) / min(n, step))) for f, n, step in axes)
