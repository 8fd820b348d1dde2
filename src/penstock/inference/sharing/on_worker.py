"""The worker's side of a job on a cluster: it opens the job once, and does the shares it is given.

A worker may die or restart at any time. Its log says what it has written; others do the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ...base import (
    InferConfig,
    PenstockError,
    UsageError,
    describe,
    one_heap,
    share_of,
)
from ...cluster import UnfitWorker, WorkerLeaves, before_leaving, close_after_item
from ..stages.remote_job import RemoteJob

MARGIN_S = 5.0
"""Seconds beyond ``--grace`` to wait for a share that was asked to end."""
IDLE_S = 60.0
"""Seconds without a share after which a worker closes the job, as the client may be dead. The next
share opens the job again."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JobOrder:
    """What each worker needs to take part in a job."""

    topic: str
    """A name that only this start of the job has."""
    config: InferConfig
    part: tuple[int, ...]
    """Shape of a part, z y x."""
    run: str
    peers: int
    """Number of workers on one host."""


def open_job(order: tuple[InferConfig, int, str]) -> RemoteJob:
    """Open a job on a worker and plan it. Nothing is created.

    ``order`` are the settings, the number of workers on one host, and the client's host.
    """
    from ..opening.job import Job
    from ..run_folder.journal import Journal

    config, peers, client = order
    one_heap()
    try:
        job = Job(config, peers=peers)
    except UsageError as error:
        if platform.node() == client:
            raise
        raise UnfitWorker(f"on the worker {platform.node()}: {describe(error)}") from error
    if config.resumes and job.run_dir is not None and all(sink.exists for sink in job.sinks):
        # As the client will: one that computes other bits than the run leaves the job to others.
        try:
            Journal.open(job.run_dir, job.fingerprint, job.maker, resume=True)
        except UsageError as error:
            raise UnfitWorker(describe(error)) from error
    # What the worker has decided on patches holds for all.
    config = config.model_copy(
        update={name: getattr(job.config, name) for name in ("patch", "overlap", "batch", "box")}
    )
    return RemoteJob(
        config, job.plan, job.fingerprint, job.maker, job.run_dir, job.selected,
        job.net.model.in_channels, job.head_facts, job.way, job.values.counted,
    )  # fmt: skip


class KeptRun:
    """A run that a worker process keeps open from one share to the next, with its own log."""

    def __init__(self, order: JobOrder) -> None:
        from ..opening.job import Job
        from ..stages.beginning import joined
        from ..stages.run import Run
        from ..stages.statistics import Counting
        from ..stages.watch import with_own_files

        one_heap()
        self.order, self.lock = order, threading.Lock()
        # A process that opens a job again needs files of another name.
        name = f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:4]}-{order.topic}"
        job = Job(with_own_files(order.config, name), order.part, order.peers)
        with contextlib.ExitStack() as ends:
            journal, lock = ends.enter_context(joined(job, name, run=order.run))
            self.run = Run(job, journal, lock)
            self.counting = Counting(self.run)
            self.run.open_outputs()
            journal.join()
            ends.enter_context(self.run.at_work())
            self.ends = ends.pop_all()
        self._await_share()
        before_leaving[order.topic] = partial(
            self.close, "its worker", order.config.grace + MARGIN_S
        )

    def close(self, why: str, within_s: float = -1) -> None:
        """Close the log, once the share at work has written the blocks that are complete. No other
        share begins. ``within_s`` is the longest time to wait for it, if it is not negative."""
        # Before the wait: a share that comes meanwhile opens the job anew.
        _KEPT.pop(self.order.topic, None)
        self.run.request.ask(why)
        if self.lock.acquire(timeout=within_s):
            try:
                before_leaving.pop(self.order.topic, None)
                self._idle.cancel()
                self.ends.close()
            finally:
                self.lock.release()

    def do(self, share: Callable[[KeptRun], T]) -> T:
        """Do a share, and save what this process has done.

        Raises `WorkerLeaves` if no share may begin any more, or the worker was asked to end
        meanwhile.
        """
        run = self.run
        with self.lock:
            self._idle.cancel()
            try:
                if not run.request.why:
                    value = share(self)
            # A share that was cut short by the request ends so, and is no fault: see below.
            except PenstockError:
                if not run.request.why:
                    raise
            finally:
                if run.watch.watchdog.stalled:
                    # The thread that hangs keeps its memory, and maybe its device, for good.
                    run.request.ask("a stage that hangs")
                    close_after_item(run.request.why)
                if run.seconds:
                    run.keep_summary(run.seconds)
                self._await_share()
        if run.request.why:
            raise WorkerLeaves(run.request.why)
        return value

    def _await_share(self) -> None:
        """Close the job if no share comes for `IDLE_S`. One that comes just then is done later."""
        self._idle = threading.Timer(IDLE_S, self.close, ["a lack of shares"])
        self._idle.daemon = True
        self._idle.start()


_KEPT: dict[str, KeptRun] = {}
# Held as a job is opened: a worker of several threads may have shares of two clients, of which one
# was killed.
_OPENING = threading.Lock()


def _kept(order: JobOrder) -> KeptRun:
    """The run of an order, which is opened if this process has not done so yet."""
    with _OPENING:
        if order.topic not in _KEPT:
            for kept in [*_KEPT.values()]:
                if kept.order.config.run_dir == order.config.run_dir:  # its client was killed
                    kept.close("another client")
            try:
                _KEPT[order.topic] = KeptRun(order)
            except UsageError as error:  # another worker could open it: this one lacks something
                raise UnfitWorker(describe(error)) from error
        return _KEPT[order.topic]


def count_share_of(work: tuple[JobOrder, str]) -> bool:
    """Count a share of the values of the input, such as ``3/8``, on a worker. Returns whether all
    are counted."""
    order, share = work

    def count(kept: KeptRun) -> bool:
        kept.counting.count(*share_of(share))
        return kept.counting.advance()

    return _kept(order).do(count)


def compute_share_of(work: tuple[JobOrder, str]) -> None:
    """Compute a share of the parts, such as ``3/8``, on a worker."""
    from ..stages.pipeline import compute

    order, (element, elements) = work[0], share_of(work[1])

    def calculate(kept: KeptRun) -> None:
        kept.run.journal.refresh()  # what others have written of this share is not done again
        numbers = kept.run.parts.share(element, elements)
        compute(kept.run, numbers, kept.counting.scalings(elements))

    _kept(order).do(calculate)


async def leave(topic: str, why: str) -> None:
    """Close a job on a worker, once the share at work has written the blocks that are complete."""
    if (kept := _KEPT.get(topic)) is not None:
        # In a thread, as the worker's heartbeats must go on while the share ends.
        await asyncio.to_thread(kept.close, why)
