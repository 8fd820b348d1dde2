"""What a queue benchmark measured, beside what the model of the queue says and what the seed found.

The batches are first read with nobody computing: the seconds from one to the next, for each number
of workers. That alone, with the seconds of a step, is what `queueing` predicts from; no case is
fitted to itself. Predicted are

    seconds per iteration    the mean of all, those from the full queue too, as the seed had it
    steady state             once the queue is empty, or where it never is
    cleared                  the first iteration, from 0, that ends with an empty queue

by playing the queue event by event, with as many batches in the hands of its readers as they may
hold, and it is that which what was measured is held against. Beside it stand the seed's formulas:
n0 = q R / (R - C), and the mean that follows from it. They are of readers that each hold a batch
while the queue is full; ours hold none, and clear it as theirs would clear one that is shallower by
a batch.

Utilisation is the accelerator's by the formula of MLPerf Storage. It is judged in the steady state.
Over all iterations but the first, which stands beside it, what a full queue held at the beginning
counts, and that came for nothing. The formula asks for the seconds of a step that never waits. Each
launch times them before anybody reads, and one value stands for all launches of a table, the
median: the step is the same in all, and how it was timed must not rank them.

Readings alone that no case is predicted from, as `penstock tune loader` leaves them, are a table of
their own.

A value is the median over launches, and its spread is from the least to the most of them; the
interval (95 %) of a mean within launches is bootstrapped over launches and their iterations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ...base import format_seconds, significant
from ...instruments import Record
from ..table import Section, append_rows
from . import model
from .course import (
    LONGER,
    QUEUE_COLUMNS,
    QUEUE_NEEDS,
    Course,
    alone_words,
    cleared_at,
    courses,
    drain_words,
    median,
    middle_of,
    percent_words,
)
from .model import SEED, SEED_ITERATIONS, SEED_SOURCE, seed_row
from .sentences import sentences


def append_queue_csv(records: Iterable[Record], path: Path) -> None:
    """Add a row for each case to a CSV of queue benchmarks."""
    rows = [course.row for group in courses(records) for course in group]
    append_rows(rows, path, QUEUE_COLUMNS, QUEUE_NEEDS)


def queue_sections(records: Iterable[Record]) -> list[Section]:
    """For each group what was run, the table, what it says; then the seed's, whose table is of
    steps beside a queue."""
    groups = courses(records)
    ours = [Section(heading(g), table(g), sentences(g)) for g in groups]
    return ours if groups and all(alone_words(g) for g in groups) else [*ours, seed_section()]


def heading(group: Sequence[Course]) -> str:
    cell = group[0].cell
    case = cell.case
    where = f"{case['data']}, batches of {cell.batch}, order {case['shuffle']}"
    if alone_words(group):
        return f"{where}; read while nobody computes"
    step = f"{case['compute']}"
    step += f" {case['model']} {case['tile']}" if case["compute"] == "train" else ""
    took = next((c.cell.compute_s for c in group if c.cell.measured), None)
    asked = case["compute_time"]
    if took and asked and not 1 / LONGER <= took / asked <= LONGER:
        step += f", asked for {format_seconds(asked)}"
    seconds = format_seconds(took) if took is not None else "?"
    return f"{where}; steps of {seconds} ({step}), {cell.iterations} iterations from a full queue"


def table(group: Sequence[Course]) -> list[tuple[str, ...]]:
    """Seconds per iteration and clearing, measured, by the seed's formulas and simulated, with the
    utilisation in the steady state and over all iterations; beside the seed's."""
    if alone_words(group):
        return _reading_table(group)
    lines: list[tuple[str, ...]] = [
        ("workers", "queue", "s/it", "formula", "simulated", "steady", "cleared", "n0", "simulated",
         "AU steady", "model", "AU of all", "seed s/it", "seed cleared")
    ]  # fmt: skip
    for course in group:
        cell, predicted = course.cell, course.predicted
        seed = seed_row(cell.workers, cell.queue)
        if not cell.measured:
            lines.append((str(cell.workers), str(cell.queue), cell.status, *[""] * 11))
            continue
        lines.append(
            (
                str(cell.workers),
                str(cell.queue) if cell.workers else "",
                significant(median(cell.means)),
                significant(predicted.mean_s) if predicted else "",
                significant(predicted.timeline.mean_s) if predicted else "",
                significant(course.steady.value) if course.steady else "",
                cleared_at(middle_of(cell.cleared)) if cell.workers else "",
                drain_words(predicted.feed.drain) if predicted and cell.workers else "",
                cleared_at(predicted.timeline.cleared) if predicted and cell.workers else "",
                percent_words(median(course.utilisations)) if course.settled else "",
                percent_words(predicted.feed.utilisation) if predicted else "",
                percent_words(median(cell.utilisations)),
                f"{seed.seconds:.1f}" if seed else "",
                "" if seed is None or seed.cleared is None else str(seed.cleared),
            )
        )
    return lines


def _reading_table(group: Sequence[Course]) -> list[tuple[str, ...]]:
    """From one batch to the next, by workers."""
    lines: list[tuple[str, ...]] = [
        ("workers", "queue", "s/batch", "95 %", "samples/s", "batches", "launches", "status")
    ]
    for course in group:
        cell, interval = course.cell, course.alone
        told = ("-", "-", "-", "-")
        if interval is not None and interval.low is not None and interval.high is not None:
            told = (
                significant(interval.value),
                f"{significant(interval.low)} - {significant(interval.high)}",
                significant(cell.batch / interval.value),
                str(interval.n),
            )
        queue = str(cell.queue) if cell.workers else ""
        lines.append((str(cell.workers), queue, *told, str(cell.launches), cell.status))
    return lines


def seed_table() -> list[tuple[str, ...]]:
    """The seed's rows, each beside the closed form and the simulation of it."""
    lines: list[tuple[str, ...]] = [
        ("workers", "queue", "seed s/it", "model", "simulated", "seed cleared", "n0", "simulated")
    ]
    for row in SEED:
        feed = model.seed_feed(row)
        timeline = model.simulate(feed, SEED_ITERATIONS)
        lines.append(
            (
                str(row.workers),
                str(row.queue) if row.workers else "",
                f"{row.seconds:.1f}",
                f"{feed.mean_s(SEED_ITERATIONS):.2f}",
                f"{timeline.mean_s:.2f}",
                "" if row.cleared is None else str(row.cleared),
                drain_words(feed.drain) if row.workers else "",
                cleared_at(timeline.cleared) if row.workers else "",
            )
        )
    return lines


def seed_section() -> Section:
    title = "The seed's own table, and what the model says of it"
    return Section(title, seed_table(), [f"Source: {SEED_SOURCE}."])
