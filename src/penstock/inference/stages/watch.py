"""The clocks and counters of a running job, and the progress and summary made from them."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from ...base import (
    PenstockError,
    StageError,
    Stopped,
    begin_output,
    describe,
    end_output,
    usable_cores,
    writing_output,
)
from ...data import ChunkCount, requests_repeated
from ...instruments import Probe, Sampler, StageTotals, bottleneck, export_reference
from ..opening.heads import Clipped
from ..opening.job import Job
from ..run_folder.ending import EndRequest
from ..run_folder.journal import Journal
from ..run_folder.names import METRICS_FILE, RETRIES_FILE, STACKS_FILE
from ..tiling.parts import Extent
from .retries import Retries, saying_full
from .summary import LeftOut, Progress, Summary
from .watchdog import Watchdog

_STAGES = ("statistics", "read", "normalise", "upload", "forward", "download", "stitch",
           "checksum", "write", "note")  # fmt: skip


class Watch:
    """Times the stages of a job, samples its queues, and counts patches and values."""

    def __init__(self, job: Job, journal: Journal, request: EndRequest, extent: Extent) -> None:
        """``extent`` is the share of the job that this process does."""
        self.job, self.journal, self.request, self.extent = job, journal, request, extent
        self.probe = Probe(job.config.trace)
        stacks, rows = journal.own_rows(STACKS_FILE), journal.own_rows(RETRIES_FILE)
        self.watchdog = Watchdog(job.config.stall_timeout, stacks, self.probe.clock)
        self.retries = Retries(
            job.config.retry_for, rows, self.probe.clock, self.watchdog.progressed
        )
        self._requests_before = requests_repeated()
        self.patches_done = [0] * len(job.devices)
        """Number of patches that each lane has run."""
        self.patches_left_out = [0] * len(job.devices)
        """Number of patches of each lane in which nothing was sample."""
        self._filled = 0
        self._clipped = [0] * len(job.heads)
        self._not_finite = 0
        self._values = [0] * len(job.heads)
        self._counting = threading.Lock()
        self._sampler: Sampler | None = None
        self._cpu_before: float | None = None
        self._cpu_seconds = 0.0

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
        self._cpu_before = _cpu_seconds()
        with contextlib.ExitStack() as stack:
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
        self._cpu_seconds, self._cpu_before = self.cpu_seconds, None

    @property
    def cpu_seconds(self) -> float:
        """Seconds of processor time of this process since sampling began."""
        before = self._cpu_before
        return self._cpu_seconds if before is None else _cpu_seconds() - before

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
        except Exception as error:
            raise StageError(name, str(where), error) from error

    def check(self, grace_s: float) -> None:
        """Raise if a stage hangs, or if the job was asked to end more than ``grace_s`` ago."""
        self.watchdog.check()
        self.request.check(grace_s)

    def count_clipped(self, head: int, clipped: int, values: int) -> None:
        """Add values of a head, and how many of them were clipped."""
        with self._counting:
            self._clipped[head] += clipped
            self._values[head] += values

    def count_not_finite(self, voxels: int) -> None:
        """Add voxels whose input is not finite."""
        with self._counting:
            self._not_finite += voxels

    def count_left_out(self, lane: int, patches: int) -> None:
        """Add patches that are not computed, as nothing in them is sample."""
        with self._counting:
            self.patches_left_out[lane] += patches

    def count_filled(self, voxels: int) -> None:
        """Add voxels that were given the fill value, as they are no sample."""
        with self._counting:
            self._filled += voxels

    def progress(self) -> Progress:
        extent, seconds = self.extent, self.probe.elapsed
        blocks = extent.blocks - self.journal.skipped
        # A resumed run learns which patches it can leave out only when it comes to them.
        patches = round(extent.patches * blocks / max(1, extent.blocks))
        done = min(patches, sum(self.patches_done) + sum(self.patches_left_out))
        share = done / self.job.plan.num_patches
        return Progress(
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
        computed, left_out = sum(self.patches_done), sum(self.patches_left_out)
        busy = stages["forward"].busy if "forward" in stages else 0.0
        saved = left_out * busy / computed / len(self.job.devices) if computed else None
        return LeftOut(computed, left_out, self._filled, saved)

    def summary(
        self,
        chunks: ChunkCount | None,
        unlocked: tuple[str, ...],
        seconds: float | None = None,
    ) -> Summary:
        """What the job did in ``seconds``, by default those since it began. See `Summary` for
        ``chunks`` and ``unlocked``."""
        plan, journal = self.job.plan, self.journal
        seconds = self.probe.elapsed if seconds is None else seconds
        totals = self.probe.totals()
        stages = {name: totals[name] for name in _STAGES if name in totals}
        clipped = zip(self.job.heads, self.job.sinks, self._clipped, self._values, strict=True)
        return Summary(
            seconds=seconds,
            voxels=journal.voxels,
            input_bytes=round(plan.input_bytes * journal.voxels / plan.voxels),
            blocks_written=journal.written,
            blocks_skipped=journal.skipped,
            blocks_planned=self.extent.blocks,
            stages=stages,
            bound_by=bottleneck(stages, seconds, self.cpu_seconds, usable_cores()),
            cpu_seconds=self.cpu_seconds,
            peak_rss=self._sampler.peak_rss if self._sampler else None,
            planned_peak=plan.memory.total,
            clipped=tuple(
                Clipped(head.name, sink.name, sink.dtype.name, count, values)
                for head, sink, count, values in clipped
            ),
            not_finite=self._not_finite,
            left_out=self._left_out(stages),
            chunks=chunks,
            unlocked=unlocked,
            retries=self.retries.count,
            retry_seconds=self.retries.seconds,
            requests_repeated=requests_repeated() - self._requests_before,
            values=self.job.values.line,
            seams=plan.facts.seams,
        )


def _cpu_seconds() -> float:
    now = os.times()
    return now.user + now.system


def _export(rows: Path, metrics: Path, replace: bool) -> None:
    with forgoing(f"--metrics-json {metrics}"), writing_output(metrics, replace=replace) as draft:
        export_reference(rows, draft)


@contextlib.contextmanager
def forgoing(what: str) -> Iterator[None]:
    """Warn if a record cannot be written. The job goes on."""
    try:
        yield
    except (OSError, PenstockError) as error:
        why = getattr(error, "strerror", None) or describe(error)
        warnings.warn(f"{what}: {why}", RuntimeWarning, stacklevel=4)
