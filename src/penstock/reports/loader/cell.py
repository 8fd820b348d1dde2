"""One case of a loader benchmark with all its launches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import format_seconds, significant
from ...instruments import Interval, Record, commit_of, quantile
from ...loading import CONTENDERS
from ..cell import Cell
from ..table import Row, csv_field, scaled

MB = 10**6

SEED_NAMES = {"dask-sample": "per-sample", "dask-stacked": "stacked"}
"""What the seed called two of the loaders."""


LOADER_NEEDS = ("loader", "threads", "batch_size")
LOADER_COLUMNS = tuple(
    "timestamp loader threads batch_size seconds_per_batch low_seconds high_seconds "
    "samples_per_sec decoded_mb_per_sec stored_mb_per_sec first_batch_s wait_p50_s wait_p95_s "
    "wait_p99_s wait_max_s read_amplification cpu_s_per_gb host_peak_mb duplicates missing wrong "
    "cache resident fresh shuffle window latency_ms endpoint data dataset batches launches failed "
    "status error cores affinity cgroup_cpus seed machine_key commit key".split()
)

CASE_APART = tuple("data dataset shuffle window cache endpoint latency_ms seed batches".split())
"""Knobs that tell tables apart: only loaders, threads and batches are compared in one."""

COLD_MOST = 0.05
"""More of the data than this in the page cache is not a cold cache."""
WARM_LEAST = 0.95
"""With this share of files in the page cache, it is memory that they are read from."""
FRESH_LEAST = 0.9
"""Of less than this, too much of what was waited for had been read before. A few batches more or
less in a queue, over some ten of them, are not much."""


class LoaderCell(Cell):
    """All launches of one loader, with so many threads, at one batch size."""

    @property
    def loader(self) -> str:
        return str(self.case["loader"])

    @property
    def threads(self) -> int:
        return int(self.case["threads"])

    @cached_property
    def _waits(self) -> list[NDArray[np.float64]]:
        """Of every batch, by launch."""
        return [_waits_of(record) for record in self.measured]

    @cached_property
    def times(self) -> list[NDArray[np.float64]]:
        """Seconds of a batch, one number for each launch: all its waits over their number."""
        return [np.array([np.mean(waits)]) for waits in self._waits]

    @cached_property
    def waits(self) -> NDArray[np.float64]:
        """Of every batch of every launch."""
        return np.concatenate([np.empty(0), *self._waits])

    def wait(self, q: float) -> float | None:
        return quantile(self.waits, q) if len(self.waits) else None

    def per_launch(self, name: str) -> float | None:
        """The median over launches of a number among their facts."""
        values = [record.facts.get(name) for record in self.records]
        known = [value for value in values if value is not None]
        return float(np.median(known)) if known else None

    def most(self, name: str) -> int | None:
        """The most that any launch said, a failed one too."""
        return max((r.facts[name] for r in self.records if name in r.facts), default=None)

    @property
    def seconds(self) -> float | None:
        return self.time.value if self.time else None

    @property
    def read_ahead(self) -> float:
        """The share of its samples' bytes that was read before they were waited for; 0 where that
        is little, or not known."""
        fresh = self.per_launch("fresh")
        return 1 - fresh if fresh is not None and fresh < FRESH_LEAST else 0.0

    def speed(self, quantity: str) -> float | None:
        """Work of a batch for each of its seconds."""
        work = self.work(quantity)
        return work / self.seconds if work is not None and self.seconds else None

    @property
    def stored_speed(self) -> float | None:
        stored = self.per_launch("stored_bytes")
        return stored / self.seconds if stored is not None and self.seconds else None

    @property
    def first_s(self) -> float | None:
        firsts = [r.warmup.first_s for r in self.measured if r.warmup.first_s is not None]
        return float(np.median(firsts)) if firsts else None

    @property
    def error(self) -> str:
        failure = next((r.error for r in self.records if r.error is not None), None)
        return "" if self.status == "ok" or failure is None else " ".join(failure.message.split())

    @cached_property
    def row(self) -> Row:
        case, time = self.case, self.time or Interval(np.nan, None, None, 0)
        limits = self.environment("limits") or {}
        values = {
            **{name: case.get(name) for name in LOADER_COLUMNS},
            "timestamp": max(record.time for record in self.records),
            "batch_size": self.batch,
            "seconds_per_batch": time.value,
            "low_seconds": time.low,
            "high_seconds": time.high,
            "samples_per_sec": self.speed("samples"),
            "decoded_mb_per_sec": scaled(self.speed("bytes"), 1 / MB),
            "stored_mb_per_sec": scaled(self.stored_speed, 1 / MB),
            "first_batch_s": self.first_s,
            "wait_p50_s": self.wait(0.5),
            "wait_p95_s": self.wait(0.95),
            "wait_p99_s": self.wait(0.99),
            "wait_max_s": self.wait(1.0),
            "read_amplification": self.per_launch("read_amplification"),
            "cpu_s_per_gb": self.per_launch("cpu_s_per_gb"),
            "host_peak_mb": scaled(self.host_peak, 1 / MB),
            "duplicates": self.most("duplicates"),
            "missing": self.most("missing"),
            "wrong": self.most("wrong"),
            "resident": self.per_launch("resident"),
            "fresh": self.per_launch("fresh"),
            "launches": self.launches,
            "failed": len(self.records) - self.launches,
            "status": self.status,
            "error": self.error,
            "cores": (self.environment("machine") or {}).get("cores"),
            "affinity": limits.get("affinity"),
            "cgroup_cpus": limits.get("cgroup_cpus"),
            "machine_key": self.environment("machine_key"),
            "commit": commit_of(self.environment("git")),
            "key": self.records[0].key,
        }
        return {name: csv_field(values[name]) for name in LOADER_COLUMNS}


def _waits_of(record: Record) -> NDArray[np.float64]:
    """The waits of a launch but those for a first batch, unless there are no others."""
    waits = np.asarray(record.samples_s["step"])
    begun = [index for index in record.facts.get("begun", ()) if index < len(waits)]
    return waits if len(begun) == len(waits) else np.delete(waits, begun)


def loader_cells(records: Iterable[Record], scenario: str = "loader") -> list[LoaderCell]:
    """The launches of a scenario by case and machine; small batches and few threads first, and the
    loaders as `penstock.loading.engines.engine` lists them."""
    places = {name: place for place, name in enumerate(CONTENDERS)}
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record.scenario == scenario:
            machine = record.environment.get("machine_key")
            found.setdefault((record.key, machine), []).append(record)
    all_cells = [LoaderCell(tuple(launches)) for launches in found.values()]
    return sorted(
        all_cells,
        key=lambda cell: (cell.batch, cell.threads, places.get(cell.case.get("loader", ""), -1)),
    )


def cells_apart(cell: LoaderCell) -> tuple[str, ...]:
    apart = [str(cell.case.get(name)) for name in CASE_APART]
    return (*apart, str(cell.environment("machine_key")))


def way(case: Mapping[str, Any]) -> list[str]:
    """How far the data is, of a case or of its row in a CSV.

    >>> way({"latency_ms": "20.0", "endpoint": None})
    ['every request 20 ms late']
    """
    words = []
    if latency := float(case.get("latency_ms") or 0):
        words.append(f"every request {latency:g} ms late")
    if case.get("endpoint"):
        words.append(f"from {case['endpoint']}")
    return words


def cache_label(group: Sequence[Cell]) -> str:
    """What was asked of the page cache and what was really there before the first batch.

    >>> cache_words("cold", 0.0)
    'cold (0 % resident)'
    """
    shares = [r.facts.get("resident") for cell in group for r in cell.records]
    known = [share for share in shares if share is not None]
    asked = str(group[0].case["cache"])
    worst = max(known, default=None) if asked == "cold" else min(known, default=None)
    again = read_again_of(group)
    return cache_words(asked, worst) + (
        f", {100 * again:.0f} % read again from memory" * (again > COLD_MOST)
    )


def read_again_of(group: Sequence[Cell]) -> float:
    """Of a cold cache: the most of what later batches read that an earlier one had read."""
    return max((r.facts.get("again", 0.0) for cell in group for r in cell.records), default=0.0)


def cache_words(asked: str, resident: float | None) -> str:
    if resident is None:
        return f"cache {asked} (residency not known)"
    return f"{asked} ({100 * resident:.0f} % resident)"


def cell_words(value: float | None) -> str:
    return "-" if value is None else significant(value)


def time_words(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def is_remote_case(case: Mapping[str, Any]) -> bool:
    return "://" in str(case["data"]) or bool(case.get("latency_ms"))


def threads_in_words(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"


def percents_of(share: Interval) -> str:
    value = f"{100 * share.value:.0f} %"
    if share.low is None or share.high is None:
        return value
    return f"{value} [{100 * share.low:.0f}-{100 * share.high:.0f}]"
