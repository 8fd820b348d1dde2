"""A brick on its way through a job: as read, and as computed, with the patches put into it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...base import PenstockError
from ...data import ScaledGrid, Scaling
from ...models import Sliding
from ..opening.heads import HeadPlan
from ..opening.job import Job
from ..tiling.geometry import Brick
from ..tiling.stitch import shares, window
from .values import (
    CLIPPED,
    check_labels,
    copy_rounded,
    denormalised,
    note_labels,
    note_range,
    to_range,
)


@dataclass(slots=True)
class Loaded:
    """A brick as read: reflected at the volume's edges, in the dtype of the store."""

    brick: Brick
    array: NDArray[Any] | None
    """Shape (channels, z, y, x), the voxels of ``brick.read``; None once the lane has taken it, and
    if no patch is to be computed."""
    scalings: tuple[Scaling, ...] = (Scaling(),)
    """One for all channels, or one for each."""
    inside: NDArray[np.bool_] | None = None
    """True for each voxel of ``brick.support`` in the box and mask of the user; None without."""
    absent: NDArray[np.bool_] | None = None
    """True for each voxel of ``brick.support`` that gets the fill value of the output; None if none
    does."""
    invalid: NDArray[np.bool_] | None = None
    """True for each voxel of ``brick.support`` that was not finite, with an axis of channels as
    long as `spoilt_masks`; None if all were finite."""
    beyond: bool = False
    """True if finite values are larger than those of float32."""
    native: Tensor | None = None
    """The array on the device, once its upload has begun; None once the lane has taken it."""
    arrived: torch.cuda.Event | None = None
    """The end of the upload on a GPU; None on the CPU."""

    def wait(self) -> None:
        """Wait for the end of the upload: until then the GPU reads the array."""
        if self.arrived is not None:
            self.arrived.synchronize()


@dataclass(slots=True)
class Computed:
    """A brick in a lane. It is complete once all its patches are computed."""

    loaded: Loaded
    outputs: list[Tensor]
    """One tensor for each head, shape (channels, z, y, x). A blended head holds ``brick.support``,
    any other ``brick.core``. The tensors are on the host once the lane gives the brick out."""
    buffers: list[NDArray[Any]]
    """The arrays of the pool that the outputs lie in; empty on a GPU."""
    tally: Tensor
    """Shape (heads, 4), int64; see `values`."""
    job: Job
    remaining: int
    """Number of patches that are still to be computed."""
    ready: torch.cuda.Event | None = None
    """The end of the download from a GPU; None on the CPU."""

    @property
    def brick(self) -> Brick:
        return self.loaded.brick

    def wait(self) -> None:
        """Wait for the end of the download, and check the values.

        Raises `PenstockError` if the model made a NaN or infinite value from finite ones (an output
        of integers would hide it), or a label that the output cannot hold.
        """
        if self.ready is not None:
            self.ready.synchronize()
        if not self.outputs:
            return
        for head, (low, high, _, spoilt) in zip(self.job.heads, self.tally.tolist(), strict=True):
            if head.kind == "labels":
                check_labels(head, low, high, spoilt)
            elif spoilt:
                message = "the model made NaN or infinite values from finite ones"
                if self.loaded.beyond:
                    message = (
                        "the input has values beyond 3.4e38, the largest of float32, in which the "
                        "model computes; --normalize fixed takes a range of yours"
                    )
                if self.job.net.amp is not None:
                    half = str(self.job.net.amp).removeprefix("torch.")
                    message += f" in {half}; give --no-amp, or --clip-norm to limit its input"
                raise PenstockError(message)

    @property
    def clipped(self) -> list[int]:
        """Number of values of each head that were clipped to its output's range. `wait` first."""
        return [int(count) for count in self.tally[:, CLIPPED]]

    @property
    def not_finite(self) -> int:
        """Number of voxels of the brick's core whose input was not finite, in any channel."""
        invalid = self.loaded.invalid
        if invalid is None:
            return 0
        owned = self.job.geometry.owned(self.brick)
        return int(np.count_nonzero(invalid[:, *owned.within(self.brick.support)].any(axis=0)))

    def arrays(self) -> list[NDArray[Any] | None]:
        """The outputs as arrays, and last, if only some voxels are sample, those that get the fill
        value. None stands for what adds nothing. Call `wait` first.

        A voxel whose input was not finite becomes NaN, or 0 in an output of integers.
        """
        left_out = [] if self.job.sample is None else [self._absent()]
        if not self.outputs:
            return [*(None for _ in self.job.heads), *left_out]
        arrays = self.buffers or [output.numpy() for output in self.outputs]
        invalid = self.loaded.invalid
        if invalid is not None:
            for array, head in zip(arrays, self.job.heads, strict=True):
                held = self.brick.support if head.blended else self.brick.core
                where = head.grid.mask(invalid[:, *held.within(self.brick.support)], held)
                np.copyto(array, np.nan if head.dtype.kind == "f" else 0, where=where)
        return [*arrays, *left_out]

    def _absent(self) -> NDArray[np.bool_] | None:
        """`Loaded.absent` with an axis of channels."""
        if self.outputs:
            return None if self.loaded.absent is None else self.loaded.absent[None]
        return np.broadcast_to(np.bool_(True), (1, *self.brick.support.shape))


