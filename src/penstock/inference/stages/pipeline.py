"""The threads of a running job: the stages, and what each hands to the next.

    source -> read -> normalise -> forward -> stitch -> write -> sink

The stages are below, in the order in which a brick passes them. `_read` reads bricks and finds
their percentiles. A `Lane` normalises them, runs the net and puts patches back into bricks.
`_stitch` joins bricks into blocks. `Writing` writes each block once and notes it. Bricks are
stitched in visiting order, so the result is the same to the bit for any number of workers or
devices.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch

from ...base import keep_traceback_in, torch_threads, trim_heap
from ...data import Scaling
from ...instruments import Clock
from ..lanes.lane import Lane, batch_named
from ..planning.memory import resident_bytes
from ..run_folder.names import LOG_FILE
from ..tiling.geometry import Brick
from ..tiling.stitch import Assembly
from .reading import BrickReader, wanted_bricks
from .run import Run
from .summary import Progress
from .writing import Writing

_STEP_BYTES = 16 * 2**20
"""Bytes by which a process may come nearer to its plan before its heap is trimmed (again)."""
_LOOK_S = 0.1
"""Least seconds between two looks: a small job has a hundred changes in that time, and each look
opens two files of the kernel."""
_EVERY_S = 10.0
"""Least seconds between two trims, as the next forward must get its memory back page by page. A
UNet that was trimmed without this pause spent 39 s of 217 s in the kernel."""


def compute(
    run: Run,
    numbers: Iterable[int],
    scalings: Mapping[int, tuple[Scaling, ...]],
    progress: Callable[[Progress], None] | None = None,
) -> None:
    """Compute parts of a run and write their blocks, except those that are done.

    Args:
        run: The run.
        numbers: The parts.
        scalings: The scaling of each volume; empty if each block has its own.
        progress: A function that is called with the progress meanwhile.

    Raises:
        StageError: A stage failed. The error names the stage and the brick.
    """
    began = run.watch.probe.elapsed
    run.renew_queues()
    bricks = wanted_bricks(run.job, run.journal.done, numbers)
    # Here too, as on a worker no error of a share passes the context that `entered` opened.
    with keep_traceback_in(run.journal.here):
        Pipeline(run, BrickReader(run, scalings), bricks).run(progress)
    run.seconds += run.watch.probe.elapsed - began


class Pipeline:
    """The threads of a running job: the stages, and what each hands to the next."""

    def __init__(self, run: Run, reader: BrickReader, bricks: Iterator[Brick]) -> None:
        """``bricks`` are those to compute, in visiting order and numbered without gaps."""
        self.job, self.journal, self.queues = run.job, run.journal, run.queues
        self.watch, self.probe, self.reader = run.watch, run.watch.probe, reader
        self.bricks, self.writing = bricks, Writing(run)
        self.ticket = threading.Lock()
        self.tickets = [threading.Lock() for _ in self.job.devices]
        # A brick has a place among those of its lane, and its number is that among all.
        self.places = [itertools.count() for _ in self.job.devices]

    def run(self, progress: Callable[[Progress], None] | None) -> None:
        """Start the threads and wait for them. Raises the first error of any."""
        for lane, device in enumerate(self.job.devices):
            for i in range(self.queues.readers):
                self._spawn(f"read-{lane}.{i}", partial(self._read, lane))
            self._spawn(f"forward-{lane}", partial(self._compute, lane, device))
        self._spawn("stitch", self._stitch)
        for i in range(self.job.config.writer_workers):
            self._spawn(f"write-{i}", self.writing.work)

        ceiling = MemoryCeiling(self.job.plan.memory.total, self.probe.clock)

        def tick() -> None:
            self.watch.check(self.job.config.grace)
            ceiling.keep()
            if progress:
                progress(self.watch.progress())

        self.queues.flow.join(tick)
        # A log in a bucket holds lines back for a second. These must be stored before anybody
        # counts.
        where = self.journal.named(LOG_FILE)
        flush = self.journal.flush
        self.watch.retries.run(self.queues.flow, "the run folder", f"write {where}", flush)
        # The last tick may have been before the last block.
        if progress:
            progress(self.watch.progress())

    def _spawn(self, name: str, work: Callable[[], None]) -> None:
        """Start a thread in which torch uses as many threads as --threads says."""
        self.queues.flow.spawn(name, torch_threads(self.job.config.threads)(work))

    def _read(self, lane: int) -> None:
        """Read bricks until none is left, and prepare each for its lane."""
        while True:
            # Room is taken while the ticket is held. If two readers could swap, the later brick
            # might take the room that the earlier one waits for.
            with self.tickets[lane]:
                # The bricks of all lanes come from one generator, which two threads must not enter.
                with self.ticket:
                    brick = None if self.watch.request.why else next(self.bricks, None)
                if brick is None:
                    break
                place = next(self.places[lane])
                with self.probe.waiting("read"):
                    self.queues.room[lane].acquire(self.job.plan.brick_bytes(brick))
            with self.watch.stage("read", f"{brick} of {self.job.source.name}"):
                loaded = self.reader.fetch(brick)
            with self.watch.stage("normalise", brick):
                self.reader.prepare(loaded)
            # Such a brick holds no array any more, and `_stitch` gives back nothing for it.
            if not loaded.brick.num_patches:
                self.queues.room[lane].release(self.job.plan.brick_bytes(brick))
            self.watch.count(left_out=brick.num_patches - loaded.brick.num_patches)
            self.queues.loaded[lane].put(loaded, place)
        self.queues.loaded[lane].close()

    def _compute(self, number: int, device: torch.device) -> None:
        """Run one lane from its first brick to its last."""
        with self.watch.stage("forward", device, timed=False), batch_named(self.job, device):
            if device.type == "cuda":
                # Each thread has its own current device: a model that says "cuda" means this one.
                torch.cuda.set_device(device)
            lane = Lane(
                device,
                self.job,
                self.probe,
                self.queues.equipment,
                self._before_batch,
            )
        brick: Brick | None = None
        channel, coming = self.queues.loaded[number], None
        with lane.forward.autocast():
            while True:
                loaded, coming = coming, None
                if loaded is None:
                    with self.probe.waiting("forward"):
                        loaded = channel.get()
                brick = loaded.brick if loaded is not None else brick
                with (
                    self.watch.stage("forward", brick, timed=False),
                    batch_named(self.job, device),
                ):
                    if loaded is not None:
                        lane.transfers.upload(loaded)
                        # The next brick is never waited for: this one must not wait with it.
                        if channel.ready and (coming := channel.get()) is not None:
                            lane.transfers.upload(coming)  # while the net works on this one
                    done = lane.push(loaded) if loaded is not None else lane.flush()
                    for finished in done:
                        self.queues.computed.put((number, finished), finished.brick.number)
                if loaded is None:
                    break
        self.queues.computed.close()

    def _before_batch(self, patches: int) -> None:
        """Count the patches of a lane's next batch. Stops the lane if the job has failed."""
        self.queues.flow.check()
        self.watch.watchdog.progressed()
        self.watch.count(done=patches)

    def _stitch(self) -> None:
        """Join bricks, in order, into complete blocks."""
        equipment, summed = self.queues.equipment, [head.summed for head in self.job.heads]
        one_pool = equipment.block_pool is equipment.brick_pool
        assembly = Assembly(
            self.job.geometry,
            self.writing.empty_block,
            # What is left out adds up like a head that is summed: one brick is enough.
            [*summed, *([True] if self.job.sample else [])],
            self.writing.placed,
            lambda volume, index: (volume, *index) not in self.journal.done,
            takes_over=one_pool and not any(summed) and self.job.sample is None,
        )
        while True:
            with self.probe.waiting("stitch"):
                came = self.queues.computed.get()
            if came is None:
                break
            lane, computed = came
            with (
                self.watch.stage("forward", computed.brick, timed=False),
                self.probe.waiting("stitch"),
            ):
                computed.wait()
            with self.watch.stage("stitch", computed.brick, timed=False):
                for number, head in enumerate(self.job.heads):
                    if not head.summed and computed.outputs:
                        count, size = computed.clipped[number], computed.outputs[number].numel()
                        self.watch.count_clipped(number, count, size)
                self.watch.count(not_finite=computed.not_finite)
                arrays, taken = computed.arrays(), False
                blocks = assembly.add(computed.brick, arrays)
                while True:
                    # Each block is timed by itself, as the thread may wait in between for room to
                    # write.
                    with self.probe.span("stitch", computed.brick):
                        block = next(blocks, None)
                    if block is None:
                        break
                    # Such a block gives the buffers back once it is written.
                    taken = block.arrays is arrays
                    self.writing.put(block)
                for buffer in () if taken else computed.buffers:
                    equipment.brick_pool.give(buffer)
            if computed.outputs:
                self.queues.room[lane].release(self.job.plan.brick_bytes(computed.brick))
        self.queues.whole.close()


class MemoryCeiling:
    """Trims the heap of a process that comes near to its planned memory.

    Chunks and bricks settle in the gaps that the large tensors of a forward leave, so the next
    forward takes new memory. Without trimming, a UNet with one thread held 14 % more than its plan
    after two minutes, and a fifth of that was unused.
    """

    def __init__(self, planned: int, clock: Clock) -> None:
        """``planned`` is the most bytes that the process should hold."""
        self._most, self._clock = planned - _STEP_BYTES, clock
        self._next = clock()

    def keep(self) -> None:
        """Trim the heap if the process holds more than it did when that last helped."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + _LOOK_S
        if resident_bytes() > self._most:
            trim_heap()
            # If all of it is in use, trimming would only cost time.
            self._most = max(self._most, resident_bytes() + _STEP_BYTES)
            self._next = self._clock() + _EVERY_S
