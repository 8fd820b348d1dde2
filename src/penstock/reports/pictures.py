"""The figures of a ledger's report, each with a caption and its numbers in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from ..base import format_bytes, format_count, format_seconds, group_by, plural
from ..instruments import Record
from .cell import Kind, middle
from .content import Picture
from .figures.heat import draw_peaks, draw_rates
from .figures.loader import draw_ladders, draw_loader
from .figures.model import draw_one
from .figures.panels import draw_frontier, draw_times, frontier
from .figures.queue import draw_queue
from .figures.suite import draw as draw_suite
from .loader.cell import loader_cells
from .loader.ladder import Ladder, ladders_of, same_case_but_rung
from .model.cell import ModelCell, model_cells
from .model.report import labelled
from .queue.cell import QueueCell, queue_cells
from .suite.cell import SuiteCell, runs_together
from .words import listed

_BARS = 48
"""Bars of more cases than this are too thin to read."""


def model_pictures(records: Iterable[Record]) -> list[Picture]:
    """Heat maps of throughput and memory, the frontier and times, for each group of cells."""
    pictures = []
    for number, (label, cells) in enumerate(labelled(model_cells(records)), 1):
        on_host = cells[0].row.get("device", "cpu") == "cpu"
        rates = [cell.pixels_per_s for cell in cells]
        peaks = [cell.peak_bytes(on_host) for cell in cells]
        kind = "useful pixels" if cells[0].haloed else "pixels"
        pictures.append(
            Picture(
                f"model_rates_{number}",
                f"{kind.capitalize()} a second by tile and batch, {label}.",
                _map_words(f"{kind} a second", cells, rates, format_count),
                partial(draw_rates, cells, label),
            )
        )
        if np.isfinite(peaks).any():
            pictures += [
                Picture(
                    f"model_peaks_{number}",
                    f"Peak memory by tile and batch, {label}.",
                    _map_words("peak memory", cells, peaks, format_bytes),
                    partial(draw_peaks, cells, label),
                ),
                Picture(
                    f"model_frontier_{number}",
                    "Memory against throughput; the line joins the cases that none beats in both.",
                    _frontier_words(cells, peaks, rates),
                    partial(draw_one, partial(draw_frontier, on_host=on_host), cells, label),
                ),
            ]
        if len(cells) <= _BARS:
            times = [cell.step_ms / 1e3 for cell in cells]
            pictures.append(
                Picture(
                    f"model_times_{number}",
                    "Time of a step by tile and batch; whiskers are 95 % intervals.",
                    _map_words("time of a step", cells, times, format_seconds),
                    partial(draw_one, draw_times, cells, label),
                )
            )
    return pictures


def _map_words(
    what: str, cells: Sequence[ModelCell], values: Sequence[float], words: Callable[[float], str]
) -> str:
    measured = [(v, cell) for v, cell in zip(values, cells, strict=True) if np.isfinite(v)]
    failed = [
        f"{cell.tile} x {cell.batch} {cell.failed_word}" for cell in cells if cell.failed_word
    ]
    line = f"Of {plural(len(cells), 'case')} none has a {what}."
    if measured:
        (low, a), (high, b) = (end(measured, key=lambda each: each[0]) for end in (min, max))
        line = (
            f"{what.capitalize()} of {plural(len(measured), 'case')}: from {words(low)} at tile "
            f"{a.tile}, batch {a.batch} to {words(high)} at tile {b.tile}, batch {b.batch}."
        )
    return f"{line} Failed: {listed(failed)}." if failed else line


def _frontier_words(
    cells: Sequence[ModelCell], peaks: Sequence[float], rates: Sequence[float]
) -> str:
    points = [
        (peak, rate, cell)
        for peak, rate, cell in zip(peaks, rates, cells, strict=True)
        if np.isfinite(peak) and np.isfinite(rate)
    ]
    best = [points[i] for i in frontier([(peak, rate) for peak, rate, _ in points])]
    each = [
        f"tile {cell.tile}, batch {cell.batch} with {format_bytes(peak)} and {format_count(rate)} "
        "pixels a second"
        for peak, rate, cell in best
    ]
    return f"On the frontier of {plural(len(points), 'case')}: {listed(each) or 'none'}."


def loader_pictures(records: Iterable[Record]) -> list[Picture]:
    """Seconds of a batch by threads, for each group of loaders, and the ladders below them."""
    records = list(records)
    pictures = []
    groups = group_by(_measured(loader_cells(records)), lambda cell: cell.group).values()
    for number, cells in enumerate(groups, 1):
        each = [
            f"{c.loader}, batch {c.batch}, {plural(c.threads, 'thread')}: "
            f"{format_seconds(c.seconds or 0.0)}"
            for c in cells
        ]
        pictures.append(
            Picture(
                f"loader_{number}",
                "Seconds for a batch; lines and whiskers are 95 % intervals over launches.",
                f"Seconds for a batch. {'; '.join(each)}.",
                partial(draw_loader, cells, "records"),
            )
        )
    return pictures + ladder_pictures(records)


def ladder_pictures(records: Iterable[Record]) -> list[Picture]:
    """What a batch costs at each rung, for each group of ladders."""
    ladders = [ladder for ladder in ladders_of(records) if ladder.measured]
    return [
        Picture(
            f"ladder_{number}",
            "Cost of a batch, step by step: each step does what the one above it does, and more.",
            " ".join(map(_ladder_words, group)),
            partial(draw_ladders, group),
        )
        for number, group in enumerate(same_case_but_rung(ladders), 1)
    ]


def _ladder_words(ladder: Ladder) -> str:
    first = next(iter(ladder.measured.values()))
    steps = [f"{name} {format_seconds(seconds)}" for name, seconds in ladder.seconds.items()]
    return f"Batch {first.batch}, {plural(first.threads, 'thread')}: {', '.join(steps)}."


def queue_pictures(records: Iterable[Record]) -> list[Picture]:
    """The depth of the queue over time, measured and simulated, and seconds per iteration."""
    groups = [_measured(group) for group in queue_cells(records)]
    return [
        Picture(
            f"queue_{number}",
            "Depth of the queue at the end of each iteration, measured (solid) and simulated "
            "(dotted), and the seconds of an iteration.",
            _queue_words(cells),
            partial(draw_queue, cells, "records"),
        )
        for number, cells in enumerate(filter(None, groups), 1)
    ]


def _queue_words(cells: Sequence[QueueCell]) -> str:
    each = []
    for cell in cells:
        took = middle(cell.means)
        depth = cell.left[0] if cell.left else []
        ends = f", depth from {max(depth)} to {depth[-1]}" if depth else ""
        each.append(f"{cell.name}: {format_seconds(took or 0.0)} an iteration{ends}")
    return f"{'; '.join(each)}."


def suite_pictures(records: Iterable[Record]) -> list[Picture]:
    """Throughput, peak memory and waiting over the batch size, for each preset."""
    presets = runs_together(records)
    return [
        Picture(
            f"suite_{number}",
            "Throughput, peak memory and waiting for data over the batch size; crosses failed.",
            _suite_words(runs),
            partial(draw_suite, runs),
        )
        for number, runs in enumerate(presets.values(), 1)
        if any(run.measured for run in runs)
    ]


def _suite_words(runs: Sequence[SuiteCell]) -> str:
    each = [
        f"{run.name}: {run.throughput.value:.3g} samples a second"
        if run.throughput
        else f"{run.name}: {run.status}"
        for run in runs
    ]
    return f"{'; '.join(each)}."


def _measured(cells: Sequence[Kind]) -> list[Kind]:
    """The cells with a launch that was ok."""
    return [cell for cell in cells if cell.launches]
