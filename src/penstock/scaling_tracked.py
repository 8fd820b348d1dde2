"""Runs as experiment trackers keep them: MLflow's stores, and what Comet exports.

    metrics     by name, each a series of (step, value, time)
    parameters  by name, as text

Trainings name the same things differently; `_NAMES` holds the spellings. Where no metric holds the
training time, a run's own begin and end stand for it.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import sqlite3
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from .errors import UsageError
from .scaling import Run, Status
from .scaling_logs import plain

Series = list[tuple[int, float, float]]
"""(step, value, seconds since the epoch)"""

_NAMES: Mapping[str, tuple[str, ...]] = {
    "devices": ("world_size", "num_gpus", "gpus", "n_gpus", "num_devices", "ntasks"),
    "nodes": ("launch.nodes", "nodes", "num_nodes", "nnodes"),
    "batch": ("batch_size", "per_gpu_batch_size"),
    "global_batch": ("global_batch_size", "effective_batch_size"),
    "epochs": ("epochs", "max_epochs"),
    "samples": ("samples", "samples_per_epoch", "num_samples"),
    "job": ("launch.job_id", "slurm_job_id", "job_id"),
    "seconds": ("training_time", "total_training_time", "train_time"),
}
_COMPARED = ("learning_rate", "lr", "hidden_dims", "dropout", "noise", "workload", "model")
_CALLED = {"lr": "learning rate", "hidden_dims": "hidden layers"}
_MLFLOW: Mapping[str, Status] = {"FINISHED": "complete", "FAILED": "crashed", "KILLED": "cancelled"}
_MLFLOW_CODES = {1: "RUNNING", 2: "SCHEDULED", 3: "FINISHED", 4: "FAILED", 5: "KILLED"}
"""A store of files writes the status of a run as its number."""


def tracked_run(
    source: str,
    job: str,
    name: str,
    parameters: Mapping[str, str],
    metrics: Mapping[str, Series],
    status: Status,
    began: float | None,
    ended: float | None,
) -> Run:
    """A run from what a tracker kept of it."""
    # The last part of a name: Comet puts "train/" and the like before it.
    told = {key.lower().rpartition("/")[2].replace(" ", "_"): v for key, v in parameters.items()}
    series = {key.lower().rpartition("/")[2]: values for key, values in metrics.items()}

    def number(what: str) -> float | None:
        for key in _NAMES[what]:
            if key in told:
                with contextlib.suppress(ValueError):
                    return float(told[key])
            if series.get(key):
                return series[key][-1][1]
        return None

    def whole(what: str) -> int | None:
        value = number(what)
        return int(value) if value is not None and 0 < value < 1e15 else None

    def values(key: str) -> list[float]:
        return [value for _, value, _ in series.get(key, ()) if math.isfinite(value)]

    seconds, by_epoch = number("seconds"), values("train_s")
    if own := values("training_s"):
        seconds = own[-1] + sum(values("validation_s")[-1:])
    elif seconds is None and by_epoch:
        seconds = sum(by_epoch) + sum(values("val_s"))
    if seconds is None and began is not None and ended is not None:
        seconds = ended - began
    used = [v for key in series if re.search(r"gpu.*util", key) for v in values(key)]
    planned = whole("epochs")
    done = len(by_epoch) or len(values("val_loss")) or None
    devices, batch = whole("devices") or 1, whole("batch")
    return Run(
        source=source,
        job=next((told[key] for key in _NAMES["job"] if told.get(key)), job),
        name=name,
        devices=devices,
        nodes=whole("nodes"),
        seconds=seconds,
        epochs=planned if status == "complete" and planned else done,
        planned_epochs=planned,
        samples=whole("samples"),
        batch=batch,
        global_batch=whole("global_batch") or (batch * devices if batch else None),
        val_loss=min(values("val_loss"), default=None),
        val_acc=max(values("val_acc"), default=None),
        status=status,
        device=told.get("device"),
        utilisation=tuple(used),
        settings={
            _CALLED.get(key, key.replace("_", " ")): plain(told[key])
            for key in _COMPARED
            if told.get(key)
        }
        | ({"number of epochs": str(planned)} if planned else {}),
    )


# --- MLflow -------------------------------------------------------------------------------------


def mlflow_sqlite(path: Path) -> Iterator[Run]:
    """The runs of a database of MLflow, which is opened to be read only."""
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
                    "select key, value, timestamp, step from metrics "
                    "where run_uuid = ? and not is_nan order by step, timestamp",
                    (run,),
                ):
                    metrics.setdefault(key, []).append((step, value, time / 1e3))
                told: dict[str, str] = {}
                for kind in ("tags", "params"):
                    told |= dict(
                        db.execute(f"select key, value from {kind} where run_uuid = ?", (run,))
                    )
                yield _mlflow_run(path, run, name, told, metrics, status, began, ended)
    except sqlite3.Error as error:
        raise UsageError(f"{path} is not a database of MLflow: {error}") from error


def mlflow_files(folder: Path) -> Iterator[Run]:
    """The runs below a folder that an MLflow store of files keeps: EXPERIMENT/RUN/meta.yaml."""
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
            for kind in ("tags", "params")
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
) -> Run:
    times = (None if time is None else time / 1e3 for time in (began, ended))
    became = _MLFLOW.get(status, "unfinished")
    return tracked_run(
        f"{path} {run}", run[:8], name or run[:8], parameters, metrics, became, *times
    )


# --- Comet --------------------------------------------------------------------------------------


def comet_runs(value: Any, path: Path) -> Iterator[Run]:
    """Experiments of a JSON or the rows of a CSV.

    Either one entry for each value of a metric, ``metricName``, ``metricValue`` and ``timestamp``,
    with an ``experimentKey`` where there are several; or one entry for each experiment, with a
    field for each parameter and metric.
    """
    if isinstance(value, dict):
        value = [value] if "metrics" in value else list(value.values())
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
    else:
        for number, entry in enumerate(entries):
            if not any(name in _lower(entry) for name in _NAMES["devices"]):
                continue
            key = str(_field(entry, "experimentKey", "experiment_key", "Name") or number)
            yield _comet_row(path, key, entry)


def comet_archive(path: Path) -> Iterator[Run]:
    """The experiment of an archive that Comet writes where it has no network."""
    try:
        with zipfile.ZipFile(path) as archive:
            if "messages.json" not in archive.namelist():
                return
            about = json.loads(archive.read("experiment.json"))
            messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
        entry: dict[str, Any] = {"parameters": {}, "metrics": []}
        for message in messages:
            told = message["payload"]
            if message["type"] == "metric_msg":
                entry["metrics"].append({**told["metric"], "timestamp": told["local_timestamp"]})
            elif message["type"] == "parameter_msg":
                entry["parameters"][told["param"]["paramName"]] = told["param"]["paramValue"]
            elif message["type"] == "log_other":
                entry["parameters"].setdefault(told["key"], told["value"])
        yield from comet_runs([{**entry, "experimentKey": about.get("offline_id")}], path)
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} is not an archive of Comet: {error!r}") from error


def _comet_row(path: Path, key: str, entry: Mapping[str, Any]) -> Run:
    """An experiment in a row of fields."""
    told = {name: str(value) for name, value in entry.items() if value not in (None, "")}
    metrics: dict[str, Series] = {}
    for name in ("val_loss", "val_acc"):
        with contextlib.suppress(ValueError):
            if name in told:
                metrics[name] = [(0, float(told[name]), 0.0)]
    duration = told.get("duration") or told.get("Duration")
    ended = None
    if duration:
        ended = _duration(duration)
    return tracked_run(f"{path} {key}", key[:8], key, told, metrics, "complete", 0.0, ended)


def _comet_run(
    path: Path, key: str, name: str, told: Mapping[str, str], rows: Iterable[Mapping[str, Any]]
) -> Run:
    metrics: dict[str, Series] = {}
    times: list[float] = []
    for row in rows:
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
    began, ended = (min(times), max(times)) if len(times) > 1 else (None, None)
    return tracked_run(f"{path} {key}", key[:8], name, told, metrics, "complete", began, ended)


def _comet_parameters(entry: Mapping[str, Any]) -> dict[str, str]:
    told = entry.get("parameters") or entry.get("params") or {}
    if isinstance(told, Mapping):
        return {str(name): str(value) for name, value in told.items()}
    return {
        str(row.get("name")): str(row.get("valueCurrent", row.get("value")))
        for row in told
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
