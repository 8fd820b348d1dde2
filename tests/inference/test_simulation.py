"""The simulation against closed forms, and the formula against the simulation."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.inference.planning import simulation
from penstock.inference.planning.at_scale import Fleet, Load, expect
from penstock.inference.planning.plan import make_plan
from penstock.inference.planning.simulation import Outcome, simulate
from penstock.inference.tiling.part_work import PartWork, part_work

from ..laws import COSTLY
from .kit import SEED, config, facts

REDO = part_work(make_plan(config(workers=8), facts((4096,) * 3), SEED).parts).redo  # type: ignore[arg-type]
EQUAL = PartWork(((100,) * 20, (10,) * 10, (10,) * 10), 1, REDO)
"""2,000 parts of 10,000 patches."""
CLIPPED = PartWork(((100,) * 19 + (30,), (10,) * 9 + (2,), (10,) * 9 + (5,)), 1, REDO)
"""As many, those at the edges smaller."""
PART = 1e4
"""Seconds of a part of `EQUAL` at a speed of one patch per second."""


def fleet(workers: int, mtbf: float | None = None, **more: Any) -> Fleet:
    """Workers whose mean time between failures is given in parts."""
    return Fleet(workers, 1.0, None if mtbf is None else mtbf * PART, **more)


def seconds(load: Load, workers: Fleet, runs: int = 1) -> list[float]:
    return [run.seconds for run in simulate(load, workers, runs, seed=0)]


@pytest.mark.parametrize("workers", [1, 7, 100, 300, 2000, 50_000])
def test_equal_parts_without_failures_are_done_in_turns(workers: int) -> None:
    turns = math.ceil(len(EQUAL) / workers)
    load = Load(EQUAL, speed=1.0)
    assert seconds(load, fleet(workers)) == [pytest.approx(turns * PART)]
    assert expect(load, fleet(workers)).seconds == pytest.approx(turns * PART)


def test_one_worker_takes_the_sum_of_all_parts() -> None:
    for work in (EQUAL, CLIPPED):
        load = Load(work, speed=2.0, before=10.0)
        assert seconds(load, fleet(1)) == [pytest.approx(10 + work.total / 2)]


@pytest.mark.parametrize("slow", [0.0, 0.1])
def test_a_store_that_is_too_slow_says_when_the_job_ends(slow: float) -> None:
    bound = Load(EQUAL, speed=1.0, store=10.0)
    workers = fleet(100, slow_share=slow, slowness=2.0)
    assert seconds(bound, workers) == [pytest.approx(EQUAL.total / 10, rel=1e-9)]
    assert expect(bound, workers).bound_by == "the store"
    scheduled = Load(EQUAL, speed=1.0, scheduler=10.0)
    assert seconds(scheduled, workers) == [pytest.approx(EQUAL.total / 10, rel=1e-9)]
    assert expect(scheduled, workers).bound_by == "the scheduler"


def one_by_one(work: PartWork, slow: set[int], workers: int, slowness: float) -> float:
    """When workers are done which each take the next part, one after the other."""
    free = [(0.0, -worker) for worker in range(workers)]
    heapq.heapify(free)
    ends = 0.0
    for number in range(len(work)):
        now, worker = heapq.heappop(free)
        patches = work.before(number + 1) - work.before(number)
        end = now + patches * (slowness if -worker in slow else 1.0)
        ends = max(ends, end)
        heapq.heappush(free, (end, worker))
    return ends


@pytest.mark.parametrize("slow", [0, 4])
def test_parts_taken_several_at_once_end_when_single_ones_do(
    slow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = fleet(40, slow_share=slow / 40, slowness=3.0)
    load, largest = Load(CLIPPED, speed=1.0), CLIPPED.largest
    at_once = seconds(load, workers)[0]
    monkeypatch.setattr(simulation, "AT_ONCE", 10**9)
    single = seconds(load, workers)[0]
    chosen = np.random.default_rng([0, 0]).choice(40, slow, replace=False)
    exact = one_by_one(CLIPPED, set(chosen.tolist()), 40, 3.0)
    assert abs(at_once - single) < largest
    assert abs(single - exact) < largest * 0.25
    if not slow:
        assert single == pytest.approx(exact)


def test_one_worker_that_fails_loses_what_the_formula_says() -> None:
    """One worker that is back at once: the mean of many failures, 3,000 in all."""
    load, workers = Load(EQUAL, speed=1.0), fleet(1, 10, restart=0.0)
    runs = simulate(load, workers, 15, seed=1)
    lost = sum(run.redone for run in runs) / sum(run.failures for run in runs)
    assert lost == pytest.approx(REDO.mean_lost * PART, rel=0.05)
    mean = sum(run.seconds for run in runs) / len(runs)
    assert mean == pytest.approx(expect(load, workers).seconds, rel=1e-3)


RUNS = 12
GRID = [
    (work, workers, failing, stragglers, store)
    for work in (EQUAL, CLIPPED)
    for workers in (7, 40, 100, 300)
    for failing in (
        {"mtbf": 10, "restart": 0.1 * PART},
        {"mtbf": 100, "restart": 10 * PART},
        {"mtbf": 1000, "restart": PART},
        {"mtbf": 1000, "restart": None},
    )
    for stragglers in ({}, {"slow_share": 0.1, "slowness": 3.0})
    for store in (math.inf, 0.5)
]
SOON = [GRID[number] for number in (66, 21, 104, 63)]
"""Every value of each axis, where few parts are lost."""


@pytest.mark.parametrize(
    ("work", "workers", "failing", "stragglers", "store"),
    [*SOON, *(pytest.param(*each, marks=pytest.mark.slow) for each in GRID[::19])],
)
def test_the_formula_is_within_the_simulations_interval(
    work: PartWork, workers: int, failing: Any, stragglers: Any, store: float
) -> None:
    """Or less than the time of a slow worker's part from it: how the last parts meet is beyond a
    formula. The mean of failures has a standard error of its own."""
    load = Load(work, speed=1.0, store=store * workers)
    many = fleet(workers, **failing, **stragglers)
    runs = simulate(load, many, RUNS, seed=0)
    low, high = np.quantile([run.seconds for run in runs], (0.025, 0.975))
    expected = expect(load, many)
    part = work.largest * max(many.slowness, 1 / store)
    assert low - part < expected.seconds < high + part
    failures = sum(run.failures for run in runs) / RUNS
    error = math.sqrt(expected.failures / RUNS)
    assert abs(expected.failures - failures) < 0.1 * failures + 3 * error
    redone = sum(run.redone for run in runs) / RUNS / work.total
    assert expected.redone == pytest.approx(redone, rel=0.3, abs=3e-4)


def test_workers_that_do_not_come_back_may_leave_the_job_undone() -> None:
    load = Load(EQUAL, speed=1.0)
    assert seconds(load, fleet(40, 20), 3) == [math.inf] * 3
    assert math.isinf(expect(load, fleet(40, 20)).seconds)


def test_workers_that_fail_before_anything_is_noted_get_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(simulation, "MOST_FAILURES", 5000)
    load = Load(PartWork(((10_000,), (1,), (1,)), 1, replace(REDO, regions=1)), speed=1.0)
    workers = Fleet(1, 1.0, mtbf=1.0, restart=0.0)
    assert math.isinf(expect(load, workers).seconds)
    assert seconds(load, workers) == [math.inf]


axis = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(tuple)


@st.composite
def plays(draw: st.DrawFn) -> tuple[Load, Fleet, Outcome]:
    work = PartWork((draw(axis), draw(axis), draw(axis)), draw(st.integers(1, 2)), REDO)
    speed = draw(st.floats(0.1, 10))
    load = Load(work, speed, store=draw(st.sampled_from([math.inf, 1.0, 20.0])))
    part = work.mean / speed
    failing = draw(st.booleans())
    workers = Fleet(
        draw(st.integers(1, 30)),
        1.0,
        mtbf=part * draw(st.floats(2, 50)) if failing else None,
        restart=draw(st.one_of(st.none(), st.floats(0, 5 * part))) if failing else None,
        slow_share=draw(st.sampled_from([0.0, 0.3, 1.0])),
        slowness=draw(st.floats(1.5, 8)),
    )
    (outcome,) = played(load, workers, 1, draw(st.integers(0, 99)))
    return load, workers, outcome


def played(load: Load, workers: Fleet, runs: int, seed: int) -> list[Outcome]:
    """Simulated runs, given up soon: of some loads a part seldom ends before its worker fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulation, "MOST_FAILURES", 2000)
        return simulate(load, workers, runs, seed)


@given(plays())
def test_all_work_is_done_once_and_what_was_lost_again(
    play: tuple[Load, Fleet, Outcome],
) -> None:
    load, workers, run = play
    work = load.work
    assert run.redone >= 0
    if math.isinf(run.seconds):
        assert workers.mtbf is not None
        return
    assert run.computed == pytest.approx(work.total + run.redone)
    most = min(load.most, load.speed * workers.workers)
    assert run.seconds >= (work.total + run.redone) / most * (1 - 1e-9)
    assert len(work) <= run.tasks <= len(work) + run.failures
    if workers.mtbf is None:
        assert run.redone == run.failures == 0


@COSTLY
@given(plays())
def test_a_seed_gives_the_same_run_again(play: tuple[Load, Fleet, Outcome]) -> None:
    load, workers, _ = play
    assert played(load, workers, 2, 5) == played(load, workers, 2, 5)
