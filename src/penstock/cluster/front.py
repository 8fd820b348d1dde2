"""Gives items to the workers of a cluster, one at a time to each, and yields their values.

    items ── one for each worker ──▶ Dask ──▶ workers ──▶ (item, value), as each is done

Dask decides which worker does an item, and gives the item to another one if its worker dies. This
room knows the rest: which workers fit, what is a fault and may pass, and that some of an item may
be saved. It ends a job that is asked to end, or that gets on no further.
"""

from __future__ import annotations

import contextlib
import itertools
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from ..base import Incomplete, PenstockError, UsageError, describe, format_bytes, plural
from .items import FailedItem, guarded
from .workers import Workers

LOOK_S = 1.0
"""Seconds between two looks at the workers."""
TICK_S = 0.5
"""Most seconds between two calls of ``ending``."""
FETCH_S = 20.0
"""Most seconds for fetching a value. Dask computes it again if it was lost with its worker."""
RETRIES = 2
"""Most times that an item which raised a fault is tried again."""
_NUMBERS = itertools.count()
"""Numbers of the keys of items. A key that was used twice would give the value of its first use."""
Item = TypeVar("Item")


def share(
    workers: Workers,
    function: Callable[[Any], Any],
    items: Iterable[Item],
    *,
    work_of: Callable[[Item], Any] = lambda item: item,
    progress: Callable[[], object] = lambda: None,
    saved: Callable[[Item], object] = lambda item: None,
    ending: Callable[[], bool] = lambda: False,
    most_unfit: float = float("inf"),
) -> Iterator[tuple[Item, Any]]:
    """Do all items on workers, and yield each when it is done or given up, in any order.

    Args:
        workers: The workers, as `connect` yields them.
        function: Does an item. A worker must be able to import it. Calling it again, or twice at
            once, must leave the same result. It may raise `UnfitWorker` or `WorkerLeaves`: then
            another worker does the item.
        items: The items, taken one by one as workers need them.
        work_of: From an item, the argument of ``function``; the item itself by default.
        progress: Called once a second. A value unlike the last one is progress. What it raises
            ends the sharing.
        saved: What is saved of an item, such as a number of blocks. If that has changed when
            workers have died on the item, the item is given out again.
        ending: Whether no more items are to be given out. Those that run are waited for. It is not
            called again once it is true.
        most_unfit: Number of workers that may be unfit before the first item is done.

    Yields:
        An item, and what ``function`` returned, or a `FailedItem`.

    Raises:
        UsageError: No worker may take part.
        Incomplete: There was no worker, or no progress, for longer than ``--worker-timeout``.
        PenstockError: The scheduler is gone.
    """
    sharing = _Front(workers, function, iter(items), work_of, saved, most_unfit)
    return sharing.run(progress, ending)


def share_pieces(
    workers: Workers,
    function: Callable[[Any], Any],
    names: Iterable[Item],
    kind: str,
    go_on: str,
    **how: Any,
) -> Iterator[tuple[Item, Any]]:
    """Do all pieces on workers, and yield each when it is done, in any order.

    Args:
        workers: The workers, as `connect` yields them.
        function: Does a piece; see `share`.
        names: The pieces, by their names.
        kind: What a piece is, such as ``scene``.
        go_on: The end of an error: how to do the rest later.
        how: More arguments of `share`.

    Yields:
        The name of a piece, and what ``function`` returned.

    Raises:
        UsageError: A piece cannot be done as asked.
        Incomplete: A piece was given up. The error names it.
    """
    for name, value in share(workers, function, names, **how):
        if not isinstance(value, FailedItem):
            yield name, value
        elif value.exit_code == UsageError.exit_code:
            raise value.error()
        else:
            raise Incomplete(f"{kind} {name} failed ({value.sentence}); {go_on}")


def wait_for_worker(workers: Workers, check: Callable[[], object] = lambda: None) -> None:
    """Wait until a worker may take items.

    Args:
        workers: The workers, as `connect` yields them.
        check: Called twice a second. What it raises ends the wait.

    Raises:
        UsageError: No worker may take part.
        Incomplete: No worker came within ``--worker-timeout``.
    """
    while not workers.look():
        check()
        time.sleep(TICK_S)


class _Given(NamedTuple):
    """An item that Dask has."""

    item: Any
    future: Any
    before: object
    """Whatever was saved of the item when it was given out."""
    faults: int
    """Number of times that it has failed before."""


_END = object()
_LOST = FailedItem("", left_by="")
"""The value of an item that no worker has any more."""


