"""Statistics against scipy, their promises by simulation, the rules by scripted sequences."""

from collections.abc import Iterable, Sequence
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.instruments import Interval, StopRule, WarmupRule
from penstock.instruments.stats import intervals, stopping

from ..later import imported_later

special = imported_later("scipy.special")


@given(n=st.integers(1, 300), confidence=st.sampled_from([0.8, 0.95, 0.99]))
def test_ranks_are_the_tightest_that_the_binomial_allows(n: int, confidence: float) -> None:
    interval = intervals.median_interval(np.arange(n, 0, -1), confidence)
    assert (interval.value, interval.n) == ((n + 1) / 2, n)
    risk = (1 - confidence) / 2

    def below(rank: float) -> float:
        return float(special.bdtr(rank, n, 0.5))

    if interval.low is None or interval.high is None:
        assert below(0) > risk * (1 - 1e-9) and interval.low is interval.high
        return
    assert below(interval.low - 1) <= risk * (1 + 1e-9)
    assert below(interval.low) > risk * (1 - 1e-9)
    assert interval.high == n + 1 - interval.low, "it is symmetric"


def test_mad() -> None:
    assert intervals.mad([4.0, 1.0, 2.0, 10.0, 3.0]) == 1


def taken(rule: WarmupRule | StopRule, values: Iterable[float]) -> int:
    """How many values a rule took until it was done."""
    n = 0
    for value in values:
        rule.add(value)
        n += 1
        if rule.done:
            break
    return n


def settle(values: Iterable[float], seconds: float, count: int = 300) -> tuple[int, bool | None]:
    """After how many values the rule was done, and what it said."""
    rule = WarmupRule(seconds, count)
    return taken(rule, values), rule.settled


DECAY = [1.0, 0.2, 0.05, 0.02, *(0.01 * (1 + 2.0**-i) for i in range(400))]


@pytest.mark.parametrize(
    ("values", "seconds", "expected"),
    [
        ([0.01] * 100, 5.0, (40, True)),  # constant: two windows
        (DECAY, 5.0, (49, True)),  # slow first calls are left behind
        ([0.01, 0.012] * 100, 5.0, (40, True)),  # two modes, each as often in both windows
        ([0.02] * 30 + [0.01] * 400, 50.0, (70, True)),  # a step down: both are wholly beyond it
        ([0.01] * 3 + [0.05] * 3 + [0.01] * 400, 50.0, (46, True)),  # a hiccup: the mean tells
        ([0.01] * 20 + [0.007, 0.013] * 200, 50.0, (51, True)),  # it grows restless: the spread
        ([0.01] * 30 + [0.02] * 400, 50.0, (66, True)),  # a step up: but for a few values
        ([0.01 * 1.01**i for i in range(400)], 500.0, (300, False)),  # ever slower: count
        ([0.1 * 0.97**i for i in range(400)], 3.0, (76, False)),  # ever faster: time
        ([2.0] * 10, 5.0, (2, True)),  # slow steps: two that agree
        ([2.0, 2.2, 2.0, 2.0], 5.0, (3, False)),  # slow steps that do not, within their time
        ([30.0, 30.0], 5.0, (2, True)),  # one alone says nothing
        ([30.0, 20.0], 5.0, (2, False)),
        ([0.3] * 40, 5.0, (8, True)),  # windows of four: 2.4 s of the 5 s
        ([9.0] + [0.3] * 40, 5.0, (2, False)),  # the time is gone
        ([0.3] + [0.0] * 50, 1.0, (41, True)),  # below the tick of the clock
    ],
)
def test_warm_up(values: Sequence[float], seconds: float, expected: tuple[int, bool]) -> None:
    assert settle(values, seconds) == expected


def test_few_values_allowed_make_windows_small() -> None:
    assert settle([0.01] * 20, 5.0, count=10) == (10, True)
    assert settle([0.01] * 20, 5.0, count=1) == (1, False)


