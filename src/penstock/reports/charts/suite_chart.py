"""The figure of a suite: throughput, peak memory and waiting for data over the batch size.

There is a figure for each preset and a line for each number of workers. A run that was launched
more than once has an interval. A run that failed is a cross on the axis.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..suite.cell import SuiteCell
from ..suite.report import heading
from ..table import scaled
from .chart import Axis, Figure, Panel, Series


def draw_suite(runs: Sequence[SuiteCell]) -> Figure:
    """The runs of one preset."""
    launches = sum(run.launches for run in runs)
    rows = [run.values() for run in runs]
    memory, place = "gpu_memory_peak_bytes", "GPU"
    if all(row[memory] is None for row in rows):
        memory, place = "host_memory_peak_bytes", "Host"
    rates = [row["throughput_samples_per_s"] for row in rows]
    panels = [_panel(runs, Axis("Throughput", "samples/s"), rates, True)]
    if any(row[memory] is not None for row in rows):
        peaks = [row[memory] for row in rows]
        panels.append(_panel(runs, Axis(f"{place} memory at most", "B"), peaks))
    waits = [scaled(row["shares"]["data"], 100) for row in rows]
    panels.append(_panel(runs, Axis("Waiting for data, of the epochs", "%"), waits))
    note = f"{len(runs)} runs, {launches} launches; crosses are failures"
    return Figure(heading(runs), note, panels, 3)


def _panel(
    runs: Sequence[SuiteCell], axis: Axis, values: Sequence[float | None], intervals: bool = False
) -> Panel:
    series = []
    batches = sorted({run.batch for run in runs})
    for place, workers in enumerate(sorted({run.workers for run in runs})):
        line = [(run, v) for run, v in zip(runs, values, strict=True) if run.workers == workers]
        x, y = [float(batches.index(run.batch)) for run, _ in line], [v for _, v in line]
        rates = [run.throughput if intervals else None for run, _ in line]
        low, high = ([getattr(rate, end, None) for rate in rates] for end in ("low", "high"))
        series.append(Series(f"{workers} workers", x, y, "dots", place, low=low, high=high))
        failed = [float(batches.index(run.batch)) for run, _ in line if not run.measured]
        if failed:
            zeros = [0.0] * len(failed)
            series.append(Series("", failed, zeros, "points", place, marker="x", silent=True))
    return Panel(
        axis.name, Axis("Batch on each device", ticks=list(map(str, batches))), axis, series
    )
