"""The figure of a suite: throughput, peak memory and waiting for data over the batch size.

A line for each number of workers, a figure for each preset. An interval stands where a run was
launched more than once; a run that failed is a cross on the axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...instruments import Record
from ..suite import Run, runs
from ..suite import heading as words
from ..table import scaled
from .canvas import LEGEND, STYLE, TEXT, TITLE, blank, heading, save_figures, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIB = 2**30


def plot_suite(records: Iterable[Record], out_prefix: Path, replace: bool = False) -> list[Path]:
    """Draw each preset that has a run to show, to ``<out_prefix>.png`` or ``_<preset>.png``;
    returns what was written."""
    presets: dict[str, list[Run]] = {}
    for run in runs(records):
        presets.setdefault(run.case["preset"], []).append(run)
    figures = {}
    for name, own in presets.items():
        if any(run.measured for run in own):
            ending = f"_{name}" if len(presets) > 1 else ""
            figures[out_prefix.with_name(f"{out_prefix.name}{ending}.png")] = draw(own)
    return save_figures(figures, replace)


def draw(own: Sequence[Run]) -> Figure:
    """The runs of one preset."""
    figure = blank(12, 4.4)
    launches = sum(run.launches for run in own)
    heading(figure, words(own), f"{len(own)} runs, {launches} launches; crosses are failures")
    memory = "gpu_memory_peak_bytes"
    place = "GPU"
    if all(run.values[memory] is None for run in own):
        memory, place = "host_memory_peak_bytes", "Host"
    rate = "throughput_samples_per_s"
    panels = [("Samples a second", [run.values[rate] for run in own])]
    peaks = [scaled(run.values[memory], 1 / _GIB) for run in own]
    if any(peak is not None for peak in peaks):
        panels.append((f"{place} memory at most, GiB", peaks))
    shares = [run.shares["data"] for run in own]
    panels.append(("Waiting for data, % of the epochs", [scaled(s, 100) for s in shares]))
    axes = figure.subplots(1, len(panels))
    for number, (title, values) in enumerate(panels):
        _draw(axes[number], title, own, values, intervals=number == 0)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), **LEGEND)
    return figure


def _draw(
    axis: Axes, title: str, own: Sequence[Run], values: Sequence[float | None], intervals: bool
) -> None:
    tidy(axis)
    axis.set_title(title, **TITLE)
    for place, workers in enumerate(dict.fromkeys(sorted(run.workers for run in own))):
        colour = STYLE["colours"][place % len(STYLE["colours"])]
        line = [(run, v) for run, v in zip(own, values, strict=True) if run.workers == workers]
        known = [(run, v) for run, v in line if v is not None]
        batches = [run.batch for run, _ in known]
        axis.plot(
            batches, [v for _, v in known], "o-", ms=5, color=colour, label=f"{workers} workers"
        )
        for run, _ in known if intervals else ():
            rate = run.throughput
            if rate is not None and rate.low is not None and rate.high is not None:
                axis.vlines(run.batch, rate.low, rate.high, color=colour, linewidth=1.4)
        failed = [run.batch for run, _ in line if not run.measured]
        if failed:  # an empty line that is not clipped has no place that a layout could keep free
            axis.plot(failed, [0.0] * len(failed), "x", ms=8, mew=2, color=colour, clip_on=False)
    batches = sorted({run.batch for run in own})
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.minorticks_off()
    axis.set_ylim(0, 1.1 * max(axis.dataLim.y1, 1e-9))
    axis.set_xlabel("Batch on each device", **TEXT)
