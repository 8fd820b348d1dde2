"""Steps in a series: the places where its level changes, their significance and their size.

    value   x   x x                      medians of commits, in their order
              x     x   │  o o   o
                        │ o    o         a step: all after it lie higher
                 segment 1 │ segment 2

A series is cut where the mean ranks on both sides differ most, in the whole of it and in stretches
of many lengths (seeded intervals, Kovács et al. 2023): a level that rose and fell again hides in
the whole. The shortest stretch that surely shows a step is taken (narrowest over threshold,
Baranowski et al. 2019), and the parts on both sides are searched again. Ranks assume no
distribution, and one outlier moves them by little. Random orders of the same ranks show how often
chance alone gives a cut as clear, among all cuts that are tried: with ``rate`` 0.05, one series in
twenty in which nothing changed shows a step.

Ranks show well that there is a step, but less well where. So it is placed where the distances of
all values from the medians of their sides are least. Its size is the median of all ratios of a
value after it and one before (Hodges and Lehmann), with the interval that the same ranks give.

Each value is one commit. Launches of a session share the state of the machine in that hour, so they
are not independent of each other, and only the order of commits can be shuffled.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from .intervals import CONFIDENCE, Floats, Interval
from .significance import launch_medians

ORDERS = 2000
"""Random orders for a rate of 5 %; half the rate takes twice as many, to resolve it."""
_ROWS = 250
"""Random orders that are computed together: more take more memory."""
_SHORTEST = 4
"""Values of the shortest stretch that is cut."""
_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class LevelStep:
    """A change of level between two values of a series."""

    at: int
    """Index of the first value of the new level, by the best estimate."""
    first: int
    last: int
    """First and last index at which the new level may begin, with a confidence of 95 %."""
    ratio: Interval
    """The new level over the old one."""
    p: float
    """Share of random orders with a step as clear."""


def fewest_values(rate: float) -> int:
    """The fewest values that can show a step in their middle, at a rate of false alarms.

    >>> fewest_values(0.05), fewest_values(0.01)
    (8, 10)
    """
    n = 4
    while 2 / math.comb(n, n // 2) > rate:
        n += 1
    return n


def steps_of(
    values: Sequence[Sequence[float]], rate: float, rng: np.random.Generator
) -> list[LevelStep]:
    """The steps of a series, in its order.

    Args:
        values: The samples of each commit, such as the medians of its launches; all above 0.
        rate: The accepted share of false alarms: series without a step in which one is found.
        rng: The source of random numbers, for the intervals of the steps' places.

    Returns:
        The steps; none where too few values could show one.
    """
    levels = np.log(launch_medians(values))
    cuts = sorted(_cut(levels, 0, len(levels), rate))
    edges = [0, *(at for at, _ in cuts), len(levels)]
    for number in range(1, len(edges) - 1):  # each between its neighbours
        begin, end = edges[number - 1], edges[number + 1]
        edges[number] = begin + _place(levels[None, begin:end], edges[number] - begin)[0]
    steps = []
    for (_, p), begin, at, end in zip(cuts, edges, edges[1:], edges[2:], strict=False):
        before, after = levels[begin:at], levels[at:end]
        first, last = _where(before, after, rng)
        steps.append(LevelStep(at, begin + first, begin + last, shift_ratio(before, after), p))
    return steps


def shift_ratio(before: Floats, after: Floats) -> Interval:
    """The level of one group over that of another, from their logarithms (Hodges and Lehmann).

    An end is None where so few values cannot bound it with 95 %.
    """
    ratios = np.sort(np.exp(after[:, None] - before[None, :]), axis=None)
    n, m = len(before), len(after)
    reach = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * math.sqrt(n * m * (n + m + 1) / 12)
    low = math.floor(n * m / 2 - reach)
    ends = (ratios[low], ratios[-1 - low]) if low >= 0 else (None, None)
    low_end, high_end = (None if end is None else float(end) for end in ends)
    return Interval(float(np.median(ratios)), low_end, high_end, min(n, m))


def _cut(levels: Floats, begin: int, end: int, rate: float) -> list[tuple[int, float]]:
    """The cuts of a part of a series, each with its p."""
    part = levels[begin:end]
    n = len(part)
    if n < _SHORTEST or np.ptp(part) == 0:
        return []
    ranks, cuts = _ranks(part), _candidates(n)
    count = math.ceil(ORDERS * 0.05 / min(rate, 0.05))
    largest = _by_chance(tuple(sorted(ranks)), count)
    measured = _clearness(ranks[None, :], cuts)[0]
    # The order that was measured is one of those that chance may give.
    p_values = (1 + count - np.searchsorted(largest, measured * (1 - 1e-9))) / (1 + count)
    sure = np.flatnonzero(p_values <= rate)
    if not len(sure):
        return []
    length = cuts[1] - cuts[0]
    best = min(sure, key=lambda c: (length[c], -measured[c]))
    at = begin + int(cuts[2][best])
    return [
        (at, float(p_values[best])),
        *_cut(levels, begin, at, rate),
        *_cut(levels, at, end, rate),
    ]


@lru_cache(maxsize=64)
def _by_chance(ranks: tuple[float, ...], count: int) -> Floats:
    """The clearest cut of each of so many random orders of some ranks, the least first. All series
    of one length have the same ranks, but for ties."""
    cuts, rng = _candidates(len(ranks)), np.random.default_rng(0)
    orders = rng.permuted(np.tile(np.array(ranks), (count, 1)), axis=1)
    parts = np.array_split(orders, -(-count // _ROWS))
    return np.sort(np.concatenate([_clearness(part, cuts).max(axis=1) for part in parts]))


@lru_cache(maxsize=64)
def _candidates(n: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Begin, end and cut of each candidate: stretches whose lengths shrink by the root of two, each
    overlapping the next by half."""
    stretches = dict.fromkeys([(0, n)])
    length = float(n)
    while (length := length / math.sqrt(2)) > _SHORTEST - 1:
        whole = math.ceil(length)
        number = 2 * math.ceil(n / length) - 1
        for place in range(number):
            begin = (n - whole) * place // (number - 1)
            stretches[begin, begin + whole] = None
    tried = [(b, e, cut) for b, e in stretches for cut in range(b + 1, e)]
    begins, ends, cuts = np.array(tried, np.intp).T
    return begins, ends, cuts


