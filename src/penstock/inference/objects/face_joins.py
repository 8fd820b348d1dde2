"""Joins the objects of blocks into objects of the volume, and numbers them.

The objects of all blocks, one block after the other, have provisional numbers from 0. Two that
touch across a face, an edge or a corner of blocks, by the connectivity, are one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base import groups_of, require
from ...data import Box, Grid, flatten, indices, unflatten
from .block_record import BlockRecord
from .components import REACH

Offset = tuple[int, ...]


class Numbering(NamedTuple):
    """The final number of each object of each block."""

    ids: NDArray[np.int64]
    """A row for each provisional number; 0 for an object that is left out."""
    starts: NDArray[np.int64]
    """The provisional number of the first object of each block, and the number of all."""
    kept: int
    """The number of objects that stay."""
    objects: int
    """The number of objects before any was left out."""

    def of_block(self, number: int) -> NDArray[np.int64]:
        """The final numbers of the objects of a block."""
        return self.ids[self.starts[number] : self.starts[number + 1]]


class Totals(NamedTuple):
    """What is counted of the objects of all blocks, by provisional number."""

    first: NDArray[np.int64]
    voxels: NDArray[np.int64]
    at_border: NDArray[np.bool_]
    keys: NDArray[np.int64]
    """See `LocalLabels`; empty if they are not given."""
    starts: NDArray[np.int64]
    """See `Numbering`."""


def _pairs(
    here: BlockRecord, there: BlockRecord, offset: Offset, reach: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The pairs of objects of two blocks that touch, and their faces."""
    ours = _side(here, offset)
    theirs = _side(there, tuple(-step for step in offset))
    free = [axis for axis in range(3) if offset[axis] == 0]
    # Most of a face is no object, so only voxels of objects look across. The frame of zeros
    # stands for what lies beside the face.
    places = np.nonzero(ours)
    framed = np.pad(theirs, [(int(axis in free),) * 2 for axis in range(3)])
    a, width = ours[places].astype(np.int64) - 1, len(there.first)

    def beyond(shift: Sequence[int]) -> NDArray[np.int64]:
        """The object behind each voxel, moved along the free axes; -1 if there is none."""
        at = list(places)
        for axis, by in zip(free, shift, strict=True):
            at[axis] = at[axis] + 1 + by
        b = framed[tuple(at)].astype(np.int64) - 1
        if here.values is not None and there.values is not None:
            b[(b >= 0) & (here.values[a] != there.values[b])] = -1
        return b

    straight = beyond([0] * len(free))
    faces = (a * width + straight)[straight >= 0]
    keys = [faces]
    for shift in product((-1, 0, 1), repeat=len(free)):
        if 0 < sum(map(abs, shift)) <= reach:
            b = beyond(shift)
            # Those straight behind are in `faces` already.
            keys.append((a * width + b)[(b >= 0) & (b != straight)])
    different = np.unique(np.concatenate(keys))
    counts = np.zeros(len(different), np.int64)
    # Only across a face, two axes are free; an edge or a corner shares no face.
    if len(free) == 2:
        numbers, times = np.unique(faces, return_counts=True)
        counts[np.searchsorted(different, numbers)] = times
    return np.stack(np.divmod(different, width), axis=1), counts


def _side(record: BlockRecord, offset: tuple[int, ...]) -> NDArray[Any]:
    """The labels of a block at its side towards an offset: a face, an edge or a corner."""
    axes = [axis for axis in range(3) if offset[axis]]
    side = record.faces[f"{axes[0]}{'+' if offset[axes[0]] > 0 else '-'}"]
    for axis in axes[1:]:
        side = side.take([-1 if offset[axis] > 0 else 0], axis)
    return side


class Contacts(NamedTuple):
    """Faces between two objects of neighbouring blocks."""

    axis: int
    """The place of z, y or x along which one lies behind the other."""
    pairs: NDArray[np.int64]
    """Two provisional numbers in each row."""
    faces: NDArray[np.int64]


