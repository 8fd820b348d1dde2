"""An output that becomes one file: blocks go to a scratch Zarr, and the file is made of it.
Blocks of a GeoTIFF lie in the scratch as the tiles that the file will have.

    out.tif.scratch/blocks.zarr  ──▶  out.tif.scratch/made.tif  ──▶  out.tif

Formats of one file take one writer, or have no parts. So the scratch takes the blocks, from any
number of processes and in any number of goes, and holds what the file is to say. Once all blocks
are written the file is made in the scratch folder and renamed. The scratch goes after that: while
it stands, the file at its place is not yet that of the run.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import PenstockError, UsageError, at_home, scrub, usable_cores
from ..box import Box
from ..levels import Rule
from .file_formats import Kind, check_holds, ending_of, kind_of
from .kvstore import address, kvstore_of, open_kvstore
from .omezarr import SCRATCH_TILES, open_omezarr_sink
from .protocols import Source, file_stamp
from .raster import Georeference, georeference_of
from .raster_tiles import MAKING_BYTES, TILE, RasterTiles
from .sliced import Asked, OpenedArray, SlicedSource
from .tensorstore import TensorStoreSink

_SCRATCH_SIDE = 2 * TILE
"""The side of a chunk of a scratch array: of one plane, as files hold planes one after another."""
_HELD = 5
"""Most pieces that are read, held and written at a time."""
_LIBRARY_BYTES = 2**27
"""Bytes of the libraries that write files, and of what they encode at a time."""


def scratch_of(path: Path) -> Path:
    """The scratch Zarr of a file."""
    return path.with_name(f"{path.name}.scratch") / "blocks.zarr"


def rows_at_once(chunk: int) -> int:
    """Rows in a piece: whole tiles, and whole chunks where the chunk's rows are whole tiles."""
    return chunk if chunk % TILE == 0 else TILE


