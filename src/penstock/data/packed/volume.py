"""Writes a volume as a packed data set, whose samples are its planes along z."""

from __future__ import annotations

import contextlib
import math
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import StageError, UsageError
from ..box import Box
from ..grid import Grid
from ..stores.lock import OutputLock
from ..stores.lock_place import is_locked
from ..stores.open import open_sink, open_source
from ..stores.protocols import Sink
from .data_folder import check_outside, check_room, clear, finish, in_order, mark_unfinished
from .format import CHECKS, DOCUMENT, IDS, UNFINISHED, VOLUME, Packed, open_dataset

PIECE = 128
"""The side of a piece in voxels: several smaller chunks are made and written together."""
_DTYPE = np.dtype(np.uint16)
_AHEAD = Box((0, 0), (1, 1))  # of t and c

Make = Callable[[Box], NDArray[np.uint16]]


def write_volume(
    root: Path,
    shape: Sequence[int],
    make: Make,
    *,
    chunks: Sequence[int],
    shards: Sequence[int] | None,
    workers: int,
    overwrite: bool,
    facts: Mapping[str, Any],
    progress: Callable[[int], None] = lambda done: None,
) -> Packed:
    """Write a volume of uint16 (z, y, x).

    Memory depends on the pieces, which span whole rows, and not on the number of rows and planes,
    but for 4 bytes for each plane. The result depends neither on ``workers`` nor on how the volume
    is cut.

    Args:
        root: the folder to write, ``*.zarr``.
        shape: voxels along z, y, x.
        make: gives the voxels of any box.
        chunks: the shape of a chunk.
        shards: the shape of a shard, None for none.
        workers: threads; each makes, checks and writes a piece: some chunks, or one shard.
        overwrite: replace a data set that is there.
        facts: further entries of `dataset.json`.
        progress: called with the number of voxels that are done.

    Returns:
        The volume, opened.

    Raises:
        UsageError: the folder holds other files, or cannot be written.
        Refused: the disk is too full.
        StageError: a piece failed.
    """
    domain = Box.of((0, 0, 0), tuple(shape))
    num_bytes = domain.size * _DTYPE.itemsize
    if root.suffix == ".n5":
        raise UsageError(f"OUT {root}: N5 has no place for checksums; name it *.zarr")
    check_room(root, num_bytes, f"{domain.size} voxels", "--shape")
    sink = _new_sink(root, domain, chunks, shards, overwrite)
    checks = _write_pieces(sink, domain, make, root, workers, progress)
    ids = np.arange(shape[0], dtype=np.int64)
    np.save(root / IDS, ids)
    np.savez(root / CHECKS, ids=ids, **{VOLUME: checks})  # type: ignore[arg-type]
    array = {"path": "0", "axes": ["sample", "y", "x"], "decoded_bytes": num_bytes}
    finish(root, {VOLUME: array}, shape[0], {"statistics": None, **facts})
    return open_dataset(root, "OUT")


def _new_sink(
    root: Path,
    domain: Box,
    chunks: Sequence[int],
    shards: Sequence[int] | None,
    overwrite: bool,
) -> Sink:
    """The array of a new volume, in a folder marked as unfinished."""

    def sink_at(path: Path) -> Sink:
        return open_sink(
            str(path),
            domain=_AHEAD + domain,
            dtype=_DTYPE,
            # An array of one plane has an axis z too: the axis of the samples.
            like=open_source(np.zeros((1, 1, 1), _DTYPE)),
            chunks=chunks,
            shards=shards,
            overwrite=overwrite,
            name="OUT",
        )

    check_outside(root)
    if any((root / name).is_file() for name in (DOCUMENT, UNFINISHED)):
        sink_at(root / "new")  # raises while the old volume still exists
        clear(root, overwrite, {"zarr.json"})
        (root / UNFINISHED).unlink()
    sink = sink_at(root)
    if is_locked(sink):  # raises if a job is writing it; else it is no run's output any more
        with contextlib.closing(OutputLock.take([sink], uuid.uuid4().hex)) as lock:
            lock.name()
    sink.create()
    mark_unfinished(root, ["0"])
    return sink


def _write_pieces(
    sink: Sink, domain: Box, make: Make, root: Path, workers: int, progress: Callable[[int], None]
) -> NDArray[np.uint32]:
    """The checksum of each plane."""
    checks, done = np.zeros(domain.shape[0], np.uint32), 0

    def write_piece(piece: Box) -> tuple[Box, NDArray[np.uint16]]:
        try:
            values = make(piece)
            sink.write(_AHEAD + piece, values[None, None])
            return piece, values
        except Exception as error:
            raise StageError("generate", f"{piece} of {root}", error) from error

    pieces = Grid(domain, _piece(sink.write_grid[2:], domain.shape[2]))
    for piece, values in in_order(write_piece, pieces, workers):
        # Pieces hold whole rows and come in the order of rows: a plane's checksum goes on.
        for z, plane in enumerate(values, piece.start[0]):
            checks[z] = zlib.crc32(np.ascontiguousarray(plane).data, checks[z])
        done += piece.size
        progress(done)
    sink.close()
    return checks


def _piece(chunk: Sequence[int], columns: int) -> tuple[int, ...]:
    """The shape of a piece: whole rows of chunks, up to `PIECE` planes and rows and its cube in
    all.

    >>> _piece((64, 128, 128), 128), _piece((1, 512, 512), 500), _piece((64, 128, 128), 1000)
    ((128, 128, 128), (8, 512, 512), (64, 128, 1024))
    """
    sides = [*chunk[:2], -(-columns // chunk[2]) * chunk[2]]
    for axis in (0, 1):
        sides[axis] *= max(1, min(-(-PIECE // sides[axis]), PIECE**3 // math.prod(sides)))
    return tuple(sides)
