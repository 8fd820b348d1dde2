"""A training as it is read from a log, a record or a tracker, with its ranks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..base import UsageError, plural
from ..instruments import PHASES

Status = Literal[
    "complete", "crashed", "out_of_memory", "cancelled", "preempted", "timeout", "stopped",
    "unfinished", "unknown",
]  # fmt: skip
"""The end of a run; ``unknown`` if its source does not say."""

_ENDS: tuple[tuple[str, Status], ...] = (
    ("DUE TO PREEMPTION", "preempted"),
    ("DUE TO JOB REQUEUE", "preempted"),  # SLURM requeues these as well
    ("DUE TO NODE FAIL", "preempted"),
    ("DUE TO TIME LIMIT", "timeout"),
    ("oom-kill", "out_of_memory"),
    ("oom_kill", "out_of_memory"),
    ("Out Of Memory", "out_of_memory"),
    (" OUT_OF_ME", "out_of_memory"),
    (" CANCELLED AT ", "cancelled"),
    ("penstock train: stopped by ", "stopped"),
    ("Traceback (most recent call last)", "crashed"),
    ("Segmentation fault", "crashed"),
    ("xited with exit code", "crashed"),
)
"""Signs of a bad end. The first that fits counts, as a cancelled job also prints tracebacks."""
MAY_FOLLOW: tuple[Status, ...] = ("crashed", "stopped", "cancelled")
"""Ends that may follow from another, the weakest first: a job that is stopped also ends with an
error, and SLURM cancels the other tasks of a step when one is out of memory."""

WAIT = "communication"
"""The phase of waiting for the sum over ranks."""

A_GPU = "a GPU"
"""The device of a run that used GPUs but did not name them."""


@dataclass(frozen=True, slots=True)
class Rank:
    """The measurements of one rank of a run, in seconds."""

    rank: int
    totals: Mapping[str, float]
    """Totals of the whole run: ``step`` and its phases."""
    local: tuple[float, ...] = ()
    """The rank's own work in each step: the step without the wait for the sum over ranks."""
    host: str | None = None


_COUNTS = (
    "devices nodes epochs planned_epochs samples batch global_batch steps restarts gradient_bytes"
).split()


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One training. A quantity that is not known is None."""

    source: str
    """The file or folder that it was read from."""
    job: str
    name: str
    devices: int
    nodes: int | None = None
    seconds: float | None = None
    """The total training time of the slowest rank, validation included."""
    epochs: int | None = None
    """The number of epochs done in these seconds."""
    planned_epochs: int | None = None
    epoch_seconds: float | None = None
    samples: int | None = None
    """Samples of an epoch, over all devices."""
    batch: int | None = None
    """Samples of a step on each device."""
    global_batch: int | None = None
    steps: int | None = None
    """Steps of an epoch."""
    val_loss: float | None = None
    val_acc: float | None = None
    diverged: bool = False
    """A loss was not finite, so its scores are not compared."""
    status: Status = "complete"
    restarts: int = 0
    device: str | None = None
    """``cpu``, the name of a GPU, or `A_GPU`; None if the run ended before it named it."""
    rank_seconds: tuple[float, ...] = ()
    """Training time of each rank that printed one."""
    ranks: tuple[Rank, ...] = ()
    utilisation: tuple[float, ...] = ()
    """Readings of GPU-Util, in percent."""
    scores: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    """Validation scores at the ends of epochs, which count from 1, where a log tells them."""
    began: float | None = None
    """Unix time, where a log tells it."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Settings that must be equal among runs that are compared."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """The user's tags of the run."""
    gradient_bytes: int | None = None
    """Bytes of one device's gradients, which are summed over all devices."""

    def __post_init__(self) -> None:
        for name, value in (
            ("training time", self.seconds),
            ("time per epoch", self.epoch_seconds),
        ):
            if value is not None and not (0 < value < math.inf):
                raise UsageError(f"{self.source}: the {name} is {value:g} s; a time is above 0")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise UsageError(f"{self.source}: its {name} is {value!r}, no whole number")
        if self.devices < 1 or (self.nodes or 1) < 1:
            raise UsageError(
                f"{self.source}: {plural(self.devices, 'device')} on {self.nodes} nodes; a run "
                "has at least one of each"
            )

    @property
    def complete(self) -> bool:
        """Whether its time is that of the whole training, so that it can be compared."""
        whole = self.epochs is None or self.epochs == (self.planned_epochs or self.epochs)
        return self.status == "complete" and whole and self.seconds is not None

    @property
    def per_epoch(self) -> float | None:
        """Seconds of an epoch: measured, or the training time over the number of epochs."""
        if self.epoch_seconds is None and self.seconds and self.epochs:
            return self.seconds / self.epochs
        return self.epoch_seconds

    @property
    def work(self) -> int | None:
        """Samples of an epoch, counted or computed from its steps."""
        if self.samples is None and self.steps and self.global_batch:
            return self.steps * self.global_batch
        return self.samples

    @property
    def shape_known(self) -> bool:
        """Whether samples and batches are known, which decide the kind of scaling."""
        return None not in (self.work, self.batch, self.global_batch)

    def scored(self, score: float | None) -> float | None:
        """The score; None if the run diverged, because its scores mean nothing."""
        return None if self.diverged else score

    @property
    def on_cpu(self) -> bool:
        """Whether its devices are processes on the CPU."""
        return self.device == "cpu"

    @property
    def unit(self) -> str:
        """The name of one of its devices: device, process or GPU."""
        if self.device is None:
            return "device"
        return "process" if self.on_cpu else "GPU"


