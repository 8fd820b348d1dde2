"""The runs of a page: which are found, what is read again, and what the page holds of them."""

import json
import os
import shutil
from importlib.util import find_spec

import numpy as np
import pytest

from penstock.cli import main
from penstock.reports import Catalogue, Report, html_page, page_data, places
from penstock.reports.places import places_at
from penstock.reports.runs.shown_page import MOST_ROWS
from penstock.reports.runs.shown_run import RunDetails, ShownRun, curve_of

from ..scaling.kit import log
from .kit import launch, sized
from .pages import HOSTILE, Page, run_folder
from .run_kit import begun, catalogue_of, ledger_of, mlflow_store, steps_of, training

needs_pages = pytest.mark.skipif(find_spec("jinja2") is None, reason="pages are made by jinja2")


def searched(catalogue: Catalogue) -> None:
    catalogue._next = 0.0
    catalogue.refresh()


def test_a_folder_is_searched_for_runs_of_all_kinds(tmp_path) -> None:
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


def test_links_are_not_followed(tmp_path) -> None:
    training(tmp_path / "elsewhere" / "a")
    mlflow_store(tmp_path / "elsewhere" / "m.db")
    named = tmp_path / "named"
    named.mkdir()
    (named / "link").symlink_to(tmp_path / "elsewhere")
    (named / "m.db").symlink_to(tmp_path / "elsewhere" / "m.db")
    assert list(places_at(named)) == []


def test_a_run_that_goes_on_moves(tmp_path) -> None:
    folder = begun(tmp_path / "a", steps=2)
    catalogue = catalogue_of(tmp_path)
    before, version = catalogue.runs[0], catalogue.version
    searched(catalogue)
    assert catalogue.version == version, "nothing has changed"
    assert len(catalogue.details(before).curves["step_s"].values) == 2
    with (folder / "steps" / "rank0.csv").open("a") as file:
        file.write(steps_of(3, first=3))
    searched(catalogue)
    after = catalogue.runs[0]
    assert catalogue.version == version + 1 and after.key == before.key
    assert len(catalogue.details(after).curves["step_s"].values) == 5


def test_a_training_at_work_is_running_until_it_is_not(tmp_path) -> None:
    from penstock.base import held_alone

    folder = begun(tmp_path / "a")
    with held_alone(folder / "train.lock", "trains"):
        catalogue = catalogue_of(tmp_path)
        assert catalogue.runs[0].status == "running"
    searched(catalogue)
    assert catalogue.runs[0].status == "unfinished"


def test_a_ledger_that_grows_names_its_cases_anew(tmp_path) -> None:
    ledger = ledger_of(tmp_path / "l.ledger", [launch(64, 1), launch(64, 1, 1)])
    catalogue = catalogue_of(tmp_path)
    assert [run.name for run in catalogue.runs] == ["model launch 2", "model launch 1"]
    ledger_of(ledger, [launch(128, 1, 2)])
    searched(catalogue)
    names = {run.name for run in catalogue.runs}
    assert names == {
        "model tile=64 launch 1", "model tile=64 launch 2", "model tile=128 launch 3",
    }  # fmt: skip


def test_half_a_line_is_read_when_it_is_whole(tmp_path) -> None:
    ledger = ledger_of(tmp_path / "l.ledger", [launch(8)])
    line = launch(16).line().encode() + b"\n"
    with (ledger / "records.jsonl").open("ab") as file:
        file.write(line[:100])
        file.flush()
        catalogue = catalogue_of(tmp_path)
        assert len(catalogue.runs) == 1 and not catalogue.notes
        file.write(line[100:])
    searched(catalogue)
    assert len(catalogue.runs) == 2
    assert {catalogue.details(run).settings["tile"] for run in catalogue.runs} == {"8", "16"}


def test_runs_come_and_go_with_their_folders(tmp_path) -> None:
    training(tmp_path / "a")
    catalogue = catalogue_of(tmp_path)
    training(tmp_path / "b")
    searched(catalogue)
    assert {run.name for run in catalogue.runs} == {"a", "b"}
    shutil.rmtree(tmp_path / "a")
    searched(catalogue)
    assert {run.name for run in catalogue.runs} == {"b"}


def test_a_folder_that_is_away_is_said_until_it_is_back(tmp_path, monkeypatch) -> None:
    training(tmp_path / "a")
    catalogue = catalogue_of(tmp_path)
    with monkeypatch.context() as away:
        away.setattr(places, "MOST_FOLDERS", 0)
        searched(catalogue)
    assert "more than 0 folders" in catalogue.notes[0] and len(catalogue.runs) == 1
    training(tmp_path / "b")
    searched(catalogue)
    assert len(catalogue.runs) == 2 and not catalogue.notes


