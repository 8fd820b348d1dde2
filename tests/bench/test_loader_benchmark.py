"""``penstock bench loader``: its cases, what it refuses, and the command from end to end."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from penstock.base import BenchLoaderConfig, UsageError, build
from penstock.bench import Launch, ladder_cases, loader_cases
from penstock.cli import main
from penstock.instruments import Ledger, Record

from ..rows import rows_of
from .kit_loader import own_array, record


def config(**knobs: Any) -> BenchLoaderConfig:
    return build(BenchLoaderConfig, knobs)


def test_cases_are_every_combination_once() -> None:
    chosen = config(loaders=["penstock", "zarr"], threads=[1, 2, 2], batch_sizes=[4], batches=7)
    cases = loader_cases(chosen, "data")
    assert [(c["loader"], c["batch"], c["threads"]) for c in cases] == [
        ("penstock", 4, 1), ("zarr", 4, 1), ("penstock", 4, 2), ("zarr", 4, 2),
    ]  # fmt: skip
    assert Path(cases[0]["data"]).is_absolute()
    assert [c["rung"] for c in ladder_cases(cases)] == ["L1", "L2", "L3", "L4", "L5"] * 2
    assert all("loader" not in c for c in ladder_cases(cases))
    assert loader_cases(config(), "s3://bucket/data")[0]["cache"] == "as-is"


@pytest.mark.parametrize(
    ("knobs", "data", "said"),
    [
        ({"loaders": ["magic"]}, "data", "--loaders magic: there is no such loader; known are pen"),
        ({"cache": "cold"}, "s3://b/data", "--cache cold drops files of this machine"),
    ],
)
def test_what_makes_no_sense_is_refused(knobs: dict[str, Any], data: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        loader_cases(config(**knobs), data)


@pytest.mark.usefixtures("launches_here")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("loader none", "none: no packed data set: there is no dataset.json"),
        ("loader data --batch-sizes 99", "--batch-sizes 99 is more than the 16 samples"),
        ("loader data --cache cold --batch-sizes 2", "lower --batches to 3"),
        ("loader data --output .", "--output . cannot be written"),
        ("queue none", "there is no such folder"),
        ("queue empty", "empty: there is none of .zarray"),
        ("queue data --batch-size 17", "--batch-size 17 is more than the 16 samples of data"),
    ],
)
def test_bad_input_is_one_sentence_and_creates_nothing(
    data: Path, tmp_path, here, capsys, words: str, said: str
) -> None:
    (tmp_path / "data").symlink_to(data)
    (tmp_path / "empty").mkdir()
    assert main(["bench", *words.split()]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "empty"]


@pytest.mark.parametrize(
    ("status", "code"),
    [("ok", 0), ("unsupported", 0), ("crash", 1), ("timeout", 1), ("oom_host", 1)],
)
def test_the_exit_code_is_that_of_the_launches(data, tmp_path, monkeypatch, status, code) -> None:
    monkeypatch.setattr("penstock.cli.bench.checked_loader_cases", lambda cases, *_: cases)
    monkeypatch.setattr(
        "penstock.cli.bench._loader_sweep", lambda *_: [record(0, 1.0), record(1, 1.0, status)]
    )
    output = tmp_path / "loader.csv"
    assert main(["bench", "loader", str(data), "--output", str(output)]) == code


@pytest.mark.parametrize("verb", ["loader", "queue"])
@pytest.mark.parametrize(("status", "code"), [("unsupported", 2), ("crash", 1), ("timeout", 1)])
def test_data_that_a_process_cannot_read_ends_it_before_anything_is_written(
    data: Path, tmp_path, monkeypatch,
    capsys, verb: str, status: str, code: int,
) -> None:  # fmt: skip
    asked: list[str] = []

    def launch(request: Launch) -> Record:
        asked.append(request.task)
        return record(0, 1.0, status)

    importlib.import_module(
        "penstock.bench.launch.sweep"
    )  # or it would keep the scripted one for good
    monkeypatch.setattr("penstock.bench.launch.supervisor.run_launch", launch)
    assert main(["bench", verb, str(data), "--output", str(tmp_path / "out.csv")]) == code
    assert capsys.readouterr().err.strip().endswith("pip install 'penstock-dl[loaders]'")
    assert asked == ["check"] and not any(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.usefixtures("launches_here")
def test_from_data_to_a_page(tmp_path, here, capsys) -> None:
    assert main(["generate", "ufs-p1", "data", "--samples", "16", "--grid", "8", "16"]) == 0
    words = "--threads 2 --batch-sizes 2 --loaders penstock zarr --batches 24 --warmup 1"
    command = ["bench", "loader", "data", *words.split(), "--effort", "quick", "--output", "l.csv"]
    assert main([*command, "--no-ladder"]) == 0
    out = capsys.readouterr().out
    assert "Seconds for a batch" in out and "one launch each, not compared" in out
    rows = rows_of(Path("l.csv"))
    assert [(r["loader"], r["wrong"], r["status"]) for r in rows] == [
        ("penstock", "0", "ok"), ("zarr", "0", "ok"),
    ]  # fmt: skip
    assert len(Ledger(tmp_path / "l.ledger").records()) == 2
    assert main([*command, "--no-ladder", "--resume"]) == 0
    assert len(Ledger(tmp_path / "l.ledger").records()) == 2, "nothing was left to run"

    capsys.readouterr()
    assert main(["report", "l.ledger"]) == 0
    written = capsys.readouterr().out.split()
    assert written == ["l.report/report.md", "l.report/loader.csv", "l.report/loader.png"]
    page = Path("l.report/report.md").read_text()
    assert page.startswith("# l.ledger\n") and "![loader](loader.png)" in page
    assert "| 2 | 2 | penstock |" in page
    assert main(["report", "l.ledger"]) == 2
    assert "l.report/report.md exists; --overwrite" in capsys.readouterr().err
    assert main(["report", "l.ledger", "--overwrite", "--csv", "launches.csv"]) == 0
    assert [row["case.loader"] for row in rows_of(Path("launches.csv"))] == ["penstock", "zarr"]
    assert main(["report", "none.ledger"]) == 2


@pytest.mark.parametrize(("kind", "verb"), [("ome", "bench"), ("n5", "tune")])
@pytest.mark.usefixtures("launches_here")
def test_patches_of_a_volume_are_samples(kind: str, verb: str, tmp_path, capsys) -> None:
    """An image with t = 1 has one sample along axis 0, and so no batch, unless it is cut."""
    path = tmp_path / "own"
    own_array(path, kind, (1, 8, 9, 16))
    words = [verb, "loader", str(path), "--patch", "1", "4", "5", "8", "--shuffle", "global"]
    words += ["--ledger", str(tmp_path / "ledger"), "--timeout", "100"]
    if verb == "tune":
        words += ["--step-time", "5", "--batch-size", "2", "--batches", "6", "--launches", "1"]
        words += ["--threads-up-to", "1", "--output", str(tmp_path / "loader.yaml")]
        assert main(words) == 0, capsys.readouterr()
        return
    words += ["--batch-sizes", "2", "--threads", "1", "--batches", "2", "--warmup", "1"]
    words += ["--loaders", "penstock", "zarr", "--effort", "quick", "--no-ladder"]
    assert main([*words, "--output", str(tmp_path / "a.csv")]) == 0
    records = {record.case["loader"]: record for record in Ledger(tmp_path / "ledger").records()}
    facts = records["penstock"].facts
    assert records["penstock"].ok and facts["samples"] == 8 and facts["sample_bytes"] == 320
    assert (facts["wrong"], facts["missing"], facts["duplicates"]) == (0, 0, 0)
    zarrs = records["zarr"]
    assert zarrs.status == "unsupported" and zarrs.error is not None
    assert "not 8 patches of each" in zarrs.error.message