class Joining:
    """Joins the objects of blocks while these are counted, in any order."""

    def __init__(
        self, grid: Grid, connectivity: int, by_keys: bool, load: Callable[[int], BlockRecord]
    ) -> None:
        """``load`` gives the record of a block, and ``by_keys`` says that its keys join objects."""
        self.objects = 0
        """Those of the blocks that are added."""
        self._grid, self._reach, self._by_keys = grid, REACH[connectivity], by_keys
        self._load = lru_cache(maxsize=64)(load)
        require("scipy.sparse.csgraph", "label")  # while others count
        self._rows: dict[int, tuple[NDArray[Any], ...]] = {}
        self._touching: list[tuple[list[int], Offset, NDArray[np.int64], NDArray[np.int64]]] = []

    def add(self, number: int) -> None:
        """Add a block, once it is counted: the pairs that it makes with those that are added."""
        if number in self._rows:
            return
        here = self._load(number)
        self._rows[number] = (*here[:3], here.first[:0] if here.keys is None else here.keys)
        self.objects += len(here.first)
        for other, offset in self._around(number) if len(here.first) else ():
            if other in self._rows and len(self._rows[other][0]):
                rest = self._reach - sum(map(abs, offset))
                pairs, faces = _pairs(here, self._load(other), offset, rest)
                self._touching.append(([number, other], offset, pairs, faces))

    def _around(self, number: int) -> Iterator[tuple[int, Offset]]:
        """The numbers and offsets of blocks that share a face with a block, by a reach of 2 an
        edge, by 3 a corner."""
        cells = self._grid.cells
        index, one = unflatten(number, cells), (0, 0, 1, 1, 1)
        for there in indices(Box.of(index, (1,) * 5).grow(one, one) & cells):
            offset = tuple(np.subtract(there, index)[2:].tolist())
            if 0 < sum(map(abs, offset)) <= self._reach:
                yield flatten(there, cells), offset

    @cached_property
    def whole(self) -> tuple[Totals, NDArray[np.int64], list[Contacts]]:
        """Of all blocks, which are added: what is counted, the group of each object, and faces
        between objects."""
        rows = [self._rows[number] for number in range(len(self._grid))]
        first, voxels, at_border, keys = map(np.concatenate, zip(*rows, strict=True))
        starts = np.cumsum([0, *(len(row[0]) for row in rows)], dtype=np.int64)
        pairs, contacts = [np.zeros((0, 2), np.int64)], []
        for numbers, offset, local, faces in self._touching:
            pairs.append(local + starts[numbers])
            if sum(map(abs, offset)) == 1:
                contacts.append(Contacts(int(np.flatnonzero(offset)[0]), pairs[-1], faces))
        groups = (
            np.unique(keys, return_inverse=True)[1]
            if self._by_keys
            else groups_of(self.objects, np.concatenate(pairs), "label")
        )
        return Totals(first, voxels, at_border, keys, starts), groups, contacts


def numbered(
    totals: Totals, groups: NDArray[np.int64], min_size: int, clear_border: bool
) -> Numbering:
    """Number objects in the order of their first voxels.

    Args:
        totals: What is counted of objects.
        groups: The group of each provisional number.
        min_size: The fewest voxels of an object that stays.
        clear_border: Leave out those that touch a face of the volume.

    Returns:
        The final numbers.
    """
    objects = int(groups.max(initial=-1)) + 1
    first = np.full(objects, np.iinfo(np.int64).max)
    np.minimum.at(first, groups, totals.first)
    voxels = np.zeros(objects, np.int64)
    np.add.at(voxels, groups, totals.voxels)
    stays = voxels >= min_size if min_size > 1 else np.ones(objects, bool)
    if clear_border:
        stays &= ~touches(totals, groups, objects)
    order = np.argsort(first)
    ids = np.zeros(objects, np.int64)
    kept = order[stays[order]]
    ids[kept] = np.arange(1, len(kept) + 1)
    return Numbering(ids[groups], totals.starts, len(kept), objects)


def touches(totals: Totals, groups: NDArray[np.int64], objects: int) -> NDArray[np.bool_]:
    """Whether each group touches a face of the volume."""
    at_border = np.zeros(objects, bool)
    np.logical_or.at(at_border, groups, totals.at_border)
    return at_border
