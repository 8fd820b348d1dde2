"""Runs as MLflow and Comet keep them.

MLflow   the tables of its database, read without MLflow, which takes seconds to import and
         refuses a database of another release
Comet    metrics as JSON or CSV, which it exports, and the archive of an offline experiment
"""

from __future__ import annotations

import contextlib
import json
import math
import sqlite3
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ...base import UsageError, group_by
from ..runs import Status
from .tracked import Series, TrackedRun

_STATUS: Mapping[str, Status] = {
    "FINISHED": "complete", "FAILED": "crashed", "KILLED": "cancelled",
}  # fmt: skip


def mlflow_database(path: Path) -> Iterator[TrackedRun]:
    """The runs in a database of MLflow, which is opened read-only. Raises `UsageError` if it is not
    such a database."""
    uri = f"{path.resolve().as_uri()}?mode=ro"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as db:
            for run, name, status, *times in db.execute(
                "select run_uuid, name, status, start_time, end_time from runs "
                "where lifecycle_stage = 'active'"
            ).fetchall():
                metrics: dict[str, Series] = {}
                for key, value, time, step in db.execute(
                    "select key, case when is_nan then null else value end, timestamp, step "
                    "from metrics where run_uuid = ? order by step, timestamp",
                    (run,),
                ):
                    number = math.nan if value is None else value
                    metrics.setdefault(key, []).append((step, number, time / 1e3))
                parameters, tags = (
                    dict(db.execute(f"select key, value from {table} where run_uuid = ?", (run,)))
                    for table in ("params", "tags")
                )
                yield _tracked(path, run, name, parameters, tags, metrics, status, *times)
    except sqlite3.Error as error:
        raise UsageError(f"{path} is not a database of MLflow: {error}") from error


def _tracked(
    path: Path,
    run: str,
    name: object,
    parameters: Mapping[str, str],
    tags: Mapping[str, str],
    metrics: Mapping[str, Series],
    status: object,
    *milliseconds: object,
) -> TrackedRun:
    became = _STATUS.get(str(status), "unfinished")
    began, ended = (time / 1e3 if isinstance(time, int | float) else None for time in milliseconds)
    title = str(name or run[:8])
    texts = {**parameters, **tags}
    return TrackedRun(path, run, title, texts, metrics, became, began, ended, tags=tags)


_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "experiment": ("experimentKey", "experiment_key", "experiment"),
    "name": ("experimentName", "name", "Name"),
    "parameters": ("parameters", "params"),
    "metric": ("metricName", "metric"),
    "value": ("metricValue", "value"),
    "setting": ("valueCurrent", "value"),
    "time": ("timestamp",),
    "step": ("step", "epoch"),
}
"""The names of a field in Comet's API, its exports and its web page."""


def comet_runs(value: Any, path: Path) -> Iterator[TrackedRun]:
    """Experiments of a JSON or the rows of a CSV; none if it has neither of these forms.

    There is either one entry for each value of a metric (``metricName``, ``metricValue``,
    ``timestamp``, and ``experimentKey`` if there are several experiments), or one entry for each
    experiment, with a field for each parameter and metric.
    """
    if isinstance(value, dict):
        value = [value] if "metrics" in value else list(value.values())
    entries = (
        [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    )
    if not entries:
        return
    if all(isinstance(entry.get("metrics"), list) for entry in entries):
        for number, entry in enumerate(entries):
            key = str(_field(entry, "experiment", "name") or f"{path.stem}-{number}")
            name = str(_field(entry, "name") or key)
            yield _experiment(path, key, name, _parameters(entry), entry["metrics"])
    elif all(_field(entry, "metric") for entry in entries):
        by_key = group_by(entries, lambda entry: str(_field(entry, "experiment") or path.stem))
        for key, rows in by_key.items():
            yield _experiment(path, key, key, _texts(rows[0]), rows)


def comet_archive(path: Path) -> list[TrackedRun]:
    """The offline experiment in a zip; none if the zip holds something else. The archive of a
    resumed part has no parameters, and so no number of devices. Raises `UsageError` if it is
    damaged."""
    payloads = defaultdict[str, list[dict[str, Any]]](list)
    try:
        with zipfile.ZipFile(path) as archive:
            if "messages.json" not in archive.namelist():
                return []
            about = json.loads(archive.read("experiment.json"))
            for line in archive.read("messages.json").splitlines():
                message = json.loads(line)
                payloads[message["type"]].append(message["payload"])
        asked = (payload["param"] for payload in payloads["parameter_msg"])
        parameters = {param["paramName"]: str(param["paramValue"]) for param in asked}
        others = {payload["key"]: str(payload["value"]) for payload in payloads["log_other"]}
        metrics = [
            {**payload["metric"], "timestamp": payload["local_timestamp"]}
            for payload in payloads["metric_msg"]
        ]
        key = str(about.get("offline_id") or path.stem)
    except (zipfile.BadZipFile, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} is not an archive of Comet: {error!r}") from error
    return [_experiment(path, key, key, parameters | others, metrics)]


def _experiment(
    path: Path, key: str, name: str, parameters: Mapping[str, str], rows: Iterable[Any]
) -> TrackedRun:
    metrics = defaultdict[str, Series](list)
    for row in rows:
        # Skip entries that are no row or have no number.
        with contextlib.suppress(AttributeError, TypeError, ValueError, OverflowError):
            number, time = float(_field(row, "value")), float(_field(row, "time") or "nan")
            step = int(float(_field(row, "step") or 0))
            # Comet writes times in milliseconds.
            time = time / 1e3 if time > 1e11 else time
            metrics[str(_field(row, "metric", "name"))].append((step, number, time))
    for series in metrics.values():
        series.sort(key=lambda point: point[2] if math.isfinite(point[2]) else 0.0)
    times = [time for points in metrics.values() for _, _, time in points if math.isfinite(time)]
    about = (path, key, name, parameters, metrics, None)
    if len(times) < 2:
        return TrackedRun(*about)
    began, ended = min(times), max(times)
    return TrackedRun(*about, began, ended, _first_epoch_is_missing(metrics, began))


def _first_epoch_is_missing(metrics: Mapping[str, Series], began: float) -> bool:
    """Whether the first score came less than half an epoch after the first metric."""
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


def _parameters(entry: Mapping[str, Any]) -> dict[str, str]:
    """The parameters of an entry, a mapping or rows of a name and a value."""
    given = _field(entry, "parameters")
    if isinstance(given, list):
        rows = [row for row in given if isinstance(row, Mapping)]
        given = {_field(row, "name"): _field(row, "setting") for row in rows}
    return _texts(given) if isinstance(given, Mapping) else {}


def _texts(entry: Mapping[Any, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in entry.items() if value not in (None, "")}


def _field(row: Mapping[str, Any], *fields: str) -> Any:
    """The first of these fields in a row, under any of its names."""
    names = (name for field in fields for name in _SPELLINGS[field])
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)
