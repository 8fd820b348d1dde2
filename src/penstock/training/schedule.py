"""The number of steps of a run, and the learning rate at each."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..base import TrainConfig

DECAY_EPOCHS = 3
"""The epochs between the falls of --schedule step, as in torchvision's recipe of detectors."""


@dataclass(frozen=True)
class Schedule:
    """The number of steps of a run, and the learning rate of each."""

    config: TrainConfig
    steps_per_epoch: int
    num_steps: int
    """The number of steps of the whole run."""

    @classmethod
    def of(cls, config: TrainConfig, num_batches: int) -> Schedule:
        """The schedule of a run in which an epoch has ``num_batches`` batches on each rank."""
        steps_per_epoch = -(-num_batches // config.grad_accum_steps)
        num_steps = config.epochs * steps_per_epoch
        return cls(config, steps_per_epoch, min(num_steps, config.max_steps or num_steps))

    def rate(self, step: int) -> float:
        """The learning rate at a step, as a fraction of --learning-rate."""
        config = self.config
        rise = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        if config.schedule == "cosine":
            return rise * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.num_steps)))
        if config.schedule == "step":
            return rise * float(0.1 ** (step // (self.steps_per_epoch * DECAY_EPOCHS)))
        return rise
