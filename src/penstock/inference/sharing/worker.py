"""One of several processes that share a job: it computes the parts that it is given, and joins the
units on their borders from spilled pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

from ...base import (
    PenstockError,
    UsageError,
    cuda_flags_kept,
    frozen_garbage,
    keep_traceback_in,
)
from ...data import ChunkCounter, Claims, Scaling, indices
from ...models import set_cuda_flags
from ..opening.job import Job
from ..run_folder.ending import EndRequest
from ..run_folder.journal import Journal
from ..run_folder.local import LocalFolder
from ..stages.joining import Joining, lacking_blocks
from ..stages.pipeline import Pipeline
from ..stages.queues import Queues
from ..stages.reading import BlockReader, wanted_blocks
from ..stages.spill import Pieces, Spilled
from ..stages.summary import Progress, Summary
from ..stages.watch import Watch
from ..tiling.geometry import Block
from ..tiling.parts import Parts

JOINS = 3
"""Times that pieces are written and read back before the part fails."""


class Worker:
    """Computes parts of a job that has begun, into outputs that other processes write as well."""

    def __init__(
        self,
        job: Job,
        journal: Journal,
        claims: Claims,
        request: EndRequest,
        numbers: Iterable[int] | None = None,
    ) -> None:
        """``numbers`` are the parts whose progress is counted, all by default."""
        self.job, self.journal, self.claims = job, journal, claims
        self.parts = parts_of(job)
        extent = None if numbers is None else self.parts.extent(numbers)
        self.watch = Watch(job, journal, Queues(job), request, extent)
        self.chunks = ChunkCounter(job.source, job.volumes, job.config.missing)
        self.pieces = pieces_of(job, journal)
        self.seconds = 0.0
        """Seconds in which parts were computed."""

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """A context in which parts may be computed: CUDA's flags are set, and telemetry is
        sampled."""
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
        """Compute parts and write their units, except those that are done.

        Args:
            numbers: The parts.
            scalings: The scaling of each volume; empty if each block has its own.
            progress: A function that is called with the progress meanwhile.

        Raises:
            StageError: A stage failed. The error names the stage and the block.
        """
        pieces, done = self.pieces, self.journal.done
        spilled = None if pieces is None else Spilled(pieces, done)
        parts = map(self.parts.__getitem__, numbers)
        with self._timed():
            self._run(wanted_blocks(self.job, done, parts, spilled), scalings, progress, spilled)

    def join(
        self,
        number: int,
        scalings: Mapping[int, Scaling],
        progress: Callable[[Progress], None] | None = None,
        *,
        whole: bool = True,
    ) -> None:
        """Write the units of a part that are joined from pieces, except those that are done.

        If a piece is missing, its block is computed here.

        Args:
            number: The part.
            scalings: As for `compute`.
            progress: As for `compute`.
            whole: False to compute nothing, and to leave out units that lack a piece.

        Raises:
            StageError: A stage failed. The error names the stage and the block.
            PenstockError: Pieces that were just written cannot be read.
        """
        pieces, part, done = self.pieces, self.parts[number], self.journal.done
        assert pieces is not None
        border = filter(pieces.is_border, indices(self.parts.units(part)))
        keys = [(part.volume, *index) for index in border]
        for volume, *index in filter(done.__contains__, keys):
            pieces.remove(volume, tuple(index))
        keys = [
            key for key in keys
            if key not in done and (whole or next(lacking_blocks(pieces, [key]), None) is None)
        ]  # fmt: skip
        with self._timed():
            for _ in range(JOINS if whole else 1):
                blocks = [*lacking_blocks(pieces, keys)] if whole else []
                if blocks:
                    self._run(iter(blocks), scalings, progress, Spilled(pieces, done, {*keys}))
                if self.watch.request.why or not keys:
                    return
                queues = self._fresh_queues()
                joining = Joining(self.job, self.journal, self.claims, queues, self.watch, pieces)
                joining.run(keys, progress)
                keys = joining.lacking
        if keys and whole and not self.watch.request.why:
            raise PenstockError(
                f"pieces that were spilled to {pieces.folder} cannot be read back; check the disk, "
                "or give --spill never"
            )

    def _fresh_queues(self) -> Queues:
        self.watch.watchdog.forget()
        self.watch.queues = Queues(self.job, self.watch.queues.equipment)
        return self.watch.queues

    def _run(
        self,
        blocks: Iterator[Block],
        scalings: Mapping[int, Scaling],
        progress: Callable[[Progress], None] | None,
        spilled: Spilled | None,
    ) -> None:
        """Compute blocks, and write the units that are complete."""
        queues = self._fresh_queues()
        reader = BlockReader(
            self.job,
            scalings,
            queues.equipment.read_pool,
            queues.flow,
            self.watch.retries,
            self.chunks,
        )
        Pipeline(
            self.job, self.journal, self.claims, queues, self.watch, reader, blocks, spilled
        ).run(progress)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        began = self.watch.probe.elapsed
        with keep_traceback_in(self.journal.here):
            yield
        self.seconds += self.watch.probe.elapsed - began

    @property
    def safe(self) -> int:
        """Number of units and pieces that this process has written and that survive a kill."""
        return self.journal.safe + (0 if self.pieces is None else self.pieces.written)

    def summary(self) -> Summary:
        """What this process has done so far, in the seconds that it computed."""
        lacking = (*self.claims.lacking, *self.journal.lacking)
        return self.watch.summary(self.chunks.count, lacking, self.seconds)


def pieces_of(job: Job, journal: Journal) -> Pieces | None:
    """The pieces of a job whose parts spill, in its run folder; None for any other job."""
    if not job.geometry.spills:
        return None
    assert isinstance(journal.folder, LocalFolder), "the client has checked it"
    maker = journal.makers[journal.maker]
    pieces = Pieces(journal.folder.path, journal.run, maker, job.geometry, job.heads)
    pieces.begin()
    return pieces


def parts_of(job: Job) -> Parts:
    """The parts of a job that several processes share."""
    if job.plan.parts is None:
        raise UsageError("the job is not cut into parts; give --workers")
    return job.plan.parts
