"""Plots: the figures of a run, drawn from what was recorded and from nothing else.

Each kind of file has a function that draws it (``metrics_figures``, ``gpu_figures``: Figures by
the end of their file name) and one that saves what was drawn (`plot_metrics`, `plot_gpu_metrics`).
Gaps stay gaps: a value that is missing breaks the line and is in no mean.

Figures are made without pyplot, so that drawing in a thread or in a notebook changes no state of
the caller's.
"""

from __future__ import annotations

import csv
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import ours
from .errors import UsageError, require
from .safe import terminal
from .telemetry import MIB, Row, read_rows
from .units import format_bytes, format_seconds, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
"""Of one panel among several."""
LEGEND: dict[str, Any] = {
    "frameon": False, "fontsize": STYLE["small"], "labelcolor": STYLE["ink"],
}  # fmt: skip

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """One quantity over time."""

    label: str
    t: Values
    """Seconds since the start."""
    y: Values
    """In the panel's base unit, bytes for a size; NaN where it is missing."""
    colour: int = 0
    dashes: str = "-"
    sparse: bool = False
    """Read too rarely for a rolling mean: drawn as points."""


@dataclass(frozen=True)
class Panel:
    """One figure, before it is drawn."""

    title: str
    quantity: str
    """What the y axis shows; its unit is appended."""
    unit: str
    """``B`` and ``B/s`` are scaled to KiB, MiB or GiB by what is drawn."""
    lines: Sequence[Line]
    note: str = ""
    limit: float | None = None
    """The capacity of a queue, drawn as a line."""
    top: float = 0.0
    """The y axis reaches at least this far."""
    strips: bool = False
    """Each line gets axes of its own: devices at 100 % would hide one another."""


def plot_metrics(
    path: Path,
    out_prefix: str | Path,
    mean: bool = False,
    smooth: int = 1,
    replace: bool = False,
) -> list[Path]:
    """Draw the metrics of a run to ``<out_prefix>_cpu.png``, ``_ram.png`` and so on.

    ``path`` holds the rows of `telemetry.Sampler`, or a ``metrics.json`` in the reference's shape.
    ``mean`` adds the mean of every line; ``smooth`` is how many samples a rolling mean spans, the
    raw values staying behind it, and 1 draws them alone. Returns what was written. Raises
    `UsageError` where the file holds no metrics.
    """
    return _save(metrics_figures(path, mean, smooth), out_prefix, replace)


def plot_gpu_metrics(
    csv_path: Path,
    out_prefix: str | Path,
    mean: bool = False,
    smooth: int = 1,
    replace: bool = False,
) -> list[Path]:
    """Draw what ``nvidia-smi --query-gpu=... --format=csv`` logged.

    To ``<out_prefix>_gpu_util.png`` and ``_vram.png``; the options are those of `plot_metrics`.
    Columns used: timestamp, index and name, and one or both of memory.used and utilization.gpu.
    """
    return _save(gpu_figures(csv_path, mean, smooth), out_prefix, replace)


def metrics_figures(path: Path, mean: bool = False, smooth: int = 1) -> dict[str, Figure]:
    """The figures of `plot_metrics` by the end of their file names."""
    path = Path(path)
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        reference = json.loads(text)
    except ValueError:  # many lines, each a record
        panels = _row_panels(*read_rows(path))
    else:
        if isinstance(reference, dict) and "schema" in reference:  # a header and no row yet
            panels = {}
        else:
            panels = _reference_panels(reference, path)
    return _draw_all(panels, path, mean, smooth)


def gpu_figures(csv_path: Path, mean: bool = False, smooth: int = 1) -> dict[str, Figure]:
    """The figures of `plot_gpu_metrics` by the end of their file names."""
    return _draw_all(_gpu_csv_panels(csv_path), csv_path, mean, smooth)


# --- what each file says ------------------------------------------------------------------------


