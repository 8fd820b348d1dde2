"""What a process keeps from one part of a job to the next: its arrays, and the net on each device.

To place a net on a GPU, to compile it and to pin memory takes seconds. A job of one process does so
once, and so does a worker that computes a thousand parts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...base import PenstockError, Pool, plural
from ...data import SAME
from ...models import placed
from ..opening.job import Job
from .transfers import pinned


class Forward:
    """The net on a device. It checks that each forward returns heads like those of the first."""

    def __init__(self, device: torch.device, job: Job) -> None:
        self.device, self.job = device, job
        config, net = job.config, job.net
        self.module = placed(net.model.module, device, net.footprint.channels_last)
        if config.compile:
            dynamic = {"auto": None, "true": True, "false": False}[config.compile_dynamic]
            self.module = torch.compile(self.module, dynamic=dynamic)  # type: ignore[assignment]
        self._dtypes: list[torch.dtype] = []
        """Dtypes of the heads, known after the first forward."""

    def autocast(self) -> torch.autocast:
        """The context that the model runs in. Enter one around all of a lane's work as well: torch
        keeps the weights that it has cast until the outermost context ends."""
        amp = self.job.net.amp
        return torch.autocast(self.device.type, amp, amp is not None)

    def run(self, batch: Tensor) -> list[Tensor]:
        """The model's heads, one for each sink, shape (batch, channels, z, y, x)."""
        model = self.job.net.model
        with self.autocast():
            heads = model.heads(self.module(batch.to(model.dtype)))
        outputs = self._checked(heads, (len(batch), *batch.shape[2:]))
        return outputs if self.job.net.shape.model_axes == 3 else [o.unsqueeze(2) for o in outputs]

    def _checked(self, heads: Mapping[str, Tensor], sides: tuple[int, ...]) -> list[Tensor]:
        """The heads in their order. ``sides`` are (batch, spatial axes of a patch).

        Raises `PenstockError` if a forward returns other heads than the first one did, or heads of
        another shape or dtype. Autocast may turn floats into half precision.
        """
        expected = self.job.net.footprint.heads
        if heads.keys() != {head.name for head in expected}:
            raise PenstockError(
                f"the model returned {plural(len(heads), 'head')}, {', '.join(heads)}, and not "
                f"{len(expected)}, {', '.join(head.name for head in expected)}, as in its first "
                "forward"
            )
        outputs = [heads[head.name] for head in expected]
        dtypes = self._dtypes or [
            output.dtype
            if output.is_floating_point() and head.dtype.is_floating_point
            else head.dtype
            for output, head in zip(outputs, expected, strict=True)
        ]
        for head, output, dtype in zip(expected, outputs, dtypes, strict=True):
            factors = head.factors or SAME[: len(sides) - 1]
            axes = zip(sides[1:], factors, strict=True)
            shape = (sides[0], head.channels, *(int(side * factor) for side, factor in axes))
            if output.shape != shape or output.dtype != dtype:
                raise PenstockError(
                    f"the model returned {tuple(output.shape)} of {output.dtype} as {head.name}, "
                    f"and not {shape} of {dtype} as in its first forward"
                )
        self._dtypes = dtypes
        return outputs


class Equipment:
    """Pools of arrays, and the net on each device."""

    def __init__(self, job: Job) -> None:
        self.job, plan = job, job.plan
        pins = plan.pinned_bricks
        # One pool for each kind of array: in a pool all buffers have one size, that of the largest.
        self.read_pool = Pool(plan.read_buffer_bytes, pinned if pins else None, pins)
        """Arrays of bricks as read."""
        self.brick_pool = Pool(plan.brick_buffer_bytes)
        """Arrays of bricks as computed."""
        self.block_pool = Pool(plan.block_buffer_bytes)
        """Arrays of blocks."""
        self._forwards: dict[torch.device, Forward] = {}

    def forward_on(self, device: torch.device) -> Forward:
        """The net on a device, which is made when it is first needed."""
        if device not in self._forwards:
            self._forwards[device] = Forward(device, self.job)
        return self._forwards[device]
