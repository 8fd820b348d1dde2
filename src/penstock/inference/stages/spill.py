"""Pieces of units, spilled to files in the run folder by the processes that have computed them.

    spill/RUN/0.2.0.128/1.0.64    the contribution of block 1 0 64 to unit 2 0 128 of volume 0

If parts spill, a patch on their border is computed once. A unit on a border has blocks of several
parts, so none of them can write it. Each block's contribution to it becomes a file, all heads one
after the other: sums for a blended head, values of the output's dtype for any other. Joining a unit
adds the pieces of its blocks in visiting order, as `Assembly` does, so the bits are the same.

A piece begins with its checksum, which also covers where it belongs: run, maker, cut, unit and
block. A piece that is incomplete, or belongs elsewhere, counts as missing, and its block is
computed again. So pieces are not synced, and nothing records who wrote them.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...data import Grid, indices
from ..opening.heads import HeadPlan
from ..planning.spill_room import CHECK_BYTES
from ..run_folder.checks import digest_of
from ..run_folder.journal import SPILL_FOLDER
from ..run_folder.unit_log import Key
from ..tiling.geometry import Block, Geometry
from ..tiling.stitch import Unit, merge, share_of

Index = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """The contribution of a block to a unit."""

    block: Block
    index: Index
    """The index of the unit, z y x."""
    arrays: list[NDArray[Any]]
    """One array for each head, of the share of the unit that the block fills, (channels, z, y, x).
    """

    def __str__(self) -> str:
        return f"the piece of {self.block} for block {self.index}"


class Pieces:
    """The pieces of a run."""

    def __init__(
        self, folder: Path, run: str, maker: object, geometry: Geometry, heads: Sequence[HeadPlan]
    ) -> None:
        """``folder`` is that of the run. Pieces of another run or maker are not accepted."""
        self.folder, self.geometry, self.heads = folder / SPILL_FOLDER / run, geometry, heads
        cut = (*astuple(geometry)[:6], geometry.patches_per_block)
        plans = [(head.name, head.channels, head.kept.str, head.blended) for head in heads]
        self.written = 0
        """Number of pieces that this process has written."""
        self._of = json.dumps([run, maker, cut, plans], default=str)

    def begin(self) -> None:
        """Make the folder. Nothing else makes it, so a late process writes no piece after the run's
        end."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def is_border(self, index: Index) -> bool:
        """Whether a unit is joined from pieces."""
        return self.geometry.is_border(self.geometry.units.cell(index))

    def blocks_of(self, volume: int, index: Index) -> Iterator[Block]:
        """The blocks that contribute to a unit, in the order in which they are added."""
        geometry = self.geometry
        for line in indices(geometry.block_lines(geometry.units.cell(index))):
            yield geometry.block_at(line, volume)

    def holds(self, block: Block, index: Index) -> bool:
        """Whether the whole contribution of a block to a unit was computed. False if the block was
        narrowed to the missing pieces, and this one was removed later."""
        geometry = self.geometry
        whole = Grid(geometry.cores.cells, geometry.patches_per_block)
        patches = whole.cell(whole.touching(block.patches).start)
        needed = patches & geometry.patches_for(geometry.units.cell(index))
        return needed in block.patches and (
            block.needed is None or block.needed.issuperset(indices(needed))
        )

    def cut(self, block: Block, index: Index, heads: Sequence[NDArray[Any]]) -> Piece:
        """Copy the piece of a unit from the heads of a block."""
        arrays = []
        for head, share, values in zip(self.heads, self._shares(block, index), heads, strict=True):
            held = block.support if head.blended else block.core
            arrays.append(values[(slice(None), *share.within(held))].copy())
        return Piece(block, index, arrays)

    def there(self, block: Block, index: Index) -> bool:
        """Whether a piece is there, judged by its size. `read` also checks its content."""
        with contextlib.suppress(OSError):
            return self._path(block, index).stat().st_size == CHECK_BYTES + sum(
                map(_size, *self._layout(block, index))
            )
        return False

    def write(self, piece: Piece) -> None:
        """Write a piece, completely or not at all."""
        path = self._path(piece.block, piece.index)
        path.parent.mkdir(exist_ok=True)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        try:
            with draft.open("xb") as file:
                file.write(self._check(piece.block, piece.index, piece.arrays))
                for array in piece.arrays:
                    file.write(_little(array).data)
            draft.replace(path)
            self.written += 1
        finally:
            draft.unlink(missing_ok=True)

    def read(self, block: Block, index: Index) -> list[NDArray[Any]] | None:
        """The arrays of a piece; None if it is missing or damaged. A damaged one is removed."""
        path = self._path(block, index)
        try:
            content = np.fromfile(path, np.uint8)
        except OSError:
            return None
        arrays, place = [], CHECK_BYTES
        if len(content) == CHECK_BYTES + sum(map(_size, *self._layout(block, index))):
            for shape, dtype in zip(*self._layout(block, index), strict=True):
                size = _size(shape, dtype)
                values = content[place : place + size].view(dtype.newbyteorder("<"))
                arrays.append(values.reshape(shape))
                place += size
            if content[:CHECK_BYTES].tobytes() == self._check(block, index, arrays):
                return arrays
        path.unlink(missing_ok=True)
        return None

    def join(
        self, volume: int, index: Index, empty: Callable[[int, tuple[int, ...]], NDArray[Any]]
    ) -> Unit | None:
        """Join a unit from its pieces, read one at a time. None if one is missing.

        Args:
            volume: The volume of the unit.
            index: The index of the unit.
            empty: As in `Assembly`.
        """
        box = self.geometry.units.cell(index)
        arrays = [empty(head, box.shape) for head in range(len(self.heads))]
        unit, lacking = Unit(volume, index, box, arrays, 0), 0
        for block in self.blocks_of(volume, index):
            piece = self.read(block, index)
            lacking += piece is None
            if piece is None or lacking:  # reading the others finds all damaged ones
                continue
            for number, (head, values) in enumerate(zip(self.heads, piece, strict=True)):
                if values.size:
                    share = share_of(self.geometry, block, box, blended=head.blended)
                    merge(unit, number, share, values, blended=head.blended)
        return None if lacking else unit

    def remove(self, volume: int, index: Index) -> None:
        """Remove the pieces of a unit that is written."""
        shutil.rmtree(self._of_unit(volume, index), ignore_errors=True)

    def _shares(self, block: Block, index: Index) -> list[Any]:
        unit = self.geometry.units.cell(index)
        return [share_of(self.geometry, block, unit, blended=h.blended) for h in self.heads]

    def _layout(
        self, block: Block, index: Index
    ) -> tuple[list[tuple[int, ...]], list[np.dtype[Any]]]:
        """Shapes and dtypes of the arrays of a piece."""
        shares = zip(self.heads, self._shares(block, index), strict=True)
        return [(h.channels, *s.shape) for h, s in shares], [h.kept for h in self.heads]

    def _of_unit(self, volume: int, index: Index) -> Path:
        return self.folder / ".".join(map(str, (volume, *index)))

    def _path(self, block: Block, index: Index) -> Path:
        line = (
            a // n
            for a, n in zip(block.patches.start, self.geometry.patches_per_block, strict=True)
        )
        return self._of_unit(block.volume, index) / ".".join(map(str, line))

    def _check(self, block: Block, index: Index, arrays: Sequence[NDArray[Any]]) -> bytes:
        place = f"{self._of} {self._path(block, index).relative_to(self.folder).as_posix()}"
        return digest_of([np.frombuffer(place.encode(), np.uint8), *arrays]).encode()