class _Front:
    """The state of one call of `share`."""

    def __init__(
        self,
        workers: Workers,
        function: Callable[[Any], Any],
        items: Iterator[Any],
        work_of: Callable[[Any], Any],
        saved: Callable[[Any], object],
        most_unfit: float,
    ) -> None:
        self.workers, self.client = workers, workers.client
        self.function, self.items = function, items
        self.work_of, self.saved, self.most_unfit = work_of, saved, most_unfit
        self.given: dict[str, _Given] = {}
        """The items that Dask has, by key."""
        self.again: deque[tuple[Any, int]] = deque()
        """Items to give out before others, and the number of faults of each."""
        self.finished: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """Futures that have ended. Dask puts them here in a thread of its own."""
        self.exhausted, self.ends = False, False
        self.looked = float("-inf")
        self.mark: object = None

    def run(
        self, progress: Callable[[], object], ending: Callable[[], bool]
    ) -> Iterator[tuple[Any, Any]]:
        try:
            while True:
                self._look(progress)
                self.ends = self.ends or ending()
                self._refill()
                if not self.given and (self.ends or (self.exhausted and not self.again)):
                    return
                with contextlib.suppress(queue.Empty):
                    yield from self._take(self.finished.get(timeout=TICK_S))
        finally:
            with contextlib.suppress(Exception):  # the scheduler may be gone
                self.client.cancel([each.future for each in self.given.values()])

    def _look(self, progress: Callable[[], object]) -> None:
        """Every `LOOK_S` seconds, note whether there is progress, and which workers are there."""
        if time.monotonic() - self.looked < LOOK_S:
            return
        self.looked = time.monotonic()
        if (mark := progress()) != self.mark:
            self.mark = mark
            self.workers.gone.clear()
        if self.client.status not in ("running", "connecting"):
            raise PenstockError(
                f"the scheduler of {self.workers.where} is gone; run again with --resume"
            )
        self.workers.look()

    def _refill(self) -> None:
        """Give out as many items as the workers that are there need."""
        for _ in range(0 if self.ends else len(self.workers.fit) - len(self.given)):
            item, faults = self.again.popleft() if self.again else (next(self.items, _END), 0)
            if item is _END:
                self.exhausted = True
                return
            self._submit(item, faults)

    def _submit(self, item: Any, faults: int) -> None:
        workers, before = self.workers, self.saved(item)
        future = self.client.submit(
            guarded,
            self.function,
            self.work_of(item),
            key=f"{workers.token}-{next(_NUMBERS)}",
            resources=workers.resources,
        )
        self.given[future.key] = _Given(item, future, before, faults)
        future.add_done_callback(self.finished.put)

    def _take(self, future: Any) -> Iterator[tuple[Any, Any]]:
        """Yield an item that is done or given up. Any other is given out again."""
        given, workers = self.given[future.key], self.workers
        value = self._value_of(given)
        if value is future:  # lost with its worker, and computed again
            future.add_done_callback(self.finished.put)
            return
        del self.given[future.key]
        if not isinstance(value, FailedItem):
            workers.served = True
            workers.gone.clear()
            yield given.item, value
        elif value.left_by is not None:
            self.again.append((given.item, given.faults))
            if value.sentence:
                none_fits = workers.leave_out(value.left_by, value.sentence)
                too_many = len(workers.left_out) >= self.most_unfit and not workers.served
                if too_many or none_fits:
                    raise UsageError(value.sentence)
        elif value.may_pass and given.faults < RETRIES:
            workers.retried += 1
            self.again.append((given.item, given.faults + 1))
        else:
            yield given.item, value

    def _value_of(self, given: _Given) -> Any:
        """The value of an item that has ended; its future if that has still to be fetched."""
        from distributed import KilledWorker

        future = given.future
        if future.status in ("cancelled", "lost"):  # the scheduler was restarted
            return _LOST
        try:
            return future.result(timeout=FETCH_S)
        except TimeoutError:
            return future
        except KilledWorker as killed:
            return _LOST if self.saved(given.item) != given.before else _killing(killed)
        except Exception as error:  # of Dask: it could not load or send something
            return FailedItem(f"{type(error).__name__}: {describe(error)}", may_pass=True)


def _killing(killed: Any) -> FailedItem:
    """The failure of an item on which workers died."""
    deaths, last = plural(killed.allowed_failures + 1, "worker"), killed.last_worker
    limit = f"is {format_bytes(last.memory_limit)}" if last.memory_limit else "is not set"
    return FailedItem(
        f"{deaths} died on it, one after the other; the last was {last.address}, whose "
        f"memory limit (dask worker --memory-limit) {limit}",
        Incomplete.exit_code,
    )
