"""Steps under torch's profiler: what the trace holds, and what changes in the training: nothing."""

import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("lightning_fabric") is None:
    pytest.skip("lightning_fabric is not installed", allow_module_level=True)

from penstock.base.errors import UsageError
from penstock.training.profiling import StepProfiler

from .kit import assert_same, config_of, train_workload, weights

pytestmark = pytest.mark.usefixtures("one_thread")


def profiled(out: Path, **changes: Any) -> dict[str, Any]:
    return train_workload("spiral", config_of(out, **{"max_steps": 10, "profile": True} | changes))


@pytest.mark.slow
def test_a_trace_has_the_operators_of_the_steps_asked_for_and_changes_none(tmp_path) -> None:
    results = profiled(tmp_path / "a")
    trace = json.loads((tmp_path / "a" / "profile" / "rank0.json").read_text())
    calls = Counter(event.get("name") for event in trace["traceEvents"])
    assert calls["aten::linear"] == 3 * 5, "layers, steps"
    table = (tmp_path / "a" / "profile" / "operators.txt").read_text()
    assert "aten::addmm" in table and "Self CPU" in table
    assert profiled(tmp_path / "b", profile=False)["steps"] == results["steps"] == 10
    assert_same(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert not (tmp_path / "b" / "profile").exists()


@pytest.mark.slow
def test_batches_of_a_step_are_all_in_the_trace(tmp_path) -> None:
    profiled(tmp_path, profile_steps=2, grad_accum_steps=2, max_steps=7)
    trace = json.loads((tmp_path / "profile" / "rank0.json").read_text())
    assert Counter(e.get("name") for e in trace["traceEvents"])["aten::linear"] == 3 * 2 * 2


def test_a_run_that_is_too_short_is_refused(tmp_path) -> None:
    reason = "--profile-steps 3 come after 5 others, and this run has 7 steps of the 8"
    with pytest.raises(UsageError, match=reason):
        profiled(tmp_path, max_steps=7, profile_steps=3)


def test_a_run_that_fails_early_leaves_no_trace(tmp_path) -> None:
    profiler = StepProfiler(tmp_path, 0, 5, 10, False)
    for _ in range(7):  # two of those to record
        profiler.step()
    profiler.close()
    assert not (tmp_path / "profile").exists()
