"""The threads of a running job: the stages, and what each hands to the next.

    source -> read -> normalise -> forward -> stitch -> write -> sink

The stages stand below in the order in which a block meets them: `_read` brings blocks in and finds
their percentiles, a `Lane` normalises them, runs the net and puts patches back into blocks,
`_stitch` joins blocks into write units, and `_write` writes each unit once and notes that it did.
Restoring the visiting order before stitching is what makes the result the same to the bit whatever
the number of workers or devices.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray

from ..base import in_threads
from ..data import Claims
from .checks import check_of, fill_of
from .geometry import Block
from .job import Job
from .journal import Journal
from .lane import Lane
from .out_of_memory import batch_named
from .queues import Queues
from .reading import BlockReader
from .stitch import Assembly, Unit
from .summary import Progress
from .values import cast
from .watch import Watch


class Pipeline:
    """The threads of a running job: the stages, and what each hands to the next."""

    def __init__(
        self,
        job: Job,
        journal: Journal,
        claims: Claims,
        queues: Queues,
        watch: Watch,
        reader: BlockReader,
        blocks: Iterator[Block],
    ) -> None:
        """``blocks`` are those to compute, in visiting order and numbered without gaps."""
        self.job, self.journal, self.claims = job, journal, claims
        self.queues, self.watch, self.probe, self.reader = queues, watch, watch.probe, reader
        self.blocks = blocks
        self.unit_pool = queues.equipment.unit_pool
        self.ticket = threading.Lock()
        self.tickets = [threading.Lock() for _ in job.devices]
        self.places = [itertools.count() for _ in job.devices]

    def run(self, progress: Callable[[Progress], None] | None) -> None:
        """Start the threads and wait for them. Raises the first error of any."""
        for lane, device in enumerate(self.job.devices):
            for i in range(self.queues.readers):
                self._spawn(f"read-{lane}.{i}", partial(self._read, lane))
            self._spawn(f"forward-{lane}", partial(self._compute, lane, device))
        self._spawn("stitch", self._stitch)
        for i in range(self.job.config.writer_workers):
            self._spawn(f"write-{i}", self._write)

        def tick() -> None:
            self.watch.check(self.job.config.grace)
            if progress:
                progress(self.watch.progress())

        self.queues.flow.join(tick)
        where = self.journal.named("done.log")
        self.watch.retries.run(self.queues.flow, f"write {where}", self.journal.flush)
        if progress:
            progress(self.watch.progress())

    def _spawn(self, name: str, work: Callable[[], None]) -> None:
        """Start a thread in which torch uses as many threads as --threads says."""
        self.queues.flow.spawn(name, partial(in_threads, self.job.config.threads, work))

    def _read(self, lane: int) -> None:
        """Read blocks until none is left, and prepare each for its lane."""
        while True:
            # Room is taken while the ticket is held. If two readers could swap, the later block
            # might take the room that the earlier one waits for.
            with self.tickets[lane]:
                with self.ticket:
                    block = None if self.watch.request.why else next(self.blocks, None)
                if block is None:
                    break
                place = next(self.places[lane])
                with self.probe.waiting("read"):
                    self.queues.room[lane].acquire(self.job.plan.block_bytes(block))
            with self.watch.stage("read", f"{block} of {self.job.source.name}"):
                array = self.reader.fetch(block)
            with self.watch.stage("normalise", block):
                loaded = self.reader.prepare(block, array)
            self.queues.loaded[lane].put(loaded, place)
        self.queues.loaded[lane].close()

    def _compute(self, number: int, device: torch.device) -> None:
        """Run one lane from its first block to its last."""
        halves = self.job.config.oom == "halve"
        with self.watch.stage("forward", device, timed=False), batch_named(self.job, device):
            if device.type == "cuda":
                torch.cuda.set_device(device)
            lane = Lane(
                device,
                self.job,
                self.probe,
                self.queues.equipment,
                partial(self._before_batch, number),
                self.watch.halvings.note if halves else None,
            )
        block: Block | None = None
        channel, coming = self.queues.loaded[number], None
        with lane.forward.autocast():
            while True:
                loaded, coming = coming, None
                if loaded is None:
                    with self.probe.waiting("forward"):
                        loaded = channel.get()
                block = loaded.block if loaded is not None else block
                with (
                    self.watch.stage("forward", block, timed=False),
                    batch_named(self.job, device),
                ):
                    if loaded is not None:
                        lane.transfers.upload(loaded)
                        if channel.ready and (coming := channel.get()) is not None:
                            lane.transfers.upload(coming)  # while the net works on this one
                    done = lane.push(loaded) if loaded is not None else lane.flush()
                    for finished in done:
                        self.queues.computed.put((number, finished), finished.block.number)
                if loaded is None:
                    break
        self.queues.computed.close()

    def _before_batch(self, number: int, patches: int) -> None:
        """Count the patches of a lane's next batch. Stops the lane if the job has failed."""
        self.queues.flow.check()
        self.watch.watchdog.progressed()
        self.watch.patches_done[number] += patches

    def _stitch(self) -> None:
        """Join blocks, in order, into whole units."""
        assembly = Assembly(
            self.job.geometry,
            self._empty_unit,
            [head.blended for head in self.job.heads],
            lambda volume, index: (volume, *index) not in self.journal.done,
        )
        while True:
            with self.probe.waiting("stitch"):
                item = self.queues.computed.get()
            if item is None:
                break
            lane, computed = item
            with (
                self.watch.stage("forward", computed.block, timed=False),
                self.probe.waiting("stitch"),
            ):
                computed.wait()
            with self.watch.stage("stitch", computed.block, timed=False):
                for number, head in enumerate(self.job.heads):
                    if not head.blended:
                        count, size = computed.clipped[number], computed.outputs[number].numel()
                        self.watch.count_clipped(number, count, size)
                units = assembly.add(computed.block, computed.arrays())
                while True:
                    with self.probe.span("stitch", computed.block):
                        unit = next(units, None)
                    if unit is None:
                        break
                    with self.probe.waiting("stitch"):
                        self.queues.write_room.acquire(self._unit_bytes(unit))
                    self.queues.whole.put(unit)
                for buffer in computed.buffers:
                    self.queues.equipment.block_pool.give(buffer)
            self.queues.room[lane].release(self.job.plan.block_bytes(computed.block))
        self.queues.whole.close()

    def _empty_unit(self, head: int, shape: tuple[int, ...]) -> NDArray[Any]:
        plan = self.job.heads[head]
        array = self.unit_pool.take((plan.channels, *shape), plan.kept)
        if plan.blended:
            array.fill(0)
        return array

    def _unit_bytes(self, unit: Unit) -> int:
        pairs = zip(unit.arrays, self.job.sinks, strict=True)
        return sum(array.size * sink.dtype.itemsize for array, sink in pairs)

    def _write(self) -> None:
        """Write whole units, and note each one once it is written."""
        while True:
            with self.probe.waiting("write"):
                unit = self.queues.whole.get()
            if unit is None:
                return
            checks = [self._write_to(output, unit) for output in range(len(self.job.outputs))]
            where = f"block {unit.index} {unit.box}, noting it in {self.journal.named('done.log')}"
            with self.watch.stage("write", where, timed=False), self.probe.span("note", unit.index):
                self.journal.note((unit.volume, *unit.index), unit.box.size, checks)
            self.queues.write_room.release(self._unit_bytes(unit))

    def _write_to(self, number: int, unit: Unit) -> str:
        """Write a unit to one output. Returns the check of its values, taken before the write:
        what a store or a broken memory does to them later will show."""
        output, array = self.job.outputs[number], unit.arrays[number]
        where = f"block {unit.index} {unit.box} of {output.sink.name}"
        if self.job.heads[number].blended:
            with self.watch.stage("write", where):
                sums, array = (
                    array,
                    self.unit_pool.take(array.shape, output.sink.dtype),
                )
                self.watch.count_clipped(number, cast(sums, array), array.size)
                self.unit_pool.give(sums)
        with self.watch.stage("checksum", where):
            check = check_of(array, fill_of(output.sink))

        def write() -> None:
            with self.claims.writing():
                output.sink.write(output.box(unit.volume, unit.box), array[None])

        with self.watch.stage("write", where):
            self.watch.retries.run(self.queues.flow, f"write {where}", write)
            self.unit_pool.give(array)
        return check
