"""A training as its log, its record or a tracker tells it, and what its ranks measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..base import UsageError

Status = Literal[
    "complete", "crashed", "cancelled", "preempted", "timeout", "stopped", "unfinished", "unknown"
]
"""``unknown``: nothing tells how far it came."""

A_GPU = "a GPU"
"""The device of a run that told of GPUs without their name."""


@dataclass(frozen=True, slots=True)
class Rank:
    """What one rank of a run measured, in seconds."""

    rank: int
    totals: Mapping[str, float]
    """Of the whole run: ``step`` and its phases."""
    local: tuple[float, ...] = ()
    """Work of its own, step by step: all but the wait for the sum over ranks."""
    waits: tuple[float, ...] = ()
    """Wait for that sum, step by step."""
    host: str | None = None


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One training as its log or its record tells it. What is not known is None."""

    source: str
    job: str
    name: str
    devices: int
    nodes: int | None = None
    seconds: float | None = None
    """Of training in all, validation included; of the slowest rank."""
    epochs: int | None = None
    """Done in these seconds."""
    planned_epochs: int | None = None
    epoch_seconds: float | None = None
    samples: int | None = None
    """Of an epoch, over all devices."""
    batch: int | None = None
    """On each device."""
    global_batch: int | None = None
    steps: int | None = None
    """Of an epoch."""
    val_loss: float | None = None
    val_acc: float | None = None
    diverged: bool = False
    """A loss that it told was not finite; its scores are compared with nothing."""
    status: Status = "complete"
    restarts: int = 0
    device: str | None = None
    """``cpu``, the name of a GPU, or `A_GPU`; None before the run told of its device."""
    rank_seconds: tuple[float, ...] = ()
    """`seconds` as each rank that printed gave them."""
    ranks: tuple[Rank, ...] = ()
    utilisation: tuple[float, ...] = ()
    """Readings of GPU-Util, in percent."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What must be equal among runs that are compared."""
    gradient_bytes: int | None = None
    """Of one device, which are summed over all."""

    def __post_init__(self) -> None:
        for name, value in (
            ("training time", self.seconds),
            ("time per epoch", self.epoch_seconds),
        ):
            if value is not None and not (0 < value < math.inf):
                raise UsageError(f"{self.source}: the {name} is {value:g} s; a time is above 0")
        if self.devices < 1 or (self.nodes or 1) < 1:
            raise UsageError(f"{self.source}: {self.devices} devices on {self.nodes} nodes")

    @property
    def complete(self) -> bool:
        """Whether its time is that of the whole training, so that it may be compared."""
        whole = self.epochs is None or self.epochs == (self.planned_epochs or self.epochs)
        return self.status == "complete" and whole and self.seconds is not None

    @property
    def per_epoch(self) -> float | None:
        """Seconds, as it was told or divided."""
        if self.epoch_seconds is None and self.seconds and self.epochs:
            return self.seconds / self.epochs
        return self.epoch_seconds

    @property
    def work(self) -> int | None:
        """Samples of an epoch, counted or from its steps."""
        if self.samples is None and self.steps and self.global_batch:
            return self.steps * self.global_batch
        return self.samples

    @property
    def shape_known(self) -> bool:
        """Whether samples and batches are told, which tell the kinds of scaling apart."""
        return None not in (self.work, self.batch, self.global_batch)

    def scored(self, score: float | None) -> float | None:
        """A score, as far as it tells how well the run trained."""
        return None if self.diverged else score

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def unit(self) -> str:
        """What one of its devices is called."""
        if self.device is None:
            return "device"
        return "process" if self.on_cpu else "GPU"
