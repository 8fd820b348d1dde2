"""When warm-up is over and when enough samples were taken."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from typing import Literal

import numpy as np

from .intervals import CONFIDENCE, mad, outer_rank

NOISES = 64
"""The number of values of the noise in a row that must agree for it to be stable."""


def block_size(step_seconds: float, timer_overhead: float) -> int:
    """The number of steps to time together, so that reading the clock costs 1/10,000 at most.

    Args:
        step_seconds: the time of a step.
        timer_overhead: the time of reading the clock.

    Returns:
        The steps of a block, which takes 1 ms at least.

    >>> block_size(2e-5, 5e-8), block_size(0.3, 5e-8)
    (50, 1)
    """
    least = max(1e-3, 1e4 * timer_overhead)
    return max(1, math.ceil(least / step_seconds * (1 - 1e-12))) if step_seconds > 0 else 1000


class WarmupRule:
    """When the steady state has begun: two windows in a row that look alike.

    The rule is that of pyperf: the first value is no upper outlier among the others, the mean fell
    by 10 % at most from one window to the next, quartiles moved by 5 % at most, the spread (MAD) by
    10 % of the median. Where the steps are noisier than that, quartiles may move by the spread.

    Windows have 20 values, and fewer where the steps are slow: both together take half of
    ``seconds`` at most, so that steps of 2 s with 5 s to warm up are settled when two in a row
    agree. At the caps the rule gives up: not settled.

    Args:
        seconds: the most seconds of warm-up.
        count: the most steps of warm-up.
    """

    def __init__(self, seconds: float, count: int = 300) -> None:
        self._seconds, self._count = seconds, count
        self._values: list[float] = []
        self._spent, self._fastest = 0.0, math.inf
        self.settled: bool | None = None
        """True, False, or None until the rule is done."""

    @property
    def done(self) -> bool:
        """Whether warm-up has ended, settled or not."""
        return self.settled is not None

    def add(self, seconds: float) -> None:
        """Take one more step and its seconds."""
        self._values.append(seconds)
        self._spent += seconds
        # The fastest, because the first calls may be slow a thousandfold.
        self._fastest = min(self._fastest, seconds)
        room = self._seconds / 4 / self._fastest if self._fastest > 0 else math.inf
        window = int(max(1, min(20, self._count // 2, room)))
        n = len(self._values)
        if n >= 2 * window and _same_spread(
            self._values[-2 * window : -window], self._values[-window:]
        ):
            self.settled = True
        elif n >= self._count or (n >= 2 and self._spent >= self._seconds):
            self.settled = False


def _same_spread(earlier: Sequence[float], later: Sequence[float]) -> bool:
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


class StopRule:
    """When a launch has been sampled enough, and why.

    ``precise``: half the 95 % interval of the median is within ``precision`` of it, after
    ``min_samples`` at least. ``noise_stable``: the noise (standard deviation over mean of all
    samples so far) no longer changes, so more samples of this process would say the same.
    ``budget``: the samples took ``seconds``.

    Args:
        precision: the half width that is good enough, as a share of the median.
        min_samples: the fewest samples.
        seconds: the most seconds of samples.
    """

    def __init__(self, precision: float, min_samples: int, seconds: float) -> None:
        self._precision, self._seconds = precision, seconds
        self._sorted: list[float] = []
        self._spent = self._mean = self._squares = 0.0
        self._noises: deque[float] = deque(maxlen=NOISES)
        self._next = min_samples
        self.done: Literal["precise", "noise_stable", "budget"] | None = None
        """The reason to stop, or None while more samples are wanted."""

    def add(self, seconds: float) -> None:
        """Take one more sample and its seconds, a block of steps as a whole."""
        insort(self._sorted, seconds)
        n = len(self._sorted)
        self._spent += seconds
        change = seconds - self._mean  # Welford's running variance
        self._mean += change / n
        self._squares += change * (seconds - self._mean)
        self._noises.append(math.sqrt(self._squares / n) / self._mean if self._mean > 0 else 0.0)
        # Checking after every sample would cost time, and the more often one checks, the likelier
        # chance alone ends it.
        if n >= self._next:
            self._next = math.ceil(n * 1.1)
            if self._precise(n):
                self.done = "precise"
            elif len(self._noises) == NOISES and np.std(self._noises) < 0.05 * np.mean(
                self._noises
            ):
                self.done = "noise_stable"
        if self.done is None and self._spent >= self._seconds:
            self.done = "budget"

    def _precise(self, n: int) -> bool:
        rank = outer_rank(n, CONFIDENCE)
        if rank is None:
            return False
        median = (self._sorted[(n - 1) // 2] + self._sorted[n // 2]) / 2
        return (self._sorted[-1 - rank] - self._sorted[rank]) / 2 <= self._precision * median
