"""The figure of a suite: throughput, peak memory and waiting for data over the batch size.

There is a figure for each preset and a line for each number of workers. A run that was launched
more than once has an interval. A run that failed is a cross on the axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from ...instruments import Record
from ..suite.cell import SuiteCell, runs_together
from ..suite.report import heading as words
from ..table import scaled
from .canvas import LEGEND, Axes, Figure, blank, colour_at, heading, save_under, tidy

_GIB = 2**30


def plot_suite(records: Iterable[Record], out_prefix: Path, replace: bool = False) -> list[Path]:
    """Draw the runs of each preset and machine to ``<out_prefix>.png``, or
    ``<out_prefix>_<preset>.png``.

    Args:
        records: The launches of a suite.
        out_prefix: The path of the figures without the suffix ``.png``.
        replace: Replace figures that Penstock did not write.

    Returns:
        The files that were written: none for a preset of which no run was measured.
    """
    presets = runs_together(records)
    figures = {
        name.replace(", machine ", "_") if len(presets) > 1 else "": draw(runs)
        for name, runs in presets.items()
        if any(run.measured for run in runs)
    }
    return save_under(out_prefix, figures, replace)


def draw(runs: Sequence[SuiteCell]) -> Figure:
    """Draw the runs of one preset."""
    figure = blank(12, 4.4)
    launches = sum(run.launches for run in runs)
    heading(figure, words(runs), f"{len(runs)} runs, {launches} launches; crosses are failures")
    rows = [run.values() for run in runs]
    memory, place = "gpu_memory_peak_bytes", "GPU"
    if all(row[memory] is None for row in rows):
        memory, place = "host_memory_peak_bytes", "Host"
    panels = [("Samples a second", [row["throughput_samples_per_s"] for row in rows])]
    peaks = [scaled(row[memory], 1 / _GIB) for row in rows]
    if any(peak is not None for peak in peaks):
        panels.append((f"{place} memory at most, GiB", peaks))
    waits = [scaled(row["shares"]["data"], 100) for row in rows]
    panels.append(("Waiting for data, % of the epochs", waits))
    axes = figure.subplots(1, len(panels))
    for number, (title, values) in enumerate(panels):
        _draw(axes[number], title, runs, values, intervals=number == 0)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), **LEGEND)
    return figure


def _draw(
    axis: Axes,
    title: str,
    runs: Sequence[SuiteCell],
    values: Sequence[float | None],
    intervals: bool,
) -> None:
    tidy(axis, title, "Batch on each device")
    for place, workers in enumerate(sorted({run.workers for run in runs})):
        colour = colour_at(place)
        line = [(run, v) for run, v in zip(runs, values, strict=True) if run.workers == workers]
        drawn = [(run, v) for run, v in line if v is not None]
        x, y = [run.batch for run, _ in drawn], [v for _, v in drawn]
        axis.plot(x, y, "o-", ms=5, color=colour, label=f"{workers} workers")
        for run, _ in drawn if intervals else ():
            rate = run.throughput
            if rate is not None and rate.low is not None and rate.high is not None:
                axis.vlines(run.batch, rate.low, rate.high, color=colour, linewidth=1.4)
        failed = [run.batch for run, _ in line if not run.measured]
        if failed:  # the layout fails for an empty line that is not clipped
            axis.plot(failed, [0.0] * len(failed), "x", ms=8, mew=2, color=colour, clip_on=False)
    batches = sorted({run.batch for run in runs})
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.minorticks_off()
    axis.set_ylim(0, 1.1 * max(axis.dataLim.y1, 1e-9))
