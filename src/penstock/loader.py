"""Batches of a chunked array, read ahead by threads, into memory that is used again.

    order ──▶ plan ──tickets──▶ [fetch] ──▶ decode + scatter ──▶ done ──▶ [transform] ──▶ next()
                │                                                                          │
                └──────◀── Ring: a buffer comes back when the user holds no view of it ◀───┘

One thread plans: it takes the next batch of the order, waits until there may be one more ahead and
for a buffer, and hands out the batch's tasks (chunks) as tickets. Tickets are taken in that order,
so all workers are on the oldest unfinished batch, and go on to the next when no ticket of it is
left. A batch is handed on by number when its last task has ended. So the order and the bytes of
batches depend on nothing but the seed: neither on the number of workers nor on who was quick.
Where decoded chunks are kept, whoever has to let one go looks at batches further ahead first.

The first error of any thread is what `next` raises. Threads live for one iteration and are gone
when it ends: at its end, at a ``break``, at an error, or at `Loader.close`.
"""

from __future__ import annotations

import contextlib
import operator
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, takewhile
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from .batches import Field, PatchGrid, Stack, need_of, valid_samples
from .config import LoaderConfig, build, speaks_python
from .errors import Refused, StageError, UsageError, require
from .flow import Budget, Channel, Flow, Stopped, usable_cores
from .loaders import (
    TICKET,
    Begins,
    Check,
    Engine,
    Normaliser,
    Reading,
    Selection,
    Task,
    Traffic,
    Wanted,
    locate,
    open_engine,
    read_statistics,
)
from .order import Items, Order, Position, Price, price
from .units import format_bytes

if TYPE_CHECKING:
    import torch

Transform = Callable[["Batch"], Mapping[str, NDArray[Any]] | None]

_ALIGN = 64
_AT_ONCE = 1024
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


