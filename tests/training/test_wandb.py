"""A run as W&B keeps it without a network, read from W&B's own files by W&B's own records."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.training import tracking

from .track_kit import (
    KEY,
    NO_NETWORK,
    TRACKED_RUNS,
    Series,
    assert_logged,
    needs,
    no_file_holds,
    stop_after_21,
    tracked,
)

pytestmark = [*TRACKED_RUNS, pytest.mark.slow, pytest.mark.filterwarnings("ignore"), needs["wandb"]]


def read_wandb(out: Path) -> list[list[Any]]:
    """The records of each part of a run, as ``wandb leet inspect`` prints them."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json"]
    parts = []
    for path in sorted(out.glob("track/wandb/offline-run-*/*.wandb")):
        done = subprocess.run([*command, str(path)], capture_output=True, text=True, check=True)
        parts.append([json.loads(line) for line in done.stdout.splitlines()])
    return parts


def of_kind(records: list[Any], kind: str) -> list[Any]:
    return [record[kind] for record in records if record["type"] == kind]


def points(parts: list[list[Any]]) -> Series:
    """Of each metric its steps and values. Lightning's logger keeps the step as a metric."""
    by_name: Series = {}
    for row in (each["item"] for part in parts for each in of_kind(part, "history")):
        for name, value in row.items():
            if not name.startswith("_"):
                by_name.setdefault(name, []).append((int(row["trainer/global_step"]), value))
    return by_name


def test_a_run_that_goes_on_leaves_two_parts_without_a_network(tmp_path, monkeypatch) -> None:
    for variable, value in {**NO_NETWORK, "WANDB_API_KEY": KEY, "WANDB_MODE": "online"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(tracking, "STOP_WITHIN_S", 300.0)
    stop_after_21(tmp_path, "wandb", name="my run", tag={"study": "a", "long": "b" * 99})
    results = tracked(tmp_path, "wandb", resume=True, name="my run", tag={"again": "yes"})
    (tracker,) = results["trackers"]
    assert (tracker["status"], tracker["where"]) == ("ok", "track/wandb")
    first, second = parts = read_wandb(tmp_path)
    runs = [of_kind(part, "run")[0] for part in parts]
    for run in runs:
        assert (run["display_name"], run["run_id"]) == ("my run", tracker["run"])
        assert run["project"] == "penstock"
    assert set(runs[0]["tags"]) == {"spiral", "1cpu", "study=a", "long=" + "b" * 59}
    assert "again=yes" in runs[1]["tags"]
    (settings,) = [each["update"] for each in of_kind(first, "config") if "update" in each]
    assert (settings["batch_size"], settings["tag.study"]) == (8, "a")
    assert_logged(points(parts), tmp_path)
    assert [each["exit_code"] for each in of_kind(second, "exit")] == [0]
    assert no_file_holds(KEY, tmp_path)