def share(runs: Iterable[TrainingRun], *phases: str) -> float | None:
    """The fraction of all steps of all ranks that these phases took; None if none was measured."""
    measured = [
        rank.totals
        for run in runs
        for rank in run.ranks
        if any(phase in rank.totals for phase in phases)
    ]
    whole = sum(total.get(phase, 0.0) for total in measured for phase in PHASES)
    took = sum(total.get(phase, 0.0) for total in measured for phase in phases)
    return took / whole if whole > 0 else None


def phases_of(runs: Sequence[TrainingRun]) -> dict[str, float]:
    """Seconds of an epoch by phase, mean over ranks and runs; empty if none was measured."""
    epochs = [
        {name: total / run.epochs for name, total in rank.totals.items()}
        for run in runs
        for rank in run.ranks
        if run.epochs and rank.totals
    ]
    names = dict.fromkeys(name for epoch in epochs for name in epoch)
    return {name: sum(e.get(name, 0.0) for e in epochs) / len(epochs) for name in names}


COMPARED = {
    "epochs": "number of epochs",
    "max_epochs": "number of epochs",
    "max_steps": "number of steps",
    "workload": "workload",
    "model": "model",
    "backbone": "backbone",
    "model_parameters": "parameters",
    "parameters": "parameters",
    "hidden_dims": "hidden layers",
    "hidden_dimensions": "hidden layers",
    "dropout": "dropout",
    "noise": "noise",
    "noise_level": "noise",
    "learning_rate": "learning rate",
    "lr": "learning rate",
    "optimizer": "optimizer",
    "weight_decay": "weight decay",
    "schedule": "schedule",
    "warmup_steps": "steps of warm-up",
    "clip_norm": "clipping of gradients",
    "precision": "precision",
    "amp": "mixed precision",
    "dtype": "dtype",
    "tf32": "use of TF32",
    "channels_last": "channels last",
    "compile": "compilation",
    "checkpointing": "recomputing",
    "num_workers": "number of workers",
    "number_of_workers": "number of workers",
}
"""Settings by their names in logs, knobs and trackers, each with its name in a sentence. Batches
and devices are not among them, because a study varies them."""


def settings_of(values: Mapping[str, object]) -> dict[str, str]:
    """The settings among these names and values, under one name each; the first spelling counts.

    >>> settings_of({"Max epochs": "50", "epochs": 40, "seed": 3, "dropout": None})
    {'number of epochs': '50'}
    """
    settings: dict[str, str] = {}
    for key, value in values.items():
        name = COMPARED.get(key.lower().replace(" ", "_"))
        if name is not None and value not in (None, ""):
            settings.setdefault(name, plain(value))
    return settings


def plain(value: object) -> str:
    """A setting as text in one spelling, exact to the last digit.

    >>> plain("1e-3"), plain(0.001), plain("2834.0"), plain("[64, 32]")
    ('0.001', '0.001', '2834', '[64, 32]')
    """
    text = str(value)
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            number = kind(text)
            return str(int(number)) if number == number // 1 else repr(number)
    return text


def end_in(line: str) -> Status | None:
    """The bad end that a line reports; None if it reports none."""
    return next((status for sign, status in _ENDS if sign in line), None)


def is_cause(end: Status, before: Status | None) -> bool:
    """Whether an end that a job reports counts, and not the one that it reported before."""
    return before is None or before in MAY_FOLLOW[: ([*MAY_FOLLOW, end]).index(end)]
