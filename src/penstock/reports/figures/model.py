"""The figure of a model benchmark, drawn from its CSV: five panels for each group of cells.

    peak memory by tile           samples a second by tile           pixels a second by tile
    time of a step, by phase where there are any     memory against throughput, and the frontier

The first three have a line for each batch. Rates are of the median step, where a row has one, as
the times and their intervals are.
Cells that differ in tile and batch alone share a figure; nothing else is ever joined by a line.
Of several rows of one case the latest is drawn, and the line below the title counts them. A case
that failed is a result: its cross stands in a band of its own, in the colour of its batch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base import UsageError, format_bytes, require
from ...bench import pixels_of
from ..model import grouped
from ..table import MB, Row, read_csv
from .canvas import LEGEND, STYLE, TEXT, TITLE, blank, heading, save_figures, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PHASES = {"forward": "#4d4d4d", "backward": "#999999", "optimizer": "#d0d0d0"}
"""Greys: colours are batches."""
MARKERS = "osD^vPX*"
"""One for each tile, and for each batch a place in the house's colours."""
_WORDS = {
    "oom_device": "OOM",
    "oom_host": "OOM host",
    "wrong_result": "wrong",
    "unsupported": "n/a",
}


@dataclass(frozen=True)
class Point:
    """A case as it is drawn. NaN is missing."""

    tile: str
    batch: int
    failure: str
    """Empty where it was measured."""
    device_peak: float
    host_peak: float
    """Bytes."""
    rate: float
    """Samples a second."""
    pixels: float
    """Useful ones of a sample."""
    time: float
    time_low: float
    time_high: float
    """Milliseconds of a step."""
    phases: dict[str, float]
    useful: bool
    """There is a halo: fewer pixels are useful than are computed."""
    budget: float
    """Bytes."""

    @property
    def name(self) -> str:
        return f"{self.tile} × {self.batch}"

    @property
    def pixel_rate(self) -> float:
        """Useful pixels a second."""
        return self.pixels * self.rate


def plot_bench(path: Path, out_prefix: str | Path, replace: bool = False) -> list[Path]:
    """Draw a benchmark's CSV to ``<out_prefix>.png``; returns what was written.

    Where models, modes, devices or other knobs differ there is a figure for each group, and what
    differs is added to the names of the files. Raises `UsageError` where nothing can be drawn.
    """
    prefix = Path(out_prefix)
    figures = bench_figures(path)
    named = {prefix.with_name(f"{prefix.name}{name}.png"): f for name, f in figures.items()}
    return save_figures(named, replace)


def bench_figures(path: Path) -> dict[str, Figure]:
    """The figures of `plot_bench` by the end of their file names, which is empty for one alone."""
    table = read_csv(Path(path))
    groups = grouped(table.rows, lambda row: row)
    if not groups:
        raise UsageError(f"{path} holds no row to plot")
    words = [label.split(", ") for label, _ in groups]
    figures: dict[str, Figure] = {}
    for (label, rows), own in zip(groups, words, strict=True):
        apart = [word for word in own if not all(word in other for other in words)]
        name = re.sub(r"[^\w.-]+", "_", "_".join(["", *apart]))
        figures[name] = draw(label, rows, Path(path).name)
    return figures


def latest(rows: Sequence[Row]) -> list[Row]:
    """The last row of each tile and batch, small tiles and batches first."""
    # Stable: the later line wins. One of --find-limit has no time and hides none that was measured.
    ordered = sorted(rows, key=lambda row: (not _only_tried(row), row.get("timestamp", "")))
    cases = {(row["tile_size"], row["batch_size"]): row for row in ordered}
    return sorted(cases.values(), key=lambda r: (pixels_of(r["tile_size"]), int(r["batch_size"])))


def _only_tried(row: Row) -> bool:
    return not row.get("error") and not row.get("avg_time_ms") and not row.get("median_time_ms")


