"""The clocks and counters of a running job, and the progress and summary made of them."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

from ..base import (
    StageError,
    Stopped,
    UsageError,
    begin_output,
    describe,
    end_output,
    usable_cores,
    writing_output,
)
from ..data import ChunkCount
from ..instruments import Probe, Sampler, bottleneck, export_reference
from .heads import Clipped
from .job import Job
from .journal import Journal
from .queues import Queues
from .summary import Progress, Summary

_STAGES = ("statistics", "read", "normalise", "forward", "stitch", "write")


class Watch:
    """Times the stages of a job, samples its queues, and counts patches and clipped values."""

    def __init__(self, job: Job, journal: Journal, queues: Queues) -> None:
        self.job, self.journal, self.queues = job, journal, queues
        self.probe = Probe(job.config.trace)
        self.patches_done = [0] * len(job.devices)
        """Patches that each lane has run."""
        self._clipped = [0] * len(job.heads)
        self._values = [0] * len(job.heads)
        self._counting = threading.Lock()
        self._sampler: Sampler | None = None
        self._cpu_seconds = 0.0

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Sample queues and machine while the job runs, and write trace and metrics at its end."""
        config = self.job.config
        rows = self.journal.path("metrics.jsonl")
        if rows is None and config.metrics_json is not None:
            rows = config.metrics_json.with_suffix(".jsonl")
        cpu = os.times()
        with contextlib.ExitStack() as stack:
            stack.callback(self.probe.close)
            if rows is not None:
                self._sampler = Sampler(
                    rows, config.metrics_interval, self._gauges, self.queues.limits()
                )
                if config.metrics_json is not None:
                    if self.journal.folder is None:
                        begin_output(rows)
                        stack.callback(end_output, rows)
                    stack.callback(_export, rows, config.metrics_json, config.replace)
                stack.enter_context(self._sampler)
            yield
        now = os.times()
        self._cpu_seconds = now.user + now.system - cpu.user - cpu.system

    def _gauges(self) -> dict[str, float]:
        return {**self.queues.lengths(), "blocks_written": self.journal.written}

    @contextlib.contextmanager
    def stage(self, name: str, where: object, timed: bool = True) -> Iterator[None]:
        """Time a stage, and say which stage and block an error came from."""
        try:
            with self.probe.span(name, where) if timed else contextlib.nullcontext():
                yield
        except (Stopped, StageError):
            raise
        except Exception as error:
            raise StageError(name, str(where), error) from error

    def count_clipped(self, head: int, clipped: int, values: int) -> None:
        """Add values of a head, and how many of them were clipped."""
        with self._counting:
            self._clipped[head] += clipped
            self._values[head] += values

    def progress(self) -> Progress:
        plan, seconds = self.job.plan, self.probe.elapsed
        units = plan.num_units - self.journal.skipped
        # A resumed run learns which patches it can leave out only when it comes to them.
        patches = round(plan.num_patches * units / plan.num_units)
        done = min(patches, sum(self.patches_done))
        share = done / plan.num_patches
        return Progress(
            patches if self.journal.written == units else done,
            patches,
            self.journal.written,
            units,
            seconds,
            share * plan.input_bytes / seconds / 1e6,
        )

    def summary(self, chunks: ChunkCount | None, unlocked: tuple[str, ...]) -> Summary:
        """What the job did; see `Summary` for ``chunks`` and ``unlocked``."""
        plan, seconds, journal = self.job.plan, self.probe.elapsed, self.journal
        totals = self.probe.totals()
        stages = {name: totals[name] for name in _STAGES if name in totals}
        clipped = zip(self.job.heads, self.job.sinks, self._clipped, self._values, strict=True)
        return Summary(
            seconds=seconds,
            voxels=journal.voxels,
            input_bytes=round(plan.input_bytes * journal.voxels / plan.voxels),
            units_written=journal.written,
            units_skipped=journal.skipped,
            units_planned=plan.num_units,
            stages=stages,
            bound_by=bottleneck(stages, seconds, self._cpu_seconds, usable_cores()),
            cpu_seconds=self._cpu_seconds,
            peak_rss=self._sampler.peak_rss if self._sampler else None,
            planned_peak=plan.memory.total,
            clipped=tuple(
                Clipped(head.name, sink.name, sink.dtype.name, count, values)
                for head, sink, count, values in clipped
            ),
            chunks=chunks,
            unlocked=unlocked,
        )


def _export(rows: Path, metrics: Path, replace: bool) -> None:
    with forgoing(f"--metrics-json {metrics}"), writing_output(metrics, replace=replace) as draft:
        export_reference(rows, draft)


@contextlib.contextmanager
def forgoing(what: str) -> Iterator[None]:
    """Warn if a record cannot be written. The job goes on."""
    try:
        yield
    except (OSError, UsageError) as error:
        why = getattr(error, "strerror", None) or describe(error)
        warnings.warn(f"{what}: {why}", RuntimeWarning, stacklevel=4)
