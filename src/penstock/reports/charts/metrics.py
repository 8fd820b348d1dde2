"""The figures of a run, drawn from its metrics: its rows, the seed's ``metrics.json``, or a log of
nvidia-smi.

A missing value breaks the line and counts in no mean.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ...base import UsageError, format_seconds, group_by, natural, parsed_json, plural, well_formed
from ...instruments import MIB, REFERENCE_SERIES, TelemetryRow, read_rows
from .chart import Axis, Figure, Panel, Series, rolling_mean, with_unit


def metrics_figures(path: Path, mean: bool = False, smooth: int = 1) -> dict[str, Figure]:
    """The figures of metrics, by the end of their file names.

    Args:
        path: Rows of telemetry, the seed's ``metrics.json``, or the CSV of nvidia-smi with its
            column timestamp, and memory.used or utilization.gpu.
        mean: Draw the mean of every line, too.
        smooth: The samples of a rolling mean, drawn over the raw values; 1 draws these alone.

    Returns:
        The figures.

    Raises:
        UsageError: The file holds no metrics.
    """
    path = Path(path)
    with well_formed(f"{path} holds metrics that are damaged"):
        gauges = _gauges_of(path)
    if not gauges:
        raise UsageError(f"{path} holds no sample to plot")
    return {name: with_means(figure, mean, smooth) for name, figure in gauges.items()}


def _gauges_of(path: Path) -> dict[str, Figure]:
    """The gauges of a file of any kind; none of one without a sample."""
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        reference = parsed_json(text)
    except ValueError:  # many lines, each a record; or a table
        return row_gauges(*read_rows(path)) if text[:1] == "{" else _gpu_csv_gauges(text, path)
    if isinstance(reference, dict) and "schema" in reference:  # a header without a row
        return {}
    return _reference_gauges(reference, path)


def gauge(
    title: str,
    axis: Axis,
    lines: Sequence[Series],
    note: str = "",
    limits: Sequence[tuple[float, str]] = (),
    apart: bool = False,
) -> Figure | None:
    """The figure of quantities over time; None if none has a value.

    Args:
        title: The title.
        axis: The axis of the values.
        lines: The quantities.
        note: A text below the title, behind the number of samples.
        limits: Horizontal lines.
        apart: Whether each quantity has its own panel: devices at 100 % would hide one another.

    Returns:
        The figure.
    """
    seen = [line for line in lines if np.isfinite(np.asarray(line.y, float)).any()]
    if not seen:
        return None
    longest = max(seen, key=lambda line: len(line.x))
    samples = plural(int(np.isfinite(np.asarray(longest.y, float)).sum()), "sample")
    if len(longest.x) > 1:
        samples += f", one every {format_seconds(float(np.median(np.diff(longest.x))))}"
    each = [(line.label, [line]) for line in seen] if apart else [("", seen)]
    shown = {line.label for line in seen}
    if absent := [line.label for line in lines if apart and line.label not in shown]:
        note = _joined(note, f"no reading of {', '.join(absent)}")
    panels = [Panel(name, Axis("Time", "s"), axis, drawn, limits) for name, drawn in each]
    return Figure(title, _joined(samples, note), panels)


def _joined(*facts: str) -> str:
    return "  ·  ".join(filter(None, facts))


def with_means(figure: Figure, mean: bool, smooth: int) -> Figure:
    """A gauge with the rolling means of its lines, and with their means."""
    rolling = f"bold: rolling mean of {smooth}, faint: raw" if smooth > 1 else ""
    panels = [
        replace(
            panel,
            series=[
                part for line in panel.series for part in _parts(line, panel.y.unit, mean, smooth)
            ],
        )
        for panel in figure.panels
    ]
    note = _joined(figure.note, rolling, "dashed: mean" if mean else "")
    return replace(figure, note=note, panels=panels)


def _parts(line: Series, unit: str, mean: bool, smooth: int) -> list[Series]:
    """A line, its rolling mean and its mean. A line of dots was read too rarely for a mean."""
    y = np.asarray(line.y, np.float64)
    if line.kind == "dots":
        return [line]
    parts = [line]
    if smooth > 1:
        raw = replace(line, label="", faint=True, silent=True)
        parts = [raw, replace(line, y=rolling_mean(y, smooth))]
    if mean:
        average = float(np.nanmean(y))
        parts[-1] = replace(parts[-1], label=f"{line.label}, mean {with_unit(average, unit)}")
        level = replace(line, label="", y=np.full(len(y), average), dashes=1, silent=True)
        parts.append(level)
    return parts


def row_gauges(header: TelemetryRow, rows: Sequence[TelemetryRow]) -> dict[str, Figure]:
    """The gauges of the rows of one process, by the end of their file names; those with a value."""
    t = np.array([row["t"] for row in rows], np.float64)

    def line(label: str, key: str, colour: int = 0, dashes: int = 0) -> Series:
        y = np.array([row[key] for row in rows], np.float64)
        return Series(label, t, y, colour=colour, dashes=dashes)

    cores = header["cpu_count"]
    gauges = {
        "cpu": gauge(
            "CPU of the job",
            Axis("CPU, 100 is one core", "%"),
            [line("CPU", "cpu_percent")],
            f"process tree, machine of {cores} cores" if cores else "process tree",
        ),
        "ram": gauge(
            "Memory of the job",
            Axis("Memory", "B"),
            [line("RSS", "rss_bytes"), _sparse(line("PSS (shared pages once)", "pss_bytes", 1))],
            "process tree",
        ),
    }
    queues = header["queues"]
    for name in dict.fromkeys([*queues, *(name for row in rows for name in row["gauges"])]):
        values = np.array([row["gauges"].get(name) for row in rows], np.float64)
        gauges[_file_part(name)] = _gauge(name, queues.get(name), Series(name, t, values))
    gauges["net_io"] = gauge(
        "Network",
        Axis("Rate", "B/s"),
        [line("sent", "net_sent_bytes_per_s"), line("received", "net_recv_bytes_per_s", 1)],
        "whole machine, loopback included",
    )
    gauges["disk_io"] = gauge(
        "Disk",
        Axis("Rate", "B/s"),
        [
            line("machine read", "machine_read_bytes_per_s", 5, 1),
            line("machine write", "machine_write_bytes_per_s", 4, 1),
            line("job read", "read_bytes_per_s"),
            line("job write", "write_bytes_per_s", 1),
        ],
        "what reached a disk",
    )
    readings = [{"t": row["t"], **gpu} for row in rows for gpu in row["gpus"] or []]
    return _drawn(gauges) | _gpu_gauges(readings)


def _drawn(gauges: Mapping[str, Figure | None]) -> dict[str, Figure]:
    return {name: figure for name, figure in gauges.items() if figure is not None}


def _reference_gauges(metrics: Any, path: Path) -> dict[str, Figure]:
    if not isinstance(metrics, dict) or not metrics.keys() & {"queue_monitor", "system_monitor"}:
        raise UsageError(f"{path} holds neither a queue_monitor nor a system_monitor")
    system = metrics.get("system_monitor") or {}
    rows = [{**_EMPTY_ROW, "t": t} for t in system.get("t_rel_s", [])]
    for key, part, name, unit in REFERENCE_SERIES:
        values = system.get(key) if part is None else system.get(key, {}).get(part)
        if values and len(values) != len(rows):
            raise UsageError(
                f"{path} holds {plural(len(values), 'value')} of {name} for "
                f"{plural(len(rows), 'time')}"
            )
        for row, value in zip(rows, values or [], strict=False):
            row[name] = None if value is None else value * unit
    gauges: dict[str, Figure | None] = {**row_gauges({"cpu_count": None, "queues": {}}, rows)}
    for name, queue in (metrics.get("queue_monitor") or {}).get("queues", {}).items():
        samples = queue.get("samples", [])
        line = Series(name, [s["t_rel_s"] for s in samples], [s["size"] for s in samples])
        gauges[_file_part(name)] = _gauge(name, queue.get("max_size", 0), line)
    return _drawn(gauges)


_EMPTY_ROW: TelemetryRow = {
    **dict.fromkeys(
        "cpu_percent rss_bytes pss_bytes net_sent_bytes_per_s net_recv_bytes_per_s "
        "machine_read_bytes_per_s machine_write_bytes_per_s read_bytes_per_s write_bytes_per_s "
        "gpus".split()
    ),
    "gauges": {},
}
"""A row of telemetry in which nothing was read."""


def _gauge(name: str, most: int | None, line: Series) -> Figure | None:
    if most is None:
        words = name.replace("_", " ").capitalize()
        return gauge(words, Axis(words), [line])
    limits = [(float(most), "capacity")] if most else []
    return gauge(f"Queue {name}", Axis("Items in queue", whole=True), [line], limits=limits)


def _gpu_csv_gauges(text: str, path: Path) -> dict[str, Figure]:
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n") and not lines[-1].rstrip().endswith(("iB", "%", "]")):
        lines.pop()  # cut off within a number, it would read as a smaller one
    table = [[cell.strip() for cell in row] for row in csv.reader(lines) if row]
    names = [cell.partition(" ")[0] for cell in table[0]] if table else []
    if "timestamp" not in names or not {"memory.used", "utilization.gpu"} & set(names):
        raise UsageError(
            f"{path} has no column timestamp, or neither of memory.used and utilization.gpu: "
            f"its first line names {', '.join(names) or 'nothing'}"
        )
    readings, unread, first = [], 0, None
    identity = next((name for name in _IDENTITIES if name in names), "")
    for cells in table[1:]:
        when = _timestamp(cells[names.index("timestamp")]) if len(cells) == len(names) else None
        if when is None:
            unread += 1
            continue
        first = first or when
        row = dict(zip(names, cells, strict=True))
        memory = _quantity(row.get("memory.used", ""))
        readings.append(
            {
                "t": (when - first).total_seconds(),
                "index": row.get(identity, ""),
                "name": row.get("name", ""),
                "util_percent": _quantity(row.get("utilization.gpu", "")),
                "memory_bytes": None if memory is None else memory * MIB,
            }
        )
    steps = np.diff([reading["t"] for reading in readings])
    # nvidia-smi reads all GPUs of a machine in turn, and then it waits.
    if not identity and len(steps) > 1 and (10 * steps < steps.mean()).mean() > 1 / 3:
        raise UsageError(
            f"{path} holds readings of several GPUs, and no column says which: ask nvidia-smi for "
            "the index, too"
        )
    return _gpu_gauges(readings, f"{plural(unread, 'line')} unreadable" if unread else "")


_IDENTITIES = ("index", "pci.bus_id", "gpu_bus_id", "uuid", "gpu_uuid", "serial", "gpu_serial")
"""Columns of nvidia-smi that tell GPUs apart."""


def _timestamp(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text.replace("/", "-"))
    except ValueError:
        return None


def _quantity(text: str) -> float | None:
    """The number in ``1234 MiB`` or ``87 %``; None for ``[N/A]`` and its like."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?: (?:MiB|%))?", text)
    return float(match[1]) if match else None


def _gpu_gauges(readings: Sequence[TelemetryRow], note: str = "") -> dict[str, Figure]:
    """The gauges of readings of GPUs, each with its time."""
    gpus = group_by(
        readings, lambda reading: " ".join("GPU {index} {name}".format(**reading).split())
    )

    def lines(key: str) -> list[Series]:
        return [
            Series(
                label,
                [reading["t"] for reading in of_gpu],
                np.array([reading[key] for reading in of_gpu], np.float64),
                colour=colour,
            )
            for colour, (label, of_gpu) in enumerate(
                sorted(gpus.items(), key=lambda gpu: natural(gpu[0]))
            )
        ]

    busy, used = Axis("Busy", "%", high=105), Axis("Used", "B")
    gauges = {
        "gpu_util": gauge("GPU utilisation", busy, lines("util_percent"), note, apart=True),
        "vram": gauge("GPU memory", used, lines("memory_bytes"), note, apart=True),
    }
    return _drawn(gauges)


def _file_part(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)


def _sparse(line: Series) -> Series:
    """A line that is read rarely, as dots at its readings."""
    seen = np.isfinite(np.asarray(line.y, float))
    return replace(line, x=np.asarray(line.x)[seen], y=np.asarray(line.y)[seen], kind="dots")
