"""The loop of training: what is learnt, what it writes, and what it refuses."""

import json
import math
import os
import socket
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base import (
    ARGS,
    CHECKPOINTS,
    TRAIN_DEFAULTS,
    PenstockError,
    TrainConfig,
    UsageError,
    build,
    held_alone,
)
from penstock.bench.launch.worker import status_of
from penstock.cli import main

from ..later import imported_later
from .kit import config_of, rows, train_workload, weights

torch = imported_later("torch")

if find_spec("lightning_fabric") is None:
    pytest.skip("lightning_fabric is not installed", allow_module_level=True)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.slow
def test_spiral_is_learnt(tmp_path) -> None:
    from penstock.training.workloads.spiral import Spiral

    config = build(
        TrainConfig,
        TRAIN_DEFAULTS["spiral"],
        {"output_dir": tmp_path, "epochs": 5, "learning_rate": 0.02, "batch_size": 128},
        {"hidden_dims": (64, 64, 64), "dropout": 0.0, "schedule": "cosine", "device": "cpu"},
        {"noise": 0.0},  # which is learnt in fewer epochs; the defaults are asked below
    )
    results = train_workload("spiral", config)
    assert results["best"]["score"] >= 0.95
    assert results["samples"] == 5 * 7000
    # The weights that are kept are those of the best epoch.
    workload = Spiral(config)
    model = workload.model()
    model.load_state_dict(torch.load(tmp_path / "best_model.pth", weights_only=True))
    points, classes = workload.val.tensors
    right = (model(points).argmax(1) == classes).double().mean()
    assert float(right) == pytest.approx(results["best"]["score"], abs=1e-12)


@pytest.mark.long
def test_the_spiral_is_learnt_by_its_defaults(tmp_path) -> None:
    """As `penstock train spiral` has it: dropout and all, noise of 0.05. Its score is the best of
    its epochs, so those after the first that is good enough change nothing."""

    class Enough(Exception):
        pass

    def look(now: Any) -> None:
        if now.validated and now.scores["val_acc"] >= 0.95:
            raise Enough

    config = build(TrainConfig, TRAIN_DEFAULTS["spiral"], {"device": "cpu", "output_dir": tmp_path})
    with pytest.raises(Enough):
        train_workload("spiral", config, progress=look)


def test_the_callers_default_dtype_changes_no_weight(tmp_path) -> None:
    state_dicts = []
    for default in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            train_workload("spiral", config_of(tmp_path / str(default), epochs=1, num_samples=40))
        finally:
            torch.set_default_dtype(torch.float32)
        state_dicts.append(weights(tmp_path / str(default)))
    assert all(torch.equal(state_dicts[0][name], state_dicts[1][name]) for name in state_dicts[0])


def test_spirals_without_noise_lie_on_their_curves() -> None:
    from penstock.training.workloads.spiral import spirals

    points, classes = spirals(101, noise=0.0, seed=3)
    radius = points.norm(dim=1)
    angle = (radius - 0.1) / 0.9 * 4 * math.pi + math.pi * classes
    expected = radius[:, None] * torch.stack([angle.cos(), angle.sin()], dim=1)
    assert torch.allclose(points, expected, atol=1e-5)
    assert int(classes.sum()) == 50


@pytest.mark.parametrize("theirs", ["5", "[]", '{"lr": 0.1}'])
def test_the_arguments_of_another_tool_are_kept(theirs: str, tmp_path, capsys) -> None:
    (tmp_path / "args.json").write_text(theirs)
    assert main(["train", "spiral", "--device", "cpu", "--output-dir", str(tmp_path)]) == 2
    assert "Penstock did not write its args.json; give another folder" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == [theirs]


