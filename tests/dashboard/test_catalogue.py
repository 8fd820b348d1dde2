"""The catalogue: what it finds, and what it reads again."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from penstock.base import UsageError
from penstock.dashboard import catalogue as room
from penstock.dashboard.catalogue import Catalogue, places_at
from penstock.dashboard.sources import records
from penstock.reports import places

from ..reports.kit import launch
from ..reports.pages import run_folder
from ..scaling.kit import log
from .kit import begun, catalogue_of, ledger_of, mlflow_store, steps_of, training


def searched(catalogue: Catalogue) -> None:
    """Refresh as if the time to search had come."""
    catalogue._searched = -1e9
    catalogue.refresh()


def test_a_folder_is_searched_for_runs_of_all_kinds(tmp_path: Path) -> None:
    training(tmp_path / "outputs" / "a")
    mlflow_store(tmp_path / "outputs" / "a" / "mlflow.db")  # the same run, which counts once
    run_folder(tmp_path / "b.zarr.penstock")
    ledger_of(tmp_path / "c.ledger", [launch()])
    (tmp_path / "slurm-1.out").write_text(log("1", 1, 9.0))
    mlflow_store(tmp_path / "mlflow.db", runs=1)
    (tmp_path / "d.zarr").mkdir()
    (tmp_path / "d.zarr" / "zarr.json").write_text("{}")
    training(tmp_path / "d.zarr" / "inside")
    training(tmp_path / ".hidden" / "a")
    places = [(place.kind, place.path.name) for place in places_at(tmp_path)]
    assert sorted(places) == [
        ("inference", "b.zarr.penstock"), ("kept", "mlflow.db"), ("kept", "slurm-1.out"),
        ("ledger", "c.ledger"), ("training", "a"),
    ]  # fmt: skip


def test_links_are_not_followed(tmp_path: Path) -> None:
    training(tmp_path / "elsewhere" / "a")
    mlflow_store(tmp_path / "elsewhere" / "m.db")
    named = tmp_path / "named"
    named.mkdir()
    (named / "link").symlink_to(tmp_path / "elsewhere")
    (named / "m.db").symlink_to(tmp_path / "elsewhere" / "m.db")
    assert list(places_at(named)) == []


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        Catalogue([tmp_path / "absent"])


def test_far_too_many_folders_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MOST_FOLDERS", 3)
    for name in "abcd":
        (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match="more than 3 folders"):
        list(places_at(tmp_path))


def test_nothing_changes_while_nothing_does(tmp_path: Path) -> None:
    training(tmp_path / "a")
    catalogue = catalogue_of(tmp_path)
    version = catalogue.version
    searched(catalogue)
    assert catalogue.version == version


def test_a_run_that_goes_on_moves(tmp_path: Path) -> None:
    folder = begun(tmp_path / "a", steps=2)
    catalogue = catalogue_of(tmp_path)
    before, version = catalogue.runs[0], catalogue.version
    assert len(catalogue.details(before).curves["step_s"].values) == 2
    with (folder / "steps" / "rank0.csv").open("a") as file:
        file.write(steps_of(3, first=3))
    catalogue.refresh()
    after = catalogue.runs[0]
    assert catalogue.version == version + 1 and after.key == before.key
    assert after.stamp != before.stamp
    assert len(catalogue.details(after).curves["step_s"].values) == 5


def test_a_training_at_work_is_running_until_it_is_not(tmp_path: Path) -> None:
    from penstock.base import held_alone

    folder = begun(tmp_path / "a")
    with held_alone(folder / "train.lock", "trains"):
        catalogue = catalogue_of(tmp_path)
        assert catalogue.runs[0].status == "running"
    catalogue.refresh()
    assert catalogue.runs[0].status == "unfinished"


def test_a_ledger_is_read_on_and_not_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = ledger_of(tmp_path / "l.ledger", [launch(64, 1), launch(64, 1, 1)])
    catalogue = catalogue_of(tmp_path)
    assert [run.name for run in catalogue.runs] == ["model launch 2", "model"]
    parsed: list[bytes] = []
    whole = records.parse_record
    monkeypatch.setattr(records, "parse_record", lambda line: parsed.append(line) or whole(line))
    ledger_of(ledger, [launch(128, 1, 2)])
    catalogue.refresh()
    assert len(parsed) == 1
    names = {run.name for run in catalogue.runs}
    assert names == {"model tile=64", "model tile=64 launch 2", "model tile=128 launch 3"}


def test_half_a_line_is_read_when_it_is_whole(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "l.ledger", [launch(8)])
    line = launch(16).line().encode() + b"\n"
    with (ledger / "records.jsonl").open("ab") as file:
        file.write(line[:100])
        file.flush()
        catalogue = catalogue_of(tmp_path)
        assert len(catalogue.runs) == 1 and not catalogue.notes
        file.write(line[100:])
    catalogue.refresh()
    assert len(catalogue.runs) == 2
    assert {catalogue.details(run).settings["tile"] for run in catalogue.runs} == {"8", "16"}


def test_a_ledger_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path / "l.ledger", [launch(8), launch(16)])
    catalogue = catalogue_of(tmp_path)
    (ledger / "records.jsonl").unlink()
    ledger_of(ledger, [launch(32)])
    catalogue.refresh()
    assert [catalogue.details(run).settings["tile"] for run in catalogue.runs] == ["32"]


def test_runs_come_and_go_with_their_folders(tmp_path: Path) -> None:
    training(tmp_path / "a")
    catalogue = catalogue_of(tmp_path)
    training(tmp_path / "b")
    catalogue.refresh()
    assert len(catalogue.runs) == 1  # it is not yet time to search
    searched(catalogue)
    assert {run.name for run in catalogue.runs} == {"a", "b"}
    shutil.rmtree(tmp_path / "a")
    searched(catalogue)
    assert {run.name for run in catalogue.runs} == {"b"}


def test_details_are_kept_for_the_last_runs_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "_KEPT_DETAILS", 1)
    for name in "ab":
        training(tmp_path / name)
    catalogue = catalogue_of(tmp_path)
    first, second = catalogue.runs
    kept = catalogue.details(first)
    assert catalogue.details(first) is kept
    catalogue.details(second)
    assert catalogue.details(first) is not kept


def test_a_follower_refreshes_until_it_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "LOOK_EVERY_S", 0.001)
    training(tmp_path / "a")
    catalogue, ended, looks = catalogue_of(tmp_path), threading.Event(), []

    def refresh() -> None:
        looks.append(1)
        if len(looks) == 2:
            raise UsageError("the disk is away")
        if len(looks) == 3:
            ended.set()

    monkeypatch.setattr(catalogue, "refresh", refresh)
    catalogue.follow(ended)
    assert len(looks) == 3 and catalogue.notes == ["the disk is away"]


def test_the_newest_run_comes_first(tmp_path: Path) -> None:
    for age, name in enumerate("ab"):
        folder = begun(tmp_path / name)
        os.utime(folder / "args.json", (1e9 - age, 1e9 - age))
    assert [run.name for run in catalogue_of(tmp_path).runs] == ["a", "b"]