class Loader:
    """An iterable of `Batch`; each iteration is an epoch.

        with Loader("data/", batch_size=16, shuffle="block", workers=8) as loader:
            for epoch in range(2):
                for batch in loader:
                    step(batch["inputs"], batch["targets"])

    ``data`` is a packed data set, one Zarr array, or a mapping of names to paths or URLs. What an
    item is: ``offsets`` are the samples that it wants relative to its own ((-1, 0) is the one
    before and itself), ``channels`` those of the channel axis, ``patch`` the boxes that a sample is
    cut into; a patch of as many axes as the array has makes the whole array, a volume, one sample
    (shuffle its patches by ``global``). Each is one value for all arrays or a mapping from their
    names. ``normalise`` is a file of statistics (see `read_statistics`) or a mapping of name to
    (mean, std). ``stack`` makes one array of several, ``{"inputs": ["u", "v", "ps"]}``: along their
    channels where they have such an axis (``channel_axis``, ``channels``, or by that name in a
    packed data set), and an array without is one channel; times at ``offsets`` are channels too
    (see `Stack`, and ``loader.stacks["inputs"].channels``). ``transform`` is called with each
    batch, one after another in order; it changes the batch or returns a mapping in its place.
    ``knobs`` are the fields of `LoaderConfig`.

    An iteration begins where `load_state_dict` or `set_epoch` said, else with the next epoch; an
    epoch left by ``break`` or by an error counts as done, unless the `state_dict` of that moment is
    loaded. A new iteration ends the one before.

    Raises `UsageError` for what cannot be read so, `Refused` where ``max_memory`` is too little;
    while iterating, `StageError` with the chunk's path.
    """

    @speaks_python(LoaderConfig)
    def __init__(
        self,
        data: Any,
        *,
        offsets: Any = None,
        channels: Any = None,
        patch: Any = None,
        channel_axis: Any = None,
        normalise: Any = None,
        stack: Mapping[str, Sequence[str]] | None = None,
        transform: Transform | None = None,
        **knobs: Any,
    ) -> None:
        self.config = config = build(LoaderConfig, knobs)
        if transform is not None and not callable(transform):
            raise UsageError(f"transform {transform!r} cannot be called")
        places = locate(data)
        names = list(places)
        selection = Selection(
            offsets=_numbers(names, "offsets", offsets),
            channels=_numbers(names, "channels", channels),
            patch=_grids(names, patch),
            channel_axis=_for_each(names, "channel_axis", channel_axis, operator.index),
            normalise=_normalisers(normalise, names),
        )
        self._open = partial(
            open_engine,
            places=places,
            selection=selection,
            workers=config.workers or usable_cores(),
            fetch=config.fetch,
            cache_bytes=config.cache,
            missing=config.missing,
        )
        self.engine: Engine = self._open(config.engine)
        """What reads; printed, it says which engine that is and why."""
        self.fields = self.engine.fields
        deep = {*selection.channel_axis, *selection.channels}
        deep |= {name for name, place in places.items() if "channels" in place.axes}
        self.stacks = _stacks(stack, self.fields, frozenset(self.fields) - deep)
        """The arrays of a batch that hold several of ``fields``."""
        self.transform = transform
        samples = valid_samples(self.fields.values())
        patches = {name: field.patches_per_sample for name, field in self.fields.items()}
        if len(set(patches.values())) > 1:
            raise UsageError(f"patch cuts the arrays into different numbers of patches: {patches}")
        self.first_sample = samples.start
        """Sample along axis 0 of the arrays that the order counts as 0."""
        self.order = Order(
            num_samples=len(samples),
            batch_size=config.batch_size,
            seed=config.seed,
            shuffle=config.shuffle,
            window=config.window,
            chunk=max(field.chunks[0] for field in self.fields.values()),
            patches_per_sample=next(iter(patches.values())),
            rank=config.rank,
            world_size=config.world_size,
            drop_last=config.drop_last,
        )
        nbytes = sum(
            _aligned(whole.item_nbytes * config.batch_size) for whole in self.arrays.values()
        )
        # Torch's allocator of pinned memory gives powers of two.
        self.batch_bytes = 1 << (nbytes - 1).bit_length() if config.pin else nbytes
        """Bytes of one buffer of the ring."""
        self._ring = Ring(self.batch_bytes, self._buffers(), self._limit(), config.pin)
        self._position, self._begun = Position(0, 0), False
        self._run: _Run | None = None
        self._process = os.getpid()

    @property
    def arrays(self) -> dict[str, Field | Stack]:
        """What a batch holds, by name."""
        stacked = {field.name for stack in self.stacks.values() for field in stack.fields}
        alone = {name: field for name, field in self.fields.items() if name not in stacked}
        return {**self.stacks, **alone}

    def _buffers(self) -> int:
        """Those that are ahead, and the one in use."""
        return max(1, self.config.queue) + 1

    def _limit(self) -> int | None:
        """The most buffers that may exist, None without a limit; refuses what cannot work."""
        limit = self.config.max_memory
        if limit is None:
            return None
        needed = self._buffers()
        if limit < self.scratch_bytes + needed * self.batch_bytes:
            self._save_memory()
        scratch = self.scratch_bytes
        room = (limit - scratch) // self.batch_bytes
        if room < needed:
            remedy = f"queue {room - 1} would fit" if room >= 2 else "lower batch_size"
            raise Refused(
                f"max_memory {format_bytes(limit)} is too little for {needed} batches of "
                f"{format_bytes(self.batch_bytes)} (queue {self.config.queue} and one in use) and "
                f"{format_bytes(scratch)} of scratch and cache; {remedy}"
            )
        return room

    def _save_memory(self) -> None:
        """With the engine that needs less, where any will do."""
        self.engine.save_memory()
        if self.config.engine != "auto" or self.engine.name == "native":
            return
        first, needed = self.engine, self.scratch_bytes
        with contextlib.suppress(UsageError):  # then there is no other
            self.engine = self._open("native")
            self.engine.save_memory()
            self.engine.reason = "it fits max_memory"
            if self.scratch_bytes >= needed:
                self.engine = first

    @property
    def scratch_bytes(self) -> int:
        """The most memory that is taken besides the batches."""
        rows, ahead = self.config.batch_size, self._buffers() - 1
        return self.engine.scratch_bytes + self.engine.bytes_in_flight(rows, ahead)

    def price(self, epoch: int = 0) -> Price:
        """What the order costs in reads and buys in mixing; printed, it is a sentence."""
        return price(
            self.order,
            need_of(self.fields.values(), self.order, self.first_sample),
            epoch=epoch,
            cache_bytes=self.config.cache,
            foreseen=self.engine.foreseen,
        )

    # --- iteration -------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.order.num_batches

    def __iter__(self) -> Batches:
        self._check_process()
        self._stop()
        if self._begun:
            self._finished()
        self._run = None  # an error in it may hold a batch
        self._ring.begin()
        self._run = _Run(
            self.engine,
            self._ring,
            self.order,
            self._position,
            first_sample=self.first_sample,
            arrays=self.arrays,
            stacks=self.stacks,
            transform=self.transform,
            queue=self.config.queue,
        )
        return Batches(self, self._run)

    @property
    def ready(self) -> int:
        """Batches that wait to be taken."""
        return self._run.ready if self._run is not None else 0

    @property
    def traffic(self) -> Traffic:
        """Bytes read and decoded in the present iteration, or in the last one."""
        return self._run.traffic if self._run is not None else Traffic()

    def close(self) -> None:
        """End the iteration and its threads. May be called twice, and iterated again after."""
        self._stop()
        self._ring.clear()
        self.engine.clear()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stop(self) -> None:
        if self._run is not None and os.getpid() == self._process:
            self._run.stop()

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                f"this loader was made in process {self._process} and its threads do not live on "
                f"in the fork {os.getpid()}: make it in the process that uses it, with no worker "
                "processes (num_workers=0)"
            )

    def __reduce__(self) -> Any:
        raise UsageError(
            "a loader cannot be sent to another process; it has threads of its own: use it with "
            "num_workers=0 and set its workers instead"
        )

    # --- state -----------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Begin the next iteration with this epoch; a place inside it, once loaded, stands."""
        if self._begun or epoch != self._position.epoch:
            self._stop()
            self._begin_at(replace(self.order, skip=0), Position(epoch, 0))

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands after the batches that were taken; a few numbers."""
        return self.order.state_dict(self._position.epoch, self._position.batch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, with as many workers and ranks and in such batches as this loader
        has: at the first item that no batch before it had."""
        order, position = self.order.resume(state)
        self._stop()
        self._begin_at(order, position)

    def _begin_at(self, order: Order, position: Position) -> None:
        self.order, self._position, self._begun = order, position, False

    def _took(self, number: int) -> None:
        self._position, self._begun = Position(self._position.epoch, number + 1), True

    def _finished(self) -> None:
        self._begin_at(replace(self.order, skip=0), Position(self._position.epoch + 1, 0))

    # --- torch -----------------------------------------------------------------------------------

    def as_torch(self) -> torch.utils.data.IterableDataset[dict[str, torch.Tensor]]:
        """This loader as a dataset of dicts of tensors, which share the batch's memory.

        Give it to Lightning's ``fit`` as it is: then a checkpoint holds its state, and a run that
        is resumed goes on with the next batch, or with the next epoch. Elsewhere also for
        ``torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=0)``, whose place is in
        `state_dict`. With ``pin=True`` the tensors are pinned already.
        """
        require("torch", "loaders")
        return _torch_dataset(self)


