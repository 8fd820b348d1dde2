"""Chunks of Zarr arrays on a local disk: what their metadata say of them, read and decoded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import Pool, UsageError, parsed_json, require, scrub
from ...data import chunk_names

numcodecs = require("numcodecs", "loaders")
numcodecs.blosc.use_threads = False


DECODED_INTO = ("blosc", "lz4", "zstd")
"""Codecs whose chunks say how many bytes they decode to, so that they decode right into the array.
A rare Zstandard frame does not say it. It takes as much memory as other codecs, which is not
counted."""


class Unsupported(UsageError):
    """The native engine cannot read this array; TensorStore may."""


@dataclass(frozen=True)
class ChunkLayout:
    """The metadata that is needed to read the chunks of a Zarr array."""

    folder: str
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype[Any]
    """The stored type; its byte order may be foreign."""
    codecs: tuple[Any, ...]
    """The codecs in the order of decoding; empty where values are stored as they are."""
    fill_value: Any
    """The value of a chunk that is missing, None where the store sets none."""
    prefix: str
    separator: str

    @property
    def copies(self) -> int:
        """The most memory of decoding, in chunks, without the chunk's file and its array.

        A last codec that decodes into the array takes none. A checksum is read where it lies. Any
        other codec holds its input, its output, and parts of the output a second time.
        """
        made = [codec for codec in self.codecs[:-1] if codec.codec_id != "crc32c"]
        made += [
            codec for codec in self.codecs[-1:] if codec.codec_id not in (*DECODED_INTO, "crc32c")
        ]
        return 3 if made else 0

    def path(self, index: Sequence[int]) -> str:
        """The file of a chunk."""
        place = index[-len(self.shape) :]  # a field may put an axis of one sample before these
        return f"{self.folder}/{self.prefix}{self.separator.join(map(str, place))}"


def read_layout(url: str) -> ChunkLayout:
    """The layout of a local Zarr array. `Unsupported` where only TensorStore can read it."""
    if "://" in url and not url.startswith("file://"):
        raise _unsupported(scrub(url), "it is remote")
    folder = url.removeprefix("file://").rstrip("/")
    for name, parse in ((".zarray", _layout_v2), ("zarr.json", _layout_v3)):
        if (path := Path(folder, name)).is_file():
            try:
                return parse(folder, parsed_json(path.read_text()))
            except UsageError:
                raise
            except (KeyError, TypeError, json.JSONDecodeError) as error:
                raise UsageError(f"{path}: not the metadata of a Zarr array: {error!r}") from error
            except (ValueError, OverflowError) as error:  # such as a fill value of -1 in uint8
                raise _unsupported(folder, str(error)) from error
    if Path(folder).exists():
        raise _unsupported(folder, "it has neither .zarray nor zarr.json")
    raise UsageError(f"{folder}: there is no such array")


def _unsupported(where: str, reason: str) -> Unsupported:
    return Unsupported(f"{where}: {reason}; engine native cannot read that, engine tensorstore may")


def _layout_v2(folder: str, meta: Mapping[str, Any]) -> ChunkLayout:
    if meta["order"] != "C" and len(meta["shape"]) > 1:
        raise _unsupported(folder, f"its chunks are in order {meta['order']}")
    if not isinstance(meta["dtype"], str):
        raise _unsupported(folder, "its dtype is a record")
    dtype = np.dtype(meta["dtype"])
    if dtype.kind not in "biuf":
        raise _unsupported(folder, f"its dtype is {meta['dtype']}")
    stored = [*(meta.get("filters") or ()), *filter(None, [meta["compressor"]])]
    codecs = tuple(_codec(folder, config) for config in reversed(stored))
    return _layout(folder, meta, meta["chunks"], dtype, codecs)


def _layout(
    folder: str, meta: Mapping[str, Any], chunks: Sequence[int], dtype: Any, codecs: Any
) -> ChunkLayout:
    """A layout, with the fields that both formats name alike."""
    fill_value = _fill_value(meta["fill_value"], dtype)
    return ChunkLayout(
        folder, tuple(meta["shape"]), tuple(chunks), dtype, codecs, fill_value, *chunk_names(meta)
    )


_V3_CODECS = {
    "blosc": {"id": "blosc"},
    "zstd": {"id": "zstd"},
    "gzip": {"id": "gzip"},
    "crc32c": {"id": "crc32c", "location": "end"},
}


def _layout_v3(folder: str, meta: Mapping[str, Any]) -> ChunkLayout:
    if meta["node_type"] != "array":
        raise UsageError(f"{folder}: a Zarr {meta['node_type']}, not an array; name one inside it")
    grid = meta["chunk_grid"]
    if grid["name"] != "regular":
        raise _unsupported(folder, f"its chunk grid is {grid['name']}")
    first, *rest = meta["codecs"]
    names = [codec["name"] for codec in meta["codecs"]]
    if names[0] != "bytes" or not set(names[1:]) <= set(_V3_CODECS):
        what = "it is sharded" if "sharding_indexed" in names else f"its codecs are {names}"
        raise _unsupported(folder, what)
    data_type = meta["data_type"]
    if not isinstance(data_type, str) or data_type not in _V3_DTYPES:
        raise _unsupported(folder, f"its data type is {data_type}")
    dtype = np.dtype(data_type)
    if first.get("configuration", {}).get("endian", "little") == "big":
        dtype = dtype.newbyteorder(">")
    codecs = tuple(_codec(folder, _V3_CODECS[codec["name"]]) for codec in reversed(rest))
    return _layout(folder, meta, grid["configuration"]["chunk_shape"], dtype, codecs)


_V3_DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
)


def _codec(folder: str, config: Mapping[str, Any]) -> Any:
    try:
        return numcodecs.get_codec(dict(config))
    except (ValueError, TypeError, ImportError) as error:
        raise _unsupported(folder, f"numcodecs cannot make the codec {dict(config)}") from error


def _fill_value(value: Any, dtype: np.dtype[Any]) -> Any:
    if isinstance(value, str) and value.startswith("0x"):  # the bits of a float
        return np.uint64(int(value, 16)).astype(f"u{dtype.itemsize}").view(dtype.newbyteorder("="))
    return None if value is None else np.asarray(value, dtype)[()]


def read_chunk_file(path: str, pool: Pool, limit: int) -> NDArray[np.uint8]:
    """The bytes of a file, in an array of the pool. `OSError` for an empty file, for one of more
    than ``limit`` bytes, and for one that becomes shorter meanwhile."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # else a pipe is waited for
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
    # No header of a frame is longer.
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
    # Two bytes count from 256, as a single byte holds the numbers below.
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
