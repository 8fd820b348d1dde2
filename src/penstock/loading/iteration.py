"""One run over an order: threads that plan, read and transform batches ahead, and the batches that
are under way between them."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..base import Channel, Flow, Stopped, UsageError
from .batch import Batch, BatchLayout, Transform, transformed
from .engines.engine import TICKET, Begins, Check, Engine, Reading, Task, Wanted
from .order import Order, Position, batches_from
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

    def hand_over(self) -> Batch:
        """The batch. From now on nobody else holds it, not even a thread that is slow to end."""
        batch, self.batch, self.out = self.batch, None, {}
        assert batch is not None
        return batch


Ticket = tuple[BatchWork, Sequence[Task]]
"""Some tasks of a batch, for one thread."""


def tickets_of(work: BatchWork, tasks: Sequence[Task]) -> Iterator[Ticket]:
    """Tasks in tickets of at least `TICKET` bytes."""
    first, nbytes = 0, 0
    for i, task in enumerate(tasks):
        nbytes += task.nbytes
        if nbytes >= TICKET or i == len(tasks) - 1:
            yield work, tasks[first : i + 1]
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
            # All conditions of a flow have one lock, which this gives away only while it waits. So
            # the planner never sees a batch that has left the channel and is not yet counted.
            work = done.get()
            self._asked = False
            self._taken += work is not None
            self._flow.changed.notify_all()
        return work


class OwnReads:
    """Batches that an engine reads in threads of its own."""

    def __init__(self, drivers: int) -> None:
        self._drivers = drivers
        # Weak, or a loader that is closed would hold the buffers of batches that nobody took.
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


class EpochRun:
    """The threads of one iteration, and the channels between them."""

    def __init__(
        self,
        engine: Engine,
        ring: Ring,
        order: Order,
        start: Position,
        *,
        first_sample: int,
        layout: BatchLayout,
        transform: Transform | None,
        queue: int,
    ) -> None:
        self.engine, self.ring = engine, ring
        self.layout, self.transform = layout, transform
        self.epoch, self.order = start.epoch, order

        self.flow = flow = Flow()
        self.ended = False
        self.ahead = ReadAhead(flow, ring, queue)
        self.own_reads = OwnReads(engine.drivers)
        self.planned: Channel[Ticket] = Channel(flow)
        alone = engine.reads_alone
        self.done: Channel[BatchWork] = Channel(flow, producers=1 if alone else engine.drivers)
        self.out = self.done if transform is None else Channel[BatchWork](flow)

        batches = partial(next, _wanted(order, start, first_sample, flow.check), None)
        self._spawn("plan", batches, self._plan, self.done if alone else self.planned)
        for i in range(0 if alone else engine.drivers):
            self._spawn(f"work-{i}", self.planned.get, self._work, self.done)
        if self.transform is not None:
            self._spawn("transform", self.done.get, self._transform, self.out)

    def _spawn(
        self, name: str, get: Callable[[], Any], step: Callable[[Any], None], into: Channel[Any]
    ) -> None:
        """Start a thread that takes a step with each item until there are no more."""

        def loop() -> None:
            while (item := get()) is not None:
                step(item)
                del item  # a thread that waits keeps no batch alive
            into.close()

        self.flow.spawn(f"penstock-loader-{name}", loop)

    # --- the consumer's side ---------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """Batches that `take` would return at once."""
        with self.flow.changed:
            return sum(1 for _ in takewhile(lambda work: work.ready, self.out.waiting()))

    def fill(self, count: int) -> bool:
        """Wait until so many batches are ready. False where the iteration ended before."""
        with self.flow.changed:
            self.flow.wait_for(
                lambda: len(self.out) >= count or not self.flow.alive, self.out.filled
            )
            opened = self.out.waiting()[:count]
        for work in opened:
            for reading in work.readings:
                reading.wait(self.flow.check)
        return len(opened) == count

    def take(self) -> Batch | None:
        """The next batch, None after the last. Raises the first error of any thread."""
        try:
            work = self.ahead.take(self.out)
            if work is None:
                return None
            self._finish(work)
            return work.hand_over()
        except Stopped:
            self.stop()
            error = self.flow.error
            if error is None or isinstance(error, Stopped):
                raise UsageError(
                    "this iteration has ended: its loader was closed or iterated anew"
                ) from None
            raise error from error.__cause__
        except BaseException:  # Ctrl-C
            self.stop()
            raise

    def stop(self) -> None:
        """End the threads and drop the batches under way."""
        first, self.ended = not self.ended, True
        self.flow.fail(Stopped())
        self.ring.wake()
        if first:  # at a second call the engine may work for another iteration
            self.own_reads.let_end()
            self.engine.cancel()
        self.flow.settle()  # the first error is raised by `take`
        for channel in (self.planned, self.done, self.out):
            channel.clear()

    def _finish(self, work: BatchWork) -> None:
        """Wait for the reads that the engine does in threads of its own."""
        readings, work.readings = work.readings, ()
        try:
            for reading in readings:
                reading.wait(self.flow.check)
        except BaseException as error:
            failed = self.flow.failed
            self.flow.fail(error)
            if failed:  # so the read was cancelled
                raise Stopped from error
            raise

    # --- the steps of the threads ----------------------------------------------------------------

    def _plan(self, wanted: Wanted) -> None:
        tasks = self.engine.tasks(wanted.samples, wanted.patches)
        root = self.ahead.buffer()
        arrays = self.layout.cut(root, len(wanted.items))
        mask = self.order.mask(wanted.number)
        batch = Batch(arrays, self.epoch, wanted.number, wanted.items, wanted.samples, mask)
        out = self.layout.destinations(arrays)
        work = BatchWork(batch, out, self.ahead.begin(), len(tasks))
        if self.engine.reads_alone:
            self.own_reads.begin(work, cast("Sequence[Begins]", tasks), self.flow.check)
            self.done.put(work, work.place)
        else:
            self.planned.put_all(tickets_of(work, tasks))

    def _work(self, ticket: Ticket) -> None:
        work, tasks = ticket
        for task in tasks:
            task.run(work.out, self.flow.check)
        with self.flow.changed:
            work.tasks_left -= len(tasks)
            if work.tasks_left == 0:
                self.done.put(work, work.place)

    def _transform(self, work: BatchWork) -> None:
        self._finish(work)
        assert self.transform is not None
        work.batch = transformed(work.hand_over(), self.transform)
        self.out.put(work)


def _wanted(order: Order, start: Position, first_sample: int, check: Check) -> Iterator[Wanted]:
    """The batches of the rest of an epoch. ``check`` raises here once the flow has failed."""
    cut = order.patches_per_sample > 1
    for number, items in batches_from(order, start):
        check()
        samples, patches = order.split(items)
        yield Wanted(number, items, samples + first_sample, patches if cut else None)
