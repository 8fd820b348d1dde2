"""Puts patches of a batch back into their blocks: denormalised, then trimmed or blended.

The kind of a head decides what is done: labels are copied as integers, other values are brought
back to the range of the input where that is asked for. A trimmed patch gives the voxels that it
owns. A blended patch adds all that it sees, each voxel by its weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data import Scaling
from .blocks import Slot
from .job import Job
from .stitch import axis_weights
from .values import count_clipped, note_labels, note_range, to_range_


class PatchScatter:
    """Puts the output of a net for one patch into the block of that patch."""

    def __init__(self, device: torch.device, job: Job) -> None:
        self._device, self._heads, self._geometry = device, job.heads, job.geometry
        self._floor = job.config.min_blend_weight
        # The part of a patch's output that counts, and buffers that are small enough for the cache.
        before, stride = job.geometry.before, job.geometry.stride
        self._core = (slice(None), *slices_of(before, stride))
        self._values = [
            torch.empty(
                (head.channels, *(job.geometry.patch if head.blended else stride)),
                dtype=torch_dtype(head.work),
                device=device,
            )
            for head in job.heads
        ]

    def put(self, head: int, output_CZYX: Tensor, slot: Slot) -> None:
        """Put one head of a patch into its block."""
        plan, owner = self._heads[head], slot.owner
        target, tally = owner.outputs[head], owner.tally[head]
        if plan.kind == "labels":
            target, labels = _meeting(target, output_CZYX[self._core], slot.place)
            target.copy_(note_labels(labels, target.dtype, tally))
            return
        values, scaling = self._values[head], owner.loaded.scaling
        values.copy_(output_CZYX if plan.blended else output_CZYX[self._core])
        if plan.denormalized and scaling != Scaling():
            values.mul_(scaling.scale).add_(scaling.lower)
        span = note_range(values, tally)
        if plan.blended:
            self._add(target, values, slot)
            return
        target, values = _meeting(target, values, slot.place)
        count_clipped(values, span, plan.dtype, tally)
        target.copy_(to_range_(values, plan.dtype))

    def _add(self, target: Tensor, values: Tensor, slot: Slot) -> None:
        """Add a patch to the sums of its block, each voxel by its weight."""
        for axis, weights in enumerate(self._weights(slot.index, values.dtype)):
            values.mul_(weights.view([-1 if a == axis else 1 for a in range(3)]))
        # At the volume's lower edges a patch sees more than it contributes to.
        block = slot.owner.block
        outside = zip(slot.place, block.read.start, block.support.start, strict=True)
        begin = tuple(place + read - support for place, read, support in outside)
        target, values = _meeting(target, values, begin)
        target.add_(values)

    def _weights(self, index: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        geometry = self._geometry
        shape = zip(
            geometry.patch, geometry.overlap, index, geometry.cores.cells.shape, strict=True
        )
        return [_weights_on(self._device, dtype, p, o, self._floor, i, n) for p, o, i, n in shape]


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype


def slices_of(start: Sequence[int], shape: Sequence[int]) -> Iterator[slice]:
    """Slices of ``shape`` voxels from ``start``, without those before voxel 0."""
    return (slice(max(a, 0), a + n) for a, n in zip(start, shape, strict=True))


def _meeting(target: Tensor, values: Tensor, begin: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The parts of a block and of a patch's values that are the same voxels.

    The values begin at ``begin`` in the block, which may lie before its first voxel. At the upper
    edges both parts end with the block.
    """
    target = target[(slice(None), *slices_of(begin, values.shape[1:]))]
    first = [max(-b, 0) for b in begin]
    return target, values[(slice(None), *slices_of(first, target.shape[1:]))]


@lru_cache(maxsize=1024)
def _weights_on(
    device: torch.device,
    dtype: torch.dtype,
    patch: int,
    overlap: int,
    floor: float,
    index: int,
    count: int,
) -> Tensor:
    """`axis_weights` on a device, copied there once and not for each patch and head."""
    weights = torch.from_numpy(axis_weights(patch, overlap, floor, index, count))
    return weights.to(dtype).to(device)
