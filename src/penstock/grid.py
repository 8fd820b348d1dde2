"""How a volume is cut: one global grid of patches, write units, regions and compute blocks.

                 ├──────── unit 0 ────────┼──────── unit 1 ────────┤   what a sink takes at once
    volume    0  ├─────────┬─────────┬────┴────┬─────────┬─────────┤
    cores        │ patch 0 │ patch 1 │ patch 2 │ patch 3 │ patch 4 │   one stride each, no gaps
    reads     ╟╌╌├─────────┤╌╌╢                │         │         │   a core and its context
              before        after
    blocks       ├──── block 0 (2 patches) ────┼──── block 1 ─── …     what travels the pipeline

Patch ``k`` owns the core ``[k * stride, (k + 1) * stride)`` counted from the volume's origin and
reads ``overlap // 2`` voxels before it and the rest of ``overlap`` after it; past the volume's edge
the data is reflected. The patch grid knows nothing of units, workers or devices, so neither does
the result. Nothing here holds a list of anything: a petabyte volume takes no more memory than
a cube of ten voxels, and this module touches no array.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .box import Box

Seam = Literal["trim", "blend"]


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
        axes = range(len(self.step))
        start = tuple((box.start[a] - self.anchor[a]) // self.step[a] for a in axes)
        stop = tuple(-((self.anchor[a] - box.stop[a]) // self.step[a]) for a in axes)
        empty = box.size == 0
        return Box(start, start if empty else stop)

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
    """Every index of an index box, last axis fastest, without a list."""
    for flat in range(cells.size):
        yield unflatten(flat, cells)


def unflatten(flat: int, cells: Box) -> tuple[int, ...]:
    index = []
    for start, length in zip(reversed(cells.start), reversed(cells.shape), strict=True):
        flat, rest = divmod(flat, length)
        index.append(start + rest)
    return tuple(reversed(index))


def flatten(index: Sequence[int], cells: Box) -> int:
    flat = 0
    for i, start, length in zip(index, cells.start, cells.shape, strict=True):
        flat = flat * length + (i - start)
    return flat


def reflect(coordinates: NDArray[np.int_], low: int, high: int) -> NDArray[np.int_]:
    """Coordinates mirrored at the edges of ``[low, high)`` as often as it takes.

    The edge voxel is the mirror and is not repeated; a length of 1 repeats its only voxel.

    >>> reflect(np.arange(-2, 6), 0, 4).tolist()
    [2, 1, 0, 1, 2, 3, 2, 1]
    """
    period = max(1, 2 * (high - low - 1))
    phase = (coordinates - low) % period
    return low + np.minimum(phase, period - phase)


@dataclass(frozen=True, slots=True)
class Block:
    """What travels the pipeline: some neighbouring patches of one volume."""

    number: int
    """Place in the visiting order of the whole job."""
    volume: int
    """Which of the job's (t, channel group) volumes."""
    region: int
    """Which region of that volume."""
    patches: Box
    """Indices in the patch grid."""
    core: Box
    """The voxels that its patches own, clipped to the volume."""
    support: Box
    """The voxels that it contributes to: the core when seams are trimmed, more when blended."""
    read: Box
    """The voxels that its patches see; may reach past the volume's edge."""

    def __str__(self) -> str:
        return f"block {self.number} {self.core}"