class Batches(Iterator[Batch]):
    """One iteration of a loader. Its threads end with it."""

    def __init__(self, loader: Loader, run: _Run) -> None:
        self._loader, self._run, self._ended = loader, run, False
        # Not __del__: this is also called before the interpreter ends, while threads still run.
        self._end = weakref.finalize(self, _stop_in, loader._process, run)

    def __next__(self) -> Batch:
        if self._ended:  # as of any iterator, however often one asks
            raise StopIteration
        self._loader._check_process()
        batch = self._run.take()
        if batch is None:
            self._ended = True
            self.close()
            if self._run is self._loader._run:
                self._loader._finished()
            raise StopIteration
        self._loader._took(batch.number)
        return batch

    def close(self) -> None:
        self._end()


def _stop_in(process: int, run: _Run) -> None:
    if os.getpid() == process:  # a fork has none of the threads
        run.stop()


# --- memory -------------------------------------------------------------------------------------


class Ring:
    """Buffers of one size, each lent for one batch and back when no view of it is left.

    What is lent is an array over a `memoryview` of the buffer. Numpy makes every further view keep
    that array alive, and torch keeps the view; so the end of that one array is the end of all.
    It may come in any thread, even inside the garbage collector: the callback puts the buffer into
    a `SimpleQueue`, which allows that, and takes no lock. Only one thread, the planner, lends.

    A pinned buffer whose views are gone may still be read by a copy to the device that was asked
    for and has not begun. So the planner waits for all that was asked of the device by then.
    """

    def __init__(self, nbytes: int, usual: int, limit: int | None, pin: bool) -> None:
        self.nbytes, self._usual, self._limit, self._pin = nbytes, usual, limit, pin
        self.made = 0
        """Buffers that exist: lent or free."""
        self._most = usual
        self._device = -1
        """The CUDA device that whoever iterates is on; threads begin on the first."""
        self._free: list[NDArray[np.uint8]] = []
        self._returned: SimpleQueue[NDArray[np.uint8] | None] = SimpleQueue()

    def begin(self) -> None:
        """Back to the usual number of buffers, as those come back that were made beyond it."""
        self._most = self._usual
        if self._pin:
            self._device = _cuda().current_device()

    def lend(self) -> NDArray[np.uint8] | None:
        """A buffer of whatever was in it before; None where one must come back first."""
        while not self._returned.empty():
            self._take_back(self._returned.get())
        if not self._free and self.made >= self._most:
            return None
        buffer = self._free.pop() if self._free else self._make()
        root = np.frombuffer(buffer.data, np.uint8)
        weakref.finalize(root, self._returned.put, buffer).atexit = False
        return root

    def wait(self) -> None:
        """Until a buffer comes back, or `wake` is called."""
        self._take_back(self._returned.get())

    def wake(self) -> None:
        self._returned.put(None)

    def grow(self) -> None:
        """Allow one buffer more, since the user holds the others."""
        if self._limit is not None and self._most >= self._limit:
            raise Refused(
                f"all {self._most} batches of {format_bytes(self.nbytes)} that max_memory allows "
                "are still held; let go of some (copy what must be kept), or raise max_memory"
            )
        self._most += 1

    def clear(self) -> None:
        """Let free buffers go."""
        self._most = 0
        self.lend()
        self._most = self._usual

    def _take_back(self, buffer: NDArray[np.uint8] | None) -> None:
        if buffer is not None:
            if self._pin:
                _cuda().synchronize(self._device)
            self._free.append(buffer)
        while self._free and self.made > self._most:
            self._free.pop()
            self.made -= 1

    def _make(self) -> NDArray[np.uint8]:
        self.made += 1
        if not self._pin:
            return np.empty(self.nbytes, np.uint8)
        torch = require("torch", "loaders")
        pinned: NDArray[np.uint8] = torch.empty(
            self.nbytes, dtype=torch.uint8, pin_memory=True
        ).numpy()
        return pinned


