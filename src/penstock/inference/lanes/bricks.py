"""A brick on its way through a job: as read, and as computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...base import PenstockError
from ...data import Scaling
from ..opening.job import Job
from ..tiling.geometry import Brick
from .values import CLIPPED, check_labels


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
        arrays = [output.numpy() for output in self.outputs]
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
