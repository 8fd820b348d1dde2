"""Planes of a volume before and after a model, and their difference."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from ...base import UsageError, require
from .canvas import STYLE, TEXT, Figure, save_figures


def plot_before_after(
    images: Mapping[str, ArrayLike], out: Path, caption: str, replace: bool = False
) -> Path:
    """Save a figure of two images and their difference, the second minus the first.

    Both images have the same range of greys, from the 0.5th to the 99.5th percentile of the two
    together. The difference is white at 0 and reaches the 99.5th percentile of its size.

    Args:
        images: Two 2-D arrays of one shape by their titles, in this order.
        out: The file to write.
        caption: The text below the images.
        replace: Replace a file that Penstock did not write.

    Returns:
        ``out``.

    Raises:
        UsageError: The images are not two 2-D arrays of one shape.
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

    rows, columns = arrays[0].shape
    below = columns > 2.5 * rows  # wide images would be small side by side
    most_width, most_height = (7.2, 2.4) if below else (3.1, 5.0)  # inches
    scale = min(most_width / columns, most_height / rows)
    width, height = max(columns * scale, 1.8), max(rows * scale, 0.4)
    across, down = (1, 3) if below else (3, 1)
    lines = textwrap.wrap(caption, int(across * width * 14))
    figure: Figure = require("matplotlib.figure", "plot").Figure(
        figsize=(across * width + 0.4, down * height + (2.0 if below else 1.0) + 0.17 * len(lines)),
        layout="constrained",
        facecolor="white",
    )
    figure.supxlabel("\n".join(lines), fontsize=STYLE["small"], color=STYLE["faint"])
    axes = figure.subplots(down, across).ravel()
    # Stretch an image that would be too thin to see.
    aspect = "equal" if 0.2 < height / width < 5 and columns * scale >= 1.8 else "auto"
    looks = [(arrays[0], "gray", low, high), (arrays[1], "gray", low, high)]
    looks.append((difference, "RdBu_r", -spread, spread))
    shown = []
    for axis, title, look in zip(axes, (*images, "difference"), looks, strict=True):
        image, colours, least, most = look
        shown.append(axis.imshow(image, cmap=colours, vmin=least, vmax=most, aspect=aspect))
        axis.set_title(title, **TEXT, pad=4)
        axis.set(xticks=[], yticks=[])
        axis.spines[:].set_color(STYLE["grid"])
    ticker = require("matplotlib.ticker", "plot")
    for image, over in ((shown[1], list(axes[:2])), (shown[2], axes[2])):
        bar = figure.colorbar(
            image, ax=over, location="bottom", shrink=0.6, aspect=30, pad=0.02,
            ticks=ticker.MaxNLocator(4), format="{x:,.6g}",
        )  # fmt: skip
        bar.ax.tick_params(labelsize=STYLE["small"], labelcolor=STYLE["ink"], length=2)
        bar.outline.set_visible(False)
    return figure
