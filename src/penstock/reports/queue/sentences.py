"""What the measurements of a queue say, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...base import format_seconds
from ...instruments import Interval
from . import model as queueing
from .course import LONGER, NEAR, Course, alone_words, median, middle_of, percent_words
from .model import Feed

_MISSED = 0.05
"""A step of the model that is farther than this from the measured one is called missed."""


def clears_at(iteration: int | None) -> str:
    return "never cleared" if iteration is None else f"cleared at {iteration}"


def sentences(group: Sequence[Course]) -> list[str]:
    """What the group says, each with how many stand behind it and an interval."""
    measured = [course for course in group if course.cell.measured]
    lines = [
        f"{course.cell.name}: {course.cell.status}: {course.row['error']}."
        for course in group
        if course.cell.status != "ok"
    ]
    if alone_words(group):
        return lines
    by_workers: dict[int, list[Course]] = {}
    for course in measured:
        by_workers.setdefault(course.cell.workers, []).append(course)
    for own in by_workers.values():
        lines += _of_workers(own)
    lines += _of_clearing(measured)
    return [*lines, *_of_utilisation(measured)]


def _of_workers(own: Sequence[Course]) -> list[str]:
    """What reading takes with so many workers, and what the depth of their queue does."""
    cell = own[0].cell
    who = f"{cell.workers} worker{'s' * (cell.workers != 1)}"
    lines = [*steps_words(own, who), *_of_contention(own)]
    shown = [(course, course.steady) for course in own if course.steady is not None]
    if len(shown) < 2:
        return lines
    (first, a), (last, b) = shown[0], shown[-1]
    depths = f"With {who} a queue of {last.cell.queue} in place of {first.cell.queue}"
    launches = min(len(first.settled), len(last.settled))
    if launches == 1:
        lines.append(
            f"{depths}: {spread_words(b, 'iterations')} in place of "
            f"{spread_words(a, 'iterations')} in the steady state, of one launch, which is not "
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


def steps_words(own: Sequence[Course], who: str) -> list[str]:
    """What a step took with so many workers, and then what the model has of it."""
    first = own[0]
    if first.alone is None or first.predicted is None:
        return []
    workers, feed = first.cell.workers, first.predicted.feed
    measured = [(course.cell.queue, course.steady) for course in own if course.steady is not None]
    took = f"With {who} no case reached the steady state"
    if measured:
        queues = [f" (queue {queue})" if workers else "" for queue, _ in measured]
        each = [
            f"{spread_words(steady, 'iterations')}{queue}"
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


def _model_beside(feed: Feed, alone: Interval, measured: Sequence[tuple[int, Interval]]) -> str:
    """The model's step, and how far it is from those that were measured."""
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


def _of_contention(own: Sequence[Course]) -> list[str]:
    """That a step takes longer beside so many workers, which no queue cures: its utilisation is low
    though it does not wait."""
    longer = [
        (cell, seconds)
        for cell in (course.cell for course in own)
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


def _of_clearing(measured: Sequence[Course]) -> list[str]:
    told = [course for course in measured if course.off is not None]
    if not told:
        return []
    near = [course for course in told if (course.off or 0) <= 1]
    worst = max(told, key=lambda course: course.off or 0)
    misses = [miss for course in told for miss in course.misses]
    line = (
        f"The simulation predicts the iteration that clears the queue within one in {len(near)} of "
        f"{len(told)} cases, and in {sum(miss <= 1 for miss in misses)} of {len(misses)} launches"
    )
    if len(near) < len(told):
        assert worst.predicted is not None
        line += (
            f"; the furthest is {worst.cell.name}, {clears_at(middle_of(worst.cell.cleared))} and "
            f"predicted to be {clears_at(worst.predicted.timeline.cleared)}"
        )
    formula = (
        "Formula and n0 = q R / (R - C) are the seed's, of readers that each hold a batch while "
        "the queue is full; ours hold none, and by the simulation clear it sooner."
    )
    ours = all(course.cell.fact("in_hand") == 0 for course in told)
    return [line + ".", *([formula] if ours else [])]


def _of_utilisation(measured: Sequence[Course]) -> list[str]:
    """How well the accelerator is used in the steady state, and how far that is from the model."""
    shown, lines = [course for course in measured if course.settled], []
    if unseen := [course.cell for course in measured if not course.settled]:
        lines.append(
            f"The steady state was not reached within the {unseen[0].iterations} iterations with "
            f"{'; '.join(cell.name for cell in unseen)}: more --iterations tell."
        )
    if not shown:
        return lines
    near = [
        (abs(median(course.utilisations) - course.predicted.feed.utilisation), course)
        for course in shown
        if course.predicted is not None
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
                f"; the furthest is {worst.cell.name}, {percent_words(median(worst.utilisations))} "
                f"and {percent_words(worst.predicted.feed.utilisation)} by the model"
            )
        lines.append(line + ".")
    # As it is printed: of equals the fewest workers and the shallowest queue.
    best = max(shown, key=lambda course: round(median(course.utilisations), 3))
    cell = best.cell
    most = "The accelerator is used best"
    if len(shown) < len(measured):
        most = "Of those that reached the steady state, the accelerator is used best"
    line = (
        f"{most} with {cell.name}: "
        f"{queueing.queue_verdict(median(best.utilisations))} in the steady state "
        f"[{_range(best.utilisations, percent_words)}]"
    )
    if cell.workers:
        line += (
            f"; over all but the first of {cell.iterations} iterations, which a full queue fed to "
            f"begin with, {percent_words(median(cell.utilisations))}"
        )
    if len(shown) > 1 and len(best.utilisations) == 1:
        line += "; of one launch, which is not compared"
    return [*lines, line + "."]


def spread_words(interval: Interval, what: str = "batches") -> str:
    spread = f"{interval.n} {what}"
    if interval.low is not None and interval.high is not None:
        spread = f"{format_seconds(interval.low)} - {format_seconds(interval.high)}, {spread}"
    return f"{format_seconds(interval.value)} [{spread}]"


def _range(values: Sequence[float], form: Any) -> str:
    if len(values) == 1:
        return "1 launch"
    return f"{form(min(values))} - {form(max(values))}, {len(values)} launches"
