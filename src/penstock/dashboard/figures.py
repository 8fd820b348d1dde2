"""The figures of the dashboard, drawn by Bokeh.

Every foreign text goes through `harmless`, because Bokeh would read some texts as mathematics and
load a library from the network to draw it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from bokeh.models import ColumnDataSource, FactorRange, HoverTool, PlainText, Whisker
from bokeh.plotting import figure

from ..reports import STYLE
from ..scaling import Study
from .compare import RunPoint, number_of
from .curves import Drawn
from .view import Axis

_DASHES = ("solid", "dashed", "dotted", "dotdash")
_MARKERS = ("circle", "square", "triangle", "diamond", "inverted_triangle", "plus")
_NAMES: dict[Axis, str] = {"step": "Step", "epoch": "Epoch", "seconds": "Time since the begin (s)"}
_MATHEMATICS = re.compile(r"\$(?=\$)|\\(?=[\[\]()])")
_LONGEST = 60
_MOST_IN_LEGEND = 24


def harmless(text: str) -> str:
    r"""A text that Bokeh draws as it is: an invisible character breaks the marks that begin
    mathematics.

    >>> harmless("$$x$$").encode("ascii", "backslashreplace")
    b'$\\u2060$x$\\u2060$'
    """
    short = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return _MATHEMATICS.sub(lambda sign: sign.group() + "\u2060", short)


class CurveFigure(NamedTuple):
    """The curves of a metric, which may grow."""

    figure: Any
    sources: dict[str, Any]
    """The points of each run, by its name."""

    def update(self, drawn: Sequence[Drawn]) -> bool:
        """Give the lines their new points. Returns False if the lines are no longer the same
        ones."""
        if [each.name for each in drawn] != list(self.sources):
            return False
        for each in drawn:
            data = self.sources[each.name].data
            if len(data["x"]) != len(each.x) or not np.array_equal(data["y"], each.y):
                self.sources[each.name].data = {"x": each.x, "y": each.y}
        return True


def _blank(title: str, x: str, y: str, log: bool, **options: Any) -> Any:
    drawn = figure(
        title=harmless(title),
        height=340,
        sizing_mode="stretch_width",
        y_axis_type="log" if log else "linear",
        tools="pan,box_zoom,wheel_zoom,reset,save",
        **options,
    )
    drawn.toolbar.logo = None
    drawn.xaxis.axis_label = PlainText(text=harmless(x))
    drawn.yaxis.axis_label = PlainText(text=harmless(y))
    return drawn


def _legend(drawn: Any, count: int) -> None:
    if not drawn.legend:
        return
    drawn.legend.click_policy = "hide"
    drawn.legend.label_text_font_size = "9pt"
    drawn.legend.visible = count <= _MOST_IN_LEGEND
    drawn.add_layout(drawn.legend[0], "right")


def _colour(place: int) -> str:
    return str(STYLE["colours"][place % len(STYLE["colours"])])


def curve_figure(metric: str, drawn: Sequence[Drawn], axis: Axis, log: bool) -> CurveFigure:
    """Draw the curves of a metric in one figure.

    Args:
        metric: Its name.
        drawn: The curves.
        axis: The quantity along x.
        log: Whether the y axis is logarithmic.

    Returns:
        The figure and its points.
    """
    canvas = _blank(metric, _NAMES[axis], metric, log)
    groups = list(dict.fromkeys(each.group for each in drawn))
    sources = {}
    for each in drawn:
        place = groups.index(each.group) if len(groups) > 1 else each.place
        label = f"{each.name} ({each.group})" if len(groups) > 1 else each.name
        sources[each.name] = source = ColumnDataSource({"x": each.x, "y": each.y})
        style = {
            "line_color": _colour(place),
            "line_dash": _DASHES[(place // len(STYLE["colours"])) % len(_DASHES)],
            "line_width": 1.8,
        }
        named = {"legend_label": harmless(label), "name": harmless(label)}
        canvas.line("x", "y", source=source, **named, **style)
        if len(each.x) <= 60:
            canvas.scatter(
                "x", "y", source=source, size=5, color=_colour(place), name=harmless(label)
            )
    canvas.add_tools(HoverTool(tooltips=[("run", "$name"), ("x", "@x"), ("y", "@y")]))
    _legend(canvas, len(drawn))
    return CurveFigure(canvas, sources)


def point_figure(points: Sequence[RunPoint], metric: str, knob: str, log: bool) -> Any:
    """Draw a metric against a setting, coloured by group.

    Args:
        points: A point for each run.
        metric: The name of the metric.
        knob: The name of the setting.
        log: Whether both axes are logarithmic, if their values allow it.

    Returns:
        The figure.
    """
    numbers = [number_of(point.x) for point in points]
    numeric = bool(points) and all(number is not None for number in numbers)
    factors = list(dict.fromkeys(harmless(point.x) for point in points))
    y_log = log and all(point.y > 0 for point in points)
    options: dict[str, Any] = {}
    if not numeric:
        options["x_range"] = FactorRange(factors=factors)
    elif y_log and all(n is not None and n > 0 for n in numbers):
        options["x_axis_type"] = "log"
    canvas = _blank(f"{metric} against {knob}", knob, metric, y_log, **options)
    groups = list(dict.fromkeys(point.group for point in points))
    for place, group in enumerate(groups):
        at = [n for n, point in enumerate(points) if point.group == group]
        source = ColumnDataSource(
            {
                "x": [numbers[n] if numeric else harmless(points[n].x) for n in at],
                "y": [points[n].y for n in at],
                "run": [points[n].name for n in at],
            }
        )
        marker = {"marker": _MARKERS[place % len(_MARKERS)], "size": 10, "color": _colour(place)}
        legend = {"legend_label": harmless(group)} if len(groups) > 1 else {}
        canvas.scatter("x", "y", source=source, fill_alpha=0.7, **marker, **legend)
    canvas.add_tools(HoverTool(tooltips=[("run", "@run"), ("x", "@x"), ("y", "@y")]))
    _legend(canvas, len(groups))
    return canvas


def scaling_figures(studied: Sequence[Study]) -> list[Any]:
    """Draw speed-up and efficiency against devices, with their intervals and the ideal.

    Args:
        studied: The studies.

    Returns:
        Two figures.
    """
    drawn = []
    for what in ("speedup", "efficiency"):
        title = {"speedup": "Speed-up", "efficiency": "Efficiency (%)"}[what]
        scale = 100.0 if what == "efficiency" else 1.0
        canvas = _blank(title, "Devices", title, False)
        most = 0
        for place, study in enumerate(studied):
            devices = [point.at.devices for point in study.points]
            intervals = [getattr(point, what) for point in study.points]
            values = [scale * interval.value for interval in intervals]
            bounded = [n for n, each in enumerate(intervals) if each.low is not None]
            style = {"color": _colour(place), "legend_label": study.kind}
            canvas.line(devices, values, line_width=1.8, **style)
            marker = {"marker": _MARKERS[place % len(_MARKERS)], "size": 9}
            canvas.scatter(devices, values, **marker, **style)
            source = ColumnDataSource(
                {
                    "x": [devices[n] for n in bounded],
                    "low": [scale * intervals[n].low for n in bounded],
                    "high": [scale * (intervals[n].high or intervals[n].value) for n in bounded],
                }
            )
            canvas.add_layout(
                Whisker(source=source, base="x", lower="low", upper="high",
                        line_color=_colour(place))
            )  # fmt: skip
            most = max(most, *devices)
        base = studied[0].base.devices
        ideal = [100.0, 100.0] if what == "efficiency" else [1.0, most / base]
        style = {"color": "#6b6b6b", "line_dash": "dashed"}
        canvas.line([base, most], ideal, legend_label="ideal", **style)
        canvas.y_range.start = 0
        _legend(canvas, len(studied) + 1)
        drawn.append(canvas)
    return drawn
