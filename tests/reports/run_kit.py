"""Runs as they lie on disk, of every source that a page of runs reads."""

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.instruments import Ledger, Record
from penstock.reports.runs.catalogue import Catalogue
from penstock.scaling import runs_of_others

from ..scaling.kit import results
from ..scaling.kit import run_folder as bare_training


def ledger_of(folder: Path, records: Sequence[Record]) -> Path:
    for record in records:
        Ledger(folder).append(record)
    return folder


def catalogue_of(*paths: Path) -> Catalogue:
    return Catalogue(paths, runs_of_others)


STEPS = "step,epoch,samples,loss,step_s,data_wait_s,transfer_s,forward_s,backward_s,"
STEPS += "communication_s,optimizer_s\n"


def steps_of(count: int, first: int = 1, per_epoch: int = 4) -> str:
    """Rows of steps of 0.5 s, whose loss is one over their number."""
    return "".join(
        f"{n},{(n - 1) // per_epoch},{n * 32},{1 / n},0.5,0.1,,0.2,0.1,,0.1\n"
        for n in range(first, first + count)
    )


def training(folder: Path, devices: int = 1, seconds: float = 10.0, **args: Any) -> Path:
    """The folder of a training of 3 epochs, of 4 steps each."""
    document = results(devices, seconds, job=folder.name)
    for epoch, row in enumerate(document["history"]):
        row |= {
            "step": 4 * (epoch + 1),
            "train_s": 2.0,
            "val_s": 1.0,
            "train_loss": 1 / (epoch + 1),
        }
    document["epoch_times_s"] = [3.0] * 3
    bare_training(folder, document, **{"workload": "spiral", "batch_size": 32, **args})
    (folder / "steps").mkdir()
    (folder / "steps" / "rank0.csv").write_text(STEPS + steps_of(12))
    return folder


def begun(folder: Path, steps: int = 2, **args: Any) -> Path:
    """The folder of a training that goes on: no epoch is over."""
    (folder / "steps").mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"workload": "spiral", "epochs": 3} | args))
    (folder / "steps" / "rank0.csv").write_text(STEPS + steps_of(steps))
    return folder


def machine_of_training(folder: Path, began: float = 1e9) -> None:
    """The readings of a tracked training's machine."""
    rows = [
        {"time": began + n, "cpu_percent": 50.0 + n, "gpus": [], "gauges": {"step": n}}
        for n in range(3)
    ]
    (folder / "track").mkdir()
    lines = "".join(json.dumps(line) + "\n" for line in ({"schema": 1}, *rows))
    (folder / "track" / "metrics.jsonl").write_text(lines)


def mlflow_store(path: Path, runs: int = 2) -> Path:
    """A database of MLflow: its tables, as far as they are read."""
    with sqlite3.connect(path) as db:
        db.executescript(
            "create table runs (run_uuid, name, status, start_time, end_time, lifecycle_stage);"
            "create table metrics (key, value, timestamp, step, run_uuid, is_nan);"
            "create table params (key, value, run_uuid);"
            "create table tags (key, value, run_uuid);"
        )
        for n in range(runs):
            key = f"{n:032x}"
            row = (key, f"tracked {n}", "FINISHED", 1000, 61_000, "active")
            db.execute("insert into runs values (?, ?, ?, ?, ?, ?)", row)
            for step in range(5):
                metric = ("val_loss", 1 / (step + 1 + n), 1000 + 10_000 * step, step, key, False)
                db.execute("insert into metrics values (?, ?, ?, ?, ?, ?)", metric)
                metric = ("epoch", float(step // 2), 1000, step, key, False)
                db.execute("insert into metrics values (?, ?, ?, ?, ?, ?)", metric)
            for name, value in {"world_size": n + 1, "learning_rate": "1e-3"}.items():
                db.execute("insert into params values (?, ?, ?)", (name, str(value), key))
            for name, value in {"mlflow.user": "me", "node": "a100", "machine.cores": "4"}.items():
                db.execute("insert into tags values (?, ?, ?)", (name, value, key))
    db.close()
    return path
