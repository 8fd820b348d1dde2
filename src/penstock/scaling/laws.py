"""Laws of scaling, fitted to measured speed-ups: serial fraction, contention, coherence.

    Karp-Flatt   e = (1/S - 1/p) / (1 - 1/p)                        of one point
    Amdahl       T(p) / T(1) = f + (1 - f) / p                      least squares of relative times
    USL          S(p) = p / (1 + sigma (p - 1) + kappa p (p - 1))   least squares of p / S - 1,
                                                                    sigma and kappa not below 0

``p`` is the number of devices over that of the baseline, and S the speed-up over the baseline.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ..instruments import Interval
from .means import Floats

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
