"""One run over an order: threads that plan, read and transform batches ahead."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ..base import Budget, Channel, Flow, StageError, Stopped, UsageError
from .engines.engine import TICKET, Begins, Check, Engine, Reading, Task, Traffic, Wanted
from .fields import Field, Stack
from .order import Order, Position
from .permutation import Items
from .ring import Ring, aligned

Transform = Callable[["Batch"], Mapping[str, NDArray[Any]] | None]


AT_ONCE = 1024
"""Items whose place in the order is computed at once."""


class Batch(dict[str, NDArray[Any]]):
    """One batch: the name of each array to its rows, (row, [time,] ...).

    The memory is the loader's and comes back to it when the last view is gone, so hold a batch as
    long as it is needed, and copy what must be kept for good.
    """

    epoch: int
    number: int
    """Its place in the epoch, from 0."""
    indices: Items
    """The order's item of each row: sample * patches_per_sample + patch."""
    samples: Items
    """The sample of each row, along axis 0 of the arrays."""

    def __init__(
        self,
        arrays: Mapping[str, NDArray[Any]],
        epoch: int,
        number: int,
        indices: Items,
        samples: Items,
        *,
        seed: int,
    ) -> None:
        super().__init__(arrays)
        self.epoch, self.number, self.indices, self.samples = epoch, number, indices, samples
        self.seed = seed

    def rng(self) -> np.random.Generator:
        """Random numbers for this batch, the same whichever thread asks and whenever."""
        words = [self.seed, self.epoch, *self.indices.tolist()]
        return np.random.default_rng(words)


class _Work:
    """A batch under way."""

    def __init__(
        self, batch: Batch, out: Mapping[str, NDArray[Any]], place: int, tasks_left: int
    ) -> None:
        self.batch: Batch | None = batch
        self.out = out
        """Where each stored array goes."""
        self.place, self.tasks_left = place, tasks_left
        self.readings: Sequence[Reading] = ()
        """Of an engine that reads alone: what is still to be waited for."""

    @property
    def ready(self) -> bool:
        return all(reading.done() for reading in self.readings)

    def wait(self, check: Check) -> Traffic:
        """Until all was read."""
        readings, self.readings = self.readings, ()
        traffic = Traffic()
        for reading in readings:
            traffic = traffic.plus(reading.wait(check))
        return traffic

    def hand_over(self) -> Batch:
        """The batch, which from now on nobody else holds, not even a thread that is slow to end."""
        batch, self.batch, self.out = self.batch, None, {}
        assert batch is not None
        return batch


class _Ticket(NamedTuple):
    """Some tasks of a batch, for one thread."""

    work: _Work
    tasks: Sequence[Task]
    fetched: Sequence[Any] | None = None
    """What `Task.fetch` brought, where threads of their own do that."""


