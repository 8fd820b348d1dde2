"""The queue between reading and computing, played event by event: what a deeper queue changes, and
what it cannot.

    readers  R seconds for a batch   ──▶ │ queue of q │ ──▶   step of C seconds

A step waits only if the queue is empty. If reading is slower than computing, a full queue is used
up: each step takes one batch, and only C / R of a batch comes meanwhile. After that every step
takes R seconds. A deeper queue therefore lasts longer, but does not change the steady state. It is
worth its memory only if reads are uneven.

`simulate` plays this with whole batches, with the batches that readers hold while the queue is
full, and with reads of unequal length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice

_TIE = 1e-9
"""Reads that end within this share of a read end together."""


@dataclass(frozen=True, slots=True)
class QueueModel:
    """Readers, a bounded queue and a consumer, each at one speed."""

    workers: int
    """The number of readers; 0 if the consumer reads for itself."""
    queue: int
    """The most batches that are ready and not yet taken."""
    read_s: float
    """Seconds of one batch for one reader."""
    compute_s: float
    """Seconds of one step."""


def utilisation(seconds: Sequence[float], compute_s: float) -> float:
    """Accelerator utilisation by the formula of MLPerf Storage: compute time over all time.

    Args:
        seconds: The seconds of each iteration. The first one does not count.
        compute_s: The seconds of a step that never waits.

    Returns:
        A share from 0 to 1.

    >>> utilisation([9.0, 1.0, 1.5, 1.5], compute_s=1.0)
    0.75
    """
    counted = seconds[1:]
    return len(counted) * compute_s / sum(counted)


@dataclass(slots=True)
class Timeline:
    """The course of a queue from the first `get` on. Lists have an entry for each iteration."""

    seconds: list[float] = field(default_factory=list)
    """Seconds of waiting for a batch and of computing."""
    waits: list[float] = field(default_factory=list)
    """Seconds of waiting alone."""
    taken: list[int] = field(default_factory=list)
    """Batches in the queue just after one was taken; empty if there is no queue."""
    left: list[int] = field(default_factory=list)
    """Batches in the queue at the end. At 0 the next iteration waits."""

    @property
    def mean_s(self) -> float:
        return sum(self.seconds) / len(self.seconds)

    @property
    def cleared(self) -> int | None:
        return first_empty(self.left)


def first_empty(left: Sequence[int]) -> int | None:
    """The first iteration, from 0, that ends with an empty queue; None if none does.

    >>> first_empty([3, 2, 1, 1, 0, 0])
    4
    """
    return next((i for i, depth in enumerate(left) if depth == 0), None)


def simulate(
    feed: QueueModel,
    iterations: int,
    *,
    in_hand: int = 0,
    reads: Sequence[float] = (),
) -> Timeline:
    """Play a queue event by event, from the time on when it is full.

    Args:
        feed: The readers, the queue and the step.
        iterations: How many steps are played.
        in_hand: The finished batches that readers may hold while the queue is full. Those of our
            loader hold none: a read begins only if there is room for its batch.
        reads: Seconds of the first batch, of the second and so on, again and again. They take the
            place of ``read_s``.

    Returns:
        The course of the queue.
    """
    seconds = cycle(reads or [feed.read_s])
    readers = _Readers(feed, in_hand, seconds)
    timeline = Timeline()
    readers.run(math.inf)
    for _ in range(iterations):
        if feed.workers == 0:
            wait = next(seconds)
        else:
            wait = readers.take()
            timeline.taken.append(readers.queued)
            readers.run(feed.compute_s)
            timeline.left.append(readers.queued)
        timeline.waits.append(wait)
        timeline.seconds.append(wait + feed.compute_s)
    return timeline


class _Readers:
    """The readers and the queue, at one instant."""

    def __init__(self, feed: QueueModel, in_hand: int, seconds: Iterator[float]) -> None:
        self._feed, self._room, self._seconds = feed, feed.queue + in_hand, seconds
        self._under_way: list[float] = []
        """The seconds that are left of each read."""
        self._ready = 0
        """Batches that are read: in the queue and, behind it, in the hands of readers."""

    @property
    def queued(self) -> int:
        return min(self._ready, self._feed.queue)

    def take(self) -> float:
        """Take a batch from the queue, and return the seconds of waiting for it."""
        waited = 0.0
        while not self._ready:
            waited += self._advance(math.inf)
        self._ready -= 1
        return waited

    def run(self, seconds: float) -> None:
        """Let the readers read for so many seconds, or until all must wait."""
        while seconds > 0 and (step := self._advance(seconds)):
            seconds -= step

    def _begin(self) -> None:
        """Begin a read for every reader that is free and has room for a batch."""
        in_hand = self._ready - self.queued
        free = self._feed.workers - in_hand - len(self._under_way)
        room = self._room - self._ready - len(self._under_way)
        self._under_way += islice(self._seconds, max(0, min(free, room)))

    def _advance(self, limit: float) -> float:
        """Go on to the end of the next read, for ``limit`` seconds at most; return the seconds."""
        self._begin()
        step = min([limit, *self._under_way]) if self._under_way else 0.0
        left = [seconds - step for seconds in self._under_way]
        self._under_way = [seconds for seconds in left if seconds > _TIE * self._feed.read_s]
        self._ready += len(left) - len(self._under_way)
        return step
