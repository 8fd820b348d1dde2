"""The numbers of a figure in words, for readers who cannot see it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...base import plural
from .chart import Figure, Panel, Series, with_unit

_MOST_NAMED = 24
"""Values that are named one by one; of more there are the least, the median and the greatest."""


def words_of(figure: Figure) -> str:
    """All panels of a figure, each series with its values."""
    return " ".join(f"{line}." for panel in figure.panels for line in _lines(panel))


def _lines(panel: Panel) -> Iterator[str]:
    title = f"{panel.title}: " if panel.title else ""
    if panel.image is not None:
        boxes = [plural(len(each.places), f"{each.label} box") for each in panel.image.boxes]
        size = " x ".join(map(str, panel.image.pixels.shape[:2]))
        yield f"{title}{', '.join([f'image of {size} pixels', *boxes])}"
    for series in panel.series:
        if not series.silent:
            name = f"{title}{series.label} " if series.label else title
            yield f"{name}{_values(panel, series)}"
    for value, name in panel.limits:
        yield f"{title}{name} {with_unit(value, panel.y.unit)}"


def _values(panel: Panel, series: Series) -> str:
    y = np.array([np.nan if value is None else value for value in series.y], np.float64)
    heights = y - np.asarray(series.base, np.float64) if len(series.base) else y
    unit, finite = panel.y.unit, heights[np.isfinite(heights)]
    if not finite.size:
        return "not recorded"
    if panel.x.ticks and len(heights) <= _MOST_NAMED:
        texts = series.texts or [""] * len(heights)
        return ", ".join(
            " ".join(filter(None, [panel.x.ticks[round(at)], with_unit(float(value), unit), text]))
            for at, value, text in zip(series.x, heights, texts, strict=True)
            if np.isfinite(value)
        )
    ends = (finite.min(), finite.max(), np.median(finite))
    low, high, middle = (with_unit(float(value), unit) for value in ends)
    return f"from {low} to {high}, {middle} in the median of {plural(finite.size, 'value')}"
