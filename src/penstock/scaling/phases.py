"""The phases of the steps of runs: their shares, their seconds, and what single steps took."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence

from ..instruments import PHASES
from .runs import TrainingRun

WAIT = "communication"
"""The phase of waiting for the sum over ranks."""


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


def own_work(rows: Iterable[Mapping[str, str]]) -> tuple[float, ...]:
    """A rank's own work in each step, from the rows of its CSV of steps: all but the wait for the
    sum over ranks. Rows that were cut short or hold no number are skipped."""
    steps = []
    for row in rows:
        with contextlib.suppress(ValueError):
            work = [float(row[f"{phase}_s"]) for phase in PHASES
                    if phase != WAIT and row.get(f"{phase}_s")]  # fmt: skip
            steps += [sum(work)] if work else []
    return tuple(steps)
