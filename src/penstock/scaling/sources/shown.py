"""Runs of other programs as rows of a list: the logs of SLURM jobs, and what trackers kept."""

from __future__ import annotations

import contextlib
import re
from functools import partial
from pathlib import Path

import numpy as np

from ...base import UsageError
from ...reports import (
    RunCurve,
    RunDetails,
    ShownRun,
    curve_of,
    key_of,
    label,
    numbers_of,
    settings_of,
    status_word,
    tags_of,
)
from ..runs import TrainingRun
from .read import runs_of_file
from .tracked import TrackedRun, training_runs

_OF_THE_TRACKER = re.compile(r"mlflow\.|load\.|variables\.|tags?(?:\.|$)|run$")
"""Beginnings of names that are no settings of a run."""
_OF_THE_MACHINE = re.compile(
    r"(?:device|git|gpus|launch|libraries|limits|load|machine|machine_key|mlflow|run|tags|torch"
    r"|variables)(?:\.|$)"
)
"""Beginnings of names of tags that our trainings and MLflow write."""


def runs_of_others(path: Path) -> list[ShownRun]:
    """The runs of a file.

    Args:
        path: The file.

    Returns:
        A row for each run; none if the file holds no training.

    Raises:
        UsageError: The file cannot be read.
    """
    runs = list(runs_of_file(path))
    return [
        _of_log(run, path, run is runs[-1])
        if isinstance(run, TrainingRun)
        else _of_tracker(run, path)
        for run in runs
    ]


def _of_tracker(run: TrackedRun, path: Path) -> ShownRun:
    training = None
    with contextlib.suppress(UsageError):
        training = next(training_runs([run], run.path, lambda line: None), None)
    key = key_of(f"{path.resolve()} {run.key}")
    return ShownRun(
        key=key,
        case=key,
        name=label(run.name),
        kind="tracked",
        status=status_word(run.status or (training.status if training else "unknown")),
        source=label(f"{path} {run.key}"),
        workload=label(run.texts.get("workload")),
        machine=label(run.texts.get("machine_key") or run.texts.get("hostname")),
        model=label(run.texts.get("model") or run.texts.get("backbone")),
        began=run.began or None,
        seconds=training.seconds if training else None,
        tags=_tags(run),
        read=partial(_tracked_details, run, training),
    )


def _tags(run: TrackedRun) -> dict[str, str]:
    """The tags that users gave. MLflow keeps them with other tags, W&B among the settings."""
    named = {
        name.partition(".")[2]: text
        for name, text in run.parameters.items()
        if name.startswith("tag.")
    }
    given = {name: text for name, text in run.tags.items() if not _OF_THE_MACHINE.match(name)}
    return tags_of({**named, **given})


def _tracked_details(run: TrackedRun, training: TrainingRun | None) -> RunDetails:
    last = {label(n): float(p[-1][1]) for n, p in run.metrics.items() if p}
    counts = {} if training is None else {"devices": training.devices, "nodes": training.nodes}
    tags = _tags(run)
    named = {
        name: text
        for name, text in run.parameters.items()
        if name not in tags and not _OF_THE_TRACKER.match(name)
    }
    metrics = numbers_of(last) | _scores(training)
    return RunDetails(settings_of(counts, named), metrics, _tracked_curves(run))


def _scores(run: TrainingRun | None) -> dict[str, float]:
    """The numbers that all trainings have, from any source."""
    if run is None:
        return {}
    return numbers_of(
        {
            "seconds": run.seconds,
            "seconds_per_epoch": run.per_epoch,
            "best_val_loss": run.scored(run.val_loss),
            "best_val_acc": run.scored(run.val_acc),
            "samples": run.samples,
            "epochs": run.epochs,
            # A log says when none of its readings was taken, so there is no curve of them.
            "gpu_util_percent": float(np.mean(run.utilisation)) if run.utilisation else None,
        }
    )


def _tracked_curves(run: TrackedRun) -> dict[str, RunCurve]:
    curves = {}
    epochs = np.array(sorted((s, v) for s, v, _ in run.series.get("epoch", ())))
    times = [time for points in run.metrics.values() for _, _, time in points]
    began = run.began or min(filter(np.isfinite, times), default=0.0)
    for name, points in run.metrics.items():
        steps, values, seconds = np.transpose(points)
        of_epoch = np.interp(steps, *epochs.T) if len(epochs) else None
        of_machine = name.startswith(("system/", "sys."))
        curves[label(name)] = curve_of(
            values, of_machine, step=steps, epoch=of_epoch, seconds=seconds - began
        )
    return curves


def _of_log(run: TrainingRun, path: Path, last: bool) -> ShownRun:
    """A run as a row. ``last`` is True for the last run of the file."""
    again = f" {run.restarts}" if run.restarts else ""
    counts = {
        "devices": run.devices,
        "nodes": run.nodes,
        "batch_size": run.batch,
        "global_batch_size": run.global_batch,
        "device": run.device,
    }
    began = run.began
    if began is None and last and run.seconds:  # the file's last write is its end
        began = path.stat().st_mtime - run.seconds
    details = RunDetails(settings_of(counts, run.settings), _scores(run), _log_curves(run))
    key = key_of(f"{path.resolve()} {run.job}{again}")
    return ShownRun(
        key=key,
        case=key,
        name=label(f"{run.name} {run.job}{again}"),
        kind="job log",
        status=status_word(run.status),
        source=label(path),
        workload=label(run.settings.get("workload")),
        machine=label(run.device),
        model=label(run.settings.get("model") or run.settings.get("backbone")),
        began=began,
        seconds=run.seconds,
        read=lambda: details,
    )


def _log_curves(run: TrainingRun) -> dict[str, RunCurve]:
    curves = {}
    for name, points in run.scores.items():
        epochs, scores = np.transpose(points)
        steps = epochs * run.steps if run.steps else None
        curves[name] = curve_of(scores, step=steps, epoch=epochs)
    return curves
