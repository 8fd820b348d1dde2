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
import json
import math
import re
import sqlite3
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from .errors import UsageError
from .scaling import Run, Status
from .scaling_logs import settings_of

Say = Callable[[str], None]
Series = list[tuple[int, float, float]]
"""(step, value, seconds since the epoch)"""

_NAMES: Mapping[str, tuple[str, ...]] = {
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
_MLFLOW: Mapping[str, Status] = {"FINISHED": "complete", "FAILED": "crashed", "KILLED": "cancelled"}
_MLFLOW_CODES = {1: "RUNNING", 2: "SCHEDULED", 3: "FINISHED", 4: "FAILED", 5: "KILLED"}
"""A store of files writes the status of a run as its number."""


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
) -> Run | None:
    """A run from what a tracker kept of it; None where its number of devices is not known.

    ``status`` is None where the tracker does not tell how the run ended; ``missing``: its first
    epoch was over when it ``began``.
    """
    # The last part of a name: Comet puts "train/" and the like before it.
    told = {key.lower().rpartition("/")[2].replace(" ", "_"): v for key, v in parameters.items()}
    series = {key.lower().rpartition("/")[2]: values for key, values in metrics.items()}

    def number(what: str) -> float | None:
        for key in _NAMES[what]:
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
    return Run(
        source=source,
        job=next((told[key] for key in _NAMES["job"] if told.get(key)), job),
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


def _known(runs: Iterable[Run | None], path: Path, say: Say) -> Iterator[Run]:
    """Those of which the number of devices is known."""
    left = 0
    for run in runs:
        left += run is None
        if run is not None:
            yield run
    if left:
        say(f"{path}: {left} run{'s' * (left > 1)} without a number of devices, left out")


# --- MLflow -------------------------------------------------------------------------------------


def mlflow_sqlite(path: Path, say: Say) -> Iterator[Run]:
    """The runs of a database of MLflow, which is opened to be read only."""
    return _known(_in_sqlite(path), path, say)


def _in_sqlite(path: Path) -> Iterator[Run | None]:
    try:
        with contextlib.closing(
            sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        ) as db:
            runs = db.execute(
                "select run_uuid, name, status, start_time, end_time from runs "
                "where lifecycle_stage = 'active'"
            ).fetchall()
            for run, name, status, began, ended in runs:
                metrics: dict[str, Series] = {}
                for key, value, time, step in db.execute(
                    "select key, case when is_nan then null else value end, timestamp, step "
                    "from metrics "
                    "where run_uuid = ? order by step, timestamp",
                    (run,),
                ):
                    number = math.nan if value is None else value
                    metrics.setdefault(key, []).append((step, number, time / 1e3))
                told: dict[str, str] = {}
                for kind in ("params", "tags"):
                    told |= dict(
                        db.execute(f"select key, value from {kind} where run_uuid = ?", (run,))
                    )
                yield _mlflow_run(path, run, name, told, metrics, status, began, ended)
    except sqlite3.Error as error:
        raise UsageError(f"{path} is not a database of MLflow: {error}") from error


def mlflow_files(folder: Path, say: Say) -> Iterator[Run]:
    """The runs below a folder that an MLflow store of files keeps: EXPERIMENT/RUN/meta.yaml."""
    return _known(_in_files(folder), folder, say)


def _in_files(folder: Path) -> Iterator[Run | None]:
    for meta in sorted(folder.glob("**/meta.yaml")):
        home = meta.parent
        if not (home / "params").is_dir() and not (home / "metrics").is_dir():
            continue  # that of an experiment
        try:
            told = yaml.safe_load(meta.read_text(errors="replace"))
        except (OSError, yaml.YAMLError) as error:
            raise UsageError(f"{meta} cannot be read: {error}") from error
        if not isinstance(told, dict) or told.get("lifecycle_stage") == "deleted":
            continue
        parameters = {
            file.name: file.read_text(errors="replace").strip()
            for kind in ("params", "tags")
            for file in (home / kind).glob("*")
            if file.is_file()
        }
        metrics = {
            str(file.relative_to(home / "metrics")): list(_points(file))
            for file in (home / "metrics").glob("**/*")
            if file.is_file()
        }
        status = told.get("status")
        yield _mlflow_run(
            home,
            home.name,
            told.get("run_name") or home.name,
            parameters,
            metrics,
            _MLFLOW_CODES.get(status, str(status)) if isinstance(status, int) else str(status),
            told.get("start_time"),
            told.get("end_time"),
        )


def _points(file: Path) -> Iterator[tuple[int, float, float]]:
    """Lines of ``milliseconds value step``."""
    for line in file.read_text(errors="replace").splitlines():
        words = line.split()
        with contextlib.suppress(ValueError, IndexError):
            yield int(words[2]), float(words[1]), float(words[0]) / 1e3


def _mlflow_run(
    path: Path,
    run: str,
    name: str | None,
    parameters: Mapping[str, str],
    metrics: Mapping[str, Series],
    status: str,
    began: int | None,
    ended: int | None,
) -> Run | None:
    became = _MLFLOW.get(status, "unfinished")
    first, last = (None if time is None else time / 1e3 for time in (began, ended))
    source, name = f"{path} {run}", name or run[:8]
    return tracked_run(source, run[:8], name, parameters, metrics, became, first, last)


# --- Comet --------------------------------------------------------------------------------------


def comet_runs(value: Any, path: Path, say: Say) -> Iterator[Run]:
    """Experiments of a JSON or the rows of a CSV.

    Either one entry for each value of a metric, ``metricName``, ``metricValue`` and ``timestamp``,
    with an ``experimentKey`` where there are several; or one entry for each experiment, with a
    field for each parameter and metric.
    """
    return _known(_in_export(value, path), path, say)


def _in_export(value: Any, path: Path) -> Iterator[Run | None]:
    if isinstance(value, dict):
        value = [value] if "metrics" in value else list(value.values())
    if not isinstance(value, list):
        return
    entries = [entry for entry in value if isinstance(entry, dict)]
    if entries and all(isinstance(entry.get("metrics"), list) for entry in entries):
        for number, entry in enumerate(entries):
            key = str(entry.get("experimentKey") or entry.get("name") or f"{path.stem}-{number}")
            name = str(entry.get("experimentName") or entry.get("name") or key)
            yield _comet_run(path, key, name, _comet_parameters(entry), entry["metrics"])
    elif entries and all(_field(entry, "metricName", "metric") for entry in entries):
        own: dict[str, list[dict[str, Any]]] = {}
        for entry in entries:
            key = _field(entry, "experimentKey", "experiment_key", "experiment") or path.stem
            own.setdefault(str(key), []).append(entry)
        for key, rows in own.items():
            told = {k: str(v) for k, v in rows[0].items() if v not in (None, "")}
            yield _comet_run(path, key, key, told, rows)
    elif any(name in _lower(entry) for entry in entries for name in _NAMES["devices"]):
        for number, entry in enumerate(entries):
            key = str(_field(entry, "experimentKey", "experiment_key", "Name") or number)
            yield _comet_row(path, key, entry)


@dataclass
class Archive:
    """Of an experiment that Comet kept where it had no network; of one that went on, a part."""

    path: Path
    key: str
    parameters: dict[str, str] = field(default_factory=dict)
    """A later part has none."""
    metrics: list[dict[str, Any]] = field(default_factory=list)


def comet_archive(path: Path) -> list[Archive]:
    """What an archive holds: one experiment's, or nothing."""
    try:
        with zipfile.ZipFile(path) as archive:
            if "messages.json" not in archive.namelist():
                return []
            about = json.loads(archive.read("experiment.json"))
            messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
        found = Archive(path, str(about.get("offline_id") or path.stem))
        others: dict[str, str] = {}
        for message in messages:
            told = message["payload"]
            if message["type"] == "metric_msg":
                found.metrics.append({**told["metric"], "timestamp": told["local_timestamp"]})
            elif message["type"] == "parameter_msg":
                found.parameters[told["param"]["paramName"]] = str(told["param"]["paramValue"])
            elif message["type"] == "log_other":
                others[told["key"]] = str(told["value"])
        found.parameters |= others
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not an archive of Comet: {error!r}") from error
    return [found]


def comet_experiments(archives: Iterable[Archive], say: Say) -> Iterator[Run]:
    """A run for each experiment, the parts of one that went on taken together."""
    parts: dict[str, list[Archive]] = {}
    for archive in archives:
        parts.setdefault(archive.key, []).append(archive)
    for key, own in parts.items():
        told = {name: value for part in own for name, value in part.parameters.items()}
        rows = [row for part in own for row in part.metrics]
        path = own[0].path
        # Between its parts it did not train, so its first and last moment tell nothing.
        yield from _known([_comet_run(path, key, key, told, rows, len(own) == 1)], path, say)


def _comet_row(path: Path, key: str, entry: Mapping[str, Any]) -> Run | None:
    """An experiment in a row of fields."""
    told = {name: str(value) for name, value in entry.items() if value not in (None, "")}
    duration = told.get("duration") or told.get("Duration")
    ended = _duration(duration) if duration else None
    return tracked_run(f"{path} {key}", key[:8], key, told, {}, None, 0.0, ended)


def _comet_run(
    path: Path,
    key: str,
    name: str,
    told: Mapping[str, str],
    rows: Iterable[Any],
    at_a_stretch: bool = True,
) -> Run | None:
    metrics: dict[str, Series] = {}
    times: list[float] = []
    for row in rows:
        if not isinstance(row, Mapping):
            continue
        metric = _field(row, "metricName", "metric", "name")
        value = _field(row, "metricValue", "value")
        try:
            number, time = float(value), float(_field(row, "timestamp") or "nan")
            step = int(float(_field(row, "step", "epoch") or 0))
        except (TypeError, ValueError, OverflowError):
            continue
        # Comet's times are milliseconds.
        time = time / 1e3 if time > 1e11 else time
        metrics.setdefault(str(metric), []).append((step, number, time))
        times += [time] if math.isfinite(time) else []
    for series in metrics.values():
        series.sort(key=lambda point: point[2] if math.isfinite(point[2]) else 0.0)
    timed = at_a_stretch and len(times) > 1
    began, ended = (min(times), max(times)) if timed else (None, None)
    missing = timed and _first_epoch_is_missing(metrics, min(times))
    about = (f"{path} {key}", key[:8], name, told, metrics)
    return tracked_run(*about, None, began, ended, missing)


def _first_epoch_is_missing(metrics: Mapping[str, Series], began: float) -> bool:
    """Whether the first score came at once, and not an epoch after the first metric."""
    scores = sorted(
        time
        for name, series in metrics.items()
        if name.lower().rpartition("/")[2] == "val_loss"
        for _, _, time in series
        if math.isfinite(time)
    )
    if not scores:
        return False
    epoch = (scores[-1] - scores[0]) / max(1, len(scores) - 1)
    return scores[0] - began <= epoch / 2


def _comet_parameters(entry: Mapping[str, Any]) -> dict[str, str]:
    told = entry.get("parameters") or entry.get("params") or {}
    if isinstance(told, Mapping):
        return {str(name): str(value) for name, value in told.items()}
    return {
        str(row.get("name")): str(row.get("valueCurrent", row.get("value")))
        for row in (told if isinstance(told, list) else ())
        if isinstance(row, Mapping)
    }


def _field(row: Mapping[str, Any], *names: str) -> Any:
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


def _lower(entry: Mapping[str, Any]) -> set[str]:
    return {str(name).lower().replace(" ", "_") for name in entry}


def _duration(text: str) -> float | None:
    """Seconds from ``362.45``, or from ``00:06:02``."""
    if re.fullmatch(r"\d{1,6}(:\d{1,2}){1,2}", text):
        seconds = 0
        for part in text.split(":"):
            seconds = 60 * seconds + int(part)
        return float(seconds)
    with contextlib.suppress(ValueError):
        return float(text)
    return None
