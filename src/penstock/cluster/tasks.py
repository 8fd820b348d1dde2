"""Numbered tasks on workers that may die, be late, or leave: each is tried again until it is done,
or given up with a reason.

A task must leave the same result however often it runs, whatever an earlier try did. It calls
`tell_begun` when its work begins and `tell_progress` when some of it is saved. So the death of a
worker counts against the task that it worked on, and not against the tasks that waited there.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..base import PenstockError, UsageError, describe, plural
from .leaving import LEAVING
from .news import News
from .placement import Placement
from .task_side import TaskFailure, run_guarded
from .workers import Workers

DEATHS = 3
"""Deaths of workers on one task, without progress between them, after which it is given up."""
AHEAD = 3
"""Tasks given out for each task that can run, so that the next one is ready when one ends."""
AHEAD_S = 2.0
"""Seconds of work given out ahead, for tasks so short that `AHEAD` of them would not last."""
FETCH_S = 20.0
"""Most seconds for fetching a finished result."""
LOOK_S = 1.0
"""Seconds between two checks of how many tasks can run."""


@dataclass(frozen=True, slots=True)
class TaskOutcome:
    """A task that is done or given up."""

    number: int
    result: Any
    """The value that the task returned, or a `TaskFailure`."""
    tries: int


@dataclass(slots=True)
class _PendingTask:
    number: int
    tries: int = 1
    """Number of tries: the first one, and one after each try that raised."""
    submitted: int = 0
    died: int = 0
    """Number of workers that died on it since some of it was last saved."""
    future: Any = None
    """Dask's future; None while the task is held back because no fitting worker is present."""
    placed: frozenset[str] | None = None
    """Addresses of the workers that it may run on; None for any."""


