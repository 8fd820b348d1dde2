"""Steps of a series: how often one is shown where there is none, and how well one is found."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.instruments.stats.steps import LevelStep, fewest_values, shift_ratio, steps_of


def found(values: np.ndarray, rate: float = 0.05) -> list[LevelStep]:
    return steps_of(list(values), rate, np.random.default_rng(0))


def noise(kind: str, n: int, rng: np.random.Generator) -> np.ndarray:
    """Five launches of each of ``n`` commits in which nothing changed."""
    if kind == "outliers":
        return np.exp(0.02 * rng.standard_t(1.5, (n, 5)))
    sessions = rng.normal(0, 0.03 if kind == "sessions" else 0, (n, 1))
    return np.exp(sessions + rng.normal(0, 0.01, (n, 5)))


@pytest.mark.parametrize("kind", ["launches", "outliers", "sessions"])
@pytest.mark.parametrize(
    ("n", "series"),
    [(8, 50), *(pytest.param(n, 300, marks=pytest.mark.slow) for n in (8, 12, 40))],
)
def test_false_alarms_are_as_rare_as_stated(kind: str, n: int, series: int) -> None:
    rng = np.random.default_rng(n)
    for rate in (0.05, 0.2):
        alarms = sum(bool(found(noise(kind, n, rng), rate)) for _ in range(series))
        assert alarms <= rate * series + 2.5 * np.sqrt(rate * (1 - rate) * series)
    assert alarms > 0, "a test that never finds anything says nothing of its rate"


@pytest.mark.parametrize("kind", ["launches", "sessions"])
def test_a_step_is_found_where_it_is_and_as_large(kind: str) -> None:
    rng, exact, sized, placed, series = np.random.default_rng(1), 0, 0, 0, 40
    for _ in range(series):
        values = noise(kind, 24, rng)
        values[12:] *= 1.15
        steps = found(values)
        assert steps, "a step of 15 % is missed"
        step = min(steps, key=lambda each: abs(each.at - 12))
        assert step.ratio.low is not None and step.ratio.high is not None
        exact += step.at == 12
        placed += step.first <= 12 <= step.last
        sized += step.ratio.low <= 1.15 <= step.ratio.high
    assert exact >= 0.9 * series and placed >= 0.95 * series and sized >= 0.88 * series


def test_a_level_that_rises_and_falls_again_gives_two_steps() -> None:
    values = noise("launches", 30, np.random.default_rng(0))
    values[10:20] *= 1.1
    up, down = found(values)
    assert (up.at, down.at) == (10, 20) and up.ratio.value > 1 > down.ratio.value
    assert (up.first, up.last) == (10, 10) and up.p <= 0.05


def test_one_outlier_is_no_step() -> None:
    values = noise("launches", 20, np.random.default_rng(0))
    values[9] *= 5
    assert found(values) == []


def test_few_or_equal_values_show_nothing() -> None:
    assert found(np.ones((20, 3))) == [] and found(np.ones((3, 1))) == []
    rising = np.array([[1.0], [1.0], [2.0], [2.0]])
    assert found(rising) == [] and fewest_values(0.05) == 8


def test_the_size_of_a_step_is_open_where_few_values_bound_it() -> None:
    many = shift_ratio(np.log([1.0, 1.1, 0.9, 1.0, 1.05]), np.log([2.0, 2.1, 1.9, 2.2, 2.0]))
    assert many.low is not None and many.low < 2 < many.value + 0.1 and many.n == 5
    few = shift_ratio(np.log([1.0]), np.log([2.0]))
    assert (few.value, few.low, few.high) == (pytest.approx(2.0), None, None)
