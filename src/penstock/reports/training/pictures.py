"""The figures of a training: its curves, its phases, its steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from ...base import format_seconds, plural
from ...instruments import PHASES
from ..content import Picture
from ..figures.canvas import (
    LEGEND,
    STYLE,
    Axes,
    Figure,
    blank,
    colour_at,
    heading,
    rolling_mean,
    tidy,
)
from .record import TrainingFolder

_MOST_POINTS = 2000
"""Points of a curve. More do not show."""
_STYLES = ("o-", "s--", "^:")
"""Styles of curves: one for the first colours, the next for those that come again."""


def training_pictures(run: TrainingFolder) -> list[Picture]:
    """Curves by epoch, phases of each epoch, and the times of steps."""
    pictures = []
    losses = {name: values for name, values in run.scores.items() if name.endswith("loss")}
    others = {name: values for name, values in run.scores.items() if name not in losses}
    for name, what, curves in (("loss", "Loss", losses), ("scores", "Scores", others)):
        if curves:
            each = [f"{n} from {v[0][1]:.4g} to {v[-1][1]:.4g}" for n, v in curves.items()]
            pictures.append(
                Picture(
                    name,
                    f"{what} by epoch.",
                    f"{what} over {plural(len(run.history), 'epoch')}: {'; '.join(each)}.",
                    partial(draw_curves, what, curves),
                )
            )
    if run.steps:
        pictures += [_phases_picture(run), _steps_picture(run)]
    return pictures


def draw_curves(title: str, curves: dict[str, list[tuple[int, float]]]) -> Figure:
    """Draw each score over epochs."""
    figure = blank(7.0, 4.2)
    heading(figure, title, "one value for each epoch; one run")
    axis = figure.subplots()
    tidy(axis, x="Epoch", y=title)
    for place, (name, points) in enumerate(curves.items()):
        x, y = zip(*points, strict=True)
        label = name.replace("_", " ")
        style = _STYLES[place // len(STYLE["colours"]) % len(_STYLES)]
        axis.plot(np.add(x, 1), y, style, markersize=4, color=colour_at(place), label=label)
    _whole_epochs(axis, max(points[-1][0] + 1 for points in curves.values()))
    figure.legend(loc="outside lower center", ncols=4, **LEGEND)
    return figure


def _whole_epochs(axis: Axes, last: int) -> None:
    """Show whole epochs, even if there is only one."""
    axis.set_xlim(0.5, last + 0.5)
    axis.locator_params(axis="x", integer=True, min_n_ticks=1)


def _phases_picture(run: TrainingFolder) -> Picture:
    steps = run.steps[0]
    phases = {name: shares for name in PHASES if (shares := steps.shares(name))}
    each = [f"{name.replace('_', ' ')} {np.mean(s):.0%}" for name, s in phases.items()]
    return Picture(
        "phases",
        f"The phases of the steps of each epoch, rank {steps.rank}.",
        f"Mean share of the steps over epochs: {', '.join(each) or 'no phase was timed'}.",
        partial(draw_phases, phases, steps.rank),
    )


def draw_phases(phases: dict[str, list[float]], rank: int) -> Figure:
    """Draw the shares of phases, a bar for each epoch."""
    figure = blank(7.0, 4.2)
    heading(figure, "What a step does", f"share of the steps of an epoch, rank {rank}")
    axis = figure.subplots()
    tidy(axis, x="Epoch", y="Share of the time (%)")
    count = max(map(len, phases.values()), default=0)
    bottom = np.zeros(count)
    for name, shares in phases.items():
        heights = np.zeros(count)
        heights[: len(shares)] = np.multiply(shares, 100)
        colour = colour_at(list(PHASES).index(name))
        label = name.replace("_", " ")
        axis.bar(np.arange(1, count + 1), heights, bottom=bottom, color=colour, label=label)
        bottom += heights
    _whole_epochs(axis, max(1, count))
    axis.grid(visible=False, axis="x")
    if phases:
        figure.legend(loc="outside lower center", ncols=3, **LEGEND)
    return figure


def _steps_picture(run: TrainingFolder) -> Picture:
    seconds = [each.seconds["step"] for each in run.steps]
    every = np.concatenate(seconds)
    every = every[np.isfinite(every)]
    low, middle, high = np.quantile(every, [0, 0.5, 1]) if every.size else (0.0, 0.0, 0.0)
    words = [format_seconds(float(value)) for value in (low, middle, high)]
    return Picture(
        "steps",
        "Time of each step; the line is a rolling mean.",
        f"Time of {plural(every.size, 'step')} of {plural(len(seconds), 'rank')}: from {words[0]} "
        f"to {words[2]}, {words[1]} in the median.",
        partial(draw_steps, seconds, [each.rank for each in run.steps]),
    )


def draw_steps(seconds: Sequence[np.ndarray], ranks: Sequence[int]) -> Figure:
    """Draw the time of steps, a colour for each of the first ranks."""
    figure = blank(7.0, 4.2)
    heading(figure, "Time of a step", f"{len(ranks)} ranks" if len(ranks) > 1 else "one rank")
    axis = figure.subplots()
    tidy(axis, x="Step", y="Milliseconds")
    colours = len(STYLE["colours"])
    for place, (rank, values) in enumerate(zip(ranks[:colours], seconds[:colours], strict=True)):
        every = max(1, -(-len(values) // _MOST_POINTS))
        x = np.arange(1, len(values) + 1)
        smooth = rolling_mean(1e3 * values, max(1, len(values) // 50))
        colour = colour_at(place)
        if len(ranks) == 1:
            axis.plot(
                x[::every], 1e3 * values[::every], ".", markersize=1.5, alpha=0.4, color=colour
            )
        axis.plot(x[::every], smooth[::every], linewidth=1.6, color=colour, label=f"rank {rank}")
    axis.locator_params(axis="x", integer=True, min_n_ticks=1)
    finite = np.concatenate([values[np.isfinite(values)] for values in seconds])
    if finite.size:  # a first step may take a thousand times as long
        axis.set_ylim(0, 1.5e3 * float(np.quantile(finite, 0.99)) or 1.0)
    if len(ranks) > 1:
        figure.legend(loc="outside lower center", ncols=4, **LEGEND)
    return figure