def draw(label: str, rows: Sequence[Row], source: str) -> Figure:
    """One group of rows as a figure."""
    try:
        points = [_point(row) for row in latest(rows)]
    except ValueError as error:
        raise UsageError(f"{source} holds what is no number: {error}") from error
    figure = blank(13, 8.4, pads=(0.12, 0.1))
    heading(figure, label, _facts(rows, points, source))
    axes = figure.subplot_mosaic("MMSSPP;TTTFFF")  # by the initials of the panels
    for axis in axes.values():
        tidy(axis)
    on_host = rows[0].get("device", "cpu") == "cpu"
    _draw_memory(axes["M"], points, on_host)
    _draw_samples(axes["S"], points)
    _draw_pixels(axes["P"], points)
    _draw_times(axes["T"], points)
    _draw_frontier(axes["F"], points, on_host)
    figure.legend(handles=_legend(points), loc="outside lower center", ncols=8, **LEGEND)
    return figure


def _facts(rows: Sequence[Row], points: Sequence[Point], source: str) -> str:
    facts = [f"{len(rows)} row{'s' * (len(rows) != 1)} of {source}"]
    if len(rows) > len(points):
        facts[0] += f", the latest of each of {len(points)} cases"
    launches = sorted(
        {int(row["launches"]) for row in latest(rows) if int(row.get("launches") or 0)}
    )
    if launches:
        most = launches[-1]
        span = str(most) if len(launches) == 1 else f"{launches[0]} to {most}"
        facts.append(f"{span} launch{'es' * (most != 1)} of a case")
    if any(np.isfinite(point.time_low) for point in points):
        facts.append("whiskers: 95 % interval")
    return "  ·  ".join(facts)


def _point(row: Row) -> Point:
    tile, status = row["tile_size"], row.get("status", "")
    failure = row.get("error", "") if status in ("", "ok") else _WORDS.get(status, status)
    halo = int(row.get("halo") or 0)
    useful, rate = (
        _number(row, name) for name in ("useful_pixels_per_sec", "throughput_samples_per_sec")
    )
    # The seed's own rows are of squares.
    pixels = useful / rate if useful > 0 and rate > 0 else np.nan if halo else pixels_of(tile)
    if row.get("median_time_ms"):  # the rate of a row is of its mean
        rate = 1e3 * int(row["batch_size"]) / _number(row, "median_time_ms")
    time = _number(row, "median_time_ms", "avg_time_ms", "total_time_ms")
    low, high = _number(row, "low_time_ms"), _number(row, "high_time_ms")
    phases = {phase: _number(row, f"{phase}_time_ms") for phase in PHASES}
    device_peak = _number(row, "memory_peak_mb") * MB
    if np.isnan(time):  # what a failed case had reached is not what it needs
        device_peak = np.nan
    return Point(
        tile,
        int(row["batch_size"]),
        failure,
        # The seed's writer puts 0 where there is no GPU.
        device_peak if device_peak > 0 else np.nan,
        np.nan if np.isnan(time) else _number(row, "host_peak_mb") * MB,
        rate,
        pixels,
        time,
        low,
        high,
        {phase: value for phase, value in phases.items() if np.isfinite(value)},
        halo > 0,
        _number(row, "budget_mb") * MB,
    )


def _number(row: Row, *names: str) -> float:
    """The first of these fields that holds one."""
    return next((float(row[name]) for name in names if row.get(name)), np.nan)


def _draw_memory(axis: Axes, points: Sequence[Point], on_host: bool) -> None:
    where = "host" if on_host else "device"
    axis.set_title(f"Peak {where} memory", **_TITLE)
    peaks = [_peak(point, on_host) for point in points]
    unit, scale = _byte_unit(peaks)
    budget = points[0].budget / scale
    _by_tile(
        axis, points, [peak / scale for peak in peaks], f"Peak {where} memory ({unit})", most=budget
    )
    if np.isfinite(budget):
        text = f"budget {format_bytes(points[0].budget)}"
        axis.axhline(budget, color=STYLE["limit"], linestyle="--", linewidth=1.2)
        axis.annotate(text, (-0.38, budget), (0, 3), textcoords="offset points", **_NOTE)


def _draw_samples(axis: Axes, points: Sequence[Point]) -> None:
    axis.set_title("Throughput in samples", **_TITLE)
    _draw_rates(axis, points, "Samples per second", lambda point: 1.0)


