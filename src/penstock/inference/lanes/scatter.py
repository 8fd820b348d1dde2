"""Puts patches of a batch back into their bricks: denormalised, then trimmed or blended.

The kind of a head decides what is done. Labels are copied as integers. Other values are scaled back
to the range of the input if that is asked for. A trimmed patch gives the voxels that it owns. A
blended patch adds all its voxels, each times its weight.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache, partial, reduce
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data import ScaledGrid
from ...models import Sliding
from ..opening.heads import HeadPlan
from ..opening.job import Job
from ..tiling.stitch import shares, window
from .bricks import Slot
from .values import count_clipped, denormalise_, note_labels, note_range, to_range_


class PatchScatter:
    """Puts the output of a net for some patches into the bricks of these patches."""

    def __init__(self, device: torch.device, job: Job, *, together: bool) -> None:
        """With ``together``, patches that are alike are treated at once. A GPU would idle while
        kernels are started for each patch; a CPU keeps the values of one patch in its cache."""
        self._heads, self._geometry, self._together = job.heads, job.geometry, together
        # Not a cache of the module, as the weights on a device must be freed with the lane.
        # Weights that are no product of axes are as large as a patch, so few are kept.
        self._whole = job.sliding.floor > 0
        made = partial(_weights_on, device, job.sliding, job.config.min_blend_weight)
        # Whole, weights take as much memory as a patch; those of an axis are short rows.
        self._weights_on = lru_cache(maxsize=4 if self._whole else 1024)(made)
        # The part of a patch's output that counts, and buffers for it.
        before, stride = job.geometry.before, job.geometry.stride
        self._cores = [
            (slice(None), slice(None), *slices_of(head.grid.sides(before), head.grid.sides(stride)))
            for head in job.heads
        ]
        rows = job.net.batch if together else 1
        self._values = [
            torch.empty(
                (
                    rows,
                    head.channels,
                    *head.grid.sides(job.geometry.patch if head.blended else stride),
                ),
                dtype=torch_dtype(head.work),
                device=device,
            )
            for head in job.heads
        ]

    def put(self, head: int, output_BCZYX: Tensor, slots: Sequence[Slot]) -> None:
        """Put one head of some patches into their bricks."""
        row = 0
        for _, group in groupby(slots, partial(self._alike, self._heads[head])):
            alike = list(group)
            self._put(head, output_BCZYX[row : row + len(alike)], alike)
            row += len(alike)

    def _alike(self, plan: HeadPlan, slot: Slot) -> Hashable:
        """A key that is equal for patches that can be treated at once: they lie in one brick, and
        have the same weights, or own boxes of the same shape."""
        if not self._together:
            return id(slot)
        if plan.blended:
            return id(slot.owner), *self._neighbours(slot)
        sides = zip(self._geometry.stride, slot.owner.brick.core.shape, slot.place, strict=True)
        return id(slot.owner), *(min(stride, side - place) for stride, side, place in sides)

    def _put(self, head: int, output_BCZYX: Tensor, slots: Sequence[Slot]) -> None:
        """Put one head of patches that are alike into their brick."""
        plan, owner = self._heads[head], slots[0].owner
        target, tally = owner.outputs[head], owner.tally[head]
        places = [plan.grid.sides(slot.place) for slot in slots]
        core = self._cores[head]
        if plan.copied:
            parts, labels = _meeting(target, output_BCZYX[core], places)
            _copy(parts, note_labels(labels, target.dtype, tally))
            return
        values = self._values[head]
        if len(slots) < len(values):
            values = values[: len(slots)]
        values.copy_(output_BCZYX if plan.blended else output_BCZYX[core])
        if plan.denormalized:
            denormalise_(values, owner.loaded.scalings)
        # What is finished later gets its gain then.
        if plan.gain != 1 and not plan.finished:
            values.mul_(plan.gain)
        # Before values are blended, clipped or rounded, which would hide one that is not finite.
        span = note_range(values, tally)
        if plan.blended:
            self._add(plan.grid, target, values, slots)
            return
        parts, values = _meeting(target, values, places)
        if plan.summed:
            _copy(parts, values)
            return
        count_clipped(values, span, plan.dtype, tally)
        _copy(parts, to_range_(values, plan.dtype))

    def _add(self, grid: ScaledGrid, target: Tensor, values: Tensor, slots: Sequence[Slot]) -> None:
        """Add patches to the sums of their brick, each voxel times its weight."""
        near, geometry = self._neighbours(slots[0]), self._geometry
        each = grid.sides(geometry.patch), grid.sides(geometry.overlap), near, grid.factors
        axes = [
            (axis, patch, overlap, tuple(int(by * factor) for by in shifts))
            for axis, (patch, overlap, shifts, factor) in enumerate(zip(*each, strict=True))
        ]
        # A window with a floor is no product of axes. Any other is multiplied axis by axis, which
        # takes three short rows in place of an array like the patch.
        for some in [tuple(axes)] if self._whole else [(axis,) for axis in axes]:
            weights = self._weights_on(values.dtype, some)
            last = len(axes) - 1 - some[-1][0]
            values.mul_(weights.view(*weights.shape, *[1] * last))
        for row, slot in enumerate(slots):
            # At the volume's lower edges a patch sees more than it contributes to.
            brick = slot.owner.brick
            outside = zip(slot.place, brick.read.start, brick.support.start, strict=True)
            begin = grid.sides([place + read - support for place, read, support in outside])
            (part,), of_patch = _meeting(target, values[row : row + 1], [begin])
            part.add_(of_patch[0])

    def _neighbours(self, slot: Slot) -> list[tuple[int, ...]]:
        """For each axis the places of the patches that decide the weights of a patch."""
        return [self._geometry.row(axis).neighbours(i) for axis, i in enumerate(slot.index)]


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def slices_of(start: Sequence[int], shape: Sequence[int]) -> Iterator[slice]:
    """Slices of ``shape`` voxels from ``start``, without those before voxel 0."""
    return (slice(max(a, 0), a + n) for a, n in zip(start, shape, strict=True))


def _meeting(
    target: Tensor, values_BCZYX: Tensor, begins: Sequence[Sequence[int]]
) -> tuple[list[Tensor], Tensor]:
    """The voxels that patches and their brick share: a part of the brick for each patch, and the
    part of the patches' values.

    The values of a patch begin at its ``begins`` in the brick, which may lie before the brick's
    first voxel. At the upper edges both parts end with the brick. All patches must overlap the
    brick in the same way.
    """
    shape = values_BCZYX.shape[2:]
    parts = [target[(slice(None), *slices_of(begin, shape))] for begin in begins]
    first = [max(-b, 0) for b in begins[0]]
    inside = slices_of(first, parts[0].shape[1:])
    return parts, values_BCZYX[(slice(None), slice(None), *inside)]


def _copy(parts: Sequence[Tensor], values_BCZYX: Tensor) -> None:
    for row, part in enumerate(parts):
        part.copy_(values_BCZYX[row])


def _weights_on(
    device: torch.device,
    sliding: Sliding,
    floor: float,
    dtype: torch.dtype,
    axes: tuple[tuple[int, int, int, tuple[int, ...]], ...],
) -> Tensor:
    """The weights of a patch on a device, on some axes. Each is its number, the patch, the overlap
    and the neighbours."""
    windows = [window(sliding, *each[:3], floor) for each in axes]
    raw = reduce(np.multiply.outer, windows)
    if sliding.floor:
        # MONAI, which has such a floor, takes it in float32.
        raw = np.maximum(raw, sliding.floor, dtype=np.float32)
    weights = torch.from_numpy(shares(raw, [each[3] for each in axes]))
    return weights.to(dtype).to(device)
