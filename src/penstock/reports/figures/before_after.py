"""Planes of a volume before and after a model, and their difference."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from ...base import UsageError, require
from .canvas import STYLE, TEXT, save_figures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def plot_before_after(
    images: Mapping[str, ArrayLike], out: Path, caption: str, replace: bool = False
) -> Path:
    """Save two images and their difference, the second less the first.

    ``images`` are two 2-D arrays of one shape by their titles, in that order. Both are shown
    between the same greys, the 0.5th and 99.5th percentile of the two together; the difference
    about a white zero, out to the 99.5th percentile of its size. Returns ``out``.
    """
    figure = before_after_figure(images, caption)
    save_figures({Path(out): figure}, replace)
    return Path(out)


def before_after_figure(images: Mapping[str, ArrayLike], caption: str) -> Figure:
    """The figure of `plot_before_after`."""
    arrays = [np.asarray(image, np.float64) for image in images.values()]
    if len(arrays) != 2 or arrays[0].ndim != 2 or arrays[0].shape != arrays[1].shape:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise UsageError(f"before and after must be two 2-D images of one shape, not {shapes}")
    difference = arrays[1] - arrays[0]
    low, high = np.nanpercentile(np.stack(arrays), (0.5, 99.5))
    high = high if high > low else low + 1.0
    spread = float(np.nanpercentile(np.abs(difference), 99.5)) or 1.0

    places = _places(*arrays[0].shape)
    lines = textwrap.wrap(caption, int(places.width * 14))
    foot = 0.2 + 0.17 * len(lines)
    width, height = places.width, places.height + foot
    figure: Figure = require("matplotlib.figure", "plot").Figure(
        figsize=(width, height), facecolor="white"
    )

    def axes_at(place: _Place) -> Axes:
        x, y, w, h = place
        axes: Axes = figure.add_axes((x / width, (y + foot) / height, w / width, h / height))
        return axes

    shown = []
    looks = ((arrays[0], "gray", low, high), (arrays[1], "gray", low, high))
    for place, title, (image, colours, least, most) in zip(
        places.images,
        (*images, "difference"),
        (*looks, (difference, "RdBu_r", -spread, spread)),
        strict=True,
    ):
        axes = axes_at(place)
        # The place has the image's proportions, so "auto" stretches only what would be a thread.
        shown.append(axes.imshow(image, cmap=colours, vmin=least, vmax=most, aspect="auto"))
        axes.set_title(title, **TEXT, pad=4)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_color(STYLE["grid"])
    ticker = require("matplotlib.ticker", "plot")
    for place, shown_image in zip(places.bars, shown[1:], strict=True):
        bar = figure.colorbar(
            shown_image,
            cax=axes_at(place),
            orientation="horizontal",
            ticks=ticker.MaxNLocator(4),
            format="{x:,.6g}",
        )
        bar.ax.tick_params(labelsize=STYLE["small"], labelcolor=STYLE["ink"], length=2)
        bar.outline.set_visible(False)
    figure.text(
        0.5,
        (foot - 0.08) / height,
        "\n".join(lines),
        ha="center",
        va="top",
        fontsize=STYLE["small"],
        color=STYLE["faint"],
    )
    return figure


_Place = tuple[float, float, float, float]
"""Left, bottom, width and height in inches."""


@dataclass(frozen=True)
class _Places:
    width: float
    height: float
    images: Sequence[_Place]
    bars: Sequence[_Place]
    """Below the first two images, and below the third."""


def _places(rows: int, columns: int) -> _Places:
    """Where three images of one shape go: side by side, or one below another where they are wide.

    Sizes are inches, measured from the lower left corner.
    """
    margin, gap, title, bar, ticks = 0.2, 0.15, 0.3, 0.09, 0.35
    stacked = columns > 2.5 * rows
    most_width, most_height = (7.2, 2.4) if stacked else (3.1, 5.0)
    scale = min(most_width / columns, most_height / rows)
    width, height = max(columns * scale, 0.4), max(rows * scale, 0.4)
    cell = max(width, 1.8)  # room for a title and the ticks of a bar

    def in_cell(x: float, y: float) -> _Place:
        return x + (cell - width) / 2, y, width, height

    def under(x: float, y: float, span: float) -> _Place:
        length = min(0.8 * span, 2.6)
        return x + (span - length) / 2, y - 0.08 - bar, length, bar

    low = bar + ticks + 0.05
    if stacked:
        bottoms = [low + 2 * (title + height) + low, low + title + height + low, low]
        return _Places(
            cell + 2 * margin,
            bottoms[0] + height + title,
            [in_cell(margin, y) for y in bottoms],
            [under(margin, bottoms[1], cell), under(margin, bottoms[2], cell)],
        )
    lefts = [margin + i * (cell + gap) for i in range(3)]
    return _Places(
        lefts[2] + cell + margin,
        low + height + title,
        [in_cell(x, low) for x in lefts],
        [under(lefts[0], low, 2 * cell + gap), under(lefts[2], low, cell)],
    )
