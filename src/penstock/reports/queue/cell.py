"""One case of a queue benchmark with all its launches, and its queue as the simulation has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import group_by, plural
from ...instruments import Interval, Record
from ..cell import Cell, mean_interval, middle
from ..table import Columns
from . import simulation as model
from .simulation import QueueModel, Timeline

QUEUE_COLUMNS = Columns(
    tuple(
        "timestamp workers queue batch_size compute compute_time iterations seconds_per_iteration "
        "low_seconds high_seconds steady_s read_s simulated_seconds cleared simulated_cleared "
        "utilisation low_utilisation high_utilisation steady_utilisation iteration_s depth "
        "simulated_depth data shuffle seed launches failed status error cores affinity "
        "cgroup_cpus machine_key commit key".split()
    ),
    ("workers", "queue"),
    tuple("data shuffle seed batch_size compute compute_time iterations machine_key".split()),
)

_MOST_ITERATIONS = 1_000_000


@dataclass(frozen=True)
class QueueCell(Cell):
    """All launches of one number of workers with one size of the queue.

    It is simulated if reading alone was measured. Lists have an entry for each launch.
    """

    alone: Interval | None = None
    """Seconds from one batch to the next with as many workers while nothing computes."""
    simulated: Timeline | None = None

    columns = QUEUE_COLUMNS

    @property
    def workers(self) -> int:
        return int(self.case["workers"])

    @property
    def queue(self) -> int:
        return int(self.case["queue"])

    @property
    def name(self) -> str:
        workers = plural(self.workers, "worker")
        return f"{workers}, queue {self.queue}" if self.workers else workers

    @property
    def reads_only(self) -> bool:
        return bool(self.case["compute"] == "none")

    @property
    def iterations(self) -> int:
        iterations = int(self.case["iterations"])
        if iterations > _MOST_ITERATIONS:  # each is simulated
            raise ValueError(f"a case has {iterations:.3g} iterations")
        return iterations

    @property
    def compute_s(self) -> float:
        """Seconds of a step that never waits."""
        return float(self.case["compute_time"])

    @cached_property
    def left(self) -> list[list[int]]:
        """The batches in the queue at the end of each iteration."""
        return [list(record.facts["left"]) for record in self.measured]

    @cached_property
    def means(self) -> list[float]:
        """The mean seconds of an iteration, with those from the full queue, as the seed had it."""
        return [float(np.mean(seconds)) for seconds in self.times]

    @cached_property
    def cleared(self) -> list[int | None]:
        """The first iteration that ends with an empty queue."""
        return [model.first_empty(left) for left in self.left]

    @cached_property
    def utilisations(self) -> list[float]:
        """The accelerator's utilisation over all iterations but the first."""
        return [model.utilisation(seconds.tolist(), self.compute_s) for seconds in self.times]

    @cached_property
    def settled(self) -> list[NDArray[np.float64]]:
        """Seconds of iterations in the steady state, of each launch with three of them at least.

        It begins two iterations after the queue was cleared, because the next one waits for a read
        that is half done. If the queue was not cleared, all iterations but the first are in it. If
        reading is slower than a step, or the queue sinks, none is: it would be cleared later.
        """
        drains = self.alone is not None and self.alone.value > self.compute_s
        steady = []
        for seconds, left, at in zip(self.times, self.left, self.cleared, strict=True):
            if at is not None:
                steady.append(seconds[at + 2 :])
            elif not (self.workers and (drains or _sinks(left))):
                steady.append(seconds[1:])
        return [seconds for seconds in steady if len(seconds) >= 3]

    @cached_property
    def steady(self) -> Interval | None:
        """Seconds of an iteration in the steady state; None if no launch reached it."""
        return mean_interval(self.settled)

    @property
    def steady_utilisations(self) -> list[float]:
        """The accelerator's utilisation in the steady state, of each launch that reached it."""
        return [self.compute_s / float(seconds.mean()) for seconds in self.settled]

    @cached_property
    def interval(self) -> Interval | None:
        """Seconds from one batch to the next, of a cell that computes nothing.

        The batches in the queue at the start, and the one that was begun then, do not count.
        """
        return mean_interval([seconds[self.queue + 1 :] for seconds in self.times])

    def values(self) -> dict[str, Any]:
        values: dict[str, Any] = {"read_s": self.alone and self.alone.value}
        if self.measured:
            values |= {
                "seconds_per_iteration": middle(self.means),
                "low_seconds": min(self.means),
                "high_seconds": max(self.means),
                "iteration_s": " ".join(f"{seconds:.6g}" for seconds in self.times[0]),
                "depth": " ".join(map(str, self.left[0])),
            }
        if self.measured and not self.reads_only:
            values |= {
                "steady_s": self.steady and self.steady.value,
                "steady_utilisation": middle(self.steady_utilisations),
                "cleared": middle_of(self.cleared),
                "utilisation": middle(self.utilisations),
                "low_utilisation": min(self.utilisations),
                "high_utilisation": max(self.utilisations),
            }
        if self.simulated is not None:
            values |= {
                "simulated_seconds": self.simulated.mean_s,
                "simulated_cleared": self.simulated.cleared,
                "simulated_depth": " ".join(map(str, self.simulated.left)),
            }
        return values


def _sinks(left: Sequence[int]) -> bool:
    """Whether a queue is half a batch less full in its second half than in its first."""
    half = len(left) // 2
    return float(np.mean(left[:half]) - np.mean(left[half:])) > 0.5


def middle_of(cleared: Sequence[int | None]) -> int | None:
    """The median of iterations. None counts as later than all."""
    ordered = sorted(cleared, key=lambda k: (k is None, k or 0))
    return ordered[(len(ordered) - 1) // 2]


def queue_cells(records: Iterable[Record]) -> list[list[QueueCell]]:
    """The cells of scenario ``queue``, simulated as far as their reading was measured alone.

    The cells of a group differ only in workers and queue. A reading from which no other cell is
    simulated is a cell of a group, too.
    """
    cells = QueueCell.of_records(records, "queue")
    alone = {_readers(cell): cell for cell in cells if cell.reads_only}
    beside = {_readers(cell) for cell in cells if not cell.reads_only}
    shown = [cell for cell in cells if not (cell.reads_only and _readers(cell) in beside)]
    shown.sort(key=lambda cell: (cell.workers, cell.queue))
    groups = group_by(shown, lambda cell: cell.group).values()
    return [[_simulated(cell, alone.get(_readers(cell))) for cell in group] for group in groups]


def _readers(cell: QueueCell) -> tuple[Any, ...]:
    names = ("data", "batch", "shuffle", "seed", "workers")
    return (*(cell.case.get(name) for name in names), cell.environment("machine_key"))


def _simulated(cell: QueueCell, reader: QueueCell | None) -> QueueCell:
    """The cell with the measurement of its reading alone, and the simulation from that."""
    alone = reader.interval if reader is not None and reader.measured else None
    if alone is None or not cell.measured or cell.reads_only:
        return replace(cell, alone=alone)
    # All threads read one batch after the other. Together they are one reader, whose seconds for a
    # batch were measured.
    feed = QueueModel(cell.queue, alone.value, cell.compute_s)
    timeline = model.simulate(feed, cell.iterations)
    return replace(cell, alone=alone, simulated=timeline)
