"""How values are scaled where nobody says it, and what a network's training says of its head."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from penstock.base import InferConfig, PenstockError, UsageError, build
from penstock.cli import main
from penstock.inference.opening.job import Job

from ..parameters import mainly
from .kit import Array

RAMP = (
    np.arange(1, 33)[None, :, None] * 100 + np.arange(8 * 32 * 32).reshape(8, 32, 32) % 50
).astype("uint16")
"""It grows along y, so percentiles of its halves differ."""


class Shift(torch.nn.Module):
    """Adds a weight, so that the output tells how the input was scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.by


def result(**knobs: Any) -> tuple[Array, str]:
    """The output of the volume, and the summary's line on values."""
    out = np.zeros(RAMP.shape, "float32")
    common: dict[str, Any] = {"patch": (8, 16, 16), "overlap": 2, "devices": "cpu"}
    common["seam_mode"] = "trim"
    model = knobs.pop("model", Shift())
    summary = penstock.run_inference(RAMP, out, model=model, **(common | knobs))
    return out, next(line for line in summary.lines() if line.startswith("Values: "))


def test_a_default_never_depends_on_the_block() -> None:
    (whole, said), (halves, _) = result(block=32), result(block=(8, 16, 16))
    assert (whole == halves).all()
    lower, upper = np.percentile(RAMP, [0.5, 99.9])
    np.testing.assert_allclose(whole, RAMP + (upper - lower), rtol=1e-5)
    assert "percentiles 0.5 and 99.9 of the whole volume, by default; the input was read" in said
    assert (result(normalize="global")[0] == whole).all()


