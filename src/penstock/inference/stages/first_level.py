"""The first level below an image, made of its blocks while they are in memory.

    block ──▶ halved ──▶ cell of the level (a chunk or shard), open until its last block ──▶ written

It holds an eighth of the voxels, and all further levels are made of it. So nothing of the image has
to be read and decoded again. What does not line up, or does not fit into its planned memory, is
left out here. It is made at the end, as all other levels are (`output_levels`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...data import Box, Grid, LevelBelow, Rule, Sink, indices, reduced


class FirstLevel:
    """Takes blocks of an image in any order, from any threads, and writes whole cells."""

    def __init__(
        self, image: Sink, level: LevelBelow, sink: Sink, rule: Rule, most_bytes: int
    ) -> None:
        """``level`` says how ``sink`` is made of ``image``; ``most_bytes`` is what the open cells
        may take."""
        self.image, self.level, self.sink, self.rule = image.domain, level, sink, rule
        self.cells = Grid(sink.domain, sink.write_grid, (0,) * 5)
        self._most, self._lock = most_bytes, threading.Lock()
        self._halving = threading.Lock()
        """Held by one thread at a time, as halving takes memory for a block."""
        self._missing: dict[tuple[int, ...], int] = {}
        """Number of voxels that have not arrived, of each cell that has some."""
        self._open: dict[tuple[int, ...], NDArray[Any]] = {}
        """These cells, without those for which there was no room."""
        self._held = 0

    def forget(self) -> None:
        """Forget what has arrived, as an error leaves open which blocks will come once more. Cells
        that lack a block then are never whole."""
        with self._lock:
            self._missing, self._open, self._held = {}, {}, 0

    def add(
        self, box: Box, array: NDArray[Any], write: Callable[[Box, NDArray[Any]], None]
    ) -> None:
        """Take a block of the image.

        Args:
            box: Its place in the image, t c z y x.
            array: Its values, which are not kept.
            write: A function that writes a cell of the level; called for each that is whole.
        """
        box = box.shift(tuple(-start for start in self.image.start))
        halved, sides = self.level.halved, self.image.shape
        ends = zip(box.start, box.stop, halved, sides, strict=True)
        if any(a % by or (b % by and b != side) for a, b, by, side in ends):
            return  # it ends within a voxel of the level
        with self._halving:
            made = reduced(array, halved, self.rule)
        start = tuple(a // by for a, by in zip(box.start, halved, strict=True))
        part = Box.of(start, made.shape)
        for index in indices(self.cells.touching(part)):
            with self._lock:
                whole = self._merge(index, part, made)
            # Outside of the lock, as a write takes long, and nobody else has a cell that is whole.
            if whole is not None:
                write(self.cells.cell(index), whole)

    def _merge(self, index: tuple[int, ...], part: Box, made: NDArray[Any]) -> NDArray[Any] | None:
        """Put voxels into a cell. Returns the cell if it is whole."""
        box = self.cells.cell(index)
        if index not in self._missing:
            self._open[index], self._missing[index] = np.empty(box.shape, made.dtype), box.size
            self._held += self._open[index].nbytes
        shared = part & box
        self._missing[index] -= shared.size
        whole = not self._missing[index]
        if whole:
            del self._missing[index]
        if index in self._open:
            self._open[index][shared.within(box)] = made[shared.within(part)]
            if whole:
                return self._close(index)
            while self._held > self._most:  # the oldest go
                self._close(next(iter(self._open)))
        return None

    def _close(self, index: tuple[int, ...]) -> NDArray[Any]:
        array = self._open.pop(index)
        self._held -= array.nbytes
        return array
