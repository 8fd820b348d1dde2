"""Real trainings, wherever they are read."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.scaling.sources.read import read_runs

from ..preloaded import started
from ..training.kit import forked_ranks
from .kit import one, write


@pytest.mark.slow
def test_a_real_training_is_the_same_run_wherever_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder, its log, a real database of MLflow and a real archive of Comet."""
    pytest.importorskip("torch")
    words = "train spiral --epochs 2 --num-samples 1000 --device cpu --track".split()
    trackers = [
        name
        for name, package in (("mlflow", "mlflow"), ("comet", "comet_ml"))
        if find_spec(package)
    ]
    monkeypatch.setenv("SLURM_JOB_ID", "31")
    process = started(tmp_path, [*words, *trackers, "--output-dir", str(tmp_path / "run")])
    process.join()
    printed = (tmp_path / "said").read_text()
    assert process.exitcode == 0, printed
    (folder,) = read_runs([tmp_path / "run"])
    others = [*tmp_path.glob("run/**/*.db"), *tmp_path.glob("run/**/*.zip")]
    assert len(others) == len(trackers)
    assert folder.complete and folder.ranks[0].local
    for other in others:
        (tracked,) = read_runs([other])
        for name in ("devices", "seconds", "epochs", "samples", "batch", "val_loss", "val_acc"):
            assert getattr(tracked, name) == pytest.approx(getattr(folder, name)), (name, other)
        assert len(read_runs([tmp_path / "run", other])) == 1
    (path,) = write(tmp_path, {"slurm-31.out": printed})
    log_run = one(path)
    assert folder.seconds is not None
    assert log_run.seconds == pytest.approx(folder.seconds, abs=0.006)
    assert (log_run.job, log_run.devices, log_run.epochs, log_run.batch) == ("31", 1, 2, 32)
    assert (log_run.samples, log_run.steps) == (folder.samples, folder.steps)
    assert len(read_runs([tmp_path / "run", path])) == 1
    assert log_run.val_acc == pytest.approx(folder.val_acc, abs=1e-4)


@pytest.mark.slow
def test_a_rank_slowed_by_50_ms_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    words = ["tests.scaling.slowed:Slowed", "--num-samples", "200", "--batch-size", "4"]
    done = forked_ranks(tmp_path / "run", *words, "--epochs", "2", "--optimizer", "adam")
    assert done.codes == [0, 0], done.said
    assert main(["explain", str(tmp_path / "run")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"Rank 1 is the last in (?:[89]\d|100)% of \d+ steps", said), said
