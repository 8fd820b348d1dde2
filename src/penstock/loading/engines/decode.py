"""Reads and decodes one chunk into an array."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import Pool
from .zarr_metadata import DECODED_INTO, ChunkLayout


def read_chunk_file(path: str, pool: Pool, limit: int) -> NDArray[np.uint8]:
    """The bytes of a file, in an array of the pool. `OSError` for an empty file, for one of more
    than ``limit`` bytes, and for one that becomes shorter meanwhile."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        if not 0 < size <= limit:
            raise OSError(f"the file has {size} bytes; 1 to {limit} can be a chunk")
        buffer = pool.take((size,), np.dtype(np.uint8))
        view, done = buffer.data, 0
        while done < size:
            count = os.preadv(descriptor, [view[done:]], done)
            if count == 0:
                raise OSError(f"it became shorter than its {size} bytes while it was read")
            done += count
        return buffer
    finally:
        os.close(descriptor)


def decode_chunk(layout: ChunkLayout, stored: NDArray[np.uint8], chunk: NDArray[Any]) -> None:
    """Decode a chunk's bytes into an array of its shape. `ValueError` for another number of bytes.

    A codec decodes right into the array only where its header promises to fill it. With fewer bytes
    it would leave the rest as it was: values of another chunk. With more, some codecs of numcodecs
    (Shuffle, Fletcher32) write past the end.
    """
    data: Any = stored
    for codec in layout.codecs[:-1]:
        _promised(codec, data)
        data = codec.decode(data)
    if layout.codecs:
        last = layout.codecs[-1]
        promised = _promised(last, data)
        if promised == chunk.nbytes:
            last.decode(data, out=chunk)
            return
        if promised is not None and promised > chunk.nbytes:  # before it takes so much memory
            raise ValueError(f"the chunk decodes to {promised} bytes, not {chunk.nbytes}")
        data = last.decode(data)
    values = np.frombuffer(data, np.uint8)
    if values.nbytes != chunk.nbytes:
        verb = "decodes to" if layout.codecs else "has"
        raise ValueError(f"the chunk {verb} {values.nbytes} bytes, not {chunk.nbytes}")
    chunk.reshape(-1).view(np.uint8)[:] = values


def _promised(codec: Any, data: Any) -> int | None:
    """The decoded length by a codec's header, None where the header has none."""
    if codec.codec_id not in DECODED_INTO:
        return None
    stored = np.frombuffer(data, np.uint8)
    if codec.codec_id == "blosc":
        return _check_blosc(stored)
    if codec.codec_id == "lz4":  # numcodecs puts the length before the block
        return int.from_bytes(stored[:4].tobytes(), "little")
    return _zstd_length(stored[:18].tobytes())


def _check_blosc(stored: NDArray[np.uint8]) -> int:
    """The decoded length. Checked here, since Blosc trusts its header and reads past the end."""
    if stored.nbytes < 16:
        raise ValueError(f"the chunk has {stored.nbytes} bytes, less than a Blosc header")
    decoded, _, length = (int(n) for n in stored[4:16].view("<u4"))
    if length != stored.nbytes:
        raise ValueError(f"the chunk has {stored.nbytes} bytes, its header says {length}")
    return decoded


def _zstd_length(head: bytes) -> int | None:
    """The decoded length in the header of a Zstandard frame (RFC 8878, 3.1.1.1), None without one.

    >>> _zstd_length(numcodecs.Zstd().encode(bytes(64)))
    64
    """
    if len(head) < 6 or head[:4] != b"\x28\xb5\x2f\xfd":
        return None
    size, one_segment, dictionary = head[4] >> 6, head[4] >> 5 & 1, head[4] & 3
    start = 5 + (not one_segment) + (0, 1, 2, 4)[dictionary]
    width = (one_segment, 2, 4, 8)[size]
    length = int.from_bytes(head[start : start + width], "little")
    return (length + 256 if width == 2 else length) if width else None


def copy_runs(to: NDArray[Any], of: NDArray[Any]) -> None:
    """``to[...] = of``, where each run of adjacent values moves as one element.

    >>> to = np.zeros((2, 5), np.int16)
    >>> copy_runs(to[:, 1:4], np.arange(6, dtype=np.int16).reshape(2, 3))
    >>> to.tolist()
    [[0, 0, 1, 2, 0], [0, 3, 4, 5, 0]]
    """
    length, size = of.shape[-1], of.itemsize
    if length > 1 and to.strides[-1] == of.strides[-1] == size and to.dtype == of.dtype:
        run = np.dtype((np.void, length * size))
        to, of = to.view(run)[..., 0], of.view(run)[..., 0]
    np.copyto(to, of)
