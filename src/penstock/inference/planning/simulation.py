"""Simulate a job on workers that fail, lag and share a store, part by part in the real order.

An idle worker takes the next part. If a worker dies, the next idle one takes its part and skips
the units that are noted. Failures are random, at a constant rate for each worker. Store and
scheduler each serve a limited number of patches per second, shared evenly among workers; a worker
takes no more than it can compute.

Times are exact between events. All workers of one speed share a clock that counts patches, so an
event costs the same with a thousand workers as with ten. While the queue is long, a worker takes
several parts in one event, but so few that no worker ends late.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from .at_scale import HOPELESS, Fleet, Load, shared_speeds, without_failures

AT_ONCE = 2
"""A worker takes its share of the waiting parts, divided by this, in one event."""
MOST_FAILURES = 100_000
"""Most failures of a simulated run. After them it is given up."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One simulated run."""

    seconds: float
    """Seconds until the last unit is written; infinite if the job was given up."""
    computed: float
    """Patches computed, including those that were lost with a worker."""
    redone: float
    """Patches among them that were computed before."""
    failures: int
    tasks: int
    """Parts and joins given out. Parts of dead workers count each time."""


@dataclass(eq=False, slots=True)
class _SimulatedTask:
    """The task of a worker: some whole parts, or the rest of one."""

    begun: float
    """Start of the task, on the clock of its kind of worker, in patches."""
    patches: float
    parts: tuple[int, int] | None
    """First part and stop; None for the rest of a part whose worker died."""
    whole: float = 0.0
    """Patches of the whole part, if this is the rest of one."""


def simulate(load: Load, fleet: Fleet, runs: int, seed: int) -> list[Outcome]:
    """Simulate a job.

    Args:
        load: The work of the job.
        fleet: The workers.
        runs: Number of simulated runs.
        seed: Seed of the random numbers. Run i of two loads uses the same ones.

    Returns:
        The outcome of each run.
    """
    return [_Play(load, fleet, np.random.default_rng([seed, run])).run() for run in range(runs)]