@dataclass(frozen=True, slots=True)
class Geometry:
    """Every cut of one spatial volume. All boxes are three axes, z y x, in source coordinates."""

    domain: Box
    patch: tuple[int, ...]
    overlap: tuple[int, ...]
    seam: Seam
    unit: tuple[int, ...]
    """Shape of a write unit."""
    anchor: tuple[int, ...]
    """Where the sink's own chunk grid begins, in source coordinates."""
    region: tuple[int, ...]
    """Shape of a region, whole units: within one, each patch is computed once, and what is
    half done is held in memory; a patch on a border is computed for each side."""
    patches_per_block: tuple[int, ...]

    @property
    def stride(self) -> tuple[int, ...]:
        return tuple(p - o for p, o in zip(self.patch, self.overlap, strict=True))

    @property
    def before(self) -> tuple[int, ...]:
        """Voxels of context that a patch reads before its core."""
        return tuple(o // 2 for o in self.overlap)

    @property
    def after(self) -> tuple[int, ...]:
        return tuple(o - o // 2 for o in self.overlap)

    @property
    def units(self) -> Grid:
        return Grid(self.domain, self.unit, self.anchor)

    @property
    def regions(self) -> Grid:
        return Grid(self.domain, self.region, self.anchor)

    @property
    def cores(self) -> Grid:
        """The patch grid, by what each patch owns."""
        return Grid(self.domain, self.stride, self.domain.start)

    def patch_read(self, index: Sequence[int]) -> Box:
        """What the patch at an index sees; may reach past the volume's edge."""
        start = [
            i * s + o - b
            for i, s, o, b in zip(index, self.stride, self.domain.start, self.before, strict=True)
        ]
        return Box.of(start, self.patch)

    def patches_for(self, box: Box) -> Box:
        """Indices of the patches that contribute to a box."""
        if self.seam == "blend":
            box = box.grow(self.after, self.before) & self.domain
        return self.cores.touching(box)

    def read_of(self, patches: Box) -> Box:
        """What some patches see together."""
        last = tuple(i - 1 for i in patches.stop)
        return Box(self.patch_read(patches.start).start, self.patch_read(last).stop)

    def core_of(self, patches: Box) -> Box:
        first, last = self.cores.cell(patches.start), self.cores.cell([i - 1 for i in patches.stop])
        return Box(first.start, last.stop)

    def support_of(self, patches: Box) -> Box:
        if self.seam == "trim":
            return self.core_of(patches)
        return self.read_of(patches) & self.domain

    def blocks_of(self, region: Box) -> Grid:
        """The index boxes of a region's blocks.

        Block lines are anchored in the global patch grid, not in the region, so a blended sum
        adds the same numbers in the same order whatever the region.
        """
        return Grid(self.patches_for(region), self.patches_per_block)

    def blocks(self, number: int = 0, volume: int = 0) -> Iterator[Block]:
        """Every block of the volume in visiting order, numbered from ``number``."""
        for flat, region in enumerate(self.regions):
            for patches in self.blocks_of(region):
                core, support = self.core_of(patches), self.support_of(patches)
                yield Block(number, volume, flat, patches, core, support, self.read_of(patches))
                number += 1

    def count_blocks(self) -> int:
        return math.prod(
            int((-(-stop // n) - first // n).sum())
            for (first, stop), n in zip(
                self._patches_by_axis(), self.patches_per_block, strict=True
            )
        )

    def count_patches(self) -> int:
        """Patches computed, those on region borders counted for each side."""
        return math.prod(int((stop - first).sum()) for first, stop in self._patches_by_axis())

    def _patches_by_axis(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        # Regions form a product grid, so what they sum to is a product of one short sum an axis.
        return (self.patches_along(axis) for axis in range(len(self.patch)))

    def regions_along(self, axis: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and stop of each region along an axis: two arrays of shape (regions,)."""
        cells, step, anchor = self.regions.cells, self.region[axis], self.anchor[axis]
        lines = anchor + step * np.arange(cells.start[axis], cells.stop[axis] + 1, dtype=np.int64)
        lines = lines.clip(self.domain.start[axis], self.domain.stop[axis])
        return lines[:-1], lines[1:]

    def patches_along(self, axis: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`patches_for` each region along an axis: first and stop, two arrays (regions,)."""
        low, high, stride = self.domain.start[axis], self.domain.stop[axis], self.stride[axis]
        start, stop = self.regions_along(axis)
        if self.seam == "blend":
            start = np.maximum(start - self.after[axis], low)
            stop = np.minimum(stop + self.before[axis], high)
        return (start - low) // stride, -((low - stop) // stride)
