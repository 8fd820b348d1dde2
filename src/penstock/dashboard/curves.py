"""Curves of runs in one figure, by step, epoch or time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .compare import Selected, group_of
from .listed_run import Floats, RunCurve
from .sheet import Cell, Sheet
from .view import Axis

_FIRST_CURVES = (
    "train_loss", "val_loss", "train_loss_step", "val_acc", "step_s",
    "cpu_percent", "rss_bytes", "gpu0_util_percent", "gpu0_memory_bytes",
    "read_bytes_per_s", "write_bytes_per_s",
)  # fmt: skip
_PLACES: dict[Axis, str] = {"step": "steps", "epoch": "epochs", "seconds": "times"}
MOST_POINTS = 2000
"""Most points of a curve that are drawn."""


class Drawn(NamedTuple):
    """A curve of a run, with as many points as a screen shows."""

    name: str
    group: str
    place: int
    """The run's place among the selected ones."""
    x: Floats
    y: Floats


def curve_choices(selected: Sequence[Selected], of_machine: bool) -> list[str]:
    """The names of curves, the most important first."""
    names = {
        name
        for each in selected
        for name, curve in each.details.curves.items()
        if curve.of_machine is of_machine
    }
    return [n for n in _FIRST_CURVES if n in names] + sorted(names - {*_FIRST_CURVES})


def drawn_curves(
    selected: Sequence[Selected], metric: str, axis: Axis, group: str
) -> tuple[list[Drawn], list[str]]:
    """The curves of a metric, in one figure.

    Args:
        selected: The runs.
        metric: The name of the metric.
        axis: The quantity along x.
        group: What runs are grouped by; empty for no groups.

    Returns:
        The curves, and a sentence on each run that has none along this axis.
    """
    drawn, notes = [], []
    for place, each in enumerate(selected):
        curve = each.details.curves.get(metric)
        if curve is None:
            of_worker = next((n for n in each.details.curves if n.endswith(f"/{metric}")), None)
            if of_worker:
                notes.append(f"{each.name} has {metric} for each worker: choose {of_worker}.")
            continue
        x, y = _finite(curve, axis)
        if not len(x):
            notes.append(f"{each.name} has no {_PLACES[axis]} for {metric}.")
            continue
        name = group_of(each, group) if group else ""
        drawn.append(Drawn(each.name, name, place, *thinned(x, y)))
    return drawn, notes


def _finite(curve: RunCurve, axis: Axis) -> tuple[Floats, Floats]:
    x = {"step": curve.steps, "epoch": curve.epochs, "seconds": curve.seconds}[axis]
    at = np.isfinite(x) & np.isfinite(curve.values)
    return x[at], curve.values[at]


def thinned(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """Thin a curve to at most `MOST_POINTS`: each piece keeps its least and its greatest value.

    >>> x = np.arange(10_000.0)
    >>> len(thinned(x, x)[0]), float(thinned(x, x == 77)[1].max())
    (2000, 1.0)
    """
    if len(x) <= MOST_POINTS:
        return x, y
    edges = np.linspace(0, len(x), MOST_POINTS // 2 + 1).astype(int)
    places: list[int] = []
    for begin, end in pairwise(edges):
        piece = y[begin:end]
        places += sorted((begin + int(piece.argmin()), begin + int(piece.argmax())))
    return x[places], np.asarray(y, np.float64)[places]


def curves_sheet(selected: Sequence[Selected], metrics: Sequence[str]) -> Sheet:
    """All points of curves, not thinned."""
    rows = list(_rows(selected, metrics))
    return Sheet("Curves", ["run", "metric", "step", "epoch", "seconds", "value"], rows)


def _rows(selected: Sequence[Selected], metrics: Sequence[str]) -> Iterator[list[Cell]]:
    for each in selected:
        for metric in metrics:
            curve = each.details.curves.get(metric)
            if curve is not None:
                columns = (curve.steps, curve.epochs, curve.seconds, curve.values)
                for row in zip(*(column.tolist() for column in columns), strict=True):
                    yield [each.name, metric, *row]
