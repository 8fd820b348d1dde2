"""A training, read from its folder, while it goes on and after its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from ...base import ARGS, RESULTS, TRAIN_KNOBS, UsageError, format_seconds, is_locked, read_json
from ...instruments import PHASES
from ...reports import TrainingFolder
from ...scaling import TrainingRun, results_run
from ...training import EVENTS, TRAIN_LOCK, read_events
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
from .records import machine_of

_SILENT = (
    "output_dir resume overwrite track track_every project experiment_name profile "
    "profile_steps name tags"
).split()
"""Arguments that change neither the result of a training nor its speed."""
_NO_METRICS = (
    "history ranks epoch_times_s trackers resumed_at_steps launch facts world_size batch_size "
    "global_batch_size"
).split()
"""Results that are lists, or settings."""


def shown_training(folder: Path, stamp: Stamp) -> ListedRun:
    """A training as a row.

    Args:
        folder: Its folder.
        stamp: The states of its files.

    Returns:
        The row.

    Raises:
        UsageError: It is not the folder of a training.
    """
    args, results = (_document(folder / name) for name in (ARGS, RESULTS))
    if not args and not results:
        raise UsageError(f"{folder} is not the folder of a training")
    begin = next(_begins(folder), {})
    workload = str(results.get("workload") or args.get("workload") or "training")
    launch = results.get("launch") or args.get("launch") or {}
    hosts = launch.get("hosts") if isinstance(launch, Mapping) else None
    seconds = results.get("training_s")
    began = begin.get("time")
    return ListedRun(
        key=key_of(str(folder.resolve())),
        name=label(args.get("name") or results.get("name") or folder.resolve().name),
        kind="training",
        status=_status(folder, results),
        source=label(folder),
        stamp=stamp,
        workload=label(workload),
        machine=label(" ".join(map(str, hosts)) if hosts else "")
        or machine_of(begin.get("environment") or {}),
        model=_model(workload, args),
        began=began if isinstance(began, int | float) else _changed(folder / ARGS),
        seconds=seconds if isinstance(seconds, int | float) and seconds else None,
        result=_result(results),
        tags=tags_of(args.get("tags") or results.get("tags")),
        read=partial(_details, folder),
    )


def _document(path: Path) -> dict[str, Any]:
    document = read_json(path) if path.is_file() else {}
    return document if isinstance(document, dict) else {}


def _begins(folder: Path) -> Iterator[dict[str, Any]]:
    """The first events of the run and of each resume."""
    if (folder / EVENTS).is_file():
        with contextlib.suppress(OSError):
            for _, event in read_events(folder / EVENTS):
                if event["event"] == "begin":
                    yield event


def _status(folder: Path, results: Mapping[str, Any]) -> str:
    lock = folder / TRAIN_LOCK
    with contextlib.suppress(OSError):
        if lock.is_file() and is_locked(lock):
            return "running"
    status = str(results.get("status") or "unfinished")
    return "unfinished" if status == "running" else label(status)


def _model(workload: str, args: Mapping[str, Any]) -> str:
    """The model among the arguments, which hold those of all workloads."""
    taken = TRAIN_KNOBS.get(workload, frozenset(args))
    return label(next((args[n] for n in ("model", "backbone") if n in taken and args.get(n)), ""))


def _changed(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _result(results: Mapping[str, Any]) -> str:
    words = []
    if isinstance(seconds := results.get("training_s"), int | float):
        words.append(format_seconds(seconds))
    final = results.get("final")
    scores = numbers_of(final) if isinstance(final, Mapping) else {}
    words += [f"{name} {value:.4g}" for name, value in list(scores.items())[:2]]
    return ", ".join(words)


def _details(folder: Path) -> RunDetails:
    run = TrainingFolder.read(folder)
    begin = next(_begins(folder), {})
    training = None
    with contextlib.suppress(UsageError):
        training = results_run(run.results, str(folder), folder) if run.results else None
    others = {name for w, names in TRAIN_KNOBS.items() if w != run.workload for name in names}
    others -= TRAIN_KNOBS.get(run.workload, frozenset(run.args))
    args = {n: v for n, v in run.args.items() if n not in others and n not in _SILENT}
    environment = begin.get("environment") or {}
    kept = {k: v for k, v in environment.items() if k not in ("launch", "load", "variables")}
    used = _of_results(run.results)  # listed first, and wins over the arguments
    return RunDetails(
        settings_of_run(used, args, kept, used),
        _metrics(run, training),
        _curves(run) | _events(folder, begin.get("time")),
        training,
        folder,
        label(run.results.get("error")),
    )


def _of_results(results: Mapping[str, Any]) -> dict[str, Any]:
    """Results that the machine decided, under the names that scaling studies use."""
    if "world_size" not in results:
        return {}
    return {
        "devices": results["world_size"],
        "device": results.get("device"),
        "global_batch_size": results.get("global_batch_size"),
    }


def _metrics(run: TrainingFolder, training: TrainingRun | None) -> dict[str, float]:
    results = run.results
    metrics = numbers_of({name: v for name, v in results.items() if name not in _NO_METRICS})
    for phase, seconds in run.phases.items():
        metrics[f"phases.{phase}_s"] = seconds
    ranks = [rank for rank in results.get("ranks") or () if isinstance(rank, Mapping)]
    for name in ("host_peak", "device_peak", "device_reserved"):
        peaks = [numbers_of(rank.get("memory") or {}).get(name) for rank in ranks]
        if measured := [peak for peak in peaks if peak is not None]:
            metrics[f"memory.{name}"] = max(measured)
    return metrics | metrics_of_training(training)


def metrics_of_training(training: TrainingRun | None) -> dict[str, float]:
    """The numbers that all trainings have, from any source."""
    if training is None:
        return {}
    numbers = {
        "seconds": training.seconds,
        "seconds_per_epoch": training.per_epoch,
        "best_val_loss": training.scored(training.val_loss),
        "best_val_acc": training.scored(training.val_acc),
    }
    return numbers_of(numbers)


def _curves(run: TrainingFolder) -> dict[str, RunCurve]:
    """Scores by epoch, and the loss and phases of the steps of the first rank."""
    rows = [row for row in run.history if isinstance(row.get("epoch"), int)]
    ended = list(accumulate(_number(r, "train_s") + _number(r, "val_s") for r in rows))
    curves = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        if name in ("epoch", "step"):
            continue
        values = [_number(row, name, np.nan) for row in rows]
        if np.isfinite(values).any():
            steps = [_number(row, "step", np.nan) for row in rows]
            epochs = [row["epoch"] + 1 for row in rows]
            curves[label(name)] = curve_of(values, steps=steps, epochs=epochs, seconds=ended)
    if run.steps:
        curves |= _of_steps(run, rows)
    return curves


def _number(row: Mapping[str, Any], name: str, absent: float = 0.0) -> float:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else absent


def _of_steps(run: TrainingFolder, rows: Sequence[Mapping[str, Any]]) -> dict[str, RunCurve]:
    steps = run.steps[0]
    epochs, first, place, counts = np.unique(
        steps.epoch, return_index=True, return_inverse=True, return_counts=True
    )
    ended = {row["epoch"]: _number(row, "val_s") for row in rows}
    validated = [sum(s for number, s in ended.items() if number < epoch) for epoch in epochs]
    numbers = np.arange(1, len(place) + 1)
    within = (numbers - first[place]) / counts.max()
    values = {"train_loss_step": steps.loss}
    values |= {f"{name}_s": steps.seconds[name] for name in ("step", *PHASES)}
    return {
        name: curve_of(
            each,
            steps=numbers,
            epochs=steps.epoch + within,
            seconds=np.cumsum(np.nan_to_num(steps.seconds["step"])) + np.array(validated)[place],
        )
        for name, each in values.items()
        if np.isfinite(each).any()
    }


def _events(folder: Path, began: Any) -> dict[str, RunCurve]:
    """Curves of the machine's metrics, from the events of a tracked training."""
    points: dict[str, list[tuple[float, float, float]]] = {}
    if isinstance(began, int | float):
        with contextlib.suppress(OSError):
            for _, event in read_events(folder / EVENTS):
                if event["event"] == "system":
                    at = float(event["step"]), float(event["time"]) - began
                    for name, value in numbers_of(event.get("metrics") or {}).items():
                        points.setdefault(name, []).append((value, *at))
    curves = {}
    for name, rows in points.items():
        values, steps, seconds = np.transpose(rows)
        curves[name] = curve_of(values, steps=steps, seconds=seconds, of_machine=True)
    return curves
