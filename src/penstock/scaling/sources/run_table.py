"""Runs from a table with a row for each: a CSV of one's own, or one that a tracker exports.

    devices, seconds            and nodes, batch, run, where they differ
    Name, State, Runtime, ...   W&B's table of runs, with configuration and summary as columns
    run_id, status, start_time, params.world_size, metrics.training_time, ...    MLflow's

A row's time is the training time that it has, else the time from the run's start to its end. A row
without a status is of a run that was complete, if its epochs do not say otherwise.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, get_args

from ...base import UsageError, parse_seconds
from ..runs import Status
from .tracked import NAMES_OF_TRACKERS, WHOLE, TrackedRun

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
        column, began, ended = self.columns["seconds"], None, None
        if column is None:
            began, ended = _time(self._of("began")), _time(self._of("ended"))
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


def _time(text: str | None) -> float | None:
    """Unix time; None if there is none, or if it is written in another way."""
    try:
        return None if text is None else datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
