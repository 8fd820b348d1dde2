"""Figures beside a result, which a verb can do without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..base import MissingDependency, UsageError, require, writing_output
from .progress import say

if TYPE_CHECKING:
    from ..inference import Cutout


def figures_of(draw: Callable[[], list[Path]]) -> list[Path]:
    """Draw figures. If matplotlib is not installed, print that and go on.

    Args:
        draw: Function that draws the figures and returns their files.

    Returns:
        The files of the figures; empty if they could not be drawn.

    Raises:
        UsageError: They cannot be written.
    """
    try:
        return draw()
    except MissingDependency as error:
        say(f"No figure: {error}")
        return []
    except OSError as error:
        raise UsageError(f"the figures cannot be written: {error.strerror}") from error


def draw_cutouts(picture: Path, cutouts: Sequence[Cutout]) -> Path:
    """Draw objects over scores: each in orange, those around it in blue.

    Args:
        picture: The PNG to write.
        cutouts: The objects.

    Returns:
        The picture.
    """
    columns = min(3, len(cutouts))
    rows = -(-len(cutouts) // columns)
    figure = require("matplotlib.figure", "plot").Figure(
        figsize=(3 * columns, 3.3 * rows), layout="constrained"
    )
    axes = figure.subplots(rows, columns, squeeze=False).reshape(-1)
    for panel in axes:
        panel.set_axis_off()
    for panel, cutout in zip(axes, cutouts, strict=False):
        panel.imshow(cutout.scores, cmap="gray")
        for where, color in ((cutout.around, (0.2, 0.5, 1, 0.35)), (cutout.body, (1, 0.5, 0, 0.5))):
            panel.imshow(where[..., None] * color)
        place = " ".join(map(str, cutout.low))
        panel.set_title(
            f"{cutout.number}: {cutout.voxels:,} voxels\nfrom z y x {place}", fontsize=8
        )
    with writing_output(picture, replace=True) as draft:
        figure.savefig(draft, format="png")
    return picture