class _Play:
    def __init__(self, load: Load, fleet: Fleet, random: np.random.Generator) -> None:
        self.load, self.fleet, self.work, self.random = load, fleet, load.work, random
        self.slowness = (1.0, fleet.slowness)
        slow = set(random.choice(fleet.workers, fleet.slow, replace=False).tolist())
        self.kind = [int(worker in slow) for worker in range(fleet.workers)]
        self.queue = deque([(0, len(self.work))])
        self.waiting = len(self.work)
        """Number of whole parts in the queue."""
        self.rests: deque[tuple[float, float]] = deque()
        """Rests of parts, each with the patches of its whole part."""
        self.tasks: list[_SimulatedTask | None] = [None] * fleet.workers
        self.busy, self.sharing = [0, 0], [0, 0]
        """Busy workers of each kind, now and when `speeds` was last computed."""
        self.idle = [*reversed(range(fleet.workers))]
        self.up = [*range(fleet.workers)]
        self.place = [*range(fleet.workers)]
        """Index of each worker in `up`."""
        self.returns: list[tuple[float, int]] = []
        self.ends: tuple[list[tuple[float, int, int, _SimulatedTask]], ...] = ([], [])
        self.number = itertools.count()
        self.now, self.clocks, self.speeds = 0.0, [0.0, 0.0], (0.0, 0.0)
        self.next_failure = math.inf
        self.computed = self.redone = 0.0
        self.failures = self.given = 0

    def run(self) -> Outcome:
        hopeless = HOPELESS * without_failures(self.load, self.fleet)
        self._await_failure()
        self._give_out()
        while any(self.busy) or (self.returns and (self.waiting or self.rests)):
            kind, end = self._next_end()
            back = self.returns[0][0] if self.returns else math.inf
            then = min(end, back, self.next_failure)
            if then > hopeless or self.failures > MOST_FAILURES:
                break
            for each, speed in enumerate(self.speeds):
                self.clocks[each] += speed * (then - self.now)
            self.now = then
            if then == end:
                self._end(kind)
            elif then == back:
                self._come_back()
            else:
                self._fail(self.up[int(self.random.integers(len(self.up)))])
            self._give_out()
        ended = not (self.waiting or self.rests or any(self.busy))
        seconds = self.load.before + self.now if ended else math.inf
        tasks = self.given + self.load.joins
        return Outcome(seconds, self.computed, self.redone, self.failures, tasks)

    def _next_end(self) -> tuple[int, float]:
        """The kind of worker that ends a task next, and when."""
        ends = [math.inf, math.inf]
        for kind, heap in enumerate(self.ends):
            while heap and self.tasks[heap[0][2]] is not heap[0][3]:
                heapq.heappop(heap)  # its worker died
            if heap:
                left = max(0.0, heap[0][0] - self.clocks[kind])
                ends[kind] = self.now + left / self.speeds[kind]
        kind = int(ends[1] < ends[0])
        return kind, ends[kind]

    def _end(self, kind: int) -> None:
        clock, _, worker, task = heapq.heappop(self.ends[kind])
        self.clocks[kind] = clock
        self.computed += task.patches
        self._stop(worker)
        self.idle.append(worker)

    def _stop(self, worker: int) -> None:
        self.tasks[worker] = None
        self.busy[self.kind[worker]] -= 1

    def _fail(self, worker: int) -> None:
        """Let a worker die. The part of its task that is not noted goes back."""
        self.failures += 1
        last = self.up.pop()
        if last != worker:
            self.up[self.place[worker]], self.place[last] = last, self.place[worker]
        task = self.tasks[worker]
        if task is None:
            self.idle.remove(worker)
        else:
            self._stop(worker)
            self._leave(task, self.clocks[self.kind[worker]] - task.begun)
        if self.fleet.restart is not None:
            heapq.heappush(self.returns, (self.now + self.fleet.restart, worker))
        self._await_failure()

    def _leave(self, task: _SimulatedTask, done: float) -> None:
        self.computed += done
        whole, rest = task.whole, task.patches
        if task.parts is not None:
            first, stop = task.parts
            before = self.work.before(first)
            number = min(max(self.work.at(before + done), first), stop - 1)
            done -= self.work.before(number) - before
            whole = rest = self.work.before(number + 1) - self.work.before(number)
            if number + 1 < stop:
                self.queue.appendleft((number + 1, stop))
                self.waiting += stop - number - 1
                self.given -= stop - number - 1
        lost = self.work.redo.lost((whole - rest + done) / whole) * whole
        left = min(rest, rest - done + lost)
        self.redone += left - (rest - done)
        self.rests.append((left, whole))

    def _come_back(self) -> None:
        _, worker = heapq.heappop(self.returns)
        self.place[worker] = len(self.up)
        self.up.append(worker)
        self.idle.append(worker)
        self._await_failure()

    def _await_failure(self) -> None:
        # The failure rate is constant, so the wait may be drawn anew whenever workers come or go.
        if self.fleet.mtbf is not None and self.up:
            self.next_failure = self.now + self.random.exponential(self.fleet.mtbf / len(self.up))
        else:
            self.next_failure = math.inf

    def _give_out(self) -> None:
        while self.idle and (self.rests or self.waiting):
            worker = self.idle.pop()
            kind = self.kind[worker]
            task = self._take(kind)
            self.tasks[worker] = task
            self.busy[kind] += 1
            end = task.begun + task.patches
            heapq.heappush(self.ends[kind], (end, next(self.number), worker, task))
        if self.busy != self.sharing:
            self.sharing = [*self.busy]
            self.speeds = shared_speeds(self.load, self.fleet, *self.busy)[:2]

    def _take(self, kind: int) -> _SimulatedTask:
        """The next task for a worker of a kind: what a dead worker left, or the next parts."""
        if self.rests:
            left, whole = self.rests.popleft()
            self.given += 1
            return _SimulatedTask(self.clocks[kind], left, None, whole)
        first, stop = self.queue.popleft()
        shares = AT_ONCE * self.fleet.workers * self.slowness[kind]
        middle = min(stop, first + max(1, int(self.waiting / shares)))
        if middle < stop:
            self.queue.appendleft((middle, stop))
        self.waiting -= middle - first
        self.given += middle - first
        patches = self.work.before(middle) - self.work.before(first)
        return _SimulatedTask(self.clocks[kind], patches, (first, middle))
