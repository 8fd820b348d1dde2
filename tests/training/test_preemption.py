"""A training that is sent SIGTERM at any moment, and goes on: the weights of one that was not."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if find_spec("lightning_fabric") is None:
    pytest.skip("lightning_fabric is not installed", allow_module_level=True)

from penstock.base import TRAIN_DEFAULTS, Incomplete, TrainConfig, build

from .kit import NET, packed, train_workload

if TYPE_CHECKING:
    import torch

    from .struck import Struck


pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Run:
    workload: type[Struck]
    config: Callable[..., TrainConfig]
    """By its output folder and whether it is resumed."""
    batches: int
    """Trained on and validated, in all."""
    weights: dict[str, torch.Tensor]
    """Of a run that nobody stopped."""


def trained(
    workload: type[Struck], config: Callable[..., TrainConfig], out: Path, moments: Sequence[int]
) -> tuple[int, dict[str, torch.Tensor]]:
    """Train to the end, struck once in each session: how often it was stopped, and its weights."""

    import torch

    from .struck import Struck

    stops = 0
    for moment in (*moments, None):
        Struck.moment = moment
        try:
            train_workload(
                f"tests.training.struck:{workload.__name__}", config(out, resume=stops > 0)
            )
            break
        except Incomplete as error:
            assert "stopped by SIGTERM" in str(error)
            stops += 1
        finally:
            Struck.moment = None
    return stops, torch.load(out / "checkpoints" / "last.pt", weights_only=True)["model"]


@pytest.fixture(
    scope="module",
    params=[
        "spiral",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("pairs", "emulator")),
    ],
)
def run(request, tmp_path_factory) -> Run:
    from .struck import StruckEmulator, StruckPairs, StruckSpiral

    name, folder = request.param, tmp_path_factory.mktemp("runs")
    if name == "spiral":
        # 58 points in 8 batches, 12 in 2, twice
        workload, batches = StruckSpiral, 2 * (8 + 2)
        args: dict[str, Any] = {"num_samples": 83, "batch_size": 8, "hidden_dims": (8, 4)}
        args |= {"epochs": 2, "dropout": 0.2}
    elif name == "pairs":
        # 2 x 3 x 4 tiles to train on and 2 x 3 x 1 to validate, by fours, twice
        workload, batches = StruckPairs, 2 * (6 + 2)
        values = np.random.default_rng(0).integers(0, 4000, (2, 16, 24, 40)).astype(np.uint16)
        args = {"model": NET, "tile_size": "8", "batch_size": 4, "epochs": 2, "num_workers": 2}
        for flag, array in zip(("in_spec", "target_spec"), values, strict=True):
            np.save(folder / f"{flag}.npy", array)
            args[flag] = str(folder / f"{flag}.npy")
    else:
        # 13 samples and 5, by twos, twice
        workload, batches = StruckEmulator, 2 * (7 + 3)
        args = {"latent_size": 8, "mesh_level": 1, "message_steps": 1, "batch_size": 2, "epochs": 2}
        args["train_data_root"] = packed(folder / "train", 13)
        args["val_data_root"] = packed(folder / "val", 5, first=40)

    def config(out: Path, resume: bool = False) -> TrainConfig:
        about = {"device": "cpu", "output_dir": out, "resume": resume}
        return build(TrainConfig, TRAIN_DEFAULTS[name], args, about)

    _, weights = trained(workload, config, folder / "whole", [])
    return Run(workload, config, batches, weights)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=2 + settings.default.max_examples // 25)  # each is a whole training
def test_a_run_struck_at_any_moment_ends_in_the_same_weights(run: Run, data: st.DataObject) -> None:
    import torch

    moments = data.draw(st.lists(st.integers(0, run.batches - 1), min_size=1, max_size=2))
    with tempfile.TemporaryDirectory() as out:
        stops, weights = trained(run.workload, run.config, Path(out), moments)
    assert stops >= 1
    assert weights.keys() == run.weights.keys()
    for name in weights:
        assert torch.equal(weights[name], run.weights[name]), name
