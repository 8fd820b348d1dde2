"""The figures of a queue benchmark, drawn from its CSV.

Above is the depth of the queue at the end of each iteration, measured and simulated, in a panel for
each number of workers. Below are seconds per iteration: measured, of the model and the seed's. For
readings alone the figure has the seconds from one batch to the next by workers.

Cases that differ in other knobs than workers and queue get separate figures. If a case has several
rows, the latest is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...base import UsageError, format_seconds, group_by, plural, significant
from ..cell import Cell, Kind, latest
from ..queue.cell import QueueCell
from ..table import reading_numbers
from .canvas import (
    LEGEND,
    STYLE,
    Axes,
    Figure,
    blank,
    colour_at,
    heading,
    numbered,
    save_under,
    tidy,
)

_BAR = "#c4c4c4"


def plot_queue(path: Path, out_prefix: str | Path, replace: bool = False) -> list[Path]:
    """Draw the depth of a queue and the seconds of an iteration.

    There is one figure, ``<out_prefix>.png``, or a numbered one for each group of cases.

    Args:
        path: A CSV of ``penstock bench queue``, of any version.
        out_prefix: The path of the figures without the suffix ``.png``.
        replace: Replace figures that Penstock did not write.

    Returns:
        The files that were written.

    Raises:
        UsageError: The file is not such a CSV, a field is no number, or there is nothing to draw.
    """
    return save_numbered(QueueCell, path, draw_queue, out_prefix, replace)


def save_numbered(
    kind: type[Kind],
    path: Path,
    draw: Callable[[Sequence[Kind], str], Figure],
    out_prefix: str | Path,
    replace: bool,
) -> list[Path]:
    """Draw the last row of each measured case of a CSV, a figure for each group."""
    # A case was measured if any of its launches was. Old files have no column of launches.
    cells = [c for c in latest(kind.of_csv(path)) if c.row.get("launches", "1") != "0"]
    groups = group_by(cells, lambda cell: cell.group).values()
    if not groups:
        raise UsageError(f"{path} holds no row to plot")
    with reading_numbers(path):
        figures = [draw(group, path.name) for group in groups]
    return save_under(out_prefix, numbered(figures), replace)


def _of_source(cells: Sequence[QueueCell], source: str) -> str:
    where = f"{cells[0].row['data']}, batches of {cells[0].row['batch_size']}"
    iterations = f", {cells[0].row['iterations']} iterations from a full queue"
    more = "" if cells[0].reads_only else iterations
    return f"{where}{more}; {plural(len(cells), 'case')} of {source}"


def draw_queue(cells: Sequence[QueueCell], source: str) -> Figure:
    """Draw depth over time above and seconds per iteration below; for readings alone, seconds."""
    if cells[0].reads_only:
        return _draw_readings(cells, source)
    queued = [cell for cell in cells if cell.workers > 0]
    by_workers = sorted(group_by(queued, lambda cell: cell.workers).items())
    figure = blank(max(8.0, 3.2 * len(by_workers)), 7.6)
    compute = format_seconds(cells[0].number("compute_s"))
    title = f"A queue beside steps of {compute} ({cells[0].row['compute']})"
    heading(figure, title, _of_source(cells, source))
    grid = figure.add_gridspec(2, max(1, len(by_workers)))
    first: Axes | None = None
    sizes = sorted({cell.queue for cell in queued})
    for column, (workers, same) in enumerate(by_workers):
        axis = figure.add_subplot(grid[0, column], sharey=first)
        first = first or axis
        _draw_depth(axis, workers, same, sizes)
    _draw_seconds(figure.add_subplot(grid[1, :]), cells)
    return figure


def _draw_readings(cells: Sequence[QueueCell], source: str) -> Figure:
    figure = blank(6.0, 4.2)
    heading(figure, "Batches read while nobody computes", _of_source(cells, source))
    axis = figure.subplots()
    tidy(axis, x="Workers", y="Seconds for a batch")
    ordered = sorted(cells, key=lambda cell: (cell.workers, cell.queue))
    places, seconds = np.arange(len(ordered)), column_of(ordered, "read_s")
    axis.bar(places, seconds, width=0.55, color=STYLE["colours"][0])
    for place, value in zip(places, seconds, strict=True):
        if np.isfinite(value):
            axis.annotate(
                significant(value), (place, value), (0, 3), textcoords="offset points",
                ha="center", fontsize=STYLE["small"], color=STYLE["ink"],
            )  # fmt: skip
    axis.set_xticks(places, [str(cell.workers) for cell in ordered])
    axis.grid(visible=False, axis="x")
    return figure


def _draw_depth(axis: Axes, workers: int, cells: Sequence[QueueCell], sizes: Sequence[int]) -> None:
    tidy(axis, plural(workers, "worker"), "Iteration", "Batches in the queue at its end")
    for cell in sorted(cells, key=lambda cell: cell.queue):
        size = cell.queue
        colour = colour_at(sizes.index(size))
        depth = _numbers(cell.row["depth"])
        axis.step(range(len(depth)), depth, where="mid", color=colour, label=f"queue {size}")
        simulated = _numbers(cell.row.get("simulated_depth", ""))
        axis.step(
            range(len(simulated)), simulated, where="mid", color=colour, ls=":", linewidth=1.1
        )
    axis.set_ylim(bottom=-0.1, top=max(1.1, axis.get_ylim()[1]))
    axis.locator_params(integer=True, min_n_ticks=1)  # no half batches and steps
    axis.legend(**LEGEND, title="dotted: simulated", title_fontsize=STYLE["small"])


def _draw_seconds(axis: Axes, cells: Sequence[QueueCell]) -> None:
    tidy(axis, "Seconds per iteration, from a full queue on", "Workers, queue", "Seconds")
    ordered = sorted(cells, key=lambda cell: (cell.workers, cell.queue))
    x = np.arange(len(ordered))
    measured, low, high = (
        column_of(ordered, name)
        for name in ("seconds_per_iteration", "low_seconds", "high_seconds")
    )
    axis.bar(x, measured, width=0.55, color=_BAR, label="measured")
    axis.vlines(x, low, high, color=STYLE["ink"], linewidth=1.2)
    for name, label, marker, colour, size in (  # wide enough to show below the second
        ("model_seconds", "seed's formula", "_", STYLE["colours"][0], 20),
        ("simulated_seconds", "simulated", "x", STYLE["colours"][1], 7),
    ):
        values = column_of(ordered, name)
        axis.plot(x, values, marker, color=colour, markersize=size, mew=1.6, label=label)
    for place, seed in zip(x, column_of(ordered, "seed_seconds"), strict=True):
        if np.isfinite(seed):
            note = f"seed {significant(seed, 2)}"
            axis.annotate(
                note, (place, 0), (0, 3), textcoords="offset points", ha="center",
                fontsize=STYLE["small"] - 1, color=STYLE["faint"],
            )  # fmt: skip
    names = [f"{cell.workers}, {cell.queue}" if cell.workers else "0" for cell in ordered]
    axis.set_xticks(x, names)
    axis.grid(visible=False, axis="x")
    # The legend is beside the title: over the bars it would hide them.
    axis.legend(
        **LEGEND, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.98), markerscale=0.8,
        columnspacing=1.2,
    )  # fmt: skip


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]


def column_of(cells: Sequence[Cell], name: str) -> Any:
    """The numbers of a column; NaN if a cell has none."""
    return np.array([cell.number(name) for cell in cells])