class Tasks:
    """Runs numbered tasks of one function on the workers of a cluster."""

    def __init__(
        self,
        workers: Workers,
        function: Callable[..., Any],
        order: Any,
        topic: str,
        retries: int,
        patience_s: float = 0.0,
    ) -> None:
        """Prepare to run tasks.

        Args:
            workers: The workers.
            function: The task: a function (order, number) that a worker can import.
            order: The argument of every task, or a function that makes it from a task's number.
            topic: A name that only this job has. Its tasks report their progress under it.
            retries: How often a task that raised is tried again.
            patience_s: A task whose store was away is tried again only if some task has saved work
                within this many seconds.
        """
        self.workers, self.client = workers, workers.client
        self.function, self.order, self.topic, self.retries = function, order, topic, retries
        self.name = f"{topic}-{uuid.uuid4().hex[:8]}"
        """Unique beginning of the keys of these tasks."""
        self.placement = Placement(workers)
        self.deaths = self.retried = 0
        """Numbers of deaths without notice, and of tasks that raised and were tried again."""
        self._pending: dict[int, _PendingTask] = {}
        self._running: dict[str, int] = {}
        """Number of the task that each worker works on, by address."""
        self._leaving: set[str] = set()
        """Addresses of workers that announced that they leave."""
        self._news = News(self.client, {"told": topic, "all": "all", "leaving": LEAVING})
        self._rate = 0.0
        """Tasks that end per second."""
        self._ended = 0
        """Tasks that have ended since the last look."""
        self._asked = 0.0
        self.patience_s, self._safe = patience_s, time.monotonic()
        self.ends = False
        """True if tasks that are lost with their workers are not given out again."""

    def run(
        self, numbers: Iterable[int], tick: Callable[[dict[str, Any] | None], None]
    ) -> Iterator[TaskOutcome]:
        """Do every task, and yield each when it is done or given up, in any order.

        Args:
            numbers: The tasks, taken one by one as workers need them.
            tick: Called repeatedly, with what a task reported by `tell_progress`, or None.

        Raises:
            PenstockError: The scheduler is gone.
            UsageError: No worker so far may take part.
            Incomplete: No fitting worker is present, and the time to wait for one is over.
        """
        waiting = iter(numbers)
        self._news.subscribe()
        try:
            while True:
                self._refill(waiting)
                if not self._pending:
                    return
                tick(None)
                ended: list[tuple[_PendingTask, Any]] = []
                for kind, item in self._news.take():
                    if kind == "told":
                        self._hear(item)
                        tick(item)
                    elif kind == "leaving":
                        self._leaving.add(item["worker"])
                    elif kind == "all":
                        yield from self._see(item)
                    else:
                        ended.append(item)
                yield from self._end(ended)
        finally:
            with contextlib.suppress(Exception):  # the scheduler may be gone
                _withdraw(self.client, self._pending.values())
                self._news.unsubscribe()

    def _refill(self, waiting: Iterator[int]) -> None:
        """Give out as many tasks as workers need: a few for each, and more if tasks are short."""
        self._look()
        room = max(1, AHEAD * self.placement.lanes, int(self._rate * AHEAD_S)) - len(self._pending)
        new = [_PendingTask(number) for number in itertools.islice(waiting, max(0, room))]
        self._pending |= {task.number: task for task in new}
        self._submit(new)

    def _look(self) -> None:
        """Every `LOOK_S` seconds, check which workers are present and how fast tasks end."""
        now = time.monotonic()
        if now - self._asked < LOOK_S:
            return
        if self.client.status not in ("running", "connecting"):
            raise PenstockError(
                f"the scheduler of {self.workers.where} is gone; run again with --resume"
            )
        self._rate = self._ended / (now - self._asked) if self._asked else 0.0
        self._asked, self._ended = now, 0
        self.placement.look()
        self._place_again()

    def _place_again(self) -> None:
        """Give out again the tasks of workers that are gone: Dask would wait for these for ever."""
        stranded = [task for task in self._pending.values() if self.placement.strands(task.placed)]
        _withdraw(self.client, stranded)
        if not self.ends:
            self._submit(stranded)
            return
        for task in stranded:
            del self._pending[task.number]

    def _submit(self, tasks: Sequence[_PendingTask]) -> None:
        """Give tasks to Dask. They are held back while no fitting worker is present."""
        fit = self.placement.fit
        for task in tasks:
            task.placed, task.future = fit, None
        if not tasks or self.placement.strands(fit):
            return
        for task in tasks:
            task.submitted += 1
        futures = self.client.map(  # each call of Dask's client costs as much as several tasks
            run_guarded,
            [self.function] * len(tasks),
            [self.order(task.number) if callable(self.order) else self.order for task in tasks],
            [task.number for task in tasks],
            key=[f"{self.name}-{task.number}-{task.submitted}" for task in tasks],
            pure=False,
            workers=None if fit is None else [*fit],
            resources=self.placement.resources,
        )
        for task, task.future in zip(tasks, futures, strict=True):
            task.future.add_done_callback(partial(self._news.put_end, task))

    def _hear(self, word: dict[str, Any]) -> None:
        number = word["number"]
        if word["what"] == "begun":
            self._running[word["worker"]] = number
        elif word["safe"]:
            self._safe = time.monotonic()
            if number in self._pending:
                self._pending[number].died = 0

    def _see(self, event: dict[str, Any]) -> Iterator[TaskOutcome]:
        """Note a worker that left or died, and give up a task on which too many workers died."""
        if event.get("action") != "remove-worker":
            return
        self._asked = 0.0
        task = self._pending.get(self._running.pop(event["worker"], -1))
        if event.get("expected") or event["worker"] in self._leaving:
            return
        self.deaths += 1
        if task is None:
            return
        task.died += 1
        if task.died >= DEATHS:
            del self._pending[task.number]
            _withdraw(self.client, [task])
            sentence = f"{DEATHS} workers died on it, one after the other"
            yield TaskOutcome(task.number, TaskFailure(sentence, True, 1), task.tries)

    def _end(self, ended: Sequence[tuple[_PendingTask, Any]]) -> Iterator[TaskOutcome]:
        """Take the results of tasks, and submit again the failed ones that may still succeed."""
        tasks = [  # not earlier tries, nor tasks that were given up
            task for task, future in ended if future is task.future and task.number in self._pending
        ]
        self._ended += len(tasks)
        for task, result in zip(tasks, _results(self.client, tasks), strict=True):
            self._running = {w: n for w, n in self._running.items() if n != task.number}
            again = isinstance(result, TaskFailure) and self._tries_again(task, result)
            if not (result is None or isinstance(result, TaskFailure)):
                self.workers.served.set()
            if again and result.unfit is None:  # an unfit worker does not count as a try
                task.tries += 1
                self.retried += 1
            lost = again or result is None
            if lost and not self.ends:
                self._submit([task])
                continue
            del self._pending[task.number]
            if not lost:
                yield TaskOutcome(task.number, result, task.tries)

    def _tries_again(self, task: _PendingTask, failure: TaskFailure) -> bool:
        """Whether a task that raised may succeed on another worker or at another time."""
        if failure.unfit is not None:
            self.placement.unfit[failure.unfit] = failure.sentence
            self.placement.look()
            return bool(self.placement.fit) or self.workers.served.is_set()
        ends = failure.final or failure.ends_job
        return not ends and task.tries <= self.retries and not self.is_over(failure)

    def is_over(self, failure: TaskFailure) -> bool:
        """Whether a task failed because a store seems to be away for every worker."""
        # News of saved work arrives a moment later.
        return failure.away and time.monotonic() - self._safe > 0.9 * self.patience_s > 0


