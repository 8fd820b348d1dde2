"""Bounded stages: threads joined by channels, held in check by budgets of bytes.

Four pieces and one rule. A `Channel` hands items on; a `Budget` bounds the bytes between two
points of the pipeline; a `Pool` keeps arrays for their next use; a `Flow` owns the threads. The
rule: the first error wins. It wakes everyone who waits, no later error hides it, and `Flow.join`
raises it. Nothing here polls, so nothing here can miss a wake-up, and nothing knows what the items
are.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")


def usable_cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Stopped(Exception):
    """Raised in a thread that waits when the flow has failed elsewhere."""


class Flow:
    """Owns the threads of a pipeline and the first error among them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._conditions: list[threading.Condition] = []
        self.changed = self.condition()
        self.error: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._running = 0

    def condition(self) -> threading.Condition:
        """What some threads of the flow wait for, so that others sleep on; all share one lock."""
        made = threading.Condition(self._lock)
        self._conditions.append(made)
        return made

    @property
    def failed(self) -> bool:
        return self.error is not None

    def fail(self, error: BaseException) -> None:
        """Record the first error and wake every thread that waits."""
        with self.changed:
            if self.error is None:
                self.error = error
            self._wake()

    def _wake(self) -> None:
        """Everyone, with the lock held."""
        for condition in self._conditions:
            condition.notify_all()

    def check(self) -> None:
        """Raise `Stopped` once the flow has failed; for threads deep in a long piece of work."""
        if self.failed:
            raise Stopped

    def wait_for(
        self, ready: Callable[[], bool], condition: threading.Condition | None = None
    ) -> None:
        """Wait, with a condition held (``changed`` if none is given), until ``ready()``; `Stopped`
        once the flow has failed."""
        (condition or self.changed).wait_for(lambda: self.failed or ready())
        self.check()

    def spawn(self, name: str, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread of its own. What it raises fails the flow."""

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

    @property
    def alive(self) -> bool:
        return self._running > 0

    def join(self, tick: Callable[[], None] = lambda: None, every: float = 0.1) -> None:
        """Wait for every thread, calling ``tick`` meanwhile; raise the first error."""
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

        After an error the threads get two seconds to let go of what they hold. One that is
        deep in a call that never returns (a dead network mount) is left behind: it is a daemon.
        """
        with self.changed:
            ended = self.changed.wait_for(lambda: not self.alive, 2.0 if self.failed else None)
        if ended:  # each is past its last line; a fork or a test should not meet it there
            for thread in self._threads:
                thread.join()


class Channel(Generic[Item]):
    """Hands items from producers to consumers, by place where `put` names one, else as they come.

    It has no bound of its own: a `Budget` that spans the channel bounds it in bytes. ``producers``
    is how many times `close` must be called before consumers are told that no more will come.
    """

    def __init__(self, flow: Flow, producers: int = 1) -> None:
        self._flow, self._producers = flow, producers
        self._items: dict[int, Item] = {}
        self._put = self._got = 0
        self.filled = flow.condition()
        """Something came, or no more will."""

    def __len__(self) -> int:
        """Items that `get` would return at once, one after another: none that came out of turn."""
        first = self._got
        return next(n for n in itertools.count() if first + n not in self._items)

    def waiting(self) -> list[Item]:
        """What `get` would return at once, first to last; to be called with `filled` held."""
        return [self._items[self._got + n] for n in range(len(self))]

    @property
    def ready(self) -> bool:
        """Whether `get` would return at once."""
        return self._got in self._items or self._producers <= 0

    def put(self, item: Item, place: int | None = None) -> None:
        """Hand an item on; the places that are named are 0, 1, 2, ... in any order."""
        with self.filled:
            self._flow.check()
            self._items[self._put if place is None else place] = item
            self._put += 1
            self.filled.notify_all()

    def put_all(self, items: Iterable[Item]) -> None:
        """Hand many items on at once, in their order, waking no more threads than there are."""
        with self.filled:
            self._flow.check()
            before = self._put
            for item in items:
                self._items[self._put] = item
                self._put += 1
            self.filled.notify(self._put - before)

    def get(self) -> Item | None:
        """The next item, or None when the channel is closed and empty."""
        with self.filled:
            self._flow.wait_for(lambda: self.ready, self.filled)
            if self._got not in self._items:
                assert not self._items, f"item {self._got} was never put"
                return None
            item = self._items.pop(self._got)
            self._got += 1
            return item

    def close(self) -> None:
        with self.filled:
            self._producers -= 1
            self.filled.notify_all()

    def clear(self) -> None:
        """Let go of what nobody will get any more."""
        self._items.clear()


class Budget:
    """So many bytes may be held between `acquire` and `release`."""

    def __init__(self, flow: Flow, limit: int) -> None:
        self._flow, self.limit, self.used, self.peak = flow, limit, 0, 0

    def acquire(self, count: int) -> None:
        """Wait for room. A request above the limit is let through when nothing else is held."""
        with self._flow.changed:
            self._flow.wait_for(lambda: self.used + count <= self.limit or self.used == 0)
            self.used += count
            self.peak = max(self.peak, self.used)

    def release(self, count: int) -> None:
        with self._flow.changed:
            self.used -= count
            self._flow.changed.notify_all()


class Pool:
    """Arrays that are used again, all cut from buffers of one size.

    New memory costs a page fault for every 4 KiB of it, which for short-lived arrays of many MiB is
    more than what is done with them. One size for all makes any buffer fit any need, so there are
    never more of them than were in use at once.
    """

    def __init__(self, buffer_bytes: int) -> None:
        self._bytes = buffer_bytes
        self._free: list[NDArray[np.uint8]] = []

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """An array of whatever was in it before."""
        count = math.prod(shape) * dtype.itemsize
        assert count <= self._bytes, f"{shape} of {dtype} is more than {self._bytes} bytes"
        try:
            buffer = self._free.pop()  # of a list this is atomic
        except IndexError:
            buffer = np.empty(self._bytes, np.uint8)
        return buffer[:count].view(dtype).reshape(shape)

    def give(self, array: NDArray[Any]) -> None:
        """Hand back what `take` returned; nobody may hold it any longer."""
        assert array.base is not None
        self._free.append(array.base)

    def clear(self) -> None:
        """Let go of what nobody has taken."""
        self._free.clear()
