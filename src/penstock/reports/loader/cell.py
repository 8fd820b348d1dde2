"""One case of a loader benchmark with all its launches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...instruments import Interval, Record
from ...loading import CONTENDERS
from ..cell import Cell, middle
from ..table import Columns, scaled

MB = 10**6

SEED_NAMES = {
    "dask-sample": "dask-sample (per-sample)",
    "dask-stacked": "dask-stacked (stacked)",
}
"""Two loaders with the seed's names."""

LOADER_COLUMNS = Columns(
    tuple(
        "timestamp loader threads batch_size seconds_per_batch low_seconds high_seconds "
        "samples_per_sec decoded_mb_per_sec stored_mb_per_sec first_batch_s wait_p50_s wait_p95_s "
        "wait_p99_s wait_max_s read_amplification cpu_s_per_gb host_peak_mb duplicates missing "
        "wrong cache resident shuffle window data dataset batches "
        "launches failed status error cores affinity cgroup_cpus seed machine_key commit "
        "key".split()
    ),
    ("loader", "threads", "batch_size"),
    tuple("data dataset shuffle window cache seed batches machine_key".split()),
)

COUNTS = ("duplicates", "missing", "wrong")
"""The counts of a check of the batches: samples that came twice, never, or with wrong values."""

COLD_MOST = 0.05
"""Largest share of the data in the page cache at which the cache still counts as cold."""
WARM_LEAST = 0.95
"""A file counts as read from memory if this share of it is in the page cache."""


class LoaderCell(Cell):
    """All launches of one loader with one number of threads and one batch size."""

    columns = LOADER_COLUMNS

    @property
    def loader(self) -> str:
        return str(self.case["loader"])

    @property
    def threads(self) -> int:
        return int(self.case["threads"])

    @cached_property
    def _waits(self) -> list[NDArray[np.float64]]:
        """The seconds waited for each batch, by launch."""
        return [_waits_of(record) for record in self.measured]

    @cached_property
    def times(self) -> list[NDArray[np.float64]]:
        """Seconds of a batch, one number for each launch: all its waits over their number."""
        return [np.array([np.mean(waits)]) for waits in self._waits]

    @cached_property
    def waits(self) -> NDArray[np.float64]:
        """The seconds waited for each batch of every launch."""
        return np.concatenate([np.empty(0), *self._waits])

    def wait(self, q: float) -> float | None:
        return float(np.quantile(self.waits, q)) if len(self.waits) else None

    def per_launch(self, name: str) -> float | None:
        """The median over launches of one of their facts."""
        return middle(record.facts.get(name) for record in self.records)

    def most(self, name: str) -> int | None:
        """The largest value of a fact over all launches, failed ones too."""
        return max((r.facts[name] for r in self.records if name in r.facts), default=None)

    @property
    def seconds(self) -> float | None:
        return self.time.value if self.time else None

    @property
    def stored_speed(self) -> float | None:
        stored = self.per_launch("stored_bytes")
        return stored / self.seconds if stored is not None and self.seconds else None

    @property
    def first_s(self) -> float | None:
        return middle(record.warmup.first_s for record in self.measured)

    def values(self) -> dict[str, Any]:
        time = self.time or Interval(np.nan, None, None, 0)
        medians = ("read_amplification", "cpu_s_per_gb", "resident")
        return {
            "seconds_per_batch": time.value,
            "low_seconds": time.low,
            "high_seconds": time.high,
            "samples_per_sec": self.rate("samples"),
            "decoded_mb_per_sec": scaled(self.rate("bytes"), 1 / MB),
            "stored_mb_per_sec": scaled(self.stored_speed, 1 / MB),
            "first_batch_s": self.first_s,
            **{f"wait_p{q}_s": self.wait(q / 100) for q in (50, 95, 99)},
            "wait_max_s": self.wait(1.0),
            "host_peak_mb": scaled(self.host_peak, 1 / MB),
            **{name: self.per_launch(name) for name in medians},
            **{name: self.most(name) for name in COUNTS},
        }


def _waits_of(record: Record) -> NDArray[np.float64]:
    """The waits of a launch, without those for the first batch of an epoch if there are others."""
    waits = np.asarray(record.samples_s["step"])
    begun = [index for index in record.facts.get("begun", ()) if index < len(waits)]
    return waits if len(begun) == len(waits) else np.delete(waits, begun)


def loader_cells(records: Iterable[Record], scenario: str = "loader") -> list[LoaderCell]:
    """The launches of a scenario by case and machine.

    Args:
        records: The launches of one or more benchmarks.
        scenario: ``loader``, or ``ladder`` for its rungs.

    Returns:
        The cells, small batches and few threads first, and loaders in the order of `CONTENDERS`.
    """
    places = {name: place for place, name in enumerate(CONTENDERS)}
    return sorted(
        LoaderCell.of_records(records, scenario),
        key=lambda cell: (cell.batch, cell.threads, places.get(cell.case.get("loader", ""), -1)),
    )


def cache_label(group: Sequence[Cell]) -> str:
    """The page cache that was asked for, and the share of the data that was in it at the start.

    >>> cache_words("cold", 0.0)
    'cold (0 % resident)'
    """
    facts = [r.facts.get("resident") for cell in group for r in cell.records]
    shares = [share for share in facts if share is not None]
    asked = str(group[0].case["cache"])
    worst = max(shares, default=None) if asked == "cold" else min(shares, default=None)
    again = read_again_of(group)
    more = f", {100 * again:.0f} % read again from memory" if again > COLD_MOST else ""
    return cache_words(asked, worst) + more


def read_again_of(group: Sequence[Cell]) -> float:
    """The largest share, with a cold cache, of bytes that an earlier batch had read."""
    return max((r.facts.get("again", 0.0) for cell in group for r in cell.records), default=0.0)


def cache_words(asked: str, resident: float | None) -> str:
    if resident is None:
        return f"cache {asked} (residency not known)"
    return f"{asked} ({100 * resident:.0f} % resident)"


def percents_of(share: Interval) -> str:
    value = f"{100 * share.value:.0f} %"
    if share.low is None or share.high is None:
        return value
    return f"{value} [{100 * share.low:.0f}-{100 * share.high:.0f}]"
