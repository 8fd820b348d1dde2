"""The queue between reading and computing, played batch by batch: what a deeper queue changes, and
what it cannot.

    reader   R seconds for a batch   ──▶ │ queue of q │ ──▶   step of C seconds

A step waits only if the queue is empty. If reading is slower than computing, a full queue is used
up: each step takes one batch, and only C / R of a batch comes meanwhile. After that every step
takes R seconds. A deeper queue therefore lasts longer, but does not change the steady state. It is
worth its memory only if reads are uneven.

`simulate` plays this with whole batches, with the batches that a reader holds while the queue is
full, and with reads of unequal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle

_TIE = 1e-9
"""A read that ends within this share of a read after a step ends with the step."""


@dataclass(frozen=True, slots=True)
class QueueModel:
    """A reader, a bounded queue and a consumer, each at one speed. Several readers that share a
    store are one reader, whose seconds were measured."""

    queue: int
    """The most batches that are ready and not yet taken; 0 if the consumer reads for itself."""
    read_s: float
    """Seconds of one batch."""
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

    seconds: list[float]
    """Seconds of waiting for a batch and of computing."""
    left: list[int]
    """Batches in the queue at the end; empty if there is no queue. At 0 the next iteration
    waits."""

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
    """Play a queue batch by batch, from the time on when it is full.

    Args:
        feed: The reader, the queue and the step.
        iterations: How many steps are played.
        in_hand: The finished batches that the reader may hold while the queue is full. Those of our
            loader hold none: a read begins only if there is room for its batch.
        reads: Seconds of the first batch, of the second and so on, again and again. They take the
            place of ``read_s``.

    Returns:
        The course of the queue.
    """
    seconds = cycle(reads or [feed.read_s])
    if not feed.queue:
        return Timeline([next(seconds) + feed.compute_s for _ in range(iterations)], [])
    room, now, timeline = feed.queue + in_hand, 0.0, Timeline([], [])
    ends = [0.0 * next(seconds) for _ in range(room)]  # each read was there at the beginning
    for number in range(iterations):
        wait = max(0.0, ends[number] - now)
        # A batch that is taken makes room for one read, which follows the one under way.
        ends.append(max(ends[-1], now + wait) + next(seconds))
        now += wait + feed.compute_s
        ready = sum(end <= now + _TIE * feed.read_s for end in ends[number + 1 :])
        timeline.seconds.append(wait + feed.compute_s)
        timeline.left.append(min(ready, feed.queue))
    return timeline
