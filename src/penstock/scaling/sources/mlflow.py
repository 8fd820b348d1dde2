"""Runs as MLflow keeps them."""

from __future__ import annotations

import contextlib
import math
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from ...base import UsageError
from ..runs import Status, TrainingRun
from .tracked import Say, Series, known_fields, tracked_run

_MLFLOW: Mapping[str, Status] = {"FINISHED": "complete", "FAILED": "crashed", "KILLED": "cancelled"}
_MLFLOW_CODES = {1: "RUNNING", 2: "SCHEDULED", 3: "FINISHED", 4: "FAILED", 5: "KILLED"}
"""A store of files writes the status of a run as its number."""


def mlflow_sqlite(path: Path, say: Say) -> Iterator[TrainingRun]:
    """The runs of a database of MLflow, which is opened to be read only."""
    return known_fields(_in_sqlite(path), path, say)


def _in_sqlite(path: Path) -> Iterator[TrainingRun | None]:
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


def mlflow_files(folder: Path, say: Say) -> Iterator[TrainingRun]:
    """The runs below a folder that an MLflow store of files keeps: EXPERIMENT/RUN/meta.yaml."""
    return known_fields(_in_files(folder), folder, say)


def _in_files(folder: Path) -> Iterator[TrainingRun | None]:
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
) -> TrainingRun | None:
    became = _MLFLOW.get(status, "unfinished")
    first, last = (None if time is None else time / 1e3 for time in (began, ended))
    source, name = f"{path} {run}", name or run[:8]
    return tracked_run(source, run[:8], name, parameters, metrics, became, first, last)
