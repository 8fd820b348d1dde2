"""What trackers tell of a run that is not so, or not whole."""

from __future__ import annotations

import json
import sqlite3
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from penstock.scaling.runs import TrainingRun
from penstock.scaling.sources.comet import comet_archive, comet_experiment, comet_runs
from penstock.scaling.sources.mlflow import mlflow_database, mlflow_files
from penstock.scaling.sources.tracked import TrackedRun, training_runs
from penstock.scaling.tables import run_mark

ASKED = {"world_size": "2", "batch_size": "8", "epochs": "3", "device": "auto"}


def read(runs: Iterable[TrackedRun]) -> list[TrainingRun]:
    return list(training_runs(runs, Path("tracker"), lambda sentence: None))


def database(path: Path, tags: dict[str, str]) -> Path:
    with sqlite3.connect(path) as db:
        db.executescript(
            "pragma synchronous = off;"
            "create table runs (run_uuid, name, status, start_time, end_time, lifecycle_stage);"
            "create table params (key, value, run_uuid); create table tags (key, value, run_uuid);"
            "create table metrics (key, value, timestamp, run_uuid, step, is_nan);"
            "insert into runs values ('r', 'a', 'FINISHED', 0, 9500, 'active');"
        )
        for table, values in (("params", ASKED), ("tags", tags)):
            db.executemany(
                f"insert into {table} values (?, ?, 'r')", [(k, v) for k, v in values.items()]
            )
    db.close()
    return path


def folder(path: Path, tags: dict[str, str]) -> Path:
    for kind, values in (("params", ASKED), ("tags", tags)):
        (path / "run" / kind).mkdir(parents=True)
        for name, value in values.items():
            (path / "run" / kind / name).write_text(value)
    (path / "run" / "meta.yaml").write_text("status: 3\nstart_time: 0\nend_time: 9500\n")
    return path


def archive(path: Path, tags: dict[str, str]) -> Path:
    messages: list[dict[str, Any]] = [
        {"type": "parameter_msg", "payload": {"param": {"paramName": k, "paramValue": v}}}
        for k, v in ASKED.items()
    ]
    messages += [{"type": "log_other", "payload": {"key": k, "value": v}} for k, v in tags.items()]
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("experiment.json", "{}")
        file.writestr("messages.json", "\n".join(map(json.dumps, messages)))
    return path


@pytest.mark.parametrize(("tags", "device"), [({"device": "cpu"}, "cpu"), ({}, None)])
def test_the_device_that_was_found_counts_and_not_the_one_asked_for(
    tmp_path: Path, tags: dict[str, str], device: str | None
) -> None:
    runs = read([
        *mlflow_database(database(tmp_path / "a.db", tags)),
        *mlflow_files(folder(tmp_path / "mlruns", tags)),
        comet_experiment(comet_archive(archive(tmp_path / "a.zip", tags))),
    ])  # fmt: skip
    assert [run.device for run in runs] == [device] * 3
    assert [run.devices for run in runs] == [2] * 3


# --- Comet tells when each metric came ------------------------------------------------------------


def scored(epochs: int, *, first: float | None = None, planned: int = 3) -> list[TrainingRun]:
    """Of epochs of 10 s, each with a score at its end; ``first``: when something came before."""
    rows = [
        {"metricName": "val_loss", "metricValue": 0.5, "timestamp": 1e12 + 1e4 * end, "step": end}
        for end in range(1, epochs + 1)
    ]
    if first is not None:
        at = 1e12 + 1e3 * first
        rows.append({"metricName": "train_loss", "metricValue": 1, "timestamp": at, "step": 1})
    experiment = {"parameters": {"num_gpus": 2, "epochs": planned}, "metrics": rows}
    return read(comet_runs([experiment], Path("c.json")))


def test_the_epoch_before_the_first_metric_is_not_in_the_time() -> None:
    (run,) = scored(3, first=0)
    assert (run.seconds, run.epochs, run.complete) == (pytest.approx(30), 3, True)
    # The mean loss of an epoch may come a moment before its score.
    for first in (None, 9.8):
        (run,) = scored(3, first=first)
        assert run.seconds == pytest.approx(20, abs=0.3)
        assert run.per_epoch == pytest.approx(10, abs=0.2)
        assert not run.complete
        assert run_mark(run).endswith("its time is of 2 of 3 epochs; not compared.")
    (run,) = scored(1, first=10.0, planned=1)
    assert (run.seconds, run.complete) == (None, False)


@pytest.mark.parametrize(
    "value, runs",
    [
        (None, 0),
        (5, 0),
        ({"x": {"metrics": [], "params": 5}}, 0),
        ({"x": {"metrics": [3, None], "params": {"num_gpus": 2}}}, 1),
        ({"epoch": {"experimentKey": {}, "metricName": ":", "metricValue": 1, "num_gpus": 2}}, 1),
    ],
)
def test_what_is_no_export_of_comet_is_no_defect_of_ours(value: object, runs: int) -> None:
    of_comet = read(comet_runs(value, Path("c.json")))
    assert [run.complete for run in of_comet] == [False] * runs
