"""Runs in files of trackers, and in tables.

    MLflow   the tables of its database, read without MLflow, which takes seconds to import and
             refuses a database of another release
    Comet    metrics as JSON or CSV, which it exports, and the archive of an offline experiment
    a CSV    of one's own, or one that a tracker exports, with a row for each run:

    devices, seconds            and nodes, batch, run, where they differ
    Name, State, Runtime, ...   W&B's table of runs, with configuration and summary as columns
    run_id, status, start_time, params.world_size, metrics.training_time, ...    MLflow's

A row's time is the training time that it has, else the time from the run's start to its end. A row
without a status is of a run that was complete, if its epochs do not say otherwise.
"""

from __future__ import annotations

import contextlib
import math
import re
import sqlite3
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

from ...base import UsageError, group_by, parse_seconds, parsed_json, well_formed
from ..runs import Status
from .tracked import NAMES_OF_TRACKERS, WHOLE, Series, TrackedRun


def mlflow_database(path: Path) -> Iterator[TrackedRun]:
    """The runs in a database of MLflow, which is opened read-only. Raises `UsageError` if it is not
    such a database."""
    uri = f"{path.resolve().as_uri()}?mode=ro"
    with (
        well_formed(f"{path} is not a database of MLflow", sqlite3.Error),
        contextlib.closing(sqlite3.connect(uri, uri=True)) as db,
    ):
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
    became = _STATUS.get(str(status).lower(), "unfinished")
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
            yield _experiment(path, key, key, _as_texts(rows[0]), rows)


def comet_archive(path: Path) -> list[TrackedRun]:
    """The offline experiment in a zip; none if the zip holds something else. The archive of a
    resumed part has no parameters, and so no number of devices. Raises `UsageError` if it is
    damaged."""
    payloads = defaultdict[str, list[dict[str, Any]]](list)
    with well_formed(f"{path} is not an archive of Comet", zipfile.BadZipFile, OSError):
        with zipfile.ZipFile(path) as archive:
            if "messages.json" not in archive.namelist():
                return []
            about = parsed_json(archive.read("experiment.json"))
            for line in archive.read("messages.json").splitlines():
                message = parsed_json(line)
                payloads[message["type"]].append(message["payload"])
        asked = (payload["param"] for payload in payloads["parameter_msg"])
        parameters = {param["paramName"]: str(param["paramValue"]) for param in asked}
        others = {payload["key"]: str(payload["value"]) for payload in payloads["log_other"]}
        metrics = [
            {**payload["metric"], "timestamp": payload["local_timestamp"]}
            for payload in payloads["metric_msg"]
        ]
        key = str(about.get("offline_id") or path.stem)
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
    return _as_texts(given) if isinstance(given, Mapping) else {}


def _as_texts(entry: Mapping[Any, Any]) -> dict[str, str]:
    return {str(name): str(value) for name, value in entry.items() if value not in (None, "")}


def _field(row: Mapping[str, Any], *fields: str) -> Any:
    """The first of these fields in a row, under any of its names."""
    names = (name for field in fields for name in _SPELLINGS[field])
    return next((row[name] for name in names if row.get(name) not in (None, "")), None)


_READ: Mapping[str, tuple[str, ...]] = (
    {
        "devices": ("devices", *NAMES_OF_TRACKERS["devices"]),
        "seconds": ("seconds", *NAMES_OF_TRACKERS["seconds"], "runtime", "_runtime", "duration"),
        "began": ("start_time",),
        "ended": ("end_time",),
        "run": ("run", "job", "name", "run_name", "experimentname", "run_id", "experimentkey"),
        "status": ("state", "status"),
    }
    | {
        name: NAMES_OF_TRACKERS[name]
        for name in ("global_batch", "samples", "epochs", "done", "val_loss", "val_acc")
    }
    | {
        "nodes": NAMES_OF_TRACKERS["nodes"][1:],
        "batch": ("batch", *NAMES_OF_TRACKERS["batch"]),
    }
)
"""The names of the columns that are read, in small letters, for each kind; the first counts."""
_COUNTS = ("devices", "nodes", "batch", "global_batch", "samples", "epochs", "done")
_WALL = ("runtime", "_runtime", "duration")
"""Times of a whole run, which is longer than its training."""
_STATUS: Mapping[str, Status] = {
    **{status: status for status in get_args(Status)},
    "finished": "complete", "failed": "crashed", "killed": "cancelled", "running": "unfinished",
    "scheduled": "unfinished", "pending": "unfinished", "preempting": "preempted",
}  # fmt: skip
_EMPTY = ("", "-", "nan", "none", "null")