class Spilled:
    """Decides which pieces a worker spills from the blocks that it computes."""

    def __init__(self, pieces: Pieces, done: Set[Key], only: Set[Key] | None = None) -> None:
        """Units that are ``done`` take no more pieces. With ``only``, pieces of these units are
        spilled and no other unit is touched; else those of all units on borders."""
        self.pieces, self.done, self.only = pieces, done, only

    def assembles(self, volume: int, index: Index) -> bool:
        """Whether a unit is assembled here from blocks, not joined from pieces."""
        fresh = self.only is None and (volume, *index) not in self.done
        return fresh and not self.pieces.is_border(index)

    def wanted_of(self, block: Block) -> list[Index]:
        """The units that need a block: they are assembled here, or lack a piece of it."""
        return [
            index
            for index in self._touched(block)
            if self.assembles(block.volume, index) or self._lacks(block, index)
        ]

    def pieces_of(self, block: Block, heads: Sequence[NDArray[Any]]) -> Iterator[Piece]:
        """The pieces of a computed block that are still missing; ``heads`` as in `Assembly`."""
        for index in self._touched(block):
            if self._lacks(block, index) and self.pieces.holds(block, index):
                yield self.pieces.cut(block, index, heads)

    def _touched(self, block: Block) -> Iterator[Index]:
        return indices(self.pieces.geometry.units.touching(block.support))

    def _lacks(self, block: Block, index: Index) -> bool:
        key = (block.volume, *index)
        if key in self.done or not (
            key in self.only if self.only else self.pieces.is_border(index)
        ):
            return False
        return not self.pieces.there(block, index)


def _little(array: NDArray[Any]) -> NDArray[np.uint8]:
    ordered = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
    return ordered.reshape(-1).view(np.uint8)


def _size(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return int(np.prod(shape)) * dtype.itemsize
