"""Means of a few runs, and how far from the truth they may be: Student's t, Welch's of two sides.

    difference   of scores, as they are
    ratio        of times, on their logarithms: what slows a run down multiplies
    drawn_means  for what is fitted to many means: each as it may be, by its own t

Two runs of a size are usual and tell little of how runs vary, so their intervals are wide; a
bootstrap of so few is too narrow. Of one run there is none, nor where runs are equal to the last
digit: then they were rounded, or are one run told twice, and do not tell how runs vary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..instruments import CONFIDENCE, Interval

Floats = NDArray[np.float64]

_DRAWS = 4000
_ANGLES = np.linspace(0, math.pi / 2, 4_001)
_COSINES = np.cos(_ANGLES)
_FARTHEST = 100.0
"""Of a drawn logarithm from its mean; two runs have draws without bounds."""


def students_t(freedom: float, confidence: float = CONFIDENCE) -> float:
    """So many standard errors to each side hold that share of Student's t.

    In the angle whose tangent is t / sqrt(freedom) its density is a power of the cosine.

    >>> round(students_t(1), 2), round(students_t(4), 3)
    (12.71, 2.776)
    """
    density = _COSINES ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(np.interp(confidence, below / below[-1], _ANGLES))


def difference(
    base: Sequence[float], other: Sequence[float], confidence: float = CONFIDENCE
) -> Interval:
    """By how much the mean of ``other`` is above that of ``base``."""
    value, n = float(np.mean(other) - np.mean(base)), min(len(base), len(other))
    reach = _reach(base, other, confidence)
    low, high = (None, None) if reach is None else (value - reach, value + reach)
    return Interval(value, low, high, n)


def ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """The mean of one over that of the other, of times."""
    value, n = float(np.mean(above) / np.mean(below)), min(len(above), len(below))
    reach = _reach(np.log(above), np.log(below), CONFIDENCE)
    factor = None if reach is None else math.exp(min(reach, _FARTHEST))
    low, high = (None, None) if factor is None else (value / factor, value * factor)
    return Interval(value, low, high, n)


def drawn_means(times: Sequence[float], rng: np.random.Generator) -> Floats:
    """The mean of times as it may be. Of one run it is known no better than that run."""
    n, middle = len(times), math.log(np.mean(times))
    if n == 1:
        return np.full(_DRAWS, math.exp(middle))
    off = rng.standard_t(n - 1, _DRAWS) * math.sqrt(_error(np.log(times)))
    return np.asarray(np.exp(middle + np.clip(off, -_FARTHEST, _FARTHEST)))


def drawn_interval(value: float, drawn: Floats, n: int) -> Interval:
    """What was made of drawn means, where ``n`` runs of a size at least stand behind it."""
    if n < 2 or (drawn == drawn[0]).all():
        return Interval(value, None, None, n)
    # The nearest draws and not what lies between two, for a peak may be nowhere: infinite.
    tails = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
    low, high = np.quantile(drawn, tails, method="nearest")
    return Interval(value, float(low), float(high), n)


def why_none(interval: Interval) -> str:
    """Why an interval has no ends."""
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
        # Two runs that vary more than the others do are taken for better known than they are:
        # Welch's holds 90 % then. Cochran's mean of the t of each side holds 95.
        parts = (e * students_t(f, confidence) for e, f in zip(errors, free, strict=True))
        return sum(parts) / both * math.sqrt(both)
    freedom = both**2 / sum(e**2 / f for e, f in zip(errors, free, strict=True))
    return students_t(freedom, confidence) * math.sqrt(both)


def _error(values: Floats) -> float:
    """The squared standard error of the mean; 0 of equal values, whatever their mean rounds to."""
    return float(np.var(values, ddof=1) / len(values)) if np.ptp(values) else 0.0
