"""An error says flags on a command line, and parameters to who called a function of Python."""

import pickle
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.base import InferConfig, StageError, UsageError, build, names_parameters
from penstock.cli import main


@pytest.mark.parametrize(
    ("flags", "parameters"),
    [
        ("--batch 0: input should be above 0", "`batch` 0: input should be above 0"),
        ("--overlap 8 must be less than --patch 4 (axis z)",
         "`overlap` 8 must be less than `patch` 4 (axis z)"),
        ("--trim-voxels 4 needs an --overlap of at least 8",
         "`trim_voxels` 4 needs an `overlap` of at least 8"),
        ("--prepare is a step of an array; --cluster does all of a job",
         "`prepare=True` is a step of an array; `cluster` does all of a job"),
        ("--model-type 'none' is unknown", "`model` 'none' is unknown"),
        ("use --resume or --overwrite", "use `resume=True` or `overwrite=True`"),
        ("give --no-amp.", "give `amp='off'`."),
        ("--no-tf32: it is", "`tf32=False`: it is"),
        ("--c names 3 at once", "`c` names 3 at once"),
        ("--of-no-knob 3 stays, and a--b too", "--of-no-knob 3 stays, and a--b too"),
    ],
)  # fmt: skip
def test_flags_become_parameters(flags: str, parameters: str) -> None:
    @names_parameters(InferConfig, model_type="model")
    def fail() -> None:
        raise UsageError(flags)

    with pytest.raises(UsageError) as raised:
        fail()
    for error in (raised.value, pickle.loads(pickle.dumps(raised.value))):
        assert (str(error), error.with_flags) == (parameters, flags)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_limit_is_a_number(number: float) -> None:
    """One that is NaN would leave out all voxels, without a word."""
    job = {"in_spec": "a", "out_spec": "b", "model_type": "identity"}
    for name in ("skip_below", "norm_lower", "eps"):
        with pytest.raises(UsageError, match="input should be a finite number"):
            build(InferConfig, {**job, name: number})
    limits = build(InferConfig, {**job, "clip_norm": (0, float("inf"))})
    assert limits.clip_norm == (0, float("inf"))


def test_an_error_within_an_error_is_said_as_the_outer_one_is() -> None:
    cause = UsageError("give a smaller --batch")
    cause.parameters = {"--batch": "batch"}
    outer = StageError("forward", "brick 0", cause)
    assert str(outer) == "forward failed at brick 0: give a smaller --batch"
    outer.parameters = {"--batch": "batch"}
    assert str(outer).endswith("give a smaller `batch`")


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({}, "`batch_size` is required"),
        ({"batch_size": 0}, "`batch_size` 0: input should be greater than or equal to 1"),
        ({"batch_size": 1, "max_memory": "much"}, "`max_memory`: 'much' is not a size such as"),
        ({"batch_size": 1, "shuffle": "well"}, "`shuffle` 'well': input should be 'none', "),
    ],
)
def test_a_loader_made_in_python_names_its_parameters(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        penstock.Loader("nowhere.zarr", **knobs)
    assert str(error.value).startswith(said)
    assert "--" not in str(error.value)


def test_inference_and_training_in_python_name_their_parameters(tmp_path, capsys) -> None:
    volume = np.zeros((8, 8, 8), np.uint8)
    for call in (penstock.run_inference, penstock.plan_inference):
        with pytest.raises(UsageError, match=r"^`overlap` 8 must be less than `patch` 4"):
            call(volume, tmp_path / "b.zarr", model="identity", patch=4, overlap=8)
        with pytest.raises(UsageError, match=r"^`model` 'none' is unknown"):
            call(volume, tmp_path / "b.zarr", model="none")
    with pytest.raises(UsageError, match=r"^`resume=True` goes on with what `overwrite=True`"):
        penstock.run_training("spiral", output_dir=tmp_path, resume=True, overwrite=True)
    np.save(tmp_path / "a.npy", volume)
    ends = ["--in-spec", str(tmp_path / "a.npy"), "--out-spec", str(tmp_path / "b.zarr")]
    words = ["--patch", "4", "--overlap", "8", "--model-type", "identity"]
    assert main(["plan", *ends, *words]) == 2
    assert "--overlap 8 must be less than --patch 4" in capsys.readouterr().err
