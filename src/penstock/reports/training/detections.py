"""Pictures of detections: some samples of the validation, with true boxes and predicted ones."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base import PICTURES, UsageError
from ..charts.chart import Boxes, Figure, Image, Panel, greys
from ..content import Picture

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
    caption = "True boxes and those that the best model predicts, on the chips of the validation "
    caption += "with the most objects."
    return [Picture("detections", caption, partial(draw_detections, samples))]


def read_detections(path: Path) -> list[Detections]:
    """The samples of a file of pictures; none if there is no file.

    Raises `UsageError` if it cannot be read.
    """
    if not path.is_file():
        return []
    try:
        with np.load(path, allow_pickle=False) as file:
            return [
                Detections(str(name), *(file[f"{array}_{number}"] for array in _ARRAYS))
                for number, name in enumerate(file["names"][:MOST_SHOWN])
            ]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise UsageError(f"{path} is not as a training leaves it: {error}") from error


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
