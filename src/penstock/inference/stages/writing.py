"""Write complete blocks: cast them, take their checksums, write each once, and note it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...data import Box
from ..lanes.values import cast
from ..run_folder.block_log import digest_of
from ..run_folder.names import LOG_FILE
from ..tiling.stitch import Block
from .first_level import FirstLevel
from .run import Run


class Writing:
    """What the writing threads of a job do."""

    def __init__(self, run: Run) -> None:
        self.run, self.job, self.watch, self.queues = run, run.job, run.watch, run.queues
        self.pool, self.levels = run.queues.equipment.block_pool, run.levels

    def empty_block(self, head: int, shape: tuple[int, ...]) -> NDArray[Any]:
        """An array for a block, which `Assembly` fills."""
        if head == len(self.job.heads):  # the voxels that are left out
            flags = self.pool.take((1, *shape), np.dtype(np.bool_))
            flags.fill(False)
            return flags
        plan = self.job.heads[head]
        array = self.pool.take((plan.channels, *shape), plan.kept)
        if plan.summed:
            array.fill(0)
        return array

    def placed(self, head: int, box: Box) -> Box:
        """A box of the grid of blocks in that of a head. What is left out has none of its own."""
        heads = self.job.heads
        return heads[head].grid.box(box) if head < len(heads) else box

    def put(self, block: Block) -> None:
        """Hand a block to the threads that write, once there is room for it."""
        with self.watch.probe.waiting("stitch"):
            self.queues.write_room.acquire(self._bytes(block))
        self.queues.whole.put(block)

    def work(self) -> None:
        """The work of a thread: write complete blocks, and note each one once it is written."""
        while True:
            with self.watch.probe.waiting("write"):
                block = self.queues.whole.get()
            if block is None:
                return
            self._write(block)
            self.queues.write_room.release(self._bytes(block))

    def _bytes(self, block: Block) -> int:
        return block.box.size * self.job.plan.facts.out_bytes

    def _write(self, block: Block) -> None:
        checks = [self._write_to(output, block) for output in range(len(self.job.outputs))]
        if self.job.sample is not None:
            filled = np.count_nonzero(block.arrays[-1]) if block.arrays else block.box.size
            self.watch.count(filled=int(filled))
            for flags in block.arrays[-1:]:
                self.pool.give(flags)
        # One line for all outputs: a block is done once each of them has it.
        journal = self.run.journal
        where = f"block {block.index} {block.box}, noting it in {journal.named(LOG_FILE)}"
        note = self.watch.probe.span("note", block.index)
        with self.watch.stage("write", where, timed=False), note:
            journal.note((block.volume, *block.index), block.box.size, checks)

    def _write_level(self, level: FirstLevel, box: Box, array: NDArray[Any]) -> None:
        def write(cell: Box, whole: NDArray[Any]) -> None:
            where, put = f"write {cell} of a level", partial(level.sink.write, cell, whole)
            self.watch.retries.run(self.queues.flow, level.sink.name, where, put)

        level.add(box, array, write)

    def _finish(self, number: int, sums: NDArray[Any], array: NDArray[Any]) -> None:
        """Turn the sums of a head into what is written."""
        head = self.job.heads[number]
        if head.reduction is None:
            self.watch.count_clipped(number, cast(sums, array), array.size)
            return
        for z in range(array.shape[1]):  # plane by plane: there may be a hundred channels
            made = head.reduction.of(head.name, torch.from_numpy(sums[:, z]), 0).numpy()
            if made.dtype.kind == "f":
                scaled = made * np.float32(head.gain)
                self.watch.count_clipped(number, cast(scaled, array[:, z]), made.size)
            else:
                array[:, z] = made

    def _values(self, number: int, block: Block) -> NDArray[Any]:
        """What a block writes to one output."""
        head, sink = self.job.heads[number], self.job.outputs[number].sink
        fill = getattr(sink, "fill", 0)  # stores of others need not say it
        if not block.arrays:  # nothing in it is sample
            shape = (head.written, *self.placed(number, block.box).shape)
            return np.broadcast_to(np.asarray(fill).astype(sink.dtype), shape)
        array = block.arrays[number]
        if head.summed:
            sums, array = array, self.pool.take((head.written, *array.shape[1:]), sink.dtype)
            self._finish(number, sums, array)
            self.pool.give(sums)
        if self.job.sample is not None:
            left_out = head.grid.mask(block.arrays[-1], block.box)
            np.copyto(array, fill, "unsafe", where=left_out)
        return array

    def _write_to(self, number: int, block: Block) -> str:
        """Write a block to one output. Returns the check of its values. It is taken before the
        write, so that damage by the store or by broken memory can be seen later."""
        output = self.job.outputs[number]
        where = f"block {block.index} {block.box} of {output.sink.name}"
        with self.watch.stage("write", where, timed=self.job.heads[number].summed):
            array = self._values(number, block)
        with self.watch.stage("checksum", where):
            check = digest_of([array])

        def write() -> None:
            self.run.lock.check()  # a run that was stopped long ago must not write into a new one
            output.sink.write(output.box(block.volume, block.box), array[None])

        with self.watch.stage("write", where):
            self.watch.retries.run(self.queues.flow, output.sink.name, f"write {where}", write)
            if (level := self.levels.get(number)) is not None:
                self._write_level(level, output.box(block.volume, block.box), array[None])
            if block.arrays:
                self.pool.give(array)
        return check
