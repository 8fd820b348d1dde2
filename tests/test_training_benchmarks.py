"""The benchmarks of the detector, the emulator and of logs: smoke tests that run."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not find_spec("torch"), reason="torch is not installed")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ERA = Path(__file__).parents[2] / "shared" / "data" / "era-interim-uvz.nc"


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
