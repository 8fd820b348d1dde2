"""Batches under way: their number, their buffers, and the work that is left on each."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base import Channel, Flow
from .batch import Batch
from .engines.engine import TICKET, Begins, Check, Reading, Task
from .ring import Ring


class BatchWork:
    """A batch under way, and the work that is left on it."""

    def __init__(
        self, batch: Batch, out: Mapping[str, NDArray[Any]], place: int, tasks_left: int
    ) -> None:
        self.batch: Batch | None = batch
        self.out = out
        """The array of the batch, or the part of one, that each stored array fills."""
        self.place, self.tasks_left = place, tasks_left
        self.readings: Sequence[Reading] = ()
        """Reads that an engine began and that are still to be waited for."""

    @property
    def ready(self) -> bool:
        """Whether all of its reads have ended."""
        return all(reading.done() for reading in self.readings)

    def wait(self, check: Check) -> None:
        """Wait until everything is read."""
        readings, self.readings = self.readings, ()
        for reading in readings:
            reading.wait(check)

    def hand_over(self) -> Batch:
        """The batch. From now on nobody else holds it, not even a thread that is slow to end."""
        batch, self.batch, self.out = self.batch, None, {}
        assert batch is not None
        return batch


class Ticket(NamedTuple):
    """Some tasks of a batch, for one thread."""

    work: BatchWork
    tasks: Sequence[Task]


def tickets_of(work: BatchWork, tasks: Sequence[Task]) -> Iterator[Ticket]:
    """Tasks in tickets of at least `TICKET` bytes."""
    first, nbytes = 0, 0
    for i, task in enumerate(tasks):
        nbytes += task.nbytes
        if nbytes >= TICKET or i == len(tasks) - 1:
            yield Ticket(work, tasks[first : i + 1])
            first, nbytes = i + 1, 0


class ReadAhead:
    """The number of batches that may be begun ahead of those that the user took."""

    def __init__(self, flow: Flow, ring: Ring, queue: int) -> None:
        self._flow, self._ring, self._queue = flow, ring, queue
        self._begun = self._taken = 0
        """Batches that were begun, and batches that the user has taken."""
        self._asked = False
        """Whether the user's thread waits in `take`."""
        self._starved = False
        """Whether the planner waits for a buffer that the user holds."""

    def buffer(self) -> NDArray[np.uint8]:
        """A buffer for one batch more; waits until one more may begin.

        A buffer that the user holds between two batches is about to come back, and a new one would
        cost its page faults. So the ring grows only when the user waits for a batch and none is
        under way: then the user keeps the batches that they hold.
        """
        with self._flow.changed:
            self._flow.wait_for(self._may_begin)
        while (root := self._ring.lend()) is None:
            with self._flow.changed:
                self._flow.check()
                self._starved = True
                stuck = self._asked and self._begun == self._taken
            if not stuck:
                self._ring.wait()
            elif (root := self._ring.lend()) is None:  # not even since they began to wait
                self._ring.grow()
            else:
                break
        self._starved = False
        return root

    def _may_begin(self) -> bool:
        ahead = self._begun - self._taken
        return ahead < self._queue or (self._asked and ahead == 0)

    def begin(self) -> int:
        """Count one batch more; its place among all batches, from 0."""
        with self._flow.changed:
            self._begun += 1
            return self._begun - 1

    def take(self, done: Channel[BatchWork]) -> BatchWork | None:
        """The next batch of a channel, None after the last. Waits for it."""
        with self._flow.changed:
            self._asked = True
            if self._begun == self._taken:  # only then does the planner wait for this
                if self._starved:
                    self._ring.wake()
                self._flow.changed.notify_all()
            work = done.get()
            self._asked = False
            self._taken += work is not None
            self._flow.changed.notify_all()
        return work


class OwnReads:
    """Batches that an engine reads in threads of its own."""

    def __init__(self, drivers: int) -> None:
        self._drivers = drivers
        self._works: deque[weakref.ref[BatchWork]] = deque()

    def begin(self, work: BatchWork, tasks: Sequence[Begins], check: Check) -> None:
        """Start reading a batch, once fewer reads are under way than the engine has drivers."""
        most = max(1, self._drivers // len(tasks))
        while len(self._works) >= most:
            before = self._works.popleft()()
            for reading in before.readings if before is not None else ():
                reading.wait(check)
        work.readings = [task.begin(work.out) for task in tasks]
        self._works.append(weakref.ref(work))

    def let_end(self) -> None:
        """Give the reads a second to end, so that their buffers come back."""
        until = time.monotonic() + 1
        for work in filter(None, (begun() for begun in list(self._works))):
            for reading in work.readings:
                reading.end_within(until - time.monotonic())
