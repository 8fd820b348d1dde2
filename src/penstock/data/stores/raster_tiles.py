"""The tiles of a raster and of its overviews before they are a file: each encoded as the file will
have it, in a file of its own.

    bands y x  ──▶  0/band/row.column  (all values)  ──▶  1/...  (an overview)  ──▶  2/...

Encoding takes most of the time that a GeoTIFF takes. So a tile is encoded once, by the process that
has its values, and a tile of an overview likewise where a block has all that it is made of. The
other overviews are made at the end, and the file is a copy of all tiles (`write_cog`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import in_order, replacing, require
from ..box import Box
from ..grid import Grid, indices
from ..levels import Rule, box_above, levels_below, reduced
from .plane_rows import DEFLATE_LEVEL, TILE

_HALVED = (1, 2, 2)
_AT_ONCE = (1, 4 * TILE, 4 * TILE)
"""The part of a block that is halved at a time."""
MAKING_BYTES = 2**26
"""The most bytes that halving, and encoding a few tiles at a time, take of a dtype of 8 bytes."""


@dataclass(eq=False, repr=False)
class RasterTiles:
    """The tiles of a raster and of its overviews. It may be used by many threads at once."""

    folder: Path
    shape: tuple[int, ...]
    """Bands, y and x."""
    dtype: np.dtype[Any]
    nodata: float | None = None
    """The value that means of overviews leave out."""
    _halving: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._codecs, self._is_float = require("imagecodecs", "scenes"), self.dtype.kind == "f"

    def levels(self, count: int | str | None = None) -> int:
        """The number of levels in all, if ``count`` are asked for; as `levels_below` counts."""
        if count == "none":
            return 1
        asked = None if count is None else int(count)
        return 1 + len(levels_below((1, 1, *self.shape), None, asked, axes=(3, 4)))

    def grid(self, level: int) -> Grid:
        """The tiles of a level, the first being 0."""
        sides = (-(-side // 2**level) for side in self.shape[1:])
        return Grid(Box.of((0, 0, 0), (self.shape[0], *sides)), (1, TILE, TILE))

    def encoded(self, level: int) -> Iterator[bytes]:
        """The tiles of a level as they are in a file, band by band and row by row."""
        grid = self.grid(level)
        empty = self._encoded(np.zeros((TILE, TILE), self.dtype))
        for index in indices(grid.cells):
            path = self._path(level, index)
            yield path.read_bytes() if path.is_file() else empty

    def write(self, box: Box, array: NDArray[Any], rule: Rule | None) -> None:
        """Write whole tiles, and those of overviews that are made of them alone.

        Args:
            box: Their place: bands, y and x.
            array: Their values.
            rule: How pixels become one of an overview; None for no overviews.
        """
        for piece in Grid(box, _AT_ONCE):
            level, values = 0, array[piece.within(box)]
            self._put(0, piece, values)
            while rule and level + 1 < self.levels() and self._is_alone(level, piece):
                level += 1
                with self._halving:
                    values = reduced(values, _HALVED, rule, self.nodata)
                start = (n // by for n, by in zip(piece.start, _HALVED, strict=True))
                piece = Box.of(tuple(start), values.shape)
                self._put(level, piece, values)

    def make_overview(
        self, level: int, rule: Rule, threads: int, progress: Callable[[int], None]
    ) -> None:
        """Make the tiles that an overview lacks, of the level above.

        Args:
            level: Its number, 1 or more.
            rule: How pixels become one.
            threads: Tiles that are made at a time.
            progress: Told the number of pixels of each tile that is made.
        """
        grid, above = self.grid(level), self.grid(level - 1)

        def make(index: tuple[int, ...]) -> int:
            box = box_above(grid.cell(index), _HALVED, above.domain.shape)
            if any(self._path(level - 1, each).is_file() for each in indices(above.touching(box))):
                values = reduced(self.read(box, level - 1), _HALVED, rule, self.nodata)
                self._put(level, grid.cell(index), values)
            return grid.cell(index).size

        lacking = (index for index in indices(grid.cells) if not self._path(level, index).is_file())
        for size in in_order(make, lacking, threads, ahead=1):
            progress(size)

    def read(self, box: Box, level: int = 0) -> NDArray[Any]:
        """The values of a box of a level: bands, y and x. A tile that was not written is 0.

        Raises:
            OSError: A tile is damaged.
        """
        grid, out = self.grid(level), np.zeros(box.shape, self.dtype)
        for index in indices(grid.touching(box)):
            path = self._path(level, index)
            if path.is_file():
                cell = grid.cell(index)
                shared = cell & box
                out[shared.within(box)] = self._decoded(path)[shared.within(cell)[1:]]
        return out

    def __getitem__(self, index: tuple[slice, ...]) -> NDArray[Any]:
        sides = [part.indices(side)[:2] for part, side in zip(index, self.shape, strict=True)]
        return self.read(Box(*map(tuple, zip(*sides, strict=True))))

    def _is_alone(self, level: int, box: Box) -> bool:
        """Whether a box of a level has all that tiles of the level below are made of."""
        sides, step = self.grid(level).domain.shape[1:], 2 * TILE
        ends = zip(box.start[1:], box.stop[1:], sides, strict=True)
        return all(a % step == 0 and (b % step == 0 or b == side) for a, b, side in ends)

    def _put(self, level: int, box: Box, values: NDArray[Any]) -> None:
        for index in indices(self.grid(level).touching(box)):
            place = self.grid(level).cell(index)
            with replacing(self._path(level, index)) as draft:
                draft.write_bytes(self._encoded(values[place.within(box)][0]))

    def _path(self, level: int, index: tuple[int, ...]) -> Path:
        band, row, column = index
        return self.folder / str(level) / str(band) / f"{row}.{column}"

    def _encoded(self, values: NDArray[Any]) -> bytes:
        rest = [(0, TILE - side) for side in values.shape]
        tile = np.ascontiguousarray(np.pad(values, rest, mode="edge"))
        codec = self._codecs.floatpred_encode if self._is_float else self._codecs.delta_encode
        encoded: bytes = self._codecs.deflate_encode(codec(tile), level=DEFLATE_LEVEL)
        return encoded

    def _decoded(self, path: Path) -> NDArray[Any]:
        size, codecs = TILE * TILE * self.dtype.itemsize, self._codecs
        try:
            plain = codecs.deflate_decode(path.read_bytes(), out=size)
        except codecs.DeflateError as error:
            raise OSError(f"{path} is damaged: {error}") from error
        tile = np.frombuffer(plain, self.dtype).reshape(TILE, TILE)
        codec = codecs.floatpred_decode if self._is_float else codecs.delta_decode
        values: NDArray[Any] = codec(tile)
        return values
