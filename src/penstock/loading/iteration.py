"""One run over an order: threads that plan, read and transform batches ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, cast

from ..base import Channel, Flow, Stopped, UsageError
from .batch import Batch, BatchLayout, Transform, transformed
from .engines.engine import Begins, Check, Engine, Wanted
from .order import Order, Position, batches_from
from .ring import Ring
from .under_way import BatchWork, OwnReads, ReadAhead, Ticket, tickets_of


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
        self.out = self.done
        if self.transform is not None:
            self.out = Channel(flow)

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
        if not work.readings:
            return
        try:
            work.wait(self.flow.check)
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
        work = ticket.work
        for task in ticket.tasks:
            task.run(work.out, self.flow.check)
        with self.flow.changed:
            work.tasks_left -= len(ticket.tasks)
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
