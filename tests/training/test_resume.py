"""A run that is stopped, killed or crashes goes on, and ends in the weights of a whole one."""

import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base import Incomplete, PenstockError, TrainConfig, UsageError, files
from penstock.cli import main
from penstock.instruments.spans import PhaseTimer
from penstock.training import begun_epoch

from ..later import imported_later
from .kit import assert_same, kill_at, rows, train_workload, weights
from .kit import config_of as small_config

torch = imported_later("torch")

if find_spec("lightning_fabric") is None:
    pytest.skip("lightning_fabric is not installed", allow_module_level=True)


pytestmark = pytest.mark.usefixtures("one_thread")


def config_of(out: Path, **changes: Any) -> TrainConfig:
    """Of 58 points in 8 batches, and 12 in 2 that are held back."""
    return small_config(out, **{"num_samples": 83} | changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """The folder of a run that nobody stopped: 8 steps in each of 3 epochs."""
    folder, threads = tmp_path_factory.mktemp("runs") / "whole", torch.get_num_threads()
    torch.set_num_threads(1)  # as in every run that is compared with it
    train_workload("spiral", config_of(folder))
    torch.set_num_threads(threads)
    return folder


def history(out: Path) -> list[dict[str, Any]]:
    """The epochs of a run, without their times."""
    rows = json.loads((out / "training_results.json").read_text())["history"]
    return [{k: v for k, v in row.items() if k not in ("train_s", "val_s")} for row in rows]


@pytest.mark.parametrize(
    ("step", "workers"),
    [
        (15, 0),
        pytest.param(8, 0, marks=pytest.mark.slow),
        pytest.param(3, 2, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_in_whole_weights(whole: Path, tmp_path, step: int, workers: int) -> None:
    """There are 8 steps to an epoch: inside the first, at its end, inside the second, ..."""

    parts = tmp_path / "parts"
    with pytest.raises(Incomplete, match=r"stopped by SIGTERM after step \d+ of 24"):
        train_workload("spiral", config_of(parts, num_workers=workers), progress=kill_at(step))
    document = json.loads((parts / "training_results.json").read_text())
    # The signal falls between two steps, and ends the run at the next boundary; at an epoch's end,
    # in its validation.
    ended = step if step % 8 == 0 else step + 1
    assert (document["status"], document["steps"]) == ("stopped", ended)
    resumed = train_workload("spiral", config_of(parts, resume=True, num_workers=workers))
    assert_same(weights(whole), weights(parts))
    assert resumed["resumed_at_steps"] == [ended]
    assert [row["step"] for row in rows(parts)] == [str(n) for n in range(1, 25)]
    assert [row["loss"] for row in rows(parts)] == [row["loss"] for row in rows(whole)]
    assert history(parts) == history(whole)
    assert resumed["best"] == json.loads((whole / "training_results.json").read_text())["best"]
    best = [torch.load(out / "best_model.pth", weights_only=True) for out in (whole, parts)]
    assert_same(*best)


@pytest.mark.slow
def test_a_crashed_run_goes_on_from_its_last_checkpoint(whole: Path, tmp_path) -> None:
    class Crash(Exception):
        pass

    def crash(now: Any) -> None:
        if now.step == 14:
            raise Crash

    parts = tmp_path / "parts"
    with pytest.raises(Crash):
        train_workload("spiral", config_of(parts, checkpoint_every=3), progress=crash)
    assert len(rows(parts)) == 14  # of which two were not in the checkpoint of step 12
    assert train_workload("spiral", config_of(parts, resume=True))["resumed_at_steps"] == [12]
    assert_same(weights(whole), weights(parts))
    assert [row["step"] for row in rows(parts)] == [str(n) for n in range(1, 25)]


@pytest.mark.slow
def test_more_steps_go_on_inside_the_epoch(tmp_path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_workload("spiral", config_of(whole, max_steps=13))
    first = train_workload("spiral", config_of(parts, max_steps=10))
    assert [row["step"] for row in first["history"]] == [8, 10]
    assert begun_epoch(first) == "2 of 8 steps"
    results = train_workload("spiral", config_of(parts, max_steps=13, resume=True))
    assert [row["step"] for row in results["history"]] == [8, 13]
    assert results["history"][1]["samples"] == 5 * 8
    assert_same(weights(whole), weights(parts))


def test_a_device_is_asked_before_a_checkpoint(whole: Path, tmp_path, monkeypatch) -> None:
    """The first progress is told at the end of the first epoch."""
    monkeypatch.setattr(PhaseTimer, "drain_every", 50)
    with pytest.raises(Incomplete):
        train_workload("spiral", config_of(tmp_path), progress=kill_at(8))
    train_workload("spiral", config_of(tmp_path, resume=True))
    assert history(tmp_path) == history(whole)
    assert_same(weights(whole), weights(tmp_path))


@pytest.mark.slow
def test_what_follows_a_checkpoint_is_made_up_for(whole: Path, tmp_path) -> None:
    """As if the run had been killed between the last state and the files of the best one."""

    parts = tmp_path / "parts"
    train_workload("spiral", config_of(parts, epochs=1))
    (parts / "best_model.pth").unlink()
    train_workload("spiral", config_of(parts, resume=True))
    best = [torch.load(out / "best_model.pth", weights_only=True) for out in (whole, parts)]
    assert_same(*best)


def test_the_first_ctrl_c_saves_and_the_second_does_not_wait(tmp_path) -> None:
    from penstock.training.ranks import Stop

    def look(now: Any) -> None:
        if now.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Incomplete, match=r"stopped by SIGINT after step 6 of 24"):
        train_workload("spiral", config_of(tmp_path), progress=look)
    with pytest.raises(KeyboardInterrupt), Stop():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_a_run_stopped_before_a_checkpoint_begins_anew(tmp_path, capsys, monkeypatch) -> None:
    """What is said of how to go on is true: with nothing saved, and with something."""

    from penstock.training.step import Stepper

    def interrupted(self: Any, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "out"
    words = ["train", "spiral", "--num-samples", "83", "--epochs", "1", "--device", "cpu"]
    words += ["--output-dir", str(out)]
    with monkeypatch.context() as patched:
        patched.setattr(Stepper, "take", interrupted)  # in the first step
        assert main(words) == 3
    again = "penstock train: interrupted; run again with --resume, which goes on from the last"
    assert capsys.readouterr().err == f"{again} checkpoint if there is one\n"
    assert (out / "args.json").exists()
    assert main([*words, "--resume"]) == 0
    begun = f"--resume: {out} holds no checkpoint yet; the run begins anew\n"
    assert begun in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(Stepper, "take", interrupted)
        assert main([*words, "--resume", "--epochs", "2"]) == 3
    assert again in capsys.readouterr().err
    assert main([*words, "--resume", "--epochs", "2"]) == 0
    assert "anew" not in capsys.readouterr().err
    assert json.loads((out / "training_results.json").read_text())["resumed_at_steps"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device is always full")
@pytest.mark.parametrize(("folder", "file"), [("checkpoints", "last.pt"), ("run", "args.json")])
def test_a_full_disk_is_named_with_the_file(folder: str, file: str, tmp_path, monkeypatch) -> None:
    """torch tells of a full disk that a position is unexpected."""
    real = files._draft

    def full(parent: Path) -> Path:
        draft = real(parent)
        if parent.name == folder:
            draft.unlink()
            draft.symlink_to("/dev/full")
        return draft

    out, sentence = tmp_path / "run", rf"{file} could not be saved: no space left on device; "
    with monkeypatch.context() as patched:
        patched.setattr(files, "_draft", full)
        with pytest.raises(PenstockError, match=f"{sentence}nothing .* --overwrite begins anew"):
            train_workload("spiral", config_of(out, epochs=1))
    assert not list(out.rglob("*.part")) and not (out / "checkpoints" / "last.pt").exists()
    if folder == "checkpoints":
        train_workload("spiral", config_of(out, epochs=1, overwrite=True))
        monkeypatch.setattr(files, "_draft", full)
        with pytest.raises(PenstockError, match=f"{sentence}what was .* --resume goes on from it"):
            train_workload("spiral", config_of(out, epochs=2, resume=True))


def test_a_run_that_only_validates_still_tells_its_loss(tmp_path) -> None:
    """It was stopped as an epoch's steps were done, and takes none when it goes on."""
    seen: list[Any] = []
    with pytest.raises(Incomplete):
        train_workload("spiral", config_of(tmp_path, epochs=1), progress=kill_at(8))
    train_workload("spiral", config_of(tmp_path, epochs=1, resume=True), progress=seen.append)
    assert [now.loss for now in seen] == [float(rows(tmp_path)[-1]["loss"])]


def test_to_resume_where_nothing_is_is_to_begin_and_removes_no_result(tmp_path) -> None:
    said: list[str] = []
    results = train_workload(
        "spiral", config_of(tmp_path / "new", epochs=1, resume=True), say=said.append
    )
    assert results["resumed_at_steps"] == []
    assert said == [f"--resume: {tmp_path / 'new'} holds no checkpoint yet; the run begins anew"]
    (tmp_path / "new" / "checkpoints" / "last.pt").unlink()
    with pytest.raises(
        UsageError, match=r"no checkpoint .*last.pt, and .*results.json is of a run"
    ):
        train_workload("spiral", config_of(tmp_path / "new", epochs=1, resume=True))
    assert (tmp_path / "new" / "best_model.pth").exists()


def test_a_signal_before_and_after_a_run_is_not_ours(tmp_path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    train_workload("spiral", config_of(tmp_path, epochs=1))
    assert signal.getsignal(signal.SIGTERM) is before


def test_random_numbers_go_on() -> None:
    import random

    from penstock.training.checkpoint import random_state, set_random_state

    device = torch.device("cpu")
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    np.random.normal()  # leaves half a pair behind
    state = random_state(device)

    def draw() -> list[float]:
        return [float(torch.rand(())), np.random.normal(), random.gauss(0, 1), random.random()]

    first = draw()
    draw()
    set_random_state(state, device)
    assert draw() == first