@dataclass(slots=True)
class Slot:
    """A patch in the batch that is being filled."""

    owner: Computed
    index: tuple[int, ...]
    """The index of the patch in the patch grid."""
    place: tuple[int, ...]
    """Offset of the patch in the brick's read box, and of its own voxels in the brick's core."""
    row: int = 0
    """The row of the batch that it is in."""


class PatchScatter:
    """Puts the output of a net for some patches into the bricks of these patches: denormalised,
    then trimmed or blended.

    The kind of a head decides what is done. Labels are copied as integers. Other values are scaled
    back to the range of the input if that is asked for. A trimmed patch gives the voxels that it
    owns. A blended patch adds all its voxels, each times its weight.
    """

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
        # The part of a patch's output that counts, and a buffer for it.
        before, stride = job.geometry.before, job.geometry.stride
        self._cores = [
            (slice(None), slice(None), *slices_of(head.grid.sides(before), head.grid.sides(stride)))
            for head in job.heads
        ]
        rows = job.net.batch if together else 1
        self._buffers = [
            torch.empty(
                rows
                * head.channels
                * math.prod(head.grid.sides(job.geometry.patch if head.blended else stride)),
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
            for part, values in zip(parts, note_labels(labels, target.dtype, tally), strict=True):
                part.copy_(values)
            return
        parts, output = [], output_BCZYX
        if not plan.blended:
            parts, output = _meeting(target, output_BCZYX[core], places)
        # The net's output stays as it is, as a net may give a view of what it keeps. What changes
        # values puts them into the buffer, in which each step after it works in place.
        buffer = self._buffers[head][: output.numel()].view(output.shape)
        alike = output.dtype == buffer.dtype and output.is_contiguous()
        values = output if alike else buffer.copy_(output)
        if plan.denormalized:
            values = denormalised(values, owner.loaded.scalings, buffer)
        # What is finished later gets its gain then.
        if plan.gain != 1 and not plan.finished:
            values = torch.mul(values, plan.gain, out=buffer)
        # Before values are blended, clipped or rounded, which would hide one that is not finite.
        span = note_range(values, tally)
        if plan.blended:
            self._add(plan.grid, target, values, buffer, slots)
            return
        if not plan.summed:
            values = to_range(values, span, plan.dtype, tally, buffer)
        for row, part in enumerate(parts):
            copy_rounded(values[row], part)

    def _add(
        self,
        grid: ScaledGrid,
        target: Tensor,
        values: Tensor,
        buffer: Tensor,
        slots: Sequence[Slot],
    ) -> None:
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
            values = torch.mul(values, weights.view(*weights.shape, *[1] * last), out=buffer)
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