def _draw_pixels(axis: Axes, points: Sequence[Point]) -> None:
    axis.set_title("Throughput in pixels", **_TITLE)
    label, scale = _rate_unit(points)
    _draw_rates(axis, points, label, lambda point: point.pixels / scale)


def _draw_rates(
    axis: Axes, points: Sequence[Point], label: str, of_a_sample: Callable[[Point], float]
) -> None:
    """Rates of the time of a step, with whiskers of its interval."""
    values, slowest, fastest = (
        [of_a_sample(p) * p.rate * p.time / time for p, time in zip(points, times, strict=True)]
        for times in zip(*((p.time, p.time_high, p.time_low) for p in points), strict=True)
    )
    ends = list(zip(slowest, fastest, strict=True))
    _by_tile(
        axis, points, values, label, ends, most=max(filter(np.isfinite, fastest), default=np.nan)
    )


def _by_tile(
    axis: Axes,
    points: Sequence[Point],
    values: Sequence[float],
    label: str,
    ends: Sequence[tuple[float, float]] | None = None,
    most: float = np.nan,
) -> None:
    """A line over the tiles for each batch; failures in a band above, a row for each batch.

    ``ends`` are those of whiskers, and ``most`` is a value that the axis reaches in any case.
    """
    tiles, batches = _axes_of(points)
    for batch in batches:
        own = [i for i, point in enumerate(points) if point.batch == batch]
        x = [tiles.index(points[i].tile) for i in own]
        y = np.array([values[i] for i in own])
        colour = _colour(batches, batch)
        axis.plot(x, y, color=colour, marker="o", markersize=5, linewidth=1.6)
        if ends is not None:
            reach = np.abs(np.array([ends[i] for i in own]).T - y)
            axis.errorbar(x, y, reach, color=colour, fmt="none", capsize=3, linewidth=1.2)
    axis.set_xticks(range(len(tiles)), tiles)
    axis.set_xlim(-0.4, len(tiles) - 0.5)
    axis.set_xlabel("Tile (pixels)", **TEXT)
    axis.set_ylabel(label, **TEXT)
    top = _top([*values, most])
    if top is None:
        _silent(axis, "not recorded")
        top = 1.0
    failed = [point for point in points if point.failure]
    rows = sorted({point.batch for point in failed})
    step = top * min(0.09, 0.5 / max(len(rows), 1))
    for point in failed:
        _cross(
            axis,
            tiles.index(point.tile),
            top + (rows.index(point.batch) + 0.5) * step,
            point.failure,
            _colour(batches, point.batch),
        )
    if failed:
        axis.axhspan(top, top + len(rows) * step, **_BAND)
    axis.set_ylim(0, top + len(rows) * step)
    axis.set_yticks([tick for tick in axis.get_yticks() if 0 <= tick <= top])


def _draw_times(axis: Axes, points: Sequence[Point]) -> None:
    """A bar for each case, its phases on one another in training."""
    tiles, batches = _axes_of(points)
    phased = any(point.phases for point in points)
    axis.set_title(
        "Time of a step, mean of each phase" if phased else "Time of a step, median", **_TITLE
    )
    width = min(0.84 / len(batches), 0.28)
    ends = [high for p in points for high in (p.time, p.time_high)]
    top = _top([sum(point.phases.values()) for point in points] if phased else ends)
    if top is None:
        axis.set_yticks([])
        top = 1.0
    crowded = len(points) > 20
    chip = _CHIP | ({"fontsize": 6} if crowded else {})
    ticks = []
    for point in points:
        x = tiles.index(point.tile) + (batches.index(point.batch) + 0.5 - len(batches) / 2) * width
        ticks.append(x)
        if np.isnan(point.time):
            axis.bar(x, top, 0.86 * width, facecolor="white", edgecolor="#b5b5b5", hatch="////")
            axis.text(x, top / 2, point.failure, rotation=90, ha="center", va="center", **chip)
            continue
        if point.phases:
            bottom = 0.0
            for phase, value in point.phases.items():
                axis.bar(x, value, 0.86 * width, bottom=bottom, color=PHASES[phase])
                bottom += value
        else:
            axis.bar(x, point.time, 0.86 * width, color=_colour(batches, point.batch))
            axis.errorbar(
                x,
                point.time,
                np.abs([[point.time_low - point.time], [point.time_high - point.time]]),
                color=STYLE["ink"],
                fmt="none",
                capsize=2.5,
                linewidth=1.1,
            )
        if point.failure:
            axis.text(x, point.time, point.failure, ha="center", va="bottom", **chip)
    axis.set_xticks(ticks, [str(point.batch) for point in points], minor=True)
    axis.set_xticks(range(len(tiles)), tiles)
    axis.tick_params(axis="x", which="minor", length=0, labelsize=STYLE["small"] - 1)
    axis.tick_params(axis="x", which="minor", rotation=90 if crowded else 0)
    axis.tick_params(axis="x", which="major", length=0, pad=20 if crowded else 16)
    axis.grid(visible=False, axis="x")
    axis.set_xlim(-0.5, len(tiles) - 0.5)
    axis.set_ylim(0, top)
    axis.set_xlabel("Batch, and below it the tile (pixels)", **TEXT)
    axis.set_ylabel("Time (ms)", **TEXT)
    if phased:
        told = [phase for phase in PHASES if any(phase in point.phases for point in points)]
        handles = [_handle(phase, PHASES[phase], marker="s", line="") for phase in told]
        axis.legend(handles=handles, loc="upper left", **LEGEND)