def table_runs(rows: Sequence[Mapping[str, Any]], path: Path) -> list[TrackedRun]:
    """The runs of a table.

    Args:
        rows: The rows, each with a text for the name of each column.
        path: The file, for messages.

    Returns:
        A run for each row.

    Raises:
        UsageError: No column has devices or times, or a field cannot be read.
    """
    texts = [_texts(row, f"{path}, row {i}") for i, row in enumerate(rows, 1)]
    chosen = {kind: _column(texts, names) for kind, names in _READ.items()}
    spans = bool(chosen["began"] and chosen["ended"])
    for kind, there in (("devices", chosen["devices"]), ("seconds", chosen["seconds"] or spans)):
        if rows and not there:
            raise UsageError(f"{path} has no column of {kind}: {_columns_read(rows)}")
    names = [each.get(chosen["run"] or "", path.stem) for each in texts]
    often = Counter(names)
    return [
        _Row(f"{path}, row {i}", each, chosen).run(path, f"{name}-{i}" if often[name] > 1 else name)
        for i, (name, each) in enumerate(zip(names, texts, strict=True), 1)
    ]


def _texts(row: Mapping[Any, Any], where: str) -> dict[str, str]:
    """The fields of a row that are not empty, by the names of their columns in one spelling."""
    if None in row:
        raise UsageError(f"{where} has more fields than the table has columns")
    texts: dict[str, str] = {}
    for name, value in row.items():
        column = re.sub(r"^(?:params|metrics|config|summary)\.", "", str(name).strip().lower())
        column = column.replace("tags.mlflow.runname", "run_name").replace(" ", "_")
        text = "" if value is None else str(value).strip()
        if text.lower() not in _EMPTY:
            texts.setdefault(column.rpartition("/")[2], text)
    if "planned_epochs" in texts:  # our own table, whose epochs are those done
        texts["epochs_done"] = texts.get("epochs", "0")
        texts["epochs"] = texts["planned_epochs"]
    return texts


def _column(texts: Sequence[Mapping[str, str]], names: Sequence[str]) -> str | None:
    return next((name for name in names if any(name in each for each in texts)), None)


def _columns_read(rows: Sequence[Mapping[str, Any]]) -> str:
    ways = (f" (or {', '.join(names[1:])})" * (len(names) > 1) for names in _READ.values())
    read = ", ".join(names[0] + way for names, way in zip(_READ.values(), ways, strict=True))
    return f"it has {', '.join(map(str, rows[0]))}, and of a table of runs are read {read}"


@dataclass(frozen=True)
class _Row:
    where: str
    texts: Mapping[str, str]
    columns: Mapping[str, str | None]
    """The column of each kind; None if the table has none."""

    def run(self, path: Path, name: str) -> TrackedRun:
        times = NAMES_OF_TRACKERS["seconds"]
        parameters = {"job_id": name[:40]}
        parameters |= {key: text for key, text in self.texts.items() if key not in times}
        parameters |= {NAMES_OF_TRACKERS[kind][0]: text for kind, text in self._counts()}
        scores = ((kind, self._of(kind)) for kind in ("val_loss", "val_acc"))
        parameters |= {kind: text.replace(",", ".") for kind, text in scores if text}
        column, began, ended = self.columns["seconds"], None, None
        if column is None:
            began, ended = self._span()
        elif (text := self._of("seconds")) is not None:
            parameters[times[0]] = self._seconds(text)
        if column is None or column in _WALL:
            parameters[WHOLE] = column or "end_time - start_time"
        return TrackedRun(path, name, name, parameters, {}, self._status(), began, ended)

    def _of(self, kind: str) -> str | None:
        return self.texts.get(self.columns[kind] or "")

    def _refuse(self, kind: str, must: str) -> UsageError:
        read = f"{self.columns[kind]} is {self._of(kind)!r}"
        return UsageError(f"{self.where}: {read}, which is no {must}")

    def _counts(self) -> Iterator[tuple[str, str]]:
        for kind in _COUNTS:
            text = self._of(kind)
            if text is None:
                continue
            if not re.fullmatch(r"\d{1,15}(\.0*)?", text) or (float(text) < 1 and kind != "done"):
                raise self._refuse(kind, "whole number above 0")
            yield kind, text

    def _span(self) -> list[float | None]:
        """The Unix times of its start and its end, each None if it is not there."""
        times: list[datetime | None] = []
        for kind in ("began", "ended"):
            text = self._of(kind)
            try:
                times.append(None if text is None else datetime.fromisoformat(text))
            except ValueError:
                raise self._refuse(kind, "time such as 2026-01-31T12:00:00Z") from None
        if len({time.tzinfo is None for time in times if time}) > 1:
            raise self._refuse("ended", "time in the zone of the start")
        return [
            None if time is None else time.replace(tzinfo=time.tzinfo or UTC).timestamp()
            for time in times
        ]

    def _seconds(self, text: str) -> str:
        try:
            return repr(parse_seconds(text))
        except ValueError:
            raise self._refuse("seconds", "time such as 362.45, 1.5 h or 0:06:02") from None

    def _status(self) -> Status | None:
        """None if the run's epochs say whether it was complete."""
        word = self._of("status")
        if word is None:
            by_epochs = self._of("done") or (
                self._of("epochs") and self.columns["seconds"] in _WALL
            )
            return None if by_epochs else "complete"
        if word.lower() not in _STATUS:
            raise self._refuse("status", f"status ({', '.join(_STATUS)})")
        return _STATUS[word.lower()]
