"""The floating-point operations of a training: counted once, without a trace in the training."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from .kit import assert_same, config_of, kill_at, train_workload, weights

if find_spec("lightning_fabric") is None:
    pytest.skip("lightning_fabric is not installed", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")

FORWARD = 2 * (2 * 8 + 8 * 4 + 4 * 2)
"""Two operations for each weight of the small spiral's layers."""
BOTH = 2 * FORWARD + 2 * (8 * 4 + 4 * 2)
"""A backward has gradients of all weights, and of the inputs of all layers but the first."""


def train(out: Path, **changes: Any) -> dict[str, Any]:
    """Six steps, of which all but the first go uncounted."""
    return train_workload("spiral", config_of(out, **{"num_samples": 60, "epochs": 1} | changes))


@pytest.mark.parametrize(
    "changes", [{}, {"amp": True}, {"grad_accum_steps": 3}, {"max_steps": 1}], ids=str
)
def test_a_sample_has_the_operations_of_its_products(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert train(tmp_path, **changes)["flops_per_sample"] == BOTH
    written = json.loads((tmp_path / "training_results.json").read_text())
    assert written["flops_per_sample"] == BOTH


def test_counting_changes_nothing_in_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, whose random numbers a second forward would draw. What is compiled goes
    uncounted; the compiler itself would take long."""
    import torch

    monkeypatch.setattr(torch, "compile", lambda module: module)
    states, flops = [], []
    for compiled in (False, True):
        out = tmp_path / str(compiled)
        results = train(out, dropout=0.5, clip_norm=1.0, compile=compiled)
        flops.append(results["flops_per_sample"])
        states.append(torch.load(out / "checkpoints" / "last.pt", weights_only=True))
    assert flops == [BOTH, None]
    assert_same(weights(tmp_path / "False"), weights(tmp_path / "True"))
    for one, other in zip(*(state["random"] for state in states), strict=True):
        assert torch.equal(one["torch"], other["torch"]) and one["python"] == other["python"]


def test_a_run_that_goes_on_counts_anew(tmp_path: Path) -> None:
    from penstock.base.errors import Incomplete

    with pytest.raises(Incomplete):
        config = config_of(tmp_path, num_samples=60, epochs=1)
        train_workload("spiral", config, progress=kill_at(3))
    stopped = json.loads((tmp_path / "training_results.json").read_text())
    rest, nothing = train(tmp_path, resume=True), train(tmp_path, resume=True)
    assert stopped["flops_per_sample"] == rest["flops_per_sample"] == BOTH
    assert nothing["flops_per_sample"] is None


def test_a_formula_that_does_not_hold_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from penstock.models import footprint

    def broken(*args: Any, **kwargs: Any) -> int:
        raise ValueError("no such shape")

    monkeypatch.setattr(footprint, "flop_registry", {torch.ops.aten.addmm: broken})
    results = train(tmp_path)
    assert (results["status"], results["flops_per_sample"]) == ("complete", None)