def _draw_frontier(axis: Axes, points: Sequence[Point], on_host: bool) -> None:
    """Each case by its memory and its throughput; a line joins those that nothing beats in both."""
    tiles, batches = _axes_of(points)
    peaks = [_peak(point, on_host) for point in points]
    unit, bytes_scale = _byte_unit(peaks)
    rates, rate_scale = _rate_unit(points)
    placed = [
        (peak / bytes_scale, point.pixel_rate / rate_scale, point)
        for peak, point in zip(peaks, points, strict=True)
        if np.isfinite(peak) and np.isfinite(point.pixel_rate)
    ]
    failed = [point for point in points if point.failure]
    axis.set_title("Memory against throughput", **_TITLE)
    axis.set_xlabel(f"Peak {'host' if on_host else 'device'} memory ({unit})", **TEXT)
    axis.set_ylabel(rates, **TEXT)
    if placed:
        for memory, rate, point in placed:
            marker, colour = _marker(tiles, point.tile), _colour(batches, point.batch)
            axis.plot(memory, rate, marker=marker, color=colour, markersize=7, linestyle="")
        most, least = (end(memory for memory, _, _ in placed) for end in (max, min))
        span = most - least or most
        axis.set_xlim(least - 0.25 * span, most + 0.1 * span)  # room for names on the left
        axis.set_ylim(0, _top([rate for _, rate, _ in placed]))
        axis.set_xticks([tick for tick in axis.get_xticks() if tick >= 0])
        best = frontier([(memory, rate) for memory, rate, _ in placed])
        _draw_best(axis, [placed[i] for i in best])
    else:
        text = "memory not recorded:\nnothing to weigh throughput against"
        _silent(axis, text, 0.37 if failed else 0.5)
        axis.set_xticks([])
        axis.set_ylim(0, 1)
    if failed:
        _draw_beyond(axis, failed, batches)


def _draw_best(axis: Axes, best: Sequence[tuple[float, float, Point]]) -> None:
    """The frontier and the names of its points, above and to the left, where the line, which
    rises, is not; of points that are too near one another the first is named."""
    memories, rates = [memory for memory, _, _ in best], [rate for _, rate, _ in best]
    axis.plot(memories, rates, color=STYLE["faint"], linestyle="--", linewidth=1.2, zorder=1)
    (left, right), (_, top) = axis.get_xlim(), axis.get_ylim()
    x = y = -np.inf
    for memory, rate, point in best:
        if memory - x > 0.2 * (right - left) or rate - y > 0.05 * top:
            x, y = memory, rate
            axis.annotate(
                point.name, (x, y), (-4, 5), textcoords="offset points", ha="right", **_NOTE
            )


