"""Threads of a pipeline, joined by channels and bounded by budgets of bytes.

There are four pieces. A `Channel` hands items on. A `Budget` bounds the bytes between two points of
the pipeline. A `Pool` keeps arrays for their next use. A `Flow` owns the threads. And there is one
rule: the first error wins. It wakes every thread that waits, no later error hides it, and
`Flow.join` raises it. No thread polls, so none can miss a wake-up.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")
Result = TypeVar("Result")


def usable_cores() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Stopped(Exception):
    """Raised in a waiting thread when another thread has failed."""


class Flow:
    """Owns the threads of a pipeline and the first error among them."""

    def __init__(self) -> None:
        # One for all, so that `fail` wakes every thread, whatever it waits for. Re-entrant, as a
        # thread that holds it may put into a channel or get from one.
        self._lock = threading.RLock()
        self._conditions: list[threading.Condition] = []
        self.changed = self.condition()
        self.error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._running = 0

    def condition(self) -> threading.Condition:
        """A condition for some of the threads to wait for; all conditions share one lock."""
        made = threading.Condition(self._lock)
        self._conditions.append(made)
        return made

    @property
    def failed(self) -> bool:
        """Whether an error was recorded."""
        return self.error is not None

    def fail(self, error: BaseException) -> None:
        """Record the first error and wake every thread that waits."""
        with self.changed:
            if self.error is None:
                self.error = error
            self._wake()

    def _wake(self) -> None:
        """Wake every thread; the lock must be held."""
        for condition in self._conditions:
            condition.notify_all()

    def check(self) -> None:
        """Raise `Stopped` once the flow has failed; for threads in a long piece of work."""
        if self.failed:
            raise Stopped

    def wait_for(
        self, ready: Callable[[], bool], condition: threading.Condition | None = None
    ) -> None:
        """Wait until ``ready()`` is true.

        Args:
            ready: The condition to wait for.
            condition: The lock that the thread holds and waits on, ``changed`` by default.

        Raises:
            Stopped: The flow has failed.
        """
        (condition or self.changed).wait_for(lambda: self.failed or ready())
        self.check()

    def pause(self, seconds: float) -> None:
        """Sleep, unless the flow fails.

        Args:
            seconds: The time to sleep.

        Raises:
            Stopped: The flow has failed, before or meanwhile.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.failed, seconds)
        self.check()

    def spawn(self, name: str, work: Callable[[], None]) -> None:
        """Run a function in a new thread; an error in it fails the flow.

        Args:
            name: The name of the thread.
            work: The function.
        """

        def guarded() -> None:
            try:
                work()
            except Stopped:
                pass
            except BaseException as error:
                self.fail(error)
            finally:
                with self.changed:
                    self._running -= 1
                    self._wake()

        with self.changed:
            self._running += 1
        thread = threading.Thread(target=guarded, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def each(
        self, name: str, items: Iterable[Item], work: Callable[[Item], None], threads: int
    ) -> None:
        """Work on items in several new threads, each of which takes the next item in turn.

        Args:
            name: The name of the threads, to which their number is added.
            items: The items, which are taken as threads become free.
            work: The work on an item.
            threads: The number of threads.
        """
        left, taking = iter(items), threading.Lock()

        def take() -> None:
            while not self.failed:
                with taking:
                    # A list, as any item may be None.
                    taken = list(itertools.islice(left, 1))
                if not taken:
                    return
                work(*taken)

        for number in range(threads):
            self.spawn(f"{name}-{number}", take)

    @property
    def alive(self) -> bool:
        """Whether a thread still runs."""
        return self._running > 0

    def join(self, tick: Callable[[], None] = lambda: None, every: float = 0.1) -> None:
        """Wait for every thread, and raise the first error of any.

        Args:
            tick: A function to call again and again meanwhile. An error in it fails the flow.
            every: The seconds between two calls.
        """
        try:
            while self.alive and not self.failed:
                with self.changed:
                    self.changed.wait(every)
                tick()
        except BaseException as error:  # Ctrl-C arrives here
            self.fail(error)
        self.settle()
        if self.error is not None:
            raise self.error

    def settle(self) -> None:
        """Wait for every thread, and raise nothing.

        After an error the threads get two seconds to release their memory and files. A thread that
        hangs in a call (a dead network mount) is left behind, since it is a daemon.
        """
        with self.changed:
            ended = self.changed.wait_for(lambda: not self.alive, 2.0 if self.failed else None)
        if ended:  # the threads are at their last line; wait, so that no fork or test meets one
            for thread in self._threads:
                thread.join()


class Channel(Generic[Item]):
    """Hands items from producers to consumers, in the order of their places, or as they come.

    It has no bound of its own: a `Budget` around it bounds its bytes. It is closed once each of its
    ``producers`` has called `close`.
    """

    def __init__(self, flow: Flow, producers: int = 1) -> None:
        self._flow, self._producers = flow, producers
        self._items: dict[int, Item] = {}
        self._put = self._got = 0
        self.filled = flow.condition()
        """The condition that is notified when an item comes or a producer closes."""

    def __len__(self) -> int:
        """Number of items that `get` would return at once: those up to the first gap."""
        first = self._got
        return next(n for n in itertools.count() if first + n not in self._items)

    def waiting(self) -> list[Item]:
        """The items that `get` would return at once, first to last; `filled` must be held."""
        return [self._items[self._got + n] for n in range(len(self))]

    @property
    def ready(self) -> bool:
        """Whether `get` would return at once."""
        return self._got in self._items or self._producers <= 0

    def put(self, item: Item, place: int | None = None) -> None:
        """Hand an item on.

        Args:
            item: The item.
            place: Its place: 0, 1, 2, ... in any order. By default items keep the order of `put`.

        Raises:
            Stopped: The flow has failed.
        """
        with self.filled:
            self._flow.check()
            self._items[self._put if place is None else place] = item
            self._put += 1
            self.filled.notify_all()

    def put_all(self, items: Iterable[Item]) -> None:
        """Hand on many items in their order, and wake no more threads than there are items."""
        with self.filled:
            self._flow.check()
            before = self._put
            for item in items:
                self._items[self._put] = item
                self._put += 1
            self.filled.notify(self._put - before)

    def get(self) -> Item | None:
        """Wait for the next item; None when the channel is closed and empty."""
        with self.filled:
            self._flow.wait_for(lambda: self.ready, self.filled)
            if self._got not in self._items:
                assert not self._items, f"item {self._got} was never put"
                return None
            item = self._items.pop(self._got)
            self._got += 1
            return item

    def close(self) -> None:
        """Say that one of the producers has no more items."""
        with self.filled:
            self._producers -= 1
            self.filled.notify_all()

    def clear(self) -> None:
        """Drop the items that nobody will get."""
        self._items.clear()


class Budget:
    """A limit on the bytes that are held between `acquire` and `release`."""

    def __init__(self, flow: Flow, limit: int) -> None:
        self._flow, self.limit, self.used, self.peak = flow, limit, 0, 0

    def acquire(self, count: int) -> None:
        """Wait for room for ``count`` bytes. If nothing is held, any count passes."""
        with self._flow.changed:
            # Else a thread with more than the limit would wait for ever.
            self._flow.wait_for(lambda: self.used + count <= self.limit or self.used == 0)
            self.used += count
            self.peak = max(self.peak, self.used)

    def release(self, count: int) -> None:
        """Give back ``count`` bytes."""
        with self._flow.changed:
            self.used -= count
            self._flow.changed.notify_all()


class Pool:
    """Arrays that are reused, all cut from buffers of one size.

    New memory costs a page fault for every 4 KiB. For short-lived arrays of many MiB that takes
    longer than the work on them. All buffers have one size, so any buffer fits any array, and there
    are never more buffers than were in use at once.

    ``make`` makes buffers of scarce memory, such as pinned memory, and at most ``most`` of them.
    Once these are taken, an array gets ordinary memory of its own size.
    """

    def __init__(
        self,
        buffer_bytes: int,
        make: Callable[[int], NDArray[np.uint8]] | None = None,
        most: int = 0,
    ) -> None:
        self._bytes, self._make, self._most = buffer_bytes, make, most
        self._made = itertools.count()
        self._free: list[NDArray[np.uint8]] = []

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array whose values are undefined: those of the buffer's last use.

        Args:
            shape: Its shape. The array may not be larger than a buffer.
            dtype: Its dtype.

        Returns:
            The array, C-contiguous.
        """
        count = math.prod(shape) * dtype.itemsize
        assert count <= self._bytes, f"{shape} of {dtype} is more than {self._bytes} bytes"
        try:
            buffer = self._free.pop()  # of a list this is atomic
        except IndexError:
            buffer = self._new(count)
        return buffer[:count].view(dtype).reshape(shape)

    def give(self, array: NDArray[Any]) -> None:
        """Hand back an array that `take` returned. Nobody may use it any longer."""
        assert array.base is not None
        if array.base.nbytes == self._bytes:
            self._free.append(array.base)

    def _new(self, count: int) -> NDArray[np.uint8]:
        if self._make is None:
            return np.empty(self._bytes, np.uint8)
        if next(self._made) < self._most:  # this is atomic, too
            return self._make(self._bytes)
        return np.empty(count, np.uint8)

    def clear(self) -> None:
        """Free the buffers that are not in use."""
        self._free.clear()


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int, ahead: int = 2
) -> Iterator[Result]:
    """Results in the order of the items.

    Args:
        work: Makes a result, in one of several threads.
        items: What results are made of.
        workers: The number of threads.
        ahead: The results for each thread that are made or held ahead of the next one.

    Yields:
        The results.
    """
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="in order") as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                if len(pending) > ahead * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BaseException:
            # Also when the caller takes no more: the pool would do all that is pending before it
            # ends.
            pool.shutdown(wait=True, cancel_futures=True)
            raise