def test_an_unfinished_warm_up_has_no_verdict() -> None:
    assert settle([0.01] * 20, 5.0) == (20, None)


@given(step=st.floats(1e-5, 10), seconds=st.floats(0.1, 10))
def test_warm_up_of_steady_steps_takes_half_its_time_at_most(step: float, seconds: float) -> None:
    n, settled = settle([step] * 300, seconds)
    assert settled
    assert n == 2 or n * step <= seconds / 2 * (1 + 1e-9)


def stop(
    values: Iterable[float], precision: float = 0.01, least: int = 10, seconds: float = 1e9
) -> tuple[int, str | None]:
    rule = StopRule(precision, least, seconds)
    return taken(rule, values), rule.done


@pytest.mark.parametrize(
    ("values", "seconds", "expected"),
    [
        ([0.5] * 100, 50.0, (10, "precise")),  # constant: the least number
        ([0.5] * 100, 2.0, (4, "budget")),
        ([0.5] * 100, 5.0, (10, "precise")),  # both at once: the better reason
        ([1.0, 1.2] * 500, 1e9, (70, "noise_stable")),  # two modes: the median lies in a gap
        ([1.0 * 1.05**i for i in range(400)], 1e4, (128, "budget")),  # drifting: noise rises too
        ([1.0] * 200, 0.5, (1, "budget")),  # one sample, longer than the budget
    ],
)
def test_stopping(values: Sequence[float], seconds: float, expected: tuple[int, str]) -> None:
    assert stop(values, seconds=seconds) == expected


def test_a_launch_that_stops_as_precise_is_so() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = rng.lognormal(0, 0.03, 5000)
        n, why = stop(values, precision=0.01)
        interval = intervals.median_interval(values[:n])
        precise = (interval.high - interval.low) / 2 <= 0.01 * interval.value
        assert precise == (why == "precise")


@pytest.mark.parametrize(
    ("step", "overhead", "steps"),
    [
        (1e-6, 1e-8, 1000),  # 1 ms
        (1e-6, 1e-6, 10_000),  # 1e4 times the overhead
        (0.5, 1e-6, 1),
        (3e-4, 1e-8, 4),
        (0.0, 1e-8, 1000),  # below the tick of the clock
    ],
)
def test_block_size(step: float, overhead: float, steps: int) -> None:
    assert stopping.block_size(step, overhead) == steps


def launches(
    rng: np.random.Generator, n: int, samples: int = 50, level: float = 1.0, noise: float = 0.01
) -> list[NDArray[np.float64]]:
    """As many launches, with this noise within them and again between them."""
    middles = level * rng.lognormal(0, noise, (n, 1))
    return list(middles * rng.lognormal(0, noise, (n, samples)))


@pytest.mark.parametrize("samples", [1, 2, 7])
def test_resampled_medians_are_those_of_resampled_values(samples: int) -> None:
    """The short cut by ranks against resampling as one would write it down."""
    rng = np.random.default_rng(1)
    a = [rng.lognormal(0, 0.3, samples) for _ in range(3)]
    fast = intervals._resampled_medians(a, 20_000, rng)
    chosen = np.array(a)[rng.integers(3, size=(20_000, 3))]
    values = np.take_along_axis(chosen, rng.integers(samples, size=chosen.shape), axis=2)
    slow = np.median(np.median(values, axis=2), axis=1)
    places = np.sort(np.concatenate([fast, slow]))
    shares = [np.searchsorted(np.sort(each), places, "right") / 20_000 for each in (fast, slow)]
    assert abs(shares[0] - shares[1]).max() < 1.95 / 100  # Kolmogorov and Smirnov, 1 in 1,000


@pytest.mark.parametrize(("n", "times"), [(5, 60), pytest.param(10, 400, marks=pytest.mark.slow)])
def test_the_interval_of_a_ratio_covers_it(n: int, times: int) -> None:
    rng = np.random.default_rng(4)
    hits = 0
    for _ in range(times):
        ratio = intervals.hierarchical_bootstrap_ratio(
            launches(rng, n), launches(rng, n, level=1.5), rng, 500
        )
        hits += not ratio.excludes(1.5)
    assert hits >= 0.93 * times


