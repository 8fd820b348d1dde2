"""The clocks and counters of a running job, the progress and summary made from them, and a watch
over each thread: a job without progress ends instead of hanging."""

from __future__ import annotations

import contextlib
import faulthandler
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ...base import (
    Incomplete,
    InferConfig,
    StageError,
    Stopped,
    begin_output,
    end_output,
    format_seconds,
    usable_cores,
    writing_output,
)
from ...data import ChunkCounter, OutputLock, requests_repeated
from ...instruments import Clock, Probe, Sampler, StageTotals, bottleneck, export_reference
from ..opening.heads import Clipped
from ..opening.job import Job
from ..run_folder.journal import EndRequest, Journal
from ..run_folder.names import METRICS_FILE, RETRIES_FILE, STACKS_FILE
from ..tiling.parts import Extent
from .retries import Retries, forgoing, saying_full
from .summary import LeftOut, Progress, Summary

_STAGES = ("statistics", "read", "normalise", "upload", "forward", "download", "stitch",
           "checksum", "write", "note")  # fmt: skip


class _Work(NamedTuple):
    stage: str
    where: object
    since: float
    """Time of its last progress, in seconds."""


class Watchdog:
    """Records what each thread works on, and when that last made progress."""

    def __init__(self, limit_s: float, stacks: Path | None, clock: Clock) -> None:
        """``limit_s`` is how long a piece of work may go without progress; 0 means no limit. The
        stacks of all threads are written to the file ``stacks``."""
        self.limit_s, self.stacks, self.clock = limit_s, stacks, clock
        self.stalled = False
        """Whether a piece of work has made no progress for too long. Its thread hangs for good."""
        self._works: dict[int, _Work] = {}

    def forget(self) -> None:
        """Stop watching the work that has begun, such as that of a thread that an earlier part of
        the job left behind."""
        self._works = {}

    @contextlib.contextmanager
    def working(self, stage: str, where: object) -> Iterator[None]:
        """Watch a piece of work of this thread, instead of the larger one that it is part of."""
        # Without a lock, as each thread has an entry of its own. `forget` may take the dict away
        # meanwhile, so it is held here.
        thread, works = threading.get_ident(), self._works
        outer = works.get(thread)
        works[thread] = _Work(stage, where, self.clock())
        try:
            yield
        finally:
            if outer is None:
                del works[thread]
            else:
                works[thread] = outer._replace(since=self.clock())

    def progressed(self) -> None:
        """Note that the work of this thread goes on."""
        thread, works = threading.get_ident(), self._works
        if (work := works.get(thread)) is not None:
            works[thread] = work._replace(since=self.clock())

    def check(self) -> None:
        """Raise `StageError` if a piece of work has made no progress for too long."""
        if not self.limit_s:
            return
        # Stitching waits only for other stages, which are watched.
        works = [work for work in list(self._works.values()) if work.stage != "stitch"]
        oldest = min(works, key=lambda work: work.since, default=None)
        if oldest is None or self.clock() - oldest.since <= self.limit_s:
            return
        self.stalled = True
        cause = Incomplete(
            f"no progress for {format_seconds(self.limit_s)} (--stall-timeout)"
            f"{self._dumped()}; run again with --resume"
        )
        raise StageError(oldest.stage, str(oldest.where), cause)

    def _dumped(self) -> str:
        """Write the stacks, and return the words that say where."""
        if self.stacks is None:
            return ""
        try:
            with self.stacks.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            return f", and the stacks cannot be written to {self.stacks}: {error.strerror}"
        return f", {self.stacks} has the stack of each thread"