def test_the_output_tree(tmp_path) -> None:
    results = train_workload("spiral", config_of(tmp_path, num_samples=83))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "args.json", "best_model.pth", "checkpoints", "steps", "training_results.json",
    ]  # fmt: skip
    assert results.pop("rank") == 0
    assert json.loads((tmp_path / "training_results.json").read_text()) == results
    arguments = json.loads((tmp_path / "args.json").read_text())
    assert (arguments["workload"], arguments["batch_size"]) == ("spiral", 8)
    best = max(results["history"], key=lambda row: row["val_acc"])
    assert results["best"]["epoch"] == best["epoch"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["last.pt"]
    phases = results["ranks"][0]["phases"]
    assert phases["communication"] is None  # alone there is nobody to tell
    assert sum(float(row["samples"]) for row in rows(tmp_path)) == results["samples"] == 3 * 58


def test_a_folder_in_which_somebody_trains_is_refused_and_named(tmp_path, capsys) -> None:
    """Whatever is asked of it; what died holds nothing."""

    reason = f"{tmp_path}: process {os.getpid()} on {socket.gethostname()} trains there now; end it"
    for how in ([], ["--resume"], ["--overwrite"]):
        with held_alone(tmp_path / "train.lock", "trains"):
            assert main(["train", "spiral", "--output-dir", str(tmp_path), *how]) == 2
            assert f"penstock train: {reason}" in capsys.readouterr().err
            assert [path.name for path in tmp_path.iterdir()] == ["train.lock"]
    (tmp_path / "train.lock").write_text("process 1 on a machine that was switched off")
    train_workload("spiral", config_of(tmp_path, epochs=1, num_samples=40))
    assert not (tmp_path / "train.lock").exists()


def test_gradients_are_of_what_is_trained_in_its_dtype(tmp_path) -> None:
    """Layers of 2 x 8, 8 x 4 and 4 x 2 weights, and as many biases as outputs."""

    from penstock.training import ranks
    from penstock.training.step import Stepper

    from .spirals import Frozen

    results = train_workload(
        "tests.training.spirals:Frozen", config_of(tmp_path, epochs=1, num_samples=40)
    )
    assert results["parameters"] == 24 + 36 + 10
    assert results["trainable_parameters"] == 36 + 10
    assert results["gradient_bytes"] == 4 * (36 + 10)
    half = config_of(tmp_path, dtype="bfloat16")
    with ranks.ranks_of(half) as fabric:
        stepper = Stepper(fabric, Frozen(half), "frozen", half, lambda step: 1.0, lambda: 0.0)
    assert stepper.gradient_bytes == 2 * (36 + 10)


def test_a_loss_that_is_no_number_ends_the_run(tmp_path) -> None:
    why = r"nan at step \d+: lower --learning-rate 1e\+30 or set --clip-norm"
    with pytest.raises(PenstockError, match=why):
        train_workload("spiral", config_of(tmp_path, learning_rate=1e30))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", [1, 3])
def test_a_sample_that_is_not_finite_is_named(tmp_path, share: int, workers: int) -> None:
    """Before the learning rate is blamed, also where a step has several batches."""
    how = {"grad_accum_steps": share, "num_workers": workers, "batch_size": 4}
    why = r"step \d+: sample 17 \(point 17\) has values that are not finite$"
    with pytest.raises(PenstockError, match=why):
        train_workload("tests.training.spirals:Damaged", config_of(tmp_path, **how))


def test_what_is_not_finite_is_found_in_any_batch() -> None:
    from penstock.training.step import why_not_finite

    def batch(items: list[int], rows: list[Any]) -> Any:
        return np.array(items), rows

    nan, config = torch.nan, config_of(Path("unused"))
    boxes = [{"boxes": torch.tensor([[1.0, nan]])}, {"boxes": torch.ones(2, 2)}]
    fields = {"inputs": torch.ones(2, 3), "targets": torch.tensor([[1.0], [torch.inf]])}
    pictures = [torch.ones(2, 1, 4, 4), boxes, torch.tensor([1, 2])]
    cases = [
        (batch([5, 9], pictures), "a sample among 5, 9 has values that are not finite"),
        (batch([5, 9], [fields["inputs"], torch.ones(2)]), "lower --learning-rate"),
        ((np.array([5, 9]), fields), "sample 9 has values that are not finite"),
        (batch([5], [torch.tensor(nan)]), "a sample among 5 has values that are not finite"),
    ]
    for each, sentence in cases:
        assert sentence in why_not_finite([each], object(), config)  # type: ignore[arg-type]


def test_weights_that_are_not_finite_are_refused(tmp_path) -> None:
    from penstock.training.workloads.spiral import mlp

    state = mlp((8, 4), 0.0).state_dict()
    state["0.bias"][3] = torch.nan
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(UsageError, match=r"w\.pt: 0\.bias has values that are not finite"):
        train_workload("spiral", config_of(tmp_path / "out", weights=tmp_path / "w.pt"))


@pytest.mark.parametrize(
    ("full", "reason"),
    [
        ("device", "has a total capacity of 79.15 GiB of which 1.20 GiB is free; less is needed"),
        ("host", "you tried to allocate 1152921504606846976 bytes"),
    ],
)
def test_no_room_is_no_defect(full: str, reason: str, tmp_path, monkeypatch, capsys) -> None:
    """It is one sentence with what would help, and a benchmark knows it for what it is: from the
    error, and where the ranks are torchrun's, from that sentence."""

    monkeypatch.setenv("FULL", full)
    with pytest.raises(PenstockError) as caught:
        train_workload("tests.training.spirals:Full", config_of(tmp_path / "a", num_workers=0))
    text = str(caught.value)
    assert reason in text
    assert "less is needed with --batch-size below 8 (and --grad-accum-steps" in text
    for error in (caught.value, RuntimeError(f"torchrun ended with exit code 1: {text}")):
        assert status_of(error, limited=False) == f"oom_{full}"
    words = ["train", "tests.training.spirals:Full", "--num-workers", "0", "--device", "cpu"]
    assert main([*words, "--batch-size", "8", "--output-dir", str(tmp_path / "b")]) == 1
    assert capsys.readouterr().err == f"penstock train: {text}\n"


OWN = """
import numpy as np
import torch
from penstock.training.workloads.spiral import Spiral

class NoJudge(Spiral):
    judge = "val_other"

class NoNumber(Spiral):
    def scores(self, answers):
        return {"val_acc": None}

class FewAnswers(Spiral):
    def answers(self, model, batch):
        return super().answers(model, batch)[1:]

class NoMetrics(Spiral):
    def loss(self, model, batch):
        return super().loss(model, batch)[0]

class NoModule(Spiral):
    def model(self):
        return len

class NoScalar(Spiral):
    def loss(self, model, batch):
        loss, metrics = super().loss(model, batch)
        return loss.repeat(3), metrics

class NoVal(Spiral):
    def __init__(self, config):
        super().__init__(config)
        del self.val

class BrokenVal(Spiral):
    @property
    def val(self):
        return self.mispelled

    @val.setter
    def val(self, samples):
        pass

class OtherNumbers(Spiral):
    def loss(self, model, batch):
        return super().loss(model, batch)[0], {"train_one": 1.0}

    def scores(self, answers):
        return {"val_acc": np.float32(0.5), "val_loss": torch.tensor(0.25), "val_n": np.int64(3)}
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoJudge", "scores val_loss, val_acc and is judged by val_other, which is none of them"),
        ("NoNumber", "its scores are no numbers: float() argument must be"),
        ("FewAnswers", "7 answers to 8 samples"),
        ("NoMetrics", "its loss is not a pair of a scalar and a mapping of metrics"),
        ("NoScalar", "its loss is not a pair of a scalar and a mapping of metrics"),
        ("NoVal", "has no val"),
        ("NoModule", "its model is no torch.nn.Module"),
    ],
)
def test_what_a_workload_of_ones_own_lacks_is_one_sentence(
    name: str, message: str, tmp_path, capsys
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = ["--epochs", "1", "--num-samples", "60", "--batch-size", "8", "--num-workers", "0"]
    words += ["--device", "cpu", "--output-dir", str(tmp_path / "run")]
    assert main(["train", f"{tmp_path / 'own.py'}:{name}", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and f"own.py:{name}" in said and "defect" not in said


def test_a_fault_in_a_property_of_a_workload_is_not_its_absence(tmp_path, capsys) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = ["--epochs", "1", "--device", "cpu", "--output-dir", str(tmp_path / "run")]
    assert main(["train", f"{tmp_path / 'own.py'}:BrokenVal", *words]) == 1
    said = capsys.readouterr().err
    assert "no attribute 'mispelled'" in said and "has no val" not in said


def test_scores_and_metrics_may_be_numbers_of_any_kind(tmp_path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    config = config_of(tmp_path / "run", epochs=1, num_workers=0)
    results = train_workload(f"{tmp_path / 'own.py'}:OtherNumbers", config)
    assert results["final"] == {"val_acc": 0.5, "val_loss": 0.25, "val_n": 3.0}
    assert results["history"][0]["train_one"] == 1.0


def test_of_a_folder_that_a_run_links_to_the_link_alone_goes(tmp_path) -> None:
    """Such as one for checkpoints on another disk."""
    from penstock.training.run_folder import take_folder

    disk, out = tmp_path / "disk", tmp_path / "out"
    disk.mkdir()
    (disk / "last.pt").touch()
    out.mkdir()
    (out / ARGS).write_text('{"workload": "spiral"}')
    (out / CHECKPOINTS).symlink_to(disk)
    assert not take_folder(config_of(out, overwrite=True), is_first=True)
    assert [*out.iterdir()] == [out / ARGS] and (disk / "last.pt").is_file()


@pytest.mark.slow
def test_runs_are_not_mixed(tmp_path) -> None:
    few: dict[str, Any] = {"epochs": 1, "num_samples": 40}
    train_workload("spiral", config_of(tmp_path, **few))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--output-dir .*/file/run: .*/file is not a folder"):
        train_workload("spiral", config_of(tmp_path / "file" / "run"))
    with pytest.raises(UsageError, match="holds a run; use --resume or --overwrite"):
        train_workload("spiral", config_of(tmp_path, **few))
    train_workload("spiral", config_of(tmp_path, **few, overwrite=True))
    for changes, reason in (
        ({"hidden_dims": (9, 4)}, r"hidden_dims \[8, 4\], and this has \[9, 4\]"),
        ({"seed": 43}, "seed 42, and this has 43"),
        ({"batch_size": 16}, "batch_size 8, and this has 16"),
        ({"optimizer": "sgd"}, "optimizer adam, and this has sgd"),
        ({"amp": True}, "amp False, and this has True"),
    ):
        with pytest.raises(UsageError, match=reason):
            train_workload("spiral", config_of(tmp_path, resume=True, **few | changes))
    last = tmp_path / "checkpoints" / "last.pt"
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(UsageError, match=r"last.pt is not a file of tensors"):
        train_workload("spiral", config_of(tmp_path, resume=True, **few))


def test_what_nobody_says_is_a_run_is_not_removed(tmp_path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "theirs.txt").write_text("years of work")
    with pytest.raises(UsageError, match=r"holds checkpoints and no args\.json"):
        train_workload("spiral", config_of(tmp_path, overwrite=True))
    assert (tmp_path / "checkpoints" / "theirs.txt").exists()


@pytest.mark.parametrize(
    "words, message",
    [
        (["nothing"], "no workload 'nothing'; there are detector, emulator, pairs, spiral"),
        (["no.such:Thing"], "there is no workload 'no.such:Thing'"),
        (["spiral", "--latent-size", "8"], "--latent-size belongs to emulator, but this is spiral"),
        (["spiral", "--epochs", "0"], "--epochs '0'"),
        (["spiral", "--weights", "none.pth"], "--weights none.pth: there is no such file"),
        (["spiral", "--resume", "--overwrite"], "--resume goes on with what --overwrite"),
    ],
)
def test_bad_words_are_one_sentence(words: list[str], message: str, tmp_path, capsys) -> None:
    assert main(["train", *words, "--output-dir", str(tmp_path), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