def test_a_ratio_of_unequal_launches() -> None:
    rng = np.random.default_rng(0)
    a = [*launches(rng, 3, 20), *launches(rng, 2, 33)]
    b = launches(rng, 4, 5, level=2.0)
    ratio = intervals.hierarchical_bootstrap_ratio(a, b, rng, 1000)
    medians = [np.median([np.median(launch) for launch in side]) for side in (a, b)]
    assert ratio.value == pytest.approx(medians[1] / medians[0])
    assert 1.9 < ratio.low < ratio.value < ratio.high < 2.1
    assert ratio.n == 4


def test_one_launch_has_no_interval() -> None:
    rng = np.random.default_rng(0)
    ratio = intervals.hierarchical_bootstrap_ratio([[1.0, 1.0]], [[2.0], [2.0]], rng, 100)
    assert ratio == Interval(2.0, None, None, 1)


@given(st.lists(st.floats(0, 1), min_size=0, max_size=20))
def test_benjamini_hochberg_is_the_least_of_those_above(p: list[float]) -> None:
    scaled = sorted((one, one * len(p) / rank) for rank, one in enumerate(sorted(p), 1))
    oracle = [min(1.0, *(more for other, more in scaled if other >= one)) for one in p]
    assert intervals.benjamini_hochberg(p) == pytest.approx(np.asarray(oracle))


def test_one_pair_is_the_permutation_test() -> None:
    rng = np.random.default_rng(0)
    for n, m in ((5, 5), (4, 6), (2, 3)):
        a, b = rng.lognormal(0, 0.1, n), rng.lognormal(0.1, 0.1, m)

        def welch(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
            spread = np.sqrt(x.var(ddof=1) / len(x) + y.var(ddof=1) / len(y))
            return float(abs(x.mean() - y.mean()) / (spread + intervals._NEGLIGIBLE))

        whole, drawn = np.log([*a, *b]), welch(np.log(a), np.log(b))
        halves = [np.isin(range(n + m), chosen) for chosen in combinations(range(n + m), n)]
        other = [welch(whole[half], whole[~half]) for half in halves]
        share = np.mean([each >= drawn * (1 - 1e-9) for each in other])
        assert intervals.permutation_test([(a, b)], rng)[0] == pytest.approx(share)


@pytest.mark.parametrize(("cases", "n"), [(1, 5), pytest.param(20, 5, marks=pytest.mark.slow)])
def test_a_matrix_without_change_seldom_alarms(cases: int, n: int) -> None:
    rng = np.random.default_rng(3)
    alarms = 0
    for _ in range(150):
        pairs = [tuple(rng.lognormal(0, 0.01, (2, n))) for _ in range(cases)]
        alarms += intervals.benjamini_hochberg(intervals.permutation_test(pairs, rng)).min() <= 0.05
    assert alarms <= 0.09 * 150  # 5 %, two standard errors more


def test_one_change_in_a_large_matrix_is_found() -> None:
    rng = np.random.default_rng(0)
    pairs = [tuple(rng.lognormal(0, 0.01, (2, 5))) for _ in range(200)]
    pairs[17] = (pairs[17][0], pairs[17][1] * 1.3)
    adjusted = intervals.benjamini_hochberg(intervals.permutation_test(pairs, rng))
    assert np.flatnonzero(adjusted <= 0.05).tolist() == [17]


def test_equal_launches_are_no_difference_and_single_ones_are_not_tested() -> None:
    rng = np.random.default_rng(0)
    same, more = np.ones(5), np.full(5, 2.0)
    p = intervals.permutation_test([(same, same), (same, more), ([1.0], [9.0, 9.0])], rng)
    assert p[0] == 1
    assert p[1] < 0.008
    assert p[2] == 1
    assert intervals.permutation_test([], rng).tolist() == []
