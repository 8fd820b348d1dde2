"""Counts chunks that the input's store does not hold. They read as the fill value.

Nothing is listed: a petabyte has too many keys. Each chunk is checked once, with the block that
owns its first voxel. A chunk whose voxels vary exists. For a chunk of one value the store is
queried, which costs no more than reading it did. In shards, the chunks inside them are counted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError
from ..box import Box, Grid, indices
from .protocols import Source

ChunkVolume = tuple[int, tuple[int, ...]]
"""One time point, one group of channels."""


@dataclass(frozen=True, slots=True)
class ChunkCount:
    """Chunks of the input that a run read."""

    read: int
    absent: int
    """Chunks among them that the store lacks. They were read as its fill value."""

    def line(self) -> str:
        """The sentence for the summary of a run."""
        return (
            f"Missing: {self.absent:,} of {self.read:,} chunks that were read are not in the input "
            "and were filled; --missing error refuses that"
        )


class ChunkCounter:
    """Counts the chunks of a source as blocks of it are read, by any number of threads."""

    def __init__(
        self, source: Source, volumes: Sequence[ChunkVolume], policy: Literal["fill", "error"]
    ) -> None:
        self._source, self._policy = source, policy
        self._volumes = volumes
        self._grid = Grid(source.domain, source.chunks, source.grid_origin)
        self._firsts = _first_of_their_chunks(self._grid, volumes)
        self._lock = threading.Lock()
        self._read = self._absent = 0

    @property
    def count(self) -> ChunkCount | None:
        """The chunks counted so far; None if the source cannot tell which chunks it holds."""
        return ChunkCount(self._read, self._absent) if self._source.tells_absent else None

    def look(self, volume: int, owned: Box, seen: Box, array: NDArray[Any]) -> None:
        """Count the chunks whose first voxel is owned. Any number of threads may call it.

        Args:
            volume: the index of the time point and channels that were read.
            owned: the voxels whose chunks are counted (z, y, x).
            seen: the voxels that were read (z, y, x).
            array: the voxels of ``seen``, shape (channels, z, y, x).

        Raises:
            FileNotFoundError: a chunk is absent, where that is an error.
        """
        if not self._source.tells_absent:
            return
        t, channels = self._volumes[volume]
        read, alike = 0, []
        for place, channel in enumerate(channels):
            if (t, channel) not in self._firsts:
                continue
            for cell in self._cells(t, channel, owned):
                read += 1
                part = cell[2:] & seen
                if _all_alike(array[place][part.within(seen)]):
                    alike.append(cell)
        absent = self._source.absent(alike) if alike else []
        if absent and self._policy == "error":
            chunk = self._grid.touching(absent[0]).start
            raise FileNotFoundError(
                f"chunk {chunk} of {self._source.name} (t c z y x; voxels {absent[0].start} to "
                f"{absent[0].stop}) is not there (--missing error)"
            )
        with self._lock:
            self._read += read
            self._absent += len(absent)

    def _cells(self, t: int, channel: int, owned: Box) -> list[Box]:
        """The chunks of a channel whose first voxel is owned."""
        lead = Box.of((t, channel), (1, 1))
        cells = (self._grid.cell(index) for index in indices(self._grid.touching(lead + owned)))
        return [
            cell
            for cell in cells
            if all(
                low <= start < high
                for start, low, high in zip(cell.start[2:], owned.start, owned.stop, strict=True)
            )
        ]


def check_knows_chunks(source: Source) -> None:
    """Check that a source can do ``--missing error``.

    Raises:
        UsageError: The source does not tell which chunks it holds.
    """
    if source.tells_absent is False:
        raise UsageError(
            f"--missing error: {source.name} does not tell which of its chunks it holds"
        )


def _first_of_their_chunks(grid: Grid, volumes: Sequence[ChunkVolume]) -> set[tuple[int, int]]:
    """For each chunk, the time point and channel of it that are read first."""
    firsts: dict[tuple[int, ...], tuple[int, int]] = {}
    for t, channels in volumes:
        for channel in channels:
            axes = zip((t, channel), grid.anchor[:2], grid.step[:2], strict=True)
            firsts.setdefault(tuple((i - o) // n for i, o, n in axes), (t, channel))
    return set(firsts.values())


def _all_alike(array: NDArray[Any]) -> bool:
    """Whether all voxels have one value, or are all not a number."""
    first = array[(0,) * array.ndim]
    last = array[(-1,) * array.ndim]
    if first != last and not (first != first and last != last):
        return False
    return bool(np.all(array != array) if first != first else np.all(array == first))
