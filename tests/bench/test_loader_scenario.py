"""Scenarios ``loader`` and ``ladder`` on real data, their report, and the verb end to end."""

from __future__ import annotations

import contextlib
import csv
import importlib
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.base.config.bench import BenchLoaderConfig
from penstock.base.config.knobs import build
from penstock.base.errors import UsageError
from penstock.bench.cases.loader import ladder_cases, loader_cases, loader_rules
from penstock.bench.launch.supervisor import LaunchRequest
from penstock.bench.measure import Rules, measure_scenario
from penstock.bench.scenarios import WrongResult
from penstock.bench.scenarios import loader as measured_by
from penstock.bench.scenarios.ladder import rung
from penstock.bench.scenarios.loader import LoaderScenario, check
from penstock.bench.scenarios.sources import Counters
from penstock.cli import main
from penstock.data.packed.checksums import checksum
from penstock.instruments import page_cache as pagecache
from penstock.instruments.ledger import Ledger
from penstock.instruments.record import Failure, Record, case_key
from penstock.loading.any_array import open_dataset_or_array, with_checks
from penstock.loading.contenders import registry
from penstock.reports.figures.loader import draw_ladders, plot_ladders, plot_loader
from penstock.reports.loader import cell as loader_cell
from penstock.reports.loader import ladder as loader_ladder
from penstock.reports.loader import report as loader_report
from penstock.reports.table import in_text

SAMPLES = 16
COMMON: dict[str, Any] = {
    "batch": 2, "threads": 2, "shuffle": "sample", "window": None, "seed": 0, "cache": "warm",
    "batches": 3, "warmup": 1, "endpoint": None, "latency_ms": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "data"
    words = ["generate", "ufs-p1", str(folder), "--samples", str(SAMPLES), "--grid", "8", "16"]
    assert main(words) == 0
    return folder


def case(data: Path, **knobs: Any) -> dict[str, Any]:
    return {**COMMON, "data": str(data), "loader": "penstock", **knobs}


def measured(scenario: Any, batches: int = 3) -> dict[str, Any]:
    """A scenario as a launch measures it."""
    series = {"seconds": 0.0, "precision": 0.0, "series": batches, "warmup_samples": 1}
    with contextlib.closing(scenario):
        return measure_scenario(scenario, Rules(**series), lambda stage: None)


# --- a launch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["penstock", "penstock-tensorstore", "tensorstore-read", "zarr"])
def test_a_launch_waits_for_batches_and_checks_every_row(data: Path, name: str) -> None:
    result = measured(LoaderScenario(case(data, loader=name)))
    facts = result["facts"]
    assert len(result["samples_s"]["step"]) == 3
    assert result["warmup"]["first_s"] > 0
    assert (facts["duplicates"], facts["missing"], facts["wrong"]) == (0, 0, 0)
    # The first, one to warm up and 3; and of ours one more, for it reads 2 ahead.
    assert facts["verified_batches"] == 5 + (facts["ahead"] == 2)
    assert result["work"] == {"samples": 2, "bytes": 2 * facts["sample_bytes"]}
    assert facts["sample_bytes"] == 8 * 16 * (187 + 83) * 4
    assert facts["resident"] is None or facts["resident"] > 0.99


def test_batches_begin_anew_where_there_are_too_few(data: Path) -> None:
    """16 samples are 4 batches of 4; the first, two to warm up and 5 more come a second time."""
    result = measured(LoaderScenario(case(data, batch=4, batches=5)), 5)
    assert len(result["samples_s"]["step"]) == 5
    assert result["facts"]["verified_batches"] == 4


class _Damaging:
    """A loader whose batches are those of another, but for what was done to them."""

    def __init__(self, whole: Any, damage: Any) -> None:
        self._whole, self._damage = whole, damage
        self.loader = whole.loader

    def batches(self) -> Iterator[Mapping[str, Any]]:
        for number, batch in enumerate(self._whole.batches()):
            yield self._damage({n: a.copy() for n, a in batch.items()}, number)

    def close(self) -> None:
        self._whole.close()


def _one_bit(batch: dict[str, Any], number: int) -> dict[str, Any]:
    if number == 1:
        batch["targets"].view(np.uint32).flat[-1] ^= 1
    return batch


def _twice(batch: dict[str, Any], number: int) -> dict[str, Any]:
    for array in batch.values():
        array[1] = array[0]
    return batch


def _short(batch: dict[str, Any], number: int) -> dict[str, Any]:
    return {name: array[:1] for name, array in batch.items()}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_one_bit, "0 came twice, 1 did not come and 1 arrays were wrong"),
        (_twice, "came twice"),
        (_short, r"a batch has \[1\] rows, not 2"),
    ],
)
def test_what_a_loader_got_wrong_is_a_wrong_result(
    data: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, said: str
) -> None:
    make = registry.make_contender
    monkeypatch.setattr(
        measured_by, "make_contender", lambda *args, **how: _Damaging(make(*args, **how), damage)
    )
    with pytest.raises(WrongResult, match=said):
        measured(LoaderScenario(case(data)))


