"""The figures of a scaling study.

    speedup       speed-up and its ideal, with intervals and the fitted laws
    efficiency    bars, and the line of 75 %
    epoch         seconds of an epoch, split by phase if phases were measured
    utilisation   GPU-Util of each configuration, if it was logged

Each study has its own figures; with several studies the files are named by their kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..base import plural, significant
from ..instruments import PHASES
from ..reports import LEGEND, STYLE, TEXT, Axes, Figure, blank, heading, save_figures, tidy
from .advice import GOOD_ACROSS
from .intervals import why_none
from .laws import Amdahl, Usl
from .straggler import phases_of
from .study import ScalingPoint, Study
from .tables import counted, label, on_nodes, units

_REST = "#b8b8b8"


def plot_scaling(studies: Sequence[Study], folder: Path, replace: bool = False) -> list[Path]:
    """Draw all figures for which the runs have data.

    Args:
        studies: The studies; with several, the kind of each is in its file names.
        folder: The folder that the PNG files are written to.
        replace: Replace files even if somebody edited them.

    Returns:
        The files that were written.
    """
    figures = {}
    for study in studies:
        for name, draw in FIGURES.items():
            figure = draw(study)
            if figure is not None:
                kind = f"_{study.kind}" if len(studies) > 1 else ""
                figures[folder / f"{name}{kind}.png"] = figure
    return save_figures(figures, replace)


def draw_speedup(study: Study) -> Figure | None:
    """Speed-up by devices; None if all runs have the same number of devices."""
    points = sorted(study.points, key=lambda point: point.at.devices)
    x = np.array([point.at.devices for point in points])
    if len(set(x)) < 2:
        return None
    figure, axis = _frame(study, "Speed-up", _intervals_drawn(study))
    base = study.base.devices
    fine = np.geomspace(min(x), max(x), 200)
    axis.plot(fine, fine / base, "--", color=STYLE["faint"], linewidth=1.1, label="ideal")
    for law, name, colour in ((study.amdahl, "Amdahl", 2), (study.usl, "USL", 3)):
        if isinstance(law, Amdahl | Usl):
            # A law was fitted to sizes from the baseline up.
            above = fine[fine >= base]
            y = law.speedup(above / base)
            axis.plot(above, y, ":", color=STYLE["colours"][colour], label=name)
    y = np.array([point.speedup.value for point in points])
    # If a number of devices ran on several numbers of nodes, the line takes the fastest.
    best = {n: max(y[x == n]) for n in sorted(set(x))}
    axis.loglog(list(best), list(best.values()), base=2, color=STYLE["colours"][0])
    axis.plot(x, y, "o", color=STYLE["colours"][0], markersize=5, label="measured")
    _intervals(axis, x, [point.speedup for point in points], STYLE["colours"][0])
    below = -12 if y[-1] >= y[0] else 5
    for point, place, value in zip(points, x, y, strict=True):
        several = np.count_nonzero(x == place) > 1
        if place == base and not several:
            continue
        nodes = f", {on_nodes(point.at.first)}" if several and point.at.nodes else ""
        axis.annotate(
            f"{value:.2f}x{nodes}", (place, value), (6, below), textcoords="offset points",
            fontsize=STYLE["small"], color=STYLE["ink"],
        )  # fmt: skip
    ticks = sorted(set(x))
    axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.yaxis.set_major_formatter(lambda value, place: f"{value:g}x")
    axis.minorticks_off()
    unit = units([study.base.first])
    axis.set_xlabel(f"{unit[:1].upper()}{unit[1:]}", **TEXT)
    axis.set_ylabel(f"Speed-up over {counted(study.base.first)}", **TEXT)
    axis.legend(**LEGEND)
    return figure


def draw_efficiency(study: Study) -> Figure:
    """A bar for each configuration, green if it is above 75 %."""
    figure, axis = _frame(study, "Parallel efficiency", _intervals_drawn(study))
    values = [100 * point.efficiency.value for point in study.points]
    places = np.arange(len(values))
    colours = [STYLE["colours"][2 if value > 100 * GOOD_ACROSS else 1] for value in values]
    axis.bar(places, values, width=0.55, color=colours)
    _intervals(axis, places, [point.efficiency for point in study.points], STYLE["ink"], 100)
    axis.axhline(100 * GOOD_ACROSS, color=STYLE["limit"], ls="--", linewidth=1.1)
    axis.annotate(
        f"{100 * GOOD_ACROSS:.0f} %", (1, 100 * GOOD_ACROSS), (2, 0),
        xycoords=("axes fraction", "data"),
        textcoords="offset points", va="center", fontsize=STYLE["small"], color=STYLE["limit"],
    )  # fmt: skip
    for place, value in zip(places, values, strict=True):
        axis.annotate(
            f"{value:.1f} %", (place, 0), (0, 5), textcoords="offset points", ha="center",
            fontsize=STYLE["small"], color="white", fontweight="bold",
        )  # fmt: skip
    axis.set_ylim(0, max(105.0, 1.08 * max(values)))
    _names(axis, study.points)
    axis.set_ylabel("Efficiency (%)", **TEXT)
    return figure


def draw_epoch(study: Study) -> Figure | None:
    """Seconds of an epoch by phase, means over ranks; the rest is time outside steps. None if the
    time of an epoch is not known for all configurations."""
    means = (point.at.mean(lambda run: run.per_epoch) for point in study.points)
    times = np.array([time for time in means if time is not None])
    if len(times) < len(study.points):
        return None
    figure, axis = _frame(study, "Time of an epoch", "means over runs and ranks")
    phases = [phases_of(point.at.runs) for point in study.points]
    places, bottom = np.arange(len(times)), np.zeros(len(times))
    for number, phase in enumerate(PHASES):
        heights = np.array([seconds.get(phase, 0.0) for seconds in phases])
        if heights.any():
            name, colour = phase.replace("_", " "), STYLE["colours"][number]
            axis.bar(places, heights, width=0.55, bottom=bottom, color=colour, label=name)
            bottom += heights
    rest = np.maximum(times - bottom, 0)
    # Our trainings do not count a checkpoint that follows the validation.
    name = "validation, checkpoints\nbefore it, between steps"
    name = name if bottom.any() else "all, phases not measured"
    axis.bar(places, rest, width=0.55, bottom=bottom, color=_REST, label=name)
    for place, time in zip(places, times, strict=True):
        axis.annotate(
            f"{significant(time)} s", (place, max(time, bottom[place])), (0, 3), ha="center",
            textcoords="offset points", fontsize=STYLE["small"], color=STYLE["ink"],
        )  # fmt: skip
    _names(axis, study.points)
    axis.set_ylim(0, 1.05 * max(axis.get_ylim()[1], 1e-9))
    axis.set_ylabel("Seconds", **TEXT)
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3, **LEGEND)
    return figure


def draw_utilisation(study: Study) -> Figure | None:
    """Readings of GPU-Util and their mean; None if none was logged."""
    readings = [
        [value for run in point.at.runs for value in run.utilisation] for point in study.points
    ]
    if not any(readings):
        return None
    shown = "dots are readings, in the order in which they were logged"
    figure, axis = _frame(study, "GPU utilisation", shown)
    for place, values in enumerate(readings):
        if values:
            axis.bar(place, np.mean(values), width=0.55, color=STYLE["colours"][5])
            spread = np.linspace(-0.2, 0.2, len(values)) if len(values) > 1 else np.zeros(1)
            axis.plot(place + spread, values, "o", color=STYLE["colours"][0], markersize=3)
        note = f"{np.mean(values):.0f} %, n = {len(values)}" if values else "not logged"
        axis.annotate(
            note, (place, 0), (0, 5), textcoords="offset points", ha="center",
            fontsize=STYLE["small"], color=STYLE["ink"],
        )  # fmt: skip
    axis.set_ylim(0, 105)
    _names(axis, study.points)
    axis.set_ylabel("GPU-Util (%), bars are means", **TEXT)
    return figure


FIGURES: dict[str, Callable[[Study], Figure | None]] = {
    "speedup": draw_speedup,
    "efficiency": draw_efficiency,
    "epoch": draw_epoch,
    "utilisation": draw_utilisation,
}


def _frame(study: Study, title: str, shown: str) -> tuple[Figure, Axes]:
    figure = blank(max(6.4, 1.3 * len(study.points)), 4.4, right=0.97)
    runs = sum(len(point.at.runs) for point in study.points)
    kind = "kind not determined" if study.kind == "undetermined" else f"{study.kind} scaling"
    heading(figure, title, f"{kind}, {plural(runs, 'run')}; {shown}")
    axis = figure.subplots()
    tidy(axis)
    return figure, axis


def _intervals_drawn(study: Study) -> str:
    if any(point.efficiency.low is not None for point in study.points):
        return "lines are 95 % intervals"
    return why_none(study.points[-1].efficiency)


def _intervals(
    axis: Axes, x: Any, intervals: Sequence[Any], colour: str, factor: float = 1.0
) -> None:
    for place, interval in zip(x, intervals, strict=True):
        if interval.low is not None and interval.high is not None:
            ends = factor * interval.low, factor * interval.high
            axis.vlines(place, *ends, color=colour, linewidth=1.4)


def _names(axis: Axes, points: Sequence[ScalingPoint]) -> None:
    names = [label(point.at.first).replace(" (", "\n(") for point in points]
    axis.set_xticks(range(len(names)), names)
    margin = 0.6 if len(names) > 1 else 1.2
    axis.set_xlim(-margin, len(names) - 1 + margin)
    axis.grid(visible=False, axis="x")
