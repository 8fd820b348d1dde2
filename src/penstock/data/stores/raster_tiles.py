"""The tiles of a raster and of its overviews, and the Cloud Optimized GeoTIFF that they make.

    a block  ──▶  0/its box  (its tiles, and those of overviews)  ──▶  1/0, 2/0, ...  (the others)

    header, IFDs of image and overviews  |  tiles of the smallest overview  |  ...  |  of the image

Encoding takes most of the time that a GeoTIFF takes. So a tile is encoded once, as the file will
have it, by the process that has its values. A tile of an overview is encoded likewise, if one block
has all that it is made of. These tiles of a block are a pack. The other overviews are made at the
end, with a pack for each, and the GeoTIFF is a copy of all tiles.

An image file directory (IFD) has the places of tiles in the file. So a head without places is
written first, and again once all tiles are there. What stands in it of the raster, such as its CRS
in GeoTIFF's keys, is copied from a small file that GDAL makes.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import in_order, require
from ..box import Box, Grid, flatten, indices
from ..levels import Rule, box_above, levels_below, reduced
from .raster import GDAL_OPTIONS, Georeference
from .tile_packs import TilePacks

TILE = 512
"""The side of a tile of a TIFF file."""
DEFLATE_LEVEL = 1
"""The level of deflate: with a predictor, 6 takes 1.5 times as long for files as large."""
CLASSIC_BYTES = 2**32 - 2**26
"""The size, before compression, above which a TIFF file gets 64-bit offsets."""
Tag = tuple[int, int, int, bytes]
"""The code of a tag, the code of its type, the number of its values, and these."""
_Tile = tuple[int, int, bytes]
"""The level of a tile, its number there, and its bytes."""
_WIDTH, _HEIGHT, _OFFSETS, _SIZES, _SUBFILE = 256, 257, 324, 325, 254
_SHORT, _LONG, _LONG8 = 3, 4, 16
_OF_IMAGE = (270, 305, 306, 33550, 33922, 34264, 34735, 34736, 34737, 42112)
"""Tags that an overview does not repeat: descriptions, the place in the world, GDAL's metadata."""
_GHOST = b"LAYOUT=IFDS_BEFORE_DATA\nKNOWN_INCOMPATIBLE_EDITION=NO\n "
"""The text that GDAL writes between header and IFDs. It makes YES of NO as it changes the file."""
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
        self._packs = TilePacks(self.folder, lambda level: len(self.grid(level)))

    def levels(self, count: int | None = None) -> int:
        """The number of levels in all, if ``count`` are asked for; as `levels_below` counts."""
        return 1 + len(levels_below((1, 1, *self.shape), None, count, axes=(3, 4)))

    def grid(self, level: int) -> Grid:
        """The tiles of a level, the first being 0."""
        sides = (-(-side // 2**level) for side in self.shape[1:])
        return Grid(Box.of((0, 0, 0), (self.shape[0], *sides)), (1, TILE, TILE))

    def encoded(self, level: int) -> Iterator[bytes]:
        """The tiles of a level as they are in a file, band by band and row by row."""
        empty = self._encoded(np.zeros((TILE, TILE), self.dtype))
        for number in range(len(self.grid(level))):
            yield self._packs.tile(level, number) or empty

    def write(self, box: Box, array: NDArray[Any], rule: Rule | None) -> None:
        """Write whole tiles, and those of overviews that are made of them alone.

        Args:
            box: Their place: bands, y and x.
            array: Their values.
            rule: How pixels become one of an overview; None for no overviews.
        """
        name = ".".join(map(str, (*box.start, *box.stop)))
        self._packs.write(f"0/{name}", self._made_of(box, array, rule))

    def _made_of(self, box: Box, array: NDArray[Any], rule: Rule | None) -> Iterator[_Tile]:
        for piece in Grid(box, _AT_ONCE):
            level, values = 0, array[piece.within(box)]
            yield from self._tiles(0, piece, values)
            while rule and level + 1 < self.levels() and self._is_alone(level, piece):
                level += 1
                with self._halving:
                    values = reduced(values, _HALVED, rule, self.nodata)
                start = (n // by for n, by in zip(piece.start, _HALVED, strict=True))
                piece = Box.of(tuple(start), values.shape)
                yield from self._tiles(level, piece, values)

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

        def make(index: tuple[int, ...]) -> tuple[int, list[_Tile]]:
            cell = grid.cell(index)
            box = box_above(cell, _HALVED, above.domain.shape)
            numbers = (flatten(each, above.cells) for each in indices(above.touching(box)))
            if not any(self._packs.has(level - 1, number) for number in numbers):
                return cell.size, []
            values = reduced(self.read(box, level - 1), _HALVED, rule, self.nodata)
            return cell.size, list(self._tiles(level, cell, values))

        def made() -> Iterator[_Tile]:
            every = zip(range(len(grid)), indices(grid.cells), strict=True)
            lacking = (index for number, index in every if not self._packs.has(level, number))
            for size, tiles in in_order(make, lacking, threads, ahead=1):
                yield from tiles
                progress(size)

        self._packs.remove(f"{level}/0")  # of an earlier start, from blocks as they were then
        self._packs.write(f"{level}/0", made())

    def read(self, box: Box, level: int = 0) -> NDArray[Any]:
        """The values of a box of a level: bands, y and x. A tile that was not written is 0.

        Raises:
            OSError: A tile is damaged.
        """
        grid, out = self.grid(level), np.zeros(box.shape, self.dtype)
        for index in indices(grid.touching(box)):
            cell = grid.cell(index)
            shared = cell & box
            values = self._decoded(level, flatten(index, grid.cells))
            if values is not None:
                out[shared.within(box)] = values[shared.within(cell)[1:]]
        return out

    def __getitem__(self, index: tuple[slice, ...]) -> NDArray[Any]:
        sides = [part.indices(side)[:2] for part, side in zip(index, self.shape, strict=True)]
        return self.read(Box(*map(tuple, zip(*sides, strict=True))))

    def _is_alone(self, level: int, box: Box) -> bool:
        """Whether a box of a level has all that tiles of the level below are made of."""
        sides, step = self.grid(level).domain.shape[1:], 2 * TILE
        ends = zip(box.start[1:], box.stop[1:], sides, strict=True)
        return all(a % step == 0 and (b % step == 0 or b == side) for a, b, side in ends)

    def _tiles(self, level: int, box: Box, values: NDArray[Any]) -> Iterator[_Tile]:
        grid = self.grid(level)
        for index in indices(grid.touching(box)):
            tile = self._encoded(values[grid.cell(index).within(box)][0])
            yield level, flatten(index, grid.cells), tile

    def _encoded(self, values: NDArray[Any]) -> bytes:
        rest = [(0, TILE - side) for side in values.shape]
        tile = np.ascontiguousarray(np.pad(values, rest, mode="edge") if np.any(rest) else values)
        codec = self._codecs.floatpred_encode if self._is_float else self._codecs.delta_encode
        encoded: bytes = self._codecs.deflate_encode(codec(tile), level=DEFLATE_LEVEL)
        return encoded

    def _decoded(self, level: int, number: int) -> NDArray[Any] | None:
        """The values of a tile; None if it was not written."""
        size, codecs = TILE * TILE * self.dtype.itemsize, self._codecs
        encoded = self._packs.tile(level, number)
        if encoded is None:
            return None
        try:
            plain = codecs.deflate_decode(encoded, out=size)
        except codecs.DeflateError as error:
            where = f"tile {number} of level {level} in {self.folder}"
            raise OSError(f"{where} is damaged: {error}") from error
        tile = np.frombuffer(plain, self.dtype).reshape(TILE, TILE)
        codec = codecs.floatpred_decode if self._is_float else codecs.delta_decode
        values: NDArray[Any] = codec(tile)
        return values


def write_cog(
    path: Path, tiles: RasterTiles, place: Georeference, names: Sequence[str], count: int,
    progress: Callable[[int], None],
) -> None:  # fmt: skip
    """Write a Cloud Optimized GeoTIFF.

    Args:
        path: The file, which is made.
        tiles: Its tiles, and those of its overviews.
        place: Its place in the world.
        names: The name of each band; may be empty.
        count: The number of levels in all.
        progress: Told the number of pixels of each tile that is written.
    """
    said = _said_by_gdal(path.with_name("empty.tif"), tiles, place, names)
    cells = [len(tiles.grid(level)) for level in range(count)]
    big = sum(cells) * TILE * TILE * tiles.dtype.itemsize > CLASSIC_BYTES
    offsets, sizes = ([np.zeros(n, "<u8") for n in cells] for _ in range(2))

    def head() -> bytes:
        levels = range(count)
        ifds = [_tags(said, tiles, n, offsets[n], sizes[n], big=big) for n in levels]
        return _head(ifds, big=big)

    with path.open("wb") as file:
        file.write(head())
        for level in reversed(range(count)):
            for number, tile in enumerate(tiles.encoded(level)):
                offsets[level][number], sizes[level][number] = file.tell(), len(tile)
                file.write(tile)
                progress(TILE * TILE)
        file.seek(0)
        file.write(head())


def _said_by_gdal(
    path: Path, tiles: RasterTiles, place: Georeference, names: Sequence[str]
) -> list[Tag]:
    """The tags of a file of one empty tile in each band."""
    rasterio, tifffile = require("rasterio", "scenes"), require("tifffile", "scenes")
    profile = {
        "driver": "GTiff", "width": TILE, "height": TILE, "count": tiles.shape[0],
        "dtype": tiles.dtype.name, "crs": place.crs, "transform": rasterio.Affine(*place.transform),
        "nodata": tiles.nodata, "tiled": True, "blockxsize": TILE, "blockysize": TILE,
        "interleave": "band", "compress": "deflate",
        "predictor": 3 if tiles.dtype.kind == "f" else 2, "SPARSE_OK": True, "BIGTIFF": "NO",
        "ENDIANNESS": "LITTLE", "ALPHA": "UNSPECIFIED",  # the fourth of four bands is a band
    }  # fmt: skip
    with rasterio.Env(**GDAL_OPTIONS), rasterio.open(path, "w", **profile) as empty:
        for number, name in enumerate(names, 1):
            empty.set_band_description(number, name)
    with tifffile.TiffFile(path) as file, path.open("rb") as stored:
        tags = []
        for tag in file.pages.first.tags.values():
            stored.seek(tag.valueoffset)
            tags.append((tag.code, int(tag.dtype), tag.count, stored.read(tag.valuebytecount)))
    path.unlink()
    return tags


def _tags(
    said: Sequence[Tag], tiles: RasterTiles, level: int, offsets: Any, sizes: Any, *, big: bool
) -> list[Tag]:
    """The tags of a level."""
    height, width = tiles.grid(level).domain.shape[1:]
    number, kind = len(offsets), _LONG8 if big else _LONG
    of_level: list[Tag] = [
        (_WIDTH, _LONG, 1, struct.pack("<I", width)),
        (_HEIGHT, _LONG, 1, struct.pack("<I", height)),
        (_OFFSETS, kind, number, offsets.astype("<u8" if big else "<u4").tobytes()),
        (_SIZES, _LONG, number, sizes.astype("<u4").tobytes()),
    ]
    if level:
        of_level.append((_SUBFILE, _LONG, 1, struct.pack("<I", 1)))
    left_out = {code for code, *_ in of_level} | set(_OF_IMAGE if level else ())
    return sorted([*of_level, *(tag for tag in said if tag[0] not in left_out)])


def _head(ifds: Sequence[Sequence[Tag]], *, big: bool) -> bytes:
    """The header of a TIFF file, and its IFDs, each with the values that do not fit into it."""
    number, word, size = ("<Q", "<Q", 8) if big else ("<H", "<I", 4)
    ghost = b"GDAL_STRUCTURAL_METADATA_SIZE=%06d bytes\n" % len(_GHOST) + _GHOST
    ghost += bytes(len(ghost) % 2)
    start = (16 if big else 8) + len(ghost)
    if big:
        head = struct.pack("<2sHHHQ", b"II", 43, 8, 0, start) + ghost
    else:
        head = struct.pack("<2sHI", b"II", 42, start) + ghost
    for tags in ifds:
        after = len(head) + struct.calcsize(number) + len(tags) * (4 + 2 * size) + size
        entries, values = b"", b""
        for code, kind, count, value in tags:
            entries += struct.pack("<HH", code, kind) + struct.pack(word, count)
            if len(value) <= size:
                entries += value.ljust(size, b"\0")
            else:
                entries += struct.pack(word, after + len(values))
                values += value + bytes(len(value) % 2)
        following = 0 if tags is ifds[-1] else after + len(values)
        head += struct.pack(number, len(tags)) + entries + struct.pack(word, following) + values
    return head