@dataclass(eq=False, repr=False)
class FileSink:
    """An output that becomes a file; made by `open_file_sink`."""

    name: str
    path: Path
    kind: Kind
    scratch: TensorStoreSink
    made: bool
    """True if the file is that of the run, and whole."""
    tiles: RasterTiles | None = None
    """Those of a GeoTIFF."""
    rule: Rule | None = None
    """The rule by which overviews are made of blocks; None for none."""
    georeference: Georeference | None = None
    """The place of a GeoTIFF in the world."""

    def __post_init__(self) -> None:
        scratch, self.root = self.scratch, open_kvstore(kvstore_of(str(self.path)), self.name)
        self.domain, self.dtype = scratch.domain, scratch.dtype
        self.write_grid, self.grid_origin = scratch.write_grid, scratch.grid_origin
        self.local_path: Path | None = self.path
        self.address = address(self.root.spec())
        self.fingerprint = f"{self.address}#{self.kind}-{scratch.fingerprint.rpartition('#')[2]}"
        self.exists = scratch.exists or self.made

    @property
    def fill(self) -> Any:
        return self.scratch.fill

    @property
    def making_bytes(self) -> int:
        """The most memory that making the file takes."""
        if self.tiles is not None:
            return _LIBRARY_BYTES + MAKING_BYTES
        rows = rows_at_once(self.write_grid[3])
        tiles = 4 * usable_cores() * TILE**2
        row = _HELD * min(rows, self.domain.shape[3]) * self.domain.shape[4]
        return _LIBRARY_BYTES + (row + tiles) * self.dtype.itemsize

    @property
    def scratch_bytes(self) -> int:
        """The most bytes on disk that go once the file is made."""
        levels = 4 / 3 if self.tiles else 1
        return int(levels * self.domain.size * self.dtype.itemsize)

    def check(self) -> None:
        self.scratch.check()

    def create(self) -> None:
        if not self.made:
            self.clear()
            self.scratch.create()

    def write(self, box: Box, array: NDArray[Any]) -> None:
        if self.tiles is None:
            self.scratch.write(box, array)
        else:
            self.tiles.write(planar(box), array[0, :, 0], self.rule)

    def close(self) -> None:
        if not self.made:
            self.scratch.close()
        elif not self.path.is_file():
            raise PenstockError(f"{self.name} was removed; run again with --overwrite")

    def clear(self) -> None:
        """Remove what an earlier start has left of a scratch that is no longer one."""
        folder = scratch_of(self.path).parent
        shutil.rmtree(folder / "gone.zarr", ignore_errors=True)
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def open_file_sink(
    place: str,
    *,
    domain: Box,
    dtype: np.dtype[Any],
    like: Source | None,
    chunks: Sequence[int] | None,
    shards: Sequence[int] | None,
    overwrite: bool,
    resume: bool,
    at: Sequence[int] | None,
    rule: Rule | None,
    name: str,
    **_: Any,
) -> FileSink:
    """Prepare to write a GeoTIFF, OME-TIFF or NIfTI file. Settings are those of `open_sink`.

    Raises:
        UsageError: It cannot hold the array, or exists already.
    """
    where, ending = f"{name} {scrub(place)}", ending_of(place)
    if "://" in place:
        raise UsageError(
            f"{where}: a {ending} is written on this machine only; give a path, or OME-Zarr "
            "(*.zarr) for a URL"
        )
    if shards:
        raise UsageError(f"{where}: a {ending} has no shards; leave --shards out")
    path = at_home(place)
    if path.exists() and not path.is_file():
        raise UsageError(f"{where}: is no file")
    if path.exists() and not (overwrite or resume):
        raise UsageError(f"{where}: exists; use --overwrite to replace it")
    if like is not None:  # the numbers in a file stand for themselves
        like = copy.copy(like)
        like.stands_for = {}  # type: ignore[attr-defined]
    kind, at = kind_of(str(ending), like), at or domain.start
    check_holds(kind, domain.shape, dtype, like.units if like else (None,) * 5, where)
    sides = tuple(chunks or (_SCRATCH_SIDE,) * 2)[-2:]
    if kind == "cog":  # whole tiles
        sides = tuple(-(-side // TILE) * TILE for side in sides)
    scratch = open_omezarr_sink(
        str(scratch_of(path)), domain=domain, dtype=dtype, like=like,
        chunks=(1, *(min(pair) for pair in zip(sides, domain.shape[3:], strict=True))),
        shards=None, overwrite=overwrite, resume=resume, ome_version="0.5", at=at, name=name,
        scratch=True,
    )  # fmt: skip
    place_of_file = georeference_of(like, at, dtype, where) if kind == "cog" and like else None
    record = {
        "place": place_of_file and asdict(place_of_file),
        "affine": _moved(getattr(like, "affine", None), at),
    }
    document = scratch.documents["zarr.json"]
    attributes = {**document["attributes"], "penstock": record}
    scratch = replace(scratch, documents={"zarr.json": {**document, "attributes": attributes}})
    made = resume and path.is_file() and not scratch.exists
    tiles = None
    if place_of_file is not None:
        tiles = tiles_of(path, planar(domain).shape, dtype, place_of_file.nodata)
    return FileSink(scrub(place), path, kind, scratch, made, tiles, rule, place_of_file)


def planar(box: Box) -> Box:
    """The bands, rows and columns of a box along t c z y x."""
    return Box((box.start[1], *box.start[3:]), (box.stop[1], *box.stop[3:]))


def source_of_tiles(path: Path, scratch: Source, name: str) -> Source:
    """The blocks of an output that becomes a file, as they lie in its scratch.

    Args:
        path: The file that they become.
        scratch: The scratch Zarr.
        name: The flag that messages name.
    """
    tiles = tiles_of(path, planar(scratch.domain).shape, scratch.dtype, None)
    if not tiles.folder.is_dir():
        return scratch
    opened, place = OpenedArray(array=tiles, labels="cyx", chunks=(1, TILE, TILE)), scratch_of(path)
    asked = Asked(path=str(place), where=f"{name} {place}")
    return SlicedSource(opened, asked, str(place.resolve()), file_stamp(place))


def tiles_of(
    path: Path, shape: Sequence[int], dtype: np.dtype[Any], nodata: str | None
) -> RasterTiles:
    """The tiles that a GeoTIFF is made of: they go where its scratch goes."""
    value = None if nodata is None else float(nodata)
    return RasterTiles(scratch_of(path) / SCRATCH_TILES, tuple(shape), dtype, value)


def _moved(affine: Sequence[Sequence[float]] | None, at: Sequence[int]) -> Any:
    """An affine matrix (x y z) as it is from the voxel ``at`` (t c z y x)."""
    if affine is None:
        return None
    step = np.eye(4)
    step[:3, 3] = at[:1:-1]
    return (np.array(affine) @ step).tolist()
