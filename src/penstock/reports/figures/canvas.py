"""Building blocks of every figure: style, panels, lines, units and saving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...base import (
    UsageError,
    check_outputs,
    for_terminal,
    format_bytes,
    format_seconds,
    require,
    significant,
    writing_output,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
else:  # without matplotlib the modules of figures import, but cannot draw
    Axes = Figure = Any

STYLE: dict[str, Any] = {
    "dpi": 150,
    "width": 8.0,  # inches
    "height": 4.4,
    "strip": 1.25,  # the height of one device among several
    "title": 13,  # points
    "text": 10,
    "small": 9,
    "ink": "#222222",
    "faint": "#6b6b6b",
    "grid": "#e3e3e3",
    # Okabe and Ito's colours, which the colour-blind tell apart.
    "colours": ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"),
    "limit": "#B00020",
}
TEXT: dict[str, Any] = {"fontsize": STYLE["text"], "color": STYLE["ink"]}
TITLE: dict[str, Any] = {**TEXT, "loc": "left", "fontweight": "bold"}
"""The title of one panel among several."""
LEGEND: dict[str, Any] = {
    "frameon": False, "fontsize": STYLE["small"], "labelcolor": STYLE["ink"],
}  # fmt: skip

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """One quantity over time."""

    label: str
    t: Values
    """Seconds since the start."""
    y: Values
    """The values in the panel's base unit, bytes for a size. A missing value is NaN."""
    colour: int = 0
    dashes: str = "-"
    sparse: bool = False
    """True if it was read too rarely for a rolling mean. It is then drawn as points."""


@dataclass(frozen=True)
class Panel:
    """One figure, before it is drawn."""

    title: str
    quantity: str
    """The name of the y axis, to which the unit is appended."""
    unit: str
    """The base unit. ``B`` and ``B/s`` are scaled to KiB, MiB or GiB, depending on the values."""
    lines: Sequence[Curve]
    note: str = ""
    limit: float | None = None
    """The capacity of a queue, or another limit, drawn as a line."""
    limit_name: str = "capacity"
    top: float = 0.0
    """The y axis reaches at least this far."""
    strips: bool = False
    """True if each line has its own axes: devices at 100 % would hide one another."""


