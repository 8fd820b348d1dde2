"""One going of a job: what its stages share, in one thing that is handed from each to the next."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import cached_property

from ...base import SUMMARY_FILE, Budget, Channel, Flow, cuda_flags_kept, frozen_garbage
from ...data import FilledMask, OutputLock
from ...models import set_cuda_flags
from ..lanes.bricks import Computed, Loaded
from ..lanes.lane import Equipment
from ..opening.job import Job
from ..run_folder.journal import EndRequest, Journal
from ..tiling.stitch import Block
from .output_levels import FirstLevel, first_levels
from .retries import forgoing
from .watch import Watch


class Queues:
    """The channels of a job, each bounded by a budget of bytes, and the equipment of its stages."""

    def __init__(self, job: Job, equipment: Equipment | None = None) -> None:
        """``equipment`` is what an earlier part of the job left."""
        plan, lanes = job.plan, len(job.devices)
        self.flow = Flow()
        self.equipment: Equipment = equipment or Equipment(job)
        self.readers = max(1, job.config.prep_workers // lanes)
        """Number of threads that read for each lane."""
        self.room = [Budget(self.flow, plan.brick_budget) for _ in job.devices]
        """Budgets of bytes, one for each lane, for bricks from the start of reading to the end of
        stitching."""
        self.loaded: list[Channel[Loaded]] = [Channel(self.flow, self.readers) for _ in job.devices]
        self.computed: Channel[tuple[int, Computed]] = Channel(self.flow, lanes)
        """Computed bricks, each with the index of its lane."""
        self.write_room = Budget(self.flow, plan.write_budget)
        self.whole: Channel[Block] = Channel(self.flow)
        bricks = lanes * plan.brick_budget // plan.largest_brick_bytes
        self.limits = {
            "prep": bricks,
            "stitch": bricks,
            # As many as fit into the plan's `write_budget`.
            "write-0": job.config.writer_workers + 1,
        }
        """How many items fit into each queue, by its name in the metrics."""

    def lengths(self) -> dict[str, float]:
        """How many items wait in each queue now."""
        return {
            # By the names of the tool that Penstock replaces, whose plots read them.
            "prep": sum(map(len, self.loaded)),
            "stitch": len(self.computed),
            "write-0": len(self.whole),
        }


class Run:
    """A job that has begun: its journal, lock, queues, clocks, and the request to end.

    `compute` carries out parts of it, in any order and as often as asked. A process that does the
    whole job computes all parts at once; one of several computes those that it is given.
    """

    def __init__(
        self,
        job: Job,
        journal: Journal,
        lock: OutputLock,
        request: EndRequest | None = None,
        numbers: Iterable[int] | None = None,
    ) -> None:
        """``numbers`` are the parts whose progress is counted, all by default."""
        self.job, self.journal, self.lock = job, journal, lock
        self.request = request or EndRequest()
        self.parts = job.plan.parts
        extent = job.plan.extent if numbers is None else self.parts.extent(numbers)
        self.queues: Queues = Queues(job)
        self.watch: Watch = Watch(job, journal, lock, self.request, extent)
        self.masks: dict[int, FilledMask] = {}
        """Those of volumes, by their index, where values are masked."""
        self.seconds = 0.0
        """Seconds in which parts were computed."""

    @cached_property
    def levels(self) -> dict[int, FirstLevel]:
        """The first level below outputs, by the output's number, of which blocks are halved as they
        are written."""
        return first_levels(self.job)

    def open_outputs(self) -> None:
        """Create the outputs, or open those that exist for writing."""
        for sink in self.job.sinks:
            where = f"create {sink.name}"
            self.watch.retries.run(self.queues.flow, sink.name, where, sink.create)

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """A context in which values may be counted and parts computed: CUDA's flags are set, and
        telemetry is sampled."""
        config = self.job.config
        with cuda_flags_kept():
            set_cuda_flags(config.tf32)
            with (
                # Not `self.queues.lengths`: the next parts have queues of their own.
                self.watch.sampling(lambda: self.queues.lengths(), self.queues.limits),
                frozen_garbage(),
            ):
                yield

    def keep_summary(self, seconds: float | None = None) -> None:
        """Save what this process has done so far, for the summary of a job that several share. See
        `Watch.summary` for ``seconds``."""
        with forgoing("the summary of this process"):
            self.journal.save(
                self.journal.own_name(SUMMARY_FILE), asdict(self.watch.summary(seconds))
            )

    def renew_queues(self) -> Queues:
        """Queues for the next parts, as a flow ends with the last block or the first error. The
        arrays, and the net on each device, are kept."""
        self.watch.watchdog.forget()
        if self.queues.flow.failed:
            for level in self.levels.values():
                level.forget()
        self.queues = Queues(self.job, self.queues.equipment)
        return self.queues
