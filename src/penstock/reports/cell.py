"""A measured case: its launches with the statistics over them, or its row in a CSV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base import group_by
from ..instruments import (
    DRAWS,
    Failure,
    Interval,
    Record,
    Resampled,
    commit_of,
    median_interval,
    resampled,
    resampled_ratio,
)
from .table import Columns, Row, read_csv

Kind = TypeVar("Kind", bound="Cell")


@dataclass(frozen=True)
class Cell:
    """All launches of one case on one machine, or its row in a CSV.

    `row` is the same for both. A statistic that needs the samples of launches is None or empty for
    a cell that was read from a CSV.
    """

    records: tuple[Record, ...] = ()
    line: Row = field(default_factory=dict)
    """The row that was read from a CSV; empty if there are records."""

    columns: ClassVar[Columns]

    @classmethod
    def of_records(cls: type[Kind], records: Iterable[Record], scenario: str) -> list[Kind]:
        """The launches of a scenario, by case and machine."""
        launches = group_by(
            (record for record in records if record.scenario == scenario),
            lambda record: (record.key, record.environment.get("machine_key")),
        )
        return [cls(tuple(same)) for same in launches.values()]

    @classmethod
    def of_csv(cls: type[Kind], path: Path) -> list[Kind]:
        """The rows of a CSV. Raises `UsageError` if the file is no such CSV."""
        return [cls(line=row) for row in read_csv(path, cls.columns.place)[1]]

    @cached_property
    def row(self) -> Row:
        """The fields of a CSV, as text."""
        return self.line or self.columns.row(self.about | self.values())

    @property
    def about(self) -> dict[str, Any]:
        """The columns of a case that need no samples: its knobs, its machine, how it ended."""
        limits = self.environment("limits") or {}
        return {
            **self.case,
            "timestamp": max(record.time for record in self.records),
            "batch_size": self.batch,
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

    def values(self) -> dict[str, Any]:
        """The columns of a case that were measured."""
        return {}

    @cached_property
    def group(self) -> tuple[str, ...]:
        """The fields that are the same in all cells that it may be compared with."""
        fields = self.line or self.columns.row(self.about)
        return tuple(fields.get(name, "") for name in self.columns.apart)

    def number(self, *names: str) -> float:
        """The first of these columns that is not empty, as a number; NaN if all are empty.

        Raises `ValueError` if a field is no number.
        """
        return next((float(self.row[name]) for name in names if self.row.get(name)), np.nan)

    @property
    def case(self) -> Mapping[str, Any]:
        """The knobs. Those that were read from a CSV are text."""
        if self.records:
            return self.records[0].case
        renamed = {"tile": self.line.get("tile_size"), "batch": self.line.get("batch_size")}
        return renamed | self.line

    @property
    def batch(self) -> int:
        return int(self.case["batch"])

    @property
    def status(self) -> str:
        """``ok`` if every launch was ok; otherwise the most frequent failure."""
        failures = Counter(record.status for record in self.records if not record.ok)
        return failures.most_common(1)[0][0] if failures else "ok"

    @property
    def failure(self) -> Failure | None:
        """The first error of a launch."""
        return next((r.error for r in self.records if r.error is not None), None)

    @property
    def error(self) -> str:
        """The message of the first error in one line; empty if there was none."""
        return " ".join(self.failure.message.split()) if self.failure else ""

    @cached_property
    def measured(self) -> tuple[Record, ...]:
        """The launches that were ok."""
        return tuple(record for record in self.records if record.ok)

    @property
    def launches(self) -> int:
        return len(self.measured)

    @cached_property
    def times(self) -> list[NDArray[np.float64]]:
        """Seconds of each sample of a step, by launch."""
        return [np.asarray(record.samples_s["step"]) for record in self.measured]

    @cached_property
    def time(self) -> Interval | None:
        """Median seconds of a step. With one launch, the interval is that of its samples."""
        if not self.times:
            return None
        if len(self.times) == 1:
            return median_interval(self.times[0])
        return bootstrap_ratio([np.ones(1), np.ones(1)], self.times)

    def work(self, quantity: str) -> float | None:
        """The work of one step; the same in every launch of a case."""
        return self.measured[0].work.get(quantity) if self.measured else None

    def rate(self, quantity: str) -> float | None:
        """Work of a step over its median time, in units a second."""
        work = self.work(quantity)
        return work / self.time.value if work is not None and self.time else None

    def peak(self, *names: str) -> int | None:
        """The largest of these fields of memory, in bytes, over all launches, failed ones too."""
        read = [getattr(record.memory, name) for record in self.records for name in names]
        return max((value for value in read if value is not None), default=None)

    @property
    def host_peak(self) -> int | None:
        return self.peak("host_peak", "host_peak_kernel")

    def fact(self, name: str) -> Any:
        return next((r.facts[name] for r in self.records if name in r.facts), None)

    def environment(self, name: str) -> Any:
        return self.records[-1].environment.get(name)


def machine_namer(cells: Iterable[Cell]) -> Callable[[Cell], str]:
    """Make a function that names a cell's machine, for cells of several machines.

    Args:
        cells: All cells that a reader sees together.

    Returns:
        The function. Its text begins with a comma. It is empty if at most one machine is known.
    """
    several = len({cell.environment("machine_key") for cell in cells if cell.records} - {None}) > 1

    def name(cell: Cell) -> str:
        return f", machine {cell.environment('machine_key') or 'unknown'}" if several else ""

    return name


def latest(cells: Iterable[Kind], hides: Callable[[Kind], bool] = lambda cell: True) -> list[Kind]:
    """The newest cell of each case by its timestamp; of equal timestamps, the later row.

    A cell for which ``hides`` is false is kept only if its case has no other cell.
    """
    ordered = sorted(cells, key=lambda cell: (hides(cell), cell.row.get("timestamp", "")))
    place = (tuple(cell.row.get(n, "") for n in cell.columns.place) for cell in ordered)
    return list({(c.group, at): c for c, at in zip(ordered, place, strict=True)}.values())


def cell_ratio(a: Cell, b: Cell) -> Interval:
    """The median time of a step of ``b`` over that of ``a``, both measured."""
    return bootstrap_ratio(a.times, b.times)


def speed_up(time: Interval, a: Cell, b: Cell, quantity: str) -> Interval | None:
    """Units a second of ``b`` over those of ``a``, from the ratio of their times.

    It is None if the units were not counted.
    """
    before, after = a.work(quantity), b.work(quantity)
    return inverse(time, after / before) if before and after else None


def bootstrap_ratio(a: Sequence[ArrayLike], b: Sequence[ArrayLike]) -> Interval:
    """The median of the launches of ``b`` over that of ``a``, with its interval."""
    of_a, of_b = (tuple(np.asarray(x, np.float64).tobytes() for x in side) for side in (a, b))
    # The seeds are always the same, so that a report of the same records is the same to the digit.
    return resampled_ratio(_resampled(of_a, 1), _resampled(of_b, 0))


@lru_cache(maxsize=2**10)
def _resampled(side: tuple[bytes, ...], seed: int) -> Resampled:
    """Resample a side of a ratio. Bytes can be cached, and a report compares a case with many."""
    launches = [np.frombuffer(samples) for samples in side]
    return resampled(launches, np.random.default_rng(seed))


def inverse(ratio: Interval, work: float = 1.0) -> Interval:
    """The ratio of rates from a ratio of times, with ``work`` times the work."""
    low, high = (None if end is None else work / end for end in (ratio.high, ratio.low))
    return Interval(work / ratio.value, low, high, ratio.n)


def column_of(cells: Sequence[Cell], name: str) -> Any:
    """The numbers of a column; NaN if a cell has none."""
    return np.array([cell.number(name) for cell in cells])


def mean_interval(launches: Sequence[NDArray[np.float64]]) -> Interval | None:
    """The mean over launches of the means of their values, resampled in both; None without any."""
    launches = [seconds for seconds in launches if len(seconds)]
    if not launches:
        return None
    rng = np.random.default_rng(0)
    means = np.array([seconds.mean() for seconds in launches])
    drawn = np.array([rng.choice(each, (DRAWS, len(each))).mean(axis=1) for each in launches])
    picks = rng.integers(len(launches), size=(DRAWS, len(launches)))
    draws = drawn[picks, np.arange(DRAWS)[:, None]].mean(axis=1)
    return Interval.of_draws(float(means.mean()), draws, sum(map(len, launches)))


def middle(values: Iterable[float | None]) -> float | None:
    """The median of the values that are not None; None if all are."""
    present = [value for value in values if value is not None]
    return float(np.median(present)) if present else None
