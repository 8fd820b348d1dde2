"""Runs as MLflow and Comet keep them."""

import csv
import json
import sqlite3
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from penstock.base.errors import UsageError
from penstock.scaling import TrainingRun, read_runs, studies
from penstock.scaling.tables import run_mark

from .kit import results, write

SCHEMA = """
pragma synchronous = off;
create table runs (run_uuid, name, status, start_time, end_time, lifecycle_stage);
create table metrics (key, value, timestamp, run_uuid, step, is_nan);
create table params (key, value, run_uuid);
create table tags (key, value, run_uuid);
insert into runs values ('gone', 'gone', 'FINISHED', 0, 1, 'deleted');
"""


def mlflow_database(path: Path, tags: Mapping[str, str] = MappingProxyType({})) -> None:
    with sqlite3.connect(path) as db:
        db.executescript(SCHEMA)
        for n, seconds in ((1, 100.5), (4, 30.25)):
            run = f"run{n}" * 8
            about = (run, f"spiral_{n}gpu", "FINISHED", 0, 1, "active")
            db.execute("insert into runs values (?,?,?,?,?,?)", about)
            params = {"world_size": n, "batch_size": 32, "epochs": 2, "num_samples": 10000,
                      "learning_rate": 0.001, "device": "auto"}  # fmt: skip
            for table, values in (("params", params), ("tags", tags | {"launch.job_id": 40 + n})):
                rows = [(name, str(value), run) for name, value in values.items()]
                db.executemany(f"insert into {table} values (?,?,?)", rows)
            rows = [("x", 0.0, 0, 1), ("system/gpu0_util_percent", 90.0, 0, 0)]
            for e in range(2):
                rows += [("train_s", seconds / 2, e, 0), ("val_loss", 0.5 - e / 10, e, 0),
                         ("val_acc", 0.5 + e / 10, e, 0)]  # fmt: skip
            db.executemany(f"insert into metrics values (?,?,0,'{run}',?,?)", rows)
    db.close()


def check_tracked(runs: list[TrainingRun]) -> None:
    assert [(r.devices, r.epochs, r.batch, r.global_batch) for r in runs] == [
        (1, 2, 32, 32), (4, 2, 32, 128),
    ]  # fmt: skip
    assert [r.seconds for r in runs] == [100.5, 30.25]
    assert [(r.val_loss, r.val_acc) for r in runs] == [(0.4, 0.6)] * 2
    (study,) = studies(runs, False)
    assert study.kind == "hybrid"


def test_a_database_of_mlflow(tmp_path) -> None:
    mlflow_database(tmp_path / "mlflow.db")
    runs = read_runs([tmp_path / "mlflow.db"])
    check_tracked(runs)
    assert [r.job for r in runs] == ["41", "44"]
    assert runs[0].utilisation == (90.0,)
    assert runs == read_runs([tmp_path])


@pytest.mark.parametrize("change", ["key = cast(x'ff' as text)", "timestamp = 'noon'"])
def test_a_damaged_database_of_mlflow_is_refused(tmp_path, change: str) -> None:
    mlflow_database(tmp_path / "mlflow.db")
    with sqlite3.connect(tmp_path / "mlflow.db") as db:
        db.execute(f"update metrics set {change}")
    db.close()
    with pytest.raises(UsageError, match=r"mlflow\.db is not a database of MLflow"):
        read_runs([tmp_path / "mlflow.db"])


def test_a_loss_that_mlflow_keeps_as_nan_is_told(tmp_path) -> None:
    path = tmp_path / "mlflow.db"
    mlflow_database(path)
    with sqlite3.connect(path) as db:
        db.execute("update metrics set value = 0, is_nan = 1 where key = 'val_loss' and step = 1")
        db.execute("update params set value = '5' where key = 'epochs'")
    db.close()
    runs = read_runs([path])
    assert [(r.diverged, r.epochs, r.val_loss, r.complete) for r in runs] == [
        (True, 2, 0.5, False)
    ] * 2, "they stopped early, too"