def _draw_beyond(axis: Axes, failed: Sequence[Point], batches: Sequence[int]) -> None:
    """Failures have no throughput: they stand in a band to the right of all memory."""
    left, right = axis.get_xlim()
    end = right + 0.34 * (right - left)
    ticks = [tick for tick in axis.get_xticks() if tick <= right]
    axis.axvspan(right, end, **_BAND)
    axis.set_xlim(left, end)
    axis.set_xticks(ticks)
    top = axis.get_ylim()[1]
    step = top * min(0.085, 0.95 / len(failed))
    for row, point in enumerate(failed):
        _cross(
            axis,
            right + 0.03 * (right - left),
            top - (row + 0.7) * step,
            f"{point.name} {point.failure}",
            _colour(batches, point.batch),
        )


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points no other beats in both: by less memory, each with more throughput.

    >>> frontier([(2.0, 5.0), (1.0, 4.0), (3.0, 4.5), (4.0, 6.0)])
    [1, 0, 3]
    """
    best: list[int] = []
    for i in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not best or points[i][1] > points[best[-1]][1]:
            best.append(i)
    return best


_TITLE: dict[str, Any] = {**TITLE, "pad": 8}
_NOTE: dict[str, Any] = {"fontsize": STYLE["small"] - 1, "color": STYLE["ink"]}
_CHIP: dict[str, Any] = {
    **_NOTE,
    "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.5},
}
_BAND: dict[str, Any] = {
    "facecolor": "#f4f4f4",
    "edgecolor": "#dddddd",
    "hatch": "////",
    "zorder": 0,
}


def _axes_of(points: Sequence[Point]) -> tuple[list[str], list[int]]:
    """Tiles and batches in their order."""
    return list(dict.fromkeys(p.tile for p in points)), sorted({p.batch for p in points})


def _colour(batches: Sequence[int], batch: int) -> str:
    colours: tuple[str, ...] = STYLE["colours"]
    return colours[batches.index(batch) % len(colours)]


def _marker(tiles: Sequence[str], tile: str) -> str:
    return MARKERS[tiles.index(tile) % len(MARKERS)]


def _legend(points: Sequence[Point]) -> list[Any]:
    """Colours are batches and shapes are tiles."""
    tiles, batches = _axes_of(points)
    grey = STYLE["faint"]
    return [
        *(_handle(f"batch {batch}", _colour(batches, batch)) for batch in batches),
        *(_handle(f"tile {tile}", grey, _marker(tiles, tile), "") for tile in tiles),
        _handle("frontier", grey, "", "--"),
    ]


def _handle(label: str, colour: str, marker: str = "o", line: str = "-") -> Any:
    return require("matplotlib.lines", "plot").Line2D(
        [], [], color=colour, marker=marker, linestyle=line, markersize=6, label=label
    )


def _cross(axis: Axes, x: float, y: float, text: str, colour: str) -> None:
    axis.plot(x, y, marker="x", color=colour, markersize=7, markeredgewidth=2.2, linestyle="")
    axis.annotate(text, (x, y), (8, 0), textcoords="offset points", va="center", **_CHIP)


def _silent(axis: Axes, text: str, x: float = 0.5) -> None:
    axis.text(
        x,
        0.5,
        text,
        transform=axis.transAxes,
        ha="center",
        va="center",
        fontsize=STYLE["text"],
        color=STYLE["faint"],
    )
    axis.set_yticks([])


def _peak(point: Point, on_host: bool) -> float:
    return point.host_peak if on_host else point.device_peak


def _top(values: Sequence[float]) -> float | None:
    """A little above the largest; None where there is none."""
    finite = [value for value in values if np.isfinite(value)]
    return 1.08 * max(finite) or 1.0 if finite else None


def _byte_unit(values: Sequence[float]) -> tuple[str, float]:
    large = (_top(values) or 0) >= 2**30
    return ("GiB", 2.0**30) if large else ("MiB", 2.0**20)


def _rate_unit(points: Sequence[Point]) -> tuple[str, float]:
    """The label of an axis of rates, and what they are divided by."""
    kind = "useful pixels" if points[0].useful else "pixels"
    top = _top([point.pixel_rate for point in points]) or 0
    for word, scale in (("Thousand million", 1e9), ("Million", 1e6), ("Thousand", 1e3)):
        if top >= scale:
            return f"{word} {kind} per second", scale
    return f"{kind.capitalize()} per second", 1.0
