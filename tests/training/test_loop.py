"""The loop of training: same steps whatever interrupts it or shares it; what it writes."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("lightning_fabric")

from penstock.base.config.knobs import build
from penstock.base.config.train import TRAIN_DEFAULTS, TrainConfig
from penstock.base.errors import Incomplete, PenstockError, UsageError
from penstock.base.files import held_alone
from penstock.bench.launch.worker import status_of
from penstock.cli import main
from penstock.instruments.phases import DeviceLaps, Laps
from penstock.loading.order import Order
from penstock.models.weights import read_tensors
from penstock.training import ranks
from penstock.training.checkpoint import Checkpoints, random_state, set_random_state
from penstock.training.feed import TorchFeed
from penstock.training.loop import train_workload
from penstock.training.ranks import Stop
from penstock.training.step import Stepper
from penstock.training.step_log import StepLog
from penstock.training.workloads import make_workload
from penstock.training.workloads.spiral import Spiral, spirals

SMALL = {"num_samples": 203, "batch_size": 8, "epochs": 3, "hidden_dims": (8, 4), "device": "cpu"}


pytestmark = pytest.mark.usefixtures("one_thread")


def config_of(out: Path, **changes: Any) -> TrainConfig:
    return build(TrainConfig, TRAIN_DEFAULTS["spiral"], SMALL, {"output_dir": out}, changes)


def weights(out: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(out / "checkpoints" / "last.pt", weights_only=True)[
        "model"
    ]
    return found


def rows(out: Path, rank: int = 0) -> list[dict[str, str]]:
    with (out / "steps" / f"rank{rank}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def assert_same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


# --- what is learnt ----------------------------------------------------------------------------


def test_spiral_is_learnt(tmp_path: Path) -> None:
    config = build(
        TrainConfig,
        TRAIN_DEFAULTS["spiral"],
        {"output_dir": tmp_path, "epochs": 12, "learning_rate": 0.01, "batch_size": 64},
        {"dropout": 0.0, "schedule": "cosine", "device": "cpu"},
    )
    results = train_workload("spiral", config)
    assert results["best"]["score"] >= 0.95
    assert results["samples"] == 12 * 7000
    # The weights that are kept are those of the best epoch.
    workload = Spiral(config)
    model = workload.model()
    model.load_state_dict(torch.load(tmp_path / "best_model.pth", weights_only=True))
    points, classes = workload.val.tensors
    right = (model(points).argmax(1) == classes).double().mean()
    assert float(right) == pytest.approx(results["best"]["score"], abs=1e-12)


def test_the_callers_default_dtype_changes_no_weight(tmp_path: Path) -> None:
    found = []
    for default in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            train_workload("spiral", config_of(tmp_path / str(default), epochs=1, num_samples=40))
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(weights(tmp_path / str(default)))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_spirals_without_noise_lie_on_their_curves() -> None:
    points, classes = spirals(101, noise=0.0, seed=3)
    radius = points.norm(dim=1)
    angle = (radius - 0.1) / 0.9 * 4 * math.pi + math.pi * classes
    expected = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    assert torch.allclose(points, expected, atol=1e-5)
    assert int(classes.sum()) == 50


# --- stop and go on ----------------------------------------------------------------------------


def kill_at(step: int) -> Callable[[Any], None]:
    def look(now: Any) -> None:
        if now.step == step and not now.validated:
            os.kill(os.getpid(), signal.SIGTERM)

    return look


@pytest.mark.parametrize(
    "workers",
    [pytest.param(0, id="in place"), pytest.param(2, id="two workers", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("step", [1, 7, 18, 35, 53], ids=lambda step: f"killed at {step}")
def test_a_killed_run_ends_in_the_weights_of_a_whole_one(
    tmp_path: Path, step: int, workers: int
) -> None:
    """There are 18 steps to an epoch: inside the first, at its end, inside the second, ..."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    uninterrupted = train_workload("spiral", config_of(whole))
    with pytest.raises(Incomplete, match=r"stopped by SIGTERM after step \d+ of 54"):
        train_workload("spiral", config_of(parts, num_workers=workers), progress=kill_at(step))
    told = json.loads((parts / "training_results.json").read_text())
    # The signal falls between two steps, and ends the run at the next boundary; at an epoch's end,
    # in its validation.
    ended = step if step % 18 == 0 else step + 1
    assert (told["status"], told["steps"]) == ("stopped", ended)
    resumed = train_workload("spiral", config_of(parts, resume=True, num_workers=workers))
    assert_same(weights(whole), weights(parts))
    assert resumed["resumed_at_steps"] == [ended]
    assert [row["step"] for row in rows(parts)] == [str(n) for n in range(1, 55)]
    assert [row["loss"] for row in rows(parts)] == [row["loss"] for row in rows(whole)]
    timeless = {"train_s", "val_s"}
    assert [{k: v for k, v in row.items() if k not in timeless} for row in resumed["history"]] == [
        {k: v for k, v in row.items() if k not in timeless} for row in uninterrupted["history"]
    ]
    assert resumed["best"] == uninterrupted["best"]
    best = [torch.load(out / "best_model.pth", weights_only=True) for out in (whole, parts)]
    assert_same(*best)


