"""The figures of a run of inference, each with a caption and its numbers in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ...base import format_seconds, plural
from ..content import Picture
from ..figures.canvas import (
    LEGEND,
    STYLE,
    Curve,
    Figure,
    Panel,
    blank,
    colour_at,
    draw,
    heading,
    tidy,
    with_unit,
)
from ..figures.run import row_panels
from ..words import listed
from .record import InferenceRun, Telemetry
from .sentences import busy_shares
from .trace import StageTimeline, read_timeline

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


def stage_pictures(run: InferenceRun) -> list[Picture]:
    """The timeline of stages if there is a trace, and their shares of the time."""
    pictures = []
    if run.trace is not None and (timeline := read_timeline(run.trace)) is not None:
        pictures.append(
            Picture(
                "timeline",
                "Threads at work in each stage over time, from the trace.",
                _timeline_words(timeline),
                partial(draw_timeline, timeline),
            )
        )
    if run.stages:
        shares = [f"{name} {share:.0%}" for name, share in busy_shares(run).items()]
        pictures.append(
            Picture(
                "stages",
                "How each stage spent the time of its threads: at work, waiting, or idle.",
                f"Share of the time in which the threads of a stage worked: {listed(shares)}.",
                partial(draw_stages, run),
            )
        )
    return pictures


def _timeline_words(timeline: StageTimeline) -> str:
    each = [
        f"{name} at most {working.max():.1f}, {working.mean():.2f} in the mean"
        for name, working in timeline.stages.items()
    ]
    return (
        f"Threads at work in {plural(timeline.spans, 'span')} over "
        f"{format_seconds(timeline.seconds)}: {'; '.join(each)}."
    )


def draw_timeline(timeline: StageTimeline) -> Figure:
    """Draw a row for each stage: its threads at work over time."""
    names = list(timeline.stages)
    figure = blank(8.0, 1.5 + 0.5 * len(names))
    below = f"{plural(timeline.spans, 'span')} of the trace"
    heading(figure, "Stages over time", below + "" if timeline.whole else f"{below}, its begin")
    axis = figure.subplots()
    tidy(axis, x="Time (s)", y="")
    t = np.linspace(0, timeline.seconds, next(iter(timeline.stages.values())).size + 1)
    for row, (name, working) in enumerate(timeline.stages.items()):
        base, high = len(names) - 1 - row, max(float(working.max()), 1.0)
        top = base + 0.82 * np.append(working, working[-1]) / high
        colour = colour_at(row)
        axis.fill_between(t, base, top, step="post", color=colour, linewidth=0)
        axis.text(
            1.01, base + 0.3, f"{working.max():.1f}", transform=axis.get_yaxis_transform(),
            fontsize=STYLE["small"], color=STYLE["faint"],
        )  # fmt: skip
        axis.axhline(base, color=STYLE["grid"], linewidth=0.8)
        names[row] = name
    axis.set_yticks([len(names) - 1 - row + 0.35 for row in range(len(names))], names)
    axis.text(
        1.01, len(names) + 0.02, "at most", transform=axis.get_yaxis_transform(),
        fontsize=STYLE["small"], color=STYLE["faint"],
    )  # fmt: skip
    axis.set(xlim=(0, timeline.seconds), ylim=(0, len(names)))
    axis.grid(visible=False, axis="y")
    return figure


def draw_stages(run: InferenceRun) -> Figure:
    """Draw a bar for each stage: the shares of its threads' time at work and waiting."""
    stages = run.stages
    worked = (run.seconds or 1.0) * run.processes
    figure = blank(8.0, 1.7 + 0.36 * len(stages))
    threads = f"{format_seconds(run.seconds or 0.0)}; threads in brackets"
    heading(figure, "What the threads of each stage did", threads)
    axis = figure.subplots()
    tidy(axis, x="Share of the time (%)")
    places = np.arange(len(stages))
    bottom = np.zeros(len(stages))
    for label, colour, name in (
        ("at work", STYLE["colours"][0], "busy"),
        ("waiting", STYLE["colours"][4], "waited"),
    ):
        share = np.array(
            [100 * getattr(s, name) / max(s.threads, 1) / worked for s in stages.values()]
        )
        share = np.minimum(share, 100 - bottom)
        axis.barh(places, share, left=bottom, height=0.62, color=colour, label=label)
        bottom = bottom + share
    axis.set_yticks(places, [f"{name} ({stage.threads})" for name, stage in stages.items()])
    axis.set(xlim=(0, 100), ylim=(len(stages) - 0.5, -0.5))
    axis.grid(visible=False, axis="y")
    figure.legend(loc="outside lower center", ncols=2, **LEGEND)
    return figure


def telemetry_pictures(run: InferenceRun) -> list[Picture]:
    """Queues, processor, memory against the plan, disks, network and GPUs over time."""
    pictures = []
    for number, each in enumerate(run.telemetry[:_MOST_PROCESSES]):
        panels = {name: p for name, p in row_panels(each.header, each.rows).items() if _told(p)}
        planned = (run.summary or {}).get("planned_peak") or sum(
            (run.plan.get("memory") or {}).values()
        )
        if planned and "ram" in panels:
            panels["ram"] = replace(panels["ram"], limit=float(planned), limit_name="plan")
        if "blocks_written" in panels:
            panels["blocks_written"] = replace(
                panels["blocks_written"], title="Blocks written", quantity="Blocks"
            )
        panels = {name: panel for name, panel in panels.items() if name not in _QUIET}
        for name, panel in _queues_first(each, panels).items():
            pictures.append(_picture(name, panel, each, number))
    return pictures


def _told(panel: Panel) -> bool:
    """Whether a panel has a value that is not 0."""
    return any(np.nanmax(np.abs(line.y), initial=0.0) > 0 for line in panel.lines if line.y.size)


def _queues_first(each: Telemetry, panels: dict[str, Panel]) -> dict[str, Panel]:
    """The panels, with the queues of the run joined in one figure of strips."""
    queues = {name: panels[name] for name in each.header["queues"] if name in panels}
    if len(queues) < 2:
        return panels
    lines = [
        replace(line, label=f"{name} (room for {panel.limit:,.0f})" if panel.limit else name)
        for name, panel in queues.items()
        for line in panel.lines
    ]
    lines = [replace(line, colour=place) for place, line in enumerate(lines)]
    joined = Panel("Queues of the run", "Items in queue", "", lines, strips=True)
    return {"queues": joined, **{n: p for n, p in panels.items() if n not in queues}}


def _picture(name: str, panel: Panel, each: Telemetry, number: int) -> Picture:
    who = f"{each.name}: " if each.name else ""
    caption = _CAPTIONS.get(name) or f"{panel.title} over time."
    lines = [line for line in panel.lines if line.y.size and np.isfinite(line.y).any()]
    return Picture(
        f"{name}_{number}" if number else name,
        f"{who}{caption}",
        _panel_words(panel, lines),
        partial(draw, replace(panel, lines=lines)),
    )


def _panel_words(panel: Panel, lines: Sequence[Curve]) -> str:
    each = []
    for line in lines:
        y = line.y[np.isfinite(line.y)]
        low, middle, high = (
            with_unit(float(value), panel.unit) for value in (y.min(), np.median(y), y.max())
        )
        seen = plural(len(y), "reading")
        each.append(f"{line.label} from {low} to {high}, {middle} in the median of {seen}")
    limit = f"; {panel.limit_name} {with_unit(panel.limit, panel.unit)}" if panel.limit else ""
    return f"{panel.title}: {'; '.join(each)}{limit}."
