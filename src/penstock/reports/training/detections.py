"""Pictures of detections: some samples of the validation, with true boxes and predicted ones."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base import PICTURES, UsageError, plural, require
from ..content import Picture
from ..figures.canvas import LEGEND, STYLE, TEXT, Figure, blank, colour_at, heading

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
    true, predicted = sum(len(s.true) for s in samples), sum(len(s.predicted) for s in samples)
    return [
        Picture(
            "detections",
            "True boxes and those that the best model predicts, on the chips of the validation "
            "with the most objects.",
            f"{plural(len(samples), 'chip')} with {plural(true, 'true box')} and "
            f"{plural(predicted, 'predicted box')} at the best threshold.",
            partial(draw_detections, samples),
        )
    ]


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
    """Draw each sample in greys, with its boxes."""
    across = min(3, len(samples))
    down = -(-len(samples) // across)
    figure = blank(3.4 * across, 3.5 * down + 1.2)
    heading(figure, "Detections", "true boxes are drawn 3 pixels wider")
    rectangle = require("matplotlib.patches", "plot").Rectangle
    axes = figure.subplots(down, across, squeeze=False).ravel()
    looks = (("true", colour_at(2), "-", 3.0), ("predicted", colour_at(1), "--", 0.0))
    for axis, sample in zip(axes, samples, strict=False):
        axis.imshow(sample.image, cmap="gray", vmin=0, vmax=255)
        axis.set(xticks=[], yticks=[])
        axis.set_title(sample.name, **TEXT | {"fontsize": STYLE["small"]})
        for which, colour, line, around in looks:
            for x0, y0, x1, y1 in getattr(sample, which)[:_MOST_BOXES]:
                corner, more = (x0 - around, y0 - around), 2 * around
                look = {"fill": False, "ec": colour, "ls": line, "lw": 1.2}
                axis.add_patch(rectangle(corner, x1 - x0 + more, y1 - y0 + more, **look))
    for axis in axes[len(samples) :]:
        axis.set_axis_off()
    drawn = [rectangle((0, 0), 1, 1, fill=False, ec=c, ls=line, lw=1.2) for _, c, line, _ in looks]
    figure.legend(drawn, ["true", "predicted"], loc="outside lower center", ncols=2, **LEGEND)
    return figure
