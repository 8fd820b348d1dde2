"""Runs as MLflow keeps them in the tables of a database.

It is read without MLflow, which takes seconds to import and refuses
a database of another release.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

from ...base import UsageError
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
