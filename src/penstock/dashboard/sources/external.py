"""Runs from other programs: the logs of SLURM jobs, and the stores and exports of trackers."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from ...base import UsageError, format_seconds
from ...scaling import (
    CometArchive,
    KeptRun,
    TrackedRun,
    TrainingRun,
    comet_experiment,
    experiments_of,
    mlflow_files,
    runs_of_file,
    training_runs,
)
from ..listed_run import (
    ListedRun,
    RunCurve,
    RunDetails,
    Stamp,
    curve_of,
    key_of,
    label,
    numbers_of,
    settings_of_run,
    tags_of,
)
from .trainings import metrics_of_training

_OF_THE_TRACKER = re.compile(r"mlflow\.|load\.|variables\.|tags?(?:\.|$)|run$")
"""Beginnings of names that are no settings of a run."""
_OF_THE_MACHINE = re.compile(
    r"(?:device|git|gpus|launch|libraries|limits|load|machine|machine_key|mlflow|run|tags|torch"
    r"|variables)(?:\.|$)"
)
"""Beginnings of names of tags that our trainings and MLflow write."""


def runs_of_others(path: Path, stamp: Stamp) -> list[ListedRun]:
    """The runs of a file, or of the folder of a run in MLflow's store of files.

    Args:
        path: The file or the folder.
        stamp: The states of the files.

    Returns:
        A row for each run; none if the file holds no training.

    Raises:
        UsageError: The file cannot be read.
    """
    kept: Iterable[KeptRun] = mlflow_files(path) if path.is_dir() else runs_of_file(path)
    runs = list(_whole(kept))
    return [_shown(run, path, stamp, run is runs[-1]) for run in runs]


def _whole(kept: Iterable[KeptRun]) -> Iterator[TrackedRun | TrainingRun]:
    """Yield the runs. The parts of a run that Comet kept separately are joined."""
    parts: list[CometArchive] = []
    for run in kept:
        if isinstance(run, CometArchive):
            parts.append(run)
        else:
            yield run
    yield from map(comet_experiment, experiments_of(parts))


def _shown(run: TrackedRun | TrainingRun, path: Path, stamp: Stamp, last: bool) -> ListedRun:
    """A run as a row. ``last`` is True for the last run of the file."""
    if isinstance(run, TrainingRun):
        return _of_log(run, path, stamp, last)
    training = _training(run)
    began, seconds = run.began or None, training.seconds if training else None
    return ListedRun(
        key=key_of(f"{path.resolve()} {run.key}"),
        name=label(run.name),
        kind="tracked",
        status=run.status or (training.status if training else "unknown"),
        source=label(f"{path} {run.key}"),
        stamp=stamp,
        workload=label(run.texts.get("workload")),
        machine=label(run.texts.get("launch.hosts") or run.texts.get("hostname")),
        model=label(run.texts.get("model") or run.texts.get("backbone")),
        began=began,
        seconds=seconds,
        result=_result(training) if training else "",
        tags=_tags(run),
        read=partial(_details, run, training, path),
    )


def _training(run: TrackedRun) -> TrainingRun | None:
    with contextlib.suppress(UsageError):
        return next(training_runs([run], run.path, lambda line: None), None)
    return None


def _tags(run: TrackedRun) -> dict[str, str]:
    """The tags that users gave. MLflow keeps them with other tags, W&B among the settings."""
    named = {
        name.partition(".")[2]: text
        for name, text in run.parameters.items()
        if name.startswith("tag.")
    }
    given = {name: text for name, text in run.tags.items() if not _OF_THE_MACHINE.match(name)}
    return tags_of({**named, **given})


def _result(run: TrainingRun) -> str:
    words = [format_seconds(run.seconds)] if run.seconds else []
    scores = {"val_loss": run.scored(run.val_loss), "val_acc": run.scored(run.val_acc)}
    words += [f"{name} {value:.4g}" for name, value in scores.items() if value is not None]
    return ", ".join(words)


def _details(run: TrackedRun, training: TrainingRun | None, path: Path) -> RunDetails:
    metrics = {label(n): float(p[-1][1]) for n, p in run.metrics.items() if p}
    counts = {} if training is None else {"devices": training.devices, "nodes": training.nodes}
    tags = _tags(run)
    named = {
        name: text
        for name, text in run.parameters.items()
        if name not in tags and not _OF_THE_TRACKER.match(name)
    }
    return RunDetails(
        settings_of_run(counts, named),
        numbers_of(metrics) | metrics_of_training(training),
        _curves(run),
        training,
        path if path.is_dir() else None,
    )


def _curves(run: TrackedRun) -> dict[str, RunCurve]:
    curves = {}
    epochs = np.array(sorted((s, v) for s, v, _ in run.series.get("epoch", ())))
    times = [time for points in run.metrics.values() for _, _, time in points]
    began = run.began or min(filter(np.isfinite, times), default=0.0)
    for name, points in run.metrics.items():
        steps, values, seconds = np.transpose(points)
        of_epoch = np.interp(steps, *epochs.T) if len(epochs) else None
        curves[label(name)] = curve_of(
            values,
            steps=steps,
            epochs=of_epoch,
            seconds=seconds - began,
            of_machine=name.startswith(("system/", "sys.")),
        )
    return curves


def _of_log(run: TrainingRun, path: Path, stamp: Stamp, last: bool) -> ListedRun:
    again = f" {run.restarts}" if run.restarts else ""
    counts = {
        "devices": run.devices,
        "nodes": run.nodes,
        "batch_size": run.batch,
        "global_batch_size": run.global_batch,
        "device": run.device,
    }
    curves = {}
    for name, points in run.scores.items():
        epochs, scores = np.transpose(points)
        steps = epochs * run.steps if run.steps else None
        curves[name] = curve_of(scores, steps=steps, epochs=epochs)
    if run.utilisation:
        curves["gpu_util_percent"] = curve_of(run.utilisation, of_machine=True)
    began = run.began
    if began is None and last and run.seconds:  # the file's last write is its end
        began = path.stat().st_mtime - run.seconds
    metrics = metrics_of_training(run)
    details = RunDetails(
        settings_of_run(counts, dict(run.settings)),
        metrics | numbers_of({"samples": run.samples, "epochs": run.epochs}),
        curves,
        run,
    )
    return ListedRun(
        key=key_of(f"{path.resolve()} {run.job}{again}"),
        name=label(f"{run.name} {run.job}{again}"),
        kind="job log",
        status=run.status,
        source=label(path),
        stamp=stamp,
        workload=label(run.settings.get("workload")),
        machine=label(run.device),
        model=label(run.settings.get("model") or run.settings.get("backbone")),
        began=began,
        seconds=run.seconds,
        result=_result(run),
        read=lambda: details,
    )
