"""What parts spill: the bytes of pieces between parts, in all and at once, and the room for them.

A piece is what one block contributes to a unit. A unit on a border is joined from pieces. Parts,
units and blocks are products of intervals, so each count here comes from one short table per axis.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...base import format_bytes
from ...cluster import AHEAD
from ..run_folder.unit_log import Key
from ..tiling.parts import Parts
from ..tiling.traffic import blocks_along
from .memory import Facts, block_voxel_bytes

CHECK_BYTES = 16
"""Bytes of the checksum with which a piece begins."""
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Spill:
    """What a job spills."""

    bytes: int
    """Bytes of all pieces, each written once and read once."""
    peak: int
    """Most bytes that are spilled at once. Parts wait rather than exceed it; see `SpillRoom`."""

    @property
    def moved(self) -> int:
        """Bytes that are written to the scratch and read from it."""
        return 2 * self.bytes

    def line(self) -> str:
        """Both numbers in words."""
        return (
            f"{format_bytes(self.bytes)} spilled in all, at most {format_bytes(self.peak)} at once"
        )


@dataclass(frozen=True, slots=True)
class _Along:
    """What blocks contribute to units along an axis, by the parts of the units.

    Three kinds are counted: pieces, the voxels of supports, the voxels of cores.
    """

    first: Counts
    """The first part whose blocks contribute to units of a part: (parts,)."""
    last: Counts
    brought: Counts
    """The counts from each contributing part, from the first on: (kinds, parts, sources)."""
    inner: Counts
    """The counts in units whose blocks all lie in the same part: (kinds, parts)."""


class SpillTable:
    """What parts spill, computed from shapes."""

    def __init__(self, parts: Parts, facts: Facts) -> None:
        self.parts = parts
        self._along = [_along(parts, axis) for axis in range(3)]
        summed = other = 0
        for size, sums in zip(block_voxel_bytes(facts), facts.sum_itemsizes, strict=True):
            summed, other = summed + size * bool(sums), other + size * (not sums)
        self._weights = np.array((CHECK_BYTES, summed, other), np.float64)
        """Bytes of a piece's checksum, of a voxel of its support, and of a voxel of its core."""

    def brought(self, source: int, target: int) -> int:
        """Bytes of the pieces that the blocks of part ``source`` spill for units of ``target``."""
        here, there = self._cell(source), self._cell(target)
        counts = [
            along.brought[:, q, p - along.first[q]]
            for along, p, q in zip(self._along, here, there, strict=True)
        ]
        return self._bytes(counts) - (self._bytes(self._inner(target)) if source == target else 0)

    def total(self, target: int) -> int:
        """Bytes of all pieces of the units of a part."""
        cells = zip(self._along, self._cell(target), strict=True)
        counts = [along.brought[:, q].sum(axis=1) for along, q in cells]
        return self._bytes(counts) - self._bytes(self._inner(target))

    @cached_property
    def spill(self) -> Spill:
        """What all parts spill."""
        # Layers lie along the first axis that is cut, as parts are visited along it last.
        cut = next((a for a in range(3) if len(self._along[a].first) > 1), 0)
        every = [along.brought.sum(axis=2) for along in self._along]
        inner = [along.inner for along in self._along]
        layers = np.zeros(len(self._along[cut].first))
        for axes, sign in ((every, 1), (inner, -1)):
            plane = _product(axes[a].sum(axis=1) for a in range(3) if a != cut)
            layers += sign * (self._weights * plane) @ axes[cut]
        return Spill(int(layers.sum()) * self.parts.num_volumes, self._peak(layers, cut))

    def _peak(self, layers: NDArray[np.float64], cut: int) -> int:
        """Most bytes at once, if layers of parts are done in turn and joined as soon as possible.

        The pieces of a layer are there from the first layer that contributes to the last. Parts are
        given out ahead of those that are done.
        """
        along, workers, volumes = self._along[cut], self.parts.workers, self.parts.num_volumes
        in_layer = math.prod(len(each.first) for each in self._along) // len(layers)
        ahead = -(-AHEAD * workers // in_layer)
        volumes = min(volumes, 2 + ahead // len(layers))
        change = np.zeros(ahead + volumes * len(layers) + 1)
        for volume in range(volumes):
            first, last = (volume * len(layers) + ends for ends in (along.first, along.last))
            np.add.at(change, first, layers)
            np.add.at(change, last + ahead + 1, -layers)
        return int(np.cumsum(change).max())

    def _cell(self, number: int) -> tuple[int, ...]:
        """Index of a part within its volume, from 0 along each axis."""
        grid = self.parts.grid
        index = grid.touching(self.parts[number].box).start
        return tuple(i - start for i, start in zip(index, grid.cells.start, strict=True))

    def _inner(self, number: int) -> list[Counts]:
        cells = zip(self._along, self._cell(number), strict=True)
        return [along.inner[:, q] for along, q in cells]

    def _bytes(self, counts: Iterable[Counts]) -> int:
        return int(self._weights @ _product(counts))


def _product(counts: Iterable[Counts]) -> NDArray[np.float64]:
    """The counts in boxes, from those along their axes."""
    return np.prod([*counts], axis=0, dtype=np.float64)


def _along(parts: Parts, axis: int) -> _Along:
    geometry = parts.geometry
    region, read, support = blocks_along(geometry, axis)
    low, high = geometry.domain.start[axis], geometry.domain.stop[axis]
    core = read.start + geometry.before[axis], read.stop - geometry.after[axis]
    cells, size, anchor = geometry.units.cells, geometry.unit[axis], geometry.anchor[axis]
    lines = anchor + size * np.arange(cells.start[axis], cells.stop[axis] + 1, dtype=np.int64)
    lines = lines.clip(low, high)
    start, stop = lines[:-1], lines[1:]
    home = (start - anchor) // geometry.region[axis] - geometry.regions.cells.start[axis]
    first = np.searchsorted(support.stop, start, side="right")
    last = np.searchsorted(support.start, stop) - 1
    inner = (region[first] == home) & (region[last] == home)
    # Each pair of a unit and a block that contributes to it.
    each = last - first + 1
    unit = np.repeat(np.arange(len(each)), each)
    block = np.arange(len(unit)) - np.repeat(np.cumsum(each) - each, each) + first[unit]
    counts = np.stack((
        np.ones_like(unit),
        np.minimum(support.stop[block], stop[unit]) - np.maximum(support.start[block], start[unit]),
        np.minimum(core[1][block], stop[unit]) - np.maximum(core[0][block], start[unit]),
    )).clip(0)  # fmt: skip
    count = int(home[-1]) + 1
    begins = np.searchsorted(home, np.arange(count))
    ends = np.append(begins[1:], len(home)) - 1
    sources = region[first][begins], region[last][ends]
    brought = np.zeros((3, count, int((sources[1] - sources[0]).max()) + 1), np.int64)
    alone = np.zeros((3, count), np.int64)
    for kind in range(3):
        np.add.at(brought[kind], (home[unit], region[block] - sources[0][home[unit]]), counts[kind])
        np.add.at(alone[kind], home[unit], counts[kind] * inner[unit])
    return _Along(*sources, brought, alone)


class SpillRoom:
    """The room for spilled pieces. A part is given out once what it spills fits the rest."""

    def __init__(
        self,
        table: SpillTable,
        limit: int | None = None,
        look: Callable[[Set[Key]], Mapping[tuple[int, int], int]] = lambda done: {},
        done: Set[Key] = frozenset(),
    ) -> None:
        """Prepare.

        Args:
            table: What the parts spill. They stay within its peak.
            limit: Most bytes, pieces of parts that were given up included. None: no limit.
            look: A function that returns the bytes on disk, as `lying` does, without those of the
                units that it is given as written.
            done: The units that are written.
        """
        self.table, self.limit, self._look = table, limit, look
        self._there = Counter(look(done))
        """Bytes that an earlier start has left. They are not spilled again."""
        self._lost: list[int] = []
        """Parts that were given up. Room for what they did not spill stays reserved, as a resumed
        run will spill it."""
        self._held = Counter[int]()
        """Bytes on disk, and those that parts under way may still spill, by the part of units."""
        for (_, target), size in self._there.items():
            self._held[target] += size
        self.most = self.now = self._held.total()
        """Largest number of bytes so far."""

    def take(self, source: int, targets: Iterable[int], *, alone: bool) -> bool:
        """Reserve room for what a part spills for others. False if there is none.

        ``alone`` says that no other part or join is under way.
        """
        table, more = self.table, Counter[int]()
        for target in targets:
            more[target] = max(0, table.brought(source, target) - self._there[source, target])
        limit = self.limit if alone else table.spill.peak
        if limit is not None and self.now + more.total() > limit:
            return False
        self._held.update(more)
        self.now += more.total()
        self.most = max(self.most, self.now)
        return True

    def give_up(self, source: int) -> None:
        """Note that a part for which room was reserved was given up."""
        self._lost.append(source)

    def free(self, target: int, *, whole: bool = True) -> None:
        """Note that the units of a part are joined; only some of them if not ``whole``. Pieces that
        are left then count if the user has set a limit."""
        left = 0
        if not whole and self.limit is not None:
            there = self._look(frozenset())
            left = sum(size for (_, each), size in there.items() if each == target)
            for source in self._lost:
                if source in self.table.parts.sources(self.table.parts[target]):
                    missing = self.table.brought(source, target) - there.get((source, target), 0)
                    left += max(0, missing)
        self.now += left - self._held[target]
        self._held[target] = left


def lying(folder: Path, parts: Parts, done: Set[Key] = frozenset()) -> Counter[tuple[int, int]]:
    """Bytes of the pieces in a folder, by the part of their blocks and that of their units.

    Args:
        folder: The folder of the pieces of a run.
        parts: The parts of the job.
        done: Units that are written. Their pieces are removed.

    Returns:
        Bytes, by the numbers of both parts.
    """
    sizes = Counter[tuple[int, int]]()
    for place, _, names in os.walk(folder):  # pieces vanish when units are joined meanwhile
        if not names:
            continue
        volume, *index = map(int, Path(place).name.split("."))
        if (volume, *index) in done:
            shutil.rmtree(place, ignore_errors=True)
            continue
        target, before = parts.number_of(volume, index), volume * len(parts.grid)
        for name in names:  # a draft that a kill has left has one more suffix
            block = parts.geometry.block_at([*map(int, name.split(".")[:3])], volume)
            with contextlib.suppress(FileNotFoundError):
                sizes[before + block.region, target] += Path(place, name).stat().st_size
    return sizes
