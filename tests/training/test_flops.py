"""The floating-point operations of a training: counted once, without a trace in the training."""

from __future__ import annotations

import contextlib
import json
import sys
from collections import Counter
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


FEW = {"num_samples": 60, "epochs": 1}
"""Six steps, of which all but the first go uncounted."""


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have compiled something."""
    compiler = pytest.importorskip("torch._dynamo.utils")
    monkeypatch.setattr(compiler, "counters", {"frames": Counter()})


def train(out: Path, workload: str = "spiral", **changes: Any) -> dict[str, Any]:
    return train_workload(workload, config_of(out, **FEW | changes))


def counted(results: dict[str, Any]) -> tuple[float | None, str]:
    return results["flops_per_sample"], results["flops_note"]


@pytest.mark.parametrize(
    "changes", [{}, {"amp": True}, {"grad_accum_steps": 3}, {"max_steps": 1}], ids=str
)
def test_a_sample_has_the_operations_of_its_products(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    results = train(tmp_path, **changes)
    assert counted(results) == (BOTH, "")
    written = json.loads((tmp_path / "training_results.json").read_text())
    assert counted(written) == (BOTH, "")


@pytest.mark.parametrize("compiled", [False, True])
def test_counting_changes_nothing_in_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """With dropout, whose random numbers a second forward would draw. The compiler itself would
    take long; what matters is that its network is counted on shapes."""
    import torch

    from penstock.training.flops import FlopCount

    monkeypatch.setattr(torch, "compile", lambda module: module)
    changes: dict[str, Any] = {"dropout": 0.5, "clip_norm": 1.0, "compile": compiled}
    ours = train(tmp_path / "counted", **changes)
    assert counted(ours) == (BOTH, "")
    monkeypatch.setattr(FlopCount, "at", lambda *_: contextlib.nullcontext())
    theirs = train(tmp_path / "plain", **changes)
    assert counted(theirs) == (None, "no step was taken")
    assert_same(weights(tmp_path / "counted"), weights(tmp_path / "plain"))
    best = [(tmp_path / name / "best_model.pth").read_bytes() for name in ("counted", "plain")]
    assert best[0] == best[1]
    times = ("train_s", "val_s")
    one, other = ([{k: v for k, v in row.items() if k not in times} for row in each["history"]]
                  for each in (ours, theirs))  # fmt: skip
    assert one == other
    states = [torch.load(tmp_path / name / "checkpoints" / "last.pt", weights_only=True)
              for name in ("counted", "plain")]  # fmt: skip
    assert states[0].keys() == states[1].keys(), "nothing of it is in a checkpoint"
    for one, other in zip(*(state["random"] for state in states), strict=True):
        assert torch.equal(one["torch"], other["torch"]) and one["python"] == other["python"]


def test_a_run_that_goes_on_counts_anew(tmp_path: Path) -> None:
    from penstock.base.errors import Incomplete

    with pytest.raises(Incomplete):
        train_workload("spiral", config_of(tmp_path, **FEW), progress=kill_at(3))
    stopped = json.loads((tmp_path / "training_results.json").read_text())
    assert counted(stopped) == counted(train(tmp_path, resume=True)) == (BOTH, "")
    nothing_left = train(tmp_path, resume=True)
    assert counted(nothing_left) == (None, "no step was taken")


def test_what_cannot_be_counted_is_said_and_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from penstock.models import footprint
    from penstock.training import flops

    def broken(*args: Any, **kwargs: Any) -> int:
        raise ValueError("no such shape")

    monkeypatch.setattr(footprint, "flop_registry", {torch.ops.aten.addmm: broken})
    results = train(tmp_path / "a")
    assert results["status"] == "complete" and results["flops_per_sample"] is None
    assert "aten.addmm.default were not counted: no such shape" in results["flops_note"]
    monkeypatch.setattr(footprint, "flop_registry", {})
    note = "no product, convolution or attention was seen"
    assert counted(train(tmp_path / "b")) == (None, note)
    monkeypatch.setattr(flops, "_LEAVES_COMPILED", True)
    monkeypatch.setitem(
        sys.modules["torch._dynamo.utils"].counters, "frames", Counter({"total": 1, "ok": 1})
    )
    note = "the workload compiles code, whose operations are not seen"
    assert counted(train(tmp_path / "c")) == (None, note)


def test_a_step_that_looks_at_values_has_no_count_on_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch, "compile", lambda module: module)
    results = train(tmp_path, "tests.training.spirals:Peeking", compile=True)
    assert results["status"] == "complete" and results["flops_per_sample"] is None
    assert results["flops_note"].startswith("the step cannot be run on shapes alone: ")
