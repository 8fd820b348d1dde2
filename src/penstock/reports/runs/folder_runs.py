"""A training and a run of inference as rows of a list, while they go on and after their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ...base import TRAIN_KNOBS, is_locked
from ...instruments import PHASES
from ...training import TRAIN_LOCK, read_machine_metrics
from ..infer.job_files import InferenceRun
from ..training.detections import detection_pictures
from ..training.fit_files import TrainingFolder
from .shown_run import (
    RunCurve,
    RunDetails,
    ShownRun,
    curve_of,
    curves_of_readings,
    key_of,
    label,
    numbers_of,
    settings_of,
    status_word,
    tags_of,
)

_SILENT = (
    "output_dir resume overwrite track track_every project experiment_name profile "
    "profile_steps name tags"
).split()
"""Arguments that change neither the result of a training nor its speed."""
_NO_METRICS = (
    "history ranks epoch_times_s trackers resumed_at_steps launch world_size batch_size "
    "global_batch_size tags"
).split()
"""Results that are lists, or settings."""
_NOT_READINGS = ("t", "time", "processes", "threads", "gauges", "gpus")


def shown_training(folder: Path) -> ShownRun:
    """A training as a row.

    Raises `UsageError` if it is not the folder of a training.
    """
    run = TrainingFolder.read(folder)
    settings = _settings(run)
    repeated = {name: text for name, text in settings.items() if name != "seed"}
    seconds = run.results.get("training_s")
    return ShownRun(
        key=key_of(folder.resolve()),
        case=key_of(f"{folder.resolve().parent} {sorted(repeated.items())}"),
        name=label(run.args.get("name") or run.results.get("name") or folder.resolve().name),
        kind="training",
        status=_status(run),
        source=label(folder),
        title=label(folder.resolve().name),
        workload=label(run.workload),
        machine=label(run.results.get("machine_key")),
        model=settings.get("model") or settings.get("backbone") or "",
        began=run.began,
        seconds=seconds if isinstance(seconds, int | float) and seconds else None,
        tags=tags_of(run.args.get("tags") or run.results.get("tags")),
        read=partial(_training_details, folder),
    )


def _status(run: TrainingFolder) -> str:
    lock = run.folder / TRAIN_LOCK
    if lock.is_file() and is_locked(lock):
        return "running"
    status = str(run.results.get("status") or "unfinished")
    return "unfinished" if status == "running" else status_word(status)


def _settings(run: TrainingFolder) -> dict[str, str]:
    """The settings of a training: those of its workload, and what the machine decided."""
    others = {name for w, names in TRAIN_KNOBS.items() if w != run.workload for name in names}
    others -= TRAIN_KNOBS.get(run.workload, frozenset(run.args))
    args = {n: v for n, v in run.args.items() if n not in others and n not in _SILENT}
    results = run.results
    used = {"device": results.get("device"), "devices": results.get("world_size")}
    used["global_batch_size"] = results.get("global_batch_size")
    used = {name: value for name, value in used.items() if value is not None}
    machine = {name: results.get(name) for name in ("git", "machine_key")}
    return settings_of(used, args | used, machine)


def _training_details(folder: Path) -> RunDetails:
    run = TrainingFolder.read(folder)
    metrics = numbers_of({n: v for n, v in run.results.items() if n not in _NO_METRICS})
    metrics |= {f"phases.{phase}_s": seconds for phase, seconds in run.phases.items()}
    ranks = [rank for rank in run.results.get("ranks") or () if isinstance(rank, Mapping)]
    for name in ("host_peak", "device_peak", "device_reserved"):
        peaks = [numbers_of(rank.get("memory") or {}).get(name) for rank in ranks]
        if measured := [peak for peak in peaks if peak is not None]:
            metrics[f"memory.{name}"] = max(measured)
    error = label(run.results.get("error"))
    pictures = detection_pictures(folder)
    curves = _training_curves(run) | _machine_curves(folder)
    return RunDetails(_settings(run), metrics, curves, folder, pictures, error)


def _machine_curves(folder: Path) -> dict[str, RunCurve]:
    """The metrics of the machine of a tracked training over time."""
    rows = read_machine_metrics(folder)
    return curves_of_readings([(time - rows[0][1], numbers_of(each)) for _, time, each in rows])


def _training_curves(run: TrainingFolder) -> dict[str, RunCurve]:
    """Scores by epoch, and the loss and phases of the steps of the first rank."""
    rows = [row for row in run.history if isinstance(row.get("epoch"), int)]
    ended = list(accumulate(_number(r, "train_s") + _number(r, "val_s") for r in rows))
    epochs = [row["epoch"] + 1 for row in rows]
    steps = [_number(row, "step", np.nan) for row in rows]
    curves: dict[str, RunCurve] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [_number(row, name, np.nan) for row in rows]
        if name not in ("epoch", "step", "samples") and np.isfinite(values).any():
            curves[label(name)] = curve_of(values, step=steps, epoch=epochs, seconds=ended)
    return curves | (_step_curves(run, rows) if run.steps else {})


def _step_curves(run: TrainingFolder, rows: Sequence[Mapping[str, Any]]) -> dict[str, RunCurve]:
    steps = run.steps[0]
    epochs, first, place, counts = np.unique(
        steps.epoch, return_index=True, return_inverse=True, return_counts=True
    )
    # The time of a step counts the validations before it, so that it is wall-clock.
    waits = [sum(_number(row, "val_s") for row in rows if row["epoch"] < e) for e in epochs]
    numbers = np.arange(1, len(place) + 1)
    seconds = np.cumsum(np.nan_to_num(steps.seconds["step"])) + np.array(waits)[place]
    within = (numbers - first[place]) / counts.max()
    values = {"train_loss_step": steps.loss}
    values |= {f"{name}_s": steps.seconds[name] for name in ("step", *PHASES)}
    return {
        name: curve_of(each, step=numbers, epoch=steps.epoch + within, seconds=seconds)
        for name, each in values.items()
        if np.isfinite(each).any()
    }


def _number(row: Mapping[str, Any], name: str, absent: float = 0.0) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else absent


def shown_inference(folder: Path) -> ShownRun:
    """A run of inference as a row.

    Raises `UsageError` if it is not the folder of a run of inference.
    """
    run = InferenceRun.read(folder)
    model = run.fingerprint.get("model") or [""]
    return ShownRun(
        key=key_of(folder.resolve()),
        case=key_of(folder.resolve()),
        name=label(run.content.get("name") or run.name),
        kind="inference",
        status=status_word(run.status.state),
        source=label(folder),
        workload="infer",
        machine=label(run.machine_key),
        model=label(run.settings.get("model_type") or model[0]),
        began=run.began,
        seconds=run.seconds,
        tags=tags_of(run.content.get("tags")),
        read=partial(_inference_details, folder),
    )


def _inference_details(folder: Path) -> RunDetails:
    run = InferenceRun.read(folder)
    devices = run.fingerprint.get("devices") or run.plan.get("devices") or []
    summary = dict(run.summary or {})
    done = {"blocks done": run.status.blocks_done, "blocks planned": run.status.blocks_planned}
    others = {n: v for n, v in summary.items() if n not in ("workers", "blocks_planned")}
    metrics = numbers_of(others, done)
    if run.seconds and summary.get("voxels"):
        metrics["voxels_per_s"] = float(summary["voxels"]) / run.seconds
    used = {"devices": len(devices) or None, "device": devices, "cores": run.cores}
    settings = {name: v for name, v in run.settings.items() if name not in ("name", "tags")}
    curves: dict[str, RunCurve] = {}
    for each in run.telemetry:
        readings = curves_of_readings([(float(row["t"]), _readings(row)) for row in each.rows])
        curves |= {f"{each.name}/{n}" if each.name else n: c for n, c in readings.items()}
    why = label(run.status.why)
    return RunDetails(settings_of(used, settings, run.maker), metrics, curves, folder, (), why)


def _readings(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row of telemetry."""
    gpus = {
        f"gpu{gpu.get('index')}_{name}": value
        for gpu in row.get("gpus") or ()
        for name, value in gpu.items()
        if name != "index"
    }
    queues = {f"queue/{name}": value for name, value in (row.get("gauges") or {}).items()}
    return numbers_of({n: v for n, v in row.items() if n not in _NOT_READINGS}, gpus, queues)
