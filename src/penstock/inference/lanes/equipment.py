"""What a process keeps from one part of a job to the next: its arrays, and the net on each device.

To place a net on a GPU, to compile it and to pin memory takes seconds. A job of one process does so
once, and so does a worker that computes a thousand parts.
"""

from __future__ import annotations

import torch

from ...base import Pool
from ..opening.job import Job
from .forward import Forward
from .transfers import pinned


class Equipment:
    """Pools of arrays, and the net on each device."""

    def __init__(self, job: Job) -> None:
        self._job, plan = job, job.plan
        pins = plan.pinned_bricks
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
            self._forwards[device] = Forward(device, self._job)
        return self._forwards[device]