@pytest.mark.slow
def test_a_slow_server_counts_what_it_served(data: Path) -> None:
    scenario = LoaderScenario(case(data, latency_ms=2.0, cache="as-is"))
    result = measured(scenario)
    facts = result["facts"]
    assert facts["wrong"] == 0
    # Batches of 2 of 16 samples; what runs ahead at the end is counted too.
    assert 0.7 <= facts["read_amplification"] <= 3
    assert facts["stored_bytes"] > 0


@pytest.mark.skipif(not hasattr(pagecache.os, "posix_fadvise"), reason="no posix_fadvise here")
def test_a_cold_cache_is_verified(data: Path) -> None:
    result = measured(LoaderScenario(case(data, cache="cold")))
    resident = result["facts"]["resident"]
    assert resident is None or resident < 0.05


def test_a_case_is_tied_to_what_is_in_the_data(data: Path, tmp_path: Path) -> None:
    checked, facts = check(case(data))
    assert checked["dataset"] == facts["dataset"] and len(checked["dataset"]) == 16
    words = ["generate", "ufs-p1", str(tmp_path / "other"), "--samples", str(SAMPLES)]
    assert main([*words, "--grid", "8", "16", "--seed", "7"]) == 0
    assert check(case(tmp_path / "other"))[0]["dataset"] != checked["dataset"]
    with pytest.raises(UsageError, match="--batch-sizes 17 is more than the 16 samples"):
        check(case(data, batch=17))


# --- the ladder ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["L0", "L1", "L2", "L3", "L4"])
def test_every_rung_delivers_the_same_bytes(data: Path, name: str) -> None:
    before = sorted(data.rglob("*"))
    knobs = {k: v for k, v in case(data).items() if k != "loader"}
    scenario = rung({**knobs, "rung": name})
    result = measured(scenario)
    assert result["work"] == {"samples": 2, "bytes": 2 * 8 * 16 * 270 * 4}
    assert sorted(data.rglob("*")) == before, "its files are gone"
    if name in ("L3", "L4"):
        assert result["facts"]["wrong"] == result["facts"]["missing"] == 0


def test_far_data_has_no_rungs_of_files(data: Path) -> None:
    for name in ("L0", "L1"):
        with pytest.raises(UsageError, match="not on a disk of this machine"):
            rung({**case(data, latency_ms=1.0), "rung": name})


def test_far_data_that_may_not_be_listed_is_described(tmp_path: Path) -> None:
    pytest.importorskip("tensorstore")
    from ..loading.test_loader import forbidding

    words = ["generate", "ufs-p1", str(tmp_path / "data"), "--samples", "4", "--grid", "8", "16"]
    assert main([*words, "--zarr-format", "3"]) == 0
    with forbidding(tmp_path) as url:
        far = {**case(tmp_path), "data": f"{url}/data", "cache": "as-is"}
        assert check(far)[1]["samples"] == 4
        with pytest.raises(UsageError, match=r"none.*403"):
            check({**far, "data": f"{url}/none"})