@pytest.mark.parametrize("rows", [32, 16])
def test_percentiles_may_be_those_of_a_coarse_level(tmp_path, rows: int) -> None:
    np.save(tmp_path / "a.npy", RAMP)
    source = str(tmp_path / "a.ome.zarr")
    assert main(["convert", str(tmp_path / "a.npy"), source, "--levels", "2"]) == 0
    level = RAMP.reshape(4, 2, 16, 2, 16, 2).mean(axis=(1, 3, 5)).round()[:, : rows // 2]
    out = np.zeros(RAMP.shape, "float32")
    box = {} if rows == 32 else {"box": ["0:8", f"0:{rows}", "0:32"]}
    knobs: dict[str, Any] = {"patch": (8, 16, 16), "overlap": 2, "devices": "cpu"}
    penstock.run_inference(source, out, model=Shift(), norm_level=1, **box, **knobs)
    lower, upper = np.percentile(level, [0.5, 99.9])
    np.testing.assert_allclose(out[:, :rows], RAMP[:, :rows] + (upper - lower), rtol=1e-5)


@pytest.mark.parametrize(
    ("mode", "said"), [("none", "beyond 3.4e38"), ("global", "beyond"), ("zscore", "no float64")]
)
def test_values_that_float32_lacks_are_not_the_model_s_fault(mode: str, said: str) -> None:
    knobs: dict[str, Any] = {"model": Shift(), "patch": 8, "overlap": 2, "normalize": mode}
    with pytest.raises(PenstockError, match=said):
        penstock.run_inference(RAMP * 1e300, np.zeros(RAMP.shape), devices="cpu", **knobs)


@pytest.mark.slow
def test_a_halo_alone_asks_for_percentiles_of_blocks_as_in_the_seed() -> None:
    (alone, said), (both, _) = (
        result(block=(8, 16, 16), halo=1, **more) for more in ({}, {"normalize": "percentile"})
    )
    assert (alone == both).all() and "of each block" in said and "change with --block" in said
    assert (result(halo=1, normalize="global")[0] == result()[0]).all()


HEAD = {"kind": "scores", "target": "mask", "loss": "bce", "returns": "logits"}


@pytest.fixture
def training(tmp_path) -> Path:
    """The folder of a training, with only what `infer` reads."""
    torch.save(Shift().state_dict(), tmp_path / "best_model.pth")
    record(tmp_path, {"scaling": {"lower": 100.0, "scale": 400.0}, "heads": {"out": HEAD}})
    return tmp_path


def record(folder: Path, facts: object) -> None:
    (folder / "training_results.json").write_text(json.dumps({"facts": facts}))


def test_what_the_training_recorded_is_obeyed(training: Path) -> None:
    checkpoint = training / "checkpoints" / "epoch=01-val_psnr=9.0000.pt"
    checkpoint.parent.mkdir()
    torch.save({"model": Shift().state_dict()}, checkpoint)
    for weights in (training, training / "best_model.pth", checkpoint):
        made, said = result(weights=weights)
        np.testing.assert_allclose(made, sigmoid((RAMP - 100.0) / 400.0 + 1), rtol=1e-5)
        assert (
            said
            == f"Values: 100 becomes 0 and 500 becomes 1, as {training}/training_results.json says"
        )


def sigmoid(logits: Any) -> Any:
    return 1 / (1 + np.exp(-logits))


@pytest.mark.parametrize(
    ("head", "right", "note"),
    mainly([
        ({}, sigmoid, "out becomes probabilities, the sigmoid of"),
        ({"target": "labels", "loss": "ce"}, np.ones_like, "the softmax of"),  # of one channel
        ({"target": "probabilities", "loss": "ce"}, np.ones_like, "the softmax of"),
        ({"returns": "probabilities"}, lambda made: made, ""),
        ({"target": "intensity", "loss": "mse", "returns": "values",
          "scaling": {"lower": -5.0, "scale": 20.0}}, lambda made: made * 20.0 - 5.0,
         "out goes back to the scale of its target: 0 becomes -5 and 1 15"),
    ], 0, 1, 4),
)  # fmt: skip
def test_an_output_is_what_the_network_was_trained_for(training, head, right, note) -> None:
    record(training, {"scaling": {"lower": 100.0, "scale": 400.0}, "heads": {"out": HEAD | head}})
    plain = (RAMP - 100.0) / 400.0 + 1
    np.testing.assert_allclose(result(weights=training)[0], right(plain), rtol=1e-5)
    np.testing.assert_allclose(result(weights=training, head_kind="scores")[0], plain, rtol=1e-5)
    job = Job(build(InferConfig, {"in_spec": RAMP, "out_spec": RAMP * 0, "model_type": Shift(),
                                  "patch": 8, "overlap": 2, "weights": training}))  # fmt: skip
    notes = [text for word, text in job.plan.lines() if word == "note"]
    changed = [text for text in notes if text.startswith("out ")]
    assert any(note in text for text in notes) if note else not changed


@pytest.mark.parametrize(
    "knobs", [{"normalize": "global"}, {"norm_lower": 0.5, "head_kind": "intensity"}]
)
def test_what_is_said_comes_before_what_is_recorded(training: Path, knobs: dict[str, Any]) -> None:
    made, said = (
        result(weights=training, head_kind="intensity", **knobs)
        if "head_kind" not in knobs
        else result(weights=training, **knobs)
    )
    assert (made == result()[0]).all() and "of the whole volume" in said


@pytest.mark.parametrize(
    "facts",
    mainly([None, [], {"scaling": {"lower": 1}}, {"scaling": {"lower": 1, "scale": 0}},
     {"scaling": {"lower": float("nan"), "scale": 2}}], 0, 4),
)  # fmt: skip
def test_a_record_that_does_not_tell_is_none(training: Path, facts: object) -> None:
    record(training, facts)
    made, said = result(weights=training)
    assert (made == result()[0]).all() and "by default" in said


def test_weights_beside_a_stranger_s_file_are_theirs(training: Path) -> None:
    other = training / "mine.pt"
    (training / "best_model.pth").rename(other)
    assert "by default" in result(weights=other)[1]
    (training / "training_results.json").write_text("[")
    (training / "best_model.pth").symlink_to(other)
    with pytest.raises(UsageError, match=r"training_results\.json is not JSON"):
        result(weights=training / "best_model.pth")


def test_each_command_that_a_refusal_prints_works(here, capsys) -> None:
    np.save("ramp.npy", RAMP)
    Path("net.py").write_text(
        "import torch\n"
        "def two():\n"
        "    class Two(torch.nn.Module):\n"
        "        def forward(self, x): return {'a b': x.sigmoid(), 'c': (x + 1).sigmoid()}\n"
        "    return Two()\n"
    )
    words = "infer --in-spec ramp.npy --out-spec a.zarr b.zarr --model-type net.py:two --patch 8 "
    words += "--overlap 2 --devices cpu --overwrite"
    assert main(shlex.split(words)) == 2
    for answer in ("--head-kind 'a b=scores'", "--head-kind 'a b=scores' c=scores"):
        said, *commands = capsys.readouterr().err.splitlines()
        assert "say what it is" in said and len(commands) == 3
        assert commands[1].endswith(answer)
        code = main(shlex.split(commands[1])[1:])
    assert code == 0
