"""The benchmarks of the detector and of the emulator: reports computed, smoke tests that run."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ERA = Path(__file__).parents[2] / "shared" / "data" / "era-interim-uvz.nc"


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return SimpleNamespace(**runpy.run_path(str(BENCHMARKS / f"{name}.py")))


def some_run(f1: float, minutes: float) -> dict[str, Any]:
    names = ("loc_fscore", "loc_fscore_shore", "vessel_fscore", "fishing_fscore", "length_acc")
    scores = {**dict.fromkeys(names, 0.5), "aggregate": None, "loc_fscore": f1}
    step = {"seconds": 60 * minutes, "cpu_s": 100.0, "step": "train", "command": "train --fast"}
    training = {"parameters": 1234, "steps": 90, "batch_size": 4, "epochs": 6, "samples_per_s": 2.5}
    training |= {"judge": "val_loc_fscore", "best": {"epoch": 3, "score": 0.875}}
    training["facts"] = {
        "chips": {"channels": ["vh"]},
        "compiled_operators": False,
        "torchvision": "0.1",
    }
    about = {"time": "2026-01-02T03:04:05", "machine": "a computer", "load": 0.5, "scenes": 4}
    parts = {"steps": [step], "training": training, "score": scores, "strict_official": scores}
    return {**about, **parts}


def test_verdicts_on_the_detector_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    lines_of = loaded("detector", monkeypatch).lines_of
    text = "\n".join(lines_of(some_run(0.91, 7)))
    assert "- met: localisation F1 on unseen scenes is 0.91, target at least 0.8." in text
    assert "- met: minutes of `penstock train` are 7, target at most 15." in text
    assert "| repaired | 0.910 | 0.500 | 0.500 | 0.500 | 0.500 | - |" in text
    assert "roi_align are Penstock's plain torch" in text
    text = "\n".join(lines_of(some_run(0.62, 21)))
    assert "**NOT MET**: localisation F1 on unseen scenes is 0.62" in text
    assert "**NOT MET**: minutes of `penstock train` are 21" in text


def test_verdicts_on_the_emulator_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    table = loaded("emulator", monkeypatch).table_of_errors
    final = {"val_relative_rmse": 0.7, "val_rmse_u_200": 2.0, "val_persistence_u_200": 8.0,
             "val_rmse_v_200": 9.0, "val_persistence_v_200": 6.0}  # fmt: skip
    lines = table({"final": final})
    assert "| u_200 | 2 | 8 | 0.250 |" in lines
    assert lines[-1].startswith("- met: ") and "is 0.700 of" in lines[-1]
    assert "below in 1 of 2 channels." in lines[-1]
    assert table({"final": {**final, "val_relative_rmse": 1.1}})[-1].startswith("- **NOT MET**")


@pytest.mark.long
@pytest.mark.parametrize("name", ["detector", "emulator"])
def test_quick_benchmarks_run(name: str, tmp_path: Path) -> None:
    needed = {"detector": ("torchvision", "rasterio"), "emulator": ("xarray",)}[name]
    if not all(map(find_spec, (*needed, "lightning_fabric", "matplotlib"))):
        pytest.skip(f"{' or '.join(needed)} is not installed")
    if name == "emulator" and not ERA.is_file():
        pytest.skip(f"{ERA} is not here")
    before = (BENCHMARKS / "README.md").read_text()
    words = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--results", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (BENCHMARKS / "README.md").read_text() == before
    (out,) = tmp_path.iterdir()
    assert done.stdout.splitlines()[-1] in (out / "report.md").read_text()
    if name == "detector":
        document = json.loads((out / "score.json").read_text())
        assert 0 <= document["score"]["loc_fscore"] <= 1
        assert (out / "loss.png").stat().st_size > 10_000 < (out / "detections.png").stat().st_size
        assert str(tmp_path.parent) not in (out / "score.json").read_text()


def test_without_the_data_the_emulator_is_skipped_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(BENCHMARKS / "emulator.py")
    monkeypatch.setattr(sys, "argv", [script, "--data", str(tmp_path / "no.nc")])
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    runpy.run_path(script, run_name="__main__")
    assert capsys.readouterr().out.startswith("skipped: there is no ")


@pytest.mark.slow
def test_the_benchmark_of_logs_reads_each_kind() -> None:
    readme = (BENCHMARKS / "README.md").read_text()
    script = str(BENCHMARKS / "slurm_logs.py")
    done = subprocess.run([sys.executable, script, "--mb", "1", "--rounds", "1"],
                          check=True, capture_output=True, text=True)  # fmt: skip
    for log in ("bars", "labelled", "epochs", "bars, .gz", "large"):
        assert f"| {log}, 1 MB |" in done.stdout
    assert (BENCHMARKS / "README.md").read_text() == readme


def test_the_benchmark_of_logs_says_what_is_met(monkeypatch: pytest.MonkeyPatch) -> None:
    report = loaded("slurm_logs", monkeypatch).report
    row = {"log": "bars", "size": 3e8, "contender": "penstock", "round": 0, "peak_bytes": 3e7}
    assert "- met: 40 MB/s; the slowest log is read at 41" in report([{**row, "mb_s": 41.0}])
    text = report([{**row, "mb_s": 39.0, "peak_bytes": 2e8}])
    assert text.count("NOT MET") == 2
