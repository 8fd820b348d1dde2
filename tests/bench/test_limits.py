"""Limits from scripted launches."""

import pytest

from penstock.bench import Launch, boundary
from penstock.instruments.ledger import Ledger
from penstock.instruments.record import Failure, Memory, Record

from .records import made_record

MIB = 2**20


CASE = {"model": "net", "device": "cpu", "tile": "0", "batch": 0, "budget": None}


class Machine:
    """A launch on a machine of so much memory, of a model of 1,000 bytes and 2 for each pixel."""

    def __init__(self, status: str = "oom_host", memory: int = 10_000) -> None:
        self.status, self.memory = status, memory
        self.launches: list[Launch] = []

    def __call__(self, launch: Launch) -> Record:
        self.launches.append(launch)
        side, batch = int(launch.case["tile"]), int(launch.case["batch"])
        peak = 1000 + 2 * batch * side**2
        if peak <= (launch.case["budget"] or self.memory):
            on_host = launch.case["device"] == "cpu"
            held = Memory(host_peak_kernel=peak) if on_host else Memory(device_peak=peak)
            return made_record("model", launch.case, memory=held)
        error = Failure(stage="warmup", message="killed by SIGSEGV")
        return made_record("model", launch.case, 0, self.status, error=error)


def test_limits_on_a_cpu_are_enforced_by_the_kernel(tmp_path) -> None:
    machine, ledger = Machine(), Ledger(tmp_path)
    seen: list[Record] = []
    both = boundary.model_limits(
        CASE, ["8", "16"], 2, 512, 10_000, ledger, timeout_s=9, run=machine, report=seen.append
    )
    assert [(limit.batch, limit.failing_batch) for limit in both] == [(70, 71), (17, 18)]
    assert both[0].margin == pytest.approx(1 - 9960 / 10_000) and both[0].cliff
    assert {launch.memory_limit for launch in machine.launches} == {10_000}
    assert "interpreter" in boundary.budget_note("cpu")
    assert ledger.records() == seen and len(seen) == 6
    assert len({record.key for record in seen}) == 6


@pytest.mark.parametrize(("budget", "total"), [(10_000, None), (None, 10_000), (None, None)])
def test_limits_on_a_gpu_are_allocators(budget: int | None, total: int | None, tmp_path) -> None:
    """Or what torch says the card has, whatever the driver shows: it may be a slice of one."""
    machine = Machine("oom_device")
    case = CASE | {"device": "cuda:0"}
    (limit,) = boundary.model_limits(
        case, ["8"], 2, 512, budget, Ledger(tmp_path), timeout_s=9, device_memory=total, run=machine
    )
    assert (limit.batch, limit.peak, limit.budget) == (70, 9960, budget or total)
    assert {launch.memory_limit for launch in machine.launches} == {None}
    assert {launch.case["budget"] for launch in machine.launches} == {budget}
    assert "allocator" in boundary.budget_note("cuda:0")


def test_without_a_budget_a_cpu_is_kept_to_what_is_free(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(boundary, "available_memory", lambda: 5000)
    machine = Machine()
    (limit,) = boundary.model_limits(
        CASE, ["8"], 2, 512, None, Ledger(tmp_path), timeout_s=9, run=machine
    )
    assert limit.budget == 5000 and limit.batch == 31
    assert {launch.memory_limit for launch in machine.launches} == {5000}


@pytest.mark.slow
def test_a_real_boundary_under_a_limit_of_the_kernel(tmp_path) -> None:
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
    (limit,) = boundary.model_limits(case, ["1792"], 2, 1024, budget, ledger, timeout_s=300)
    answers = {record.case["batch"]: record.status for record in ledger.records()}
    assert limit.batch is not None and limit.failing_batch == limit.batch + 1, limit.sentence
    assert (answers[limit.batch], answers[limit.failing_batch]) == ("ok", "oom_host")
    # What it took is less than all, and what the output alone would take is less than that.
    assert limit.peak is not None and 64 * limit.batch * 1792**2 < limit.peak < 1.5 * budget