class Watch:
    """Times the stages of a job, samples its queues, and counts patches and values."""

    def __init__(
        self, job: Job, journal: Journal, lock: OutputLock, request: EndRequest, extent: Extent
    ) -> None:
        """``extent`` is the share of the job that this process does."""
        self.job, self.journal, self.lock = job, journal, lock
        self.request, self.extent = request, extent
        self.chunks = ChunkCounter(job.source, job.volumes, job.config.missing)
        self.probe = Probe(job.config.trace)
        stacks, rows = journal.own_rows(STACKS_FILE), journal.own_rows(RETRIES_FILE)
        self.watchdog = Watchdog(job.config.stall_timeout, stacks, self.probe.clock)
        self.retries = Retries(
            job.config.retry_for, rows, self.probe.clock, self.watchdog.progressed
        )
        self._requests_before = requests_repeated()
        self._counts = Counter[str]()
        self._clipped = [(0, 0)] * len(job.heads)
        """Of each head, the number of values that were clipped, and of all."""
        self._counting = threading.Lock()
        self._sampler: Sampler | None = None
        self._cpu_before = time.process_time()

    @contextlib.contextmanager
    def sampling(
        self, lengths: Callable[[], dict[str, float]], limits: dict[str, int]
    ) -> Iterator[None]:
        """Sample queues and machine while the job runs, and write trace and metrics at its end.

        ``lengths`` says how many items wait in each queue, ``limits`` how many fit into it.
        """
        config = self.job.config
        rows = self.journal.own_rows(METRICS_FILE)
        if rows is None and config.metrics_json is not None:
            rows = config.metrics_json.with_suffix(".jsonl")
        with contextlib.ExitStack() as stack:
            # What is entered last ends first: rows end, are exported, and then count as whole.
            stack.callback(self.probe.close)
            if rows is not None:
                self._sampler = Sampler(
                    rows, config.metrics_interval, partial(self._gauges, lengths), limits
                )
                if config.metrics_json is not None:
                    if self.journal.folder is None:
                        begin_output(rows)
                        stack.callback(end_output, rows)
                    stack.callback(_export, rows, config.metrics_json, config.overwrite)
                stack.enter_context(self._sampler)
            yield

    def _gauges(self, lengths: Callable[[], dict[str, float]]) -> dict[str, float]:
        return {
            **lengths(),
            "blocks_written": self.journal.written,
            "retries": self.retries.count,
            "retry_seconds": self.retries.seconds,
            "failing_seconds": self.retries.failing_s,
            "retry_for": self.retries.limit_s,
        }

    @contextlib.contextmanager
    def stage(self, name: str, where: object, timed: bool = True) -> Iterator[None]:
        """Time a stage, and say which stage and item an error came from."""
        span = self.probe.span(name, where) if timed else contextlib.nullcontext()
        try:
            with self.watchdog.working(name, where), span, saying_full():
                yield
        except (Stopped, StageError):
            raise
        except (Exception, SystemExit) as error:  # a network of one's own may exit
            raise StageError(name, str(where), error) from error

    def check(self, grace_s: float) -> None:
        """Raise if a stage hangs, or if the job was asked to end more than ``grace_s`` ago."""
        self.watchdog.check()
        self.request.check(grace_s)

    def count(self, **more: int) -> None:
        """Count patches that are ``done``, and ``left_out`` as nothing in them is sample; voxels
        whose input is ``not_finite``, and that are ``filled``, as they are no sample."""
        with self._counting:
            self._counts.update(more)

    def count_clipped(self, head: int, clipped: int, values: int) -> None:
        """Count values of a head, and how many of them were clipped."""
        with self._counting:
            before = self._clipped[head]
            self._clipped[head] = before[0] + clipped, before[1] + values

    def progress(self) -> Progress:
        extent, seconds = self.extent, self.probe.elapsed
        blocks = extent.blocks - self.journal.skipped
        # A resumed run learns which patches it can leave out only when it comes to them.
        patches = round(extent.patches * blocks / max(1, extent.blocks))
        done = min(patches, self._counts["done"] + self._counts["left_out"])
        share = done / self.job.plan.num_patches
        return Progress(
            # At the end the estimate may differ from what was counted.
            patches if self.journal.written == blocks else done,
            patches,
            self.journal.written,
            blocks,
            seconds,
            share * self.job.plan.input_bytes / seconds / 1e6,
        )

    def _left_out(self, stages: Mapping[str, StageTotals]) -> LeftOut | None:
        if self.job.sample is None:
            return None
        computed, left_out = self._counts["done"], self._counts["left_out"]
        busy = stages["forward"].busy if "forward" in stages else 0.0
        saved = left_out * busy / computed / len(self.job.devices) if computed else None
        return LeftOut(computed, left_out, self._counts["filled"], saved)

    def check_written(self, again: str) -> None:
        """Raise `Incomplete` unless every block of this process's parts is written. ``again`` says
        how to go on."""
        written, blocks = self.journal.written + self.journal.skipped, self.extent.blocks
        if written != blocks:
            why = f" when {self.request.why} ended the job" if self.request.why else ""
            raise Incomplete(f"{written:,} of {blocks:,} blocks were written{why}; {again}")

    def summary(self, seconds: float | None = None) -> Summary:
        """What this process has done so far, in ``seconds``, by default those since it began."""
        plan, journal = self.job.plan, self.journal
        seconds = self.probe.elapsed if seconds is None else seconds
        totals, cpu_seconds = self.probe.totals(), time.process_time() - self._cpu_before
        stages = {name: totals[name] for name in _STAGES if name in totals}
        clipped = zip(self.job.heads, self.job.sinks, self._clipped, strict=True)
        return Summary(
            seconds=seconds,
            voxels=journal.voxels,
            input_bytes=round(plan.input_bytes * journal.voxels / plan.voxels),
            blocks_written=journal.written,
            blocks_skipped=journal.skipped,
            blocks_planned=self.extent.blocks,
            stages=stages,
            bound_by=bottleneck(stages, seconds, cpu_seconds, usable_cores()),
            cpu_seconds=cpu_seconds,
            peak_rss=self._sampler.peak_rss if self._sampler else None,
            planned_peak=plan.memory.total,
            clipped=tuple(
                Clipped(head.name, sink.name, sink.dtype.name, *counts)
                for head, sink, counts in clipped
            ),
            not_finite=self._counts["not_finite"],
            left_out=self._left_out(stages),
            chunks=self.chunks.count,
            unlocked=(*self.lock.lacking, *journal.lacking),
            retries=self.retries.count,
            retry_seconds=self.retries.seconds,
            requests_repeated=requests_repeated() - self._requests_before,
            values=self.job.values.line,
            seams=plan.facts.seams,
        )


def with_own_files(config: InferConfig, name: str) -> InferConfig:
    """The settings of one of several processes that share a job: the names of its trace and metrics
    end with its ``name``, as no two can write one file."""
    files = {"trace": config.trace, "metrics_json": config.metrics_json}
    return config.model_copy(
        update={
            flag: file and file.with_stem(f"{file.stem}-{name}") for flag, file in files.items()
        }
    )


def _export(rows: Path, metrics: Path, replace: bool) -> None:
    with forgoing(f"--metrics-json {metrics}"), writing_output(metrics, replace=replace) as draft:
        export_reference(rows, draft)
