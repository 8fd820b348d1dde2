"""The queue between reading and computing: what it can do, what it cannot, and how to see it.

    readers  R seconds for a batch   ──▶ │ queue of q │ ──▶   step of C seconds
    W of them, but a batch every `interval_s` seconds at best, however many there are

A step waits only for an empty queue. Where reading is the slower of the two, a full queue is a
stock that is eaten up: each step takes one batch and only C / R of one comes after it. It lasts

    n0 = q R / (R - C)   steps, and from then on every step takes R seconds.

where the reader holds one batch more in hand while the queue is full, as the seed's did; where it
holds none, q - 1 stands for q. So a deeper queue moves the end of the stock and never the steady
state; it is worth its memory only against reads that are uneven. `QueueModel` holds this model in
closed form and `simulate` plays it event by event, with whole batches, with the batches that
readers hold in hand while the queue is full, and with reads of unequal length.

`SEED` is the table that this was made to explain, with what the model says of each of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


def seed_row(workers: int, queue: int) -> SeedRow | None:
    return next((row for row in SEED if (row.workers, row.queue) == (workers, queue)), None)


PASSES = {0.9: "3D U-Net and ResNet-50", 0.7: "CosmoFlow"}
"""Accelerator utilisation that MLPerf Storage asks for, and of which of its workloads."""

_TIE = 1e-9
"""Reads that end this near to each other, as a share of a read, end together."""


@dataclass(frozen=True, slots=True)
class QueueModel:
    """Readers, a bounded queue and a consumer, each at one speed."""

    workers: int
    """Readers; 0 where the consumer reads for itself."""
    queue: int
    """Most batches that are ready and not yet taken."""
    read_s: float
    """Of one batch by one reader that has the machine to itself."""
    compute_s: float
    """Of one step."""
    floor_s: float = 0.0
    """Least time between batches however many read: what storage, cores or a lock allow."""

    def __post_init__(self) -> None:
        if self.workers < 0 or (self.workers and self.queue < 1):
            raise ValueError(f"{self.workers} workers need a queue of 1 at least, not {self.queue}")
        if not (self.read_s > 0 and self.compute_s >= 0 and self.floor_s >= 0):
            raise ValueError(
                f"a feed cannot take {self.read_s} s to read, {self.compute_s} s to "
                f"compute and {self.floor_s} s at least"
            )

    @property
    def interval_s(self) -> float:
        """Between batches, when nobody stands still."""
        return max(self.read_s / max(self.workers, 1), self.floor_s)

    @property
    def steady_s(self) -> float:
        """Of an iteration, once the queue is empty or full for good."""
        if self.workers == 0:
            return self.interval_s + self.compute_s
        return max(self.compute_s, self.interval_s)

    @property
    def drain(self) -> float | None:
        """n0, the iteration at which a full queue is cleared whose reader holds a batch in hand, by
        the seed's formula; None where it never is.

        >>> round(QueueModel(1, 8, read_s=2.66, compute_s=1.0).drain, 1)
        12.8
        """
        if self.workers == 0 or self.interval_s <= self.compute_s:
            return None
        return self.queue * self.interval_s / (self.interval_s - self.compute_s)

    def mean_s(self, iterations: int) -> float:
        """Mean of so many iterations until n0 and from there on: the seed's seconds/iteration.

        >>> round(QueueModel(1, 8, read_s=2.66, compute_s=1.0).mean_s(30), 2)
        1.95
        """
        fed = min(self.drain or 0.0, iterations)
        return (fed * self.compute_s + (iterations - fed) * self.steady_s) / iterations

    @property
    def utilisation(self) -> float:
        """Of the accelerator, in the steady state."""
        return self.compute_s / self.steady_s


def utilisation(seconds: Sequence[float], compute_s: float) -> float:
    """Accelerator utilisation by the formula of MLPerf Storage: compute time over all time.

    ``seconds`` are those of the iterations, of which the first does not count; ``compute_s`` is
    what a step takes when it never waits.

    >>> utilisation([9.0, 1.0, 1.5, 1.5], compute_s=1.0)
    0.75
    """
    counted = seconds[1:]
    return len(counted) * compute_s / sum(counted)


def queue_verdict(share: float) -> str:
    """What an accelerator utilisation is worth, in words.

    >>> queue_verdict(0.75)
    '75.0 % passes the 70 % of CosmoFlow and fails the 90 % of 3D U-Net and ResNet-50'
    """
    said = f"{100 * share:.1f} %"
    passed = [f"{100 * at:.0f} % of {who}" for at, who in PASSES.items() if share >= at]
    failed = [f"{100 * at:.0f} % of {who}" for at, who in PASSES.items() if share < at]
    if not passed:
        return f"{said} fails {' and '.join('the ' + each for each in reversed(failed))}"
    if not failed:
        return f"{said} passes the {passed[0]}"
    return f"{said} passes the {passed[0]} and fails the {failed[0]}"


@dataclass(slots=True)
class Timeline:
    """A queue's course, from the first `get` on."""

    seconds: list[float] = field(default_factory=list)
    """Of each iteration: waiting for a batch, and computing."""
    waits: list[float] = field(default_factory=list)
    """What of it was waiting."""
    taken: list[int] = field(default_factory=list)
    """Batches in the queue just after one was taken from it; nothing where there is no queue."""
    left: list[int] = field(default_factory=list)
    """Batches in the queue at the end of each iteration: at 0, the next one waits."""

    @property
    def mean_s(self) -> float:
        return sum(self.seconds) / len(self.seconds)

    @property
    def cleared(self) -> int | None:
        return first_empty(self.left)


