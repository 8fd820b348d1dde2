"""Runs as experiment trackers keep them: MLflow's stores, and what Comet exports.

    metrics     by name, each a series of (step, value, time)
    parameters  by name, as text

Trainings name the same things differently; `_NAMES` holds the spellings. What a tracker was told of
a run's environment goes before its parameters: there stands the device that was found, and not the
one that was asked for.

Where no metric holds the training time, a run's own begin and end stand for it. Comet exports
neither, so they are its first metric and its last. Where nothing was told until the first epoch was
over, that epoch is not between them: they are the time of one epoch less.

Comet does not tell how a run ended: it is complete where all its epochs were counted. A run that
does not tell its number of devices is left out, and ``say`` hears of it.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ..runs import Status, TrainingRun
from .settings import settings_of

Say = Callable[[str], None]
Series = list[tuple[int, float, float]]
"""(step, value, seconds since the epoch)"""

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


def tracked_run(
    source: str,
    job: str,
    name: str,
    parameters: Mapping[str, str],
    metrics: Mapping[str, Series],
    status: Status | None,
    began: float | None,
    ended: float | None,
    missing: bool = False,
) -> TrainingRun | None:
    """A run from what a tracker kept of it; None where its number of devices is not known.

    ``status`` is None where the tracker does not tell how the run ended; ``missing``: its first
    epoch was over when it ``began``.
    """
    # The last part of a name: Comet puts "train/" and the like before it.
    told = {key.lower().rpartition("/")[2].replace(" ", "_"): v for key, v in parameters.items()}
    series = {key.lower().rpartition("/")[2]: values for key, values in metrics.items()}

    def number(what: str) -> float | None:
        for key in NAMES_OF_TRACKERS[what]:
            if key in told:
                with contextlib.suppress(ValueError):
                    return float(told[key])
            if found := values(key):
                return found[-1]
        return None

    def whole(what: str) -> int | None:
        value = number(what)
        return int(value) if value is not None and 0 < value < 1e15 else None

    def values(key: str) -> list[float]:
        return [value for value in told_of(key) if math.isfinite(value)]

    def told_of(key: str) -> list[float]:
        points = [(step, value) for step, value, _ in series.get(key, ())]
        # A run that went on may have told a step again; where none was told, all are 0.
        by_step = dict(points)
        return list(by_step.values()) if len(by_step) > 1 else [value for _, value in points]

    def scores(key: str) -> list[float]:
        single = number(key)
        return values(key) or [v for v in (single,) if v is not None and math.isfinite(v)]

    seconds, by_epoch = number("seconds"), values("train_s")
    if own := values("training_s"):
        seconds = own[-1] + sum(values("validation_s")[-1:])
    elif seconds is None and by_epoch:
        seconds = sum(by_epoch) + sum(values("val_s"))
    epochs_less = 0
    if seconds is None and began is not None and ended is not None:
        seconds, epochs_less = ended - began, int(missing)
    used = [
        value
        for key, points in series.items()
        if re.search(r"gpu.*util", key)
        for _, value, _ in points
        if math.isfinite(value)
    ]
    planned = None if told.get("max_steps") else whole("epochs")
    done = len(by_epoch) or whole("done") or len(told_of("val_loss")) or None
    if planned and done and done > planned:
        done = None  # these were not scores of epochs
    if status is None:
        # Our own trainings tell the time of the session only where that is the last.
        ended_well = bool(values("session_s")) or (done is not None and done == planned)
        status = "complete" if ended_well else "unfinished" if done and planned else "unknown"
    devices, batch = whole("devices"), whole("batch")
    if devices is None:
        return None
    epochs = done or (planned if status == "complete" else None)
    if epochs is not None and epochs_less:
        epochs -= 1
        seconds = seconds if epochs else None
    return TrainingRun(
        source=source,
        job=next((told[key] for key in NAMES_OF_TRACKERS["job"] if told.get(key)), job),
        name=name,
        devices=devices,
        nodes=whole("nodes"),
        seconds=seconds,
        epochs=epochs,
        planned_epochs=planned,
        samples=whole("samples"),
        batch=batch,
        global_batch=whole("global_batch") or (batch * devices if batch else None),
        val_loss=min(scores("val_loss"), default=None),
        val_acc=max(scores("val_acc"), default=None),
        diverged=any(
            not math.isfinite(value)
            for key, points in series.items()
            if key.endswith("loss")
            for _, value, _ in points
        ),
        status=status,
        device=None if told.get("device") == "auto" else told.get("device"),
        utilisation=tuple(used),
        settings=settings_of(told),
    )


def known_fields(runs: Iterable[TrainingRun | None], path: Path, say: Say) -> Iterator[TrainingRun]:
    """Those of which the number of devices is known."""
    left = 0
    for run in runs:
        left += run is None
        if run is not None:
            yield run
    if left:
        say(f"{path}: {left} run{'s' * (left > 1)} without a number of devices, left out")
