"""Figures on paper: drawn by matplotlib into PNG, SVG or PDF, with the style of all figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...base import check_outputs, require, writing_output
from .chart import (
    Axis,
    Colour,
    Figure,
    Image,
    Panel,
    Series,
    clipped_text,
    scale_of,
    with_unit,
)

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colours, which the colour-blind tell apart."""
COLOURS = {
    "ink": "#222222", "faint": "#6b6b6b", "grid": "#e3e3e3", "bar": "#c4c4c4", "deep": "#4d4d4d",
    "middle": "#999999", "pale": "#d0d0d0", "limit": "#B00020",
}  # fmt: skip
_DASHES = ("-", "--", ":", "-.")
_MARKERS = "osD^vPX*"
_DPI = 150
_MOST_OF_TICK = 40
"""Letters of the name of a place on an axis; more leave no room for the panel."""
_HEAD = 0.66
"""Inches that are kept for the title and the line below it."""


def save_figures(figures: Mapping[Path, Figure], replace: bool = False) -> list[Path]:
    """Write each figure to its file.

    Args:
        figures: The figures by path. The suffix of a path is the format.
        replace: Replace a file that Penstock did not write.

    Returns:
        The paths, in order.

    Raises:
        Refused: A file is not to be replaced. Then no figure is written.
        MissingDependency: matplotlib is not installed.
    """
    check_outputs(*(("figure", path) for path in figures), replace=replace)
    for path, figure in figures.items():
        drawn = draw(figure)
        with writing_output(path, replace=replace) as draft:
            drawn.savefig(draft, dpi=_DPI, format=path.suffix.lstrip(".") or "png")
    return list(figures)


def save_under(
    out_prefix: str | Path, figures: Mapping[str, Figure], replace: bool = False
) -> list[Path]:
    """Write each figure to ``<out_prefix>_<name>.png``, or ``<out_prefix>.png`` without a name.

    Args:
        out_prefix: The path of the figures up to their names.
        figures: The figures by name.
        replace: Replace figures that Penstock did not write.

    Returns:
        The files that were written.
    """
    prefix = Path(out_prefix)
    stems = {name: "_".join(filter(None, (prefix.name, name))) for name in figures}
    return save_figures({prefix.with_name(f"{stems[n]}.png"): figures[n] for n in stems}, replace)


