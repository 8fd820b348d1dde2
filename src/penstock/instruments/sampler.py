"""Telemetry: a job's use of its machine, sampled in the background and written row by row.

It never disturbs the job: a reading that fails is null, and ``monitor_error`` names it once. Each
row reaches the operating system before the next is taken, so a killed job leaves every row but the
one it was writing.

The first line of the file is the header; every other line is a row:

    t, time                        seconds since the start (monotonic); unix time
    cpu_percent                    process tree; 100 is one core kept busy
    rss_bytes, processes, threads  process tree; pages that processes share are counted in each
    pss_bytes                      process tree; a shared page is divided among its processes.
                                   Linux only and slow, so null on most rows
    read_, write_bytes_per_s       process tree, what reached a disk (not the page cache)
    machine_read_, machine_write_bytes_per_s
                                   every process, every disk
    net_sent_, net_recv_bytes_per_s
                                   every process, every interface of this network namespace, the
                                   loopback included: a local object store is seen twice, once
                                   sent and once received
    gpus                           one entry per GPU that NVML shows, whether this job uses it or
                                   not: index, name, util_percent, memory_bytes. Empty where
                                   there is none, null where reading them failed
    gauges                         sizes of the queues, and other counts of the job

A rate spans the time since the row before, so those of the first row are null. A process that
ends between two rows takes the counts since the earlier of them with it.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from ..base import UsageError, describe, json_object, system_errors, write_json
from .environment import machine_and_commit
from .machine import Answer, Nvml, Pair, Processes, TelemetryRow, ThisMachine, Usage
from .spans import Clock

SCHEMA = 1
PSS_EVERY_S = 10.0
"""Seconds between readings of PSS, which make the kernel walk the page tables under their lock."""
STOP_WITHIN_S = 5.0
"""Seconds that a job waits at its end for a reading that hangs, for example on a dead mount."""
MIB = 2**20


class TelemetryReading(NamedTuple):
    """The counters of one moment; None for one that could not be read."""

    t: float
    processes: Processes | None
    disk: Pair | None
    network: Pair | None


def rates(before: TelemetryReading | None, after: TelemetryReading) -> TelemetryRow:
    """Use per second between two readings; null where either reading is missing.

    >>> then = TelemetryReading(0, None, (0, 0), None)
    >>> now = TelemetryReading(2, None, (10, 0), None)
    >>> rates(then, now)["machine_read_bytes_per_s"]
    5.0
    """
    before = before or TelemetryReading(after.t, None, None, None)
    seconds = after.t - before.t
    counts = (
        *_growth(before.processes, after.processes),
        *_differences(before.disk, after.disk),
        *_differences(before.network, after.network),
    )
    return {
        name: None if count is None or seconds <= 0 else round(count / seconds, 2)
        for name, count in zip(_RATES, counts, strict=True)
    }


_RATES = (
    "cpu_percent", "read_bytes_per_s", "write_bytes_per_s", "machine_read_bytes_per_s",
    "machine_write_bytes_per_s", "net_sent_bytes_per_s", "net_recv_bytes_per_s",
)  # fmt: skip


def _growth(
    before: Processes | None, after: Processes | None
) -> tuple[float | None, float | None, float | None]:
    """CPU seconds times 100, for a rate in percent, and bytes read and written by the tree since
    ``before``.

    A process that was not there before has begun since, so all that it has used counts. One that
    has ended is in neither sum, so that its end never reads as negative use.
    """
    if before is None or after is None:
        return None, None, None
    new = Usage(0.0, 0, 0, (0, 0))
    pairs = [(before.get(key, new), usage) for key, usage in after.items()]
    cpu = sum(100 * (now.cpu_seconds - then.cpu_seconds) for then, now in pairs)
    moved = [_differences(then.disk, now.disk) for then, now in pairs]
    return cpu, _total([read for read, _ in moved]), _total([written for _, written in moved])


def _total(counts: Sequence[int | None]) -> int | None:
    """The sum, None where any is None: part of a sum would read as the whole."""
    counted = [count for count in counts if count is not None]
    return sum(counted) if len(counted) == len(counts) else None


def _differences(before: Pair | None, after: Pair | None) -> tuple[int | None, int | None]:
    """The growth of two counters, None where one ran backwards because it began again."""
    if before is None or after is None:
        return None, None
    first, second = after[0] - before[0], after[1] - before[1]
    return (None if first < 0 else first), (None if second < 0 else second)


class Sampler:
    """Appends one row to ``path`` every ``interval`` seconds, until `stop`.

    Each file holds one run: a file that exists is replaced. Only the constructor and `open` raise,
    and only `UsageError`, before the job has begun.

    Args:
        path: the file of rows.
        interval: seconds between rows.
        gauges: returns the sizes of the queues now.
        queues: the most that each queue holds, 0 where it has no bound.
        clock: reads seconds.
        machine: reads the processes, disks and network; of this machine by default.
        gpus: reads the GPUs; all that NVML shows by default.
    """

    def __init__(
        self,
        path: Path,
        interval: float,
        gauges: Callable[[], Mapping[str, float]],
        queues: Mapping[str, int],
        *,
        clock: Clock = time.perf_counter,
        machine: ThisMachine | None = None,
        gpus: Callable[[], list[TelemetryRow]] | None = None,
    ) -> None:
        if not interval > 0:
            raise UsageError(f"the metrics interval must be above 0 seconds, not {interval}")
        self._path, self._interval = Path(path), interval
        self._gauges, self._queues = gauges, dict(queues)
        self._clock, self._machine, self._gpus = clock, machine or ThisMachine(), gpus or Nvml()
        self._file: FileIO | None = None
        self._before: TelemetryReading | None = None
        self._next_pss = 0.0
        self.peak_rss: int | None = None
        """The most bytes that the process tree was seen to hold; None before the first reading."""
        self._faults: dict[str, str] = {}
        """The first failure of each reading, by the name of the reading."""
        self._unsaid: list[str] = []
        self._torn = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def start(self) -> None:
        """Write the header, and a row now and after every interval."""
        self.open()
        self._thread.start()

    def stop(self) -> None:
        """Write a last row and end. It may be called twice, or without `start`."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(STOP_WITHIN_S)
        if self._file is not None and not self._thread.is_alive():
            self._file.close()

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def open(self) -> None:
        """Write the header only, for a caller that calls `sample` at moments of its own."""
        header = {
            "schema": SCHEMA,
            "queues": self._queues,
            "interval": self._interval,
            "pid": os.getpid(),
            "cpu_count": os.cpu_count(),
            **machine_and_commit(),
        }
        with system_errors(f"metrics cannot be written to {self._path}"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Unbuffered: a row is one call to the system, so a kill leaves it whole or absent,
            # and a forked child holds no copy of half a row.
            self._file = self._path.open("wb", buffering=0)
            self._file.write(_line(header))
        self._started = self._clock()

    def sample(self) -> TelemetryRow:
        """Read everything once, append the row and return it. What cannot be read is null."""
        machine, now = self._machine, self._clock()
        t = now - self._started
        reading = TelemetryReading(
            now,
            self._attempt("processes", machine.processes, None),
            self._attempt("disk", machine.disk, None),
            self._attempt("network", machine.network, None),
        )
        row: TelemetryRow = {"t": round(t, 4), "time": round(time.time(), 3)}
        row |= rates(self._before, reading) | _held(reading.processes)
        self._before = reading
        if row["rss_bytes"] is not None:
            self.peak_rss = max(row["rss_bytes"], self.peak_rss or 0)
        row["pss_bytes"] = None
        if t >= self._next_pss:
            self._next_pss = t + PSS_EVERY_S
            row["pss_bytes"] = self._attempt("pss", machine.pss, None)
        row["gpus"] = self._attempt("gpus", self._gpus, None)
        row["gauges"] = self._attempt("gauges", self._read_gauges, dict.fromkeys(self._queues))
        if self._unsaid:
            row["monitor_error"] = "; ".join(self._unsaid)
        self._attempt("file", lambda: self._append(row), None)
        return row

    def _run(self) -> None:
        self.sample()
        while not self._stopped.wait(self._interval):
            self.sample()
        self.sample()

    def _read_gauges(self) -> dict[str, float | None]:
        return dict.fromkeys(self._queues) | {
            name: _finite(value) for name, value in self._gauges().items()
        }

    def _append(self, row: TelemetryRow) -> None:
        assert self._file is not None
        # After a write that failed half way, the next row begins a line of its own.
        line = b"\n" * self._torn + _line(row)
        self._torn = True
        written = self._file.write(line)
        if written != len(line):
            raise OSError(f"{written} of {len(line)} bytes of a row were written")
        self._torn = False
        self._unsaid.clear()

    def _attempt(self, name: str, read: Callable[[], Answer], otherwise: Answer) -> Answer:
        """The result of ``read()``, or ``otherwise`` where it fails; the next row names the
        failure.
        """
        try:
            return read()
        except Exception as error:  # a monitor must not end the job it watches
            if name not in self._faults:
                self._faults[name] = f"{name}: {type(error).__name__}: {describe(error)}"
                self._unsaid.append(self._faults[name])
            return otherwise


def _held(processes: Processes | None) -> TelemetryRow:
    """Memory, processes and threads of the tree now."""
    if processes is None:
        return dict.fromkeys(("rss_bytes", "processes", "threads"))
    return {
        "rss_bytes": sum(usage.rss for usage in processes.values()),
        "processes": len(processes),
        "threads": sum(usage.threads for usage in processes.values()),
    }


def _finite(value: float | None) -> float | None:
    """A number that JSON can hold; null for a gauge without a value (None or NaN)."""
    if value is None or not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(value)  # also of numpy's numbers


def _line(record: TelemetryRow) -> bytes:
    return json.dumps(record, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def read_rows(path: Path) -> tuple[TelemetryRow, list[TelemetryRow]]:
    """The header and the rows that `Sampler` wrote.

    A line that is not whole is left out: the writer was killed, or the disk was full, while it
    wrote.

    Raises:
        UsageError: the file has no such header.
    """
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        header = json_object(next(lines, ""))
        if header.get("schema") != SCHEMA:
            raise UsageError(f"{path} does not begin with the header of a metrics file")
        return header, [row for row in map(json_object, lines) if row]


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

    def samples(queue: str) -> list[TelemetryRow]:
        sizes = ((row["t"], row["gauges"].get(queue)) for row in rows)
        return [{"t_rel_s": t, "size": size} for t, size in sizes if size is not None]

    queues = {
        name: {"max_size": most, "samples": samples(name)}
        for name, most in header["queues"].items()
    }
    metrics = {"queue_monitor": {"queues": queues}, "system_monitor": _reference_system(rows)}
    write_json(json_path, metrics)


REFERENCE_SERIES = (
    ("cpu_percent", None, "cpu_percent", 1),
    ("ram_rss_mb", None, "rss_bytes", MIB),
    ("net_io_mbytes_sec", "sent", "net_sent_bytes_per_s", MIB),
    ("net_io_mbytes_sec", "recv", "net_recv_bytes_per_s", MIB),
    ("disk_io_mbytes_sec", "read", "machine_read_bytes_per_s", MIB),
    ("disk_io_mbytes_sec", "write", "machine_write_bytes_per_s", MIB),
)
"""The series of the seed's ``metrics.json``: the key, the key within it, the key of our rows, and
the unit in ours."""


def _reference_system(rows: Sequence[TelemetryRow]) -> TelemetryRow:
    read = [series for series in REFERENCE_SERIES if any(r[series[2]] is not None for r in rows)]
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
