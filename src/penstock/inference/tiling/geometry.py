"""How patches, blocks and units cut a volume, and how patches meet at their seams."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...base import InferConfig, UsageError
from ...data import Box, Grid, flatten, indices

Seam = Literal["trim", "blend"]


@dataclass(frozen=True, slots=True)
class Block:
    """Some neighbouring patches of one volume, which pass the pipeline together."""

    number: int
    """Position in the visiting order of the whole job."""
    volume: int
    """Index of the volume, a pair of time point and channel group, in the job."""
    region: int
    """Flat index of the region in that volume."""
    patches: Box
    """Indices in the patch grid."""
    core: Box
    """The voxels that its patches own, clipped to the volume."""
    support: Box
    """The voxels to which it contributes. With trimmed seams they are its core, with blended ones
    more."""
    read: Box
    """The voxels that its patches read; may reach past the volume's edge."""
    needed: frozenset[tuple[int, ...]] | None = None
    """Indices of the patches to compute; None for all. The values of other patches are undefined
    and must not be used."""

    def __str__(self) -> str:
        return f"block {self.number} {self.core}"

    @property
    def num_patches(self) -> int:
        """Number of patches that are computed."""
        return self.patches.size if self.needed is None else len(self.needed)

    def each_patch(self) -> Iterator[tuple[int, ...]]:
        """The indices of the patches that are computed, in visiting order."""
        needed = self.needed
        return (i for i in indices(self.patches) if needed is None or i in needed)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The cuts of one spatial volume into patches, blocks, units and regions. All boxes have the
    axes z y x, in source coordinates."""

    domain: Box
    patch: tuple[int, ...]
    overlap: tuple[int, ...]
    seam: Seam
    unit: tuple[int, ...]
    """Shape of a write unit."""
    anchor: tuple[int, ...]
    """A corner of the sink's chunk grid, z y x, in source coordinates."""
    region: tuple[int, ...]
    """Shape of a region, in whole units. Inside a region each patch is computed once, and
    incomplete units are held in memory. A patch on a border is computed once for each side."""
    patches_per_block: tuple[int, ...]
    spills: bool = False
    """True if a block on a border is computed only once, by the region in which it begins. That
    region spills the block's contributions to units of other regions; see `spill`."""

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
        """The patch grid. A cell is the voxels that a patch owns."""
        return Grid(self.domain, self.stride, self.domain.start)

    def patch_read(self, index: Sequence[int]) -> Box:
        """The box that a patch reads, core and context. It may reach past the volume's edge."""
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

    def patches_of(self, region: Box) -> Box:
        """Indices of the patches that a region computes."""
        if not self.spills:
            return self.patches_for(region)
        per_block, domain = self.patches_per_block, self.domain
        ends = []
        for corner in (region.start, region.stop):
            lines = zip(corner, domain.start, per_block, self.stride, strict=True)
            ends.append([-((low - at) // (n * s)) * n for at, low, n, s in lines])
        first, stop = ends
        stop = [
            max(a, min(b, n)) for a, b, n in zip(first, stop, self.cores.cells.stop, strict=True)
        ]
        return Box(tuple(first), tuple(stop))

    def reach(self, block: Block) -> Box:
        """The box to which a block contributes: its region, or the whole volume if it spills."""
        return self.domain if self.spills else self.regions[block.region]

    def is_border(self, unit: Box) -> bool:
        """Whether blocks of several regions contribute to a unit."""
        if not self.spills:
            return False
        region = self.regions.cell(self.regions.touching(unit).start)
        return self.patches_for(unit) not in self.patches_of(region)

    def block_lines(self, box: Box) -> Box:
        """Indices, in the grid of whole blocks, of the blocks that contribute to a box."""
        return Grid(self.cores.cells, self.patches_per_block).touching(self.patches_for(box))

    def block_at(self, index: Sequence[int], volume: int = 0) -> Block:
        """The block at an index of the grid of whole blocks."""
        patches = Grid(self.cores.cells, self.patches_per_block).cell(index)
        core, regions = self.core_of(patches), self.regions
        region = flatten(regions.touching(Box.of(core.start, (1, 1, 1))).start, regions.cells)
        return self._block(patches, region, volume)

    def read_of(self, patches: Box) -> Box:
        """The box that several patches read together."""
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

        Blocks are aligned to the global patch grid, not to the region. So a blended sum adds the
        same numbers in the same order for any regions.
        """
        return Grid(self.patches_of(region), self.patches_per_block)

    def blocks(self, number: int = 0, volume: int = 0) -> Iterator[Block]:
        """Every block of the volume in visiting order, numbered from ``number``."""
        return self.blocks_in(self.domain, number, volume)

    def blocks_in(self, box: Box, number: int = 0, volume: int = 0) -> Iterator[Block]:
        """The blocks of the regions that a box touches, in visiting order."""
        regions = self.regions
        for index in indices(regions.touching(box)):
            flat = flatten(index, regions.cells)
            for patches in self.blocks_of(regions.cell(index)):
                yield self._block(patches, flat, volume, number)
                number += 1

    def _block(self, patches: Box, region: int, volume: int, number: int = 0) -> Block:
        core, support = self.core_of(patches), self.support_of(patches)
        return Block(number, volume, region, patches, core, support, self.read_of(patches))

    def count_blocks(self) -> int:
        return math.prod(
            int((-(-stop // n) - first // n).sum())
            for (first, stop), n in zip(
                self._patches_by_axis(), self.patches_per_block, strict=True
            )
        )

    def count_patches(self) -> int:
        """Patches computed. One on a region's border counts for each side that computes it."""
        return math.prod(int((stop - first).sum()) for first, stop in self._patches_by_axis())

    def _patches_by_axis(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        # Regions form a product grid, so a sum over them is a product of one sum for each axis.
        return (self.patches_along(axis) for axis in range(len(self.patch)))

    def regions_along(self, axis: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and stop of each region along an axis: two arrays of shape (regions,)."""
        low, high = self.domain.start[axis], self.domain.stop[axis]
        step, anchor = self.region[axis], self.anchor[axis]
        first, stop = self.regions.span(axis)  # a plan asks for it thousands of times
        lines = anchor + step * np.arange(first, stop + 1, dtype=np.int64)
        lines = np.minimum(np.maximum(lines, low), high)
        return lines[:-1], lines[1:]

    def patches_along(self, axis: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`patches_of` each region along an axis: first and stop, arrays of shape (regions,)."""
        low, high, stride = self.domain.start[axis], self.domain.stop[axis], self.stride[axis]
        start, stop = self.regions_along(axis)
        if self.spills:
            per_block, count = self.patches_per_block[axis], -((low - high) // stride)
            first, stop = (
                -((low - ends) // (per_block * stride)) * per_block for ends in (start, stop)
            )
            return first, np.maximum(first, np.minimum(stop, count))
        if self.seam == "blend":
            start = np.maximum(start - self.after[axis], low)
            stop = np.minimum(stop + self.before[axis], high)
        return (start - low) // stride, -((low - stop) // stride)


def narrowed(geometry: Geometry, block: Block, units: Iterable[Sequence[int]]) -> Block:
    """A block without the patches that some units do not need.

    Args:
        geometry: The cut of the volume.
        block: The block.
        units: Indices of units that it contributes to.

    Returns:
        The block. Its contributions to these units have the same bits.
    """
    boxes = [block.patches & geometry.patches_for(geometry.units.cell(unit)) for unit in units]
    hull = reduce(Box.hull, boxes)
    if block.patches in boxes:
        return block
    patches = frozenset(index for box in boxes for index in indices(box))
    return replace(
        block,
        patches=hull,
        core=geometry.core_of(hull),
        support=geometry.support_of(hull),
        read=geometry.read_of(hull),
        needed=None if len(patches) == hull.size else patches,
    )


@dataclass(frozen=True, slots=True)
class PatchShape:
    """A patch and its overlap, on three axes, and how many of these the model takes."""

    patch: tuple[int, ...]
    overlap: tuple[int, ...]
    model_axes: Literal[2, 3]

    @property
    def seen(self) -> tuple[int, ...]:
        """Shape of a patch on the axes that the model takes."""
        return self.patch[3 - self.model_axes :]


def per_axis(values: Sequence[int], *, plane: bool, thin: int) -> tuple[int, ...]:
    """One number, or one for each axis, as z y x. ``thin`` is the z of a plane."""
    if len(values) == 3:
        return tuple(values)
    if len(values) == 2:
        return (thin, *values)
    return (thin if plane else values[0], values[0], values[0])


def patch_shape(config: InferConfig, has_z: bool, model_axes: int | None) -> PatchShape:
    """The patch of a job. It is a plane if --patch has two axes or the net is two-dimensional.

    Raises `UsageError` if patch, overlap, trim and net contradict each other.
    """
    axes = len(config.patch) if len(config.patch) > 1 else (model_axes or (3 if has_z else 2))
    if model_axes is not None and axes != model_axes:
        raise UsageError(
            f"--patch {' '.join(map(str, config.patch))} has {axes} axes but the model is made of "
            f"{model_axes}-D convolutions"
        )
    plane = axes == 2
    patch = per_axis(config.patch, plane=plane, thin=1)
    overlap = per_axis(config.overlap, plane=plane, thin=0)
    if len(config.overlap) == 1:
        # One number is meant for all axes, but an axis of one voxel cannot overlap.
        overlap = tuple(0 if p == 1 else o for p, o in zip(patch, overlap, strict=True))
    for name, p, o in zip("zyx", patch, overlap, strict=True):
        if o >= p:
            raise UsageError(f"--overlap {o} must be less than --patch {p} (axis {name})")
        trim = config.trim_voxels if config.seam_mode == "trim" and p > 1 else None
        if trim is not None and 2 * trim > o:
            raise UsageError(
                f"--trim-voxels {trim} needs an --overlap of at least "
                f"{2 * trim}, not {o} (axis {name})"
            )
    return PatchShape(patch, overlap, 2 if plane else 3)


def block_halo(config: InferConfig, geometry: Geometry) -> tuple[int, ...]:
    """Voxels around a write unit, z y x, that count in its percentiles.

    The halo is never wider than the context that patches read, so it is the same around every unit.
    Only percentiles depend on it: a patch always reads its true neighbours, in any unit.
    """
    if config.halo is not None:
        halo = per_axis(config.halo, plane=False, thin=0)
    elif config.seam_mode == "blend":
        halo = tuple(max(1, min(8, p // 8)) for p in geometry.patch)
    else:
        halo = geometry.before if config.trim_voxels is None else (config.trim_voxels,) * 3
    return tuple(map(min, halo, geometry.before))
