"""A block under way: as it was read, and as it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..base import PenstockError
from ..data import Scaling
from .geometry import Block
from .job import Job
from .values import CLIPPED, check_labels


@dataclass(slots=True)
class Loaded:
    """A block as read: reflected at the volume's edges, in the dtype of the store."""

    block: Block
    array: NDArray[Any] | None
    """Shape (channels, z, y, x) of ``block.read``; None once the lane has taken it in."""
    scaling: Scaling
    invalid: NDArray[np.bool_] | None = None
    """Voxels of ``block.support`` that were not finite, None where all were."""
    native: Tensor | None = None
    """The array on the device, once its upload has begun; None once the lane has taken it in."""
    arrived: torch.cuda.Event | None = None
    """The end of the upload, where it is not over when it is begun."""


@dataclass(slots=True)
class Computed:
    """A block on its way through a lane: whole once no patch of it remains."""

    loaded: Loaded
    outputs: list[Tensor]
    """One for each head, shape (channels, z, y, x) of ``block.support`` or, where it is not
    blended, of ``block.core``; on the host once the lane gives the block out."""
    buffers: list[NDArray[Any]]
    """What the outputs lie in, for the pool; empty where they do not come from it."""
    tally: Tensor
    """Shape (heads, 4): see `values`."""
    job: Job
    remaining: int
    """Patches that are still to come back."""
    ready: torch.cuda.Event | None = None
    """The end of the download, where it is not over when it is begun."""

    @property
    def block(self) -> Block:
        return self.loaded.block

    def wait(self) -> None:
        """Wait for the end of the download.

        Raises `PenstockError` if the model made a value that is not finite out of finite ones, in
        an integer it would hide, or a label that the output cannot hold.
        """
        if self.ready is not None:
            self.ready.synchronize()
        for head, (low, high, _, spoilt) in zip(self.job.heads, self.tally.tolist(), strict=True):
            if head.kind == "labels":
                check_labels(head, low, high, spoilt)
            elif spoilt:
                message = "the model made values that are not finite out of finite ones"
                if self.job.net.amp is not None:
                    half = str(self.job.net.amp).removeprefix("torch.")
                    message += f" in {half}; give --no-amp, or --clip-norm for what it is shown"
                raise PenstockError(message)

    @property
    def clipped(self) -> list[int]:
        """Values of each head that were clipped to the range of its output, once waited for."""
        return [int(count) for count in self.tally[:, CLIPPED]]

    def arrays(self) -> list[NDArray[Any]]:
        """The outputs, once waited for.

        A voxel whose input was not finite becomes NaN, or 0 where the output holds integers.
        """
        arrays = [output.numpy() for output in self.outputs]
        invalid = self.loaded.invalid
        if invalid is not None:
            core = self.block.core.within(self.block.support)
            for array, head in zip(arrays, self.job.heads, strict=True):
                where = invalid if head.blended else invalid[core]
                array[:, where] = np.nan if head.dtype.kind == "f" else 0
        return arrays


@dataclass(slots=True)
class Slot:
    """A patch of the batch under way."""

    owner: Computed
    index: tuple[int, ...]
    """The patch in the patch grid."""
    place: tuple[int, ...]
    """Where it begins in what its block reads, and what it owns in what its block owns."""
