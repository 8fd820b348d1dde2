"""Write complete units: cast them, take their checksums, write each once, and note it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from ...data import Claims
from ..lanes.values import cast
from ..opening.job import Job
from ..run_folder.checks import check_of, fill_of
from ..run_folder.journal import Journal
from ..tiling.stitch import Unit
from .queues import Queues
from .spill import Piece, Pieces
from .watch import Watch


class Writing:
    """What the writing threads of a job do."""

    def __init__(
        self, job: Job, journal: Journal, claims: Claims, queues: Queues, watch: Watch,
        pieces: Pieces | None = None, noted: Callable[[Unit], None] = lambda unit: None,
    ) -> None:  # fmt: skip
        """Prepare.

        Args:
            job: The job.
            journal: Where units are noted once they are written.
            claims: The locks of the outputs. Nothing is written if this run has lost one.
            queues: The queue of complete units, and its room.
            watch: Times the stages.
            pieces: Where pieces are spilled, in a job that spills.
            noted: A function that is called with each unit once it is noted.
        """
        self.job, self.journal, self.claims, self.queues = job, journal, claims, queues
        self.watch, self.pieces, self.noted = watch, pieces, noted
        self.pool = queues.equipment.unit_pool

    def empty_unit(self, head: int, shape: tuple[int, ...]) -> NDArray[Any]:
        """An array for a unit, which `Assembly` fills."""
        plan = self.job.heads[head]
        array = self.pool.take((plan.channels, *shape), plan.kept)
        if plan.blended:
            array.fill(0)
        return array

    def put(self, item: Unit | Piece) -> None:
        """Hand a unit, or a piece of one, to the threads that write, once there is room for it."""
        with self.watch.probe.waiting("stitch"):
            self.queues.write_room.acquire(self._bytes(item))
        self.queues.whole.put(item)

    def run(self) -> None:
        """The work of a thread: write complete units, and note each one once it is written."""
        while True:
            with self.watch.probe.waiting("write"):
                item = self.queues.whole.get()
            if item is None:
                return
            if isinstance(item, Piece):
                self._spill(item)
            else:
                self._write(item)
            self.queues.write_room.release(self._bytes(item))

    def _bytes(self, item: Unit | Piece) -> int:
        """Bytes that an item takes. A piece counts like its unit, which is never smaller."""
        box = item.box if isinstance(item, Unit) else self.job.geometry.units.cell(item.index)
        return box.size * self.job.plan.facts.out_bytes

    def _spill(self, piece: Piece) -> None:
        pieces = self.pieces
        assert pieces is not None
        where = f"{piece}, to {pieces.folder}"
        with self.watch.stage("spill", where):
            self.watch.retries.run(
                self.queues.flow, "spilled", f"write {where}", lambda: pieces.write(piece)
            )

    def _write(self, unit: Unit) -> None:
        checks = [self._write_to(output, unit) for output in range(len(self.job.outputs))]
        where = f"block {unit.index} {unit.box}, noting it in {self.journal.named('done.log')}"
        note = self.watch.probe.span("note", unit.index)
        with self.watch.stage("write", where, timed=False), note:
            self.journal.note((unit.volume, *unit.index), unit.box.size, checks)
            self.noted(unit)

    def _write_to(self, number: int, unit: Unit) -> str:
        """Write a unit to one output. Returns the check of its values. It is taken before the
        write, so that damage by the store or by broken memory can be seen later."""
        output, array = self.job.outputs[number], unit.arrays[number]
        where = f"block {unit.index} {unit.box} of {output.sink.name}"
        if self.job.heads[number].blended:
            with self.watch.stage("write", where):
                sums, array = array, self.pool.take(array.shape, output.sink.dtype)
                self.watch.count_clipped(number, cast(sums, array), array.size)
                self.pool.give(sums)
        with self.watch.stage("checksum", where):
            check = check_of(array, fill_of(output.sink))

        def write() -> None:
            with self.claims.writing():
                output.sink.write(output.box(unit.volume, unit.box), array[None])

        with self.watch.stage("write", where):
            self.watch.retries.run(self.queues.flow, output.sink.name, f"write {where}", write)
            self.pool.give(array)
        return check
