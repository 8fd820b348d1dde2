"""The course of a queue: measured, and predicted by a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...instruments import CONFIDENCE, Interval, Record, commit_of
from ..cell import Cell
from ..table import Row, csv_field
from . import model
from .model import Feed, Timeline, seed_row

QUEUE_NEEDS = ("workers", "queue", "seconds_per_iteration")
QUEUE_COLUMNS = tuple(
    "timestamp workers queue batch_size compute compute_time model tile device compute_s "
    "iterations seconds_per_iteration low_seconds high_seconds steady_s read_s model_seconds "
    "simulated_seconds cleared model_cleared simulated_cleared utilisation low_utilisation "
    "high_utilisation steady_utilisation model_utilisation seed_seconds seed_cleared iteration_s "
    "depth simulated_depth data shuffle seed launches failed status error cores affinity "
    "cgroup_cpus machine_key commit key".split()
)
APART = ("data", "shuffle", "seed", "batch", "compute", "compute_time", "iterations", "model",
         "tile", "device")  # fmt: skip
"""Knobs that tell tables apart."""

_DRAWS = 2000
LONGER = 1.05
"""A step that computes so many times as long beside readers as alone contends with them."""


NEAR = 0.02
"""Utilisation as near to the model's as this was foreseen."""


@dataclass(frozen=True)
class QueueCell(Cell):
    """All launches of one number of workers with one size of the queue."""

    step_s: float | None = None
    """Of a step that never waits, by all cells of the group; else by its own launches."""

    @property
    def workers(self) -> int:
        return int(self.case["workers"])

    @property
    def queue(self) -> int:
        return int(self.case["queue"])

    @property
    def name(self) -> str:
        if not self.workers:
            return "0 workers"
        return f"{self.workers} worker{'s' * (self.workers != 1)}, queue {self.queue}"

    @property
    def reads_only(self) -> bool:
        return bool(self.case["compute"] == "none")

    @property
    def iterations(self) -> int:
        return int(self.case["iterations"])

    @cached_property
    def compute_s(self) -> float:
        """Of a step that never waits."""
        if self.step_s is not None:
            return self.step_s
        return float(np.median([record.facts["compute_s"] for record in self.measured]))

    @cached_property
    def left(self) -> list[list[int]]:
        """Of each launch, the batches in the queue at the end of each iteration."""
        return [list(record.facts["left"]) for record in self.measured]

    @cached_property
    def means(self) -> list[float]:
        """Of each launch, the seconds of an iteration by the seed's definition."""
        return [float(np.mean(seconds)) for seconds in self.times]

    @cached_property
    def cleared(self) -> list[int | None]:
        return [model.first_empty(left) for left in self.left]

    @cached_property
    def utilisations(self) -> list[float]:
        """Of each launch, over all iterations but the first; those from the full queue count."""
        return [model.utilisation(seconds.tolist(), self.compute_s) for seconds in self.times]

    def share(self, phase: str) -> float | None:
        """What of the iterations but the first went to ``get`` or to ``compute``, the median over
        launches; None where those were not timed apart."""
        found = [
            sum(record.samples_s[phase][1:]) / sum(record.samples_s["step"][1:])
            for record in self.measured
            if phase in record.samples_s
        ]
        return median(found) if found else None

    @property
    def computing_s(self) -> float | None:
        """Of computing in a step, beside the readers."""
        found = [r.samples_s["compute"][1:] for r in self.measured if "compute" in r.samples_s]
        return median([float(np.mean(seconds)) for seconds in found]) if found else None

    def settled(self, drains: bool) -> list[NDArray[np.float64]]:
        """Of each launch that shows three of them, the seconds of iterations in the steady state.

        Once the queue was cleared it begins, after the next iteration, which waits for a read that
        is half done. Where it was not, all iterations but the first are in it if the queue stays
        full, and none if it ``drains`` or is seen to: then it would have been cleared later.
        """
        found = []
        for seconds, left, at in zip(self.times, self.left, self.cleared, strict=True):
            if at is not None:
                found.append(seconds[at + 2 :])
            elif not (self.workers and (drains or _sinks(left))):
                found.append(seconds[1:])
        return [seconds for seconds in found if len(seconds) >= 3]

    @cached_property
    def interval(self) -> Interval | None:
        """From one batch to the next, of a cell that computes nothing. What was in the queue at the
        beginning, and what was begun with it, was read beforehand."""
        return mean_interval([seconds[self.queue + 1 :] for seconds in self.times])