def test_a_crashed_run_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    class Crash(Exception):
        pass

    def crash(now: Any) -> None:
        if now.step == 30:
            raise Crash

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_workload("spiral", config_of(whole))
    with pytest.raises(Crash):
        train_workload("spiral", config_of(parts, checkpoint_every=7), progress=crash)
    assert len(rows(parts)) == 30  # of which two were not in the checkpoint of step 28
    resumed = train_workload("spiral", config_of(parts, resume=True))
    assert resumed["resumed_at_steps"] == [28]
    assert_same(weights(whole), weights(parts))
    assert [row["step"] for row in rows(parts)] == [str(n) for n in range(1, 55)]


def test_more_steps_go_on_inside_the_epoch(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_workload("spiral", config_of(whole, max_steps=30))
    first = train_workload("spiral", config_of(parts, max_steps=23))
    assert [row["step"] for row in first["history"]] == [18, 23]
    results = train_workload("spiral", config_of(parts, max_steps=30, resume=True))
    assert [row["step"] for row in results["history"]] == [18, 30]
    assert results["history"][1]["samples"] == 12 * 8
    assert_same(weights(whole), weights(parts))


def test_a_device_that_is_asked_seldom_is_asked_before_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Laps, "drain_every", 50)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    uninterrupted = train_workload("spiral", config_of(whole))

    def strike(now: Any) -> None:  # the first that is told is the end of the first epoch
        if now.step == 18 and not now.validated:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Incomplete):
        train_workload("spiral", config_of(parts), progress=strike)
    resumed = train_workload("spiral", config_of(parts, resume=True))
    told = [
        [(row["epoch"], row["samples"]) for row in r["history"]] for r in (uninterrupted, resumed)
    ]
    assert told[0] == told[1]
    assert_same(weights(whole), weights(parts))


