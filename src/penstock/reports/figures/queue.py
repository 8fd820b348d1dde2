"""The figures of a queue benchmark and of a loader benchmark, drawn from their CSVs.

    queue    depth of the queue at the end of each iteration, a panel for each number of workers,
             measured and simulated; below, seconds per iteration: measured, model and the seed's;
             of readings alone, seconds from one batch to the next by workers
    loader   seconds for a batch by threads, a line for each loader, a panel for each batch size;
             with one number of threads, a bar for each
    ladder   what the batch pays at each rung, drawn from records: no CSV holds the rungs; a panel
             for each batch size and number of threads, all on one scale

Cases that differ in anything else never share a figure. Of several rows of one case the latest is
drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base import UsageError, format_seconds, significant
from ..loader.cell import CASE_APART
from ..queue.course import APART, QUEUE_NEEDS
from ..table import Row, read_csv
from .canvas import LEGEND, STYLE, TEXT, TITLE, blank, heading, save_figures, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_QUEUE_APART = (*APART, "batch_size", "machine_key")
LOADER_APART = (*CASE_APART, "machine_key")
SECONDS = ("seconds_per_batch", "low_seconds", "high_seconds")
_BAR = "#c4c4c4"


def plot_queue(path: Path, out_prefix: str | Path, replace: bool = False) -> list[Path]:
    """Draw the CSV of ``penstock bench queue`` to ``<out_prefix>.png``, or to one numbered file
    for each group of cases; returns what was written."""
    rows = latest_of(path, QUEUE_NEEDS, ("workers", "queue", *_QUEUE_APART))
    return save_numbered(path, rows, _QUEUE_APART, draw_queue, out_prefix, replace)


def latest_of(path: Path, needs: Iterable[str], names: Sequence[str]) -> list[Row]:
    """The last row of each case that was measured, though some of its launches may have failed."""
    rows = sorted(read_csv(path, needs).rows, key=lambda row: row.get("timestamp", ""))
    cases = {tuple(row.get(name, "") for name in names): row for row in rows}
    measured = [row for row in cases.values() if row.get("launches", "1") != "0"]
    if not measured:
        raise UsageError(f"{path} holds no row to plot")
    return measured


def save_numbered(
    path: Path,
    rows: Sequence[Row],
    apart: Sequence[str],
    draw: Callable[[Sequence[Row], str], Figure],
    out_prefix: str | Path,
    replace: bool,
) -> list[Path]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name, "") for name in apart), []).append(row)
    prefix, figures = Path(out_prefix), {}
    for number, group in enumerate(groups.values(), 1):
        try:
            figure = draw(group, path.name)
        except ValueError as error:
            raise UsageError(f"{path} holds what is no number: {error}") from error
        figures[numbered_path(prefix, number, len(groups))] = figure
    return save_figures(figures, replace)


def numbered_path(prefix: Path, number: int, of: int) -> Path:
    return prefix.with_name(f"{prefix.name}{f'_{number}' if of > 1 else ''}.png")


def cases_of_group(rows: Sequence[Row]) -> str:
    return f"{len(rows)} case{'s' * (len(rows) != 1)}"


def draw_queue(rows: Sequence[Row], source: str) -> Figure:
    """Depth over time above, seconds per iteration below; of readings alone their seconds."""
    if rows[0]["compute"] == "none":
        return _draw_readings(rows, source)
    queued = [row for row in rows if int(row["workers"]) > 0]
    workers = sorted({int(row["workers"]) for row in queued})
    figure = blank(max(8.0, 3.2 * len(workers)), 7.6)
    compute = format_seconds(float(rows[0]["compute_s"]))
    heading(
        figure,
        f"A queue beside steps of {compute} ({rows[0]['compute']})",
        f"{rows[0]['data']}, batches of {rows[0]['batch_size']}, {rows[0]['iterations']} "
        f"iterations from a full queue; {cases_of_group(rows)} of {source}",
    )
    grid = figure.add_gridspec(2, max(1, len(workers)))
    first: Axes | None = None
    sizes = sorted({int(row["queue"]) for row in queued})
    for column, number in enumerate(workers):
        axis = figure.add_subplot(grid[0, column], sharey=first)
        first = first or axis
        own = [row for row in queued if int(row["workers"]) == number]
        _draw_depth(axis, number, own, sizes)
    _draw_seconds(figure.add_subplot(grid[1, :]), rows)
    return figure


def _draw_readings(rows: Sequence[Row], source: str) -> Figure:
    figure = blank(6.0, 4.2)
    about = (
        f"{rows[0]['data']}, batches of {rows[0]['batch_size']}; {cases_of_group(rows)} of {source}"
    )
    heading(figure, "Batches read while nobody computes", about)
    axis = figure.subplots()
    tidy(axis)
    ordered = sorted(rows, key=lambda row: (int(row["workers"]), int(row["queue"])))
    places, seconds = np.arange(len(ordered)), column_of(ordered, "read_s")
    axis.bar(places, seconds, width=0.55, color=STYLE["colours"][0])
    for place, value in zip(places, seconds, strict=True):
        if np.isfinite(value):
            axis.annotate(
                significant(value), (place, value), (0, 3), textcoords="offset points",
                ha="center", fontsize=STYLE["small"], color=STYLE["ink"],
            )  # fmt: skip
    axis.set_xticks(places, [row["workers"] for row in ordered])
    axis.grid(visible=False, axis="x")
    axis.set_xlabel("Workers", **TEXT)
    axis.set_ylabel("Seconds for a batch", **TEXT)
    return figure


def _draw_depth(axis: Axes, workers: int, rows: Sequence[Row], sizes: Sequence[int]) -> None:
    tidy(axis)
    axis.set_title(f"{workers} worker{'s' * (workers != 1)}", **TITLE)
    for row in sorted(rows, key=lambda row: int(row["queue"])):
        size = int(row["queue"])
        colour = STYLE["colours"][sizes.index(size) % len(STYLE["colours"])]
        depth = _numbers(row["depth"])
        axis.step(range(len(depth)), depth, where="mid", color=colour, label=f"queue {size}")
        simulated = _numbers(row.get("simulated_depth", ""))
        axis.step(
            range(len(simulated)), simulated, where="mid", color=colour, ls=":", linewidth=1.1
        )
    axis.set_ylim(bottom=-0.1, top=max(1.1, axis.get_ylim()[1]))
    axis.set_xlabel("Iteration", **TEXT)
    axis.set_ylabel("Batches in the queue at its end", **TEXT)
    axis.locator_params(integer=True, min_n_ticks=1)  # half a batch and half a step are none
    axis.legend(**LEGEND, title="dotted: simulated", title_fontsize=STYLE["small"])


def _draw_seconds(axis: Axes, rows: Sequence[Row]) -> None:
    tidy(axis)
    axis.set_title("Seconds per iteration, from a full queue on", **TITLE)
    ordered = sorted(rows, key=lambda row: (int(row["workers"]), int(row["queue"])))
    x = np.arange(len(ordered))
    measured, low, high = (
        column_of(ordered, name)
        for name in ("seconds_per_iteration", "low_seconds", "high_seconds")
    )
    axis.bar(x, measured, width=0.55, color=_BAR, label="measured")
    axis.vlines(x, low, high, color=STYLE["ink"], linewidth=1.2)
    for name, label, marker, colour, size in (  # the first is wider than what may lie on it
        ("model_seconds", "seed's formula", "_", STYLE["colours"][0], 20),
        ("simulated_seconds", "simulated", "x", STYLE["colours"][1], 7),
    ):
        values = column_of(ordered, name)
        axis.plot(x, values, marker, color=colour, markersize=size, mew=1.6, label=label)
    for place, row in zip(x, ordered, strict=True):
        if row.get("seed_seconds"):
            note = f"seed {significant(float(row['seed_seconds']), 2)}"
            axis.annotate(
                note, (place, 0), (0, 3), textcoords="offset points", ha="center",
                fontsize=STYLE["small"] - 1, color=STYLE["faint"],
            )  # fmt: skip
    names = [f"{r['workers']}, {r['queue']}" if int(r["workers"]) else "0" for r in ordered]
    axis.set_xticks(x, names)
    axis.grid(visible=False, axis="x")
    axis.set_xlabel("Workers, queue", **TEXT)
    axis.set_ylabel("Seconds", **TEXT)
    # Beside the title: over the bars it would hide them.
    axis.legend(
        **LEGEND, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.98), markerscale=0.8,
        columnspacing=1.2,
    )  # fmt: skip


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]


def column_of(rows: Sequence[Row], name: str) -> Any:
    return np.array([float(row.get(name) or "nan") for row in rows])
