"""The threads of a running job: the stages, and what each hands to the next.

    source -> read -> normalise -> forward -> stitch -> write -> sink

The stages are below, in the order in which a block passes them. `_read` reads blocks and finds
their percentiles. A `Lane` normalises them, runs the net and puts patches back into blocks.
`_stitch` joins blocks into write units. `Writing` writes each unit once and notes it. Blocks are
stitched in visiting order, so the result is the same to the bit for any number of workers or
devices.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial

import torch

from ...base import in_threads
from ...data import Claims
from ..lanes.lane import Lane
from ..lanes.out_of_memory import batch_named
from ..opening.job import Job
from ..run_folder.journal import Journal
from ..tiling.geometry import Block
from ..tiling.stitch import Assembly, Unit
from .ceiling import MemoryCeiling
from .queues import Queues
from .reading import BlockReader
from .spill import Piece, Spilled
from .summary import Progress
from .watch import Watch
from .writing import Writing


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
        spilled: Spilled | None = None,
    ) -> None:
        """``blocks`` are those to compute, in visiting order and numbered without gaps. If their
        part spills, ``spilled`` decides which pieces they spill."""
        self.job, self.journal = job, journal
        self.queues, self.watch, self.probe, self.reader = queues, watch, watch.probe, reader
        self.blocks = blocks
        self.spilled = spilled
        pieces = None if spilled is None else spilled.pieces
        self.writing = Writing(job, journal, claims, queues, watch, pieces)
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
            self._spawn(f"write-{i}", self.writing.run)

        ceiling = MemoryCeiling(self.job.plan.memory.total, self.probe.clock)

        def tick() -> None:
            self.watch.check(self.job.config.grace)
            ceiling.keep()
            if progress:
                progress(self.watch.progress())

        self.queues.flow.join(tick)
        where = self.journal.named("done.log")
        flush = self.journal.flush
        self.watch.retries.run(self.queues.flow, "the run folder", f"write {where}", flush)
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
        """Join blocks, in order, into complete units."""
        assembly = Assembly(
            self.job.geometry,
            self.writing.empty_unit,
            [head.blended for head in self.job.heads],
            self.spilled.assembles
            if self.spilled is not None
            else lambda volume, index: (volume, *index) not in self.journal.done,
        )
        while True:
            with self.probe.waiting("stitch"):
                came = self.queues.computed.get()
            if came is None:
                break
            lane, computed = came
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
                self.watch.count_not_finite(computed.not_finite)
                arrays, spilled = computed.arrays(), self.spilled
                out: Iterator[Piece | Unit] = assembly.add(computed.block, arrays)
                if spilled is not None:
                    out = itertools.chain(spilled.pieces_of(computed.block, arrays), out)
                while True:
                    with self.probe.span("stitch", computed.block):
                        item = next(out, None)
                    if item is None:
                        break
                    self.writing.put(item)
                for buffer in computed.buffers:
                    self.queues.equipment.block_pool.give(buffer)
            self.queues.room[lane].release(self.job.plan.block_bytes(computed.block))
        self.queues.whole.close()
