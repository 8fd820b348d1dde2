"""The benchmark's smoke test runs, and says of every contender that it ran or why it did not."""

import ast
import importlib
import json
import runpy
import statistics
import subprocess
import sys
from importlib.util import find_spec

import pytest

from .places import ROOT, SHARED

BENCHMARKS = ROOT / "benchmarks"


def test_benchmarks_import_names_that_are_there() -> None:
    """Most benchmarks run for minutes and by hand: a name that has gone is found here."""
    gone = []
    for file in sorted(BENCHMARKS.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
                module = importlib.import_module(str(node.module))
                names = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                rooms = [f"{node.module}.{name}" for name in names]
                gone += [(file.name, room) for room in rooms if find_spec(room) is None]
    assert gone == []


@pytest.mark.long
def test_quick_benchmark_measures_or_skips_every_contender(tmp_path, monkeypatch) -> None:
    for library in ("torch", "tensorstore", "zarr"):
        pytest.importorskip(library)
    readme = (BENCHMARKS / "README.md").read_text()
    command = [sys.executable, str(BENCHMARKS / "infer.py"), "--quick", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (BENCHMARKS / "README.md").read_text() == readme

    (file,) = tmp_path.glob("*-infer.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = runpy.run_path(str(BENCHMARKS / "infer.py"))
    for model, entries in bench["QUICK"].items():
        for entry in entries:
            launches = [r for r in records if (r.get("entry"), r.get("model")) == (entry, model)]
            measured = [r for r in launches if r["kind"] in ("penstock", "peer")]
            missing = [r for r in records if r.get("entry") == entry and r["status"] != "ok"]
            if missing:
                assert entry in bench["peers"](), missing
                assert "pip install" in done.stdout
            else:
                (record,) = measured
                assert record["seconds"] > 0 and record["peak_rss"] > 0

    # A peer that owns its voxels the same way computes the same volume.
    equal = {(r["model"], r["entry"]): r["differing"] for r in records if r["kind"] == "equality"}
    for (model, entry), differing in equal.items():
        assert differing == 0 or (model, entry) == ("three_conv", "monai")
    assert ("identity", "naive loop") in equal

    assert "### Targets" in done.stdout
    penstock = [r for r in records if r["kind"] == "penstock"]
    assert all(r["extra"]["write_measured"] == pytest.approx(1, abs=0.01) for r in penstock)


def test_report_is_computed_from_records(monkeypatch) -> None:
    """Change the data and the sentence changes: a target is met, then missed by what it lacks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench = runpy.run_path(str(BENCHMARKS / "infer.py"))
    at_least = bench["at_least"]
    assert at_least("speed", [0.8, 0.9, 1.0], 0.85).startswith("- met: speed is 0.900 [0.800 - ")
    assert at_least("speed", [0.8], 0.85).startswith("- **NOT MET by 0.050**")
    assert "NOT MET: speed: not measured" in at_least("speed", [], 0.85)
    # Pairs are made within a round, and a round that lacks one of the two gives none.
    above = {1: {"seconds": 2.0}, 2: {"seconds": 9.0}}
    below = {1: {"seconds": 1.0}, 3: {"seconds": 1.0}}
    assert bench["ratios"](above, below) == [2.0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "left"),
    [
        ("loader_remote", "*-loader-remote.jsonl.gz"),
        ("drain", "*-drain.report/report.md"),
        ("study", "*-study/scaling.md"),
        ("detector", "*/detections.png"),
        ("emulator", "*/report.md"),
    ],
)
def test_quick_benchmarks_leave_what_they_say(script: str, left: str, tmp_path) -> None:
    needed = "torch lightning_fabric xarray dask boto3 matplotlib torchvision rasterio"
    # Not imported: PyPI's torchvision does not load beside a CPU torch unless Penstock came first.
    if lacking := [library for library in needed.split() if find_spec(library) is None]:
        pytest.skip(f"not installed: {', '.join(lacking)}")
    if script == "emulator" and not (SHARED / "era-interim-uvz.nc").is_file():
        pytest.skip("its data are not here")
    readme = (BENCHMARKS / "README.md").read_text()
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), "--quick"]
    done = subprocess.run(
        [*command, "--results", str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (BENCHMARKS / "README.md").read_text() == readme
    assert list(tmp_path.glob(left))
    assert "| " in done.stdout


@pytest.mark.long
def test_the_quick_grid_of_layouts_verifies_and_times(tmp_path) -> None:
    for library in ("torch", "tensorstore", "zarr", "dask", "xarray"):
        pytest.importorskip(library)
    readme = (BENCHMARKS / "README.md").read_text()
    command = [sys.executable, str(BENCHMARKS / "loader.py"), "--grid", "--quick"]
    command += ["--results", str(tmp_path), "--only", "small chunks"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "- not yet measured: patches in order; patches shuffled" in done.stdout
    # Once more: all is there, and nothing is measured anew.
    before = (tmp_path / "loader-grid.jsonl.gz").read_bytes()
    again = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (tmp_path / "loader-grid.jsonl.gz").read_bytes() == before
    assert again.stdout in done.stdout, "the same page, without the lines of what is under way"
    assert (BENCHMARKS / "README.md").read_text() == readme
    assert "| small chunks | shuffled |" in done.stdout


def test_a_layout_is_met_missed_or_undecided(monkeypatch) -> None:
    """Change the times and the verdict changes; the bound is of every contender, not of one."""
    pytest.importorskip("zarr")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    grid = runpy.run_path(str(BENCHMARKS / "loader_grid.py"))

    def verdict(ours: list[float], **others: list[float]) -> str:
        times = {"penstock": ours, **others}
        rows = [
            {"contender": who, "round": number, "seconds": seconds}
            for who, epochs in times.items()
            for number, seconds in enumerate(epochs)
        ]
        return str(grid["verdict"](rows).decided)

    assert verdict([1.0, 1.01, 0.99], loop=[1.1, 1.12, 1.09], dask=[9.0, 9.1, 9.0]) == "met"
    assert verdict([1.2, 1.21, 1.19], loop=[1.1, 1.1, 1.1], dask=[9.0, 9.1, 9.0]) == "missed"
    assert verdict([1.0, 1.5, 0.7], loop=[1.1, 1.0, 1.1]) == "undecided"
    assert verdict([1.0, 1.0, 1.0], loop=[1.1, 1.1, 1.1], dask=[0.5, 2.0, 1.0]) == "undecided"
    assert verdict([1.0, 1.01, 0.99], loop=[1.1, 1.12, 1.09], dask=[9.0]) == "met", "out of it"


@pytest.mark.slow
def test_the_pages_say_what_the_grid_shows(monkeypatch) -> None:
    """The page is that of the raw samples, the target is met on it, and docs/load.md has them."""
    pytest.importorskip("zarr")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    grid = runpy.run_path(str(BENCHMARKS / "loader_grid.py"))
    kept = BENCHMARKS / "results" / "loader-grid.jsonl.gz"
    rows, layouts = grid["read"](kept), grid["LAYOUTS"]
    block = "\n".join([grid["head"](rows, kept.name), "", *grid["page"](rows, layouts)])
    page = (BENCHMARKS / "README.md").read_text().partition("<!-- loader-grid: begin -->")[2]
    assert page.partition("<!-- loader-grid: end -->")[0].strip() == block
    warm = {key: group for key, group in grid["groups"](rows).items() if key[1] != grid["COLD"]}
    orders = len(warm)
    assert len(layouts) >= 12 and orders == 2 * len(layouts)
    assert {grid["verdict"](group).decided for group in warm.values()} == {"met"}
    medians = {}
    for other in {row["contender"] for row in rows} - {grid["OURS"]}:
        ratios = sorted(grid["ratio"](group, other).value for group in warm.values())
        medians[other] = ratios[0], ratios[-1], statistics.median(ratios)
    assert len(medians) == 5 and all(median < 1 for _, _, median in medians.values())
    least, most, median = medians["tensorstore-loop"]
    guide = " ".join((BENCHMARKS.parent / "docs" / "load.md").read_text().split())
    assert f"on {len(layouts)} layouts of local files" in guide
    assert f"on each of these {orders}." in guide
    assert f"{least:.2f} to {most:.2f} of the loop's time, with a median of {median:.2f}" in guide
    firsts = sorted(
        grid["ratio"](group, "tensorstore-loop", "first_s").value for group in warm.values()
    )
    least, most, median = firsts[0], firsts[-1], statistics.median(firsts)
    assert (
        f"took {least:.2f} to {most:.2f} of the loop's time, with a median of {median:.2f}" in guide
    )


def test_without_the_data_the_emulator_is_skipped_in_words(tmp_path, monkeypatch, capsys) -> None:
    script = str(BENCHMARKS / "emulator.py")
    monkeypatch.setattr(sys, "argv", [script, "--data", str(tmp_path / "no.nc")])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(script, run_name="__main__")
    assert capsys.readouterr().out.startswith("skipped: there is no ")
