"""The report of a queue benchmark, beside a simulation.

Batches are first read while nothing computes, which gives the seconds from one batch to the next
for each number of workers. The simulation plays every case event by event from these seconds and
from the seconds of a step, with as many batches in the hands of its readers as they may hold. No
case is fitted to itself. Beside what was measured stand

    seconds per iteration    the mean of all, also of those from the full queue, as the seed had it
    cleared                  the first iteration, from 0, that ends with an empty queue

The steady state comes after the queue is empty, or if it never is.

Utilisation is the accelerator's, by the formula of MLPerf Storage, in the steady state. A second
column has it over all iterations but the first, which includes the batches that a full queue held
at the start.

Readings that no case is simulated from, such as those of `penstock tune loader`, have a table of
their own.

A value is the median over launches, and its spread is from the least to the most of them. The
interval (95 %) of a mean within launches is bootstrapped over launches and their iterations.

A figure has the batches in the queue at the end of each iteration, measured and simulated, a panel
for each number of workers, and the seconds of an iteration; of readings alone the seconds from one
batch to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...base import format_seconds, group_by, plural, significant
from ...instruments import Interval, Record
from ..cell import column_of, machine_namer, middle
from ..charts.chart import Axis, Figure, Panel, Series
from ..table import Section, bracket, of_launches, or_dash, spread
from .cell import QueueCell, middle_of, queue_cells


def queue_sections(records: Iterable[Record]) -> list[Section]:
    """A section for each group of cells: a table and sentences."""
    groups = queue_cells(records)
    machine = machine_namer(cell for group in groups for cell in group)
    return [Section(heading(g) + machine(g[0]), table(g), sentences(g)) for g in groups]


def heading(group: Sequence[QueueCell]) -> str:
    case = group[0].case
    where = f"{case['data']}, batches of {group[0].batch}, order {case['shuffle']}"
    if group[0].reads_only:
        return f"{where}; read while nobody computes"
    step = f"steps of {format_seconds(group[0].compute_s)}"
    iterations = f"{plural(group[0].iterations, 'iteration')} from a full queue"
    return f"{where}; {step}, {iterations}"


def table(group: Sequence[QueueCell]) -> list[tuple[str, ...]]:
    """A line for each cell: seconds per iteration, clearing and utilisation, measured and
    simulated."""
    if group[0].reads_only:
        head = "workers", "queue", "s/batch", "95 %", "samples/s", "batches", "launches", "status"
        return [head, *map(_reading_line, group)]
    heads = "workers queue s/it simulated steady cleared simulated".split()
    return [(*heads, "AU steady", "AU of all"), *map(_line, group)]


def _line(cell: QueueCell) -> tuple[str, ...]:
    if not cell.measured:
        return (str(cell.workers), str(cell.queue), cell.status, *[""] * 6)
    simulated = cell.simulated
    return (
        str(cell.workers),
        str(cell.queue) if cell.workers else "",
        or_dash(middle(cell.means)),
        significant(simulated.mean_s) if simulated else "",
        significant(cell.steady.value) if cell.steady else "",
        cleared_at(middle_of(cell.cleared)) if cell.workers else "",
        cleared_at(simulated.cleared) if simulated and cell.workers else "",
        percent_words(middle(cell.steady_utilisations)),
        percent_words(middle(cell.utilisations)),
    )


def _reading_line(cell: QueueCell) -> tuple[str, ...]:
    """Seconds from one batch to the next, by workers."""
    interval = cell.alone
    read = ("-", "-", "-", "-")
    if interval is not None and interval.low is not None and interval.high is not None:
        rate = significant(cell.batch / interval.value)
        read = (significant(interval.value), spread(interval), rate, str(interval.n))
    queue = str(cell.queue) if cell.workers else ""
    return (str(cell.workers), queue, *read, str(cell.launches), cell.status)


def sentences(group: Sequence[QueueCell]) -> list[str]:
    """Sentences on a group of cells, each with a count and an interval. The verdict is the last."""
    measured = [cell for cell in group if cell.measured]
    lines = [f"{c.name}: {c.status}: {c.error}." for c in group if c.status != "ok"]
    if not group[0].reads_only:
        for same in group_by(measured, lambda cell: cell.workers).values():
            lines += _of_workers(same)
        unsettled = "; ".join(cell.name for cell in measured if not cell.settled)
        if unsettled and any(cell.settled for cell in measured):
            lines.append(
                "The steady state was not reached within the "
                f"{plural(group[0].iterations, 'iteration')} with {unsettled}: use more "
                "--iterations of bench queue."
            )
    return [*lines, *verdict(group)]


def queue_headlines(records: Iterable[Record]) -> list[str]:
    """The verdict on each group of cells."""
    return [line for group in queue_cells(records) for line in verdict(group)]


def verdict(group: Sequence[QueueCell]) -> list[str]:
    """How long the accelerator waits at best, what limits it, and what a faster reader gains. Of
    readings alone, how fast batches come. Empty if nothing of it was measured."""
    if group[0].reads_only:
        read = [(cell.alone, cell) for cell in group if cell.alone is not None]
        if not read:
            return []
        alone, best = min(read, key=lambda each: each[0].value)
        every = spread_words(alone)
        return [f"While nobody computes, a batch comes every {every} at best, with {best.name}."]
    settled = [cell for cell in group if cell.settled]
    if not settled:
        why = "so it is not known how long the accelerator waits"
        more = "use more --iterations of bench queue"
        return [f"No case of {len(group)} reached the steady state, {why}; {more}."]
    # Rounded as printed: of equal cells the fewest workers and the shallowest queue win.
    best = max(settled, key=lambda cell: round(float(np.median(cell.steady_utilisations)), 3))
    waits = [1 - used for used in best.steady_utilisations]
    ends = of_launches(waits, "{:.0%}".format)
    waited = f"{middle(waits) or 0.0:.0%} of the time [{ends}] at best, with {best.name}"
    if best.alone is None:
        return [f"The accelerator waited {waited}; reading alone was not measured."]
    bound = "reading" if best.alone.value > best.compute_s else "computing"
    line = (
        f"Bound by {bound}: a batch comes every {spread_words(best.alone)} and a step takes "
        f"{format_seconds(best.compute_s)}; the accelerator waited {waited}."
    )
    if bound == "reading":
        line += f" A reader {best.alone.value / best.compute_s:.2f}x as fast would keep it fed."
    return [line]


def _of_workers(same: Sequence[QueueCell]) -> list[str]:
    """Say what a step takes with one number of workers, and what the depth of the queue changes."""
    who = plural(same[0].workers, "worker")
    lines = steps_words(same, who)
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
        round((to or b.value) / (of or a.value) - 1, 6) + 0.0  # no -0.0
        for to, of in ((b.low, a.high), (b.high, a.low))
    )
    verb = "does not change" if low <= 0 <= high else "changes"
    lines.append(
        f"{depths} {verb} the steady state: {100 * (b.value / a.value - 1):+.1f} % "
        f"[{100 * low:+.1f} to {100 * high:+.1f} %, {plural(launches, 'launch')}]."
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


def spread_words(interval: Interval, what: str = "batch") -> str:
    return f"{format_seconds(interval.value)} {bracket(interval, plural(interval.n, what))}"


def cleared_at(iteration: int | None) -> str:
    return "never" if iteration is None else str(iteration)


def percent_words(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def draw_queue(cells: Sequence[QueueCell], source: str) -> Figure:
    """Depth over time, and seconds per iteration; for readings alone, seconds."""
    first = cells[0]
    ordered = sorted(cells, key=lambda cell: (cell.workers, cell.queue))
    iterations = f", {first.row.get('iterations')} iterations from a full queue"
    where = f"{first.row['data']}, batches of {first.row['batch_size']}"
    where += f"{'' if first.reads_only else iterations}; {plural(len(cells), 'case')} of {source}"
    if first.reads_only:
        places, seconds = np.arange(len(ordered)), column_of(ordered, "read_s")
        texts = [format_seconds(value) if np.isfinite(value) else "" for value in seconds]
        bars = Series("", places, seconds, "bars", texts=texts)
        x = Axis("Workers", ticks=[str(cell.workers) for cell in ordered])
        panel = Panel("", x, Axis("Time of a batch", "s"), [bars])
        return Figure("Batches read while nobody computes", where, [panel])
    queued = [cell for cell in ordered if cell.workers > 0]
    by_workers = group_by(queued, lambda cell: cell.workers).items()
    compute = format_seconds(first.number("compute_time"))
    panels = [_depth_panel(workers, same) for workers, same in by_workers]
    title = f"A queue beside steps of {compute}"
    return Figure(title, where, [*panels, _seconds_panel(ordered)], 2)


def _depth_panel(workers: int, cells: Sequence[QueueCell]) -> Panel:
    series = []
    for place, cell in enumerate(cells):
        for name, label, dashes in (("depth", "", 0), ("simulated_depth", ", simulated", 2)):
            depth = [float(word) for word in cell.row.get(name, "").split()]
            if depth:
                x = np.arange(1, len(depth) + 1)
                label = f"queue {cell.queue}{label}"
                series.append(Series(label, x, depth, "steps", place, dashes))
    y = Axis("Batches in the queue", whole=True)
    return Panel(plural(workers, "worker"), Axis("Iteration", whole=True), y, series)


def _seconds_panel(cells: Sequence[QueueCell]) -> Panel:
    x = np.arange(len(cells))
    measured, low, high = (
        column_of(cells, name) for name in ("seconds_per_iteration", "low_seconds", "high_seconds")
    )
    series = [
        Series("measured", x, measured, "bars", "bar", low=low, high=high),
        Series("simulated", x, column_of(cells, "simulated_seconds"), "points", 1, marker="x"),
    ]
    names = [f"{cell.workers}, {cell.queue}" if cell.workers else "0" for cell in cells]
    axis = Axis("Workers, queue", ticks=names)
    return Panel("From a full queue on", axis, Axis("Time of an iteration", "s"), series)
