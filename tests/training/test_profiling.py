"""Steps under torch's profiler: what the trace holds, under which names, and what is told of it."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

if find_spec("lightning_fabric") is None:
    pytest.skip("lightning_fabric is not installed", allow_module_level=True)

from penstock.base.config.knobs import build
from penstock.base.config.train import TRAIN_DEFAULTS, TrainConfig
from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.instruments.phases import PhaseTimer

from .kit import train_workload

SMALL = {"num_samples": 203, "batch_size": 8, "epochs": 1, "hidden_dims": (8, 4), "device": "cpu"}
PHASES = ["data_wait", "transfer", "forward", "backward", "optimizer"]


pytestmark = pytest.mark.usefixtures("one_thread")


def profiled(out: Path, **changes: Any) -> dict[str, Any]:
    settings = {"output_dir": out, "profile": True, **changes}
    return train_workload("spiral", build(TrainConfig, TRAIN_DEFAULTS["spiral"], SMALL, settings))


class Traced(NamedTuple):
    """What a run left, and what it said."""

    folder: Path
    results: dict[str, Any]
    said: str


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """A run of ten steps, of which the last five are profiled, by the command."""
    from penstock.training import profiling

    folder, said = tmp_path_factory.mktemp("traced"), io.StringIO()
    words = ["--num-samples", "203", "--batch-size", "8", "--hidden-dims", "8", "4"]
    words += ["--epochs", "1", "--max-steps", "10"]
    words += ["--device", "cpu", "--profile", "--output-dir", str(folder)]
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setattr(profiling, "MOST_ROWS", 1000)  # the stretches between steps, too
        assert main(["train", "spiral", *words]) == 0
    results = json.loads((folder / "training_results.json").read_text())
    return Traced(folder, results, said.getvalue())


def spans(trace: Path) -> list[dict[str, Any]]:
    """Our phases in the order in which they began."""
    events = json.loads(trace.read_text())["traceEvents"]
    phases = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in PHASES]
    return sorted(phases, key=lambda event: event["ts"])


def test_a_trace_holds_the_phases_of_the_steps_asked_for(traced: Traced) -> None:
    trace = traced.folder / "profile" / "rank0.json"
    assert [span["name"] for span in spans(trace)] == PHASES * 5
    events = json.loads(trace.read_text())["traceEvents"]
    # An operator of the forward pass lies within the span of that name.
    linear = [e for e in events if e.get("name") == "aten::linear"]
    forward = [span for span in spans(trace) if span["name"] == "forward"]
    assert len(linear) == 3 * 5  # layers, steps
    for event in linear:
        assert any(
            span["ts"] <= event["ts"] and event["ts"] + event["dur"] <= span["ts"] + span["dur"]
            for span in forward
        )
    profile = traced.results["profile"]
    assert (profile["trace"], profile["steps"]) == ("profile/rank0.json", 5)
    with (traced.folder / "steps" / "rank0.csv").open(newline="") as file:
        recorded = list(csv.DictReader(file))[-5:]
    for name in PHASES:  # read from the same clock a moment later, which may be a long one
        took = [span["dur"] / 1e6 for span in spans(trace) if span["name"] == name]
        late = [abs(a - float(row[f"{name}_s"])) for a, row in zip(took, recorded, strict=True)]
        assert sorted(late)[2] < 1e-3
    calls = {row["name"]: row["calls"] for row in profile["operators"]}
    assert calls["aten::addmm"] == 15
    assert not set(calls) & {*PHASES, "ProfilerStep*"}
    assert not [name for name in calls if name.startswith("Optimizer.")]


def test_the_table_names_operators(traced: Traced) -> None:
    table = (traced.folder / "profile" / "operators.txt").read_text()
    for text in (traced.said, table):
        assert "5 steps profiled" in text
        assert "aten::" in text
    assert "Self CPU" in table


def test_a_kernel_of_a_gpu_counts_once() -> None:
    """As CUDA has it: 3 ms of kernels and 1 ms of copies, told of by themselves, by the operators
    that launched them, and by the annotations of two phases and of the optimizer."""

    from penstock.training import profiling

    def row(key: str, ms: float) -> Any:
        return SimpleNamespace(key=key, count=2, self_device_time_total=1e3 * ms)

    operators = [row("aten::mm", 2), row("aten::copy_", 1), row("aten::add_", 1), row("aten::t", 0)]
    kernels = [row("sgemm", 2), row("add", 1), row("Memcpy HtoD", 1)]
    annotations = [row("ProfilerStep*", 5), row("forward", 3), row("optimizer", 1)]
    annotations += [row("Optimizer.step#SGD.step", 1), row("cudaLaunchKernel", 0)]
    events: list[dict[str, Any]] = [
        {"cat": "kernel", "name": "sgemm", "dur": 1e3},
        {"cat": "kernel", "name": "sgemm", "dur": 1e3},
        {"cat": "kernel", "name": "add", "dur": 1e3},
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "dur": 1e3},
        {"cat": "gpu_user_annotation", "name": "forward", "dur": 3e3},
        {"cat": "gpu_user_annotation", "name": "Optimizer.step#SGD.step", "dur": 1e3},
        {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": 10.0},
        {"ph": "M", "name": "process_name"},
        *({"cat": "cpu_op", "name": operator.key, "dur": 20.0} for operator in operators),
    ]
    whole, slowest = profiling.busiest(events, [*kernels, *annotations, *operators], cuda=True)
    assert whole == pytest.approx(4e-3)
    assert [(o["name"], o["self_s"] / whole) for o in slowest] == [
        ("aten::mm", 0.5), ("aten::copy_", 0.25), ("aten::add_", 0.25), ("aten::t", 0.0),
    ]  # fmt: skip


def test_batches_of_a_step_are_each_in_the_trace(tmp_path: Path) -> None:
    """With gradients added up over two batches, phases come again in another order."""
    results = profiled(tmp_path, profile_steps=2, grad_accum_steps=2, max_steps=7)
    written = json.loads((tmp_path / "training_results.json").read_text())
    assert written["profile"] == results["profile"]
    names = [span["name"] for span in spans(tmp_path / "profile" / "rank0.json")]
    assert names == (PHASES[:4] * 2 + PHASES[4:]) * 2


def test_profiling_changes_no_step(traced: Traced, tmp_path: Path) -> None:
    import torch

    settings = {"output_dir": tmp_path, "max_steps": 10}
    train_workload("spiral", build(TrainConfig, TRAIN_DEFAULTS["spiral"], SMALL, settings))
    folders = traced.folder, tmp_path
    one, other = (torch.load(of / "best_model.pth", weights_only=True) for of in folders)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not (tmp_path / "profile").exists()


def test_a_run_that_is_too_short_is_refused(traced: Traced, tmp_path: Path) -> None:
    reason = "--profile-steps 3 come after 5 others, and this run has 7 steps of the 8"
    with pytest.raises(UsageError, match=reason):
        profiled(tmp_path, max_steps=7, profile_steps=3)
    assert traced.results["profile"]["steps"] == 5


def test_a_run_that_fails_early_leaves_no_trace(tmp_path: Path) -> None:
    from penstock.training import profiling

    timer = profiling.ProfiledTimer(PhaseTimer(lambda: 0.0), tmp_path, 0, 5, False, lambda: 0.0)
    for _ in range(7):
        timer.begin()
        timer.end_phase("forward")
        timer.end()
    timer.close()
    assert timer.profile is None
    assert not (tmp_path / "profile").exists()
    assert [row["forward"] for row in timer.drain()] == [0.0] * 7


def test_a_lap_that_another_thread_ends(tmp_path: Path) -> None:
    """As autograd ends the backward pass on a GPU: what follows it is told apart by its time."""

    from threading import Thread

    from penstock.training import profiling

    now = 0.0
    timer = profiling.ProfiledTimer(PhaseTimer(lambda: now), tmp_path, 0, 1, False, lambda: now)
    for _ in range(7):
        timer.begin()
        timer.end_phase("forward")
        now += 3
        other = Thread(target=timer.end_phase, args=("backward",))
        other.start()
        other.join()
        now += 1
        timer.end_phase("communication")
        timer.end_phase("optimizer")
        timer.end()
    events = json.loads((tmp_path / "profile" / "rank0.json").read_text())["traceEvents"]
    named = {"forward", "backward", "communication", "optimizer"}
    ours = [event for event in events if event.get("cat") == "user_annotation"]
    counts = Counter(event["name"] for event in ours if event["name"] in named)
    assert counts == dict.fromkeys(named, 1)
    one, other = (
        next(event for event in ours if event["name"] == name)
        for name in ("backward", "communication")
    )
    assert one["dur"] == pytest.approx(3 * other["dur"])
    assert other["ts"] == pytest.approx(one["ts"] + one["dur"])
    assert all("communication" in row for row in timer.drain())