def _row_panels(header: Row, rows: Sequence[Row]) -> dict[str, Panel]:
    t = _numbers(row["t"] for row in rows)

    def line(label: str, key: str, colour: int = 0, dashes: str = "-") -> Line:
        return Line(label, t, _numbers(row[key] for row in rows), colour, dashes)

    cores = header["cpu_count"]
    panels = {
        "cpu": Panel(
            "CPU of the job",
            "CPU, 100 is one core",
            "%",
            [line("CPU", "cpu_percent")],
            f"process tree, machine of {cores} cores" if cores else "process tree",
        ),
        "ram": Panel(
            "Memory of the job",
            "Memory",
            "B",
            [line("RSS", "rss_bytes"), _sparse(line("PSS (shared pages once)", "pss_bytes", 1))],
            "process tree",
        ),
    }
    queues = header["queues"]
    for name in dict.fromkeys([*queues, *(name for row in rows for name in row["gauges"])]):
        values = _numbers(row["gauges"].get(name) for row in rows)
        panels[_file_part(name)] = _gauge(name, queues.get(name), Line(name, t, values))
    panels["net_io"] = Panel(
        "Network",
        "Rate",
        "B/s",
        [line("sent", "net_sent_bytes_per_s"), line("received", "net_recv_bytes_per_s", 1)],
        "whole machine, loopback included",
    )
    panels["disk_io"] = Panel(
        "Disk",
        "Rate",
        "B/s",
        [
            line("machine read", "machine_read_bytes_per_s", 5, "--"),
            line("machine write", "machine_write_bytes_per_s", 4, "--"),
            line("job read", "read_bytes_per_s"),
            line("job write", "write_bytes_per_s", 1),
        ],
        "what reached a disk",
    )
    readings = [_GpuReading(row["t"], **gpu) for row in rows for gpu in row["gpus"] or []]
    return panels | _gpu_panels(readings)


def _reference_panels(metrics: Any, path: Path) -> dict[str, Panel]:
    if not isinstance(metrics, dict) or not metrics.keys() & {"queue_monitor", "system_monitor"}:
        raise UsageError(f"{path} holds neither a queue_monitor nor a system_monitor")
    system = metrics.get("system_monitor") or {}
    t = _numbers(system.get("t_rel_s", []))

    def line(label: str, values: Iterable[float | None], unit: int, colour: int = 0) -> Line:
        y = _numbers(values) * unit
        if len(y) == 0:  # never read
            return Line(label, y, y, colour)
        if len(y) != len(t):
            raise UsageError(f"{path} holds {len(y)} values of {label} for {len(t)} times")
        return Line(label, t, y, colour)

    network = system.get("net_io_mbytes_sec", {})
    disk = system.get("disk_io_mbytes_sec", {})
    panels = {
        "cpu": Panel(
            "CPU of the job",
            "CPU, 100 is one core",
            "%",
            [line("CPU", system.get("cpu_percent", []), 1)],
        ),
        "ram": Panel(
            "Memory of the job", "Memory", "B", [line("RSS", system.get("ram_rss_mb", []), MIB)]
        ),
    }
    for name, queue in (metrics.get("queue_monitor") or {}).get("queues", {}).items():
        samples = queue.get("samples", [])
        panels[_file_part(name)] = _gauge(
            name,
            queue.get("max_size", 0),
            Line(
                name, _numbers(s["t_rel_s"] for s in samples), _numbers(s["size"] for s in samples)
            ),
        )
    panels["net_io"] = Panel(
        "Network",
        "Rate",
        "B/s",
        [
            line("sent", network.get("sent", []), MIB),
            line("received", network.get("recv", []), MIB, 1),
        ],
        "whole machine",
    )
    panels["disk_io"] = Panel(
        "Disk",
        "Rate",
        "B/s",
        [line("read", disk.get("read", []), MIB), line("write", disk.get("write", []), MIB, 1)],
        "whole machine",
    )
    return panels


def _gauge(name: str, most: int | None, line: Line) -> Panel:
    if most is None:
        return Panel(name, name, "", [line])
    return Panel(f"Queue {name}", "Items in queue", "", [line], limit=most or None)


@dataclass(frozen=True)
class _GpuReading:
    t: float
    index: str
    name: str
    util_percent: float | None
    memory_bytes: float | None