def _cuda() -> Any:
    cuda = require("torch", "loaders").cuda
    if not cuda.is_available():
        raise UsageError("pin needs a CUDA device, and torch sees none")
    return cuda


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


# --- one iteration ------------------------------------------------------------------------------


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


class _Run:
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
            opened = list(islice(self.out.waiting(), count))
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
    cut, some = order.patches_per_sample > 1, max(1, _AT_ONCE // order.batch_size)
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
        start = _aligned(stop)
    return arrays


# --- what the user may give ---------------------------------------------------------------------


def _for_each(
    names: Sequence[str], what: str, value: Any, parse: Callable[[Any], Any]
) -> dict[str, Any]:
    """A value for each name of a mapping, one value for every array, or nothing."""
    if value is None:
        return {}
    try:
        if isinstance(value, Mapping):
            return {name: parse(one) for name, one in value.items()}
        return dict.fromkeys(names, parse(value))
    except TypeError:
        number = "a whole number" if parse is operator.index else "a list of whole numbers"
        raise UsageError(f"{what} {value!r} is not {number}, nor one for each array") from None


def _numbers(names: Sequence[str], what: str, value: Any) -> dict[str, tuple[int, ...]]:
    return _for_each(names, what, value, lambda numbers: tuple(map(operator.index, numbers)))


def _grids(names: Sequence[str], value: Any) -> dict[str, PatchGrid]:
    """The patches of each array, given as a `PatchGrid` or as the shape of one."""

    def parse(grid: Any) -> PatchGrid:
        return grid if isinstance(grid, PatchGrid) else PatchGrid(tuple(map(operator.index, grid)))

    return _for_each(names, "patch", value, parse)


def _stacks(value: Any, fields: Mapping[str, Field], flat: frozenset[str]) -> dict[str, Stack]:
    """The arrays that become one, given by their names."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or any(isinstance(own, str) for own in value.values()):
        raise UsageError(f"stack {value!r} is not a mapping of a name to a list of arrays")
    parts = [name for own in value.values() for name in own]
    unknown = sorted({str(name) for name in parts if name not in fields})
    if unknown:
        raise UsageError(f"stack names {', '.join(unknown)}; the arrays are {', '.join(fields)}")
    if len(set(parts)) < len(parts):
        raise UsageError(
            f"stack {value!r} has an array twice; DATA may be a mapping that gives it two names"
        )
    if taken := sorted(set(value) & (set(fields) - set(parts))):
        raise UsageError(f"stack {', '.join(taken)}: an array that is not stacked has that name")
    return {
        str(name): Stack(str(name), tuple(fields[part] for part in own), flat & set(own))
        for name, own in value.items()
    }


def _normalisers(value: Any, names: Sequence[str]) -> dict[str, Normaliser]:
    if value is None:
        return {}
    if isinstance(value, str | Path):
        saved = read_statistics(Path(value))
        found = {name: saved[name] for name in names if name in saved}
        if not found:
            raise UsageError(
                f"normalise {value} holds statistics of {', '.join(saved) or 'nothing'}, and the "
                f"arrays are {', '.join(names)}; DATA may be a mapping of such names to paths"
            )
        return found
    try:
        return {n: v if isinstance(v, Normaliser) else Normaliser(*v) for n, v in value.items()}
    except (TypeError, AttributeError):
        raise UsageError(
            f"normalise {value!r} is neither a file of statistics nor a mapping of names to "
            "(mean, std)"
        ) from None


class Resumable(Protocol):
    """What a data set of torch needs of a loader."""

    @property
    def config(self) -> LoaderConfig: ...
    def __iter__(self) -> Iterator[Batch]: ...
    def __len__(self) -> int: ...
    def set_epoch(self, epoch: int) -> None: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


def _torch_dataset(loader: Resumable) -> torch.utils.data.IterableDataset[dict[str, torch.Tensor]]:
    import torch

    class LoaderDataset(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
        @property
        def batch_sampler(self) -> SimpleNamespace:
            """Where Lightning looks for whom to tell the epoch: its ``sampler``. It loads no state
            where a run is resumed at an epoch's end. (With a ``sampler`` of our own, it would take
            us for a DataLoader in other places too.)"""
            return SimpleNamespace(sampler=self, batch_size=loader.config.batch_size)

        def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
            if torch.utils.data.get_worker_info() is not None:
                raise UsageError(
                    "the loader has threads of its own and does not work inside the workers of a "
                    "DataLoader: use num_workers=0 and set the loader's workers"
                )
            return self._batches()

        def _batches(self) -> Iterator[dict[str, torch.Tensor]]:
            # Begins with the first batch: Lightning asks for an iterator, and then says the epoch;
            # and what is raised sooner, it hides behind an error of its own.
            if _trained_from_a_dataloader():
                raise UsageError(
                    "give Lightning loader.as_torch() itself as what it trains on, without a "
                    "DataLoader around it: a DataLoader has no state to save, so a run that is "
                    "resumed would get other data than the one that was stopped"
                )
            yield from map(_tensors, loader)

        def __len__(self) -> int:
            return len(loader)

        def set_epoch(self, epoch: int) -> None:
            loader.set_epoch(epoch)

        def state_dict(self) -> dict[str, Any]:
            return loader.state_dict()

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            loader.load_state_dict(state)

        def __reduce__(self) -> Any:
            return loader.__reduce__()

    def _tensors(batch: Batch) -> dict[str, torch.Tensor]:
        return {name: _tensor(array) for name, array in batch.items()}

    def _tensor(array: NDArray[Any]) -> torch.Tensor:
        if array.dtype.name == "bfloat16":  # numpy has none of its own that torch would know
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    return LoaderDataset()


def _trained_from_a_dataloader() -> bool:
    """Whether this is called by a torch `DataLoader` that Lightning trains from.

    Nobody tells a dataset who iterates it, so the stack must. Where Lightning's modules have other
    names one day, nothing is refused.
    """
    frame, wrapped = sys._getframe(1), False
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        wrapped = wrapped or module == "torch.utils.data.dataloader"
        if module.endswith(".loops.evaluation_loop"):  # it validates, and saves no place there
            return False
        if module.endswith(".loops.fit_loop"):
            return wrapped
        frame = frame.f_back  # type: ignore[assignment]
    return False


# --- as a contender -----------------------------------------------------------------------------


class Ours:
    """This loader as it comes, as a benchmark compares it."""

    engine = "auto"

    def __init__(self, data: Any, order: Order, *, threads: int, **knobs: Any) -> None:
        self.loader = Loader(
            data,
            engine=self.engine,
            workers=threads,
            batch_size=order.batch_size,
            shuffle=order.shuffle,
            window=order.window,
            seed=order.seed,
            rank=order.rank,
            world_size=order.world_size,
            drop_last=order.drop_last,
            **knobs,
        )
        if self.loader.order.plan != order.plan:
            raise UsageError(f"the data give the plan {self.loader.order.plan}, not {order.plan}")

    def batches(self) -> Iterator[Batch]:
        self.loader.set_epoch(0)
        return iter(self.loader)

    def close(self) -> None:
        self.loader.close()


class OursByTensorStore(Ours):
    """With the TensorStore engine, whatever ``auto`` would take."""

    engine = "tensorstore"


class OursNative(Ours):
    """Chunk by chunk in Python's threads."""

    engine = "native"
