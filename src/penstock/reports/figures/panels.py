"""The panels of a figure of models: memory, throughput and time by tile, and the frontier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...base import format_bytes, group_by
from ..model.cell import ModelCell
from .canvas import LEGEND, STYLE, Axes, tidy
from .marks import (
    BAND,
    CHIP,
    NOTE,
    PAD,
    Marks,
    byte_unit,
    cross,
    handle,
    rate_unit,
    silent,
    top_of,
)

PHASE_COLOURS = {"forward": "#4d4d4d", "backward": "#999999", "optimizer": "#d0d0d0"}
"""Greys for the phases, because colours show the batch size."""


def draw_memory(axis: Axes, cells: Sequence[ModelCell], marks: Marks, on_host: bool) -> None:
    what = f"Peak {'host' if on_host else 'device'} memory"
    peaks = [cell.peak_bytes(on_host) for cell in cells]
    unit, scale = byte_unit(peaks)
    budget = cells[0].budget_bytes / scale
    _draw_lines(
        axis,
        cells,
        marks,
        [peak / scale for peak in peaks],
        (what, f"{what} ({unit})"),
        most=budget,
    )
    if np.isfinite(budget):
        text = f"budget {format_bytes(cells[0].budget_bytes)}"
        axis.axhline(budget, color=STYLE["limit"], linestyle="--", linewidth=1.2)
        axis.annotate(text, (-0.38, budget), (0, 3), textcoords="offset points", **NOTE)


def draw_samples(axis: Axes, cells: Sequence[ModelCell], marks: Marks) -> None:
    names = "Throughput in samples", "Samples per second"
    _draw_rates(axis, cells, marks, names, lambda cell: 1.0)


def draw_pixels(axis: Axes, cells: Sequence[ModelCell], marks: Marks) -> None:
    label, scale = rate_unit(cells)
    names = "Throughput in pixels", label
    _draw_rates(axis, cells, marks, names, lambda cell: cell.pixels_of_sample / scale)


def _draw_rates(
    axis: Axes,
    cells: Sequence[ModelCell],
    marks: Marks,
    names: tuple[str, str],
    of_a_sample: Callable[[ModelCell], float],
) -> None:
    """Draw rates of the median step, with whiskers of its interval."""
    rates = [of_a_sample(cell) * cell.samples_per_s for cell in cells]
    # A long step is a low rate.
    ends = [
        (rate * cell.step_ms / cell.ends_ms[1], rate * cell.step_ms / cell.ends_ms[0])
        for rate, cell in zip(rates, cells, strict=True)
    ]
    most = max((high for _, high in ends if np.isfinite(high)), default=np.nan)
    _draw_lines(axis, cells, marks, rates, names, ends, most)


def _draw_lines(
    axis: Axes,
    cells: Sequence[ModelCell],
    marks: Marks,
    values: Sequence[float],
    names: tuple[str, str],
    ends: Sequence[tuple[float, float]] | None = None,
    most: float = np.nan,
) -> None:
    """Draw a line over the tiles for each batch, and a row of its failures in a band above.

    ``names`` are the titles of the panel and of its vertical axis, ``ends`` are the ends of
    whiskers, and the axis reaches at least ``most``.
    """
    tidy(axis, names[0], "Tile (pixels)", names[1], PAD)
    for _, of_batch in sorted(group_by(range(len(cells)), lambda i: cells[i].batch).items()):
        x = [marks.tiles.index(cells[i].tile) for i in of_batch]
        y = np.array([values[i] for i in of_batch])
        colour = marks.colour(cells[of_batch[0]])
        axis.plot(x, y, color=colour, marker="o", markersize=5, linewidth=1.6)
        if ends is not None:
            reach = np.abs(np.array([ends[i] for i in of_batch]).T - y)
            axis.errorbar(x, y, reach, color=colour, fmt="none", capsize=3, linewidth=1.2)
    axis.set_xticks(range(len(marks.tiles)), marks.tiles)
    axis.set_xlim(-0.4, len(marks.tiles) - 0.5)
    top = top_of([*values, most])
    if top is None:
        silent(axis, "not recorded")
        top = 1.0
    failed = [cell for cell in cells if cell.failed_word]
    rows = sorted({cell.batch for cell in failed})
    step = top * min(0.09, 0.5 / max(len(rows), 1))
    for cell in failed:
        x_of_tile = marks.tiles.index(cell.tile)
        y_of_row = top + (rows.index(cell.batch) + 0.5) * step
        cross(axis, x_of_tile, y_of_row, cell.failed_word, marks.colour(cell))
    if failed:
        axis.axhspan(top, top + len(rows) * step, **BAND)
    axis.set_ylim(0, top + len(rows) * step)
    axis.set_yticks([tick for tick in axis.get_yticks() if 0 <= tick <= top])


def draw_times(axis: Axes, cells: Sequence[ModelCell], marks: Marks) -> None:
    """Draw a bar for each case. In training its phases are stacked."""
    phased = any(cell.phases_ms for cell in cells)
    title = "Time of a step, mean of each phase" if phased else "Time of a step, median"
    tidy(axis, title, "Batch, and below it the tile (pixels)", "Time (ms)", PAD)
    width = min(0.84 / len(marks.batches), 0.28)
    if phased:
        top = top_of(sum(cell.phases_ms.values()) for cell in cells)
    else:
        top = top_of(end for cell in cells for end in (cell.step_ms, cell.ends_ms[1]))
    if top is None:
        axis.set_yticks([])
        top = 1.0
    crowded = len(cells) > 20
    chip = CHIP | ({"fontsize": 6} if crowded else {})
    left = len(marks.batches) / 2 - 0.5
    ticks = [
        marks.tiles.index(cell.tile) + (marks.batches.index(cell.batch) - left) * width
        for cell in cells
    ]
    for x, cell in zip(ticks, cells, strict=True):
        _draw_bar(axis, x, cell, 0.86 * width, marks.colour(cell), top, chip)
    axis.set_xticks(ticks, [str(cell.batch) for cell in cells], minor=True)
    axis.set_xticks(range(len(marks.tiles)), marks.tiles)
    axis.tick_params(axis="x", which="minor", length=0, labelsize=STYLE["small"] - 1)
    axis.tick_params(axis="x", which="minor", rotation=90 if crowded else 0)
    axis.tick_params(axis="x", which="major", length=0, pad=20 if crowded else 16)
    axis.grid(visible=False, axis="x")
    axis.set(xlim=(-0.5, len(marks.tiles) - 0.5), ylim=(0, top))
    if phased:
        drawn = [name for name in PHASE_COLOURS if any(name in c.phases_ms for c in cells)]
        handles = [handle(name, PHASE_COLOURS[name], marker="s", line="") for name in drawn]
        axis.legend(handles=handles, loc="upper left", **LEGEND)


def _draw_bar(
    axis: Axes,
    x: float,
    cell: ModelCell,
    width: float,
    colour: str,
    top: float,
    chip: dict[str, Any],
) -> None:
    """Draw the time of one case, or a hatched bar with its failure."""
    time, ends = cell.step_ms, cell.ends_ms
    if np.isnan(time):
        axis.bar(x, top, width, facecolor="white", edgecolor="#b5b5b5", hatch="////")
        axis.text(x, top / 2, cell.failed_word, rotation=90, ha="center", va="center", **chip)
        return
    bottom = 0.0
    for phase, value in cell.phases_ms.items():
        axis.bar(x, value, width, bottom=bottom, color=PHASE_COLOURS[phase])
        bottom += value
    if not cell.phases_ms:
        axis.bar(x, time, width, color=colour)
        reach = np.abs([[end - time] for end in ends])
        axis.errorbar(x, time, reach, color=STYLE["ink"], fmt="none", capsize=2.5, linewidth=1.1)
    if cell.failed_word:
        axis.text(x, time, cell.failed_word, ha="center", va="bottom", **chip)


def draw_frontier(axis: Axes, cells: Sequence[ModelCell], marks: Marks, on_host: bool) -> None:
    """Draw each case by memory and throughput. A line joins those that no case beats in both."""
    peaks = [cell.peak_bytes(on_host) for cell in cells]
    unit, bytes_scale = byte_unit(peaks)
    rates, rate_scale = rate_unit(cells)
    placed = [
        (peak / bytes_scale, cell.pixels_per_s / rate_scale, cell)
        for peak, cell in zip(peaks, cells, strict=True)
        if np.isfinite(peak) and np.isfinite(cell.pixels_per_s)
    ]
    failed = [cell for cell in cells if cell.failed_word]
    memories = f"Peak {'host' if on_host else 'device'} memory ({unit})"
    tidy(axis, "Memory against throughput", memories, rates, PAD)
    if placed:
        for memory, rate, cell in placed:
            marker, colour = marks.marker(cell), marks.colour(cell)
            axis.plot(memory, rate, marker=marker, color=colour, markersize=7, linestyle="")
        most, least = (end(memory for memory, _, _ in placed) for end in (max, min))
        span = most - least or most
        axis.set_xlim(least - 0.25 * span, most + 0.1 * span)  # room for names on the left
        axis.set_ylim(0, top_of(rate for _, rate, _ in placed))
        axis.set_xticks([tick for tick in axis.get_xticks() if tick >= 0])
        best = frontier([(memory, rate) for memory, rate, _ in placed])
        _draw_best(axis, [placed[i] for i in best])
    else:
        text = "memory not recorded:\nnothing to weigh throughput against"
        silent(axis, text, 0.37 if failed else 0.5)
        axis.set(xticks=[], ylim=(0, 1))
    if failed:
        _draw_beyond(axis, failed, marks)


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other point beats in both values, sorted by memory.

    A point is (memory, throughput). Less memory and more throughput are better.

    >>> frontier([(2.0, 5.0), (1.0, 4.0), (3.0, 4.5), (4.0, 6.0)])
    [1, 0, 3]
    """
    best: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not best or points[i][1] > points[best[-1]][1]:
            best.append(i)
    return best


