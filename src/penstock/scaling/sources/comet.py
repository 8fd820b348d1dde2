"""Runs as Comet exports them."""

from __future__ import annotations

import contextlib
import json
import math
import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base import UsageError
from ..runs import TrainingRun
from .tracked import NAMES_OF_TRACKERS, Say, Series, known_fields, tracked_run


def comet_runs(value: Any, path: Path, say: Say) -> Iterator[TrainingRun]:
    """Experiments of a JSON or the rows of a CSV.

    Either one entry for each value of a metric, ``metricName``, ``metricValue`` and ``timestamp``,
    with an ``experimentKey`` where there are several; or one entry for each experiment, with a
    field for each parameter and metric.
    """
    return known_fields(_in_export(value, path), path, say)


def _in_export(value: Any, path: Path) -> Iterator[TrainingRun | None]:
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
    elif any(name in _lower(entry) for entry in entries for name in NAMES_OF_TRACKERS["devices"]):
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


def comet_experiments(archives: Iterable[Archive], say: Say) -> Iterator[TrainingRun]:
    """A run for each experiment, the parts of one that went on taken together."""
    parts: dict[str, list[Archive]] = {}
    for archive in archives:
        parts.setdefault(archive.key, []).append(archive)
    for key, own in parts.items():
        told = {name: value for part in own for name, value in part.parameters.items()}
        rows = [row for part in own for row in part.metrics]
        path = own[0].path
        # Between its parts it did not train, so its first and last moment tell nothing.
        yield from known_fields([_comet_run(path, key, key, told, rows, len(own) == 1)], path, say)


def _comet_row(path: Path, key: str, entry: Mapping[str, Any]) -> TrainingRun | None:
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
) -> TrainingRun | None:
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
