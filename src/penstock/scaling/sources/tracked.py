"""Runs as experiment trackers keep them: MLflow in its stores, Comet in exports.

    metrics     by name, each a series of (step, value, time)
    parameters  by name, as text

Trainings name the same things differently; `NAMES_OF_TRACKERS` holds the spellings. The environment
of a run overrides its parameters: it names the device that was used, the parameters the one that
was requested.

If no metric has the training time, it is the time from the run's start to its end. Comet exports
neither, so the times of its first and last metric are taken. If the first metric came at the end of
the first epoch, that epoch is not in the time and is not counted.

Comet does not say how a run ended: it is complete if all its epochs were counted. A run without a
number of devices is left out, and ``say`` is called with a sentence on it.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ...base import as_usage_error, parse_seconds, plural
from ..runs import Status, TrainingRun, settings_of

Say = Callable[[str], None]
Series = list[tuple[int, float, float]]
"""Points of (step, value, time in seconds since 1970)."""

NAMES_OF_TRACKERS: Mapping[str, tuple[str, ...]] = {
    "devices": ("world_size", "num_gpus", "gpus", "n_gpus", "num_devices", "ntasks"),
    "nodes": ("launch.nodes", "nodes", "num_nodes", "nnodes"),
    "batch": ("batch_size", "per_gpu_batch_size"),
    "global_batch": ("global_batch_size", "effective_batch_size"),
    "epochs": ("epochs", "max_epochs"),
    "done": ("epochs_done", "curr_epoch"),
    "val_loss": ("val_loss",),
    "val_acc": ("val_acc",),
    "samples": ("samples", "samples_per_epoch", "num_samples"),
    "job": ("launch.job_id", "slurm_job_id", "job_id"),
    "seconds": ("training_time", "total_training_time", "train_time"),
}
WHOLE = "time_of_the_whole_run"
"""The parameter of a run of a table that names the column of a time that is not of training."""


@dataclass(frozen=True)
class TrackedRun:
    """A run as its tracker keeps it."""

    path: Path
    key: str
    """The tracker's identifier of the run."""
    name: str
    parameters: Mapping[str, str]
    metrics: Mapping[str, Series]
    status: Status | None = None
    """None if the tracker does not say how the run ended."""
    began: float | None = None
    """Time in seconds since 1970."""
    ended: float | None = None
    first_epoch_missing: bool = False
    """True if the first epoch was over at ``began``."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """The parameters that the tracker keeps as tags."""

    @cached_property
    def texts(self) -> dict[str, str]:
        """Parameters by the last part of their name; Comet adds prefixes such as "train/"."""
        return {
            key.lower().rpartition("/")[2].replace(" ", "_"): value
            for key, value in self.parameters.items()
        }

    @cached_property
    def series(self) -> dict[str, Series]:
        """Metrics by the last part of their name."""
        return {key.lower().rpartition("/")[2]: points for key, points in self.metrics.items()}

    def all_values(self, metric: str) -> list[float]:
        """The values of a metric by step, the last one if a step has several."""
        points = [(step, value) for step, value, _ in self.series.get(metric, ())]
        # A resumed run may log a step again. If steps were not logged, all are 0.
        by_step = dict(points)
        return list(by_step.values()) if len(by_step) > 1 else [value for _, value in points]

    def values(self, metric: str) -> list[float]:
        """The finite values of a metric by step."""
        return [value for value in self.all_values(metric) if math.isfinite(value)]

    def number(self, what: str) -> float | None:
        """The parameter of this kind (a key of `NAMES_OF_TRACKERS`), or the last value of such a
        metric; None if there is neither."""
        for key in NAMES_OF_TRACKERS[what]:
            with contextlib.suppress(KeyError, ValueError):
                return float(self.texts[key])
            if values := self.values(key):
                return values[-1]
        return None

    def whole(self, what: str) -> int | None:
        """`number` as an integer; None if it is not above 0."""
        value = self.number(what)
        return int(value) if value is not None and 0 < value < 1e15 else None

    def scores(self, what: str) -> list[float]:
        """The finite values of a metric of this kind, or the parameter of this kind as one."""
        single = self.number(what)
        return self.values(what) or [v for v in (single,) if v is not None and math.isfinite(v)]

    @property
    def training_seconds(self) -> float | None:
        """The training time that the run measured itself, as a total or summed over epochs."""
        if training := self.values("training_s"):
            return training[-1] + sum(self.values("validation_s")[-1:])
        for key in NAMES_OF_TRACKERS["seconds"]:
            if (text := self.texts.get(key)) is not None:
                with as_usage_error(f"{self.path} {self.key}: {key}", ValueError):
                    return parse_seconds(text)
        if (seconds := self.number("seconds")) is not None:
            return seconds
        by_epoch = self.values("train_s")
        return sum(by_epoch) + sum(self.values("val_s")) if by_epoch else None

    @property
    def diverged(self) -> bool:
        """Whether a value of any loss is not finite."""
        losses = (points for key, points in self.series.items() if key.endswith("loss"))
        return any(not math.isfinite(value) for points in losses for _, value, _ in points)

    def status_after(self, done: int | None, planned: int | None) -> Status:
        """How the run ended: as the tracker says, else by its epochs done and planned."""
        if self.status is not None:
            return self.status
        # Our own trainings log the time of a session only when a run ends.
        if self.values("session_s") or (done is not None and done == planned):
            return "complete"
        return "unfinished" if done and planned else "unknown"


def training_runs(tracked: Iterable[TrackedRun], path: Path, say: Say) -> Iterator[TrainingRun]:
    """The runs with a known number of devices.

    Args:
        tracked: The runs as their tracker keeps them.
        path: The file or folder that they are from.
        say: Called with a sentence on runs that are left out.

    Yields:
        The runs as trainings.
    """
    left: list[str] = []
    whole = ""
    for run in tracked:
        devices = run.whole("devices")
        if devices is None:
            left.append(run.name)
            continue
        whole = run.texts.get(WHOLE, whole)
        yield _training_run(run, devices)
    if whole:
        say(
            f"{path}: its times ({whole}) are of whole runs, which take longer than their trainings"
        )
    if left:
        say(
            f"{path}: {plural(len(left), 'run')} without a number of devices, left out: "
            f"{first_three(left)}"
        )


def first_three(names: Sequence[str]) -> str:
    """The names as a part of a sentence, of many the first three.

    >>> first_three(["a", "b"]), first_three(["a", "b", "c", "d"])
    ('a, b', 'a, b, c and 1 more')
    """
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)


def _training_run(run: TrackedRun, devices: int) -> TrainingRun:
    planned = None if run.texts.get("max_steps") else run.whole("epochs")
    done = (
        len(run.values("train_s")) or run.whole("done") or len(run.all_values("val_loss")) or None
    )
    if planned and done and done > planned:
        done = None  # these were not scores of epochs
    status = run.status_after(done, planned)
    epochs = done or (planned if status == "complete" else None)
    seconds = run.training_seconds
    if seconds is None and run.began is not None and run.ended is not None:
        seconds = run.ended - run.began
        if epochs is not None and run.first_epoch_missing:
            epochs -= 1
            seconds = seconds if epochs else None
    batch = run.whole("batch")
    named = (run.texts.get(key) for key in NAMES_OF_TRACKERS["job"])
    device = run.texts.get("device")
    return TrainingRun(
        source=f"{run.path} {run.key}",
        job=next(filter(None, named), run.key[:8]),
        name=run.name,
        devices=devices,
        nodes=run.whole("nodes"),
        seconds=seconds,
        epochs=epochs,
        planned_epochs=planned,
        samples=run.whole("samples"),
        batch=batch,
        global_batch=run.whole("global_batch") or (batch * devices if batch else None),
        val_loss=min(run.scores("val_loss"), default=None),
        val_acc=max(run.scores("val_acc"), default=None),
        diverged=run.diverged,
        status=status,
        device=None if device == "auto" else device,
        utilisation=tuple(
            value
            for key, points in run.series.items()
            if re.search(r"gpu.*util", key)
            for _, value, _ in points
            if math.isfinite(value)
        ),
        settings=settings_of(run.texts),
    )
