"""The figures of a queue benchmark.

    depth    batches in the queue at the end of each iteration, measured and simulated, a panel for
             each number of workers
    seconds  seconds per iteration, with what the simulation has

For readings alone the figure has the seconds from one batch to the next by workers. Cases that
differ in other knobs than workers and queue get separate figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...base import format_seconds, group_by, plural
from ..cell import Cell
from ..queue.cell import QueueCell
from .chart import Axis, Figure, Panel, Series


def draw_queue(cells: Sequence[QueueCell], source: str) -> Figure:
    """Depth over time, and seconds per iteration; for readings alone, seconds."""
    first = cells[0]
    ordered = sorted(cells, key=lambda cell: (cell.workers, cell.queue))
    iterations = f", {first.row.get('iterations')} iterations from a full queue"
    where = f"{first.row['data']}, batches of {first.row['batch_size']}"
    where += f"{'' if first.reads_only else iterations}; {plural(len(cells), 'case')} of {source}"
    if first.reads_only:
        places, seconds = np.arange(len(ordered)), column_of(ordered, "read_s")
        bars = Series("", places, seconds, "bars", texts=_words(seconds))
        x = Axis("Workers", ticks=[str(cell.workers) for cell in ordered])
        panel = Panel("", x, Axis("Time of a batch", "s"), [bars])
        return Figure("Batches read while nobody computes", where, [panel])
    queued = [cell for cell in ordered if cell.workers > 0]
    by_workers = group_by(queued, lambda cell: cell.workers).items()
    compute = format_seconds(first.number("compute_s"))
    panels = [_depth_panel(workers, same) for workers, same in by_workers]
    title = f"A queue beside steps of {compute} ({first.row['compute']})"
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


def _words(seconds: Sequence[float]) -> list[str]:
    return [format_seconds(value) if np.isfinite(value) else "" for value in seconds]


def column_of(cells: Sequence[Cell], name: str) -> Any:
    """The numbers of a column; NaN if a cell has none."""
    return np.array([cell.number(name) for cell in cells])
