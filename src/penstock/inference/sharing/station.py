"""The worker's side of a job on a cluster: it opens the job once, and does the tasks it is given.

A worker may die or restart at any time. Its log says what it has written; others do the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base import (
    HeadKind,
    Incomplete,
    InferConfig,
    PenstockError,
    UsageError,
    describe,
    one_heap,
)
from ...cluster import (
    UnfitWorker,
    WorkerLeaves,
    before_leaving,
    leave_after_task,
    still_wanted,
    tell_begun,
    tell_progress,
)
from ...data import Claims, Scaling
from ..opening.heads import HeadPart, Origin
from ..planning.plan import Plan, make_plan
from ..planning.scratch import scratch_rate
from ..run_folder.ending import EndRequest
from ..run_folder.journal import Journal, OtherMaker, Prepared
from ..stages.retries import patiently
from ..stages.summary import Progress
from .turns import turn_of

if TYPE_CHECKING:
    from ..opening.job import Job

TELL_S = 0.5
"""Seconds between two messages of a worker on its progress."""
MARGIN_S = 5.0
"""Seconds beyond ``--grace`` to wait for a part that was asked to end."""
IDLE_S = 60.0
"""Seconds without a task after which a worker closes the job, as the client may be dead. The next
task opens the job again."""


@dataclass(frozen=True, slots=True)
class JobOrder:
    """What each worker needs to take part in a job."""

    topic: str
    config: InferConfig
    part: tuple[int, ...]
    """Shape of a part, z y x."""
    elements: int
    """Number of shares in which the values of the input are counted."""
    run: str
    owner: Mapping[str, Any]
    """The client, as the lock files of the outputs name it."""
    peers: int
    """Number of workers on one host."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A job as a worker has opened it, for a client that has neither model nor device."""

    plan: Plan
    fingerprint: dict[str, Any]
    maker: dict[str, Any]
    run_dir: Path | str | None
    selected: tuple[Sequence[int], Sequence[int]]
    """Times and channels of the input."""
    at_once: int
    """Number of channels that the model takes."""
    head_parts: Sequence[HeadPart]
    kinds: Sequence[tuple[HeadKind, Origin]]
    counts: bool
    """True if the values of the input are to be counted for percentiles."""


def open_task(order: tuple[InferConfig, int, str], number: int) -> Opened:
    """Open a job on a worker and plan it. Nothing is created.

    ``order`` are the settings, the number of workers on one host, and the client's host.
    """
    config, peers, client = order
    try:
        return _opened(config, peers)
    except UsageError as error:
        if platform.node() == client:
            raise
        raise UnfitWorker(f"on the worker {platform.node()}: {describe(error)}") from error


def _opened(config: InferConfig, peers: int) -> Opened:
    from ..opening.job import Job
    from .statistics import needs_counting

    one_heap()
    job = Job(config, peers=peers)
    return Opened(
        _settled(job, peers), job.fingerprint(), job.maker(), job.run_dir, job.selected,
        job.net.model.in_channels, job.head_parts, job.head_kinds, needs_counting(job),
    )  # fmt: skip


def _settled(job: Job, peers: int) -> Plan:
    """The plan of a job, in which --spill is decided. A resumed run keeps its choice and its parts;
    a new one chooses by the seconds of a patch and the speed of the run folder's disk."""
    from ..lanes.forward import seconds_of_patch

    config, plan = job.config, job.plan
    if plan.ways is None or config.spill == "never":
        return plan
    facts, part, choice = plan.facts, None, {"spill": str(config.spill)}
    if isinstance(job.run_dir, str):  # a bucket
        if config.spill == "always":
            raise UsageError(
                f"--spill always: workers cannot spill to {job.run_dir}; name a --run-dir on a "
                "file system that all of them share"
            )
        choice["spill"] = "never"
    elif config.resumes:
        with contextlib.suppress(UsageError):
            before = Prepared.read(job.run_dir)
            part = before.part if before.spills and config.parts is None else None
            if config.spill == "auto":
                choice["spill"] = "always" if before.spills else "never"
    if choice["spill"] == "auto" and isinstance(job.run_dir, Path):
        here = "measured on a worker"
        facts = replace(facts, patch_seconds=seconds_of_patch(job), patch_seconds_from=here)
        rate = None if facts.spill_rate else scratch_rate(job.run_dir)
        if rate is not None:  # workers of one host share it
            facts = replace(facts, spill_rate=rate / peers, spill_rate_from=here)
    return make_plan(config.model_copy(update=choice), facts, plan.shape, part)