def test_what_follows_a_checkpoint_is_made_up_for(tmp_path: Path) -> None:
    """As if the run had been killed between the last state and the files of the best one."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_workload("spiral", config_of(whole, epochs=2))
    train_workload("spiral", config_of(parts, epochs=1))
    named = [path for path in (parts / "checkpoints").iterdir() if path.name != "last.pt"]
    for path in (*named, parts / "best_model.pth"):
        path.unlink()
    train_workload("spiral", config_of(parts, epochs=2, resume=True))
    assert {path.name for path in (parts / "checkpoints").iterdir()} == {
        path.name for path in (whole / "checkpoints").iterdir()
    }
    for path in (whole / "checkpoints").glob("epoch=*.pt"):
        ours, theirs = (
            torch.load(folder / "checkpoints" / path.name, weights_only=True)["model"]
            for folder in (parts, whole)
        )
        assert_same(ours, theirs)
    best = [torch.load(out / "best_model.pth", weights_only=True) for out in (whole, parts)]
    assert_same(*best)


def test_the_first_ctrl_c_saves_and_the_second_does_not_wait(tmp_path: Path) -> None:
    def look(now: Any) -> None:
        if now.step == 7:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Incomplete, match=r"stopped by SIGINT after step 8 of 54"):
        train_workload("spiral", config_of(tmp_path), progress=look)
    with pytest.raises(KeyboardInterrupt), Stop():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)


def test_a_run_that_was_stopped_before_its_first_checkpoint_begins_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is said of how to go on is true: with nothing saved, and with something."""

    def interrupted(self: Any, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    out = tmp_path / "out"
    words = ["train", "spiral", "--num-samples", "203", "--epochs", "1", "--device", "cpu"]
    words += ["--output-dir", str(out)]
    with monkeypatch.context() as patched:
        patched.setattr(Stepper, "take", interrupted)  # in the first step
        assert main(words) == 3
    assert capsys.readouterr().err == (
        f"penstock train: interrupted; {out} holds no checkpoint yet, so run again with --resume, "
        "which begins anew\n"
    )
    assert (out / "args.json").exists()
    assert main([*words, "--resume"]) == 0
    begun = f"--resume: {out} holds no checkpoint yet; the run begins anew\n"
    assert begun in capsys.readouterr().err
    with monkeypatch.context() as patched:
        patched.setattr(Stepper, "take", interrupted)
        assert main([*words, "--resume", "--epochs", "2"]) == 3
    last = out / "checkpoints" / "last.pt"
    told = capsys.readouterr().err
    assert f"interrupted; run again with --resume, which goes on from {last}\n" in told
    assert main([*words, "--resume", "--epochs", "2"]) == 0
    assert "anew" not in capsys.readouterr().err
    assert json.loads((out / "training_results.json").read_text())["resumed_at_steps"]


@pytest.mark.parametrize("theirs", ["5", "[]", '{"lr": 0.1}'])
def test_the_arguments_of_another_tool_are_kept(
    theirs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "args.json").write_text(theirs)
    assert main(["train", "spiral", "--device", "cpu", "--output-dir", str(tmp_path)]) == 2
    assert "its args.json is none of ours; give another folder" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == [theirs]


def test_to_resume_where_nothing_is_is_to_begin_and_removes_no_result(tmp_path: Path) -> None:
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


def test_a_signal_before_and_after_a_run_is_not_ours(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    train_workload("spiral", config_of(tmp_path, epochs=1))
    assert signal.getsignal(signal.SIGTERM) is before


def test_random_numbers_go_on() -> None:
    import random

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


# --- ranks -------------------------------------------------------------------------------------


def torchrun(folder: Path, *words: str, seed: str = "0") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": seed}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    command += ["--local-addr", "127.0.0.1", "-m", "penstock", "train"]
    return subprocess.run(
        [*command, *words, "--distributed", "--device", "cpu", "--output-dir", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on two ranks of gloo: 80 training samples, whole batches; 17 validation samples."""
    folder = tmp_path_factory.mktemp("ranks") / "out"
    done = torchrun(
        folder, "spiral", "--num-samples", "115", "--batch-size", "4", "--epochs", "2",
        "--dropout", "0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_two_ranks_equal_one_process_with_the_big_batch(two_ranks: Path, tmp_path: Path) -> None:
    alone = build(
        TrainConfig,
        TRAIN_DEFAULTS["spiral"],
        {"num_samples": 115, "batch_size": 8, "epochs": 2, "dropout": 0.0, "device": "cpu"},
        {"output_dir": tmp_path},
    )
    results = train_workload("spiral", alone)
    one, two = weights(tmp_path), weights(two_ranks)
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=1e-5, atol=1e-6), name
    both = json.loads((two_ranks / "training_results.json").read_text())
    assert (both["world_size"], both["global_batch_size"], both["steps"]) == (2, 8, 20)
    assert both["samples"] == results["samples"] == 160
    for ours, theirs in zip(results["history"], both["history"], strict=True):
        for name in ("train_loss", "val_loss", "val_acc"):  # 17 samples, none counted twice
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), name


@pytest.mark.slow
def test_ranks_tell_what_summing_costs_them(two_ranks: Path, tmp_path: Path) -> None:
    both = json.loads((two_ranks / "training_results.json").read_text())
    assert [rank["rank"] for rank in both["ranks"]] == [0, 1]
    for rank in both["ranks"]:
        assert all(rank["phases"][name]["total_s"] > 0 for name in rank["phases"])
        assert rank["memory"]["host_peak"] > 0
    for rank in (0, 1):
        for row in rows(two_ranks, rank):
            parts = [float(row[f"{name}_s"]) for name in both["ranks"][0]["phases"]]
            assert sum(parts[1:]) == pytest.approx(parts[0], abs=1e-6)


class Struck(Spiral):
    """Two spirals, and a signal that reaches only one of the ranks, as its seventh step begins."""

    steps = 0

    def loss(self, model: Any, batch: Any) -> Any:
        self.steps += 1
        if self.steps == 7 and os.environ["RANK"] == os.environ.get("STRUCK"):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch)


@pytest.mark.slow
def test_ranks_agree_to_stop_and_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With dropout, so that each rank must go on with random numbers of its own; with 71 samples
    for two ranks with batches of 4, so that the last one is filled up; and each time with another
    seed of Python's hashes."""
    words = ["tests.training.test_loop:Struck", "--num-samples", "102", "--batch-size", "4"]
    words += ["--seed", "1", "--epochs", "2", "--optimizer", "adam", "--schedule", "constant"]
    monkeypatch.setenv("STRUCK", "1")
    stopped = torchrun(tmp_path / "parts", *words, seed="1")
    monkeypatch.delenv("STRUCK")
    assert stopped.returncode != 0
    assert "stopped by SIGTERM after step 8 of 18" in stopped.stderr  # rank 1, which was struck
    assert "stopped by a signal to another rank after step 8 of 18" in stopped.stderr
    resumed = torchrun(tmp_path / "parts", *words, "--resume", seed="2")
    assert resumed.returncode == 0, resumed.stderr
    whole = torchrun(tmp_path / "whole", *words, seed="3")
    assert whole.returncode == 0, whole.stderr
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    for rank in (0, 1):
        losses = [[row["loss"] for row in rows(tmp_path / o, rank)] for o in ("whole", "parts")]
        assert losses[0] == losses[1]
        assert len(losses[0]) == 18


@pytest.mark.parametrize(
    ("raised", "caught", "done"),
    [
        (None, None, ["destroy"]),
        (Incomplete("stopped"), Incomplete, ["barrier", "destroy"]),
        (PenstockError("the loss is nan"), PenstockError, ["kill"]),
        (RuntimeError("gloo: Connection closed by peer"), PenstockError, ["kill"]),
        (KeyboardInterrupt(), KeyboardInterrupt, ["kill"]),
    ],
    ids=repr,
)
def test_a_rank_that_fails_takes_no_leave_of_the_others(
    raised: BaseException | None,
    caught: type[BaseException] | None,
    done: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL's group ends for all ranks at once, and the others are in the middle of a sum. Those
    that this process started end with it."""
    calls: list[str] = []
    child = SimpleNamespace(kill=lambda: calls.append("kill"))
    launcher = SimpleNamespace(procs=[child])

    def barrier() -> None:
        # From here on they leave with an exit code for which Fabric's watch would kill us.
        assert not launcher.procs
        calls.append("barrier")

    strategy = SimpleNamespace(launcher=launcher)
    fabric = SimpleNamespace(world_size=2, strategy=strategy, barrier=barrier)
    there = iter([False, True])
    monkeypatch.setattr(ranks, "_fabric", lambda config: fabric)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: next(there))
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: calls.append("destroy"))
    expected = pytest.raises(caught) if caught else contextlib.nullcontext()
    with expected, ranks.ranks_of(config_of(tmp_path)):
        if raised is not None:
            raise raised
    assert calls == done


class DamagedForOne(Spiral):
    """Two spirals whose third batch one rank cannot take, in a group that ends as NCCL's does:
    for all ranks at once."""

    steps = 0

    def loss(self, model: Any, batch: Any) -> Any:
        torch.distributed.destroy_process_group = partial(time.sleep, 150)
        self.steps += 1
        if self.steps == 3 and os.environ["RANK"] == "1":
            raise PenstockError("sample 17 is damaged")
        return super().loss(model, batch)


@pytest.mark.slow
def test_one_rank_that_fails_ends_them_all(tmp_path: Path) -> None:
    words = ["tests.training.test_loop:DamagedForOne", "--num-samples", "115", "--batch-size", "4"]
    done = torchrun(tmp_path, *words)
    assert done.returncode != 0
    assert "penstock train: sample 17 is damaged" in done.stderr


FAILING = """
from penstock import run_training
from penstock.training.workloads.spiral import Spiral

class Fails(Spiral):
    def loss(self, model, batch):
        raise ValueError("a loss of the user's")

if __name__ == "__main__":
    run_training("failing:Fails", num_samples=203, num_workers=2, device="cpu", output_dir="out")
"""


@pytest.mark.slow
def test_a_script_whose_training_fails_comes_to_its_end(tmp_path: Path) -> None:
    """Its traceback holds the iterator whose workers multiprocessing would wait for."""
    (tmp_path / "failing.py").write_text(FAILING)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "failing.py"],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "ValueError: a loss of the user's" in done.stderr


def test_ranks_without_distributed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="4 ranks were started, and without --distributed"):
        train_workload("spiral", config_of(tmp_path))


@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 7),
    ranks=st.integers(1, 4),
    first=st.integers(0, 5),
)
@settings(max_examples=40, deadline=None)
def test_a_feed_gives_the_order_from_any_batch_on(
    samples: int, batch: int, ranks: int, first: int
) -> None:
    data: Any = [100 + index for index in range(samples)]
    seen: list[int] = []
    for rank in range(ranks):
        order = Order(samples, batch, 5, "global", rank=rank, world_size=ranks)
        first = min(first, order.num_batches)
        config = build(TrainConfig, {"num_workers": 0})
        feed = TorchFeed(data, order, Listed(), config, pin=False)  # type: ignore[arg-type]
        got = list(feed.epoch(3, first))
        expected = [order.items(3, number) for number in range(first, order.num_batches)]
        assert [items.tolist() for items, _ in got] == [items.tolist() for items in expected]
        assert [values for _, values in got] == [(100 + items).tolist() for items in expected]
        seen += [index for items, _ in got for index in items.tolist()]
        feed.close()
    if first == 0:
        assert set(seen) == set(range(samples))


class Listed:
    def collate(self, samples: Sequence[Any]) -> list[Any]:
        return list(samples)


class Damaged:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise UsageError("chips/a.zarr cannot be read at chip 2")
        return index


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_wrong_with_a_sample_is_one_sentence_from_a_worker_too(workers: int) -> None:
    config = build(TrainConfig, {"num_workers": workers})
    feed = TorchFeed(Damaged(), Order(4, 2), Listed(), config, pin=False)  # type: ignore[arg-type]
    with contextlib.closing(feed):  # or what pytest keeps of the error keeps its worker
        batches = iter(feed.epoch(0, 0))
        assert next(batches)[1] == [0, 1]
        with pytest.raises(UsageError) as caught:
            next(batches)
    assert str(caught.value) == "chips/a.zarr cannot be read at chip 2"


# --- what is written ---------------------------------------------------------------------------


def test_the_output_tree(tmp_path: Path) -> None:
    results = train_workload("spiral", config_of(tmp_path, keep_top=2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "args.json", "best_model.pth", "checkpoints", "steps", "training_results.json",
    ]  # fmt: skip
    assert results.pop("rank") == 0
    assert json.loads((tmp_path / "training_results.json").read_text()) == results
    arguments = json.loads((tmp_path / "args.json").read_text())
    assert (arguments["workload"], arguments["batch_size"]) == ("spiral", 8)
    best = sorted(results["history"], key=lambda row: -row["val_acc"])[:2]
    names = {f"epoch={row['epoch']:02d}-val_acc={row['val_acc']:.4f}.pt" for row in best}
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"last.pt", *names}
    phases = results["ranks"][0]["phases"]
    assert phases["communication"] is None  # alone there is nobody to tell
    assert sum(float(row["samples"]) for row in rows(tmp_path)) == results["samples"] == 3 * 142


def test_a_folder_in_which_somebody_trains_is_refused_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever is asked of it; what died holds nothing."""
    told = f"{tmp_path}: process {os.getpid()} on {socket.gethostname()} trains there now; end it"
    for how in ([], ["--resume"], ["--overwrite"]):
        with held_alone(tmp_path / "train.lock", "trains"):
            assert main(["train", "spiral", "--output-dir", str(tmp_path), *how]) == 2
            assert f"penstock train: {told}" in capsys.readouterr().err
            assert [path.name for path in tmp_path.iterdir()] == ["train.lock"]
    (tmp_path / "train.lock").write_text("process 1 on a machine that was switched off")
    train_workload("spiral", config_of(tmp_path, epochs=1))
    assert not (tmp_path / "train.lock").exists()


class Frozen(Spiral):
    """Two spirals with a first layer that stays as it is."""

    def model(self) -> torch.nn.Module:
        module = super().model()
        for parameter in next(
            m for m in module.modules() if isinstance(m, torch.nn.Linear)
        ).parameters():
            parameter.requires_grad_(False)
        return module


def test_gradients_are_of_what_is_trained_in_its_dtype(tmp_path: Path) -> None:
    """Layers of 2 x 8, 8 x 4 and 4 x 2 weights, and as many biases as outputs."""
    results = train_workload("tests.training.test_loop:Frozen", config_of(tmp_path, epochs=1))
    assert results["parameters"] == 24 + 36 + 10
    assert results["trainable_parameters"] == 36 + 10
    assert results["gradient_bytes"] == 4 * (36 + 10)
    half = config_of(tmp_path, dtype="bfloat16")
    with ranks.ranks_of(half) as fabric:
        stepper = Stepper(fabric, Frozen(half), "frozen", half, lambda step: 1.0, lambda: 0.0)
    assert stepper.gradient_bytes == 2 * (36 + 10)


def test_top_k_keeps_the_best_and_ties_go_to_the_earlier(tmp_path: Path) -> None:
    def write(path: Path, state: Mapping[str, Any]) -> None:
        path.write_text(str(state["epoch"]))

    kept = Checkpoints(tmp_path, write, writes=True, keep=2, judge="rmse", higher=False)
    firsts = []
    for epoch, score in enumerate([3.0, math.nan, 2.0, 2.0, 5.0, 1.0]):
        firsts.append(kept.rank(epoch, {"rmse": score}))
        kept.save({"epoch": epoch})
        kept.tidy(epoch)
    assert firsts == [True, False, True, False, False, True]
    assert [entry["epoch"] for entry in kept.best] == [5, 2]
    read = {path.name: path.read_text() for path in (tmp_path / "checkpoints").iterdir()}
    assert read == {"last.pt": "5", "epoch=05-rmse=1.0000.pt": "5", "epoch=02-rmse=2.0000.pt": "2"}
    (tmp_path / "checkpoints" / "epoch=02-rmse=2.0000.pt").unlink()
    kept.tidy(5)
    assert not (tmp_path / "checkpoints" / "epoch=02-rmse=2.0000.pt").exists(), "it holds epoch 5"


def test_half_a_row_of_a_killed_process_is_no_step(tmp_path: Path) -> None:
    log = StepLog(tmp_path, 0, 0)
    for step in (1, 2, 3):
        log.add(step, 0, 8, 0.5, {"step": 0.25})
    log.close()
    log.path.write_text(log.path.read_text()[:-9])
    log = StepLog(tmp_path, 0, 3)
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2"], "on disk before a step is taken"
    log.add(3, 0, 8, 0.5, {"step": 0.25})
    assert log.summary()["step"] == {"total_s": 0.75, "median_s": 0.25}
    log.close()


def test_a_write_that_fails_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    def write(path: Path, state: Mapping[str, Any]) -> None:
        path.write_text(state["text"][:3])
        if state["text"] == "second":
            raise OSError("disk full")

    kept = Checkpoints(tmp_path, write, writes=True, keep=1, judge="x", higher=True)
    kept.save({"text": "first"})
    with pytest.raises(OSError, match="disk full"):
        kept.save({"text": "second"})
    assert (tmp_path / "checkpoints" / "last.pt").read_text() == "fir"


def test_laps_add_up_to_the_step() -> None:
    ticks = iter([0.0, 1.0, 3.0, 3.5, 10.0, 10.0, 12.0])
    laps = Laps(lambda: next(ticks))
    laps.begin()
    for phase in ("data_wait", "forward", "data_wait"):
        laps.lap(phase)
    laps.end()
    laps.begin()
    laps.lap("data_wait")
    laps.lap("forward")
    laps.end()
    assert laps.drain() == [
        {"step": 3.5, "data_wait": 1.5, "forward": 2.0},
        {"step": 2.0, "data_wait": 0.0, "forward": 2.0},
    ]
    assert laps.drain() == []


class Stream:
    """Stands for CUDA: the host queues work, and an event is when the device comes to it."""

    def __init__(self) -> None:
        self.host = self.ready = 0.0

    def launch(self, seconds: float) -> None:
        self.ready = max(self.ready, self.host) + seconds

    def Event(self, enable_timing: bool) -> Any:
        stream = self

        class Event:
            def record(self) -> None:
                self.at = max(stream.ready, stream.host)

            def elapsed_time(self, other: Any) -> float:
                assert stream.ready <= stream.host, "read before the queue was empty"
                return float(other.at - self.at) * 1e3

        return Event()

    def synchronize(self) -> None:
        self.host = max(self.host, self.ready)


def test_laps_of_a_device_with_batches_that_add_up() -> None:
    """The host waits 1 and 20 s for data, and launches in no time."""
    stream = Stream()
    laps = DeviceLaps(stream)
    laps.begin()
    for wait, forward in ((1.0, 4.0), (20.0, 5.0)):
        stream.host += wait
        laps.lap("data_wait")
        stream.launch(0.5)
        laps.lap("transfer")
        stream.launch(forward)
        laps.lap("forward")
    stream.launch(100)
    laps.lap("optimizer")
    laps.end()
    assert laps.drain() == [  # of the 20 s the device had work for 4.5
        {"step": 126.5, "data_wait": 16.5, "transfer": 1.0, "forward": 9.0, "optimizer": 100.0}
    ]


@pytest.mark.parametrize(
    ("loading", "wait", "step"),
    [pytest.param(0.75, 0.0, 1.0, id="ahead"), pytest.param(1.5, 0.5, 1.5, id="behind")],
)
def test_a_wait_for_data_is_the_devices(loading: float, wait: float, step: float) -> None:
    """A device that computes for 1 s a step does not wait for a loader that is quicker, though the
    host does; and the host, which only queues, knows no step's length."""
    stream = Stream()
    laps = DeviceLaps(stream)
    for _ in range(4):
        laps.begin()
        stream.host += loading
        laps.lap("data_wait")
        stream.launch(1.0)
        laps.lap("forward")
        laps.end()
    first, *others = laps.drain()
    assert first == {"step": loading + 1, "data_wait": loading, "forward": 1.0}
    assert others == [{"step": step, "data_wait": wait, "forward": 1.0}] * 3
    assert laps.drain() == []


# --- bad input ---------------------------------------------------------------------------------


def test_a_loss_that_is_no_number_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(PenstockError, match=r"the loss is nan at step \d+; lower --learning-rate"):
        train_workload("spiral", config_of(tmp_path, learning_rate=1e30))


class Full(Spiral):
    """Two spirals for which there is no room: on a device that is told of, or on the host."""

    def loss(self, model: Any, batch: Any) -> Any:
        if os.environ["FULL"] == "host":
            torch.empty(2**60, dtype=torch.uint8)
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 "
            "GiB of which 1.20 GiB is free. Of the allocated memory 70 GiB is allocated by PyTorch"
        )


@pytest.mark.parametrize(
    ("full", "told"),
    [
        ("device", "has a total capacity of 79.15 GiB of which 1.20 GiB is free; less is needed"),
        ("host", "you tried to allocate 1152921504606846976 bytes"),
    ],
)
def test_no_room_is_no_defect(
    full: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is one sentence with what would help, and a benchmark knows it for what it is: from the
    error, and where the ranks are torchrun's, from that sentence."""
    monkeypatch.setenv("FULL", full)
    with pytest.raises(PenstockError) as caught:
        train_workload("tests.training.test_loop:Full", config_of(tmp_path / "a", num_workers=0))
    text = str(caught.value)
    assert told in text
    assert "less is needed with --batch-size below 8 (and --grad-accum-steps" in text
    for error in (caught.value, RuntimeError(f"torchrun ended with exit code 1: {text}")):
        assert status_of(error, limited=False) == f"oom_{full}"
    words = ["train", "tests.training.test_loop:Full", "--num-workers", "0", "--device", "cpu"]
    assert main([*words, "--batch-size", "8", "--output-dir", str(tmp_path / "b")]) == 1
    assert capsys.readouterr().err == f"penstock train: {text}\n"


def test_runs_are_not_mixed(tmp_path: Path) -> None:
    train_workload("spiral", config_of(tmp_path, epochs=1))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--output-dir .*/file/run: .*/file is not a folder"):
        train_workload("spiral", config_of(tmp_path / "file" / "run"))
    with pytest.raises(UsageError, match="holds a run; use --resume or --overwrite"):
        train_workload("spiral", config_of(tmp_path, epochs=1))
    train_workload("spiral", config_of(tmp_path, epochs=1, overwrite=True))
    for changes, told in (
        ({"hidden_dims": (9, 4)}, r"hidden_dims \[8, 4\], and this has \[9, 4\]"),
        ({"seed": 43}, "seed 42, and this has 43"),
        ({"batch_size": 16}, "batch_size 8, and this has 16"),
        ({"optimizer": "sgd"}, "optimizer adam, and this has sgd"),
        ({"amp": True}, "amp False, and this has True"),
    ):
        with pytest.raises(UsageError, match=told):
            train_workload("spiral", config_of(tmp_path, resume=True, **changes))
    last = tmp_path / "checkpoints" / "last.pt"
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"last.pt is no file of tensors"):
        train_workload("spiral", config_of(tmp_path, resume=True))


def test_what_nobody_says_is_a_run_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "theirs.txt").write_text("years of work")
    with pytest.raises(UsageError, match=r"holds checkpoints and no args\.json"):
        train_workload("spiral", config_of(tmp_path, overwrite=True))
    assert (tmp_path / "checkpoints" / "theirs.txt").exists()


def test_a_file_of_code_is_not_executed(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"model": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UsageError, match=r"--weights .* is no file of tensors"):
        read_tensors(tmp_path / "evil.pt", "--weights")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        (["nothing"], "no workload 'nothing'; there are detector, emulator, pairs, spiral"),
        (["no.such:Thing"], "there is no workload 'no.such:Thing'"),
        (["spiral", "--latent-size", "8"], "--latent-size is of emulator, not of spiral"),
        (["spiral", "--epochs", "0"], "--epochs '0'"),
        (["spiral", "--weights", "none.pth"], "--weights none.pth: there is no such file"),
        (["spiral", "--resume", "--overwrite"], "--resume goes on with what --overwrite"),
    ],
)
def test_bad_words_are_one_sentence(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *words, "--output-dir", str(tmp_path), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_command_trains_and_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num_samples", "203", "--max_epochs", "2", "--hidden_dims", "8", "4"]
    code = main(["train", "spiral", *words, "--output_dir", str(tmp_path), "--device", "cpu"])
    assert code == 0
    told = capsys.readouterr()
    assert "epoch 1, step 10 of 10: loss" in told.err
    assert "spiral: 70 parameters, 1 x cpu, 10 steps of 32 samples" in told.out
    assert "284 samples in" in told.out


def test_a_users_own_workload_is_found_by_name() -> None:
    assert isinstance(
        make_workload("penstock.training.workloads.spiral:Spiral", config_of(Path("out"))), Spiral
    )
