"""The content of a training's folder, whose files may be missing or damaged, and its figures:
curves, phases, steps; and some samples of the validation, with true boxes and predicted ones."""

from __future__ import annotations

import contextlib
import csv
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base import ARGS, PICTURES, STEPS, UsageError, format_seconds, plural, well_formed
from ...instruments import PHASES, peak_of_ranks, phases_of_ranks
from ...models import read_training_record
from ..charts.chart import Axis, Boxes, Figure, Image, Panel, Series, greys, rolling_mean, thinned
from ..content import Picture

MOST_STEPS = 500_000
"""Steps of a rank that a report reads."""


@dataclass(frozen=True)
class Steps:
    """The steps of one rank. Arrays have a value for each step; a step that was not timed is
    NaN."""

    rank: int
    epoch: NDArray[np.float64]
    loss: NDArray[np.float64]
    seconds: Mapping[str, NDArray[np.float64]]
    """Seconds of ``step`` and of each phase."""

    def shares(self, phase: str) -> list[float]:
        """The share of a phase in the seconds of the steps of each epoch in which it was timed."""
        shares = []
        for number in np.unique(self.epoch[np.isfinite(self.epoch)]):
            at = self.epoch == number
            part, whole = (np.nansum(self.seconds[name][at]) for name in (phase, "step"))
            if whole > 0 and np.isfinite(self.seconds[phase][at]).any():
                shares.append(float(part / whole))
        return shares


@dataclass(frozen=True)
class TrainingFolder:
    """A training, finished or not."""

    folder: Path
    args: Mapping[str, Any]
    results: Mapping[str, Any]
    """Content of training_results.json; empty before the end of the first epoch."""

    @classmethod
    def read(cls, folder: Path) -> TrainingFolder:
        """Read the folder of a training.

        Raises `UsageError` if it is none.
        """
        record = read_training_record(folder)
        if not (record.args or record.results):
            raise UsageError(f"{folder} is not the folder of a training")
        return cls(folder, record.args, record.results)

    @cached_property
    def steps(self) -> Sequence[Steps]:
        """The steps of each rank. They are read when they are asked for, because a list of many
        trainings does not show them."""
        paths = sorted((self.folder / STEPS).glob("rank*.csv"))
        steps = [each for path in paths if (each := _steps(path)) is not None]
        return sorted(steps, key=lambda each: each.rank)

    @property
    def began(self) -> float | None:
        """The time at which it was started."""
        file = self.folder / ARGS
        return file.stat().st_mtime if file.is_file() else None

    @property
    def workload(self) -> str:
        return str(self.results.get("workload") or self.args.get("workload") or "training")

    @property
    def history(self) -> list[dict[str, Any]]:
        """A row for each epoch."""
        rows = self.results.get("history") or []
        return [row for row in rows if isinstance(row, dict)]

    @cached_property
    def scores(self) -> dict[str, list[tuple[int, float]]]:
        """The values of each score by epoch: losses, accuracies and the like."""
        scores: dict[str, list[tuple[int, float]]] = {}
        values = [(row, name, value) for row in self.history for name, value in row.items()]
        for row, name, value in values:
            timed = name in ("train_s", "val_s") or not name.startswith(("train_", "val_"))
            if not timed and isinstance(value, int | float):
                scores.setdefault(name, []).append((int(row["epoch"]), float(value)))
        return scores

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase, the mean over ranks; empty if none was timed."""
        return phases_of_ranks(self.results)

    @property
    def peaks(self) -> dict[str, int]:
        """The largest peak of memory of any rank, in bytes, by its kind; only those measured."""
        names = ("host_peak", "device_peak", "device_reserved")
        peaks = {name: peak_of_ranks(self.results, name) for name in names}
        return {name: peak for name, peak in peaks.items() if peak is not None}


def _steps(path: Path) -> Steps | None:
    """The steps of a file; None if it holds none."""
    names = ("epoch", "loss", *(f"{name}_s" for name in ("step", *PHASES)))
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        steps = islice(csv.DictReader(file), MOST_STEPS)
        rows = [[_number(row.get(name)) for name in names] for row in steps]
    if not rows:
        return None
    arrays = dict(zip(names, np.array(rows).T, strict=True))
    rank = int("".join(filter(str.isdigit, path.stem)) or 0)
    seconds = {name.removesuffix("_s"): arrays[name] for name in names[2:]}
    return Steps(rank, arrays["epoch"], arrays["loss"], seconds)


def _number(text: Any) -> float:
    with contextlib.suppress(TypeError, ValueError):
        return float(text)
    return float("nan")


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
