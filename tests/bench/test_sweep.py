"""Order, failures, resuming and interrupting of a sweep, with launches that are made up."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.launch.request import Launch
from penstock.bench.launch.sweep import SweepStep, launch_order, run_sweep
from penstock.instruments import Failure, Ledger, Record

from .records import made_record

CASES = [{"tile": tile, "batch": batch} for tile in ("8", "16") for batch in (1, 2, 4)]


class Runs:
    """Stands in for `launch.launch`: ``ends`` maps a batch to what becomes of it."""

    def __init__(self, ends: dict[int, str] | None = None, interrupt_at: int | None = None) -> None:
        self.ends, self.interrupt_at = ends or {}, interrupt_at
        self.seen: list[tuple[int, int, int | None]] = []
        self.launches: list[Launch] = []

    def __call__(self, launches: Iterable[Launch]) -> Iterator[tuple[Launch, Record]]:
        return ((launch, self.run(launch)) for launch in launches)

    def run(self, launch: Launch) -> Record:
        if len(self.seen) == self.interrupt_at:
            raise KeyboardInterrupt
        number, order = launch.number, launch.order
        self.seen.append((CASES.index(dict(launch.case)), number, order))
        self.launches.append(launch)
        assert launch.timeout_s == 60.0
        status = self.ends.get(launch.case["batch"], "ok")
        error = None if status == "ok" else Failure(stage="measure", message="made up")
        return made_record(launch.scenario, launch.case, number, status, order=order, error=error)


def go(folder: Path, run: Runs, launches: int = 5, **options: Any) -> list[Record]:
    settings: dict[str, Any] = {"memory_limit": None, "seed": 3, "resume": False} | options
    rules = {"seconds": 1.0, "precision": 0.1}
    return run_sweep(
        "model", CASES, launches, Ledger(folder), rules=rules, timeout_s=60.0,
        launcher=run, **settings,
    )  # fmt: skip


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32))
def test_every_round_holds_every_case_once(cases: int, launches: int, seed: int) -> None:
    pairs = launch_order(cases, launches, seed)
    assert pairs == launch_order(cases, launches, seed)
    for number in range(launches):
        row = pairs[number * cases : (number + 1) * cases]
        assert sorted(row) == [(case, number) for case in range(cases)]


@given(st.integers(1, 9), st.integers(0, 2**32))
def test_a_pair_is_mirrored(launches: int, seed: int) -> None:
    """ABBA: over an even number of rounds both have the same mean place."""
    firsts = [launch_order(2, launches, seed)[2 * n][0] for n in range(launches)]
    assert all(a != b for a, b in pairwise(firsts))


def test_rounds_differ_and_the_seed_decides() -> None:
    rounds = [tuple(case for case, n in launch_order(6, 10, 0) if n == i) for i in range(10)]
    assert len(set(rounds)) > 5
    assert launch_order(6, 10, 0) != launch_order(6, 10, 1)


def test_a_sweep_is_in_its_ledger_in_the_order_that_it_ran(tmp_path) -> None:
    run = Runs()
    records = go(tmp_path, run, memory_limit=2**30)
    assert [(index, number) for index, number, _ in run.seen] == launch_order(6, 5, 3)
    assert [place for *_, place in run.seen] == list(range(30))
    assert Ledger(tmp_path).records() == records
    assert {request.memory_limit for request in run.launches} == {2**30}
    assert run.launches[0].rules == {"seconds": 1.0, "precision": 0.1}
    assert {request.task for request in run.launches} == {"measure"}


@pytest.mark.parametrize(
    ("status", "launches"),
    [
        ("oom_device", 1),
        ("oom_host", 1),
        ("unsupported", 1),
        ("wrong_result", 1),
        ("crash", 5),  # may be chance
        ("timeout", 5),
    ],
)
def test_a_failure_is_a_row_and_the_sweep_goes_on(tmp_path, status: str, launches: int) -> None:
    steps: list[SweepStep] = []
    records = go(tmp_path, Runs({4: status}), progress=steps.append)
    assert Counter((r.case["batch"], r.status) for r in records) == {
        (1, "ok"): 10,
        (2, "ok"): 10,
        (4, status): 2 * launches,
    }
    skipped = [step for step in steps if step.skipped]
    assert len(skipped) == 10 - 2 * launches
    assert all(status in step.skipped for step in skipped)
    assert steps[-1].number == steps[-1].total == 30


@pytest.mark.parametrize("interrupt_at", [0, 1, 13])
def test_an_interrupted_sweep_resumes_where_it_was(tmp_path, interrupt_at: int) -> None:
    ends = {4: "oom_host", 2: "crash"}
    whole = go(tmp_path / "whole", Runs(ends))
    first, second = Runs(ends, interrupt_at), Runs(ends)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "parts", first)
    assert len(Ledger(tmp_path / "parts").records()) == interrupt_at
    records = go(tmp_path / "parts", second, resume=True)
    assert first.seen + second.seen == [(CASES.index(r.case), r.launch, r.order) for r in whole]
    assert records == whole == Ledger(tmp_path / "parts").records()
    assert go(tmp_path / "parts", Runs(interrupt_at=0), resume=True) == whole, "nothing is left"


def test_without_resume_all_is_measured_again(tmp_path) -> None:
    go(tmp_path, Runs(), launches=1)
    assert len(go(tmp_path, Runs(), launches=1)) == 6
    assert len(Ledger(tmp_path).records()) == 12


def test_records_of_other_cases_are_not_returned(tmp_path) -> None:
    go(tmp_path, Runs(), launches=1)
    one = run_sweep(
        "model", CASES[:1], 2, Ledger(tmp_path), rules={}, timeout_s=60.0, memory_limit=None,
        seed=0, resume=True, launcher=Runs(),
    )  # fmt: skip
    assert [(record.case, record.launch) for record in one] == [(CASES[0], 0), (CASES[0], 1)]
