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

from ..base import plural
from ..instruments import PHASES, Interval
from ..reports import Axis, Figure, Panel, Series, save_figures, thinned
from .advice import GOOD_ACROSS
from .estimates import Amdahl, Usl, why_none
from .runs import phases_of
from .study import ScalingPoint, Study
from .tables import counted, label, units

_MOST_READINGS = 1000
"""The most readings of a configuration that are drawn. More do not show, and a page would wait."""


def plot_scaling(studies: Sequence[Study], folder: Path, replace: bool = False) -> list[Path]:
    """Draw all figures for which the runs have data.

    Args:
        studies: The studies; with several, the kind of each is in its file names.
        folder: The folder that the PNG files are written to.
        replace: Replace files even if somebody edited them.

    Returns:
        The files that were written.
    """
    figures = {
        folder / f"{name}{f'_{study.kind}' * (len(studies) > 1)}.png": figure
        for study in studies
        for name, figure in figures_of(study).items()
    }
    return save_figures(figures, replace)


def figures_of(study: Study) -> dict[str, Figure]:
    """The figures of a study by name, those for which its runs have data."""
    drawn = {name: draw(study) for name, draw in FIGURES.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def draw_speedup(study: Study) -> Figure | None:
    """Speed-up by devices; None if all runs have the same number of devices."""
    points = sorted(study.points, key=lambda point: point.at.devices)
    x = np.array([point.at.devices for point in points], np.float64)
    if len(set(x)) < 2:
        return None
    base = study.base.devices
    fine = np.geomspace(min(x), max(x), 60)
    series = [Series("ideal", fine, fine / base, "line", "faint", 1)]
    for law, name, colour in ((study.amdahl, "Amdahl", 2), (study.usl, "USL", 3)):
        if isinstance(law, Amdahl | Usl):
            # A law was fitted to sizes from the baseline up.
            above = fine[fine >= base]
            series.append(Series(name, above, law.speedup(above / base), "line", colour, 2))
    y = np.array([point.speedup.value for point in points])
    # If a number of devices ran on several numbers of nodes, the line takes the fastest.
    best = {n: max(y[x == n]) for n in sorted(set(x))}
    series.append(Series("", list(best), list(best.values()), silent=True))
    texts = ["" if place == base else f"{value:.2f}x" for place, value in zip(x, y, strict=True)]
    low, high = _ends([point.speedup for point in points])
    series.append(Series("measured", x, y, "points", 0, low=low, high=high, texts=texts))
    unit = units([study.base.first])
    x_axis = Axis(f"{unit[:1].upper()}{unit[1:]}", log=True)
    y_axis = Axis(f"Speed-up over {counted(study.base.first)}", "x", log=True)
    return _figure(study, "Speed-up", _intervals_drawn(study), x_axis, y_axis, series)


def draw_efficiency(study: Study) -> Figure:
    """A bar for each configuration, green if it is above 75 %."""
    values = np.array([100 * point.efficiency.value for point in study.points])
    low, high = _ends([point.efficiency for point in study.points], 100)
    series = []
    for name, colour, good in (("good", 2, True), ("below", 1, False)):
        at = [n for n, value in enumerate(values) if bool(value > 100 * GOOD_ACROSS) is good]
        ends: dict[str, Any] = {"low": [low[n] for n in at], "high": [high[n] for n in at]}
        texts = [f"{values[n]:.1f} %" for n in at]
        bars = Series(name, [float(n) for n in at], values[at], "bars", colour, **ends, texts=texts)
        series += [bars] * bool(at)
    limit = [(100 * GOOD_ACROSS, "good across nodes above")]
    x, y, shown = _names(study.points), Axis("Efficiency", "%"), _intervals_drawn(study)
    return _figure(study, "Parallel efficiency", shown, x, y, series, limit)


def draw_epoch(study: Study) -> Figure | None:
    """Seconds of an epoch by phase, means over ranks; the rest is time outside steps. None if the
    time of an epoch is not known for all configurations."""
    means = (point.at.mean(lambda run: run.per_epoch) for point in study.points)
    times = np.array([time for time in means if time is not None])
    if len(times) < len(study.points):
        return None
    phases = [phases_of(point.at.runs) for point in study.points]
    places, base, series = np.arange(float(len(times))), np.zeros(len(times)), []
    for number, phase in enumerate(PHASES):
        heights = np.array([seconds.get(phase, 0.0) for seconds in phases])
        if heights.any():
            top = base + heights
            bars = Series(phase.replace("_", " "), places, top, "bars", number, base=base)
            series.append(bars)
            base = top
    # Our trainings do not count a checkpoint that follows the validation.
    name = "validation, checkpoints before it, between steps"
    name = name if base.any() else "all, phases not measured"
    whole = np.maximum(times, base)
    series.append(Series(name, places, whole, "bars", "bar", base=base))
    x, y = _names(study.points), Axis("Time of an epoch", "s")
    return _figure(study, "Time of an epoch", "means over runs and ranks", x, y, series)


def draw_utilisation(study: Study) -> Figure | None:
    """Readings of GPU-Util and their mean; None if none was logged."""
    readings = [
        [value for run in point.at.runs for value in run.utilisation] for point in study.points
    ]
    if not any(readings):
        return None
    places = [float(place) for place, values in enumerate(readings) if values]
    kept = [values for values in readings if values]
    means = [float(np.mean(values)) for values in kept]
    notes = [f"{mean:.0f} %, n = {len(v)}" for mean, v in zip(means, kept, strict=True)]
    along, dots = list[float](), list[float]()
    for place, values in zip(places, kept, strict=True):
        at = thinned(values, _MOST_READINGS)
        along += (place + 0.4 * ((at + 0.5) / len(values) - 0.5)).tolist()
        dots += np.take(values, at).tolist()
    series = [
        Series("mean", places, means, "bars", 5, texts=notes),
        Series("readings", along, dots, "points", 0),
    ]
    shown = "dots are readings, in the order in which they were logged"
    if max(map(len, kept)) > _MOST_READINGS:
        shown += ": the least and the greatest of each few"
    x, y = _names(study.points), Axis("GPU-Util", "%", high=105)
    return _figure(study, "GPU utilisation", shown, x, y, series)


FIGURES: dict[str, Callable[[Study], Figure | None]] = {
    "speedup": draw_speedup,
    "efficiency": draw_efficiency,
    "epoch": draw_epoch,
    "utilisation": draw_utilisation,
}


def _figure(
    study: Study,
    title: str,
    shown: str,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    limits: Sequence[tuple[float, str]] = (),
) -> Figure:
    runs = sum(len(point.at.runs) for point in study.points)
    kind = "kind not determined" if study.kind == "undetermined" else f"{study.kind} scaling"
    note = f"{kind}, {plural(runs, 'run')}; {shown}"
    return Figure(title, note, [Panel("", x, y, series, limits)])


def _intervals_drawn(study: Study) -> str:
    if any(point.efficiency.low is not None for point in study.points):
        return "lines are 95 % intervals"
    return why_none(study.points[-1].efficiency)


def _ends(intervals: Sequence[Interval], factor: float = 1.0) -> list[list[float | None]]:
    """The low ends and the high ends of intervals."""
    return [
        [None if end is None else factor * end for end in ends]
        for ends in ([each.low for each in intervals], [each.high for each in intervals])
    ]


def _names(points: Sequence[ScalingPoint]) -> Axis:
    return Axis("", ticks=[label(point.at.first) for point in points])
