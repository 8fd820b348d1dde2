"""A run as W&B keeps it without a network, read from W&B's own files by W&B's own records."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.scaling.sources.read import read_runs
from penstock.training.tracking import events, follow, tell
from penstock.training.tracking.wandb import WeightsAndBiases

from .track_kit import (
    KEY,
    NO_NETWORK,
    TRACKED_RUNS,
    begun,
    in_order,
    needs,
    no_file_holds,
    stop_after_21,
    tracked,
)

pytestmark = [
    *TRACKED_RUNS,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),
    needs["wandb"],
]


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


def points(parts: list[list[Any]]) -> dict[str, dict[int, float]]:
    """Of each metric its value at each step. The later row of a step holds, as on the server."""
    by_name: dict[str, dict[int, float]] = {}
    for row in (each["item"] for part in parts for each in of_kind(part, "history")):
        for name, value in row.items():
            if name != "epoch" and not name.startswith("_"):
                by_name.setdefault(name, {})[row["_step"]] = value
    return by_name


def last_of_each_step(out: Path) -> dict[str, dict[int, float]]:
    """Of each metric its last value at each step, as the file of events has them."""
    return {name: dict(each) for name, each in in_order(out).items()}


def test_a_run_with_its_name_and_tags_is_there_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**NO_NETWORK, "WANDB_API_KEY": KEY, "WANDB_MODE": "online"}.items():
        monkeypatch.setenv(name, value)
    results = tracked(tmp_path, "wandb", name="my run", tag={"study": "a", "long": "b" * 99})
    (tracker,) = results["trackers"]
    assert (tracker["status"], tracker["where"]) == ("ok", "track/wandb")
    (records,) = parts = read_wandb(tmp_path)
    run = of_kind(records, "run")[0]
    assert (run["display_name"], run["run_id"]) == ("my run", tracker["run"])
    assert run["project"] == "penstock"
    assert set(run["tags"]) == {"spiral", "1cpu", "study=a", "long=" + "b" * 59}
    config = run["config"]["update"]
    assert config["batch_size"] == 8 and config["tag"]["study"] == "a"
    assert points(parts) == last_of_each_step(tmp_path)
    assert [each["exit_code"] for each in of_kind(records, "exit")] == [0]
    assert no_file_holds(KEY, tmp_path)


def test_a_run_that_goes_on_leaves_two_parts_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tell, "STOP_WITHIN_S", 300.0)
    stop_after_21(tmp_path, "wandb")
    tracked(tmp_path, "wandb", resume=True, tag={"again": "yes"})
    parts = read_wandb(tmp_path)
    runs = [of_kind(part, "run")[0] for part in parts]
    assert len({run["run_id"] for run in runs}) == 1 and len(runs) == 2
    assert "again=yes" not in runs[0]["tags"] and "again=yes" in runs[1]["tags"]
    assert points(parts) == last_of_each_step(tmp_path)

    # `penstock scaling` reads the parts as one run, with the times of the run's own folder.
    moved = (tmp_path / "track" / "wandb").rename(tmp_path.with_name("alone"))
    (ours,), (theirs,) = read_runs([tmp_path]), read_runs([moved])
    names = "name devices batch global_batch epochs status seconds val_loss val_acc".split()
    assert {n: getattr(theirs, n) for n in names} == {
        n: pytest.approx(value) if isinstance(value := getattr(ours, n), float) else value
        for n in names
    }


def test_what_failed_halfway_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this process, which tries again, and by one that was killed."""
    begun(tmp_path)
    killed = tmp_path / "track" / "wandb" / "offline-run-20260101_000000-a"
    killed.mkdir(parents=True)
    (killed / "run-a.wandb").write_bytes(b":W&B half")
    real, failures = WeightsAndBiases.send, iter([True])

    def send(self: WeightsAndBiases, happened: Sequence[events.Event]) -> None:
        real(self, happened)
        if next(failures, False):
            raise OSError("the disk is full")

    monkeypatch.setattr(WeightsAndBiases, "send", send)
    monkeypatch.setattr(follow, "LOOK_EVERY_S", 0.0)
    going = iter([True] * 2)
    delivery = follow.deliver_events(tmp_path, "wandb", lambda seconds: next(going, False))
    assert delivery.error is None
    assert len(parts := read_wandb(tmp_path)) == 1
    assert points(parts) == last_of_each_step(tmp_path)
