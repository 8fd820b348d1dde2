"""The cutting of a volume: one global grid of patches, blocks, parts and bricks.

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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from .box import Box


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
    index = []
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
    flat = 0
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
