"""Runs as MLflow keeps them: the tables of a database, or a folder for each run.

Both are read without MLflow, so it need not be installed. MLflow takes seconds to import, refuses a
database of another release, and refuses file stores unless a variable is set.
"""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from ...base import UsageError
from ..runs import Status
from .tracked import Series, TrackedRun

_STATUS: Mapping[str, Status] = {
    "FINISHED": "complete", "FAILED": "crashed", "KILLED": "cancelled",
    "3": "complete", "4": "crashed", "5": "cancelled",
}  # fmt: skip
"""The status of a run, which a database keeps as a word and a store of files as a number."""


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


def mlflow_files(folder: Path) -> Iterator[TrackedRun]:
    """The runs of MLflow's store of files below a folder: EXPERIMENT/RUN/meta.yaml.

    Raises:
        UsageError: The ``meta.yaml`` of a run cannot be read.
    """
    for meta in sorted(folder.glob("**/meta.yaml")):
        home = meta.parent
        if not (home / "params").is_dir() and not (home / "metrics").is_dir():
            continue  # it describes an experiment
        try:
            about = yaml.safe_load(meta.read_text(errors="replace"))
        except (OSError, yaml.YAMLError) as error:
            raise UsageError(f"{meta} cannot be read: {error}") from error
        if not isinstance(about, dict) or about.get("lifecycle_stage") == "deleted":
            continue
        texts = {kind: dict(_texts(home / kind)) for kind in ("params", "tags", "metrics")}
        metrics = {name: list(_points(text)) for name, text in texts["metrics"].items()}
        parameters, tags = (
            {name: text.strip() for name, text in texts[kind].items()}
            for kind in ("params", "tags")
        )
        yield _tracked(
            home,
            home.name,
            about.get("run_name") or home.name,
            parameters,
            tags,
            metrics,
            about.get("status"),
            about.get("start_time"),
            about.get("end_time"),
        )


def _texts(folder: Path) -> Iterator[tuple[str, str]]:
    for file in folder.glob("**/*"):
        if file.is_file():
            yield str(file.relative_to(folder)), file.read_text(errors="replace")


def _points(text: str) -> Iterator[tuple[int, float, float]]:
    """The points of a metric, from lines of ``milliseconds value step``."""
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            time, value, step = line.split()[:3]
            yield int(step), float(value), float(time) / 1e3


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
