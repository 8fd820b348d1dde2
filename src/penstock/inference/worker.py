"""One process of several that share a job: it computes the parts that it is given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from ..base import UsageError, cuda_flags_kept, frozen_garbage, keep_traceback_in
from ..data import ChunkCounter, Claims, Scaling
from ..models import set_cuda_flags
from .ending import EndRequest
from .job import Job
from .journal import Journal
from .parts import Parts
from .pipeline import Pipeline
from .queues import Queues
from .reading import BlockReader, wanted_blocks
from .summary import Progress, Summary
from .watch import Watch


class Worker:
    """Computes parts of a job that was begun, into outputs that others write as well."""

    def __init__(
        self,
        job: Job,
        journal: Journal,
        claims: Claims,
        request: EndRequest,
        numbers: Iterable[int] | None = None,
    ) -> None:
        """``numbers`` are the parts that progress is counted for, all by default."""
        self.job, self.journal, self.claims = job, journal, claims
        self.parts = parts_of(job)
        extent = None if numbers is None else self.parts.extent(numbers)
        self.watch = Watch(job, journal, Queues(job), request, extent)
        self.chunks = ChunkCounter(job.source, job.volumes, job.config.missing)
        self.seconds = 0.0
        """Seconds in which parts were computed."""

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Within it parts may be computed: flags of CUDA are set, and telemetry is sampled."""
        config = self.job.config
        with cuda_flags_kept():
            set_cuda_flags(config.tf32, config.cudnn_benchmark)
            with self.watch.sampling(), frozen_garbage():
                yield

    def compute(
        self,
        numbers: Iterable[int],
        scalings: Mapping[int, Scaling],
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        """Compute parts and write their units, without those that are done.

        Args:
            numbers: The parts.
            scalings: The scaling of each volume; empty if each block has its own.
            progress: A function that is called with the progress meanwhile.

        Raises:
            StageError: A stage failed. The error names the stage and the block.
        """
        queues = self.watch.queues = Queues(self.job, self.watch.queues.equipment)
        reader = BlockReader(
            self.job,
            scalings,
            queues.equipment.read_pool,
            queues.flow,
            self.watch.retries,
            self.chunks,
        )
        parts = map(self.parts.__getitem__, numbers)
        blocks = wanted_blocks(self.job, self.journal.done, parts)
        pipeline = Pipeline(self.job, self.journal, self.claims, queues, self.watch, reader, blocks)
        began = self.watch.probe.elapsed
        with keep_traceback_in(self.journal.here):
            pipeline.run(progress)
        self.seconds += self.watch.probe.elapsed - began

    def summary(self) -> Summary:
        """What this process has done so far, in the seconds that it computed."""
        lacking = (*self.claims.lacking, *self.journal.lacking)
        return self.watch.summary(self.chunks.count, lacking, self.seconds)


def parts_of(job: Job) -> Parts:
    """The parts of a job that several processes share."""
    if job.plan.parts is None:
        raise UsageError("the job is not cut into parts; give --workers")
    return job.plan.parts