def rolling_mean(y: Values, samples: int) -> Values:
    """The mean of the ``samples`` values around each value; of fewer at the ends and at gaps.

    >>> rolling_mean(np.array([0.0, 3.0, 6.0, np.nan]), 3).tolist()
    [1.5, 3.0, 4.5, nan]
    """
    seen = np.isfinite(y)
    sums = np.concatenate(([0.0], np.cumsum(np.where(seen, y, 0.0))))
    counts = np.concatenate(([0], np.cumsum(seen)))
    at = np.arange(len(y))
    first = np.maximum(at - (samples - 1) // 2, 0)
    last = np.minimum(at + samples // 2 + 1, len(y))
    number = np.maximum(counts[last] - counts[first], 1)
    return np.where(seen, (sums[last] - sums[first]) / number, np.nan)


@dataclass(frozen=True)
class _Scale:
    name: str
    scale: float

    def label(self, quantity: str) -> str:
        return f"{quantity} ({self.name})" if self.name else quantity


def _time_unit(seconds: float) -> _Scale:
    if seconds <= 300:
        return _Scale("s", 1)
    return _Scale("min", 60) if seconds <= 3 * 3600 else _Scale("h", 3600)


def _y_unit(unit: str, peak: float) -> _Scale:
    if not unit.startswith("B"):
        return _Scale(unit, 1)
    power = min(4, max(0, int(np.log2(peak) // 10))) if peak > 1 else 0
    return _Scale(("B", "KiB", "MiB", "GiB", "TiB")[power] + unit[1:], 1024.0**power)


def with_unit(value: float, unit: str) -> str:
    if unit.startswith("B"):
        return format_bytes(value) + unit[1:]
    number = f"{value:,.0f}" if value == round(value) else significant(value)
    return f"{number} {unit}".rstrip()


def draw_all_panels(
    panels: Mapping[str, Panel], path: Path, mean: bool, smooth: int
) -> dict[str, Figure]:
    figures = {}
    for name, panel in panels.items():
        lines = [line for line in panel.lines if np.isfinite(line.y).any()]
        if lines:
            figures[name] = draw(replace(panel, lines=lines), mean, smooth)
    if not figures:
        raise UsageError(f"{path} holds no sample to plot")
    return figures


def draw(panel: Panel, mean: bool = False, smooth: int = 1) -> Figure:
    """Draw a panel, which has at least one value."""
    values = np.concatenate([line.y for line in panel.lines])
    peak = float(np.nanmax(values))
    y_unit = _y_unit(panel.unit, peak)
    t_unit = _time_unit(max(float(line.t[-1]) for line in panel.lines))
    strips = panel.strips and len(panel.lines) > 1
    figure, axes = _frame(panel, mean, smooth, len(panel.lines) if strips else 1)

    for index, line in enumerate(panel.lines):
        axis = axes[index] if strips else axes[0]
        label = line.label
        if mean and not line.sparse:
            average = float(np.nanmean(line.y))
            label += f", mean {with_unit(average, panel.unit)}"
            axis.axhline(
                average / y_unit.scale,
                color=colour_at(line.colour),
                linestyle=":",
                linewidth=1.4,
                label=f"_{line.label} mean",
            )
        t, y = line.t / t_unit.scale, line.y / y_unit.scale
        _draw_line(axis, replace(line, label=label, t=t, y=y), smooth)
        if strips:
            axis.set_title(label, loc="left", fontsize=STYLE["small"], color=STYLE["ink"], pad=3)
    if panel.limit is not None:
        axes[0].axhline(
            panel.limit / y_unit.scale,
            color=STYLE["limit"],
            linestyle="--",
            linewidth=1.2,
            label=f"{panel.limit_name} {with_unit(panel.limit, panel.unit)}",
        )

    whole = not panel.unit and bool(np.all(values[np.isfinite(values)] % 1 == 0))
    high = max(peak, panel.limit or 0.0, panel.top) / y_unit.scale * 1.06 or 1.0
    low = min(0.0, float(np.nanmin(values)) / y_unit.scale * 1.06)
    for axis in axes:
        axis.set_ylim(low, high)
        axis.locator_params(axis="y", nbins=3 if strips else 7, integer=whole)
    axes[-1].set_xlabel(t_unit.label("Time"), **TEXT)
    if strips:
        figure.supylabel(y_unit.label(panel.quantity), **TEXT)
    else:
        axes[0].set_ylabel(y_unit.label(panel.quantity), **TEXT)
    handles, labels = axes[0].get_legend_handles_labels()
    if (len(handles) > 1 or mean) and not strips:
        columns = 2 if len(handles) > 3 else 3
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, **LEGEND)
    return figure


def colour_at(place: int) -> str:
    """The colour at a place in the palette, which repeats."""
    return str(STYLE["colours"][place % len(STYLE["colours"])])


def _draw_line(axis: Axes, line: Curve, smooth: int) -> None:
    colour, t, y = colour_at(line.colour), line.t, line.y
    if line.sparse:
        axis.plot(t, y, color=colour, marker="o", markersize=3, linewidth=0.8, label=line.label)
        return
    if smooth > 1:
        # A label that begins with _ is not in the legend; the line below the title explains it.
        axis.plot(t, y, color=colour, alpha=0.28, linewidth=0.8, label=f"_{line.label} raw")
        y = rolling_mean(y, smooth)
    axis.plot(
        t,
        y,
        color=colour,
        linestyle=line.dashes,
        linewidth=1.8 if smooth > 1 else 1.3,
        label=line.label,
    )


def _frame(panel: Panel, mean: bool, smooth: int, strips: int) -> tuple[Figure, list[Axes]]:
    """A figure with title and facts, and its empty axes, one below another."""
    height = STYLE["height"] if strips == 1 else 1.5 + STYLE["strip"] * strips
    figure = blank(STYLE["width"], height, pads=(0.1, 0.06))
    longest = max(panel.lines, key=lambda line: len(line.t))
    number = int(np.isfinite(longest.y).sum())
    samples = f"{number:,} sample{'s' * (number != 1)}"
    if len(longest.t) > 1:
        samples += f", one every {format_seconds(float(np.median(np.diff(longest.t))))}"
    facts = [
        samples,
        f"bold: rolling mean of {smooth}, faint: raw" if smooth > 1 else "",
        "dotted: mean" if mean else "",
        panel.note,
    ]
    heading(figure, panel.title, "  ·  ".join(filter(None, facts)))
    axes: list[Axes] = list(figure.subplots(strips, 1, sharex=True, squeeze=False)[:, 0])
    for axis in axes:
        tidy(axis)
        axis.margins(x=0.01)
        axis.xaxis.set_major_formatter("{x:,.10g}")
        axis.yaxis.set_major_formatter("{x:,.10g}")
    return figure, axes


def blank(
    width: float, height: float, right: float = 1.0, pads: tuple[float, float] = (0.1, 0.1)
) -> Figure:
    """An empty figure with room for a `heading`.

    Args:
        width: Inches.
        height: Inches.
        right: The share of the width at which axes end.
        pads: Inches around axes, to the sides and above and below.

    Returns:
        A figure that does not belong to pyplot, with a constrained layout.

    Raises:
        MissingDependency: matplotlib is not installed.
    """
    head = 0.66  # inches kept for the title and the line below it
    engine = require("matplotlib.layout_engine", "plot").ConstrainedLayoutEngine(
        rect=(0, 0, right, 1 - head / height), w_pad=pads[0], h_pad=pads[1]
    )
    return require("matplotlib.figure", "plot").Figure(
        figsize=(width, height), layout=engine, facecolor="white"
    )


def tidy(axis: Axes, title: str = "", x: str = "", y: str = "", pad: float | None = None) -> None:
    """Give axes the common style: a faint grid behind, no frame above and to the right.

    Args:
        axis: The axes of one panel.
        title: The name of the panel, if there are several.
        x: The name of the horizontal axis.
        y: The name of the vertical axis.
        pad: Points between the panel and its title; None is matplotlib's default.
    """
    axis.set_title(title, **TITLE, pad=pad)
    axis.set_xlabel(x, **TEXT)
    axis.set_ylabel(y, **TEXT)
    axis.grid(color=STYLE["grid"], linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(STYLE["faint"])
    axis.tick_params(colors=STYLE["faint"], labelcolor=STYLE["ink"], labelsize=STYLE["small"])


def heading(figure: Figure, title: str, below: str) -> None:
    """Write the title of a figure and a line below it, at the same place in every figure.

    Args:
        figure: A figure of `blank`.
        title: What is shown.
        below: Where the data is from.
    """
    width, height = figure.get_size_inches()
    left = {"x": 0.12 / width, "ha": "left", "va": "top"}
    figure.text(
        y=1 - 0.12 / height, s=title, size=STYLE["title"], weight="bold", color=STYLE["ink"], **left
    )
    figure.text(y=1 - 0.40 / height, s=below, size=STYLE["small"], color=STYLE["faint"], **left)


def numbered(figures: Sequence[Figure]) -> dict[str, Figure]:
    """Figures by number, from 1. A single figure has an empty name."""
    return {str(n) if len(figures) > 1 else "": figure for n, figure in enumerate(figures, 1)}


def save_under(
    out_prefix: str | Path, figures: Mapping[str, Figure], replace: bool = False
) -> list[Path]:
    """Write each figure to ``<out_prefix>_<name>.png``, or ``<out_prefix>.png`` without a name."""
    prefix = Path(out_prefix)
    stems = {name: "_".join(filter(None, (prefix.name, name))) for name in figures}
    return save_figures({prefix.with_name(f"{stems[n]}.png"): figures[n] for n in stems}, replace)


MOST_LETTERS = 160
"""Most characters of one text in a figure, because names may be of any length."""


def harmless(figure: Figure) -> None:
    """Make every text of a figure safe: titles, labels and legends hold names that others chose.

    Control characters are escaped, dollar signs start no formula, and long texts are cut.
    """
    from matplotlib.text import Text

    ours = set[Text]()  # labels of ticks that matplotlib writes, such as powers of ten
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        for minor in (False, True):
            formatter = axis.get_minor_formatter() if minor else axis.get_major_formatter()
            if hasattr(formatter, "seq"):  # these are written again when it is drawn
                formatter.seq = list(map(_plain, formatter.seq))
            else:
                for tick in axis.get_minor_ticks() if minor else axis.get_major_ticks():
                    ours.update((tick.label1, tick.label2))
    for text in figure.findobj(Text):
        if text not in ours:
            text.set_parse_math(False)
            text.set_text(_plain(text.get_text()))


def _plain(text: str) -> str:
    text = for_terminal(text[: 2 * MOST_LETTERS])
    return text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]} …"


def save_figures(figures: Mapping[Path, Figure], replace: bool = False) -> list[Path]:
    """Write each figure to its file.

    Args:
        figures: The figures by path. The suffix of a path is the format.
        replace: Replace a file that Penstock did not write.

    Returns:
        The paths, in order.

    Raises:
        Refused: A file is not to be replaced. Then no figure is written.
    """
    check_outputs(*(("figure", path) for path in figures), replace=replace)
    for path, figure in figures.items():
        harmless(figure)
        with writing_output(path, replace=replace) as draft:
            figure.savefig(draft, dpi=STYLE["dpi"], format=path.suffix.lstrip(".") or "png")
    return list(figures)
