"""Planes of a volume before and after a model, and their difference."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from ...base import UsageError
from .chart import Figure, Image, Panel, greys


def before_after_figure(images: Mapping[str, ArrayLike], caption: str) -> Figure:
    """A figure of two images and their difference, the second minus the first.

    Both images have the same range of greys, from the 0.5th to the 99.5th percentile of the two
    together. The difference is white at 0, red above and blue below, and reaches the 99.5th
    percentile of its size.

    Args:
        images: Two 2-D arrays of one shape by their titles, in this order.
        caption: The title of the figure.

    Returns:
        The figure.

    Raises:
        UsageError: The images are not two 2-D arrays of one shape.
    """
    arrays = [np.asarray(image, np.float64) for image in images.values()]
    if len(arrays) != 2 or arrays[0].ndim != 2 or arrays[0].shape != arrays[1].shape:
        shapes = ", ".join(str(array.shape) for array in arrays)
        raise UsageError(f"before and after must be two 2-D images of one shape, not {shapes}")
    difference = arrays[1] - arrays[0]
    low, high = (float(end) for end in np.nanpercentile(np.stack(arrays), (0.5, 99.5)))
    high = high if high > low else low + 1.0
    spread = float(np.nanpercentile(np.abs(difference), 99.5)) or 1.0
    fade = 255 - greys(np.abs(difference), 0, spread)
    white = np.full_like(fade, 255)
    red, blue = np.where(difference < 0, fade, white), np.where(difference > 0, fade, white)
    panels = [Panel(name, image=Image(greys(image, low, high))) for name, image in zip(
        images, arrays, strict=True
    )]  # fmt: skip
    colours = Image(np.stack([red, fade, blue], axis=-1))
    note = f"greys from {low:,.6g} to {high:,.6g}; difference to ± {spread:,.6g}, red is more"
    return Figure(caption, note, [*panels, Panel("difference", image=colours)], 3)
