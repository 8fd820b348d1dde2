"""Write complete blocks: cast them, take their checksums, write each once, and note it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...data import Box, Resampling
from ...models import to_probabilities_
from ..lanes.values import cast
from ..run_folder.block_log import digest_of
from ..run_folder.names import LOG_FILE
from ..tiling.stitch import Block, planes_at_once
from .output_levels import FirstLevel
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
        """A box of the grid of blocks, on the grid of a head. The last array of a block, which says
        what is left out, has no head and stays on the grid of blocks."""
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
        flags = None if self.job.sample is None else self._flags(block)
        checks = [self._write_to(output, block, flags) for output in range(len(self.job.outputs))]
        if flags is not None:
            self.watch.count(filled=int(np.count_nonzero(flags)))
            for held in block.arrays[-1:]:
                self.pool.give(held)
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

    def _planes(
        self, block: Block, array: NDArray[Any], back: Resampling | None
    ) -> Iterator[tuple[slice, NDArray[Any]]]:
        """What an array of a block gives the block, some planes at a time, and their place."""
        depth = array.shape[1] if back is None else block.box.shape[0]
        over = max(1.0, block.box.size / block.held.size)
        step = planes_at_once(depth, math.ceil(array.nbytes * over))
        for first in range(0, depth, step):
            some = slice(first, min(first + step, depth))
            if back is None:
                yield some, array[:, some]
                continue
            box = Box.of((some.start, 0, 0), (some.stop - some.start, *block.box.shape[1:]))
            box = box.shift(block.box.start)
            needed = back.needed(box)
            held = array[(slice(None), *needed.within(block.held))]
            held = held.astype(np.float32) if back.order and held.dtype == np.bool_ else held
            yield some, back.apply(held, needed, box)

    def _finish(self, number: int, block: Block, out: NDArray[Any]) -> None:
        """Turn what a block holds of a head into what is written."""
        head, back, array = self.job.heads[number], self.job.geometry.back, block.arrays[number]
        if not head.summed and back is not None:
            back = back.of_order(0)
        exclusive, after_back = head.activation == "softmax", head.recipe and head.recipe.after_back
        if head.activation is not None and not after_back:
            for _, values in self._planes(block, array, None):  # views of the array
                to_probabilities_(values, exclusive=exclusive)
        for some, made in self._planes(block, array, back):
            if head.activation is not None and after_back:
                to_probabilities_(made, exclusive=exclusive)
            if head.reduction is not None:
                made = head.reduction.of(head.name, torch.from_numpy(made), 0).numpy()
            if not head.summed or made.dtype.kind != "f":
                out[:, some] = made
                continue
            if head.finished:
                made = made * made.dtype.type(head.gain)
            self.watch.count_clipped(number, cast(made, out[:, some]), made.size)

    def _flags(self, block: Block) -> NDArray[np.bool_]:
        """Where a block is left out, for all of its voxels."""
        back = self.job.geometry.back
        if not block.arrays:  # nothing in it is sample
            return np.broadcast_to(np.True_, (1, *block.box.shape))
        if back is None:
            return block.arrays[-1]
        made = np.empty((1, *block.box.shape), np.bool_)
        for some, share in self._planes(block, block.arrays[-1], back):
            made[:, some] = share > 0  # a voxel counts for which it is true
        made[0] |= back.beyond(block.box)
        return made

    def _values(self, number: int, block: Block, flags: NDArray[np.bool_] | None) -> NDArray[Any]:
        """What a block writes to one output. ``flags`` say where it is left out, if anywhere."""
        head, sink = self.job.heads[number], self.job.outputs[number].sink
        fill = getattr(sink, "fill", 0)  # stores of others need not say it
        shape = (head.written, *self.placed(number, block.box).shape)
        if not block.arrays:
            return np.broadcast_to(np.asarray(fill).astype(sink.dtype), shape)
        array = block.arrays[number]
        if head.summed or self.job.geometry.back is not None:
            held, array = array, self.pool.take(shape, sink.dtype)
            self._finish(number, block, array)
            self.pool.give(held)
        if flags is not None:
            np.copyto(array, fill, "unsafe", where=head.grid.mask(flags, block.box))
        return array

    def _write_to(self, number: int, block: Block, flags: NDArray[np.bool_] | None) -> str:
        """Write a block to one output. Returns the check of its values. It is taken before the
        write, so that damage by the store or by broken memory can be seen later."""
        output = self.job.outputs[number]
        where = f"block {block.index} {block.box} of {output.sink.name}"
        made = self.job.heads[number].summed or self.job.geometry.back is not None
        with self.watch.stage("write", where, timed=made):
            array = self._values(number, block, flags)
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
