"""Finds the rank that the others wait for, and the phases of a run's steps.

    rank 0   │ work of its own │▒▒▒▒▒▒▒ wait ▒▒▒▒▒▒▒│ sum │
    rank 1   │ work of its own                 │▒ w ▒│ sum │    ◀ the straggler

The sum over ranks ends on all ranks at the same time, so all ranks have the same step time. Two
numbers together show which rank is slow: it has the most work of its own and the shortest wait. If
they do not point to the same rank, none is named.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ..instruments import PHASES, Interval, mad, median_interval
from .runs import Rank, TrainingRun

WAIT = "communication"
_OWN = tuple(phase for phase in PHASES if phase != WAIT)
NOTABLE = 0.05
"""The fraction of a step by which a rank's work must exceed that of the others."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank of a run that the others wait for."""

    rank: int
    host: str | None
    excess: Interval
    """Seconds per step of its work above the median of the other ranks."""
    spread: float | None
    """The median absolute deviation of these seconds; None if only totals are known."""
    wait: float
    """Its median wait in a step, in seconds."""
    others_wait: float
    """The median wait of the other ranks, in seconds."""


def straggler(run: TrainingRun) -> Straggler | None:
    """The rank that holds the others up. None if no rank clearly does, or if steps were not
    measured."""
    ranks = [rank for rank in run.ranks if rank.local and rank.waits]
    steps = min((len(rank.local) for rank in ranks), default=0)
    if len(ranks) < 2 or len(ranks) < run.devices or not steps:
        return None
    # Some ranks of a resumed run may have more rows than others; all have the newest.
    local = np.array([rank.local[-steps:] for rank in ranks])
    waits = np.array([rank.waits[-steps:] for rank in ranks])
    slowest = int(np.median(local, axis=1).argmax())
    if slowest != int(np.median(waits, axis=1).argmin()):
        return None
    above = local[slowest] - np.median(np.delete(local, slowest, axis=0), axis=0)
    excess = median_interval(above)
    step = float(np.median(local + waits))
    if excess.value < NOTABLE * step or (steps > 1 and not (excess.low or 0) > 0):
        return None
    return Straggler(
        ranks[slowest].rank,
        ranks[slowest].host,
        excess,
        mad(above) if steps > 1 else None,
        float(np.median(waits[slowest])),
        float(np.median(np.delete(waits, slowest, axis=0))),
    )


def share(runs: Iterable[TrainingRun], *phases: str) -> float | None:
    """The fraction of all steps of all ranks that these phases took; None if none was measured."""
    measured = [
        rank.totals
        for run in runs
        for rank in run.ranks
        if any(phase in rank.totals for phase in phases)
    ]
    whole = sum(total.get(phase, 0.0) for total in measured for phase in PHASES)
    took = sum(total.get(phase, 0.0) for total in measured for phase in phases)
    return took / whole if whole > 0 else None


def phases_of(runs: Sequence[TrainingRun]) -> dict[str, float]:
    """Seconds of an epoch by phase, mean over ranks and runs; empty if none was measured."""
    epochs = [
        {name: total / run.epochs for name, total in rank.totals.items()}
        for run in runs
        for rank in run.ranks
        if run.epochs and rank.totals
    ]
    names = dict.fromkeys(name for epoch in epochs for name in epoch)
    return {name: sum(e.get(name, 0.0) for e in epochs) / len(epochs) for name in names}


def rank_of(number: int, totals: dict[str, float], rows: Sequence[dict[str, str]]) -> Rank:
    """A rank from the totals of its phases and the rows of its CSV of steps.

    Rows that were cut short or hold no number are skipped. A rank that ran alone has no waits.
    """
    steps: list[tuple[float, float]] = []
    for row in rows:
        with contextlib.suppress(ValueError):
            work = [float(row[f"{phase}_s"]) for phase in _OWN if row.get(f"{phase}_s")]
            steps += [(sum(work), float(row.get(f"{WAIT}_s") or "nan"))] if work else []
    waited = [(work_s, wait) for work_s, wait in steps if math.isfinite(wait)]
    local = tuple(work_s for work_s, _ in waited or steps)
    return Rank(number, totals, local, tuple(wait for _, wait in waited))