class Station:
    """A job that one worker process has opened, with the worker's log and outputs."""

    def __init__(self, order: JobOrder) -> None:
        from ..opening.job import Job
        from .statistics import Merged
        from .worker import Worker

        one_heap()
        self.order, self.lock = order, threading.Lock()
        self.request = EndRequest()
        self.scalings: Mapping[int, Scaling] | None = None
        self.merged = Merged()
        self.job = Job(order.config, order.part, order.peers)
        with contextlib.ExitStack() as ends:
            self.journal = ends.enter_context(contextlib.closing(self._journal()))
            claims = Claims.join(self.job.sinks, order.run, order.owner, beats=False)
            self.worker = Worker(self.job, self.journal, claims, self.request)
            self.worker.watch.create_sinks()
            ends.enter_context(self.worker.at_work())
            self.ends = ends.pop_all()
        before_leaving(order.topic, self.end_part)
        self._await_task()

    def _journal(self) -> Journal:
        """The journal of the run, with this process's own log."""
        config, job = self.order.config, self.job
        host = platform.node()
        anyway = config.resume_anyway or config.mixed_arithmetic
        try:
            journal = Journal.open(
                job.run_dir, job.fingerprint(), job.maker(), resume=True, anyway=anyway
            )
        except OtherMaker as error:
            takes = "--mixed-arithmetic takes such workers as well"
            raise UnfitWorker(f"{error.difference}; {takes}") from error
        if journal.run != self.order.run:
            raise UsageError(
                f"--run-dir {job.run_dir}: the worker on {host} does not see the run there; give "
                "--run-dir s3://BUCKET/PREFIX, or a folder that all workers share"
            )
        # A process that opens a job again needs a new name: the client keeps results by name.
        number = next(_NUMBERS)
        journal.writer = f"{host}-{os.getpid()}" + f"-{number}" * (number > 1)
        journal.join()
        return journal

    def count(self, number: int) -> str:
        """Count a share of the values of the input."""
        from .statistics import count_share, folder_of

        with self._task(number):
            folder, elements = folder_of(self.journal), self.order.elements
            watch = self.worker.watch
            count_share(self.job, watch, folder, number + 1, elements, self.merged)
            return "counted"

    def lacks(self) -> str:
        """Return "lacking" if shares of the values are still to be counted, else "known"."""
        from .statistics import Round, folder_of, open_round

        folder, elements = folder_of(self.journal), self.order.elements
        opened = open_round(self.job, folder, elements, self.merged)
        return "lacking" if isinstance(opened, Round) else "known"

    def compute(self, number: int) -> dict[str, Any]:
        """Compute a part, or join the borders of one, and return the summary of all that this
        process has done. `turn_of` says which of the two a number means."""
        from .statistics import shared_scalings

        with self._task(number):
            self.journal.refresh()
            if self.scalings is None:
                elements = self.order.elements
                self.scalings = shared_scalings(self.job, self.journal, elements, self.merged)
            self._compute(number, self.scalings)
            return self.result()

    def _compute(self, number: int, scalings: Mapping[int, Scaling]) -> None:
        """Do a task. Raises `WorkerLeaves` if it was asked to end meanwhile."""
        telling, turn = _Telling(self, number), turn_of(number, self.worker.parts)
        try:
            if turn.kind == "part":
                self.worker.compute([turn.part], scalings, telling)
            else:
                whole = turn.kind == "join"
                self.worker.join(turn.part, scalings, telling, whole=whole)
        except PenstockError as error:
            if not self.request.why:
                raise
            raise WorkerLeaves(self.request.why) from error
        if self.request.why:
            raise WorkerLeaves(self.request.why)

    def end_part(self, why: str = "its worker") -> None:
        """Ask the part to end, and wait until it has written the units that are complete."""
        self.request.ask(why)
        if self.lock.acquire(timeout=self.order.config.grace + MARGIN_S):
            self.ends.close()  # the log too
            self.lock.release()

    @contextlib.contextmanager
    def _task(self, number: int) -> Iterator[None]:
        """Tell the client that a task begins, and do it. Raises `WorkerLeaves` if no task may
        begin any more."""
        with self.lock:
            self._idle.cancel()
            if self.request.why:
                raise WorkerLeaves(self.request.why)
            tell_begun(self.order.topic, number)
            try:
                yield
            finally:
                if self.worker.watch.watchdog.stalled:
                    # The thread that hangs keeps its memory, and maybe its device, for good.
                    self.request.ask("a stage that hangs")
                    leave_after_task()
                self._await_task()

    def _await_task(self) -> None:
        """Close the job if no task comes for `IDLE_S`."""
        self._idle = threading.Timer(IDLE_S, self._give_up)
        self._idle.daemon = True
        self._idle.start()

    def _give_up(self) -> None:
        """Close the job, unless a task has begun."""
        with _OPENING:
            if not self.lock.acquire(blocking=False):
                return
            if _STATIONS.get(self.order.topic) is self:
                del _STATIONS[self.order.topic]
            try:
                self._end()
            finally:
                self.lock.release()

    def close(self) -> dict[str, Any]:
        """End a part that nobody waits for, and close the log. Returns what `result` does."""
        self.request.ask("the client")
        with self.lock:
            self._end()
            return self.result()

    def _end(self) -> None:
        """Close the log, and take no more tasks. The lock must be held."""
        self.request.ask("a lack of tasks")
        before_leaving(self.order.topic, None)
        self._idle.cancel()
        self.ends.close()

    def result(self) -> dict[str, Any]:
        """What this process has done, for the client."""
        return {"name": self.journal.writer, "summary": asdict(self.worker.summary())}


