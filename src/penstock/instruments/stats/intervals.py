"""Quantiles, and confidence intervals of medians; Student's t for those of means."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
CONFIDENCE = 0.95
_ANGLES = np.linspace(0, math.pi / 2, 4_001)
_COSINES = np.cos(_ANGLES)


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate, and the interval in which the true value may lie."""

    value: float
    low: float | None
    high: float | None
    """The upper end; None where the values are too few to bound it."""
    n: int
    """The number of values, or of launches on the smaller side."""

    def excludes(self, value: float) -> bool:
        """Whether both ends are known and ``value`` is not between them."""
        return (
            self.low is not None and self.high is not None and not (self.low <= value <= self.high)
        )


def quantile(samples: ArrayLike, q: float) -> float:
    """A quantile, interpolated.

    Args:
        samples: numbers, of any shape.
        q: 0 for the least, 0.5 for the median, 1 for the greatest.

    Returns:
        The quantile.
    """
    return float(np.quantile(np.asarray(samples, np.float64), q))


def mad(samples: ArrayLike) -> float:
    """The median absolute deviation from the median."""
    values = np.asarray(samples, np.float64)
    return float(np.median(np.abs(values - np.median(values))))


def students_t(freedom: float, confidence: float = CONFIDENCE) -> float:
    """The two-sided quantile of Student's t, without scipy.

    In the angle whose tangent is t / sqrt(freedom), its density is a power of the cosine.

    Args:
        freedom: Degrees of freedom.
        confidence: The fraction of all values between both ends.

    Returns:
        The number of standard errors to each side.

    >>> round(students_t(1), 2), round(students_t(4), 3)
    (12.71, 2.776)
    """
    density = _COSINES ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return math.sqrt(freedom) * math.tan(np.interp(confidence, below / below[-1], _ANGLES))


def quantile_interval(samples: ArrayLike, q: float, confidence: float = CONFIDENCE) -> Interval:
    """A quantile between two order statistics, whatever the distribution.

    The number of samples below the true quantile is binomial, so their number alone gives the ranks
    that enclose it with the confidence. An end is None where no rank is far enough out.

    >>> quantile_interval(range(1, 11), 0.5)
    Interval(value=5.5, low=2.0, high=9.0, n=10)
    """
    values = np.sort(np.asarray(samples, np.float64))
    low, high = ranks_of(len(values), q, confidence)
    return Interval(
        quantile(values, q),
        None if low is None else float(values[low]),
        None if high is None else float(values[high]),
        len(values),
    )


def median_interval(samples: ArrayLike, confidence: float = CONFIDENCE) -> Interval:
    """The median between two order statistics; for 95 % it takes six samples at least.

    Args:
        samples: numbers.
        confidence: the probability that the interval holds the true median.

    Returns:
        The median and its interval.
    """
    return quantile_interval(samples, 0.5, confidence)


@lru_cache(maxsize=4096)
def ranks_of(n: int, q: float, confidence: float) -> tuple[int | None, int | None]:
    """Indices of the sorted values that enclose the quantile, with half of the risk on each
    side.
    """
    k = np.arange(n + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(k[1:]))])
    log_choose = log_factorial[n] - log_factorial - log_factorial[::-1]
    below = np.cumsum(np.exp(log_choose + k * math.log(q) + (n - k) * math.log1p(-q)))
    risk = (1 - confidence) / 2
    # P(fewer than i values lie below the quantile) is P(it is left of the i-th smallest).
    low = int(np.searchsorted(below, risk, side="right")) - 1
    high = int(np.searchsorted(below, 1 - risk, side="left"))
    return (low if low >= 0 else None), (high if high < n else None)
