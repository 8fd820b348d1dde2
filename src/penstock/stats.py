"""Statistics of timings: medians with intervals, when to begin, when to stop, what differs.

Times are skewed, have outliers and come in modes, so nothing here assumes a distribution and
nothing is thrown away. A launch (a fresh process) is the unit of replication: its samples only
estimate its median, and two medians of one process say nothing of the next process. Hence:

    while samples come       `block_size`, `WarmupRule`, `StopRule`
    samples of one launch    `median_interval`, `drift`
    launches of one case     `hierarchical_bootstrap_ratio`, `mann_whitney`
    a matrix of cases        `permutation_test`, `benjamini_hochberg`
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate and where the truth may lie."""

    value: float
    low: float | None
    high: float | None
    """None where so few values cannot bound it with the confidence asked for."""
    n: int
    """How many values, or launches of the smaller side, stand behind it."""

    def excludes(self, value: float) -> bool:
        """Whether both ends are known and ``value`` is not between them."""
        return (
            self.low is not None and self.high is not None and not (self.low <= value <= self.high)
        )


# --- samples of one launch ----------------------------------------------------------------------


def quantile(samples: ArrayLike, q: float) -> float:
    """The ``q`` quantile (0 to 1), interpolated."""
    return float(np.quantile(np.asarray(samples, np.float64), q))


def mad(samples: ArrayLike) -> float:
    """Median absolute deviation from the median."""
    values = np.asarray(samples, np.float64)
    return float(np.median(np.abs(values - np.median(values))))


def quantile_interval(samples: ArrayLike, q: float, confidence: float = CONFIDENCE) -> Interval:
    """A quantile between two order statistics, whatever the distribution.

    The number of samples below the true quantile is binomial, so the ranks that enclose it with
    the confidence follow from their number alone. An end is None where no rank is far enough out.

    >>> quantile_interval(range(1, 11), 0.5)
    Interval(value=5.5, low=2.0, high=9.0, n=10)
    """
    values = np.sort(np.asarray(samples, np.float64))
    low, high = _ranks(len(values), q, confidence)
    return Interval(
        quantile(values, q),
        None if low is None else float(values[low]),
        None if high is None else float(values[high]),
        len(values),
    )


def median_interval(samples: ArrayLike, confidence: float = CONFIDENCE) -> Interval:
    """The median between two order statistics; for 95 % it takes six samples at least."""
    return quantile_interval(samples, 0.5, confidence)


@lru_cache(maxsize=4096)
def _ranks(n: int, q: float, confidence: float) -> tuple[int | None, int | None]:
    """Indices of the sorted values that enclose the quantile, each tail with half of the risk."""
    k = np.arange(n + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(k[1:]))])
    log_choose = log_factorial[n] - log_factorial - log_factorial[::-1]
    below = np.cumsum(np.exp(log_choose + k * math.log(q) + (n - k) * math.log1p(-q)))
    risk = (1 - confidence) / 2
    # P(fewer than i values lie below the quantile) is P(it is left of the i-th smallest).
    low = int(np.searchsorted(below, risk, side="right")) - 1
    high = int(np.searchsorted(below, 1 - risk, side="left"))
    return (low if low >= 0 else None), (high if high < n else None)


def theil_sen(y: ArrayLike, x: ArrayLike | None = None, confidence: float = CONFIDENCE) -> Interval:
    """The median of the slopes between all pairs of points, with Sen's interval (1968).

    ``x`` is 0, 1, 2, ... unless given: the slope is then per step.
    """
    ys = np.asarray(y, np.float64)
    n = len(ys)
    xs = np.arange(n, dtype=np.float64) if x is None else np.asarray(x, np.float64)
    first, second = np.triu_indices(n, 1)
    run = xs[second] - xs[first]
    slopes = np.sort(((ys[second] - ys[first])[run != 0]) / run[run != 0])
    count = len(slopes)
    if count == 0:
        return Interval(math.nan, None, None, n)
    # Kendall's score of n points varies so, less for ties; it bounds how many slopes may lie on
    # one side of the true one.
    variance = n * (n - 1) * (2 * n + 5)
    for values in (xs, ys):
        ties = np.unique(values, return_counts=True)[1]
        variance -= int((ties * (ties - 1) * (2 * ties + 5)).sum())
    reach = NormalDist().inv_cdf((1 + confidence) / 2) * math.sqrt(variance / 18)
    low, high = round((count - reach) / 2) - 1, round((count + reach) / 2)
    if low < 0 or high >= count:
        return Interval(float(np.median(slopes)), None, None, n)
    return Interval(float(np.median(slopes)), float(slopes[low]), float(slopes[high]), n)