def first_empty(left: Sequence[int]) -> int | None:
    """The first iteration, from 0, that ends with an empty queue; None where none does.

    >>> first_empty([3, 2, 1, 1, 0, 0])
    4
    """
    return next((i for i, depth in enumerate(left) if depth == 0), None)


def simulate(
    feed: QueueModel,
    iterations: int,
    *,
    in_hand: int | None = None,
    in_turn: bool = False,
    reads: Sequence[float] = (),
    prefill_s: float | None = None,
) -> Timeline:
    """Play a feed event by event.

    Of W readers each takes ``read_s``, and longer while so many read at once that a batch would
    come more often than every ``floor_s``: they share what there is evenly.

    ``in_hand`` is how many finished batches the readers may hold while the queue is full (one each
    unless given; 0 where a read is begun only when there is room for its batch). ``in_turn`` is a
    lock around each read: one reads and the others wait. ``reads`` are seconds of the first batch,
    the second and so on, round and round, in place of ``read_s``.
    Before the first `get` the readers have ``prefill_s`` seconds; unless given, until all is full.
    """
    held = feed.workers if in_hand is None else in_hand
    readers = _Readers(feed, held, 1 if in_turn else feed.workers, reads)
    timeline = Timeline()
    readers.run(prefill_s)
    for _ in range(iterations):
        if feed.workers == 0:
            wait = max(readers.next_read(), feed.floor_s)
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

    def __init__(
        self, feed: QueueModel, in_hand: int, at_once: int, reads: Sequence[float]
    ) -> None:
        self._feed, self._room, self._reads = feed, feed.queue + in_hand, reads
        self._at_once = at_once
        self._begun = 0
        self._under_way: list[tuple[float, float]] = []
        """Of each read: the share that is left of it, and its seconds if it were alone."""
        self._ready = 0
        """Batches that are read: those in the queue and, behind it, those in hand."""

    @property
    def queued(self) -> int:
        return min(self._ready, self._feed.queue)

    def next_read(self) -> float:
        """Begin a read; its seconds if it were alone."""
        seconds = self._reads[self._begun % len(self._reads)] if self._reads else self._feed.read_s
        self._begun += 1
        return seconds

    def take(self) -> float:
        """Take a batch from the queue; how long that had to wait."""
        waited = 0.0
        while not self._ready:
            waited += self._advance(None)
        self._ready -= 1
        return waited

    def run(self, seconds: float | None) -> None:
        """Let the readers read for so long; unless given, until they must stand still."""
        if seconds is None:
            while self._advance(None):
                pass
            return
        while seconds > 0:
            seconds -= self._advance(seconds)

    def _begin(self) -> None:
        """Every reader that is free and has room for a batch begins one."""
        in_hand = self._ready - self.queued
        free = min(self._feed.workers - in_hand, self._at_once) - len(self._under_way)
        room = self._room - self._ready - len(self._under_way)
        self._under_way += [(1.0, self.next_read()) for _ in range(min(free, room))]

    def _advance(self, limit: float | None) -> float:
        """Go on to the next read that ends, ``limit`` seconds at most; how long that was."""
        self._begin()
        if not self._under_way:
            return 0.0 if limit is None else limit
        # All that read at once share a batch every `floor_s`.
        shared = len(self._under_way) * self._feed.floor_s
        pace = [max(seconds, shared) for _, seconds in self._under_way]
        step = min(left * seconds for (left, _), seconds in zip(self._under_way, pace, strict=True))
        if limit is not None:
            step = min(step, limit)
        moved = [
            (left - step / shared_s, seconds)
            for (left, seconds), shared_s in zip(self._under_way, pace, strict=True)
        ]
        self._under_way = [read for read in moved if read[0] > _TIE]
        self._ready += len(moved) - len(self._under_way)
        return step


@dataclass(frozen=True, slots=True)
class SeedRow:
    """A row as it was published."""

    workers: int
    queue: int
    seconds: float
    """Per iteration, the mean of all, those from the full queue among them."""
    cleared: int | None
    """"queue cleared after iter"."""


SEED_SOURCE = (
    "stacked-io-and-threading-notes.md, Thread Data Queue Timing: batches of 16, 16 dask threads, "
    "a step of 1 s, 30 iterations"
)
SEED = (
    SeedRow(0, 0, 3.6, None),
    SeedRow(1, 1, 2.5, 0),
    SeedRow(1, 2, 2.4, 3),
    SeedRow(1, 3, 2.3, 4),
    SeedRow(1, 4, 2.2, 6),
    SeedRow(1, 8, 1.9, 13),
    SeedRow(2, 2, 2.4, 3),
    SeedRow(2, 4, 2.2, 7),
    SeedRow(4, 4, 2.3, 7),
    SeedRow(4, 8, 2.0, 11),
)
SEED_READ_S = 2.66
"""A batch of 16 with 16 threads, from the same notes."""
SEED_COMPUTE_S = 1.0
SEED_ITERATIONS = 30


def seed_feed(row: SeedRow) -> QueueModel:
    """A row of the seed's table as a feed.

    Its readers held one lock from the beginning of a read until the batch was in the queue, so that
    however many there were, they were one.
    """
    return QueueModel(min(row.workers, 1), row.queue, SEED_READ_S, SEED_COMPUTE_S)