def _gpu_csv_panels(path: Path) -> dict[str, Panel]:
    with Path(path).open(encoding="utf-8", errors="replace", newline="") as file:
        lines = file.readlines()
    if lines and not lines[-1].endswith("\n") and not lines[-1].rstrip().endswith(("iB", "%", "]")):
        lines.pop()  # cut within a number, which would read as a smaller one
    table = [[cell.strip() for cell in row] for row in csv.reader(lines) if row]
    names = [cell.partition(" ")[0] for cell in table[0]] if table else []
    if "timestamp" not in names or not {"memory.used", "utilization.gpu"} & set(names):
        raise UsageError(
            f"{path} has no column timestamp, or neither of memory.used and utilization.gpu: "
            f"its first line names {', '.join(names) or 'nothing'}"
        )
    readings, unread, first = [], 0, None
    for cells in table[1:]:
        when = _timestamp(cells[names.index("timestamp")]) if len(cells) == len(names) else None
        if when is None:
            unread += 1
            continue
        first = first or when
        row = dict(zip(names, cells, strict=True))
        memory = _quantity(row.get("memory.used", ""))
        readings.append(
            _GpuReading(
                (when - first).total_seconds(),
                row.get("index", "0"),
                row.get("name", ""),
                _quantity(row.get("utilization.gpu", "")),
                None if memory is None else memory * MIB,
            )
        )
    return _gpu_panels(readings, f"{unread} line{'s' * (unread != 1)} unreadable" if unread else "")


def _timestamp(text: str) -> datetime | None:
    for pattern in ("%Y/%m/%d %H:%M:%S.%f", "%Y/%m/%d %H:%M:%S"):
        try:
            return datetime.strptime(text, pattern)
        except ValueError:
            continue
    return None


def _quantity(text: str) -> float | None:
    """The number in ``1234 MiB`` or ``87 %``; None for ``[N/A]`` and its like."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?: (?:MiB|%))?", text)
    return float(match[1]) if match else None


def _gpu_panels(readings: Sequence[_GpuReading], note: str = "") -> dict[str, Panel]:
    gpus: dict[str, list[_GpuReading]] = {}
    for reading in readings:
        gpus.setdefault(f"GPU {reading.index} {reading.name}".strip(), []).append(reading)

    def lines(key: str) -> list[Line]:
        return [
            Line(
                label,
                _numbers(reading.t for reading in own),
                _numbers(getattr(reading, key) for reading in own),
                colour,
            )
            for colour, (label, own) in enumerate(sorted(gpus.items(), key=_natural))
        ]

    return {
        "gpu_util": Panel(
            "GPU utilisation", "Busy", "%", lines("util_percent"), note, top=100, strips=True
        ),
        "vram": Panel("GPU memory", "Used", "B", lines("memory_bytes"), note, strips=True),
    }


def _natural(item: tuple[str, Any]) -> list[Any]:
    """GPU 2 before GPU 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", item[0])]


def _file_part(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)


def _numbers(values: Iterable[float | None]) -> Values:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _sparse(line: Line) -> Line:
    seen = np.isfinite(line.y)
    return Line(line.label, line.t[seen], line.y[seen], line.colour, sparse=True)


# --- drawing ------------------------------------------------------------------------------------


