"""Confidence intervals of medians, of means, and of ratios of launches; tests whether a
difference is real."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...base import group_by

Floats = NDArray[np.float64]
CONFIDENCE = 0.95
DRAWS = 2000
"""Draws of a bootstrap."""
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

    @classmethod
    def of_draws(
        cls, value: float, draws: Floats, n: int, method: Literal["linear", "nearest"] = "linear"
    ) -> Interval:
        """An estimate between the ends of random draws of it; ``method`` is that of numpy."""
        low, high = np.quantile(draws, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2), method=method)
        return cls(value, float(low), float(high), n)

    def excludes(self, value: float) -> bool:
        """Whether both ends are known and ``value`` is not between them."""
        return (
            self.low is not None and self.high is not None and not (self.low <= value <= self.high)
        )


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


def median_interval(samples: ArrayLike, confidence: float = CONFIDENCE) -> Interval:
    """The median between two order statistics, whatever the distribution; for 95 % it takes six
    samples at least.

    The number of samples below the true median is binomial, so their number alone gives the ranks
    that enclose it with the confidence. There are no ends where no rank is far enough out.

    Args:
        samples: numbers.
        confidence: the probability that the interval holds the true median.

    Returns:
        The median and its interval.

    >>> median_interval(range(1, 11))
    Interval(value=5.5, low=2.0, high=9.0, n=10)
    """
    values = np.sort(np.asarray(samples, np.float64))
    rank = outer_rank(len(values), confidence)
    low, high = (None, None) if rank is None else (float(values[rank]), float(values[-1 - rank]))
    return Interval(float(np.median(values)), low, high, len(values))


@lru_cache(maxsize=4096)
def outer_rank(n: int, confidence: float) -> int | None:
    """The index among n sorted values of the lower end of the median's interval, with half of the
    risk on each side; the upper end is as far from the last value."""
    k = np.arange(n + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(k[1:]))])
    log_choose = log_factorial[n] - log_factorial - log_factorial[::-1]
    below = np.cumsum(np.exp(log_choose - n * math.log(2)))
    # P(fewer than i values lie below the median) is P(it is left of the i-th smallest).
    rank = int(np.searchsorted(below, (1 - confidence) / 2, side="right")) - 1
    return rank if rank >= 0 else None


def launch_medians(launches: Sequence[ArrayLike]) -> Floats:
    """The median of each launch's samples."""
    arrays = [np.asarray(samples, np.float64) for samples in launches]
    if len({array.shape for array in arrays}) == 1 and arrays[0].ndim == 1:
        return np.median(np.stack(arrays), axis=1)  # the same, many times as fast
    return np.array([np.median(array) for array in arrays])


class Resampled(NamedTuple):
    """One side of a ratio."""

    median: float
    """The median of the launches' medians."""
    draws: Floats
    """That median in each bootstrap draw of launches and their samples; empty for one launch."""
    launches: int


def resampled(
    launches: Sequence[ArrayLike], rng: np.random.Generator, draws: int = DRAWS
) -> Resampled:
    """One side of a ratio, with the draws of a bootstrap.

    Args:
        launches: the samples of each launch.
        rng: the source of random numbers, another one for each side.
        draws: how often launches are drawn.

    Returns:
        The side, which may stand in several ratios.
    """
    drawn = _resampled_medians(launches, draws, rng) if len(launches) > 1 else np.empty(0)
    return Resampled(float(np.median(launch_medians(launches))), drawn, len(launches))


def resampled_ratio(a: Resampled, b: Resampled) -> Interval:
    """The median of ``b`` over that of ``a``, with the interval of `hierarchical_bootstrap_ratio`.

    Args:
        a: one side.
        b: the other side, of as many draws.

    Returns:
        The ratio, its interval, and the launches of the smaller side.
    """
    value, n = b.median / a.median, min(a.launches, b.launches)
    if n < 2:
        return Interval(value, None, None, n)
    return Interval.of_draws(value, b.draws / a.draws, n)


