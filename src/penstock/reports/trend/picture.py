"""The figure of a trend: launches by commit, the levels, and the steps between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from ..figures.canvas import STYLE, Axes, Figure, blank, colour_at, heading, tidy
from ..verdicts import percent_words, ratio_words
from .report import Trend, WatchedCases

MOST = 8
"""The most series that a figure shows; those with steps come first."""


def plot_trend(watched: WatchedCases) -> Figure:
    """Draw the series, those with steps first.

    Args:
        watched: The trends of all cases.

    Returns:
        The figure, with a panel for each series.
    """
    trends = sorted(watched.trends, key=lambda trend: not trend.steps)[:MOST]
    figure = blank(STYLE["width"], 2.6 * len(trends) + 0.9)
    axes = figure.subplots(len(trends), squeeze=False)[:, 0]
    several = len({trend.series.machine for trend in watched.trends}) > 1
    for axis, trend in zip(axes, trends, strict=True):
        _draw(axis, trend, several)
    left_out = len(watched.trends) - len(trends)
    more = f"; {left_out} series more are not drawn" if left_out else ""
    heading(
        figure,
        f"{watched.metric} by commit",
        f"dots: launches; lines: medians; {percent_words(watched.rate)} false alarms{more}",
    )
    return figure


def _draw(axis: Axes, trend: Trend, several: bool) -> None:
    points = trend.series.points
    scale, unit = _unit(max(point.level for point in points))
    for place, point in enumerate(points):
        values = np.array(point.samples) * scale
        axis.plot([place] * len(values), values, ".", color=STYLE["faint"], ms=4, zorder=2)
    edges = [0, *(step.at for step in trend.steps), len(points)]
    for begin, end in pairwise(edges):
        level = float(np.median([p.level for p in points[begin:end]])) * scale
        axis.plot([begin - 0.4, end - 0.6], [level] * 2, color=colour_at(0), lw=2, zorder=3)
    for step in trend.steps:
        slower = step.ratio.value > 1
        colour = STYLE["limit"] if slower else colour_at(2)
        axis.axvspan(step.first - 0.5, step.last - 0.45, color=colour, alpha=0.12, lw=0)
        axis.axvline(step.at - 0.5, color=colour, lw=1.2, ls="-" if slower else "--")
        text = f" {'slower' if slower else 'faster'}, {ratio_words(step.ratio)}"
        axis.annotate(
            text, (step.at - 0.5, 0.06), xycoords=("data", "axes fraction"), va="bottom",
            fontsize=STYLE["small"], color=colour,
        )  # fmt: skip
    on = f", machine {trend.series.machine or 'not known'}" if several else ""
    tidy(axis, trend.series.label + on, "", f"time [{unit}]")
    axis.set_ylim(0, 1.1 * max(max(point.samples) for point in points) * scale)
    axis.set_xlim(-0.6, len(points) - 0.4)
    shown = _shown(len(points), [step.at for step in trend.steps])
    axis.set_xticks(shown, [points[place].name for place in shown], rotation=30, ha="right")
    axis.tick_params(labelsize=STYLE["small"])


def _shown(count: int, steps: Sequence[int]) -> list[int]:
    """The points whose commits are named: those at steps, and others if there is room."""
    every = -(-count // 10)
    named = set(steps)
    named |= {n for n in range(0, count, every) if all(abs(n - at) >= every for at in steps)}
    return sorted(named)


def _unit(seconds: float) -> tuple[float, str]:
    """What seconds are multiplied by, and the unit."""
    scales = ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs"))
    return next((scale, unit) for least, scale, unit in scales if seconds >= least)