def rolling_mean(y: Values, samples: int) -> Values:
    """The mean of the ``samples`` values about each; fewer at the ends and about gaps.

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
class _Unit:
    name: str
    scale: float

    def label(self, quantity: str) -> str:
        return f"{quantity} ({self.name})" if self.name else quantity


def _time_unit(seconds: float) -> _Unit:
    if seconds <= 300:
        return _Unit("s", 1)
    return _Unit("min", 60) if seconds <= 3 * 3600 else _Unit("h", 3600)


def _y_unit(unit: str, peak: float) -> _Unit:
    if not unit.startswith("B"):
        return _Unit(unit, 1)
    power = min(4, max(0, int(np.log2(peak) // 10))) if peak > 1 else 0
    return _Unit(("B", "KiB", "MiB", "GiB", "TiB")[power] + unit[1:], 1024.0**power)


def _with_unit(value: float, unit: str) -> str:
    if unit.startswith("B"):
        return format_bytes(value) + unit[1:]
    number = f"{value:,.0f}" if value == round(value) else significant(value)
    return f"{number} {unit}".rstrip()


def _draw_all(
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
    """A panel, which has at least one value, as a Figure."""
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
            label += f", mean {_with_unit(average, panel.unit)}"
            axis.axhline(
                average / y_unit.scale,
                color=_colour(line),
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
            label=f"capacity {_with_unit(panel.limit, panel.unit)}",
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


def _colour(line: Line) -> str:
    colours: tuple[str, ...] = STYLE["colours"]
    return colours[line.colour % len(colours)]


def _draw_line(axis: Axes, line: Line, smooth: int) -> None:
    colour, t, y = _colour(line), line.t, line.y
    if line.sparse:
        axis.plot(t, y, color=colour, marker="o", markersize=3, linewidth=0.8, label=line.label)
        return
    if smooth > 1:
        # A label that begins with _ stays out of the legend; the line below the title tells.
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
    """Title, what was sampled, and empty axes below one another."""
    height = STYLE["height"] if strips == 1 else 1.5 + STYLE["strip"] * strips
    figure = blank(STYLE["width"], height, pads=(0.1, 0.06))
    longest = max(panel.lines, key=lambda line: len(line.t))
    number = int(np.isfinite(longest.y).sum())
    facts = [f"{number:,} sample{'s' * (number != 1)}"]
    if len(longest.t) > 1:
        facts[0] += f", one every {format_seconds(float(np.median(np.diff(longest.t))))}"
    if smooth > 1:
        facts.append(f"bold: rolling mean of {smooth}, faint: raw")
    if mean:
        facts.append("dotted: mean")
    if panel.note:
        facts.append(panel.note)
    heading(figure, panel.title, "  ·  ".join(facts))
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
    """An empty figure whose axes leave room for a `heading` and end at ``right`` of its width.

    ``pads`` about axes, to the sides and up and down, are in inches as the sizes are.
    """
    head = 0.66  # inches kept for the title and the line below it
    engine = require("matplotlib.layout_engine", "plot").ConstrainedLayoutEngine(
        rect=(0, 0, right, 1 - head / height), w_pad=pads[0], h_pad=pads[1]
    )
    figure: Figure = require("matplotlib.figure", "plot").Figure(
        figsize=(width, height), layout=engine, facecolor="white"
    )
    return figure


def tidy(axis: Axes) -> None:
    """Axes in the house style: a faint grid behind, no frame above and to the right."""
    axis.grid(color=STYLE["grid"], linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(STYLE["faint"])
    axis.tick_params(colors=STYLE["faint"], labelcolor=STYLE["ink"], labelsize=STYLE["small"])


def heading(figure: Figure, title: str, below: str) -> None:
    """Title and the line below it, set in inches so that every figure has them alike."""
    width, height = figure.get_size_inches()
    left = {"x": 0.12 / width, "ha": "left", "va": "top"}
    figure.text(
        y=1 - 0.12 / height, s=title, size=STYLE["title"], weight="bold", color=STYLE["ink"], **left
    )
    figure.text(y=1 - 0.40 / height, s=below, size=STYLE["small"], color=STYLE["faint"], **left)


def _save(
    figures: Mapping[str, Figure], out_prefix: str | Path, replace: bool = False
) -> list[Path]:
    prefix = Path(out_prefix)
    named = {prefix.with_name(f"{prefix.name}_{name}.png"): f for name, f in figures.items()}
    return save(named, replace)


def _without_control(figure: Figure) -> None:
    """Names of others are in titles, labels and legends."""
    from matplotlib.text import Text

    for text in figure.findobj(Text):
        text.set_text(terminal(text.get_text()))


def save(figures: Mapping[Path, Figure], replace: bool = False) -> list[Path]:
    """Write each figure to its file, or none where one of those is not ours to replace."""
    ours.check(*(("figure", path) for path in figures), replace=replace)
    for path, figure in figures.items():
        _without_control(figure)
        with ours.writing(path, replace=replace) as draft:
            figure.savefig(draft, dpi=STYLE["dpi"], format=path.suffix.lstrip(".") or "png")
    return list(figures)


# --- images -------------------------------------------------------------------------------------


def before_after(
    images: Mapping[str, ArrayLike], out: Path, caption: str, replace: bool = False
) -> Path:
    """Save two images and their difference, the second less the first.

    ``images`` are two 2-D arrays of one shape by their titles, in that order. Both are shown
    between the same greys, the 0.5th and 99.5th percentile of the two together; the difference
    about a white zero, out to the 99.5th percentile of its size. Returns ``out``.
    """
    figure = before_after_figure(images, caption)
    save({Path(out): figure}, replace)
    return Path(out)


def before_after_figure(images: Mapping[str, ArrayLike], caption: str) -> Figure:
    """The figure of `before_after`."""
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
