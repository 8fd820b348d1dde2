"""Errors speak as whoever called: flags on a command line, parameters in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.base.config.data import LoaderConfig
from penstock.base.config.infer import InferConfig
from penstock.base.config.spoken import in_python
from penstock.base.errors import UsageError, flags_are_spoken, speaking_flags
from penstock.cli import main


@pytest.mark.parametrize(
    ("flags", "parameters"),
    [
        ("--batch 0: input should be above 0", "batch=0: input should be above 0"),
        ("--overlap 8 must be less than --patch 4 (axis z)",
         "overlap=8 must be less than patch=4 (axis z)"),
        ("--trim-voxels 4 needs an --overlap of at least 8",
         "trim_voxels=4 needs an overlap= of at least 8"),
        ("give fewer --prep-workers, or a larger --max-memory",
         "give fewer prep_workers=, or a larger max_memory="),
        ("--run-dir /a/run: Is a directory", "run_dir=/a/run: Is a directory"),
        ("--normalize fixed takes bounds", "normalize='fixed' takes bounds"),
        ("--model-type 'none' is unknown", "model='none' is unknown"),
        ("it takes --normalize fixed --clip-norm 0 1",
         "it takes normalize='fixed' clip_norm=(0, 1)"),
        ("give --head-kind scores or intensity", "give head_kind='scores' or intensity"),
        ("--head-kind names no head", "head_kind= names no head"),
        ("use --resume or --overwrite", "use resume=True or overwrite=True"),
        ("give --no-amp.", "give amp='off'."),
        ("--of-no-knob 3 stays, and a--b too", "--of-no-knob 3 stays, and a--b too"),
    ],
)  # fmt: skip
def test_flags_become_parameters(flags: str, parameters: str) -> None:
    assert in_python(flags, InferConfig, {"model_type": "model"}) == parameters


def test_a_choice_is_a_text() -> None:
    text = in_python("chunk 3 is missing; --missing fill fills it", LoaderConfig, {})
    assert text == "chunk 3 is missing; missing='fill' fills it"


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({}, "batch_size= is required"),
        ({"batch_size": 0}, "batch_size=0: input should be greater than or equal to 1"),
        ({"batch_size": 1, "max_memory": "much"}, "max_memory=: 'much' is not a size such as"),
        ({"batch_size": 1, "shuffle": "well"}, "shuffle='well': input should be 'none', "),
    ],
)
def test_a_loader_made_in_python_names_its_parameters(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as error:
        penstock.Loader("nowhere.zarr", **knobs)
    assert str(error.value).startswith(said)
    assert "--" not in str(error.value)


def test_a_command_line_keeps_its_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with speaking_flags(), pytest.raises(UsageError, match=r"^--batch-size is required$"):
        penstock.Loader("nowhere.zarr")
    assert not flags_are_spoken()
    np.save(tmp_path / "a.npy", np.zeros((8, 8, 8), np.uint8))
    ends = ["--in-spec", str(tmp_path / "a.npy"), "--out-spec", str(tmp_path / "b.zarr")]
    words = ["--patch", "4", "--overlap", "8", "--model-type", "identity"]
    assert main(["plan", *ends, *words]) == 2
    assert "--overlap 8" in capsys.readouterr().err


def test_inference_and_training_in_python_name_their_parameters(tmp_path: Path) -> None:
    volume = np.zeros((8, 8, 8), np.uint8)
    for call in (penstock.run_inference, penstock.plan_inference):
        with pytest.raises(UsageError, match=r"^overlap=8 must be less than patch=4"):
            call(volume, tmp_path / "b.zarr", model="identity", patch=4, overlap=8)
        with pytest.raises(UsageError, match=r"^model='none' is unknown"):
            call(volume, tmp_path / "b.zarr", model="none")
    with pytest.raises(
        UsageError, match=r"^resume=True goes on with what overwrite=True would remove"
    ):
        penstock.run_training("spiral", output_dir=tmp_path, resume=True, overwrite=True)
