"""Sentences on the measurements of a queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...base import format_seconds, group_by, plural
from ...instruments import Interval
from ..cell import middle
from ..words import bracket, of_launches
from . import simulation as queueing
from .cell import LONGER, NEAR, QueueCell, middle_of, none_computes, percent_words
from .simulation import QueueModel

_MISSED = 0.05
"""A predicted step that is farther than this from the measured one is called a miss."""


def clears_at(iteration: int | None) -> str:
    return "never cleared" if iteration is None else f"cleared at {iteration}"


def sentences(group: Sequence[QueueCell]) -> list[str]:
    """Sentences on a group of cells, each with a count and an interval."""
    measured = [cell for cell in group if cell.measured]
    lines = [f"{c.name}: {c.status}: {c.error}." for c in group if c.status != "ok"]
    if none_computes(group):
        return lines
    for same in group_by(measured, lambda cell: cell.workers).values():
        lines += _of_workers(same)
    lines += _of_clearing(measured)
    return [*lines, *_of_utilisation(measured)]


def _of_workers(same: Sequence[QueueCell]) -> list[str]:
    """Say what a step takes with one number of workers, and what the depth of the queue changes."""
    who = plural(same[0].workers, "worker")
    lines = [*steps_words(same, who), *_of_contention(same)]
    shown = [(cell, cell.steady) for cell in same if cell.steady is not None]
    if len(shown) < 2:
        return lines
    (first, a), (last, b) = shown[0], shown[-1]
    depths = f"With {who} a queue of {last.queue} in place of {first.queue}"
    launches = min(len(first.settled), len(last.settled))
    if launches == 1:
        lines.append(
            f"{depths}: {spread_words(b, 'iteration')} in place of "
            f"{spread_words(a, 'iteration')} in the steady state, of one launch, which is not "
            "compared."
        )
        return lines
    low, high = (
        round((to or b.value) / (of or a.value) - 1, 6)
        for to, of in ((b.low, a.high), (b.high, a.low))
    )
    verb = "does not change" if low <= 0 <= high else "changes"
    lines.append(
        f"{depths} {verb} the steady state: {100 * (b.value / a.value - 1):+.1f} % "
        f"[{100 * low:+.1f} to {100 * high:+.1f} %, {launches} launches]."
    )
    return lines


def steps_words(same: Sequence[QueueCell], who: str) -> list[str]:
    """Say what a step took with one number of workers, and then what the model predicts."""
    first = same[0]
    if first.alone is None or first.predicted is None:
        return []
    workers, feed = first.workers, first.predicted.feed
    measured = [(cell.queue, cell.steady) for cell in same if cell.steady is not None]
    took = f"With {who} no case reached the steady state"
    if measured:
        queues = [f" (queue {queue})" if workers else "" for queue, _ in measured]
        each = [
            f"{spread_words(steady, 'iteration')}{queue}"
            for (_, steady), queue in zip(measured, queues, strict=True)
        ]
        took = f"With {who} a step took {', '.join(each)} in the steady state"
    step = format_seconds(feed.compute_s)
    if not workers:
        why = "and each step waits for it"
    elif feed.drain is None:
        why = f"no more than a step alone, {step}, so the queue would stay full"
    else:
        why = f"more than a step alone, {step}"
    reading = f"While nobody computed a batch came every {spread_words(first.alone)}, {why}"
    beside = _model_beside(feed, first.alone, measured)
    return [f"{took}. {reading}; from this the model has {beside}."]


def _model_beside(
    feed: QueueModel, alone: Interval, measured: Sequence[tuple[int, Interval]]
) -> str:
    """Say what a step takes by the model, and how far that is from the measured steps."""
    model = f"{format_seconds(feed.steady_s)} a step"
    if not measured:
        return f"{model}, which nothing here confirms"
    off = [(feed.steady_s / steady.value - 1, queue) for queue, steady in measured]
    worst, queue = max(off, key=lambda each: abs(each[0]))
    if abs(worst) <= _MISSED:
        return f"{model}, within {100 * _MISSED:.0f} % of what was measured"
    off_by = f"{100 * worst:+.0f} % off" + (f" with a queue of {queue}" if feed.workers else "")
    low, high = (
        feed.steady_s if end is None else replace(feed, read_s=end).steady_s
        for end in (alone.low, alone.high)
    )
    if all(low <= (s.high or s.value) and high >= (s.low or s.value) for _, s in measured):
        ends = f"[{format_seconds(low)} - {format_seconds(high)}]"
        return f"{model} {ends}, {off_by}, which may be chance"
    return f"{model}, and misses: that is {off_by}"


def _of_contention(same: Sequence[QueueCell]) -> list[str]:
    """Say that a step takes longer beside workers. Its utilisation is then low without waiting."""
    longer = [
        (cell, seconds)
        for cell in same
        if cell.workers
        and (seconds := cell.computing_s) is not None
        and seconds > LONGER * cell.compute_s
    ]
    if not longer:
        return []
    cell, seconds = max(longer, key=lambda each: each[1])
    waits = cell.share("get")
    waited = (
        "" if waits is None else f", and waits for batches in {percent_words(waits)} of its time"
    )
    line = (
        f"A step beside {cell.name} computes for {format_seconds(seconds)} in place of "
        f"{format_seconds(cell.compute_s)} alone{waited}: what utilisation lacks beyond that is "
        "lost to contention and not to reading."
    )
    return [line]


def _of_clearing(measured: Sequence[QueueCell]) -> list[str]:
    predicted = [cell for cell in measured if cell.off is not None]
    if not predicted:
        return []
    near = [cell for cell in predicted if (cell.off or 0) <= 1]
    worst = max(predicted, key=lambda cell: cell.off or 0)
    misses = [miss for cell in predicted for miss in cell.misses]
    near_launches = f"{sum(miss <= 1 for miss in misses)} of {len(misses)} launches"
    line = (
        f"The simulation predicts the iteration that clears the queue within one in {len(near)} of "
        f"{len(predicted)} cases, and in {near_launches}"
    )
    if len(near) < len(predicted):
        assert worst.predicted is not None
        line += (
            f"; the furthest is {worst.name}, {clears_at(middle_of(worst.cleared))} and "
            f"predicted to be {clears_at(worst.predicted.timeline.cleared)}"
        )
    formula = (
        "Formula and n0 = q R / (R - C) are the seed's, of readers that each hold a batch while "
        "the queue is full; ours hold none, and by the simulation clear it sooner."
    )
    ours = all(cell.fact("in_hand") == 0 for cell in predicted)
    return [line + ".", *([formula] if ours else [])]


def _of_utilisation(measured: Sequence[QueueCell]) -> list[str]:
    """Say how well the accelerator is used in the steady state, and how well that was predicted."""
    shown, lines = [cell for cell in measured if cell.settled], []
    if unseen := [cell for cell in measured if not cell.settled]:
        lines.append(
            f"The steady state was not reached within the {unseen[0].iterations} iterations with "
            f"{'; '.join(cell.name for cell in unseen)}: use more --iterations of bench queue."
        )
    if not shown:
        return lines
    near = [
        (abs(_used(cell) - cell.predicted.feed.utilisation), cell)
        for cell in shown
        if cell.predicted is not None
    ]
    if near:
        furthest, worst = max(near, key=lambda each: each[0])
        assert worst.predicted is not None
        line = (
            "Utilisation in the steady state is within 2 points of the model's in "
            f"{sum(off <= NEAR for off, _ in near)} of {len(near)} cases"
        )
        if furthest > NEAR:
            line += (
                f"; the furthest is {worst.name}, {percent_words(_used(worst))} "
                f"and {percent_words(worst.predicted.feed.utilisation)} by the model"
            )
        lines.append(line + ".")
    # Rounded as printed: of equal cells the fewest workers and the shallowest queue win.
    best = max(shown, key=lambda cell: round(_used(cell), 3))
    most = "The accelerator is used best"
    if len(shown) < len(measured):
        most = "Of those that reached the steady state, the accelerator is used best"
    line = (
        f"{most} with {best.name}: "
        f"{queueing.queue_verdict(_used(best))} in the steady state "
        f"[{of_launches(best.steady_utilisations, percent_words)}]"
    )
    if best.workers:
        line += (
            f"; over all but the first of {best.iterations} iterations, which a full queue fed to "
            f"begin with, {percent_words(middle(best.utilisations))}"
        )
    if len(shown) > 1 and len(best.steady_utilisations) == 1:
        line += "; of one launch, which is not compared"
    return [*lines, line + "."]


def _used(cell: QueueCell) -> float:
    """The utilisation of the accelerator in the steady state, which the cell reached."""
    return float(np.median(cell.steady_utilisations))


def spread_words(interval: Interval, what: str = "batch") -> str:
    return f"{format_seconds(interval.value)} {bracket(interval, plural(interval.n, what))}"
