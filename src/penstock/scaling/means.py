"""Means of a few runs with confidence intervals, by Student's t and Welch's t.

    difference   of scores
    ratio        of times, computed from logarithms, because a slow machine multiplies times
    drawn_means  random draws of each mean, for laws that are fitted to many means

Usually there are two runs of a size. They show little of how runs vary, so their intervals are
wide; a bootstrap of so few runs would be too narrow. One run has no interval. Runs that are equal
to the last digit have none either: they were rounded, or are one run read twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..instruments import CONFIDENCE, Interval, students_t

Floats = NDArray[np.float64]

_DRAWS = 4000
_FARTHEST = 100.0
"""The largest distance of a drawn logarithm from its mean, because Student's t of two runs is
unbounded."""


def difference(
    base: Sequence[float], other: Sequence[float], confidence: float = CONFIDENCE
) -> Interval:
    """The mean of ``other`` minus the mean of ``base``, with Welch's interval."""
    value, n = float(np.mean(other) - np.mean(base)), min(len(base), len(other))
    reach = _reach(base, other, confidence)
    low, high = (None, None) if reach is None else (value - reach, value + reach)
    return Interval(value, low, high, n)


def ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """The mean of the times ``above`` over the mean of the times ``below``, with its interval."""
    value, n = float(np.mean(above) / np.mean(below)), min(len(above), len(below))
    reach = _reach(np.log(above), np.log(below), CONFIDENCE)
    factor = None if reach is None else math.exp(min(reach, _FARTHEST))
    low, high = (None, None) if factor is None else (value / factor, value * factor)
    return Interval(value, low, high, n)


def drawn_means(times: Sequence[float], rng: np.random.Generator) -> Floats:
    """Random draws of the mean of times, by Student's t. For one run every draw is its time."""
    n, middle = len(times), math.log(np.mean(times))
    if n == 1:
        return np.full(_DRAWS, math.exp(middle))
    off = rng.standard_t(n - 1, _DRAWS) * math.sqrt(_error(np.log(times)))
    return np.asarray(np.exp(middle + np.clip(off, -_FARTHEST, _FARTHEST)))


def drawn_interval(value: float, drawn: Floats, n: int) -> Interval:
    """The interval of a quantity from its draws; ``n`` is the smallest number of runs of a size."""
    if n < 2 or (drawn == drawn[0]).all():
        return Interval(value, None, None, n)
    # The nearest draws without interpolation, because a peak that never comes is infinite.
    tails = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
    low, high = np.quantile(drawn, tails, method="nearest")
    return Interval(value, float(low), float(high), n)


def why_none(interval: Interval) -> str:
    """The reason why an interval has no ends, in a few words."""
    if interval.n < 2:
        return "one run on a side: no interval"
    return "runs equal to the last digit: no interval"


def _reach(one: ArrayLike, other: ArrayLike, confidence: float) -> float | None:
    """Half of Welch's interval of the difference of two means."""
    sides = [np.asarray(side, np.float64) for side in (one, other)]
    if min(map(len, sides)) < 2:
        return None
    errors, free = [_error(side) for side in sides], [len(side) - 1 for side in sides]
    both = sum(errors)
    if not both:
        return None
    if min(free) == 1 < max(free):
        # If two runs vary more than those of the other side, Welch's 95 % interval holds the truth
        # only 90 times in 100. Cochran's weighted mean of the t of both sides holds it 95 times.
        parts = (e * students_t(f, confidence) for e, f in zip(errors, free, strict=True))
        return sum(parts) / both * math.sqrt(both)
    freedom = both**2 / sum(e**2 / f for e, f in zip(errors, free, strict=True))
    return students_t(freedom, confidence) * math.sqrt(both)


def _error(values: Floats) -> float:
    """The squared standard error of the mean; exactly 0 for equal values."""
    return float(np.var(values, ddof=1) / len(values)) if np.ptp(values) else 0.0