def test_the_newest_run_comes_first(tmp_path) -> None:
    for age, name in enumerate("ab"):
        os.utime(begun(tmp_path / name) / "args.json", (1e9 - age, 1e9 - age))
    assert [run.name for run in catalogue_of(tmp_path).runs] == ["a", "b"]


@pytest.mark.slow
@needs_pages
def test_a_page_of_a_hundred_runs_is_small() -> None:
    """Each has four curves of 2,000 points: 5 MB if all were written."""
    names = [f"curve {number}" for number in range(4)]
    curves = {name: curve_of(np.random.default_rng(0).random(2_000), step=np.arange(2_000))
              for name in names}  # fmt: skip
    settings = {f"setting {number}": f"{number}" * 20 for number in range(60)}
    runs = [
        ShownRun(f"{n}", f"{n}", f"run {n}", "training", "complete", "/runs",
                 read=lambda: RunDetails(settings, {"seconds": 1.0}, curves))
        for n in range(100)
    ]  # fmt: skip
    data = page_data(Catalogue.holding(runs))
    assert len(data["rows"]) == 100 and data["picked"] == ["0", "1"]
    text = html_page(Report("t", ["v."]), data)
    assert len(text) < 3_000_000 and {"0", "1"} <= set(data["details"])


def test_thousands_of_runs_are_rows_and_the_rest_is_counted() -> None:
    runs = [ShownRun(f"{n}", f"{n}", f"run {n}", "t", "ok", "/r") for n in range(12_000)]
    data = page_data(Catalogue.holding(runs))
    assert len(data["rows"]) == MOST_ROWS
    assert data["notes"] == ["7,000 older runs left out: name a folder that holds fewer."]


def test_what_is_asked_for_is_picked_and_comes_first(tmp_path) -> None:
    for name in "abc":
        training(tmp_path / name, learning_rate=ord(name) / 100)
    catalogue = catalogue_of(tmp_path)
    last = catalogue.runs[-1]
    data = page_data(catalogue, [last.key])
    assert data["picked"] == [last.case] and next(iter(data["details"])) == last.key
    assert data["units"]["training_s"] == "s" and data["words"]["training_s"] == "training time"
    assert data["order"]["metrics"][0] == "training_s"
    live = page_data(catalogue, [last.key], live=True)
    assert list(live["details"]) == [last.key], "a server gives the others when they are picked"


@needs_pages
def test_names_of_others_end_no_block_of_data(tmp_path) -> None:
    training(tmp_path / "a", name=HOSTILE, tags={HOSTILE: HOSTILE}, learning_rate=HOSTILE)
    text = html_page(Report("t", ["v."]), page_data(catalogue_of(tmp_path)))
    page = Page(text)
    scripts = [attrs for tag, attrs in page.elements if tag == "script"]
    assert len(scripts) == 2 and page.asked() == []
    assert [tag for tag, _ in page.elements].count("img") == 0
    data = json.loads(text.partition('id="runs-data">')[2].partition("</script>")[0])
    assert data["rows"][0]["name"].startswith("<script>alert(1)</script>")


@needs_pages
def test_report_and_compare_write_the_page(tmp_path, capsys) -> None:
    for name in "ab":
        training(tmp_path / "runs" / name, learning_rate=ord(name) / 100)
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "runs"), "--html", str(page)]) == 0
    data = json.loads(page.read_text().partition('id="runs-data">')[2].partition("</script>")[0])
    assert len(data["details"]) == 2 and len(data["picked"]) == 2 and not data["live"]
    assert main(["report", str(tmp_path / "runs"), "--html", str(tmp_path / "page.txt")]) == 2
    assert "ends with .html" in capsys.readouterr().err
    a, b = (str(tmp_path / "runs" / name) for name in "ab")
    assert main(["compare", a, b, "--html", str(page)]) == 0
    data = json.loads(page.read_text().partition('id="runs-data">')[2].partition("</script>")[0])
    assert [row["title"] for row in data["rows"]] == ["A: a", "B: b"]
    assert data["picked"] == [row["case"] for row in data["rows"]]


@needs_pages
def test_a_page_of_two_ledgers_pairs_their_cases(tmp_path) -> None:
    for name, factor in (("a", 1), ("b", 2)):
        ledger_of(tmp_path / name, sized({(32, 1): 4.0 * factor, (64, 1): 12.0 * factor}))
    page = tmp_path / "page.html"
    a, b = (str(tmp_path / name) for name in "ab")
    assert main(["compare", a, b, "--html", str(page)]) == 1, "B is slower"
    data = json.loads(page.read_text().partition('id="runs-data">')[2].partition("</script>")[0])
    titles = {row["title"] for row in data["rows"]}
    assert titles == {f"{side}: model tile={tile}" for side in "AB" for tile in (32, 64)}
    assert len(data["rows"]) == 20 and len({row["case"] for row in data["rows"]}) == 4
    assert len(data["picked"]) == 2
