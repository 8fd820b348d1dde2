"""The figures of a run, drawn from its recorded metrics.

Each kind of file has a function that draws it (``metrics_figures``, ``gpu_figures``: figures by the
end of their file name) and one that saves its figures (`plot_metrics`, `plot_gpu_metrics`). A
missing value breaks the line and counts in no mean.

Figures are made without pyplot, so that drawing in a thread or a notebook changes no state of the
caller.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ...base import UsageError, group_by, plural
from ...instruments import MIB, TelemetryRow, read_rows
from .canvas import Curve, Figure, Panel, Values, draw_all_panels, save_under


def plot_metrics(
    path: Path,
    out_prefix: str | Path,
    mean: bool = False,
    smooth: int = 1,
    replace: bool = False,
) -> list[Path]:
    """Draw the metrics of a run to ``<out_prefix>_cpu.png``, ``_ram.png`` and so on.

    Args:
        path: The rows of `penstock.instruments.Sampler`, or a ``metrics.json`` as the seed has it.
        out_prefix: The path of the figures up to their names.
        mean: Draw the mean of every line, too.
        smooth: The samples of a rolling mean, drawn over the raw values; 1 draws these alone.
        replace: Replace figures that Penstock did not write.

    Returns:
        The files that were written.

    Raises:
        UsageError: The file holds no metrics.
    """
    return save_under(out_prefix, metrics_figures(path, mean, smooth), replace)


def plot_gpu_metrics(
    csv_path: Path,
    out_prefix: str | Path,
    mean: bool = False,
    smooth: int = 1,
    replace: bool = False,
) -> list[Path]:
    """Draw a log of ``nvidia-smi --query-gpu=... --format=csv``.

    Args:
        csv_path: The log. Its columns timestamp, index, name, memory.used and utilization.gpu are
            drawn; the first and one of the last two must be there.
        out_prefix: The figures are ``<out_prefix>_gpu_util.png`` and ``<out_prefix>_vram.png``.
        mean: Draw the mean of every line, too.
        smooth: The samples of a rolling mean, drawn over the raw values; 1 draws these alone.
        replace: Replace figures that Penstock did not write.

    Returns:
        The files that were written.

    Raises:
        UsageError: The file is no such log.
    """
    return save_under(out_prefix, gpu_figures(csv_path, mean, smooth), replace)


def metrics_figures(path: Path, mean: bool = False, smooth: int = 1) -> dict[str, Figure]:
    """The figures of `plot_metrics` by the end of their file names."""
    path = Path(path)
    text = path.read_text(encoding="utf-8", errors="replace")
    try:
        reference = json.loads(text)
    except ValueError:  # many lines, each a record
        panels = row_panels(*read_rows(path))
    else:
        if isinstance(reference, dict) and "schema" in reference:  # a header without a row
            panels = {}
        else:
            panels = _reference_panels(reference, path)
    return draw_all_panels(panels, path, mean, smooth)


def gpu_figures(csv_path: Path, mean: bool = False, smooth: int = 1) -> dict[str, Figure]:
    """The figures of `plot_gpu_metrics` by the end of their file names."""
    return draw_all_panels(_gpu_csv_panels(csv_path), csv_path, mean, smooth)


def row_panels(header: TelemetryRow, rows: Sequence[TelemetryRow]) -> dict[str, Panel]:
    """The panels of the rows of one process, by the end of their file names."""
    t = _numbers(row["t"] for row in rows)

    def line(label: str, key: str, colour: int = 0, dashes: str = "-") -> Curve:
        return Curve(label, t, _numbers(row[key] for row in rows), colour, dashes)

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
        panels[_file_part(name)] = _gauge(name, queues.get(name), Curve(name, t, values))
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

    def line(label: str, values: Iterable[float | None], unit: int, colour: int = 0) -> Curve:
        y = _numbers(values) * unit
        if len(y) == 0:  # never read
            return Curve(label, y, y, colour)
        if len(y) != len(t):
            raise UsageError(f"{path} holds {len(y)} values of {label} for {len(t)} times")
        return Curve(label, t, y, colour)

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
            Curve(
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


def _gauge(name: str, most: int | None, line: Curve) -> Panel:
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
        lines.pop()  # cut off within a number, it would read as a smaller one
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
    return _gpu_panels(readings, f"{plural(unread, 'line')} unreadable" if unread else "")


def _timestamp(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text.replace("/", "-"))
    except ValueError:
        return None


def _quantity(text: str) -> float | None:
    """The number in ``1234 MiB`` or ``87 %``; None for ``[N/A]`` and its like."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?: (?:MiB|%))?", text)
    return float(match[1]) if match else None


def _gpu_panels(readings: Sequence[_GpuReading], note: str = "") -> dict[str, Panel]:
    gpus = group_by(readings, lambda reading: f"GPU {reading.index} {reading.name}".strip())

    def lines(key: str) -> list[Curve]:
        return [
            Curve(
                label,
                _numbers(reading.t for reading in of_gpu),
                _numbers(getattr(reading, key) for reading in of_gpu),
                colour,
            )
            for colour, (label, of_gpu) in enumerate(sorted(gpus.items(), key=_natural))
        ]

    return {
        "gpu_util": Panel(
            "GPU utilisation", "Busy", "%", lines("util_percent"), note, top=100, strips=True
        ),
        "vram": Panel("GPU memory", "Used", "B", lines("memory_bytes"), note, strips=True),
    }


def _natural(item: tuple[str, Any]) -> list[Any]:
    """A key that sorts GPU 2 before GPU 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", item[0])]


def _file_part(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)


def _numbers(values: Iterable[float | None]) -> Values:
    return np.array([np.nan if value is None else value for value in values], np.float64)


def _sparse(line: Curve) -> Curve:
    seen = np.isfinite(line.y)
    return Curve(line.label, line.t[seen], line.y[seen], line.colour, sparse=True)
