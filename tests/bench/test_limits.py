"""Noise and limits from scripted launches."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import UsageError
from penstock.bench import limits
from penstock.bench.launch.supervisor import LaunchRequest
from penstock.bench.scenarios import WrongResult, make
from penstock.bench.scenarios import matmul as scenarios
from penstock.instruments.ledger import Ledger
from penstock.instruments.record import Failure, Memory, Record

from .records import made_record

MIB = 2**20


def phase(name: str) -> None: ...


# scenarios


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matmul_counts_and_checks_its_work(dtype: str) -> None:
    scenario = make("matmul", {"device": "cpu", "dtype": dtype, "size": 64})
    itemsize = 4 if dtype == "float32" else 2
    assert scenario.step(phase) == {"flops": 2 * 64**3, "bytes": 3 * 64**2 * itemsize}
    scenario.verify()
    scenario.close()


def test_a_scenario_that_cannot_be_imported_says_what_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "penstock.bench.scenarios.matmul", None)
    with pytest.raises(ModuleNotFoundError, match=r"scenarios\.matmul"):
        make("matmul", {})


def test_a_wrong_product_is_found() -> None:
    scenario = scenarios.Matmul({"device": "cpu", "dtype": "float32", "size": 64})
    scenario._matmul = lambda left, right, out: out.fill_(77.0)
    scenario.step(phase)
    with pytest.raises(WrongResult, match="77"):
        scenario.verify()


def test_a_device_that_is_not_there_is_not_supported() -> None:
    with pytest.raises(UsageError, match="--device cuda:77: this machine has"):
        make("matmul", {"device": "cuda:77", "dtype": "float32", "size": 64})


# noise from scripted launches


def made(request: LaunchRequest, launch: int, order: int | None = None, **fields: Any) -> Record:
    usual: dict[str, Any] = {
        "order": order, "environment": {"machine_key": "here"},
        "work": {"flops": 1000}, "samples_s": {"step": [2.0] * 9},
    }  # fmt: skip
    return made_record(request.scenario, request.case, launch, **usual | fields)


def always(**fields: Any) -> Callable[..., Record]:
    def run(request: LaunchRequest, *, launch: int, order: int | None, timeout_s: float) -> Record:
        return made(request, launch, order, **fields)

    return run


def in_turn(seconds: list[float]) -> Callable[..., Record]:
    answers = iter(seconds)

    def run(request: LaunchRequest, *, launch: int, order: int | None, timeout_s: float) -> Record:
        return made(request, launch, samples_s={"step": [next(answers)] * 9})

    return run


FAILED = {
    "status": "unsupported",
    "samples_s": {},
    "error": Failure(stage="setup", message="torch is not here"),
}


def test_no_noise(tmp_path: Path) -> None:
    noise = limits.noise_floor("cpu", Ledger(tmp_path), always())
    assert noise == {
        "n": 6, "disturbed": 0, "spread": 0, "ratio": 1, "low": 1, "high": 1, "threshold": 0,
        "note": "",
    }  # fmt: skip
    crowd = {"machine_key": "here", "load": {"busy_processes": 2}}
    noise = limits.noise_floor("cpu", Ledger(tmp_path), always(environment=crowd))
    assert noise["disturbed"] == 6, "launches that others disturbed are counted"


def test_noise_is_taken_by_turns_a_b_b_a(tmp_path: Path) -> None:
    a, b = 1.0, 1.5
    run = in_turn([a, b, b, a, a, b])
    noise = limits.noise_floor("cpu", Ledger(tmp_path), run)
    assert noise["ratio"] == 1.5 and noise["spread"] == pytest.approx(0.5)
    assert noise["threshold"] == pytest.approx(0.5)


def test_the_threshold_covers_the_ratio_whichever_side_is_slower(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for number in range(5):
        run = in_turn(list(rng.normal(1, 0.05, 10)))
        noise = limits.noise_floor("cpu", Ledger(tmp_path / str(number)), run)
        assert max(noise["ratio"], 1 / noise["ratio"]) - 1 <= noise["threshold"]
        assert noise["low"] <= noise["ratio"] <= noise["high"] and noise["n"] == 6


def test_what_cannot_be_measured_is_missing(tmp_path: Path) -> None:
    ledger, fails = Ledger(tmp_path), always(**FAILED)
    noise = limits.noise_floor("cpu", ledger, fails)
    assert noise["threshold"] is None and noise["note"] == "torch is not here"


def test_the_ledger_is_in_the_cache_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert limits.default_ledger().path.parent == tmp_path / "penstock" / "doctor.ledger"
    assert not list(tmp_path.iterdir())


# what fits

CASE = {"model": "net", "device": "cpu", "tile": "0", "batch": 0, "budget": None}


class Machine:
    """A launch on a machine of so much memory, of a model of 1,000 bytes and 2 for each pixel."""

    def __init__(self, status: str = "oom_host", memory: int = 10_000) -> None:
        self.status, self.memory = status, memory
        self.requests: list[LaunchRequest] = []

    def __call__(
        self, request: LaunchRequest, *, launch: int, order: int | None, timeout_s: float
    ) -> Record:
        self.requests.append(request)
        side, batch = int(request.case["tile"]), int(request.case["batch"])
        peak = 1000 + 2 * batch * side**2
        if peak <= (request.case["budget"] or self.memory):
            on_host = request.case["device"] == "cpu"
            held = Memory(host_peak_kernel=peak) if on_host else Memory(device_peak=peak)
            return made(request, launch, memory=held)
        error = Failure(stage="warmup", message="killed by SIGSEGV")
        return made(request, launch, status=self.status, samples_s={}, error=error)


def test_limits_on_a_cpu_are_enforced_by_the_kernel(tmp_path: Path) -> None:
    machine, ledger = Machine(), Ledger(tmp_path)
    seen: list[Record] = []
    both = limits.model_limits(
        CASE, ["8", "16"], 2, 512, 10_000, ledger, timeout_s=9, run=machine, report=seen.append
    )
    assert [(limit.batch, limit.failing_batch) for limit in both] == [(70, 71), (17, 18)]
    assert both[0].margin == pytest.approx(1 - 9960 / 10_000) and both[0].cliff
    assert {request.memory_limit for request in machine.requests} == {10_000}
    assert "interpreter" in limits.budget_note("cpu")
    assert ledger.records() == seen and len(seen) == 6
    assert len({record.key for record in seen}) == 6


@pytest.mark.parametrize(("budget", "total"), [(10_000, None), (None, 10_000), (None, None)])
def test_limits_on_a_gpu_are_for_the_allocator(
    budget: int | None, total: int | None, tmp_path: Path
) -> None:
    """Or what torch says the card has, whatever the driver shows: it may be a slice of one."""
    machine = Machine("oom_device")
    case = CASE | {"device": "cuda:0"}
    (limit,) = limits.model_limits(
        case, ["8"], 2, 512, budget, Ledger(tmp_path), timeout_s=9, device_memory=total, run=machine
    )
    assert (limit.batch, limit.peak, limit.budget) == (70, 9960, budget or total)
    assert {request.memory_limit for request in machine.requests} == {None}
    assert {request.case["budget"] for request in machine.requests} == {budget}
    assert "allocator" in limits.budget_note("cuda:0")


def test_without_a_budget_a_cpu_is_kept_to_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "available_memory", lambda: 5000)
    machine = Machine()
    (limit,) = limits.model_limits(
        CASE, ["8"], 2, 512, None, Ledger(tmp_path), timeout_s=9, run=machine
    )
    assert limit.budget == 5000 and limit.batch == 31
    assert {request.memory_limit for request in machine.requests} == {5000}


def test_a_crash_is_no_limit(tmp_path: Path) -> None:
    (limit,) = limits.model_limits(
        CASE, ["8"], 2, 512, 10_000, Ledger(tmp_path), timeout_s=9, run=Machine("crash")
    )
    assert limit.batch is None and "SIGSEGV" in limit.sentence


@pytest.mark.slow
def test_a_real_boundary_under_a_limit_of_the_kernel(tmp_path: Path) -> None:
    """One layer of 3x3, 16 channels: its output alone is 64 bytes for each pixel."""
    net = tmp_path / "net.py"
    net.write_text(
        "import torch\n\ndef build():\n    return torch.nn.Conv2d(1, 16, 3, padding=1)\n"
    )
    case = {
        "model": f"{net}:build", "weights": None, "mode": "inference", "tile": "256", "batch": 1,
        "channels": 1, "dtype": "float32", "amp": False, "compile": False, "channels_last": False,
        "checkpointing": False, "halo": 0, "device": "cpu", "threads": 1, "seed": 0, "budget": None,
    }  # fmt: skip
    budget = 700 * MIB
    ledger = Ledger(tmp_path / "ledger")
    (limit,) = limits.model_limits(case, ["1024"], 2, 1024, budget, ledger, timeout_s=300)
    answers = {record.case["batch"]: record.status for record in ledger.records()}
    assert limit.batch is not None and limit.failing_batch == limit.batch + 1, limit.sentence
    assert (answers[limit.batch], answers[limit.failing_batch]) == ("ok", "oom_host")
    # What it took is less than all, and what the output alone would take is less than that.
    assert limit.peak is not None and 64 * limit.batch * 512**2 < limit.peak < 1.5 * budget