def hierarchical_bootstrap_ratio(
    a: Sequence[ArrayLike],
    b: Sequence[ArrayLike],
    rng: np.random.Generator,
    draws: int = DRAWS,
) -> Interval:
    """The median of ``b``'s launch medians over that of ``a``'s, with a bootstrapped interval.

    Each draw takes launches with replacement and, within each of them, samples with replacement:
    the fewer samples a launch has, the more its median varies. With one launch on a side it is
    unknown how launches vary, so the interval has no ends.

    Args:
        a: the samples of each launch on one side.
        b: the samples of each launch on the other side.
        rng: the source of random numbers.
        draws: how often launches are drawn.

    Returns:
        The ratio, its interval, and the launches of the smaller side.
    """
    of_b, of_a = resampled(b, rng, draws), resampled(a, rng, draws)
    return resampled_ratio(of_a, of_b)


def _resampled_medians(
    launches: Sequence[ArrayLike], draws: int, rng: np.random.Generator
) -> Floats:
    """Medians of resampled launches' medians of resampled samples.

    Taking n of n sorted samples with replacement and finding their median is looking up the median
    of n uniform random ranks. That rank is beta distributed: one random number for each launch and
    not n. Where n is even, the upper of the two middle ranks is the least of the n/2 above the
    lower one.
    """
    samples = [np.sort(np.asarray(launch, np.float64)) for launch in launches]
    sizes = np.array([len(launch) for launch in samples])
    starts = np.cumsum(sizes) - sizes
    values = np.concatenate(samples)

    picks = rng.integers(len(samples), size=(draws, len(samples)))
    n, start = sizes[picks], starts[picks]
    middle = (n + 1) // 2
    lower = rng.beta(middle, n + 1 - middle)
    upper = lower + (1 - lower) * (1 - rng.random(lower.shape) ** (2 / n))
    upper = np.where(n % 2, lower, upper)
    # A rank of exactly 1 is possible in floating point.
    indices = start + np.minimum((np.stack([lower, upper]) * n).astype(int), n - 1)
    return np.median(values[indices].mean(axis=0), axis=1)


_RELABELLINGS = 4000
_NEGLIGIBLE = 1e-4
"""A relative part added to every standard error, which would be 0 for launches that are equal to
the tick of the clock."""


def permutation_test(
    pairs: Sequence[tuple[ArrayLike, ArrayLike]], rng: np.random.Generator
) -> Floats:
    """Two-sided p for each pair of launch medians, in a matrix of such pairs.

    If nothing changed, it is arbitrary which launches are called A, so all other labellings show
    what chance does. Five launches against five can be relabelled in 252 ways, so that no p would
    be less than 0.008, and after a correction for 200 cases one large change would be lost. So the
    statistic has no unit (Welch's t of the logarithms), and a difference is looked up among the
    relabellings of all cases with as many launches.

    Args:
        pairs: the launch medians of the two sides of each case.
        rng: the source of random numbers, for cases of many launches.

    Returns:
        A p for each pair; 1 where a side has one launch.
    """
    p = np.ones(len(pairs))
    sizes = [tuple(len(np.asarray(side)) for side in pair) for pair in pairs]
    alike = group_by(range(len(pairs)), lambda i: sizes[i])
    for (n, m), cases in alike.items():
        if min(n, m) < 2:
            continue
        logs = np.log([np.concatenate([np.asarray(side) for side in pairs[i]]) for i in cases])
        t = _welch(logs, relabellings(n, m, rng))
        everything = np.sort(t, axis=None)
        # Values that differ by rounding alone count as equal.
        as_large = everything.size - np.searchsorted(everything, t[:, 0] * (1 - 1e-9))
        p[cases] = as_large / everything.size
    return p