def _sinks(left: Sequence[int]) -> bool:
    """Whether a queue is half a batch less full in its second half than in its first."""
    half = len(left) // 2
    return float(np.mean(left[:half]) - np.mean(left[half:])) > 0.5


def mean_interval(launches: Sequence[NDArray[np.float64]]) -> Interval | None:
    """The mean over launches and their values, resampled in both; None of nothing."""
    if not launches:
        return None
    rng = np.random.default_rng(0)
    means = np.array([seconds.mean() for seconds in launches])
    drawn = np.array([rng.choice(own, (_DRAWS, len(own))).mean(axis=1) for own in launches])
    picks = rng.integers(len(launches), size=(_DRAWS, len(launches)))
    draws = drawn[picks, np.arange(_DRAWS)[:, None]].mean(axis=1)
    low, high = np.quantile(draws, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Interval(float(means.mean()), float(low), float(high), sum(map(len, launches)))


@dataclass(frozen=True)
class Predicted:
    """What the model says of a cell."""

    feed: Feed
    timeline: Timeline

    @property
    def mean_s(self) -> float:
        return self.feed.mean_s(len(self.timeline.seconds))


@dataclass(frozen=True)
class Course:
    """A cell and, where its reading was measured alone, its prediction."""

    cell: QueueCell
    alone: Interval | None
    predicted: Predicted | None

    @cached_property
    def settled(self) -> list[NDArray[np.float64]]:
        """See `QueueCell.settled`."""
        return self.cell.settled(
            self.predicted is not None and self.predicted.feed.drain is not None
        )

    @cached_property
    def steady(self) -> Interval | None:
        """Seconds of an iteration in the steady state; None where it was not reached."""
        return mean_interval(self.settled)

    @property
    def utilisations(self) -> list[float]:
        """Of each launch that reached the steady state, in it."""
        return [self.cell.compute_s / float(seconds.mean()) for seconds in self.settled]

    @property
    def misses(self) -> list[int]:
        """Iterations between the predicted clearing of the queue and each launch's, least first;
        empty where it was not to be predicted within the iterations, or was not predicted."""
        if self.predicted is None or not self.cell.workers:
            return []
        last = self.cell.iterations
        at = self.predicted.timeline.cleared
        found = [last if k is None else k for k in self.cell.cleared]
        if at is None and all(k == last for k in found):
            return []
        return sorted(abs(k - (last if at is None else at)) for k in found)

    @property
    def off(self) -> int | None:
        """The median of the misses."""
        return self.misses[len(self.misses) // 2] if self.misses else None

    @property
    def row(self) -> Row:
        cell, predicted = self.cell, self.predicted
        case = cell.case
        seed = None if cell.reads_only else seed_row(cell.workers, cell.queue)
        limits = cell.environment("limits") or {}
        failure = next((r.error for r in cell.records if r.error is not None), None)
        values: dict[str, Any] = {
            **{name: case.get(name) for name in QUEUE_COLUMNS},
            "timestamp": max(record.time for record in cell.records),
            "batch_size": cell.batch,
            "read_s": self.alone and self.alone.value,
            "seed_seconds": seed and seed.seconds,
            "seed_cleared": seed and seed.cleared,
            "launches": cell.launches,
            "failed": len(cell.records) - cell.launches,
            "status": cell.status,
            "error": " ".join(failure.message.split()) if failure else "",
            "cores": (cell.environment("machine") or {}).get("cores"),
            "affinity": limits.get("affinity"),
            "cgroup_cpus": limits.get("cgroup_cpus"),
            "machine_key": cell.environment("machine_key"),
            "commit": commit_of(cell.environment("git")),
            "key": cell.records[0].key,
        }
        if cell.measured:
            values |= {
                "compute_s": cell.compute_s,
                "seconds_per_iteration": median(cell.means),
                "low_seconds": min(cell.means),
                "high_seconds": max(cell.means),
                "iteration_s": " ".join(f"{seconds:.6g}" for seconds in cell.times[0]),
                "depth": " ".join(map(str, cell.left[0])),
            }
        if cell.measured and not cell.reads_only:
            values |= {
                "steady_s": self.steady and self.steady.value,
                "steady_utilisation": median(self.utilisations) if self.settled else None,
                "cleared": middle_of(cell.cleared),
                "utilisation": median(cell.utilisations),
                "low_utilisation": min(cell.utilisations),
                "high_utilisation": max(cell.utilisations),
            }
        if predicted is not None:
            values |= {
                "model_seconds": predicted.mean_s,
                "simulated_seconds": predicted.timeline.mean_s,
                "model_utilisation": predicted.feed.utilisation,
                "model_cleared": predicted.feed.drain,
                "simulated_cleared": predicted.timeline.cleared,
                "simulated_depth": " ".join(map(str, predicted.timeline.left)),
            }
        return {name: csv_field(values[name]) for name in QUEUE_COLUMNS}


def median(values: Sequence[float]) -> float:
    return float(np.median(values))


def middle_of(cleared: Sequence[int | None]) -> int | None:
    """The median of iterations of which None is later than all."""
    ordered = sorted(cleared, key=lambda k: (k is None, k or 0))
    return ordered[(len(ordered) - 1) // 2]


def courses(records: Iterable[Record]) -> list[list[Course]]:
    """The cells of scenario ``queue`` with their predictions, in groups that differ in workers and
    queue alone. A reading that no other cell is predicted from is a cell of a group, too."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record.scenario == "queue":
            machine = record.environment.get("machine_key")
            found.setdefault((record.key, machine), []).append(record)
    cells = [QueueCell(tuple(launches)) for launches in found.values()]
    alone = {_readers(cell): cell for cell in cells if cell.reads_only}
    beside = {_readers(cell) for cell in cells if not cell.reads_only}
    groups: dict[tuple[Any, ...], list[QueueCell]] = {}
    for cell in sorted(cells, key=lambda cell: (cell.workers, cell.queue)):
        if not (cell.reads_only and _readers(cell) in beside):
            about = (*(str(cell.case.get(n)) for n in APART), cell.environment("machine_key"))
            groups.setdefault(about, []).append(cell)
    return [
        [_course(cell, alone.get(_readers(cell))) for cell in _same_step(group)]
        for group in groups.values()
    ]


def _same_step(group: Sequence[QueueCell]) -> list[QueueCell]:
    """The cells, whose step is the same: its seconds, too."""
    timed = [record.facts["compute_s"] for cell in group for record in cell.measured]
    return [replace(cell, step_s=median(timed)) for cell in group] if timed else list(group)


def _readers(cell: QueueCell) -> tuple[Any, ...]:
    names = ("data", "batch", "shuffle", "seed", "workers")
    return (*(cell.case.get(name) for name in names), cell.environment("machine_key"))


def _course(cell: QueueCell, reader: QueueCell | None) -> Course:
    alone = reader.interval if reader is not None and reader.measured else None
    if alone is None or not cell.measured or cell.reads_only:
        return Course(cell, alone, None)
    # However many threads, they read one batch after the other: all together are one reader, whose
    # seconds for a batch were measured.
    feed = Feed(min(cell.workers, 1), cell.queue, alone.value, cell.compute_s)
    in_hand = cell.fact("in_hand")
    timeline = model.simulate(feed, cell.iterations, in_hand=in_hand)
    return Course(cell, alone, Predicted(feed, timeline))


def alone_words(group: Sequence[Course]) -> bool:
    """Whether nobody computed."""
    return group[0].cell.reads_only


def cleared_at(iteration: int | None) -> str:
    return "never" if iteration is None else str(iteration)


def drain_words(drain: float | None) -> str:
    return "never" if drain is None else f"{drain:.1f}"


def percent_words(share: float) -> str:
    return f"{100 * share:.1f} %"
