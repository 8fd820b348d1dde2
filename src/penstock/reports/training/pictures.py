"""The figures of a training: its curves, its phases, its steps; and some samples of the validation,
with true boxes and predicted ones."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base import PICTURES, format_seconds, plural, well_formed
from ...instruments import PHASES
from ..charts.chart import Axis, Boxes, Figure, Image, Panel, Series, greys, rolling_mean, thinned
from ..content import Picture
from .fit_files import Steps, TrainingFolder

_MOST_POINTS = 1000
_MOST_RANKS = 6
"""Points of a curve. More do not show."""


def training_pictures(run: TrainingFolder) -> list[Picture]:
    """Curves by epoch, phases of each epoch, the times of steps, and detections."""
    pictures = []
    losses = {name: values for name, values in run.scores.items() if name.endswith("loss")}
    others = {name: values for name, values in run.scores.items() if name not in losses}
    for name, what, curves in (("loss", "Loss", losses), ("scores", "Scores", others)):
        if curves:
            pictures.append(Picture(name, f"{what} by epoch.", partial(draw_curves, what, curves)))
    if run.steps:
        caption = f"The phases of the steps of each epoch, rank {run.steps[0].rank}."
        pictures.append(Picture("phases", caption, partial(draw_phases, run.steps[0])))
        caption = "Time of each step; the line is a rolling mean."
        pictures.append(Picture("steps", caption, partial(draw_steps, run.steps)))
    return [*pictures, *detection_pictures(run.folder)]


def draw_curves(title: str, curves: dict[str, list[tuple[int, float]]]) -> Figure:
    """Each score over epochs."""
    series = []
    for place, (name, points) in enumerate(curves.items()):
        x, y = zip(*points, strict=True)
        look: dict[str, Any] = {"colour": place, "dashes": place // 6, "marker": place // 6}
        series.append(Series(name.replace("_", " "), np.add(x, 1.0), y, "dots", **look))
    panel = Panel("", Axis("Epoch", whole=True), Axis(title, zero=False), series)
    return Figure(title, "one value for each epoch; one run", [panel])


def draw_phases(steps: Steps) -> Figure:
    """The shares of phases, a bar for each epoch."""
    phases = {name: shares for name in PHASES if (shares := steps.shares(name))}
    count = max(map(len, phases.values()), default=0)
    base, series = np.zeros(count), []
    for name, shares in phases.items():
        heights = np.zeros(count)
        heights[: len(shares)] = np.multiply(shares, 100)
        look: dict[str, Any] = {"colour": list(PHASES).index(name), "base": base}
        base = base + heights
        epochs = np.arange(1.0, count + 1)
        series.append(Series(name.replace("_", " "), epochs, base, "bars", **look))
    panel = Panel("", Axis("Epoch", whole=True), Axis("Share of the time", "%"), series)
    return Figure("What a step does", f"share of the steps of an epoch, rank {steps.rank}", [panel])


def draw_steps(ranks: Sequence[Steps]) -> Figure:
    """The time of steps, a colour for each of the first ranks."""
    series = []
    for place, each in enumerate(ranks[:_MOST_RANKS]):
        values = each.seconds["step"]
        x = np.arange(1.0, len(values) + 1)
        smooth = rolling_mean(values, max(1, len(values) // 50))
        if len(ranks) == 1:
            at = thinned(values, _MOST_POINTS)
            raw: dict[str, Any] = {"colour": place, "faint": True, "silent": True}
            series.append(Series("", x[at], values[at], "line", **raw))
        at = thinned(smooth, _MOST_POINTS)
        series.append(Series(f"rank {each.rank}", x[at], smooth[at], "line", place))
    finite = np.concatenate([each.seconds["step"] for each in ranks])
    finite = finite[np.isfinite(finite)]
    # A first step may take a thousand times as long.
    most = 1.5 * float(np.quantile(finite, 0.99)) if finite.size else None
    y = Axis("Time of a step", "s", high=most or None)
    panel = Panel("", Axis("Step", whole=True), y, series)
    note = plural(len(ranks), "rank")
    if most and finite.max() > most:
        longer = plural(int((finite > most).sum()), "step")
        note += f"; {longer} above the axis, of up to {format_seconds(float(finite.max()))}"
    return Figure("Time of a step", note, [panel])


MOST_SHOWN = 12
"""The most samples that are drawn."""
_MOST_BOXES = 500
"""Boxes of a sample that are drawn. More hide the picture."""


class Detections(NamedTuple):
    """One sample."""

    name: str
    image: NDArray[Any]
    """Greys, (row, column)."""
    true: NDArray[Any]
    """Boxes of objects that are there: x0, y0, x1, y1 in pixels."""
    predicted: NDArray[Any]
    """Boxes that the model predicted."""
    scores: NDArray[Any]


_ARRAYS = Detections._fields[1:]


def detection_pictures(folder: Path) -> list[Picture]:
    """The picture of the detections of a training's best model.

    Args:
        folder: The folder of the training.

    Returns:
        One picture; none if the training left no such file.

    Raises:
        UsageError: The file is not as a training leaves it.
    """
    samples = read_detections(folder / PICTURES)
    if not samples:
        return []
    caption = (
        "True boxes and those that the best model predicts, on the chips of the validation with "
        "the most objects."
    )
    return [Picture("detections", caption, partial(draw_detections, samples))]


def read_detections(path: Path) -> list[Detections]:
    """The samples of a file of pictures; none if there is no file.

    Raises `UsageError` if it cannot be read.
    """
    if not path.is_file():
        return []
    with (
        well_formed(f"{path} is not as a training leaves it", OSError, zipfile.BadZipFile),
        np.load(path, allow_pickle=False) as file,
    ):
        return [
            Detections(str(name), *(file[f"{array}_{number}"] for array in _ARRAYS))
            for number, name in enumerate(file["names"][:MOST_SHOWN])
        ]


def draw_detections(samples: Sequence[Detections]) -> Figure:
    """Each sample in greys, with its boxes."""
    panels = []
    for sample in samples:
        boxes = []
        for label, colour, dashes, around in (("true", 2, 0, 3.0), ("predicted", 1, 1, 0.0)):
            corners = np.asarray(getattr(sample, label), np.float64)[:_MOST_BOXES].reshape(-1, 4)
            places = corners + np.array([-around, -around, around, around])
            boxes.append(Boxes(label, places.tolist(), colour, dashes))
        image = Image(greys(sample.image, 0, 255), boxes)
        panels.append(Panel(sample.name, image=image))
    return Figure("Detections", "true boxes are drawn 3 pixels wider", panels, 3)
