"""The figure of a model benchmark, drawn from its CSV: five panels for each group of cells.

    peak memory by tile           samples a second by tile           pixels a second by tile
    time of a step, by phase in training             memory against throughput, and the frontier

The first three have a line for each batch. Rates, times and their intervals are of the median step;
a row of the seed has no median, and its mean is drawn.

Cells that differ only in tile and batch share a figure. Only these are joined by a line. If a case
has several rows, the latest is drawn, and the line below the title counts them. A case that failed
is a cross in a band of its own, in the colour of its batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ...base import UsageError, plural
from ...bench import pixels_of
from ..cell import latest
from ..model.cell import ModelCell
from ..model.report import labelled
from ..table import reading_numbers
from .canvas import LEGEND, Axes, Figure, blank, heading, save_under
from .marks import Marks
from .panels import draw_frontier, draw_memory, draw_pixels, draw_samples, draw_times


def plot_bench(path: Path, out_prefix: str | Path, replace: bool = False) -> list[Path]:
    """Draw memory, throughput and time of a benchmark of models to ``<out_prefix>.png``.

    If models, modes, devices or other knobs differ, there is a figure for each group. The knobs
    that differ are added to the names of the files.

    Args:
        path: A CSV of ``penstock bench model``, of any version, or the seed's.
        out_prefix: The path of the figures without the suffix ``.png``.
        replace: Replace figures that Penstock did not write.

    Returns:
        The files that were written.

    Raises:
        UsageError: The file is not such a CSV, a field is no number, or there is nothing to draw.
    """
    return save_under(out_prefix, bench_figures(path), replace)


def bench_figures(path: Path) -> dict[str, Figure]:
    """The figures of `plot_bench` by the end of their file names; a single one has none."""
    path = Path(path)
    groups = labelled(ModelCell.of_csv(path))
    if not groups:
        raise UsageError(f"{path} holds no row to plot")
    words = [label.split(", ") for label, _ in groups]
    figures: dict[str, Figure] = {}
    for (label, cells), named in zip(groups, words, strict=True):
        apart = [word for word in named if not all(word in other for other in words)]
        name = re.sub(r"[^\w.-]+", "_", "_".join(apart))
        with reading_numbers(path.name):
            figures[name] = draw(label, cells, path.name)
    return figures


def draw(label: str, cells: Sequence[ModelCell], source: str) -> Figure:
    """Draw one group of cells, small tiles and batches first."""
    last = latest(cells, lambda cell: cell.has_result)
    drawn = sorted(last, key=lambda cell: (pixels_of(cell.tile), cell.batch))
    marks, on_host = Marks.of(drawn), cells[0].row.get("device", "cpu") == "cpu"
    figure = blank(13, 8.4, pads=(0.12, 0.1))
    heading(figure, label, _facts(len(cells), drawn, source))
    axes = figure.subplot_mosaic("MMSSPP;TTTFFF")  # by the initials of the panels
    draw_memory(axes["M"], drawn, marks, on_host)
    draw_samples(axes["S"], drawn, marks)
    draw_pixels(axes["P"], drawn, marks)
    draw_times(axes["T"], drawn, marks)
    draw_frontier(axes["F"], drawn, marks, on_host)
    figure.legend(handles=marks.legend(), loc="outside lower center", ncols=8, **LEGEND)
    return figure


def draw_one(
    draw_panel: Callable[[Axes, Sequence[ModelCell], Marks], None],
    cells: Sequence[ModelCell],
    label: str,
) -> Figure:
    """Draw one panel of a group of cells as a figure of its own."""
    drawn = sorted(cells, key=lambda cell: (pixels_of(cell.tile), cell.batch))
    marks = Marks.of(drawn)
    figure = blank(7.6, 5.0)
    facts = _facts(len(cells), drawn, "records").partition("  ·  ")[2]
    heading(figure, label, "  ·  ".join(filter(None, (plural(len(cells), "case"), facts))))
    draw_panel(figure.subplots(), drawn, marks)
    figure.legend(handles=marks.legend(), loc="outside lower center", ncols=5, **LEGEND)
    return figure


def _facts(rows: int, drawn: Sequence[ModelCell], source: str) -> str:
    latest_of = f", the latest of each of {len(drawn)} cases" if rows > len(drawn) else ""
    facts = [f"{plural(rows, 'row')} of {source}{latest_of}"]
    launches = sorted({int(c.row["launches"]) for c in drawn if int(c.row.get("launches") or 0)})
    if launches:
        fewest = f"{launches[0]} to " if len(launches) > 1 else ""
        facts.append(f"{fewest}{plural(launches[-1], 'launch')} of a case")
    if any(np.isfinite(cell.ends_ms[0]) for cell in drawn):
        facts.append("whiskers: 95 % interval")
    return "  ·  ".join(facts)
