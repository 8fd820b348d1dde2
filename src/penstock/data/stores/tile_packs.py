"""Packs: files that hold many encoded tiles each. A file for each tile takes longer, as each is
made safe on disk, renamed and removed by itself.

    tile | tile | ... | level, number, offset and size of each | how many, and a check of these
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import is_draft, replacing

_ROW = np.dtype([(name, "<i8") for name in ("level", "number", "offset", "size")])
_PLACE = np.dtype([("pack", "<u4"), ("offset", "<i8"), ("size", "<u4")])
_END = struct.Struct("<QQ")


@dataclass(eq=False, repr=False)
class TilePacks:
    """The packs of a folder. Where two hold a tile, the newer one counts."""

    folder: Path
    count: Callable[[int], int]
    """The number of tiles of a level."""
    _index: tuple[list[Path], dict[int, NDArray[Any]]] | None = None
    _indexing: threading.Lock = field(default_factory=threading.Lock)

    def write(self, name: str, tiles: Iterable[tuple[int, int, bytes]]) -> None:
        """Write a pack, in the place of an earlier one of its name.

        Args:
            name: Its path in the folder.
            tiles: The level, the number and the bytes of each tile.
        """
        rows, offset = [], 0
        with replacing(self.folder / name) as draft, draft.open("wb") as file:
            for level, number, tile in tiles:
                rows.append((level, number, offset, len(tile)))
                offset += file.write(tile)
            places = np.array(rows, _ROW).tobytes()
            file.write(places + _END.pack(len(rows), zlib.crc32(places)))
        self._read_anew()

    def remove(self, name: str) -> None:
        """Remove a pack, if it is there."""
        (self.folder / name).unlink(missing_ok=True)
        self._read_anew()

    def has(self, level: int, number: int) -> bool:
        """Whether a pack holds a tile."""
        _, places = self._indexed()
        return level in places and places[level][number]["size"] > 0

    def tile(self, level: int, number: int) -> bytes | None:
        """The bytes of a tile; None if no pack holds it."""
        if not self.has(level, number):
            return None
        packs, places = self._indexed()
        place = places[level][number]
        with packs[place["pack"]].open("rb", buffering=0) as file:
            file.seek(int(place["offset"]))
            return file.read(int(place["size"]))

    def _read_anew(self) -> None:
        with self._indexing:
            self._index = None

    def _indexed(self) -> tuple[list[Path], dict[int, NDArray[Any]]]:
        """All packs, and the place of each tile of a level that packs hold."""
        with self._indexing:
            if self._index is None:
                files = [file for file in self.folder.glob("*/*") if not is_draft(file.name)]
                packs = sorted(files, key=lambda file: file.stat().st_mtime_ns)
                places: dict[int, NDArray[Any]] = {}
                for pack, path in enumerate(packs):
                    rows = _rows_of(path)
                    for level in np.unique(rows["level"]):
                        if level not in places:
                            places[level] = np.zeros(self.count(int(level)), _PLACE)
                        of_level = rows[rows["level"] == level]
                        held = places[level]
                        held["pack"][of_level["number"]] = pack
                        held["offset"][of_level["number"]] = of_level["offset"]
                        held["size"][of_level["number"]] = of_level["size"]
                self._index = packs, places
            return self._index


def _rows_of(path: Path) -> NDArray[Any]:
    """The places of the tiles of a pack.

    Raises:
        OSError: It is damaged.
    """
    end = path.stat().st_size - _END.size
    with path.open("rb") as file:
        if end >= 0:
            file.seek(end)
            count, check = _END.unpack(file.read())
            size = count * _ROW.itemsize
            file.seek(max(end - size, 0))
            places = file.read(min(size, end))
            if len(places) == size and zlib.crc32(places) == check:
                return np.frombuffer(places, _ROW)
    raise OSError(f"{path} is damaged: it does not end with the places of its tiles")