def draw(figure: Figure) -> Any:
    """The figure of matplotlib, which does not belong to pyplot.

    No text is read as mathematics: titles and labels hold names that others chose.
    """
    across = min(figure.across, len(figure.panels))
    down = -(-len(figure.panels) // across)
    width = 8.0 if across == 1 else 4.6 * across
    height = _HEAD + (1.0 + 2.3 * down if down > 2 else 3.7 * down)
    engine = require("matplotlib.layout_engine", "plot").ConstrainedLayoutEngine(
        rect=(0, 0, 1, 1 - _HEAD / height)
    )
    drawn = require("matplotlib.figure", "plot").Figure(
        figsize=(width, height), layout=engine, facecolor="white"
    )
    top = {"x": 0.12 / width, "ha": "left", "va": "top", "parse_math": False}
    title, note = clipped_text(figure.title), clipped_text(figure.note)
    drawn.text(y=1 - 0.12 / height, s=title, size=13, weight="bold", color=COLOURS["ink"], **top)
    drawn.text(y=1 - 0.40 / height, s=note, size=9, color=COLOURS["faint"], **top)
    axes = drawn.subplots(down, across, squeeze=False).ravel()
    for axis, panel in zip(axes, figure.panels, strict=False):
        _draw_panel(axis, panel)
    for axis in axes[len(figure.panels) :]:
        axis.set_axis_off()
    text = require("matplotlib.text", "plot").Text
    for each in drawn.findobj(text):
        each.set_parse_math(each in _powers(drawn))
    return drawn


def _powers(drawn: Any) -> set[Any]:
    """The labels of logarithmic axes, which matplotlib writes as powers of ten."""
    axes = [axis for each in drawn.axes for axis in (each.xaxis, each.yaxis)]
    logs = [axis for axis in axes if axis.get_scale() == "log"]
    return {t.label1 for a in logs for t in (*a.get_major_ticks(), *a.get_minor_ticks())}


def _colour(value: Colour) -> str:
    return PALETTE[value % len(PALETTE)] if isinstance(value, int) else COLOURS[value]


def _draw_panel(axis: Any, panel: Panel) -> None:
    style = {"fontsize": 10, "color": COLOURS["ink"]}
    axis.set_title(clipped_text(panel.title), loc="left", fontweight="bold", **style)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(COLOURS["faint"])
    axis.tick_params(colors=COLOURS["faint"], labelcolor=COLOURS["ink"], labelsize=9)
    if panel.image is not None:
        _draw_image(axis, panel.image)
        return
    axis.grid(color=COLOURS["grid"], linewidth=0.8)
    axis.set_axisbelow(True)
    ends = [value for each in panel.series for side in (each.y, each.high) for value in side]
    ends += [value for value, _ in panel.limits]
    along = [value for each in panel.series for value in each.x]
    (x_unit, x_scale), (y_unit, y_scale) = (
        scale_of(each.unit, [v for v in values if v is not None])
        for each, values in ((panel.x, along), (panel.y, ends))
    )
    for each in panel.series:
        _draw_series(axis, each, x_scale, y_scale)
    for value, name in panel.limits:
        label = f"{clipped_text(name)} {with_unit(value, panel.y.unit)}"
        look = {"color": COLOURS["limit"], "linestyle": "--", "linewidth": 1.2}
        axis.axhline(value / y_scale, label=label, **look)
    _set_axis(axis, "x", panel.x, x_unit, x_scale)
    _set_axis(axis, "y", panel.y, y_unit, y_scale)
    if panel.y.zero and not panel.y.log and panel.y.low is None:
        bottom, top = axis.get_ylim()
        # The margin is of the range of values, which may be far above 0.
        top = top if panel.y.high is not None else max(top, 1.05 * axis.dataLim.y1)
        axis.set_ylim(min(0.0, bottom if axis.dataLim.y0 < 0 else 0.0), top)
    if not any(value is not None and np.isfinite(value) for value in along):
        place = {"transform": axis.transAxes, "ha": "center", "color": COLOURS["faint"]}
        axis.text(0.5, 0.5, panel.note or "not recorded", **place)
    named = [label for label in axis.get_legend_handles_labels()[1] if label]
    # The name of a line with a silent one beside it may tell a mean.
    if len(named) > 1 or (named and any(each.silent for each in panel.series)):
        legend: dict[str, Any] = {"ncols": 1 if len(named) < 5 else 2}
        if any(len(each.base) for each in panel.series):  # stacks leave no room between the axes
            legend = {"loc": "upper left", "bbox_to_anchor": (1, 1), "reverse": True}
        axis.legend(frameon=False, fontsize=8, **legend)


def _set_axis(drawn: Any, which: str, axis: Axis, unit: str, scale: float) -> None:
    name = clipped_text(axis.name)
    text = f"{name} ({unit})" if unit else name
    getattr(drawn, f"set_{which}label")(text, fontsize=10, color=COLOURS["ink"])
    if axis.ticks:
        turned = {"rotation": 30, "ha": "right"} if sum(map(len, axis.ticks)) > 60 else {}
        names = [clipped_text(name)[:_MOST_OF_TICK] for name in axis.ticks]
        getattr(drawn, f"set_{which}ticks")(range(len(names)), names, **turned)
    elif axis.log:
        getattr(drawn, f"set_{which}scale")("log")
    else:
        drawn.locator_params(axis=which, integer=axis.whole, min_n_ticks=1)
        getattr(drawn, f"{which}axis").set_major_formatter("{x:,.10g}")
    ends = [None if end is None else end / scale for end in (axis.low, axis.high)]
    if any(end is not None for end in ends):
        getattr(drawn, f"set_{which}lim")(*ends)


def _draw_series(axis: Any, series: Series, x_scale: float, y_scale: float) -> None:
    colour, label = _colour(series.colour), clipped_text(series.label)
    label = f"_{label}" if series.silent or not label else label
    x, y, low, high, base = (
        np.array(values, np.float64)  # None becomes NaN
        for values in (series.x, series.y, series.low, series.high, series.base)
    )
    x, y, low, high, base = x / x_scale, y / y_scale, low / y_scale, high / y_scale, base / y_scale
    line = {"linestyle": _DASHES[series.dashes % 4], "linewidth": 0.8 if series.faint else 1.6}
    line |= {"alpha": 0.3 if series.faint else 1.0, "color": colour, "label": label}
    marker = series.marker if isinstance(series.marker, str) else _MARKERS[series.marker % 8]
    if series.kind == "bars":
        bottom = base if len(base) else np.zeros(len(y))
        axis.bar(x, y - bottom, series.width, bottom=bottom, color=colour, label=label)
    elif series.kind == "area":
        alpha = 0.18 if series.faint else 0.85
        below = base if len(base) else np.zeros(len(y))
        axis.fill_between(x, below, y, color=colour, alpha=alpha, linewidth=0, label=label)
    elif series.kind == "steps":
        axis.step(x, y, where="post", **line)
    else:
        look = {"marker": marker, "markersize": 5} if series.kind in ("dots", "points") else {}
        axis.plot(x, y, **line | look | ({"linestyle": ""} if series.kind == "points" else {}))
    if len(low):
        ink = COLOURS["ink"] if series.kind == "bars" else colour
        axis.vlines(x, low, high, color=ink, linewidth=1.3)
    for at, value, text in zip(x, y, series.texts, strict=False):
        if text and np.isfinite(value):
            place = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
            axis.annotate(clipped_text(text), (at, value), (0, 4), color=COLOURS["ink"], **place)


def _draw_image(axis: Any, image: Image) -> None:
    axis.imshow(image.pixels, cmap="gray", vmin=0, vmax=255)
    axis.set(xticks=[], yticks=[])
    rectangle = require("matplotlib.patches", "plot").Rectangle
    for boxes in image.boxes:
        look = {"fill": False, "ec": _colour(boxes.colour), "ls": _DASHES[boxes.dashes % 4]}
        for x0, y0, x1, y1 in boxes.places:
            axis.add_patch(rectangle((x0, y0), x1 - x0, y1 - y0, lw=1.2, **look))