def _draw_best(axis: Axes, best: Sequence[tuple[float, float, ModelCell]]) -> None:
    """Draw the frontier and the names of its points.

    Names stand above and to the left, because the line rises to the right. Of points that are too
    near each other the first is named.
    """
    memories, rates = [memory for memory, _, _ in best], [rate for _, rate, _ in best]
    axis.plot(memories, rates, color=STYLE["faint"], linestyle="--", linewidth=1.2, zorder=1)
    (left, right), (_, top) = axis.get_xlim(), axis.get_ylim()
    x = y = -np.inf
    for memory, rate, cell in best:
        if memory - x > 0.2 * (right - left) or rate - y > 0.05 * top:
            x, y = memory, rate
            axis.annotate(
                _name(cell), (x, y), (-4, 5), textcoords="offset points", ha="right", **NOTE
            )


def _draw_beyond(axis: Axes, failed: Sequence[ModelCell], marks: Marks) -> None:
    """Draw failures, which have no throughput, in a band to the right."""
    left, right = axis.get_xlim()
    end = right + 0.34 * (right - left)
    ticks = [tick for tick in axis.get_xticks() if tick <= right]
    axis.axvspan(right, end, **BAND)
    axis.set(xlim=(left, end), xticks=ticks)
    top = axis.get_ylim()[1]
    step = top * min(0.085, 0.95 / len(failed))
    for row, cell in enumerate(failed):
        x, y = right + 0.03 * (right - left), top - (row + 0.7) * step
        cross(axis, x, y, f"{_name(cell)} {cell.failed_word}", marks.colour(cell))


def _name(cell: ModelCell) -> str:
    return f"{cell.tile} × {cell.batch}"