_POINTS = 400
"""A longer series is condensed before its drift is taken: the pairs of points grow as n²."""


def drift(samples: ArrayLike, confidence: float = CONFIDENCE) -> Interval:
    """How much a series rose from its first to its last value, as a part of its median.

    0.03 is 3 % slower at the end. It is a drift only where the interval excludes 0. Of a long
    series, the medians of equal stretches are taken.
    """
    values = np.asarray(samples, np.float64)
    n = len(values)
    if n > _POINTS:
        length = -(-n // _POINTS)
        values = np.median(values[: n - n % length].reshape(-1, length), axis=1)
    slope = theil_sen(values, confidence=confidence)
    scale = (len(values) - 1) / float(np.median(values)) if n else math.nan
    low, high = (None if end is None else end * scale for end in (slope.low, slope.high))
    return Interval(slope.value * scale, low, high, n)


# --- while samples come -------------------------------------------------------------------------


def block_size(step_seconds: float, timer_overhead: float) -> int:
    """How many steps to time together, so that reading the clock costs 1/10,000 at most.

    A block is 1 ms at least.

    >>> block_size(2e-5, 5e-8), block_size(0.3, 5e-8)
    (50, 1)
    """
    least = max(1e-3, 1e4 * timer_overhead)
    return max(1, math.ceil(least / step_seconds * (1 - 1e-12))) if step_seconds > 0 else 1000


class WarmupRule:
    """When the steady state has begun: two windows in a row that look alike.

    The rule is that of pyperf: the first value is no upper outlier among the others, the mean fell
    by 10 % at most from one window to the next, quartiles moved by 5 % at most, the spread (MAD)
    by 10 % of the median. Where the steps are noisier than that, quartiles may move by the spread.

    Windows are of 20 values, of fewer where the steps are slow: both together take half of
    ``seconds`` at most, so that steps of 2 s with 5 s to warm up are settled when two in a row
    agree. At the caps (``seconds`` spent, ``count`` values) the rule gives up: not settled.
    """

    def __init__(self, seconds: float, count: int = 300) -> None:
        self._seconds, self._count = seconds, count
        self._values: list[float] = []
        self._spent, self._fastest = 0.0, math.inf
        self.settled: bool | None = None
        """None until the rule is done."""

    @property
    def done(self) -> bool:
        return self.settled is not None

    def add(self, seconds: float) -> None:
        """One more call and how long it took."""
        self._values.append(seconds)
        self._spent += seconds
        # The fastest, because the first calls may be slow a thousandfold.
        self._fastest = min(self._fastest, seconds)
        room = self._seconds / 4 / self._fastest if self._fastest > 0 else math.inf
        window = int(max(1, min(20, self._count // 2, room)))
        n = len(self._values)
        if n >= 2 * window and _alike(self._values[-2 * window : -window], self._values[-window:]):
            self.settled = True
        elif n >= self._count or (n >= 2 and self._spent >= self._seconds):
            self.settled = False


def _alike(earlier: Sequence[float], later: Sequence[float]) -> bool:
    level = float(np.median(later))
    spread = mad(later)
    others = np.quantile([*earlier[1:], *later], (0.25, 0.75))
    outlier = others[1] + max(1.5 * (others[1] - others[0]), 0.05 * level)
    fall = float(np.mean(earlier) - np.mean(later))
    moved = np.abs(np.quantile(earlier, (0.25, 0.75)) - np.quantile(later, (0.25, 0.75)))
    return bool(
        earlier[0] <= outlier
        and -0.5 * level <= fall <= 0.1 * level
        and moved.max() <= max(0.05 * level, spread)
        and abs(mad(earlier) - spread) <= 0.1 * level
    )


_NOISES = 64
"""So many values of the noise in a row are looked at to say that it is stable."""


class StopRule:
    """When a launch has been sampled enough, and why.

    ``precise``: half the 95 % interval of the median is within ``precision`` of it, with
    ``min_samples`` at least. ``noise_stable``: the noise (standard deviation over mean of all
    samples so far) no longer changes, so more samples of this process would tell the same.
    ``budget``: the samples took ``seconds``.
    """

    def __init__(self, precision: float, min_samples: int, seconds: float) -> None:
        self._precision, self._min_samples, self._seconds = precision, min_samples, seconds
        self._sorted: list[float] = []
        self._spent = self._mean = self._squares = 0.0
        self._noises: deque[float] = deque(maxlen=_NOISES)
        self._next = min_samples
        self.done: Literal["precise", "noise_stable", "budget"] | None = None

    def add(self, seconds: float) -> None:
        """One more sample and how long it took, a block of steps as a whole."""
        insort(self._sorted, seconds)
        n = len(self._sorted)
        self._spent += seconds
        change = seconds - self._mean  # Welford's running variance
        self._mean += change / n
        self._squares += change * (seconds - self._mean)
        self._noises.append(math.sqrt(self._squares / n) / self._mean if self._mean > 0 else 0.0)
        # To look after every sample would cost more than it tells, and the more often one looks,
        # the likelier chance alone ends it.
        if n >= self._next:
            self._next = math.ceil(n * 1.1)
            if self._precise(n):
                self.done = "precise"
            elif len(self._noises) == _NOISES and self._stable():
                self.done = "noise_stable"
        if self.done is None and self._spent >= self._seconds:
            self.done = "budget"

    def _precise(self, n: int) -> bool:
        low, high = _ranks(n, 0.5, CONFIDENCE)
        if low is None or high is None:
            return False
        median = (self._sorted[(n - 1) // 2] + self._sorted[n // 2]) / 2
        return (self._sorted[high] - self._sorted[low]) / 2 <= self._precision * median

    def _stable(self) -> bool:
        noises = np.array(self._noises)
        return bool(noises.std() < 0.05 * noises.mean())


# --- launches of one case -----------------------------------------------------------------------


def launch_medians(launches: Sequence[ArrayLike]) -> Floats:
    """The median of each launch's samples."""
    return np.array([np.median(np.asarray(samples, np.float64)) for samples in launches])


def hierarchical_bootstrap_ratio(
    a: Sequence[ArrayLike],
    b: Sequence[ArrayLike],
    draws: int,
    rng: np.random.Generator,
    confidence: float = CONFIDENCE,
) -> Interval:
    """The median of ``b``'s launch medians over that of ``a``'s, with a bootstrapped interval.

    Each draw takes launches with replacement and, within each of them, samples with replacement:
    what is known of a launch is as uncertain as its samples are few. One launch on a side tells
    nothing of the next one: the interval is open.
    """
    value = float(np.median(launch_medians(b)) / np.median(launch_medians(a)))
    n = min(len(a), len(b))
    if n < 2:
        return Interval(value, None, None, n)
    ratios = _resampled_medians(b, draws, rng) / _resampled_medians(a, draws, rng)
    low, high = np.quantile(ratios, ((1 - confidence) / 2, (1 + confidence) / 2))
    return Interval(value, float(low), float(high), n)


def _resampled_medians(
    launches: Sequence[ArrayLike], draws: int, rng: np.random.Generator
) -> Floats:
    """Medians of resampled launches' medians of resampled samples.

    To take n of n sorted samples with replacement and find their median is to look up the median
    of n uniform random ranks, and that rank is beta distributed: one random number for each launch
    and not n. Where n is even, the upper of the two middle ranks is the least of the n/2 that are
    above the lower one.
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
    resampled: Floats = np.median(values[indices].mean(axis=0), axis=1)
    return resampled


def mann_whitney(a: ArrayLike, b: ArrayLike) -> float:
    """Two-sided p of the Mann-Whitney test, exact for any size and with ties.

    Every way to share the ranks out between the two sides is counted by its sum of ranks.

    >>> round(mann_whitney([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]), 4)
    0.0079
    """
    left, right = np.asarray(a, np.float64), np.asarray(b, np.float64)
    values = np.concatenate([left, right])
    # Twice the mean rank of equal values is a whole number.
    _, place, ties = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (2 * np.cumsum(ties) - ties + 1)[place]
    ways = np.zeros((len(left) + 1, int(ranks.sum()) + 1))
    ways[0, 0] = 1
    for rank in ranks:  # with each rank, a choice of k others becomes one of k + 1
        ways[1:, rank:] += ways[:-1, :-rank].copy()
    chosen, observed = ways[-1], int(ranks[: len(left)].sum())
    tail = min(chosen[: observed + 1].sum(), chosen[observed:].sum())
    return float(min(1.0, 2 * tail / chosen.sum()))


# --- a matrix of cases --------------------------------------------------------------------------

_RELABELLINGS = 4000
_NEGLIGIBLE = 1e-4
"""Added to every standard error, relative: launches that are equal to the tick of the clock are not
infinitely sure."""


def permutation_test(
    pairs: Sequence[tuple[ArrayLike, ArrayLike]], rng: np.random.Generator
) -> Floats:
    """Two-sided p for each pair of launch medians, in a matrix of such pairs.

    Where nothing changed, which launches are called A is arbitrary: relabelled in every other way
    they show what chance does. Five launches against five can be relabelled in 252 ways, so that
    alone no p is less than 0.008, and after a correction for 200 cases one large change would be
    lost. So the statistic is one without a unit (Welch's t of the logarithms), and a difference
    is looked up among the relabellings of all cases with as many launches.
    """
    p = np.ones(len(pairs))
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for i, (a, b) in enumerate(pairs):
        alike[len(np.asarray(a)), len(np.asarray(b))].append(i)
    for (n, m), cases in alike.items():
        if min(n, m) < 2:
            continue
        logs = np.log([np.concatenate([np.asarray(side) for side in pairs[i]]) for i in cases])
        t = _welch(logs, relabellings(n, m, rng))
        everything = np.sort(t, axis=None)
        # What is equal but for rounding counts as equal.
        as_large = everything.size - np.searchsorted(everything, t[:, 0] * (1 - 1e-9))
        p[cases] = as_large / everything.size
    return p


def relabellings(n: int, m: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which of n + m launches are called A: first those that are, then all ways or some."""
    total = math.comb(n + m, n)
    if total <= _RELABELLINGS:
        chosen = np.array(list(combinations(range(n + m), n)))  # the first is 0 .. n-1
    else:
        chosen = rng.permuted(np.tile(np.arange(n + m), (_RELABELLINGS, 1)), axis=1)[:, :n]
        chosen[0] = np.arange(n)
    labels = np.zeros((len(chosen), n + m), bool)
    np.put_along_axis(labels, chosen, True, axis=1)
    return labels


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
    t: Floats = np.abs(means[0] - means[1]) / (np.sqrt(errors[0] + errors[1]) + _NEGLIGIBLE)
    return t


def benjamini_hochberg(p: ArrayLike) -> Floats:
    """p adjusted for their number: those at 0.05 or less hold 5 % false alarms at most.

    >>> benjamini_hochberg([0.01, 0.04, 0.03]).tolist()
    [0.03, 0.04, 0.04]
    """
    values = np.asarray(p, np.float64)
    order = np.argsort(values)[::-1]
    share = len(values) / np.arange(len(values), 0, -1)
    adjusted: NDArray[Any] = np.empty_like(values)
    adjusted[order] = np.minimum(1, np.minimum.accumulate(values[order] * share))
    return adjusted