class _Telling:
    """Tells the client every `TELL_S` how far a part is."""

    def __init__(self, station: Station, number: int) -> None:
        self.station, self.number, self.due = station, number, 0.0
        self.units, self.is_wanted = station.worker.safe, still_wanted()

    def __call__(self, progress: Progress) -> None:
        journal, now = self.station.journal, time.monotonic()
        if now < self.due:
            return
        self.due = now + TELL_S
        if not self.is_wanted():
            raise Incomplete("nobody waits for the part any more")
        tell_progress(
            self.station.order.topic,
            self.number,
            safe=self.station.worker.safe > self.units,
            name=journal.writer,
            patches=sum(self.station.worker.watch.patches_done),
            units=journal.written,
            voxels=journal.voxels,
        )
        self.units = self.station.worker.safe


_STATIONS: dict[str, Station] = {}
_OPENING = threading.Lock()
_NUMBERS = itertools.count(1)
"""Numbers of the stations that this process opens."""


def _station(order: JobOrder) -> Station:
    with _OPENING:
        if order.topic not in _STATIONS:
            for topic, station in [*_STATIONS.items()]:
                if station.order.config.run_dir == order.config.run_dir:  # its client was killed
                    del _STATIONS[topic]
                    station.request.ask("another client")
                    station.close()
            limit = order.config.retry_for
            try:
                station = patiently(
                    limit, "opening the job", lambda: Station(order), lambda made: made.journal
                )
            except UsageError as error:  # another worker could open it: this one lacks something
                raise UnfitWorker(describe(error)) from error
            _STATIONS[order.topic] = station
        return _STATIONS[order.topic]


def count_task(order: JobOrder, number: int) -> str:
    """Count a share of the values of the input, on a worker."""
    return _station(order).count(number)


def lacks(order: JobOrder, number: int) -> str:
    """Return what `Station.lacks` says, on a worker."""
    return _station(order).lacks()


def part_task(order: JobOrder, number: int) -> dict[str, Any]:
    """Compute a part on a worker."""
    return _station(order).compute(number)


async def ask_end(topic: str, why: str) -> None:
    """Ask a worker to write the units that are complete and to end its part."""
    if (station := _STATIONS.get(topic)) is not None:
        station.request.ask(why)


async def leave(topic: str) -> dict[str, Any] | None:
    """Close a job on a worker, and return what the worker has done."""
    station = _STATIONS.pop(topic, None)
    # In a thread, as the worker's heartbeats must go on while a part that was given up ends.
    return None if station is None else await asyncio.to_thread(station.close)
