"""The figures of a benchmark of loaders and of its ladders.

    loader   the time of a batch by threads: a panel for each batch size, a line for each loader, or
             a bar if there is one number of threads
    ladder   what a batch costs at each rung: a panel for each batch size and number of threads

Cases that differ in anything else have figures of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...base import format_seconds, plural, significant
from ..loader.cell import LoaderCell
from ..loader.rungs import RUNGS, Ladder
from .chart import Axis, Figure, Panel, Series
from .queue_chart import column_of


def draw_loader(cells: Sequence[LoaderCell], source: str) -> Figure:
    """The time of a batch by threads, or by loader if there is one number of threads."""
    fastest_first = sorted(cells, key=lambda cell: float(cell.row["seconds_per_batch"] or "inf"))
    loaders = list(dict.fromkeys(cell.loader for cell in fastest_first))
    threads = sorted({cell.threads for cell in cells})
    words = [cells[0].row["data"]]
    words += [plural(count, "thread") for count in threads if len(threads) == 1]
    about = f"{', '.join(words)}; {plural(len(cells), 'case')} of {source}"
    panels = []
    for batch in sorted({cell.batch for cell in cells}):
        of_batch = [cell for cell in cells if cell.batch == batch]
        draw = _bars if len(threads) == 1 else _lines
        panels.append(draw(f"Batches of {batch}", of_batch, loaders))
    return Figure("Time of a batch", about, panels, 2)


def _lines(title: str, cells: Sequence[LoaderCell], loaders: Sequence[str]) -> Panel:
    """Lines over threads. Loaders differ by factors: on a linear axis the fast ones would
    overlap."""
    series = []
    for place, loader in enumerate(loaders):
        line = sorted((c for c in cells if c.loader == loader), key=lambda cell: cell.threads)
        x, (seconds, low, high) = column_of(line, "threads"), _seconds_of(line)
        look: dict[str, Any] = {"colour": place, "dashes": place // 6, "low": low, "high": high}
        series += [Series(loader, x, seconds, "dots", **look)] * bool(line)
    return Panel(title, Axis("Threads", whole=True), Axis("Time", "s", log=True), series)


def _bars(title: str, cells: Sequence[LoaderCell], loaders: Sequence[str]) -> Panel:
    series = []
    for colour, ours in enumerate((True, False)):
        same = [cell for cell in cells if cell.loader.startswith("penstock") is ours]
        seconds, low, high = _seconds_of(same)
        texts = [format_seconds(value) for value in seconds]
        places = [float(loaders.index(cell.loader)) for cell in same]
        series += [
            Series(label, places, seconds, "bars", colour, low=low, high=high, texts=texts)
            for label in (["Penstock" if ours else "others"] if same else [])
        ]
    return Panel(title, Axis("Loader", ticks=loaders), Axis("Time", "s"), series)


def _seconds_of(cells: Sequence[LoaderCell]) -> list[Any]:
    """The seconds of a batch of each cell, and the ends of their intervals."""
    return [column_of(cells, n) for n in ("seconds_per_batch", "low_seconds", "high_seconds")]


def draw_ladders(ladders: Sequence[Ladder]) -> Figure:
    """What each rung of a batch costs beyond the rung below it. The largest cost is marked."""
    case = next(iter(ladders[0].rungs.values())).case
    where = f"{case['data']}, cache {case['cache']}"
    return Figure("Cost of a batch, step by step", where, list(map(_ladder_panel, ladders)), 2)


def _ladder_panel(ladder: Ladder) -> Panel:
    names = list(ladder.measured)
    first = ladder.measured[names[0]]
    ends = np.array(list(ladder.seconds.values()))
    starts = np.array([0.0, *ends[:-1]])
    notes = [
        f"{format_seconds(end)}, {significant((ladder.measured[n].speed('bytes') or 0) / 1e6)} MB/s"
        for n, end in zip(names, ends, strict=True)
    ]
    series = []
    for label, marked in (("a step", False), ("the largest cost", True)):
        at = [place for place, name in enumerate(names) if (name == ladder.limiting) is marked]
        texts = [notes[place] for place in at]
        look: dict[str, Any] = {"base": starts[at], "texts": texts, "colour": int(marked)}
        series += [Series(label, np.array(at, float), ends[at], "bars", **look)] * bool(at)
    labels = [f"{name} {RUNGS[name]}" for name in names]
    labels[0] = f"up to {labels[0]}"
    title = f"Batches of {first.batch}, {plural(first.threads, 'thread')}"
    return Panel(title, Axis("Step", ticks=labels), Axis("Time", "s"), series)
