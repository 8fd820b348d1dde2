"""The figures of a run of inference, each with a caption and its numbers in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import PenstockError, format_seconds, plural
from ...data import Box, open_source
from ..charts.chart import Axis, Figure, Panel, Series, before_after_figure
from ..charts.metrics import row_gauges
from ..content import Picture
from .job_files import InferenceRun, Telemetry

_MOST_PROCESSES = 4
"""The most processes of one run whose telemetry is drawn."""
_CAPTIONS = {
    "cpu": "Processor of the run over time; 100 % is one core.",
    "ram": "Memory of the run over time, and the ceiling of its plan.",
    "net_io": "Network of the machine over time.",
    "disk_io": "Disks over time: those of the run (solid) and of the machine (dashed).",
    "gpu_util": "How busy each GPU was over time.",
    "vram": "Memory of each GPU over time.",
    "blocks_written": "Blocks written over time.",
}
_QUIET = ("retries", "retry_seconds", "failing_seconds", "retry_for")
"""Gauges that are drawn only if they ever leave 0, or never."""


_SIDE = 384
"""Voxels of the side of a plane that is shown, at most."""


def stage_pictures(run: InferenceRun) -> list[Picture]:
    """The shares of the time of each stage; none for a run that is not done."""
    caption = "How each stage spent the time of its threads: at work, waiting, or idle."
    return [Picture("stages", caption, partial(draw_stages, run))] if run.stages else []


def seam_pictures(run: InferenceRun) -> list[Picture]:
    """The difference of tiles from a larger input; none for a run that did not measure it."""
    caption = "How far tiles are from a larger input, by the distance from a seam."
    measured = isinstance(run.plan.get("seam_error"), dict)
    return [Picture("seams", caption, partial(draw_seams, run))] if measured else []


def draw_seams(run: InferenceRun) -> Figure:
    """A line and its interval: the difference by the distance from a seam."""
    measured = run.plan["seam_error"]
    mean, low, high = (100 * np.asarray(measured[n]) for n in ("by_distance", "low", "high"))
    places, series = np.arange(len(mean)), []
    if len(low):
        series += [Series("95 % interval", places, high, "area", base=low, faint=True)]
    series += [Series("mean", places, mean)]
    of = "labels" if measured["labels"] else "range" if len(low) else "local range"
    x, y = Axis("Distance from a seam", "voxels"), Axis("Mean difference", f"% of the {of}")
    note = f"measured on {plural(measured['places'], 'place')} of the data before the job began"
    return Figure("What tiles lose at their seams", note, [Panel("", x, y, series)])


def draw_stages(run: InferenceRun) -> Figure:
    """A bar for each stage: the shares of its threads' time at work and waiting."""
    stages = run.stages
    worked = (run.seconds or 1.0) * run.processes
    places, base, series = np.arange(len(stages)), np.zeros(len(stages)), []
    for label, colour, name in (("at work", 0, "busy"), ("waiting", 4, "waited")):
        share = [100 * getattr(s, name) / max(s.threads, 1) / worked for s in stages.values()]
        top = np.minimum(base + share, 100)
        series.append(Series(label, places, top, "bars", colour, base=base))
        base = top
    names = [f"{name} ({stage.threads})" for name, stage in stages.items()]
    x, y = Axis("Stage (threads)", ticks=names), Axis("Share of the time", "%", high=100)
    note = f"{format_seconds(run.seconds or 0.0)}; threads in brackets"
    return Figure("What the threads of each stage did", note, [Panel("", x, y, series)])


def telemetry_pictures(run: InferenceRun) -> list[Picture]:
    """Queues, processor, memory against the plan, disks, network and GPUs over time."""
    planned = run.summary.get("planned_peak") or sum((run.plan.get("memory") or {}).values())
    pictures = []
    for number, each in enumerate(run.telemetry[:_MOST_PROCESSES]):
        gauges = row_gauges(each.header, each.rows)
        gauges = {n: g for n, g in gauges.items() if n not in _QUIET and _moves(g)}
        if planned and (ram := gauges.get("ram")):
            (panel,) = ram.panels
            panel = replace(panel, limits=[(float(planned), "plan")])
            gauges["ram"] = replace(ram, panels=[panel])
        who = f"{each.name}: " if each.name else ""
        figures = _queues_first(each, gauges)
        for name, figure in figures.items():
            caption = _CAPTIONS.get(name) or f"{figure.title} over time."
            kept = f"{name}_{number}" if number else name
            draw = partial(figures.__getitem__, name)
            pictures.append(Picture(kept, f"{who}{caption}", draw))
    return pictures


def _moves(figure: Figure) -> bool:
    """Whether a gauge has a value that is not 0."""
    lines = (line for panel in figure.panels for line in panel.series)
    return any(np.nanmax(np.abs(np.asarray(line.y, float))) > 0 for line in lines)


def _queues_first(each: Telemetry, gauges: dict[str, Figure]) -> dict[str, Figure]:
    """The gauges, with the queues of the run joined in one figure."""
    queues = {name: gauges[name] for name in each.header["queues"] if name in gauges}
    if len(queues) < 2:
        return gauges
    panels = [replace(q.panels[0], title=name) for name, q in queues.items()]
    joined = Figure("Queues of the run", next(iter(queues.values())).note, panels)
    return {"queues": joined, **{n: g for n, g in gauges.items() if n not in queues}}


def output_pictures(run: InferenceRun) -> list[Picture]:
    """The plane in the middle of the first output, beside that of the input.

    Args:
        run: The run. Its arrays are read where they lie on this machine.

    Returns:
        One picture; none of a run that is not done, of labels, and of arrays that are elsewhere or
        cannot be read.
    """
    heads = run.fingerprint.get("heads") or []
    if not run.summary or not heads:
        return []
    try:
        return list(_plane(run, _opened(_places(run, "outputs")[0]), heads[0][1]))
    except (PenstockError, OSError, ValueError):
        return []


def _places(run: InferenceRun, key: str) -> list[str]:
    """Addresses of arrays, without the hash that follows each."""
    named = run.fingerprint.get(key) or []
    return [text.rpartition("#")[0] for text in ([named] if isinstance(named, str) else named)]


def _opened(place: str) -> Any:
    if not Path(place).exists():
        raise FileNotFoundError(f"{place} is not on this machine")
    return open_source(place)


def _plane(run: InferenceRun, output: Any, kind: str) -> Iterator[Picture]:
    """The plane in the middle of the volume, before and after."""
    if kind == "labels":
        return  # their difference from the input means nothing
    (place,) = _places(run, "input")
    after, z = _middle(output)
    before, _ = _middle(_opened(place))
    if before.shape != after.shape:
        return
    images = {"input": before, "output": after}
    caption = f"Plane z = {z} in the middle of the volume: input, output, difference."
    yield Picture("plane", caption, partial(before_after_figure, images, f"plane z = {z}"))


def _middle(source: Any) -> tuple[NDArray[Any], int]:
    """A square in the middle plane of the first volume and channel, and its z."""
    domain = source.domain
    start, stop = list(domain.start), [low + 1 for low in domain.start]
    for axis in (2, 3, 4):
        size = 1 if axis == 2 else min(_SIDE, domain.shape[axis])
        start[axis] = domain.start[axis] + (domain.shape[axis] - size) // 2
        stop[axis] = start[axis] + size
    return source.read(Box(tuple(start), tuple(stop)))[0, 0, 0], start[2]
