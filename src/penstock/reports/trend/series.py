"""Launches as series: a case on one machine, a point for each commit, in the order of commits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...base import UsageError, group_by
from ...instruments import Record, commit_of, commits_between, in_order, short_commit
from ..run_settings import cases_of_sides

NO_COMMIT = "no commit"
_LIBRARIES = ("python", "torch", "numpy", "zarr", "tensorstore")
"""Libraries whose change of version may cause a step."""


@dataclass(frozen=True)
class Point:
    """The launches of one commit, made on one day."""

    commit: str | None
    day: str
    launches: tuple[Record, ...]
    samples: tuple[float, ...]
    """Median of each launch, in seconds."""

    @property
    def level(self) -> float:
        return float(np.median(self.samples))

    @property
    def name(self) -> str:
        return short_commit(self.commit) if self.commit else f"{NO_COMMIT}, {self.day}"

    @property
    def libraries(self) -> dict[str, str]:
        """Versions of libraries, of the last launch."""
        versions = self.launches[-1].environment.get("libraries") or {}
        return {name: versions[name] for name in _LIBRARIES if versions.get(name)}


@dataclass(frozen=True)
class Series:
    """One case on one machine over commits."""

    label: str
    machine: str
    """Key of the machine; empty if no launch names it."""
    points: tuple[Point, ...]
    by_ancestry: bool
    """True if git gave the order; otherwise the times of the launches gave it."""
    folder: Path | None = None

    @cached_property
    def launches(self) -> int:
        return sum(len(point.samples) for point in self.points)

    def place_of(self, commit: str | None) -> int:
        """The place of the last point of a commit, by the beginning of its hash; -1 without one."""
        places = [
            n for n, p in enumerate(self.points) if commit and (p.commit or "").startswith(commit)
        ]
        return max(places, default=-1)

    def between(self, before: Point, after: Point) -> int | None:
        """Number of commits between two points; None if git does not know."""
        if not (before.commit and after.commit):
            return None
        if before.commit == after.commit:
            return 0
        old, new = (each.partition("+")[0] for each in (before.commit, after.commit))
        return commits_between(old, new, self.folder)


def series_of(records: Iterable[Record], metric: str, folder: Path | None = None) -> list[Series]:
    """The series of all cases.

    Args:
        records: Launches of any cases and machines.
        metric: The name in ``Record.samples_s`` of the seconds that are watched.
        folder: A folder of the repository that knows the commits; None for the current one.

    Returns:
        A series for each case on each machine, in the order of their first launches.

    Raises:
        UsageError: No launch measured ``metric``.
    """
    (launches,) = cases_of_sides([record for record in records if record.ok])
    measured = [record for record in launches if min(record.samples_s.get(metric) or (0,)) > 0]
    if launches and not measured:
        metrics = " and ".join(sorted({name for each in launches for name in each.samples_s}))
        raise UsageError(f"--metric {metric} was not measured; there is {metrics}")
    cases = group_by(
        measured, lambda r: (r.scenario, r.key, str(r.environment.get("machine_key") or ""))
    )
    labels = _labels([same[0] for same in cases.values()])
    return [
        _series(labels[key], machine, same, metric, folder)
        for (_, key, machine), same in cases.items()
    ]


def machine_of(record: Record) -> str:
    """The key of a launch's machine; empty if the record names none."""
    return str(record.environment.get("machine_key") or "")


def _series(
    label: str, machine: str, records: Sequence[Record], metric: str, folder: Path | None
) -> Series:
    groups = group_by(records, lambda r: (commit_of(r.environment.get("git")), r.time[:10]))
    points = [
        Point(commit, day, tuple(same), tuple(float(np.median(r.samples_s[metric])) for r in same))
        for (commit, day), same in groups.items()
    ]
    clean = list(dict.fromkeys(p.commit.partition("+")[0] for p in points if p.commit))
    ancestry = in_order(clean, folder) if all(p.commit for p in points) else None
    place = {commit: number for number, commit in enumerate(ancestry or ())}

    def order(point: Point) -> tuple[int, str]:
        commit = (point.commit or "").partition("+")[0]
        return place.get(commit, 0), min(record.time for record in point.launches)

    return Series(label, machine, tuple(sorted(points, key=order)), bool(place), folder)


def _labels(records: Sequence[Record]) -> dict[str, str]:
    """A label for each case: the kind of measurement, and the knobs in which it differs."""
    labels = {}
    for scenario, same in group_by(records, lambda r: r.scenario).items():
        varying = [
            name
            for name in dict.fromkeys(name for r in same for name in r.case)
            if len({_text(r.case.get(name)) for r in same}) > 1
        ]
        for record in same:
            words = [
                f"{name}={_text(record.case[name])}" for name in varying if name in record.case
            ]
            labels[record.key] = " ".join([scenario, *words])
    return labels


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def changed_libraries(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The libraries whose versions differ, in words."""
    return [
        f"{name} {before[name]} to {after[name]}"
        for name in before
        if name in after and before[name] != after[name]
    ]