def relabellings(n: int, m: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Ways to label n of n + m launches as A: the true one in the first row, then all others, or a
    sample.

    Args:
        n: the launches that are called A.
        m: the others.
        rng: the source of random numbers, where there are too many ways.

    Returns:
        A row of n + m booleans for each way.
    """
    total = math.comb(n + m, n)
    if total <= _RELABELLINGS:
        chosen = np.array(list(combinations(range(n + m), n)))  # the first is 0 .. n-1
    else:
        chosen = rng.permuted(np.tile(np.arange(n + m), (_RELABELLINGS, 1)), axis=1)[:, :n]
        chosen[0] = np.arange(n)
    labels = np.zeros((len(chosen), n + m), bool)
    np.put_along_axis(labels, chosen, True, axis=1)
    return labels


def differences_of_halves(launches: Sequence[ArrayLike], rng: np.random.Generator) -> Floats:
    """How far apart halves of the same launches are, which nothing but noise can cause.

    Args:
        launches: the samples of each launch of one side.
        rng: the source of random numbers, for many launches.

    Returns:
        The absolute logarithm of the ratio of the halves' medians, for each way to halve.
    """
    half = len(launches) // 2
    halves = relabellings(half, len(launches) - half, rng)
    logs = np.broadcast_to(np.log(launch_medians(launches)), halves.shape)
    one, other = (
        np.median(logs[side].reshape(len(halves), -1), axis=1) for side in (halves, ~halves)
    )
    return np.asarray(np.abs(one - other))


_MOST_ALIKE = 0.8
"""The largest correlation of launches beside each other that is reckoned with; a few launches do
not tell a larger one from a trend."""


def own_noise(*sides: Sequence[ArrayLike]) -> float:
    """The relative change that two measurements of the same thing show on this machine.

    95 % of the halves of a side's own launches differ by less. All halvings, and all relabellings
    of a permutation test, are equally likely only where launches do not depend on each other. On a
    machine that is slow for some minutes neighbours are alike, and all of A is measured before B.
    So the change grows with the correlation r of neighbours, by sqrt((1 + r) / (1 - r)), as the
    error of the mean of such a series does (Bayley and Hammersley 1946). A short series
    underestimates r by (1 + 3 r) / n (Kendall 1954), which is added.

    Args:
        sides: the samples of each launch of a side, in the order of time; two launches at least.

    Returns:
        The change: 0.05 for 5 %.
    """
    rng = np.random.default_rng(0)
    changes = np.concatenate([differences_of_halves(side, rng) for side in sides])
    rests = [logs - logs.mean() for logs in (np.log(launch_medians(side)) for side in sides)]
    together = sum(float(rest @ rest) for rest in rests)
    r = sum(float(rest[1:] @ rest[:-1]) for rest in rests) / together if together else 0.0
    r = min(max(0.0, r + (1 + 3 * r) / min(map(len, sides))), _MOST_ALIKE) if together else 0.0
    return float(np.expm1(np.quantile(changes, 0.95) * math.sqrt((1 + r) / (1 - r))))


def _welch(logs: Floats, labels: NDArray[np.bool_]) -> Floats:
    """|t| of every case (rows) under every labelling (columns)."""
    logs = logs - logs.mean(axis=1, keepdims=True)
    means, errors = [], []
    for side in (labels, ~labels):
        n = int(side[0].sum())
        mean = logs @ side.T / n
        variance = np.maximum((logs**2 @ side.T - n * mean**2) / (n - 1), 0)
        means.append(mean)
        errors.append(variance / n)
    return np.abs(means[0] - means[1]) / (np.sqrt(errors[0] + errors[1]) + _NEGLIGIBLE)


def benjamini_hochberg(p: ArrayLike) -> Floats:
    """p adjusted for their number: of those at 0.05 or less, 5 % are false alarms at most.

    >>> benjamini_hochberg([0.01, 0.04, 0.03]).tolist()
    [0.03, 0.04, 0.04]
    """
    values = np.asarray(p, np.float64)
    order = np.argsort(values)[::-1]
    share = len(values) / np.arange(len(values), 0, -1)
    adjusted: NDArray[Any] = np.empty_like(values)
    adjusted[order] = np.minimum(1, np.minimum.accumulate(values[order] * share))
    return adjusted