def _clearness(
    ranks: Floats, tried: tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]
) -> Floats:
    """How far mean ranks before and after each cut differ, over their spread in random orders.

    A row for each order, a column for each cut.
    """
    begins, ends, cuts = tried
    sums = np.concatenate([np.zeros((len(ranks), 1)), ranks.cumsum(axis=1)], axis=1)
    before, whole = (cuts - begins).astype(float), (ends - begins).astype(float)
    excess = sums[:, cuts] - sums[:, begins] - before / whole * (sums[:, ends] - sums[:, begins])
    spread = ranks.var(axis=1, keepdims=True) * before * (whole - before) / whole
    return np.asarray(np.abs(excess) / np.sqrt(spread))


def _ranks(values: Floats) -> Floats:
    """Ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse], np.float64)


def _place(levels: Floats, at: int) -> NDArray[np.intp]:
    """The cut of each row at which the distances from the medians on both sides are least.

    Args:
        levels: A row for each series.
        at: The cut whose sides have these medians.

    Returns:
        The index of the first value after the cut, for each row.
    """
    before, after = (np.median(side, axis=1)[:, None] for side in (levels[:, :at], levels[:, at:]))
    gain = np.abs(levels - before) - np.abs(levels - after)
    return gain.cumsum(axis=1)[:, :-1].argmin(axis=1) + 1


def _where(before: Floats, after: Floats, rng: np.random.Generator) -> tuple[int, int]:
    """The first and last index at which the new level may begin: the interval of the step's place
    in series that are drawn from both sides."""
    sides = [side[rng.integers(len(side), size=(_DRAWS, len(side)))] for side in (before, after)]
    places = _place(np.concatenate(sides, axis=1), len(before))
    risk = (1 - CONFIDENCE) / 2
    low, high = np.quantile(places, (risk, 1 - risk), method="nearest")
    return min(int(low), len(before)), max(int(high), len(before))
