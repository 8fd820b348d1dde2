"""Intervals of a few runs hold the truth as often as they say: 95 times of 100."""

from collections.abc import Callable

import numpy as np
import pytest

from penstock.instruments.stats.intervals import Interval, students_t
from penstock.scaling.estimates import difference, drawn_interval, drawn_means, ratio, why_none

from ..parameters import mainly


@pytest.mark.parametrize("freedom", [1.0, 1.3, 2.0, 3.7, 8.0, 60.0, 4000.0])
def test_students_t_is_scipys(freedom: float) -> None:
    special = pytest.importorskip("scipy.special")
    for confidence in (0.9, 0.95, 0.995):
        expected = special.stdtrit(freedom, (1 + confidence) / 2)
        assert students_t(freedom, confidence) == pytest.approx(expected, rel=3e-3)


def share_held(make: Callable[[np.random.Generator], Interval], truth: float, times: int) -> float:
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(times):
        interval = make(rng)
        held += interval.low <= truth <= interval.high
    return held / times


@pytest.mark.parametrize("n, spread", mainly([(2, 1.0), (3, 1.0), (5, 3.0)], 1))
def test_ratios_and_differences_hold_the_truth(n: int, spread: float) -> None:
    def of_times(rng: np.random.Generator) -> Interval:
        base = 100 * rng.lognormal(0, 0.05, n)
        return ratio(base.tolist(), (30 * rng.lognormal(0, 0.05 * spread, n)).tolist())

    def of_scores(rng: np.random.Generator) -> Interval:
        other = rng.normal(0.93, 0.01 * spread, n)
        return difference(rng.normal(0.95, 0.01, n).tolist(), other.tolist())

    assert share_held(of_times, 100 / 30, 300) >= 0.93
    assert share_held(of_scores, -0.02, 300) >= 0.93


def test_one_run_and_equal_runs_have_no_interval_and_say_why() -> None:
    alone, equal = difference([1.0], [2.0, 2.1]), ratio([7.4, 7.4], [3.7, 3.7])
    assert (alone.low, equal.high) == (None, None)
    assert why_none(alone) == "one run on a side: no interval"
    assert why_none(equal) == "runs equal to the last digit: no interval"
    assert equal.value == 2.0
    # A side without spread leaves that of the other.
    assert ratio([0.1, 0.1, 0.1], [3.7, 3.8, 3.9]).low is not None


def test_drawn_means_are_students() -> None:
    rng = np.random.default_rng(1)
    times = [10.0, 10.4, 10.1, 9.9]
    logs = np.log(times)
    drawn = (np.log(drawn_means(times, rng)) - np.log(np.mean(times))) / (logs.std(ddof=1) / 2)
    special = pytest.importorskip("scipy.special")
    for q in (0.025, 0.5, 0.975):
        assert np.quantile(drawn, q) == pytest.approx(special.stdtrit(3, q), abs=0.25)
    assert (drawn_means([3.0], rng) == drawn_means([3.0, 3.0], rng)).all()
    assert drawn_interval(1.0, drawn_means([3.0, 3.0], rng), 2).low is None
