"""The figure of a benchmark of models: panels for each group of cells, drawn from its CSV.

    peak memory by tile           samples a second by tile           pixels a second by tile
    time of a step, by phase in training             memory against throughput, and the frontier

The first three have a line for each batch. Rates, times and their intervals are of the median step;
a row of the seed has no median, and its mean is drawn. Cells that differ only in tile and batch
share a figure. If a case has several rows, the latest is drawn. A case that failed is a cross above
the measured ones, with its failure in a word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...base import UsageError, as_usage_error, group_by, plural
from ...bench import pixels_of
from ..cell import latest
from ..model.cell import PHASES, ModelCell
from ..model.report import labelled
from .chart import Axis, Figure, Panel, Series

_GREYS = ("deep", "middle", "pale")
"""The phases, because colours show the batch size."""
_CASE = "Tile (pixels)"
_RESULTS = ("error", "avg_time_ms", "median_time_ms")
"""A row with one of these was measured or has failed; one that only tried its memory has none."""
_MOST_BARS = 48
"""Bars of more cases than this are too thin to read."""


def bench_figures(path: Path) -> dict[str, Figure]:
    """Memory, throughput and time of a benchmark of models, by the end of the figure's file name.

    If models, modes, devices or other knobs differ, there is a figure for each group, named by the
    knobs that differ; a single one has no name.

    Raises:
        UsageError: The file is no such CSV, a field is no number, or there is nothing to draw.
    """
    path = Path(path)
    groups = labelled(ModelCell.of_csv(path))
    if not groups:
        raise UsageError(f"{path} holds no row to plot")
    words = [label.split(", ") for label, _ in groups]
    figures: dict[str, Figure] = {}
    for (label, cells), named in zip(groups, words, strict=True):
        apart = [word for word in named if not all(word in other for other in words)]
        name = re.sub(r"[^\w.-]+", "_", "_".join(apart))
        with as_usage_error(f"{path.name} has a field that is not a number", ValueError):
            figures[name] = draw_bench(label, cells, path.name)
    return figures


def draw_bench(label: str, cells: Sequence[ModelCell], source: str) -> Figure:
    """All panels of one group of cells."""
    shown = latest(cells, lambda cell: any(cell.row.get(name) for name in _RESULTS))
    drawn = sorted(shown, key=lambda cell: (pixels_of(cell.tile), cell.batch))
    times = [time_panel(drawn)] if len(drawn) <= _MOST_BARS else []
    panels = [memory_panel(drawn), *rate_panels(drawn), *times, frontier_panel(drawn)]
    return Figure(label, _facts(len(cells), drawn, source), panels, 3)


def _facts(rows: int, drawn: Sequence[ModelCell], source: str) -> str:
    latest_of = f", the latest of each of {plural(len(drawn), 'case')}" if rows > len(drawn) else ""
    facts = [f"{plural(rows, 'row')} of {source}{latest_of}"]
    launches = sorted({int(c.row["launches"]) for c in drawn if int(c.row.get("launches") or 0)})
    if launches:
        fewest = f"{launches[0]} to " if len(launches) > 1 else ""
        facts.append(f"{fewest}{plural(launches[-1], 'launch')} of a case")
    if any(np.isfinite(cell.ends_ms[0]) for cell in drawn):
        facts.append("whiskers: 95 % interval")
    return "  ·  ".join(facts)


def on_host(cells: Sequence[ModelCell]) -> bool:
    """Whether the memory of cells is that of the host."""
    return cells[0].row.get("device", "cpu") == "cpu"


def peaks_of(cells: Sequence[ModelCell]) -> list[float]:
    """The peak memory of each cell in bytes."""
    return [cell.peak_bytes(on_host(cells)) for cell in cells]


def _memory_axis(cells: Sequence[ModelCell]) -> Axis:
    return Axis(f"Peak {'host' if on_host(cells) else 'device'} memory", "B")


def _rate_axis(cells: Sequence[ModelCell]) -> Axis:
    kind = "useful pixels" if cells[0].haloed else "pixels"
    return Axis(f"{kind.capitalize()} a second", f"{kind}/s")


def memory_panel(cells: Sequence[ModelCell]) -> Panel:
    """Peak memory by tile, and the budget if there is one."""
    budget, axis = cells[0].budget_bytes, _memory_axis(cells)
    limits = [(budget, "budget")] if np.isfinite(budget) else []
    return _by_tile(cells, axis, peaks_of(cells), None, limits)


def rate_panels(cells: Sequence[ModelCell]) -> list[Panel]:
    """Samples and pixels a second by tile."""
    samples = [cell.samples_per_s for cell in cells]
    pixels = [cell.pixels_per_s for cell in cells]
    axis = Axis("Samples a second", "samples/s")
    panels = []
    for each, rates in ((axis, samples), (_rate_axis(cells), pixels)):
        times = [rate * cell.step_ms for rate, cell in zip(rates, cells, strict=True)]
        # A long step is a low rate.
        ends = [(t / c.ends_ms[1], t / c.ends_ms[0]) for t, c in zip(times, cells, strict=True)]
        panels.append(_by_tile(cells, each, rates, ends))
    return panels


def _by_tile(
    cells: Sequence[ModelCell],
    axis: Axis,
    values: Sequence[float],
    ends: Sequence[tuple[float, float]] | None = None,
    limits: Sequence[tuple[float, str]] = (),
) -> Panel:
    """A line over the tiles for each batch, and crosses above for the cases that failed."""
    tiles = list(dict.fromkeys(cell.tile for cell in cells))
    series = []
    for place, (batch, at) in enumerate(
        sorted(group_by(range(len(cells)), lambda i: cells[i].batch).items())
    ):
        low, high = ([ends[i][side] for i in at] if ends else () for side in (0, 1))
        x, y = [float(tiles.index(cells[i].tile)) for i in at], [values[i] for i in at]
        series.append(Series(f"batch {batch}", x, y, "dots", place, place // 6, low=low, high=high))
    failed = [cell for cell in cells if cell.failed_word]
    if failed:
        finite = [value for value in values if np.isfinite(value)]
        top = 1.1 * max([*finite, *(value for value, _ in limits)], default=1.0)
        by_tile = group_by(failed, lambda cell: float(tiles.index(cell.tile)))
        words = [", ".join(f"{c.batch}: {c.failed_word}" for c in of) for of in by_tile.values()]
        look: dict[str, Any] = {"marker": "x", "texts": words}
        cross = Series("failed", [*by_tile], [top] * len(by_tile), "points", "limit", **look)
        series.append(cross)
    return Panel(axis.name, Axis(_CASE, ticks=tiles), axis, series, limits)


def time_panel(cells: Sequence[ModelCell]) -> Panel:
    """A bar for each case, named by its batch. In training its phases are stacked."""
    tiles = list(dict.fromkeys(cell.tile for cell in cells))
    batches = sorted({cell.batch for cell in cells})
    width = 0.84 / len(batches)
    places = [
        tiles.index(c.tile) + (batches.index(c.batch) - len(batches) / 2 + 0.5) * width
        for c in cells
    ]
    names = [f"{cell.batch} {cell.failed_word}".strip() for cell in cells]
    seconds = [cell.step_ms / 1e3 for cell in cells]
    x, y = Axis(f"{_CASE}, a bar for each batch", ticks=tiles), Axis("Time of a step", "s")
    if not any(cell.phases_ms for cell in cells):
        timed = [cell for cell in cells if np.isfinite(cell.step_ms)]
        low, high = ([cell.ends_ms[side] / 1e3 for cell in cells] for side in (0, 1))
        look: dict[str, Any] = {"low": low, "high": high, "texts": names, "width": 0.86 * width}
        kind = "median" if all(cell.row.get("median_time_ms") for cell in timed) else "mean"
        bars = [Series("", places, seconds, "bars", **look)]
        return Panel(f"Time of a step, {kind}", x, y, bars)
    base = np.zeros(len(cells))
    series = []
    for phase, grey in zip(PHASES, _GREYS, strict=True):
        top = base + [cell.phases_ms.get(phase, np.nan) / 1e3 for cell in cells]
        if np.isfinite(top).any():
            series.append(Series(phase, places, top, "bars", grey, base=base, width=0.86 * width))
            base = np.where(np.isfinite(top), top, base)
    series.append(Series("", places, base, "points", "pale", texts=names, silent=True))
    return Panel("Time of a step, mean of each phase", x, y, series)


def frontier_panel(cells: Sequence[ModelCell]) -> Panel:
    """Each case by memory and throughput. A line joins those that no case beats in both."""
    placed = [
        (peak, cell.pixels_per_s, cell)
        for peak, cell in zip(peaks_of(cells), cells, strict=True)
        if np.isfinite(peak) and np.isfinite(cell.pixels_per_s)
    ]
    best = [placed[i] for i in frontier([(memory, rate) for memory, rate, _ in placed])]
    tiles = list(dict.fromkeys(cell.tile for cell in cells))
    series = [Series("frontier", [b[0] for b in best], [b[1] for b in best], "line", "faint", 1)]
    for place, (batch, same) in enumerate(sorted(group_by(placed, lambda p: p[2].batch).items())):
        for tile, of_tile in group_by(same, lambda each: each[2].tile).items():
            x, y = [each[0] for each in of_tile], [each[1] for each in of_tile]
            name, marker = f"{tile} × {batch}", tiles.index(tile)
            texts = [name if each in best else "" for each in of_tile]
            series.append(Series(name, x, y, "points", place, marker=marker, texts=texts))
    note = "memory not recorded: nothing to weigh throughput against"
    x_axis = _memory_axis(cells)
    return Panel("Memory against throughput", x_axis, _rate_axis(cells), series, note=note)


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
