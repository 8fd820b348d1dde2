"""Writes a Cloud Optimized GeoTIFF of tiles that are encoded already.

    header, IFDs of image and overviews  |  tiles of the smallest overview  |  ...  |  of the image

An image file directory (IFD) has the places of tiles in the file. So a head without places is
written first, and again once all tiles are there. What stands in it of the raster, such as its CRS
in GeoTIFF's keys, is copied from a small file that GDAL makes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...base import require
from .georeference import GDAL_OPTIONS, Georeference
from .plane_rows import CLASSIC_BYTES, TILE
from .raster_tiles import RasterTiles

Tag = tuple[int, int, int, bytes]
"""The code of a tag, the code of its type, the number of its values, and these."""
_WIDTH, _HEIGHT, _OFFSETS, _SIZES, _SUBFILE = 256, 257, 324, 325, 254
_SHORT, _LONG, _LONG8 = 3, 4, 16
_OF_IMAGE = (270, 305, 306, 33550, 33922, 34264, 34735, 34736, 34737, 42112)
"""Tags that an overview does not repeat: descriptions, the place in the world, GDAL's metadata."""
_GHOST = b"LAYOUT=IFDS_BEFORE_DATA\nKNOWN_INCOMPATIBLE_EDITION=NO\n "
"""The text that GDAL writes between header and IFDs. It makes YES of NO as it changes the file."""


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
        "ENDIANNESS": "LITTLE",
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
