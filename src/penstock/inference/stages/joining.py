"""Joins units on the borders of parts from pieces that were spilled, and writes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from ...base import in_threads
from ...data import Claims
from ..opening.job import Job
from ..run_folder.journal import Journal
from ..run_folder.unit_log import Key
from ..tiling.geometry import Block, narrowed
from ..tiling.stitch import Unit
from .queues import Queues
from .spill import Index, Pieces
from .summary import Progress
from .watch import Watch
from .writing import Writing


class Joining:
    """The threads that join units: one reads pieces, the others write units."""

    def __init__(
        self,
        job: Job,
        journal: Journal,
        claims: Claims,
        queues: Queues,
        watch: Watch,
        pieces: Pieces,
    ) -> None:
        """The units are those of ``journal``'s run."""
        self.job, self.queues, self.watch, self.pieces = job, queues, watch, pieces
        self.writing = Writing(job, journal, claims, queues, watch, noted=self._remove)
        self.lacking: list[Key] = []
        """Units with a piece that is missing or damaged."""

    def run(self, keys: Iterable[Key], progress: Callable[[Progress], None] | None) -> None:
        """Join and write units, and wait for the threads. Raises the first error of any thread."""
        flow, config = self.queues.flow, self.job.config
        flow.spawn("join", partial(self._join, keys))
        for i in range(config.writer_workers):
            flow.spawn(f"write-{i}", partial(in_threads, config.threads, self.writing.run))

        def tick() -> None:
            self.watch.check(config.grace)
            if progress:
                progress(self.watch.progress())

        flow.join(tick)
        if progress:
            progress(self.watch.progress())

    def _join(self, keys: Iterable[Key]) -> None:
        for volume, *index in keys:
            if self.watch.request.why:
                break
            with self.watch.stage("join", f"block {tuple(index)} of {self.pieces.folder}"):
                unit = self.pieces.join(volume, tuple(index), self.writing.empty_unit)
            if unit is None:
                self.lacking.append((volume, *index))
            else:
                self.writing.put(unit)
        self.queues.whole.close()

    def _remove(self, unit: Unit) -> None:
        self.pieces.remove(unit.volume, unit.index)


def lacking_blocks(pieces: Pieces, keys: Iterable[Key]) -> Iterator[Block]:
    """The blocks whose pieces some units lack, narrowed to the patches that these units need. They
    come in visiting order and are numbered without gaps."""
    lacking: dict[tuple[int, tuple[int, ...]], tuple[Block, list[Index]]] = {}
    for volume, *index in keys:
        for block in pieces.blocks_of(volume, tuple(index)):
            if not pieces.there(block, tuple(index)):
                place = block.volume, block.patches.start
                lacking.setdefault(place, (block, []))[1].append(tuple(index))
    narrow = (narrowed(pieces.geometry, *lacking[place]) for place in sorted(lacking))
    return (replace(block, number=number) for number, block in enumerate(narrow))
