"""Telemetry in the seed's JSON format of metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..base import write_json
from .gpus import TelemetryRow
from .sampler import MIB, read_rows


def export_reference(rows_path: Path, json_path: Path) -> None:
    """Write rows as the one ``metrics.json`` that aind-torch-utils writes and plots.

    It has two keys, ``queue_monitor`` and ``system_monitor``. ``cpu_percent`` is of the process
    tree, disk and network are of the whole machine. An MB in ``ram_rss_mb`` and in
    ``*_mbytes_sec`` is 2**20 bytes, in the reference as here.

    Its plots cannot show null. So a series without any value is left out, and so is a row that
    lacks a value of another series: always the first row, whose rates are null.

    Args:
        rows_path: the file of rows that `Sampler` wrote.
        json_path: the file to write.
    """
    header, rows = read_rows(rows_path)
    metrics = {
        "queue_monitor": _reference_queues(header["queues"], rows),
        "system_monitor": _reference_system(rows),
    }
    write_json(json_path, metrics)


def _reference_queues(queues: Mapping[str, int], rows: Sequence[TelemetryRow]) -> TelemetryRow:
    def samples(name: str) -> list[TelemetryRow]:
        sizes = ((row["t"], row["gauges"].get(name)) for row in rows)
        return [{"t_rel_s": t, "size": size} for t, size in sizes if size is not None]

    return {
        "queues": {
            name: {"max_size": most, "samples": samples(name)} for name, most in queues.items()
        }
    }


_REFERENCE_SERIES = (
    # (key, key within it, key of a row, its unit in ours)
    ("cpu_percent", None, "cpu_percent", 1),
    ("ram_rss_mb", None, "rss_bytes", MIB),
    ("net_io_mbytes_sec", "sent", "net_sent_bytes_per_s", MIB),
    ("net_io_mbytes_sec", "recv", "net_recv_bytes_per_s", MIB),
    ("disk_io_mbytes_sec", "read", "machine_read_bytes_per_s", MIB),
    ("disk_io_mbytes_sec", "write", "machine_write_bytes_per_s", MIB),
)


def _reference_system(rows: Sequence[TelemetryRow]) -> TelemetryRow:
    read = [series for series in _REFERENCE_SERIES if any(r[series[2]] is not None for r in rows)]
    whole = [row for row in rows if all(row[key] is not None for *_, key, _unit in read)]
    if not read or not whole:
        return {}
    system: TelemetryRow = {"t_rel_s": [row["t"] for row in whole]}
    for key, part, ours, unit in read:
        values = [row[ours] / unit for row in whole]
        if part is None:
            system[key] = values
        else:
            system.setdefault(key, {})[part] = values
    return system
