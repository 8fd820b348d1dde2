"""The packed data set: stacked samples on disk, each with an id and a checksum.

    DATA/dataset.json     what is here; written last, so a folder without it was not finished
    DATA/inputs.zarr      (sample, lat, lon, channels), or whatever axes `dataset.json` names
    DATA/targets.zarr
    DATA/ids.npy          int64, one for each sample
    DATA/checks.npz       the ids again, and for each array one CRC-32 for each sample
    DATA/statistics.npz   for each array the mean and the standard deviation of each channel

Shapes, chunks and codecs stand in the metadata of the Zarr arrays and nowhere else.

A volume is an OME-Zarr group and such a data set in one: its samples are its planes along z, their
ids the numbers of the planes. It has no statistics.

    VOLUME/zarr.json, VOLUME/0    the group and its array (z, y, x), called ``volume`` here
    VOLUME/dataset.json, ids.npy, checks.npz    as above

So whatever reads and checks a data set reads and checks a volume.

This module knows the folder: it writes one, opens one, and tells by the checksums whether the
samples that a loader delivers are the ones that were planned. It reads no values; that is what
`loaders` are for.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...base import Refused, StageError, UsageError, absolute, format_bytes, require
from ..box import Box
from ..grid import Grid
from ..stores.claim import Claims
from ..stores.lock_place import is_marked
from ..stores.open import open_sink, open_source
from ..stores.protocols import Sink
from .checksums import PlaneChecks, checksum
from .format import (
    CHECKS,
    DOCUMENT,
    FORMAT,
    IDS,
    STATISTICS,
    UNFINISHED,
    VERSION,
    VOLUME,
    ArrayLayout,
    Packed,
    open_dataset,
    read_document,
    stored_bytes,
)

PIECE = 128
"""Of a volume, smaller chunks are made and written some at a time, in pieces of about this side."""
Result = TypeVar("Result")

Sample = Mapping[str, NDArray[np.float32]]
"""The arrays of one sample by name, without the sample axis."""


def num_shared_samples(one: Packed, other: Packed) -> int:
    """How many samples of ``other`` are in ``one``, by the checksums of all their arrays."""
    names = sorted(one.checks.keys() & other.checks.keys())
    known, asked = (
        [tuple(checks) for checks in zip(*(p.checks[n].tolist() for n in names), strict=True)]
        for p in (one, other)
    )
    seen = set(known)
    return sum(sample in seen for sample in asked)


def write_dataset(
    root: Path,
    layouts: Mapping[str, ArrayLayout],
    ids: Sequence[int],
    make: Callable[[int], Sample],
    *,
    codec: str,
    zarr_format: int,
    shards: int | None,
    workers: int,
    overwrite: bool,
    facts: Mapping[str, Any],
    progress: Callable[[int], None] = lambda done: None,
) -> Packed:
    """Write a data set of ``len(ids)`` samples that ``make(0)``, ``make(1)``, ... give.

    ``workers`` threads make, check and write at once, each one sample (with ``shards``, which is
    how many samples a shard holds, one shard). Results do not depend on their number. ``facts``
    are for `dataset.json`. ``progress`` is told how many samples are done.
    """
    if shards and zarr_format != 3:
        raise UsageError(f"--shards {shards} needs --zarr-format 3; Zarr {zarr_format} has none")
    need = len(ids) * sum(layout.num_bytes for layout in layouts.values())
    _check_room(root, need, f"{len(ids)} samples", "--samples or --grid")
    ts = require("tensorstore", "loaders")
    clear(root, overwrite)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _mark_unfinished(root, [f"{name}.zarr" for name in layouts])
    except OSError as error:
        raise UsageError(f"OUT {root} cannot be written: {error.strerror}") from error
    context = ts.Context({"file_io_sync": False, "data_copy_concurrency": {"limit": workers}})
    arrays = {}
    for name, layout in layouts.items():
        spec = _spec(root / f"{name}.zarr", layout, len(ids), codec, zarr_format, shards)
        arrays[name] = ts.open(spec, create=True, context=context).result()
        if zarr_format == 2:
            _name_axes(root / f"{name}.zarr", layout)

    checks = {name: np.zeros(len(ids), np.uint32) for name in layouts}
    moments = {name: Moments.none(len(layout.channels)) for name, layout in layouts.items()}

    def pack_one(index: int, transaction: Any) -> dict[str, Moments]:
        sample, found = make(index), {}
        for name, layout in layouts.items():
            values = sample[name]
            assert values.shape == layout.shape, f"{name} of sample {index}: {values.shape}"
            assert values.dtype == np.dtype(np.float32), f"{name} of sample {index}: {values.dtype}"
            checks[name][index] = checksum(values)
            found[name] = Moments.of(values, layout.channel_axis)
            arrays[name].with_transaction(transaction)[index].write(values).result()
        return found

    def pack(first: int) -> list[dict[str, Moments]]:
        transaction = ts.Transaction() if shards else None
        found = []
        for index in range(first, min(first + (shards or 1), len(ids))):
            try:
                found.append(pack_one(index, transaction))
            except Exception as error:
                raise StageError("generate", f"sample {index} of {root}", error) from error
        if transaction is not None:
            transaction.commit_async().result()
        return found

    done = 0
    for found in _in_order(pack, range(0, len(ids), shards or 1), workers):
        for of_sample in found:
            moments = {name: moments[name] + of_sample[name] for name in layouts}
            done += 1
        progress(done)

    np.save(root / IDS, np.asarray(ids, np.int64))
    np.savez(root / CHECKS, ids=np.asarray(ids, np.int64), **checks)  # type: ignore[arg-type]
    saved = {f"{name}.mean": found.mean for name, found in moments.items()}
    saved |= {f"{name}.std": found.std for name, found in moments.items()}
    np.savez(root / STATISTICS, **saved)  # type: ignore[arg-type]
    arrays_told = {
        name: {
            "path": f"{name}.zarr",
            "axes": ["sample", *layout.axes],
            "decoded_bytes": len(ids) * layout.num_bytes,
            "channels": layout.channels,
        }
        for name, layout in layouts.items()
    }
    more = {**facts, "codec": codec, "zarr_format": zarr_format}
    _finish(root, arrays_told, len(ids), {"statistics": STATISTICS, **more})
    return open_dataset(root, "OUT")


def write_volume(
    root: Path,
    shape: Sequence[int],
    make: Callable[[Box], NDArray[np.uint16]],
    *,
    chunks: Sequence[int],
    shards: Sequence[int] | None,
    workers: int,
    overwrite: bool,
    facts: Mapping[str, Any],
    progress: Callable[[int], None] = lambda done: None,
) -> Packed:
    """Write a volume of uint16 (z, y, x) of which ``make(box)`` gives any box.

    ``workers`` threads make, check and write at once, each one piece: some chunks, or one of the
    ``shards``. Memory goes with the pieces and not with the volume; of that, 4 bytes for each plane
    and for each row of a plane are held. The result depends neither on ``workers`` nor on how the
    volume is cut. ``progress`` is told how many voxels are done.
    """
    domain, dtype = Box.of((0, 0, 0), tuple(shape)), np.dtype(np.uint16)
    ahead = Box((0, 0), (1, 1))  # of t and c
    if root.suffix == ".n5":
        raise UsageError(f"OUT {root}: N5 has no place for checksums; name it *.zarr")
    _check_room(root, domain.size * dtype.itemsize, f"{domain.size} voxels", "--shape")

    def sink_at(path: Path) -> Sink:
        return open_sink(
            str(path),
            domain=ahead + domain,
            dtype=dtype,
            # Of one plane, too, the array has an axis z: the axis of the samples.
            like=open_source(np.zeros((1, 1, 1), dtype)),
            chunks=chunks,
            shards=shards,
            overwrite=overwrite,
            name="OUT",
        )

    if any((root / name).is_file() for name in (DOCUMENT, UNFINISHED)):
        sink_at(root / "new")  # what cannot be written is refused while the old volume stands
        clear(root, overwrite, {"zarr.json"})
        (root / UNFINISHED).unlink()
    sink = sink_at(root)
    if is_marked(sink):  # as an output, which a living job may be writing; it is no run's from here
        claims = Claims.take([sink], uuid.uuid4().hex, lambda name, run: None)
        with contextlib.closing(claims):
            claims.name()
    sink.create()
    _mark_unfinished(root, ["0"])
    checks = PlaneChecks(domain.shape, dtype.itemsize)

    def write_piece(piece: Box) -> tuple[Box, NDArray[np.uint32]]:
        try:
            values = make(piece)
            sink.write(ahead + piece, values[None, None])
            return piece, checks.of_piece(piece, values)
        except Exception as error:
            raise StageError("generate", f"{piece} of {root}", error) from error

    done = 0
    pieces = Grid(domain, _piece(sink.write_grid[2:]))
    for piece, found in _in_order(write_piece, pieces, workers):
        checks.add(piece, found)
        done += piece.size
        progress(done)
    sink.close()

    ids = np.arange(shape[0], dtype=np.int64)
    np.save(root / IDS, ids)
    np.savez(root / CHECKS, ids=ids, **{VOLUME: checks.result()})  # type: ignore[arg-type]
    told = {
        "path": "0",
        "axes": ["sample", "y", "x"],
        "decoded_bytes": domain.size * dtype.itemsize,
    }
    _finish(root, {VOLUME: told}, shape[0], {"statistics": None, **facts})
    return open_dataset(root, "OUT")


def _piece(chunk: Sequence[int]) -> tuple[int, ...]:
    """Whole chunks, along each axis up to `PIECE`, but no more than a cube of it together.

    >>> _piece((64, 128, 128)), _piece((1, 512, 512)), _piece((256, 256, 256))
    ((128, 128, 128), (8, 512, 512), (256, 256, 256))
    """
    sides = list(chunk)
    for axis, side in enumerate(chunk):
        sides[axis] *= max(1, min(math.ceil(PIECE / side), PIECE**3 // math.prod(sides)))
    return tuple(sides)


def clear(root: Path, overwrite: bool, also: Iterable[str] = ()) -> None:
    """Make way for a data set: refuse what is there, or remove it if it is one and may be.

    ``also`` are names that may be there without the document's saying so.
    """
    if not root.exists() and not root.is_symlink():
        return
    if not root.is_dir():
        raise UsageError(f"OUT {root} is not a folder")
    there = {path.name for path in root.iterdir()}
    if not there:
        return
    document = next((root / name for name in (DOCUMENT, UNFINISHED) if name in there), None)
    if document is None:
        raise UsageError(f"OUT {root} exists and is no packed data set; nothing was removed")
    known = read_document(document, f"OUT {root}")
    if not overwrite:
        raise UsageError(f"OUT {root} exists; use --overwrite to replace it")
    arrays = known.get("arrays")
    entries = arrays.values() if isinstance(arrays, dict) else ()
    paths = [str(entry["path"]) for entry in entries if isinstance(entry, dict) and "path" in entry]
    ours = {DOCUMENT, UNFINISHED, IDS, CHECKS, STATISTICS, *paths, *also}
    if strangers := sorted(there - ours):
        raise UsageError(
            f"OUT {root} holds {strangers[0]}, which is no part of a packed data set; nothing was "
            "removed"
        )
    # The document goes first: from here on nobody takes the folder for a whole data set.
    _mark_unfinished(root, paths)
    (root / DOCUMENT).unlink(missing_ok=True)
    for name in there - {DOCUMENT, UNFINISHED}:
        path = root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _mark_unfinished(root: Path, paths: Sequence[str]) -> None:
    """Say what will be here, so that it is known for ours if it is never finished."""
    arrays = {path.removesuffix(".zarr"): {"path": path} for path in paths}
    document = {"format": FORMAT, "version": VERSION, "arrays": arrays}
    (root / UNFINISHED).write_text(json.dumps(document))


def _check_room(root: Path, need: int, what: str, remedy: str) -> None:
    folder = next(path for path in (root, *root.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    if need > free:
        raise Refused(
            f"{what} are {format_bytes(need)} before compression and {folder} has "
            f"{format_bytes(free)} free; lower {remedy}"
        )


def _in_order(
    work: Callable[[Any], Result], items: Iterable[Any], workers: int
) -> Iterator[Result]:
    """Results in the order of the items; no more than a few are done or held beyond the next."""
    pending: deque[Future[Result]] = deque()
    rest = iter(items)
    with ThreadPoolExecutor(workers, thread_name_prefix="generate") as pool:
        try:
            for item in rest:
                pending.append(pool.submit(work, item))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _spec(
    path: Path, layout: ArrayLayout, samples: int, codec: str, zarr_format: int, shards: int | None
) -> dict[str, Any]:
    """A TensorStore spec of a new array."""
    shape, chunks = [samples, *layout.shape], [1, *layout.chunks]
    kvstore = {"driver": "file", "path": str(absolute(path))}
    # Chunks are stored whatever is in them: one that is missing was lost. The fill value is that
    # of xarray, which on reading would take any other for a missing value.
    common = {"kvstore": kvstore, "store_data_equal_to_fill_value": True}
    blosc = {"cname": codec.removeprefix("blosc-"), "clevel": 5}
    if zarr_format == 2:
        compressor: Any = {"id": "zstd", "level": 3} if codec == "zstd" else None
        if codec.startswith("blosc-"):
            compressor = {"id": "blosc", **blosc, "shuffle": 1, "blocksize": 0}
        metadata = {
            "shape": shape,
            "chunks": chunks,
            "dtype": "<f4",
            "order": "C",
            "compressor": compressor,
            "fill_value": "NaN",
            "filters": None,
        }
        return {"driver": "zarr", **common, "metadata": metadata}
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    if codec == "zstd":
        codecs.append({"name": "zstd", "configuration": {"level": 3}})
    elif codec.startswith("blosc-"):
        settings = {**blosc, "shuffle": "shuffle", "typesize": 4, "blocksize": 0}
        codecs.append({"name": "blosc", "configuration": settings})
    outer = chunks
    if shards:
        sides = zip(layout.shape, layout.chunks, strict=True)
        outer = [shards, *(-(-length // chunk) * chunk for length, chunk in sides)]
        inner = {"chunk_shape": chunks, "codecs": codecs}
        codecs = [{"name": "sharding_indexed", "configuration": inner}]
    metadata = {
        "shape": shape,
        "data_type": "float32",
        "fill_value": "NaN",
        "codecs": codecs,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": outer}},
        "dimension_names": ["sample", *layout.axes],
    }
    return {"driver": "zarr3", **common, "metadata": metadata}


def _name_axes(path: Path, layout: ArrayLayout) -> None:
    """What names the axes of a Zarr 2 array for xarray; Zarr 3 has a place for them."""
    attributes = {"_ARRAY_DIMENSIONS": ["sample", *layout.axes]}
    (path / ".zattrs").write_text(json.dumps(attributes))


def _finish(
    root: Path, arrays: Mapping[str, Mapping[str, Any]], samples: int, facts: Mapping[str, Any]
) -> None:
    """Write the document. An array tells its ``path``, ``axes`` and ``decoded_bytes``."""
    entries, decoded, stored = {}, 0, 0
    for name, array in arrays.items():
        of_array = stored_bytes(root / array["path"])
        entries[name] = {
            **array,
            "stored_bytes": of_array,
            "compression_ratio": array["decoded_bytes"] / of_array,
        }
        decoded, stored = decoded + array["decoded_bytes"], stored + of_array
    document = {
        "format": FORMAT,
        "version": VERSION,
        "samples": samples,
        "arrays": entries,
        "ids": IDS,
        "checks": CHECKS,
        "decoded_bytes": decoded,
        "stored_bytes": stored,
        "compression_ratio": decoded / stored,
        **facts,
    }
    (root / UNFINISHED).write_text(json.dumps(document, indent=1) + "\n")
    (root / UNFINISHED).replace(root / DOCUMENT)


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations of each channel; they add up over samples."""

    count: int
    mean: NDArray[np.float64]
    squares: NDArray[np.float64]

    @classmethod
    def none(cls, num_channels: int) -> Moments:
        return cls(0, np.zeros(num_channels), np.zeros(num_channels))

    @classmethod
    def of(cls, values: NDArray[Any], channel_axis: int) -> Moments:
        """Of one array, in float64 and a slab at a time, which keeps the slab in the cache."""
        channels_last = np.moveaxis(values, channel_axis, -1)
        count = math.prod(channels_last.shape[:-1])
        # Deviations from a value near the mean lose nothing when their squares are added.
        near = channels_last[0].mean(axis=0, dtype=np.float64)
        total, squares = np.zeros_like(near), np.zeros_like(near)
        for slab in channels_last:
            deviations = slab - near
            total += deviations.sum(axis=0)
            squares += np.einsum("xc,xc->c", deviations, deviations)
        return cls(count, near + total / count, squares - total**2 / count)

    def __add__(self, other: Moments) -> Moments:
        """By the formula of Chan, Golub and LeVeque (1979)."""
        count = self.count + other.count
        apart = other.mean - self.mean
        return Moments(
            count,
            self.mean + apart * (other.count / count),
            self.squares + other.squares + apart**2 * (self.count * other.count / count),
        )

    @property
    def std(self) -> NDArray[np.float64]:
        return np.sqrt(np.maximum(self.squares, 0) / self.count)
