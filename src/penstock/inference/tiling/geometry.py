"""How patches, bricks and blocks cut a volume, and how patches meet at their seams.

Patches follow each other along an axis in one of these ways:

    context    a stride each, and the first begins half an overlap before the volume
    inset      a stride each, and the first begins where the volume does
    narrowed   as few as the longest stride allows, at strides that are nearly equal
    moved      a stride each, but the last is moved back

Those that are narrowed or moved end where the volume ends, as nnU-Net's and MONAI's do. A volume
that is shorter than a patch lies in the middle of one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...base import InferConfig
from ...data import Box, Grid, Resampling, indices
from ...models import Steps

Ints = NDArray[np.int64]
Seam = Literal["trim", "blend"]


@dataclass(frozen=True, slots=True)
class PatchRow:
    """The patches along an axis, in source coordinates."""

    patch: int
    begins: Ints
    """The first voxel that each reads, which may lie before the volume."""
    edges: Ints
    """The first voxel that each owns, and last the end of the volume."""

    def touching(self, start: Any, stop: Any, *, blended: bool) -> tuple[Any, Any]:
        """First and stop of the patches that contribute to intervals, which are not empty. Those
        that are ``blended`` contribute to all that they read, others to what they own."""
        ends = self.begins + self.patch if blended else self.edges[1:]
        starts = self.begins if blended else self.edges[:-1]
        # From the first that ends behind the start, to the first that begins no earlier than the
        # stop.
        return np.searchsorted(ends, start, side="right"), np.searchsorted(starts, stop)

    def neighbours(self, index: int) -> tuple[int, ...]:
        """How far behind a patch those begin that share voxels with it, itself among them."""
        near = self.begins - self.begins[index]
        return tuple(near[np.abs(near) < self.patch].tolist())


# Kept, as each patch asks for the rows of all axes to know where it lies.
@lru_cache(maxsize=64)
def patches_in_row(
    steps: Steps, domain: tuple[int, int], inner: tuple[int, int], patch: int, overlap: int
) -> PatchRow:
    """The patches along an axis.

    Args:
        steps: How they follow each other.
        domain: Start and stop of the volume.
        inner: Start and stop of what steps that end with the volume take for it. Beyond it, patches
            follow that share no voxel with others.
        patch: Length of a patch.
        overlap: Voxels that neighbours share, at least.

    Returns:
        The patches.
    """
    low, high = domain
    if steps in ("context", "inset"):
        # So many patches cover as many strides, and an overlap.
        first, count = low, -(-max(1, high - low - overlap) // (patch - overlap))
        if steps == "context":
            first, count = low - overlap // 2, -(-(high - low) // (patch - overlap))
        begins = first + (patch - overlap) * np.arange(count)
    else:
        begins = inner[0] + _within(steps, inner[1] - inner[0], patch, overlap)
        # Patches that end with `inner` leave the rest of the volume uncovered. As many as it takes
        # follow on both sides, edge to edge.
        before = max(0, -(-(int(begins[0]) - low) // patch))
        after = max(0, -(-(high - int(begins[-1])) // patch) - 1)
        begins = np.concatenate([
            begins[0] - patch * np.arange(before, 0, -1), begins,
            begins[-1] + patch * np.arange(1, after + 1),
        ])  # fmt: skip
    # Neighbours meet in the middle of what they share.
    middles = begins[1:] + (begins[:-1] + patch - begins[1:]) // 2
    return PatchRow(patch, begins, np.concatenate([[low], middles, [high]]))


def _within(steps: Steps, length: int, patch: int, overlap: int) -> Ints:
    """Where patches begin that end with the volume."""
    stride, rest = patch - overlap, length - patch
    if rest <= 0:
        # One patch, with the volume in its middle; an odd voxel lies behind it.
        return np.array([-(-rest // 2)])
    if steps == "moved":
        return np.minimum(stride * np.arange(-(-rest // stride) + 1), rest)
    # Half of a patch of odd length is no whole number of voxels, and nnU-Net does not round it.
    twice = patch if overlap == patch // 2 else 2 * stride
    count = -(-2 * rest // twice)
    return np.round(rest / count * np.arange(count + 1)).astype(np.int64)


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
    """The way in which patches follow each other; see above. All heads are blended if it is not
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

    @property
    def held(self) -> tuple[int, ...]:
        """The shape of what a block is made of, at most."""
        return self.block if self.back is None else self.back.most_needed(self.block)

    def reach(self, brick: Brick) -> Box:
        """The box of the grid of blocks to which a brick contributes, within its part."""
        box = brick.support if self.back is None else self.back.given(brick.support)
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

    def _patches_by_axis(self) -> Iterator[tuple[Ints, Ints]]:
        # Parts form a product grid, so a sum over them is a product of one sum for each axis.
        return (self.patches_along(axis) for axis in range(len(self.patch)))

    def parts_along(self, axis: int) -> tuple[Ints, Ints]:
        """Start and stop of each part along an axis: two arrays of shape (parts,)."""
        low, high = self.written.start[axis], self.written.stop[axis]
        step, anchor = self.part[axis], self.anchor[axis]
        first, stop = self.parts.span(axis)  # a plan asks for it thousands of times
        lines = anchor + step * np.arange(first, stop + 1, dtype=np.int64)
        lines = np.minimum(np.maximum(lines, low), high)
        return lines[:-1], lines[1:]

    def patches_along(self, axis: int) -> tuple[Ints, Ints]:
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


def block_halo(config: InferConfig, geometry: Geometry) -> tuple[int, ...]:
    """Voxels around a block, z y x, that count in its percentiles.

    The halo is never wider than the context that patches read, so it is equal around every block.
    Only percentiles depend on it: a patch always reads its true neighbours, in any block.
    """
    if config.halo is not None:
        halo = per_axis(config.halo, plane=False, thin=0)
    elif config.seam_mode == "blend":
        # The default of the tool that Penstock replaces: its command lines expect such percentiles.
        halo = tuple(max(1, min(8, p // 8)) for p in geometry.patch)
    else:
        halo = geometry.before if config.trim_voxels is None else (config.trim_voxels,) * 3
    return tuple(map(min, halo, geometry.before))
