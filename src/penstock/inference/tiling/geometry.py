"""How patches, bricks and blocks cut a volume, and how patches meet at their seams."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...base import InferConfig, UsageError
from ...data import Box, Grid, Resampling, indices
from ...models import Steps
from .rows import PatchRow, patches_in_row

Seam = Literal["trim", "blend"]


@dataclass(frozen=True, slots=True)
class Brick:
    """Some neighbouring patches of one volume, which pass the pipeline together."""

    number: int
    """Position in the visiting order of the whole job."""
    volume: int
    """Index of the volume, a pair of time point and channel group, in the job."""
    part: int
    """Index of the part in that volume."""
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
        return f"brick {self.number} {self.core}"

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
    """The cuts of one spatial volume into patches, bricks, blocks and parts. All boxes have the
    axes z y x, in source coordinates."""

    domain: Box
    patch: tuple[int, ...]
    overlap: tuple[int, ...]
    seam: Seam
    block: tuple[int, ...]
    """Shape of a block."""
    anchor: tuple[int, ...]
    """A corner of the sink's chunk grid, z y x, in source coordinates."""
    part: tuple[int, ...]
    """Shape of a part, in whole blocks. Inside a part each patch is computed once, and incomplete
    blocks are held in memory. A patch on a border is computed once for each side, so a part needs
    nothing of its neighbours and may be computed anywhere, at any time, and twice."""
    patches_per_brick: tuple[int, ...]
    steps: Steps = "context"
    """The way in which patches follow each other; see `rows`. All heads are blended if it is not
    ``context``."""
    inner: Box | None = None
    """The box in which patches are laid out, where steps end with the volume; None for all."""
    back: Resampling | None = None
    """The way from the domain to the grid of blocks and parts; None if that is the domain's."""

    @property
    def written(self) -> Box:
        """What blocks and parts cut."""
        return self.domain if self.back is None else self.back.to

    @property
    def stride(self) -> tuple[int, ...]:
        return tuple(p - o for p, o in zip(self.patch, self.overlap, strict=True))

    @property
    def before(self) -> tuple[int, ...]:
        """Voxels of context that a patch reads before its core."""
        return tuple(o // 2 for o in self.overlap)

    @property
    def blocks(self) -> Grid:
        return Grid(self.written, self.block, self.anchor)

    @property
    def parts(self) -> Grid:
        return Grid(self.written, self.part, self.anchor)

    def row(self, axis: int) -> PatchRow:
        """The patches along an axis."""
        inner, domain = self.inner or self.domain, self.domain
        return patches_in_row(
            self.steps, (domain.start[axis], domain.stop[axis]),
            (inner.start[axis], inner.stop[axis]), self.patch[axis], self.overlap[axis],
        )  # fmt: skip

    @property
    def patches(self) -> Box:
        """The indices of all patches: the patch grid."""
        return Box.of((0,) * len(self.patch), [len(row.begins) for row in self._rows])

    @property
    def _rows(self) -> list[PatchRow]:
        return [self.row(axis) for axis in range(len(self.patch))]

    def patch_read(self, index: Sequence[int]) -> Box:
        """The box that a patch reads, core and context. It may reach past the volume's edge."""
        places = zip(index, self._rows, strict=True)
        return Box.of([int(row.begins[i]) for i, row in places], self.patch)

    def patches_for(self, box: Box) -> Box:
        """Indices of the patches that contribute to a box of the grid of blocks."""
        box, blended = self.needed(box), self.seam == "blend"
        axes = zip(self._rows, box.start, box.stop, strict=True)
        ends = [row.touching(start, stop, blended=blended) for row, start, stop in axes]
        return Box(tuple(int(first) for first, _ in ends), tuple(int(stop) for _, stop in ends))

    def needed(self, box: Box) -> Box:
        """The voxels of the domain that a box of the grid of blocks is made of."""
        return box if self.back is None else self.back.needed(box)

    def owned(self, brick: Brick) -> Box:
        """The voxels of the domain that a brick owns in its part."""
        return brick.core & self.needed(self.parts[brick.part])

    def reach(self, brick: Brick, *, summed: bool = True) -> Box:
        """The box of the grid of blocks to which a brick contributes, within its part. A head that
        is not ``summed`` gets the voxels that are nearest to those of the core."""
        box = brick.support if summed else brick.core
        if self.back is not None:
            box = (self.back if summed else self.back.of_order(0)).given(box)
        return box & self.parts[brick.part]

    def read_of(self, patches: Box) -> Box:
        """The box that several patches read together."""
        last = tuple(i - 1 for i in patches.stop)
        return Box(self.patch_read(patches.start).start, self.patch_read(last).stop)

    def core_of(self, patches: Box) -> Box:
        """The voxels that several patches own together."""
        rows = self._rows
        ends = (
            tuple(int(row.edges[i]) for i, row in zip(each, rows, strict=True))
            for each in (patches.start, patches.stop)
        )
        return Box(*ends)

    def support_of(self, patches: Box) -> Box:
        if self.seam == "trim":
            return self.core_of(patches)
        return self.read_of(patches) & self.domain

    def bricks_of(self, part: Box) -> Grid:
        """The index boxes of a part's bricks.

        Bricks are aligned to the global patch grid, not to the part. So a blended sum adds the
        same numbers in the same order for any parts.
        """
        return Grid(self.patches_for(part), self.patches_per_brick)

    def brick(
        self,
        number: int,
        volume: int,
        part: int,
        patches: Box,
        needed: frozenset[tuple[int, ...]] | None = None,
    ) -> Brick:
        """The brick of these patches, of which those that are ``needed`` are computed."""
        boxes = self.core_of(patches), self.support_of(patches), self.read_of(patches)
        return Brick(number, volume, part, patches, *boxes, needed)

    def count_bricks(self) -> int:
        return math.prod(
            int((-(-stop // n) - first // n).sum())
            for (first, stop), n in zip(
                self._patches_by_axis(), self.patches_per_brick, strict=True
            )
        )

    def count_patches(self) -> int:
        """Patches computed. One on a part's border counts for each side that computes it."""
        return math.prod(int((stop - first).sum()) for first, stop in self._patches_by_axis())

    def _patches_by_axis(self) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        # Parts form a product grid, so a sum over them is a product of one sum for each axis.
        return (self.patches_along(axis) for axis in range(len(self.patch)))

    def parts_along(self, axis: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Start and stop of each part along an axis: two arrays of shape (parts,)."""
        low, high = self.written.start[axis], self.written.stop[axis]
        step, anchor = self.part[axis], self.anchor[axis]
        first, stop = self.parts.span(axis)  # a plan asks for it thousands of times
        lines = anchor + step * np.arange(first, stop + 1, dtype=np.int64)
        lines = np.minimum(np.maximum(lines, low), high)
        return lines[:-1], lines[1:]

    def patches_along(self, axis: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`patches_for` each part along an axis: first and stop, arrays of shape (parts,)."""
        start, stop = self.parts_along(axis)
        if self.back is not None:
            start, stop = self.back.needed_along(axis, start, stop)
        return self.row(axis).touching(start, stop, blended=self.seam == "blend")


def narrowed(geometry: Geometry, brick: Brick, blocks: Iterable[Sequence[int]]) -> Brick:
    """A brick without the patches that some blocks do not need.

    Args:
        geometry: The cut of the volume.
        brick: The brick.
        blocks: Indices of blocks that it contributes to.

    Returns:
        The brick. Its contributions to these blocks have the same bits.
    """
    boxes = [brick.patches & geometry.patches_for(geometry.blocks.cell(block)) for block in blocks]
    hull = reduce(Box.hull, boxes)
    if brick.patches in boxes:
        return brick
    patches = frozenset(index for box in boxes for index in indices(box))
    needed = None if len(patches) == hull.size else patches
    return geometry.brick(brick.number, brick.volume, brick.part, hull, needed)


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
    assert config.sides is not None and config.overlap is not None  # by now all are decided
    axes = len(config.sides) if len(config.sides) > 1 else (model_axes or (3 if has_z else 2))
    if model_axes is not None and axes != model_axes:
        raise UsageError(
            f"--patch {' '.join(map(str, config.sides))} has {axes} axes but the model is made of "
            f"{model_axes}-D convolutions"
        )
    plane = axes == 2
    patch = per_axis(config.sides, plane=plane, thin=1)
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
    if config.tta == "rotations" and patch[1] != patch[2]:
        raise UsageError(
            f"--tta rotations turns patches in the plane of y and x, so --patch must be as long "
            f"along both, not {patch[1]} and {patch[2]}"
        )
    return PatchShape(patch, overlap, 2 if plane else 3)


def aligned(
    shape: PatchShape, factors: Iterable[Sequence[Fraction]], *, may_change: bool
) -> PatchShape:
    """The patch with an overlap at which cores begin at whole voxels of every head's grid.

    ``factors`` are those of the heads. An overlap that ``may_change`` becomes the next that fits.
    Raises `UsageError` for another at which they do not.
    """
    overlap = []
    axes = zip("zyx", shape.patch, shape.overlap, zip(*factors, strict=True), strict=True)
    for name, patch, shared, along in axes:
        coarsest = math.lcm(*(factor.denominator for factor in along))
        least = 1 if coarsest == 1 else 2 * coarsest
        if shared % least:
            if not may_change:
                raise UsageError(
                    f"the network gives one voxel for {coarsest} along {name}, so --overlap must "
                    f"be a multiple of {least}, not {shared}"
                )
            shared = min(shared + least, patch - 1) // least * least
        overlap.append(shared)
    return replace(shape, overlap=tuple(overlap))


def block_halo(config: InferConfig, geometry: Geometry) -> tuple[int, ...]:
    """Voxels around a block, z y x, that count in its percentiles.

    The halo is never wider than the context that patches read, so it is equal around every block.
    Only percentiles depend on it: a patch always reads its true neighbours, in any block.
    """
    if config.halo is not None:
        halo = per_axis(config.halo, plane=False, thin=0)
    elif config.seam_mode == "blend":
        halo = tuple(max(1, min(8, p // 8)) for p in geometry.patch)
    else:
        halo = geometry.before if config.trim_voxels is None else (config.trim_voxels,) * 3
    return tuple(map(min, halo, geometry.before))