class EpochRun:
    """The threads of one iteration."""

    def __init__(
        self,
        engine: Engine,
        ring: Ring,
        order: Order,
        start: Position,
        *,
        first_sample: int,
        arrays: Mapping[str, Field | Stack],
        stacks: Mapping[str, Stack],
        transform: Transform | None,
        queue: int,
    ) -> None:
        self.engine, self.ring = engine, ring
        self.arrays, self.stacks = arrays, stacks
        self.transform, self.queue = transform, queue
        self.epoch, self.seed = start.epoch, order.seed
        self.traffic = Traffic()

        self.flow = flow = Flow()
        self.plan = engine.plan(_wanted(order, start, first_sample, flow.check))
        self.ended = False
        self.opened = self.taken = 0
        """Batches that were begun, and those of them that the user has."""
        self.asked = False
        """Someone waits in `take`."""
        self.starved = False
        """The planner waits for a buffer that the user holds."""
        self.planned: Channel[_Ticket] = Channel(flow)
        self.tickets = self.planned
        alone = engine.reads_alone
        self.done: Channel[_Work] = Channel(flow, producers=1 if alone else engine.drivers)
        self.out = self.done
        self.reading: deque[weakref.ref[_Work]] = deque()
        """Batches that an engine reads alone, as long as anybody waits for them."""
        if engine.fetchers:
            self.budget = Budget(flow, engine.fetched_bytes)
            self.tickets = Channel(flow, producers=engine.fetchers)
        if self.transform is not None:
            self.out = Channel(flow)

        self._spawn("plan", self._plan_one, self.done if alone else self.planned)
        for i in range(engine.fetchers):
            self._spawn(f"fetch-{i}", self._fetch_one, self.tickets)
        for i in range(0 if alone else engine.drivers):
            self._spawn(f"work-{i}", self._work_one, self.done)
        if self.transform is not None:
            self._spawn("transform", self._transform_one, self.out)

    def _spawn(self, name: str, step: Callable[[], bool], into: Channel[Any]) -> None:
        """A thread that takes steps until there are no more.

        What a step holds goes with its frame, so that no thread that waits keeps a batch alive.
        """

        def loop() -> None:
            while step():
                pass
            into.close()

        self.flow.spawn(f"penstock-loader-{name}", loop)

    # --- the consumer's side ---------------------------------------------------------------------

    @property
    def ready(self) -> int:
        """Batches that `take` would return at once."""
        with self.flow.changed:
            return sum(1 for _ in takewhile(lambda work: work.ready, self.out.waiting()))

    def fill(self, count: int) -> bool:
        """Wait until so many batches are ready; False where the iteration ended before."""
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
        """The next batch, None after the last; raises the first error of any thread."""
        flow = self.flow
        try:
            with flow.changed:
                self.asked = True
                if self.opened == self.taken:  # else nobody waits for this
                    if self.starved:
                        self.ring.wake()
                    flow.changed.notify_all()
                work = self.out.get()
                self.asked = False
                self.taken += work is not None
                flow.changed.notify_all()
            if work is None:
                return None
            self._finish(work)
            return work.hand_over()
        except Stopped:
            self.stop()
            error = flow.error
            if error is None or isinstance(error, Stopped):
                raise UsageError(
                    "this iteration has ended: its loader was closed or iterated anew"
                ) from None
            raise error from error.__cause__
        except BaseException:  # Ctrl-C
            self.stop()
            raise

    def stop(self) -> None:
        """End the threads and let go of what was under way."""
        first, self.ended = not self.ended, True
        self.flow.fail(Stopped())
        self.ring.wake()
        if first:  # by now the engine may work for another iteration
            self._let_end()
            self.engine.cancel()
        self.flow.settle()  # the first error is raised by `take`
        for channel in (self.planned, self.tickets, self.done, self.out):
            channel.clear()
        if first:
            self.engine.forget()

    def _finish(self, work: _Work) -> None:
        """Wait for what an engine reads alone."""
        if not work.readings:
            return
        try:
            traffic = work.wait(self.flow.check)
        except BaseException as error:
            failed = self.flow.failed
            self.flow.fail(error)
            if failed:  # and so the reading was cancelled
                raise Stopped from error
            raise
        with self.flow.changed:
            self.traffic = self.traffic.plus(traffic)

    def _let_end(self) -> None:
        """What an engine reads alone has a second to end, so that its buffers come back."""
        until = time.monotonic() + 1
        for work in filter(None, (begun() for begun in list(self.reading))):
            for reading in work.readings:
                reading.end_within(until - time.monotonic())

    # --- the steps of the threads ----------------------------------------------------------------

    def _plan_one(self) -> bool:
        planned = next(self.plan, None)
        if planned is None:
            return False
        wanted, tasks = planned
        with self.flow.changed:
            self.flow.wait_for(self._may_open)
        root = self._buffer()
        arrays = _cut(root, self.arrays, len(wanted.items))
        batch = Batch(
            arrays, self.epoch, wanted.number, wanted.items, wanted.samples, seed=self.seed
        )
        out = dict(arrays)
        for name, stack in self.stacks.items():
            out |= stack.parts(out.pop(name))
        work = _Work(batch, out, self.opened, len(tasks))
        with self.flow.changed:
            self.opened += 1
        if self.engine.reads_alone:
            self._begin(work, cast("Sequence[Begins]", tasks))
        else:
            self.planned.put_all(_tickets(work, tasks, self.engine.fetched_nbytes))
        return True

    def _begin(self, work: _Work, tasks: Sequence[Begins]) -> None:
        """Start reading a batch, once fewer than the engine's drivers are being read."""
        most = max(1, self.engine.drivers // len(tasks))
        while len(self.reading) >= most:
            before = self.reading.popleft()()
            for reading in before.readings if before is not None else ():
                reading.wait(self.flow.check)
        work.readings = [task.begin(work.out) for task in tasks]
        self.reading.append(weakref.ref(work))
        self.done.put(work, work.place)

    def _may_open(self) -> bool:
        ahead = self.opened - self.taken
        return ahead < self.queue or (self.asked and ahead == 0)

    def _buffer(self) -> NDArray[np.uint8]:
        """A buffer of the ring.

        What the user holds on the way from one batch to the next is about to come back, and a new
        buffer instead would cost its page faults. Only when the user waits for a batch and none is
        under way is what they hold really held.
        """
        while (root := self.ring.lend()) is None:
            with self.flow.changed:
                self.flow.check()
                self.starved = True
                stuck = self.asked and self.opened == self.taken
            if not stuck:
                self.ring.wait()
            elif (root := self.ring.lend()) is None:  # not even since they began to wait
                self.ring.grow()
            else:
                break
        self.starved = False
        return root

    def _fetch_one(self) -> bool:
        ticket = self.planned.get()
        if ticket is None:
            return False
        self.budget.acquire(self._held(ticket))
        fetched = [task.fetch() for task in ticket.tasks]
        self.tickets.put(ticket._replace(fetched=fetched))
        return True

    def _held(self, ticket: _Ticket) -> int:
        """Bytes that a ticket may hold from when it is fetched until it has run."""
        return len(ticket.tasks) * self.engine.fetched_nbytes

    def _work_one(self) -> bool:
        ticket = self.tickets.get()
        if ticket is None:
            return False
        work, traffic = ticket.work, Traffic()
        for i, task in enumerate(ticket.tasks):
            fetched = ticket.fetched[i] if ticket.fetched is not None else None
            traffic = traffic.plus(task.run(work.out, self.flow.check, fetched))
        if ticket.fetched is not None:
            self.budget.release(self._held(ticket))
        with self.flow.changed:
            self.traffic = self.traffic.plus(traffic)
            work.tasks_left -= len(ticket.tasks)
            if work.tasks_left == 0:
                self.done.put(work, work.place)
        return True

    def _transform_one(self) -> bool:
        work = self.done.get()
        if work is None:
            return False
        self._finish(work)
        work.batch = self._transformed(work.hand_over())
        self.out.put(work)
        return True

    def _transformed(self, batch: Batch) -> Batch:
        assert self.transform is not None
        try:
            result = self.transform(batch)
        except Exception as error:
            samples = ", ".join(map(str, batch.samples[:4].tolist()))
            more = ", ..." if len(batch.samples) > 4 else ""
            where = f"batch {batch.number} of epoch {batch.epoch} (samples {samples}{more})"
            raise StageError("transform", where, error) from error
        if result is None or result is batch:
            return batch
        return Batch(
            result, batch.epoch, batch.number, batch.indices, batch.samples, seed=batch.seed
        )


def _wanted(order: Order, start: Position, first_sample: int, check: Check) -> Iterator[Wanted]:
    """The batches of the rest of an epoch. Ends whoever asks for one when the flow has failed."""
    cut, some = order.patches_per_sample > 1, max(1, AT_ONCE // order.batch_size)
    for first in range(start.batch, order.num_batches, some):
        numbers = range(first, min(first + some, order.num_batches))
        for number, items in zip(numbers, order.run_of_items(start.epoch, numbers), strict=True):
            check()
            samples, patches = order.split(items)
            yield Wanted(number, items, samples + first_sample, patches if cut else None)


def _tickets(work: _Work, tasks: Sequence[Task], held: int) -> Iterator[_Ticket]:
    """Tasks in tickets that are large enough to be worth handing out.

    A task that is fetched beforehand counts with the ``held`` bytes of its buffer, or a ticket of
    many small chunks would hold more than the budget.
    """
    first, nbytes = 0, 0
    for i, task in enumerate(tasks):
        nbytes += max(task.nbytes, held)
        if nbytes >= TICKET or i == len(tasks) - 1:
            yield _Ticket(work, tasks[first : i + 1])
            first, nbytes = i + 1, 0


def _cut(
    root: NDArray[np.uint8], wholes: Mapping[str, Field | Stack], rows: int
) -> dict[str, NDArray[Any]]:
    """The arrays of a batch, cut from one buffer."""
    arrays, start = {}, 0
    for name, whole in wholes.items():
        stop = start + whole.item_nbytes * rows
        arrays[name] = root[start:stop].view(whole.dtype).reshape(whole.out_shape(rows))
        start = aligned(stop)
    return arrays