def comet_rows(key: str, seconds: float) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [{
        "experimentKey": key, "metricName": "train_loss_step", "metricValue": "0.7",
        "timestamp": 1_700_000_000_000, "step": 0, "epoch": 0,
    }]  # fmt: skip
    for epoch in range(2):
        time = 1_700_000_000_000 + 1000 * (epoch + 1) / 2 * seconds
        for name, value in (("val_loss", 0.5 - epoch / 10), ("val_acc", 0.5 + epoch / 10)):
            rows.append({
                "experimentKey": key, "metricName": name, "metricValue": str(value),
                "timestamp": time, "step": epoch, "epoch": epoch,
            })  # fmt: skip
    return rows


PARAMETERS = {"batch_size": 32, "max_epochs": 2, "num_samples": 10000, "learning_rate": 0.001}


def test_metrics_of_comet_as_json(tmp_path) -> None:
    """As its API gives them, with an experiment's parameters beside them."""
    experiments = [
        {
            "experimentKey": f"key{n}",
            "parameters": [{"name": k, "valueCurrent": str(v)}
                           for k, v in {**PARAMETERS, "num_gpus": n}.items()],
            "metrics": comet_rows(f"key{n}", seconds),
        }
        for n, seconds in ((1, 100.5), (4, 30.25))
    ]  # fmt: skip
    (path,) = write(tmp_path, {"comet.json": json.dumps(experiments)})
    check_tracked(read_runs([path]))


def test_metrics_of_comet_as_rows(tmp_path) -> None:
    path = tmp_path / "metrics.csv"
    rows = [
        {**row, **PARAMETERS, "num_gpus": n}
        for n, seconds in ((1, 100.5), (4, 30.25))
        for row in comet_rows(f"key{n}", seconds)
    ]
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    check_tracked(read_runs([path]))


def test_experiments_of_comet_as_rows(tmp_path) -> None:
    text = (
        "Name,num_gpus,batch_size,max_epochs,num_samples,duration,val_loss,val_acc\n"
        "spiral_1gpu,1,32,2,10000,00:01:40,0.4,0.6\nspiral_4gpu,4,32,2,10000,30.25,0.4,0.6\n"
    )
    (path,) = write(tmp_path, {"experiments.csv": text})
    runs = read_runs([path])
    assert [(r.name, r.devices, r.seconds) for r in runs] == [
        ("spiral_1gpu", 1, 100.0), ("spiral_4gpu", 4, 30.25),
    ]  # fmt: skip


def archive(
    path: Path, key: str, params: Mapping[str, Any], rows: list[dict[str, Any]],
    others: Mapping[str, Any] = MappingProxyType({}),
) -> None:  # fmt: skip
    """As Comet writes it offline: messages, a line each."""
    messages: list[dict[str, Any]] = [
        {"type": "log_other", "payload": {"key": k, "value": v}} for k, v in others.items()
    ]
    messages += [
        {"type": "parameter_msg", "payload": {"param": {"paramName": k, "paramValue": str(v)}}}
        for k, v in params.items()
    ]
    for row in rows:
        metric = {"metricName": row["name"], "metricValue": row["value"], "step": row["step"]}
        payload = {"metric": metric, "local_timestamp": row["time"]}
        messages.append({"type": "metric_msg", "payload": payload})
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("experiment.json", json.dumps({"offline_id": key}))
        file.writestr("messages.json", "\n".join(map(json.dumps, messages)))


def epochs_told(first: int, last: int) -> list[dict[str, Any]]:
    """Of our own training: seconds of each epoch and its score."""
    times = {"train_s": 10.25, "val_s": 1.0}
    return [
        {"name": name, "value": value, "step": 10 * epoch, "time": 1e12 + 1000 * epoch}
        for epoch in range(first, last)
        for name, value in {**times, "val_loss": 0.5}.items()
    ]


def test_an_offline_archive_of_comet(tmp_path) -> None:
    for n, seconds in ((1, 100.5), (4, 30.25)):
        rows = [
            {"name": row["metricName"], "value": row["metricValue"], "step": row["step"],
             "time": row["timestamp"]}
            for row in comet_rows("x", seconds)
        ]  # fmt: skip
        asked = {**PARAMETERS, "world_size": n}
        archive(tmp_path / f"{n}.zip", f"key{n}", asked, rows, {"launch.nodes": 1})
    runs = read_runs([tmp_path])
    check_tracked(runs)
    assert [r.nodes for r in runs] == [1, 1]
    (tmp_path / "training_results.json").write_text(json.dumps(results(1, 9.123)))
    assert [r.seconds for r in read_runs([tmp_path])] == [9.623]