def worker_notes(rounds: Sequence[Tasks], kind: str) -> Iterator[str]:
    """Sentences on the workers that matter for the results.

    Args:
        rounds: The tasks that the workers got.
        kind: What a task does, such as ``part``.

    Yields:
        Sentences.
    """
    if deaths := sum(tasks.deaths for tasks in rounds):
        yield f"Workers: {plural(deaths, 'worker')} died on the way"
    if retried := sum(tasks.retried for tasks in rounds):
        yield f"{kind.capitalize()}s: {plural(retried, kind)} failed and were tried again"
    unfit = {address: why for tasks in rounds for address, why in tasks.placement.unfit.items()}
    yield from (f"Left out: {address}: {why}" for address, why in unfit.items())


def _withdraw(client: Any, tasks: Iterable[_PendingTask]) -> None:
    """Take tasks back from Dask."""
    if futures := [task.future for task in tasks if task.future is not None]:
        client.cancel(futures, force=True)


def _results(client: Any, tasks: Sequence[_PendingTask]) -> list[Any]:
    """The results of tasks, all fetched at once. None for tasks that were lost or whose worker
    left."""
    futures = [task.future for task in tasks]
    there = {future.key: future for future in futures if future.status == "finished"}

    async def gather() -> dict[str, Any]:
        results: dict[str, Any] = await client.gather(there, errors="skip", asynchronous=True)
        return results

    try:  # each request makes events for all subscribers, so do not ask for nothing
        fetched = client.sync(gather, callback_timeout=FETCH_S) if there else {}
    except TimeoutError:  # a worker has just died, and Dask runs its tasks again
        fetched = dict.fromkeys(there)
    return [
        _failure_of(future) if (result := fetched.get(future.key)) is None else result
        for future in futures
    ]


def _failure_of(future: Any) -> TaskFailure | None:
    """Why Dask could not run a task. None if the task was lost with workers that died."""
    error = future.exception() if future.status == "error" else None
    if error is None or type(error).__name__ == "KilledWorker":
        return None
    sentence = f"{type(error).__name__}: {describe(error)}"
    if isinstance(error, ImportError | AttributeError):  # before our function was called
        sentence = f"a worker cannot import what it needs ({sentence}); does it have this Penstock?"
        return TaskFailure(sentence, final=True, exit_code=UsageError.exit_code)
    return TaskFailure(sentence, final=True, exit_code=1)
