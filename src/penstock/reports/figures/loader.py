"""The figures of a benchmark of loaders and of its ladders.

    loader   seconds for a batch by threads: a panel for each batch size, a line for each loader, or
             a bar if there is one number of threads
    ladder   what a batch costs at each rung: a panel for each batch size and number of threads, all
             on one scale. It is drawn from records, because no CSV holds the rungs

Cases that differ in anything else have figures of their own. If a case has several rows, the latest
is drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...base import format_seconds, plural, require, significant
from ...instruments import Record
from ..loader.cell import LoaderCell, way
from ..loader.ladder import RUNGS, Ladder, ladders_of, same_case_but_rung
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
from .queue import column_of, save_numbered


def plot_loader(path: Path, out_prefix: str | Path, replace: bool = False) -> list[Path]:
    """Draw the seconds of a batch of a benchmark of loaders.

    There is one figure, ``<out_prefix>.png``, or a numbered one for each group of cases.

    Args:
        path: A CSV of ``penstock bench loader``, of any version.
        out_prefix: The path of the figures without the suffix ``.png``.
        replace: Replace figures that Penstock did not write.

    Returns:
        The files that were written.

    Raises:
        UsageError: The file is not such a CSV, a field is no number, or there is nothing to draw.
    """
    return save_numbered(LoaderCell, path, draw_loader, out_prefix, replace)


def draw_loader(cells: Sequence[LoaderCell], source: str) -> Figure:
    """Draw seconds of a batch by threads, or by loader if there is one number of threads."""
    batches = sorted({cell.batch for cell in cells})
    fastest_first = sorted(cells, key=lambda cell: float(cell.row["seconds_per_batch"] or "inf"))
    loaders = list(dict.fromkeys(cell.loader for cell in fastest_first))
    threads = sorted({cell.threads for cell in cells})
    beside = 2.0 * (len(threads) > 1)  # inches, for the names of the lines
    figure = blank(max(6.0, 4.6 * len(batches)) + beside, 4.6)
    words = [cells[0].row["data"], *way(cells[0].row)]
    words += [plural(count, "thread") for count in threads if len(threads) == 1]
    words += ["* part of it was read before"] * any(cell.read_ahead for cell in cells)
    about = f"{', '.join(words)}; {plural(len(cells), 'case')} of {source}"
    heading(figure, "Seconds for a batch", about)
    axes = np.atleast_1d(figure.subplots(1, len(batches)))
    for axis, batch in zip(axes, batches, strict=True):
        of_batch = [cell for cell in cells if cell.batch == batch]
        if len(threads) == 1:
            tidy(axis, f"Batches of {batch}", "Seconds")
            _draw_bars(axis, of_batch, loaders)
        else:
            tidy(axis, f"Batches of {batch}", "Threads", "Seconds")
            _draw_lines(axis, of_batch, loaders, threads)
    if len(threads) > 1:
        # The legend is beside the panels: over them it would hide lines. A panel may lack a loader.
        legends = (zip(*axis.get_legend_handles_labels(), strict=True) for axis in axes)
        named = {label: line for legend in legends for line, label in legend}
        shown = [name for name in loaders if name in named]
        lines = [named[name] for name in shown]
        axes[-1].legend(lines, shown, **LEGEND, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _draw_lines(
    axis: Axes, cells: Sequence[LoaderCell], loaders: Sequence[str], threads: Sequence[int]
) -> None:
    ticker = require("matplotlib.ticker", "plot")
    for place, loader in enumerate(loaders):
        line = sorted((c for c in cells if c.loader == loader), key=lambda cell: cell.threads)
        if not line:
            continue
        colour = colour_at(place)
        dashes = ("-", "--", ":")[place // len(STYLE["colours"]) % 3]
        x, (seconds, low, high) = column_of(line, "threads"), _seconds_of(line)
        axis.plot(x, seconds, dashes, marker="o", markersize=4, color=colour, label=loader)
        axis.vlines(x, low, high, color=colour)
    # Loaders differ by factors: on a linear axis the fast ones would overlap.
    axis.set_yscale("log")
    seconds = np.concatenate(_seconds_of(cells))
    least, most = np.nanmin(seconds), np.nanmax(seconds)
    axis.set_ylim(least / 1.5, 1.5 * most)  # a tick even if they are close
    digits = (1, 2, 5) if most > 4 * least else range(1, 10)
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=digits))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(ticker.NullFormatter())
    axis.set_xticks(threads)


def _draw_bars(axis: Axes, cells: Sequence[LoaderCell], loaders: Sequence[str]) -> None:
    places = [loaders.index(cell.loader) for cell in cells]
    seconds, low, high = _seconds_of(cells)
    colours = [STYLE["colours"][0 if c.loader.startswith("penstock") else 1] for c in cells]
    axis.barh(places, seconds, height=0.6, color=colours)
    axis.hlines(places, low, high, color=STYLE["ink"], linewidth=1.2)
    for place, cell, value, end in zip(places, cells, seconds, np.fmax(seconds, high), strict=True):
        text = significant(value) + " *" * bool(cell.read_ahead)
        axis.annotate(
            text, (end, place), (4, 0), textcoords="offset points", va="center",
            fontsize=STYLE["small"], color=STYLE["ink"],
        )  # fmt: skip
    axis.set_yticks(range(len(loaders)), loaders)
    axis.set(ylim=(len(loaders) - 0.5, -0.5), xlim=(0, 1.15 * np.nanmax(np.fmax(seconds, high))))
    axis.grid(visible=False, axis="y")


def _seconds_of(cells: Sequence[LoaderCell]) -> list[Any]:
    """The seconds of a batch of each cell, and the ends of their intervals."""
    return [column_of(cells, n) for n in ("seconds_per_batch", "low_seconds", "high_seconds")]


def plot_ladders(
    records: Iterable[Record], out_prefix: str | Path, replace: bool = False
) -> list[Path]:
    """Draw the ladder of every batch size and number of threads to ``<out_prefix>.png``.

    Ladders of several data sets, caches and so on are drawn to one numbered file each.
    """
    ladders = [ladder for ladder in ladders_of(records) if ladder.measured]
    figures = [draw_ladders(group) for group in same_case_but_rung(ladders)]
    return save_under(out_prefix, numbered(figures), replace)


def draw_ladders(ladders: Sequence[Ladder]) -> Figure:
    """Draw what each rung of a batch costs beyond the rung below it. The largest cost is marked."""
    figure = blank(max(6.0, 4.6 * len(ladders)), 4.2)
    case = next(iter(ladders[0].rungs.values())).case
    where = ", ".join([f"{case['data']}, cache {case['cache']}", *way(case)])
    heading(figure, "Cost of a batch, step by step", where)
    axes = np.atleast_1d(figure.subplots(1, len(ladders), sharex=True))
    for axis, ladder in zip(axes, ladders, strict=True):
        _draw_ladder(axis, ladder)
    longest = max(seconds for ladder in ladders for seconds in ladder.seconds.values())
    axes[0].set_xlim(0, 1.45 * longest)  # the panels share it
    return figure


def _draw_ladder(axis: Axes, ladder: Ladder) -> None:
    names = list(ladder.measured)
    first = ladder.measured[names[0]]
    tidy(axis, f"Batches of {first.batch}, {plural(first.threads, 'thread')}", "Seconds")
    ends = np.array(list(ladder.seconds.values()))
    starts = np.array([0.0, *ends[:-1]])
    colours = [STYLE["colours"][1 if name == ladder.limiting else 0] for name in names]
    places = np.arange(len(names))
    bars = axis.barh(places, ends - starts, left=starts, color=colours, height=0.6)
    for bar, cost in zip(bars, ends - starts, strict=True):
        if cost < 0:  # a step that was measured to cost less than nothing
            bar.set_alpha(0.3)
    axis.vlines(ends[:-1], places[:-1], places[1:], color=STYLE["faint"], linewidth=0.8)
    for place, name in enumerate(names):
        speed = ladder.measured[name].speed("bytes")
        note = f"{format_seconds(ends[place])}, {significant((speed or 0) / 1e6)} MB/s"
        axis.annotate(
            note, (max(ends[place], starts[place]), place), (4, 0), textcoords="offset points",
            va="center", fontsize=STYLE["small"], color=STYLE["ink"],
        )  # fmt: skip
    labels = [f"{name} {RUNGS[name]}" for name in names]
    if names[0] != "L0":  # it includes the rungs below it
        labels[0] = f"up to {labels[0]}"
    axis.set_yticks(places, labels)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(visible=False, axis="y")
