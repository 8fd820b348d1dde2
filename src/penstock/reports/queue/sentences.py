"""Sentences on the measurements of a queue."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...base import format_seconds, group_by, plural
from ...instruments import Interval
from ..cell import middle
from ..words import bracket, of_launches
from .cell import LONGER, QueueCell, none_computes, percent_words


def sentences(group: Sequence[QueueCell]) -> list[str]:
    """Sentences on a group of cells, each with a count and an interval."""
    measured = [cell for cell in group if cell.measured]
    lines = [f"{c.name}: {c.status}: {c.error}." for c in group if c.status != "ok"]
    if none_computes(group):
        return lines
    for same in group_by(measured, lambda cell: cell.workers).values():
        lines += _of_workers(same)
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
    """Say what a step took with one number of workers, and how long reading took alone."""
    first = same[0]
    if first.alone is None:
        return []
    measured = [(cell.queue, cell.steady) for cell in same if cell.steady is not None]
    took = f"With {who} no case reached the steady state"
    if measured:
        each = [
            spread_words(steady, "iteration") + (f" (queue {queue})" if first.workers else "")
            for queue, steady in measured
        ]
        took = f"With {who} a step took {', '.join(each)} in the steady state"
    step = format_seconds(first.compute_s)
    if not first.workers:
        why = "and each step waits for it"
    elif first.alone.value <= first.compute_s:
        why = f"no more than a step alone, {step}, so the queue would stay full"
    else:
        why = f"more than a step alone, {step}"
    return [f"{took}. While nobody computed a batch came every {spread_words(first.alone)}, {why}."]


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


def _of_utilisation(measured: Sequence[QueueCell]) -> list[str]:
    """Say how well the accelerator is used in the steady state."""
    shown, lines = [cell for cell in measured if cell.settled], []
    if unseen := [cell for cell in measured if not cell.settled]:
        lines.append(
            f"The steady state was not reached within the {unseen[0].iterations} iterations with "
            f"{'; '.join(cell.name for cell in unseen)}: use more --iterations of bench queue."
        )
    if not shown:
        return lines
    # Rounded as printed: of equal cells the fewest workers and the shallowest queue win.
    best = max(shown, key=lambda cell: round(_used(cell), 3))
    most = "The accelerator is used best"
    if len(shown) < len(measured):
        most = "Of those that reached the steady state, the accelerator is used best"
    line = (
        f"{most} with {best.name}: "
        f"{percent_words(_used(best))} in the steady state "
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