@pytest.mark.parametrize(("tags", "device"), [({"device": "cpu"}, "cpu"), ({}, None)])
def test_the_device_that_was_found_counts_and_not_the_one_asked_for(tmp_path, tags, device) -> None:
    mlflow_database(tmp_path / "mlflow.db", tags)
    asked = {"world_size": 2, "epochs": 3, "device": "auto"}
    archive(tmp_path / "a.zip", "k1", asked, epochs_told(0, 3), tags)
    assert [run.device for run in read_runs([tmp_path])] == [device] * 3


def test_an_experiment_of_comet_that_was_stopped_is_partial(tmp_path) -> None:
    archive(tmp_path / "a.zip", "k1", {"world_size": 2, "epochs": 4}, epochs_told(0, 3))
    (run,) = read_runs([tmp_path / "a.zip"])
    assert (run.epochs, run.planned_epochs, run.status) == (3, 4, "unfinished")
    assert run.seconds == pytest.approx(3 * 11.25)
    assert not run.complete
    archive(tmp_path / "b.zip", "k2", {"world_size": 2}, [])
    (run,) = read_runs([tmp_path / "b.zip"])
    assert run.status == "unknown" and not run.complete
    assert run_mark(run) == "* k2: does not say how many epochs it did; not compared."


def test_a_resumed_part_of_an_experiment_is_no_run_of_its_own(tmp_path) -> None:
    """It has no parameters; the first part broke off and is not compared."""
    archive(tmp_path / "1.zip", "k1", {"world_size": 2, "epochs": 4}, epochs_told(0, 3))
    archive(tmp_path / "2.zip", "k1", {}, epochs_told(2, 4))
    said: list[str] = []
    (run,) = read_runs([tmp_path], said.append)
    assert (run.devices, run.epochs, run.complete) == (2, 3, False)
    assert said == [f"{tmp_path / '2.zip'}: 1 run without a number of devices, left out: k1"]
    # The own end of a run that could not count its epochs.
    rows = [{"name": "session_s", "value": 1.0, "step": 9, "time": 2e12}, *epochs_told(0, 3)]
    archive(tmp_path / "1.zip", "k1", {"world_size": 2, "max_steps": 9}, rows)
    (run,) = read_runs([tmp_path])
    assert (run.planned_epochs, run.complete) == (None, True)


def test_an_archive_with_an_impossible_time_hides_nothing_else(tmp_path) -> None:
    archive(tmp_path / "bad.zip", "k1", {"world_size": 2, "training_time": -1}, [])
    with pytest.raises(UsageError, match=r"bad.zip k1: training_time: '-1' is not a time"):
        read_runs([tmp_path / "bad.zip"])
    archive(tmp_path / "good.zip", "k2", {"world_size": 2, "epochs": 3}, epochs_told(0, 3))
    said: list[str] = []
    assert [run.job for run in read_runs([tmp_path], said.append)] == ["k2"]
    (sentence,) = said
    assert "bad.zip k1: training_time: '-1' is not a time" in sentence
    assert sentence.endswith("; it is passed over")


def test_runs_of_an_unknown_number_of_devices_are_left_out_with_a_word(tmp_path) -> None:
    archive(tmp_path / "1.zip", "k1", {"world_size": 2, "epochs": 3}, epochs_told(0, 3))
    archive(tmp_path / "2.zip", "k2", {"epochs": 3}, epochs_told(0, 3))
    mlflow_database(tmp_path / "mlflow.db")
    with sqlite3.connect(tmp_path / "mlflow.db") as db:
        db.execute("delete from params where key = 'world_size' and value = '1'")
    db.close()
    said: list[str] = []
    assert [run.devices for run in read_runs([tmp_path], said.append)] == [2, 4]
    assert said == [
        f"{tmp_path / '2.zip'}: 1 run without a number of devices, left out: k2",
        f"{tmp_path / 'mlflow.db'}: 1 run without a number of devices, left out: spiral_1gpu",
    ]
