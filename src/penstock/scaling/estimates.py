"""Estimates of a study: means of a few runs with confidence intervals, and the laws fitted to them.

    difference   of scores
    ratio        of times, computed from logarithms, because a slow machine multiplies times
    drawn_means  random draws of each mean, for laws that are fitted to many means

Usually there are two runs of a size. They show little of how runs vary, so their intervals are
wide; a bootstrap of so few runs would be too narrow. One run has no interval. Runs that are equal
to the last digit have none either: they were rounded, or are one run read twice.

Laws of scaling:

    Karp-Flatt   e = (1/S - 1/p) / (1 - 1/p)                        of one point
    Amdahl       T(p) / T(1) = f + (1 - f) / p                      least squares of relative times
    USL          S(p) = p / (1 + sigma (p - 1) + kappa p (p - 1))   least squares of p / S - 1,
                                                                    sigma and kappa not below 0

``p`` is the number of devices over that of the baseline, and S the speed-up over the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    return Interval.of_draws(value, drawn, n, "nearest")


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


AMDAHL_SIZES, USL_SIZES = 3, 4
"""The smallest number of sizes (numbers of devices) for a fit, the baseline included."""


@dataclass(frozen=True, slots=True)
class Amdahl:
    """Amdahl's law, T(p) / T(1) = f + (1 - f) / p, by least squares."""

    serial: Interval

    @property
    def most(self) -> float:
        """The limit of the speed-up for infinitely many devices."""
        return 1 / self.serial.value if self.serial.value > 0 else math.inf

    def speedup(self, p: ArrayLike) -> Floats:
        """The speed-up of the fitted law at each ``p``."""
        f = self.serial.value
        return np.asarray(1 / (f + (1 - f) / np.asarray(p, np.float64)))


@dataclass(frozen=True, slots=True)
class Usl:
    """The universal scalability law: sigma is contention, kappa the cost of coherence.

    S(p) = p / (1 + sigma (p - 1) + kappa p (p - 1))
    """

    sigma: Interval
    kappa: Interval
    peak: Interval | None
    """N*, the number of devices beyond which training gets slower; None if there is none."""

    def speedup(self, p: ArrayLike) -> Floats:
        """The speed-up of the fitted law at each ``p``."""
        p = np.asarray(p, np.float64)
        more = self.sigma.value * (p - 1) + self.kappa.value * p * (p - 1)
        return np.asarray(p / (1 + more))


def karp_flatt(speedup: ArrayLike, p: float) -> Floats:
    """The serial fraction that by itself would explain a measured speed-up on ``p`` devices.

    >>> float(karp_flatt(362.45 / 95.23, 4).round(6)), float(karp_flatt(362.45 / 57.14, 8).round(6))
    (0.016986, 0.037314)
    """
    return np.asarray((1 / np.asarray(speedup, np.float64) - 1 / p) / (1 - 1 / p))


def amdahl(p: ArrayLike, speedups: ArrayLike) -> Floats:
    """The serial fraction by least squares of relative times, for each row of ``speedups``."""
    p, s = np.asarray(p, np.float64), np.asarray(speedups, np.float64)
    x, y = 1 - 1 / p, 1 / s - 1 / p
    return np.clip(y @ x / (x @ x), 0, 1)


def usl(p: ArrayLike, speedups: ArrayLike) -> Floats:
    """(sigma, kappa), both at least 0, by least squares of p / S - 1, for each row of ``speedups``.

    With two unknowns the bounded solution is the unbounded one, or the better of those with sigma
    or kappa 0.
    """
    p, s = np.asarray(p, np.float64), np.asarray(speedups, np.float64)
    a, y = np.stack([p - 1, p * (p - 1)], axis=1), p / s - 1
    free = y @ np.linalg.pinv(a).T
    alone = np.maximum(y @ a / (a * a).sum(axis=0), 0)
    edges = alone[..., None, :] * np.eye(2)  # (..., edge, parameter)
    errors = ((edges @ a.T - y[..., None, :]) ** 2).sum(axis=-1)
    edge = np.take_along_axis(edges, errors.argmin(axis=-1)[..., None, None], axis=-2)[..., 0, :]
    return np.asarray(np.where((free >= 0).all(axis=-1, keepdims=True), free, edge))


def peak(sigma: ArrayLike, kappa: ArrayLike) -> Floats:
    """The maximum of the USL in multiples of the baseline, at least 1; infinite without kappa.

    >>> float(peak(0.0, 0.004646).round(2)), float(peak(0.1, 0.0))
    (14.67, inf)
    """
    sigma, kappa = np.asarray(sigma, np.float64), np.asarray(kappa, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        turn = np.where(kappa > 0, np.sqrt(np.maximum(0, 1 - sigma) / kappa), np.inf)
    return np.maximum(1.0, turn)