# --- cases --------------------------------------------------------------------------------------


def config(**knobs: Any) -> BenchLoaderConfig:
    return build(BenchLoaderConfig, knobs)


def test_cases_are_every_combination_once() -> None:
    chosen = config(loaders=["penstock", "zarr"], threads=[1, 2, 2], batch_sizes=[4], batches=7)
    cases = loader_cases(chosen, "data")
    assert [(c["loader"], c["batch"], c["threads"]) for c in cases] == [
        ("penstock", 4, 1), ("zarr", 4, 1), ("penstock", 4, 2), ("zarr", 4, 2),
    ]  # fmt: skip
    assert Path(cases[0]["data"]).is_absolute()
    assert [c["rung"] for c in ladder_cases(cases)] == ["L0", "L1", "L2", "L3", "L4", "L5"] * 2
    assert all("loader" not in c for c in ladder_cases(cases))
    assert loader_rules(chosen.batches, chosen.warmup)["series"] == 7
    assert loader_cases(config(), "s3://bucket/data")[0]["cache"] == "as-is"


@pytest.mark.parametrize(
    ("knobs", "data", "said"),
    [
        ({"loaders": ["magic"]}, "data", "--loaders magic: there is no such loader; known are pen"),
        ({"endpoint": "http://x"}, "data", "--endpoint is of s3:// data"),
        ({"latency_ms": 5}, "s3://b/data", "--latency-ms delays a local folder"),
        ({"cache": "cold"}, "s3://b/data", "--cache cold drops files of this machine"),
    ],
)
def test_what_makes_no_sense_is_refused(knobs: dict[str, Any], data: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        loader_cases(config(**knobs), data)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("none", "none: no packed data set: there is no dataset.json"),
        ("data --batch-sizes 99", "--batch-sizes 99 is more than the 16 samples"),
        ("data --cache cold --batch-sizes 2", "lower --batches to 3"),
        ("data --output .", "--output . cannot be written"),
    ],
)
def test_bad_input_is_one_sentence_and_creates_nothing(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").symlink_to(data)
    assert main(["bench", "loader", *words.split()]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert said in line
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize(
    ("status", "code"),
    [("ok", 0), ("unsupported", 0), ("crash", 1), ("timeout", 1), ("oom_host", 1),
     ("wrong_result", 1)],
)  # fmt: skip
def test_the_exit_code_is_that_of_the_launches(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, code: int
) -> None:
    monkeypatch.setattr("penstock.cli.bench_loader.checked_loader_cases", lambda cases, *_: cases)
    monkeypatch.setattr(
        "penstock.cli.bench_loader._sweep", lambda *_: [record(0, 1.0), record(1, 1.0, status)]
    )
    output = tmp_path / "loader.csv"
    assert main(["bench", "loader", str(data), "--output", str(output)]) == code


@pytest.mark.parametrize("verb", ["loader", "queue"])
@pytest.mark.parametrize(("status", "code"), [("unsupported", 2), ("crash", 1), ("timeout", 1)])
def test_data_that_a_process_cannot_read_ends_it_before_anything_is_written(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str], verb: str, status: str, code: int,
) -> None:  # fmt: skip
    asked: list[str] = []

    def launch(request: LaunchRequest, **_: Any) -> Record:
        asked.append(request.task)
        return record(0, 1.0, status)

    importlib.import_module(
        "penstock.bench.launch.sweep"
    )  # or it would keep the scripted one for good
    monkeypatch.setattr("penstock.bench.launch.supervisor.run_launch", launch)
    output = tmp_path / "out.csv"
    assert main(["bench", verb, str(data), "--output", str(output)]) == code
    assert capsys.readouterr().err.strip().endswith("pip install 'penstock-dl[loaders]'")
    assert asked == ["check"] and not any(tmp_path.iterdir())


# --- the report, from records made up -----------------------------------------------------------


def record(launch: int, seconds: float, status: str = "ok", **knobs: Any) -> Record:
    own = case(Path("/data"), batch=4, dataset="d", **knobs)
    scenario = "ladder" if "rung" in own else "loader"
    facts = {"resident": 1.0, "read_amplification": 1.25, "stored_bytes": 3e6, "cpu_s_per_gb": 2.0}
    counts = {"duplicates": 0, "missing": 0, "wrong": 0}
    ok = status == "ok"
    return Record(
        schema=1,
        id=f"{own}-{launch}",
        time="2026-01-01T00:00:00+00:00",
        scenario=scenario,
        case=own,
        key=case_key(scenario, own),
        launch=launch,
        status=status,
        samples_s={"step": tuple(seconds * f for f in (0.5, 1.0, 1.5))} if ok else {},
        work={"samples": 4, "bytes": 8e6} if ok else {},
        facts={**facts, **counts} if ok else {},
        error=None if ok else Failure(stage="setup", message="pip install 'penstock-dl[loaders]'"),
    )


def launches(seconds: float, **knobs: Any) -> list[Record]:
    return [record(i, seconds * (1 + i / 100), **knobs) for i in range(5)]


def test_numbers_are_those_of_the_waits() -> None:
    cell = loader_cell.loader_cells(launches(0.4))[0]
    assert cell.seconds == pytest.approx(0.408)  # the median launch
    assert cell.row["decoded_mb_per_sec"] == str(round(8 / 0.408, 3)) or float(
        cell.row["decoded_mb_per_sec"]
    ) == pytest.approx(8 / 0.408, rel=1e-3)
    assert float(cell.row["samples_per_sec"]) == pytest.approx(4 / 0.408, rel=1e-3)
    assert float(cell.row["wait_max_s"]) == pytest.approx(0.4 * 1.04 * 1.5, rel=1e-3)
    assert cell.row["read_amplification"] == "1.25"
    assert [cell.row[n] for n in ("duplicates", "missing", "wrong")] == ["0", "0", "0"]


def test_a_wait_in_which_an_epoch_begins_is_not_among_the_waits() -> None:
    (one,) = [record(0, 1.0)]
    begun = one.model_copy(update={"facts": {**one.facts, "begun": [2]}})
    assert loader_cell.loader_cells([begun])[0].seconds == pytest.approx(0.75)
    assert loader_cell.loader_cells([one])[0].seconds == pytest.approx(1.0)


def ahead(records: list[Record], fresh: float) -> list[Record]:
    return [r.model_copy(update={"facts": {**r.facts, "fresh": fresh}}) for r in records]


def test_ladders_alone_are_a_page(tmp_path: Path) -> None:
    """As ``tune loader`` leaves them; beside loaders they are part of theirs."""
    steps = [*launches(0.2, rung="L1", loader=None), *launches(0.5, rung="L2", loader=None)]
    ledger = tmp_path / "tuned.jsonl"
    ledger.write_text("".join(f"{one.line()}\n" for one in steps))
    assert main(["report", str(ledger)]) == 0
    page = (tmp_path / "tuned.report" / "report.md").read_text()
    assert "What a batch has to pay for" in page
    assert "Step L2 (decode) costs most" in page and "![ladder](ladder.png)" in page
    ledger.write_text("".join(f"{one.line()}\n" for one in [*steps, *launches(0.6)]))
    assert main(["report", str(ledger), "--overwrite"]) == 0
    page = (tmp_path / "tuned.report" / "report.md").read_text()
    assert page.count("costs most") == 1 and "What a batch has to pay for" not in page


def test_waits_for_what_was_read_before_are_marked_and_not_compared() -> None:
    ours, theirs = ahead(launches(0.4), 0.97), launches(0.01, loader="zarr")
    assert "slower than zarr" in said(ours + ahead(theirs, 1.02))
    told = said(ours + ahead(theirs, 0.3))
    assert "slower than zarr" not in told
    assert "* zarr, batch 4, 2 threads: 70 % was read before it was waited for" in told
    assert told.count("0.0102 *") == 2  # in both tables
    assert "than zarr" not in said(ahead(ours, 0.5) + ahead(theirs, 1.0))


def said(records: list[Record]) -> str:
    return "\n".join(in_text(loader_report.loader_sections(records)))


def test_sentences_follow_the_numbers() -> None:
    ours, theirs = launches(0.4), launches(0.9, loader="zarr")
    assert "penstock is 2.25x faster than zarr [" in said(ours + theirs)
    assert "penstock is 2.25x slower than zarr [" in said(
        launches(0.9) + launches(0.4, loader="zarr")
    )
    same = [record(i, 0.4 * f, loader="zarr") for i, f in enumerate((0.9, 1.1, 1.0, 1.2, 0.95))]
    assert "penstock and zarr are not distinguishable [" in said(ours + same)
    assert "one launch each, not compared" in said(ours[:1] + theirs[:1])


def test_who_failed_is_told_and_a_cache_that_was_not_as_asked_for() -> None:
    text = said([*launches(0.4), record(0, 0.0, "unsupported", loader="zarrs")])
    assert "zarrs is not supported here: pip install 'penstock-dl[loaders]'" in text
    warm = [r.model_copy(update={"facts": {**r.facts, "resident": 0.5}}) for r in launches(0.4)]
    assert "The cache was not warm: as little as 50 % of the data was in memory" in said(warm)
    cold = [r.model_copy(update={"case": {**r.case, "cache": "cold"}}) for r in launches(0.4)]
    assert "The cache was not cold: up to 100 % of the data was in memory" in said(cold)


@pytest.fixture(scope="module")
def planes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 planes in chunks of 4."""
    folder = tmp_path_factory.mktemp("planes") / "v.zarr"
    words = "generate volume OUT --shape 16 32 32 --chunks 4 32 32".replace("OUT", str(folder))
    assert main(words.split()) == 0
    return folder


@pytest.mark.parametrize(
    ("batch", "shuffle", "again"), [(4, "none", 0.0), (2, "none", 0.5), (4, "sample", 1.0)]
)
def test_a_cold_cache_is_warm_where_batches_share_chunks(
    batch: int, shuffle: str, again: float, planes: Path
) -> None:
    cold = case(planes, cache="cold", batch=batch, shuffle=shuffle, batches=2, warmup=0)
    facts = measured(LoaderScenario(cold), 2)["facts"]
    assert facts["again"] == pytest.approx(again, abs=0.3 if shuffle == "sample" else 1e-9)
    if again < 1:
        assert "again" not in measured(LoaderScenario({**cold, "cache": "warm"}), 2)["facts"]


def test_what_of_a_cold_cache_was_read_again_is_told() -> None:
    def cold(again: float) -> list[Record]:
        return [
            r.model_copy(
                update={
                    "case": {**r.case, "cache": "cold"},
                    "facts": {**r.facts, "resident": 0.0, "again": again},
                }
            )
            for r in launches(0.4)
        ]

    text = said(cold(0.94))
    assert "cold (0 % resident), 94 % read again from memory" in text
    assert (
        "Of what the batches after the first read, 94 % an earlier one had read, for a chunk holds "
        "several samples: that came from memory, however cold the cache was."
    ) in text
    assert "again" not in said(cold(0.0)) and "came from memory" not in said(cold(0.0))


def ladder_records(*seconds: float) -> list[Record]:
    found = []
    for name, value in zip(("L0", "L1", "L2", "L3", "L4"), seconds, strict=True):
        found += launches(value, rung=name)
    return found


@pytest.mark.parametrize(
    ("seconds", "limit"),
    [
        ((0.5, 0.51, 0.52, 0.53, 0.54), "L0"),
        ((0.1, 0.12, 0.4, 0.45, 0.46), "L2"),
        ((0.1, 0.12, 0.14, 0.15, 0.5), "L4"),
    ],
)
def test_the_dearest_step_is_named(seconds: tuple[float, ...], limit: str) -> None:
    records = ladder_records(*seconds)
    (ladder,) = loader_ladder.ladders_of(records)
    assert ladder.limiting == limit
    assert f"tep {limit} (" in ladder.sentence()
    assert "costs most" in said(records)


def test_figures_are_drawn(tmp_path: Path) -> None:
    records = launches(0.4) + launches(0.9, loader="zarr") + ladder_records(0.1, 0.2, 0.3, 0.4, 0.5)
    path = tmp_path / "loader.csv"
    loader_report.append_loader_csv(records, path)
    (bars,) = plot_loader(path, tmp_path / "bars")
    (rungs,) = plot_ladders(records, tmp_path / "ladder")
    loader_report.append_loader_csv(launches(0.3, threads=4), path)
    (lines,) = plot_loader(path, tmp_path / "lines")
    for figure in (bars, rungs, lines):
        assert figure.read_bytes()[:4] == b"\x89PNG"
    assert plot_ladders(launches(0.4), tmp_path / "none") == []


def test_a_cell_of_which_a_launch_failed_is_drawn(tmp_path: Path) -> None:
    from penstock.reports.figures.loader import draw_loader

    records = [record(0, 0.4), record(1, 0.0, "timeout"), record(0, 0.0, "crash", loader="zarr")]
    path = tmp_path / "loader.csv"
    loader_report.append_loader_csv(records, path)
    assert [c.row["status"] for c in loader_cell.LoaderCell.of_csv(path)] == [
        "timeout",
        "crash",
    ]
    (figure,) = plot_loader(path, tmp_path / "loader")
    assert figure.exists()
    drawn = [c for c in loader_cell.LoaderCell.of_csv(path) if c.row["launches"] != "0"]
    (axis,) = draw_loader(drawn, "loader.csv").axes
    assert [bar.get_width() for bar in axis.patches] == [pytest.approx(0.4)]


# --- end to end ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_from_data_to_a_page(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(data, "data")
    words = "--threads 2 --batch-sizes 2 --loaders penstock zarr --batches 2 --warmup 1"
    command = ["bench", "loader", "data", *words.split(), "--effort", "quick", "--output", "l.csv"]
    assert main([*command, "--no-ladder"]) == 0
    out = capsys.readouterr().out
    assert "Seconds for a batch" in out and "one launch each, not compared" in out
    with Path("l.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
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
    exports = ["--csv", "launches.csv", "--parquet", "launches.parquet"]
    assert main(["report", "l.ledger", "--overwrite", *exports]) == 0
    with Path("launches.csv").open(newline="") as file:
        assert [row["case.loader"] for row in csv.DictReader(file)] == ["penstock", "zarr"]
    assert Path("launches.parquet").read_bytes()[:4] == b"PAR1"
    assert main(["report", "none.ledger"]) == 2


# --- ladders that do not climb evenly -----------------------------------------------------------


def test_panels_of_ladders_hold_their_bars_whatever_the_order(tmp_path: Path) -> None:
    slow = ladder_records(0.1, 0.2, 0.3, 0.4, 0.5)
    fast = [r for n in ("L0", "L1") for r in launches(0.01, rung=n, threads=8)]
    figure = draw_ladders(loader_ladder.ladders_of(slow + fast))
    for axis in figure.axes:
        assert axis.get_xlim()[1] > max(bar.get_x() + bar.get_width() for bar in axis.patches)
    assert [axis.get_title("left") for axis in figure.axes] == [
        "Batches of 4, 2 threads", "Batches of 4, 8 threads",
    ]  # fmt: skip
    late = [r for n in ("L3", "L4") for r in launches(0.5, rung=n, latency_ms=20.0)]
    written = plot_ladders(slow + fast + late, tmp_path / "ladder")
    assert [path.name for path in written] == ["ladder_1.png", "ladder_2.png"]


@pytest.mark.parametrize(
    ("seconds", "sentence", "refuted"),
    [
        (  # a step alone said to cost more than the whole
            (0.00245, 0.00394, 0.0493, 0.0147, 0.0272),
            "Step L4 (loader) costs most: 12.5 ms of the 27.2 ms",
            {"L2": "L3"},
        ),
        (
            (0.0024, 0.0158, 0.0302, 0.0132, 0.0161),
            "Step L3 (scatter) with L1 (files) and L2 (decode) costs most: 10.8 ms of the 16.1 ms",
            {"L1": "L3", "L2": "L3"},
        ),
    ],
)
def test_a_step_that_one_above_beats_is_not_said_to_cost_most(
    seconds: tuple[float, ...], sentence: str, refuted: dict[str, str]
) -> None:
    records = [r for r in ladder_records(*seconds) if r.launch == 0]
    (ladder,) = loader_ladder.ladders_of(records)
    assert ladder.refuted == refuted
    assert sentence in ladder.sentence()
    assert "which does the same and more" in said(records)
    (sure,) = loader_ladder.ladders_of(ladder_records(*seconds))
    assert sure.refuted == refuted, "five launches that agree say so, too"


def test_noise_refutes_no_step() -> None:
    records = ladder_records(0.1, 0.12, 0.2, 0.42, 0.4)
    for number, factor in enumerate((0.8, 1.3, 1.0, 0.9, 1.2)):
        records[15 + number] = record(number, 0.42 * factor, rung="L3")
    (ladder,) = loader_ladder.ladders_of(records)
    assert ladder.refuted == {} and ladder.limiting == "L3"


def test_far_data_is_no_share_of_a_device_and_its_network_is_named() -> None:
    far = {"latency_ms": 20.0}
    records = launches(0.5, rung="L3", **far) + launches(0.49, rung="L4", **far)
    (ladder,) = loader_ladder.ladders_of(records)
    assert ladder.sentence().startswith(
        "All up to step L3 (scatter), the lowest that was measured, costs most, the network with "
        "it: 510 ms a batch"
    )
    table = ladder.section().table
    assert [line[5] for line in table] == ["of L0", "-", "-"]


# --- what was read ahead ------------------------------------------------------------------------


class _Ahead:
    """A loader whose batches come one by one, but after ``late`` of them 8 are read at once."""

    ahead = 3

    def __init__(self, whole: Any, late: int) -> None:
        self._whole, self._late = whole, late
        self.loader: Any = None

    def batches(self) -> Iterator[Mapping[str, Any]]:
        batches = self._whole.batches()
        yield from (next(batches) for _ in range(self._late))
        yield from [{n: a.copy() for n, a in next(batches).items()} for _ in range(8)]

    def close(self) -> None:
        self._whole.close()


@pytest.mark.parametrize(("late", "share"), [(0, 0.0), (9, 1.0)])
def test_what_was_read_ahead_of_the_samples_is_told(
    data: Path, monkeypatch: pytest.MonkeyPatch, late: int, share: float
) -> None:
    """With 3 batches ahead and one to warm up, 2 more are taken before 1 is timed."""
    make = registry.make_contender
    monkeypatch.setattr(
        measured_by, "make_contender", lambda *args, **how: _Ahead(make(*args, **how), late)
    )
    scenario = LoaderScenario(case(data, loader="zarr", batches=1, cache="as-is"))
    facts = measured(scenario, 1)["facts"]
    if facts["read_amplification"] is None:
        pytest.skip("nobody counts reads here")
    assert facts["ahead"] == 3
    assert facts["fresh"] == pytest.approx(share, abs=0.1)


def test_to_count_is_not_counted() -> None:
    """Who looks for children reads of every process of the machine."""
    before = Counters.of_tree()
    if before.stored is None:
        pytest.skip("nobody counts reads here")
    spent = Counters.of_tree() - before
    assert spent.stored is not None and spent.stored < 1000


def test_where_nobody_counts_a_loader_that_may_have_read_all_ahead_is_told(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counters(1.0, None)
    monkeypatch.setattr(Counters, "of_tree", lambda *_: counted)
    few, many = (measured(LoaderScenario(case(data)), batches)["facts"] for batches in (2, 3))
    assert few["ahead"] == 2 and few["fresh"] == 0.0
    assert many["fresh"] is None


def test_a_chunk_that_a_library_fills_in_silence_is_wrong(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("zarr")
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    scenario = LoaderScenario(case(copy, loader="zarr"))
    (path, *_) = scenario._data.files_of(scenario._order.items(0, 0))
    path.unlink()
    with pytest.raises(WrongResult, match="1 did not come and 1 arrays were wrong"):
        measured(scenario)


def own_array(path: Path, kind: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Somebody's array: of a Zarr, of an N5, or in an OME-Zarr image."""
    ts = pytest.importorskip("tensorstore")
    values = np.arange(math.prod(shape), dtype=np.uint16).reshape(shape)
    level = path / "0" if kind == "ome" else path
    driver, key = ("n5", "blockSize") if kind == "n5" else ("zarr", "chunks")
    metadata: dict[str, Any] = {key: [1, *(3 for _ in shape[2:]), 8]}
    if kind == "n5":
        metadata |= {"dimensions": shape, "dataType": "uint16", "compression": {"type": "raw"}}
    else:
        metadata |= {"shape": shape, "dtype": "<u2"}
    spec = {"driver": driver, "kvstore": f"file://{level}/", "metadata": metadata, "create": True}
    ts.open(spec).result().write(values).result()
    if kind == "ome":
        image = {"multiscales": [{"version": "0.4", "datasets": [{"path": "0"}]}]}
        (path / ".zattrs").write_text(json.dumps(image))
        (path / ".zgroup").write_text('{"zarr_format": 2}')
    return values


@pytest.mark.parametrize("kind", ["zarr", "n5", "ome"])
def test_any_array_is_measured_and_checked(kind: str, tmp_path: Path) -> None:
    """Not only packed sets: what it lacks, checksums and sizes, is read from the array."""
    path = tmp_path / "own"
    values = own_array(path, kind, (16, 6, 8))
    case = {
        "data": str(path), "shuffle": "sample", "window": None, "seed": 0, "cache": "warm",
        "batches": 2, "warmup": 1, "endpoint": None, "latency_ms": 0.0, "loader": "penstock",
        "batch": 4, "threads": 1,
    }  # fmt: skip
    scenario = LoaderScenario(case)
    try:
        for _ in range(4):
            scenario.step("samples")
        scenario.verify()
    finally:
        scenario.close()
    assert scenario.facts["wrong"] == 0 and scenario.facts["verified_batches"] >= 4
    assert scenario.facts["stored_bytes"] > 0

    checked = with_checks(open_dataset_or_array(path), range(16))
    assert checked.checks["data"].tolist() == [checksum(sample) for sample in values]


@pytest.mark.parametrize("kind", ["n5", "ome"])
@pytest.mark.parametrize("verb", ["bench", "tune"])
def test_patches_of_a_volume_are_samples(
    kind: str, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
    found = {record.case["loader"]: record for record in Ledger(tmp_path / "ledger").records()}
    facts = found["penstock"].facts
    assert found["penstock"].ok and facts["samples"] == 8 and facts["sample_bytes"] == 320
    assert (facts["wrong"], facts["missing"], facts["duplicates"]) == (0, 0, 0)
    zarrs = found["zarr"]
    assert zarrs.status == "unsupported" and zarrs.error is not None
    assert "not 8 patches of each" in zarrs.error.message or kind == "n5"


@pytest.mark.parametrize("name", ["L0", "L1", "L2", "L3", "L4"])
def test_rungs_read_patches(name: str, tmp_path: Path) -> None:
    own_array(tmp_path / "own", "zarr", (1, 8, 9, 16))
    knobs = case(tmp_path / "own", patch=[1, 4, 5, 8], shuffle="global", batch=2, batches=2)
    del knobs["loader"]
    facts = measured(rung({**knobs, "rung": name}))["facts"]
    assert facts.get("wrong", 0) == 0 and facts["samples"] == 8
