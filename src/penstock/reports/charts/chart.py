"""A figure as data: panels with axes and series. Pages draw it by ``pages/charts.js``, and files by
`charts.paper`, so that a number is drawn in one way of two, and computed once."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...base import UsageError, for_terminal, format_bytes, plural, require, significant

Kind = Literal["line", "dots", "points", "bars", "steps", "area"]
Colour = int | str
"""A place in the palette, or the name of another colour of `charts.paper.COLOURS`."""
Numbers = Sequence[Any] | NDArray[Any]
MOST_LETTERS = 160
"""Most characters of one text in a figure, because names may be of any length."""


_MOST_NAMED = 24
"""Values that are named one by one; of more there are the least, the median and the greatest."""


@dataclass(frozen=True)
class Axis:
    """An axis of a panel."""

    name: str = ""
    unit: str = ""
    """The unit of its values. Those of ``B``, ``s`` and rates are scaled to the size of
    the values."""
    ticks: Sequence[str] = ()
    """The names of the places 0, 1, 2 and so on, if the axis has places instead of numbers."""
    log: bool = False
    zero: bool = True
    """True if a vertical axis begins at 0."""
    whole: bool = False
    """True if only whole numbers are places."""
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """Values in one colour. A value that is missing breaks the line."""

    label: str
    x: Numbers
    y: Numbers
    kind: Kind = "line"
    colour: Colour = 0
    dashes: int = 0
    marker: int | str = 0
    """A place among the shapes; ``x`` is a cross, for a failure."""
    low: Numbers = ()
    high: Numbers = ()
    """The ends of an interval at each value."""
    base: Numbers = ()
    """The values at which bars and areas begin; empty for 0."""
    width: float = 0.6
    """The width of bars."""
    texts: Sequence[str] = ()
    """A text at each value."""
    faint: bool = False
    silent: bool = False
    """True if neither the legend nor the values under the pointer name it."""


@dataclass(frozen=True)
class Boxes:
    """Boxes on an image: x0, y0, x1, y1 in its pixels."""

    label: str
    places: Sequence[Sequence[float]]
    colour: Colour = 0
    dashes: int = 0


@dataclass(frozen=True)
class Image:
    """An image of bytes: greys (row, column), or colours (row, column, 3)."""

    pixels: NDArray[np.uint8]
    boxes: Sequence[Boxes] = ()


@dataclass(frozen=True)
class Panel:
    """The axes of a figure with all that is drawn between them; or an image."""

    title: str = ""
    x: Axis = field(default_factory=Axis)
    y: Axis = field(default_factory=Axis)
    series: Sequence[Series] = ()
    limits: Sequence[tuple[float, str]] = ()
    """Horizontal lines with their names, such as a ceiling."""
    note: str = ""
    """The text of an empty panel."""
    image: Image | None = None


@dataclass(frozen=True)
class Figure:
    """Panels below one title."""

    title: str
    note: str
    """A line below the title: where the data is from."""
    panels: Sequence[Panel]
    across: int = 1
    """Panels in a row, where the page has room for them."""


def document_of(value: Any) -> Any:
    """A figure as plain values for JSON: what a field has by default is left out, and a number has
    as many digits as can be seen."""
    if isinstance(value, Image):
        height, width = value.pixels.shape[:2]
        boxes = [document_of(each) for each in value.boxes]
        return {"link": link_of(value.pixels), "height": height, "width": width, "boxes": boxes}
    if is_dataclass(value):
        named = {each.name: getattr(value, each.name) for each in fields(value)}
        return {name: document_of(item) for name, item in named.items() if item is not None and (
            not isinstance(item, bool | str | Sequence) or item or name in ("zero", "x", "y")
        )}  # fmt: skip
    if isinstance(value, str):
        return clipped_text(value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray | Sequence):
        return [document_of(each) for each in value]
    if isinstance(value, float):
        short = float(f"{value:.5g}")
        if not np.isfinite(short):  # what JSON does not know
            return None
        return int(short) if short.is_integer() and abs(short) < 1e9 else short
    return value


def clipped_text(text: str) -> str:
    """A text of a figure without control characters, cut to a length."""
    text = for_terminal(text[: 2 * MOST_LETTERS])
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} …"


def link_of(pixels: NDArray[np.uint8]) -> str:
    """An image as a PNG in a data URL."""
    file = io.BytesIO()
    require("PIL.Image", "plot").fromarray(pixels).save(file, "png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def greys(image: ArrayLike, low: float, high: float) -> NDArray[np.uint8]:
    """An image as bytes: ``low`` and below become black, ``high`` and above white."""
    share = (np.asarray(image, np.float64) - low) / ((high - low) or 1.0)
    return np.asarray(255 * np.clip(np.nan_to_num(share), 0, 1) + 0.5, np.uint8)


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


def thinned(y: ArrayLike, most: int) -> NDArray[np.intp]:
    """The places of at most ``most`` points of a curve: each piece keeps its least and its greatest
    value.

    Args:
        y: The values of its points.
        most: How many may stay.

    Returns:
        Their indices, in order.

    >>> x = np.arange(10_000.0)
    >>> len(thinned(x, 2000)), float((x == 77)[thinned(x == 77, 2000)].max())
    (2000, 1.0)
    """
    values = np.asarray(y, np.float64)
    if len(values) <= most:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), max(1, most // 2) + 1).astype(int)
    places: set[int] = set()
    for begin, end in pairwise(edges):
        piece = values[begin:end]
        if np.isfinite(piece).any():
            places |= {begin + int(np.nanargmin(piece)), begin + int(np.nanargmax(piece))}
    return np.array(sorted(places), np.intp)


def rolling_mean(y: ArrayLike, samples: int) -> NDArray[np.float64]:
    """The mean of the ``samples`` values around each value; of fewer at the ends and at gaps.

    >>> rolling_mean(np.array([0.0, 3.0, 6.0, np.nan]), 3).tolist()
    [1.5, 3.0, 4.5, nan]
    """
    values = np.asarray(y, np.float64)
    seen = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(seen, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(seen)))
    at = np.arange(len(values))
    first = np.maximum(at - (samples - 1) // 2, 0)
    last = np.minimum(at + samples // 2 + 1, len(values))
    number = np.maximum(counts[last] - counts[first], 1)
    return np.where(seen, (sums[last] - sums[first]) / number, np.nan)


def scale_of(unit: str, values: Iterable[float]) -> tuple[str, float]:
    """The unit in which values are shown, and how many of their base unit it holds.

    >>> scale_of("B", [2**31]), scale_of("s", [0.02]), scale_of("%", [80])
    (('GiB', 1073741824.0), ('ms', 0.001), ('%', 1.0))
    """
    peak = max((abs(value) for value in values if np.isfinite(value)), default=0.0)
    if unit in ("B", "B/s"):
        power = min(5, max(0, int(np.log2(peak) // 10))) if peak > 1 else 0
        return ("B", "KiB", "MiB", "GiB", "TiB", "PiB")[power] + unit[1:], 1024.0**power
    if unit == "s" and peak > 0:
        steps = ((3 * 3600, "h", 3600.0), (180, "min", 60.0), (1, "s", 1.0), (1e-3, "ms", 1e-3))
        return next(
            ((name, factor) for least, name, factor in steps if peak >= least), ("µs", 1e-6)
        )
    if unit.endswith("/s") and peak >= 1e4:
        power = min(4, int(np.log10(peak) // 3))
        return f"{' kMGT'[power]} {unit}", 1000.0**power
    return unit, 1.0


def with_unit(value: float, unit: str) -> str:
    """A value in the unit in which it is shown, such as ``1.25 GiB``."""
    if unit in ("B", "B/s"):
        return format_bytes(value) + unit[1:]
    name, factor = scale_of(unit, [value])
    scaled = value / factor
    number = f"{scaled:,.0f}" if scaled == round(scaled) else significant(scaled)
    return f"{number} {name}".rstrip()


def words_of(figure: Figure) -> str:
    """A figure in words, for readers who cannot see it: all panels, each series with its values."""
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
    y = np.array(series.y, np.float64)  # None becomes NaN
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
