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
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .batches import Field, PatchGrid
from .box import Box
from .claim import Claims, is_marked
from .errors import Refused, StageError, UsageError, require
from .files import settled
from .grid import Grid
from .loaders import (
    DOCUMENT,
    FORMAT,
    VERSION,
    Location,
    Selection,
    check_version,
    chunk_names,
    first_level,
    parse_document,
    read_text,
)
from .store import Sink, open_sink, open_source
from .units import format_bytes

UNFINISHED = f"{DOCUMENT}.part"
IDS, CHECKS, STATISTICS = "ids.npy", "checks.npz", "statistics.npz"
_METADATA = {".zattrs", ".zarray", "zarr.json", "attributes.json"}
VOLUME = "volume"
"""What the one array of a volume is called."""
PIECE = 128
"""Of a volume, smaller chunks are made and written some at a time, in pieces of about this side."""
Result = TypeVar("Result")

Sample = Mapping[str, NDArray[np.float32]]
"""The arrays of one sample by name, without the sample axis."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How one array of every sample looks. The sample axis, of one sample to a chunk, comes first
    on disk and is left out here."""

    axes: tuple[str, ...]
    """Names of the axes; one of them is ``channels``."""
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    channels: tuple[str, ...]
    """Names of the channels; see `channel_name`."""

    @property
    def channel_axis(self) -> int:
        return self.axes.index("channels")

    @property
    def num_bytes(self) -> int:
        """Of one decoded sample, without padding."""
        return math.prod(self.shape) * np.dtype(np.float32).itemsize


@dataclass(frozen=True, slots=True)
class PackedArray:
    """One array of a data set, as its Zarr metadata has it."""

    name: str
    path: Path
    axes: tuple[str, ...]
    """``sample`` first."""
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    """The least that is decoded at once: of a sharded array, the chunks inside the shards."""
    shards: tuple[int, ...] | None
    dtype: np.dtype[Any]
    zarr_format: int
    prefix: str
    """Of the name of a chunk, before its numbers."""
    separator: str
    """Between them."""
    channels: tuple[str, ...]
    """Names of the channels; empty where the data set does not give them."""

    @property
    def sample_bytes(self) -> int:
        """Of one decoded sample, without padding."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def box(self, item: int) -> tuple[slice, ...]:
        """Where a sample lies in the array."""
        return (slice(item, item + 1), *map(slice, self.shape[1:]))


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed data set that was finished."""

    root: Path
    arrays: Mapping[str, PackedArray]
    ids: NDArray[np.int64]
    """Of each sample, shape (samples,)."""
    checks: Mapping[str, NDArray[np.uint32]]
    """For each array, the CRC-32 of each sample's C-contiguous bytes, shape (samples,)."""
    document: Mapping[str, Any]
    """What `dataset.json` says."""

    @property
    def num_samples(self) -> int:
        return len(self.ids)

    @property
    def sample_bytes(self) -> int:
        """Of one decoded sample over all arrays."""
        return sum(array.sample_bytes for array in self.arrays.values())

    @property
    def stored_bytes(self) -> int:
        """Of all chunks, as the files are long."""
        return sum(_stored_bytes(array.path) for array in self.arrays.values())

    def statistics(self) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """For each array the mean and the standard deviation (over ``n``) of each channel.

        A channel that never changes has deviation 0, and one that holds NaN has NaN. Raises
        `UsageError` for a volume, which has none.
        """
        if self.document.get("statistics") is None:
            raise UsageError(f"{self.root}: holds no statistics; a volume has none")
        with np.load(self.root / STATISTICS) as saved:
            return {name: (saved[f"{name}.mean"], saved[f"{name}.std"]) for name in self.arrays}


def shared(one: Packed, other: Packed) -> int:
    """How many samples of ``other`` are in ``one``, by the checksums of all their arrays."""
    names = sorted(one.checks.keys() & other.checks.keys())
    known, asked = (
        [tuple(checks) for checks in zip(*(p.checks[n].tolist() for n in names), strict=True)]
        for p in (one, other)
    )
    seen = set(known)
    return sum(sample in seen for sample in asked)


def channel_name(variable: str, level: str | None, offset: int | None) -> str:
    """
    >>> channel_name("tmp", "500", -1), channel_name("land", None, None)
    ('tmp_500_t-1', 'land')
    """
    time = None if offset is None else f"t{offset:+d}"
    return "_".join(part for part in (variable, level, time) if part is not None)


def checksum(array: NDArray[Any]) -> int:
    """CRC-32 of the C-contiguous bytes of an array."""
    return zlib.crc32(np.ascontiguousarray(array).data)


# --- opening ---------------------------------------------------------------------------------


def open_dataset(root: str | Path, name: str = "DATA") -> Packed:
    """Open the data set in a folder. Raises `UsageError`, naming ``name``, where none is whole."""
    root = Path(root)
    where = f"{name} {root}"
    if not (root / DOCUMENT).is_file():
        if (root / UNFINISHED).is_file():
            raise UsageError(f"{where}: a data set that was not finished; generate it again")
        raise UsageError(f"{where}: no packed data set: there is no {DOCUMENT}")
    document = _read_document(root / DOCUMENT, where)
    check_version(document, where)
    try:
        ids = np.load(root / document["ids"])
        arrays = {
            key: _open_array(root, key, entry, where) for key, entry in document["arrays"].items()
        }
        with np.load(root / CHECKS) as saved:
            checks = {key: saved[key] for key in arrays}
    except OSError as error:
        raise UsageError(f"{where}: {error.filename}: {error.strerror}") from error
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise (
            error
            if isinstance(error, UsageError)
            else UsageError(f"{where}: what describes it is malformed: {error!r}")
        ) from error
    lengths = {DOCUMENT: document.get("samples"), document["ids"]: len(ids)}
    lengths |= {f"checks of {key}": len(values) for key, values in checks.items()}
    lengths |= {str(array.path.name): array.shape[0] for array in arrays.values()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{what} {count}" for what, count in lengths.items())
        raise UsageError(f"{where}: the numbers of samples differ: {told}")
    return Packed(root, arrays, ids, checks, document)


@dataclass(frozen=True, slots=True)
class PatchedArray(PackedArray):
    """An array whose patches count as samples."""

    cut: Field
    """How they are cut."""

    @property
    def sample_bytes(self) -> int:
        """Of one decoded patch, without padding."""
        return self.cut.item_nbytes

    def box(self, item: int) -> tuple[slice, ...]:
        """Where a patch lies in the array."""
        field = self.cut
        assert field.patch is not None
        sample, patch = divmod(item, field.patches_per_sample)
        box = [slice(sample, sample + 1), *(slice(0, n) for n in field.shape[1:])]
        for (axis, start), size in zip(
            field.patch_start(patch).items(), field.patch.shape, strict=True
        ):
            box[axis] = slice(start, start + size)
        return tuple(box[len(field.shape) - len(self.shape) :])


def cut_of(array: PackedArray) -> Field | None:
    """How an array's patches are cut, where these count as samples."""
    return array.cut if isinstance(array, PatchedArray) else None


def open_any(place: str | Path, name: str = "DATA", patch: Sequence[int] | None = None) -> Packed:
    """A packed data set, or one array (Zarr, N5, the first level of an OME-Zarr image) as if it
    were one: axis 0 counts its samples, and it has no checksums until `with_checks` reads some.

    With a ``patch``, the patches that `Loader` cuts count as samples.
    """
    packed = _open_any(place, name)
    if patch is None:
        return packed
    selection = Selection(patch=dict.fromkeys(packed.arrays, PatchGrid(tuple(patch))))
    arrays, counts = {}, set()
    for key, array in packed.arrays.items():
        field = selection.field(
            key, Location(str(array.path), array.axes), array.shape, array.chunks, array.dtype,
            volume=selection.is_volume(key, len(array.shape)),
        )  # fmt: skip
        whole: dict[str, Any] = {own.name: getattr(array, own.name) for own in fields(array)}
        arrays[key] = PatchedArray(**whole, cut=field)
        counts.add(field.shape[0] * field.patches_per_sample)
    if len(counts) > 1:
        raise UsageError(f"{name}: --patch cuts the arrays into different numbers of patches")
    document = {**packed.document, "patch": list(patch)}
    return Packed(packed.root, arrays, np.arange(counts.pop()), {}, document)


def _open_any(place: str | Path, name: str) -> Packed:
    path = Path(place)
    known = (path / DOCUMENT, path / UNFINISHED)
    if any(file.is_file() for file in known) or not path.is_dir():
        return open_dataset(path, name)
    path = Path(first_level(str(path)))
    where = f"{name} {path}"
    if not any((path / m).is_file() for m in (".zarray", "zarr.json", "attributes.json")):
        return open_dataset(path, name)  # which says that it is none
    try:
        array = _open_plain(path, where)
    except (OSError, KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{where}: holds no array: {error!r}") from error
    stored, decoded = _stored_bytes(path), math.prod(array.shape) * array.dtype.itemsize
    document = {
        "path": str(path), "shape": array.shape, "chunks": array.chunks, "shards": array.shards,
        "dtype": str(array.dtype), "stored_bytes": stored,
        "compression_ratio": decoded / stored if stored else None,
    }  # fmt: skip
    return Packed(path.parent, {array.name: array}, np.arange(array.shape[0]), {}, document)


def _open_plain(path: Path, where: str) -> PackedArray:
    if (path / "attributes.json").is_file():
        found = json.loads((path / "attributes.json").read_text())
        shape, chunks = tuple(found["dimensions"]), tuple(found["blockSize"])
        dtype = np.dtype(found["dataType"]).newbyteorder(">")
        axes = ("sample", *map(str, range(1, len(shape))))
        return PackedArray("data", path, axes, shape, chunks, None, dtype, 2, "", "/", ())
    metadata = next(path / n for n in (".zarray", "zarr.json") if (path / n).is_file())
    ndim = len(json.loads(metadata.read_text())["shape"])
    entry = {"path": path.name, "axes": ["sample", *map(str, range(1, ndim))]}
    return _open_array(path.parent, "data", entry, where)


def with_checks(packed: Packed, samples: Iterable[int]) -> Packed:
    """The data set with the checksums of some samples at least. Where it brings none, each of them
    is read alone by TensorStore, as no loader reads it."""
    if packed.checks:
        return packed
    from .loaders.tensorstore import open_plainly

    checks = {}
    for name, array in packed.arrays.items():
        stored = open_plainly(str(array.path))
        checks[name] = np.zeros(packed.num_samples, np.uint32)
        for sample in sorted(set(samples)):
            checks[name][sample] = checksum(stored[array.box(sample)].read().result())
    return replace(packed, checks=checks)


def _read_document(path: Path, where: str) -> dict[str, Any]:
    return parse_document(read_text(path, where), where, path.name)


def _open_array(root: Path, name: str, entry: Mapping[str, Any], where: str) -> PackedArray:
    path = root / entry["path"]
    if (path / ".zarray").is_file():
        found = json.loads((path / ".zarray").read_text())
        version, chunks, shards, dtype = 2, found["chunks"], None, found["dtype"]
    elif (path / "zarr.json").is_file():
        found = json.loads((path / "zarr.json").read_text())
        version, shards, dtype = 3, None, found["data_type"]
        chunks = found["chunk_grid"]["configuration"]["chunk_shape"]
        if found["codecs"][0]["name"] == "sharding_indexed":
            shards, chunks = chunks, found["codecs"][0]["configuration"]["chunk_shape"]
    else:
        raise UsageError(f"{where}: {entry['path']} is no Zarr array")
    axes = tuple(entry["axes"])
    if len(axes) != len(found["shape"]) or axes[0] != "sample":
        raise UsageError(
            f"{where}: {entry['path']} has shape {tuple(found['shape'])} and axes {list(axes)}; "
            "there must be a name for each, and sample first"
        )
    return PackedArray(
        name,
        path,
        axes,
        tuple(found["shape"]),
        tuple(chunks),
        tuple(shards) if shards else None,
        np.dtype(dtype),
        version,
        *chunk_names(found),
        tuple(entry.get("channels", ())),
    )


# --- writing ---------------------------------------------------------------------------------


def write(
    root: Path,
    layouts: Mapping[str, Layout],
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
    known = _read_document(document, f"OUT {root}")
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
    path: Path, layout: Layout, samples: int, codec: str, zarr_format: int, shards: int | None
) -> dict[str, Any]:
    """A TensorStore spec of a new array."""
    shape, chunks = [samples, *layout.shape], [1, *layout.chunks]
    kvstore = {"driver": "file", "path": str(settled(path))}
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


def _name_axes(path: Path, layout: Layout) -> None:
    """What names the axes of a Zarr 2 array for xarray; Zarr 3 has a place for them."""
    attributes = {"_ARRAY_DIMENSIONS": ["sample", *layout.axes]}
    (path / ".zattrs").write_text(json.dumps(attributes))


def _finish(
    root: Path, arrays: Mapping[str, Mapping[str, Any]], samples: int, facts: Mapping[str, Any]
) -> None:
    """Write the document. An array tells its ``path``, ``axes`` and ``decoded_bytes``."""
    entries, decoded, stored = {}, 0, 0
    for name, array in arrays.items():
        of_array = _stored_bytes(root / array["path"])
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


def _stored_bytes(path: Path) -> int:
    files = (file for file in path.rglob("*") if file.is_file() and file.name not in _METADATA)
    return sum(file.stat().st_size for file in files)


# --- statistics ------------------------------------------------------------------------------


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


# --- checksums of planes that come in pieces -------------------------------------------------

_POLYNOMIAL = np.uint32(0xEDB88320)
"""Of CRC-32, x to the power of 0 in the highest bit, as everywhere in this part."""
_ONES = 0xFFFFFFFF


class PlaneChecks:
    """The CRC-32 of each plane (z) of a volume, which is cut in any way and comes in any order.

    Within its first and its last step, which turn all bits round, CRC-32 is linear: that of a plane
    is the sum (xor) of those of its rows, each among zeros. And zeros that follow a row multiply
    it by a power of x modulo the polynomial.
    """

    def __init__(self, shape: Sequence[int], itemsize: int) -> None:
        planes, rows, columns = shape
        row_bytes = columns * itemsize
        self._itemsize, self._columns = itemsize, columns
        self._below = _power_of_x(8 * row_bytes * np.arange(rows - 1, -1, -1, dtype=np.int64))
        """What the rows below a row multiply it by, shape (rows,)."""
        whole = _power_of_x(np.array([8 * row_bytes * rows]))
        of_zeros = _product(np.full(1, _ONES, np.uint32), whole) ^ np.uint32(_ONES)
        self._checks = np.repeat(of_zeros, planes)

    def of_piece(self, piece: Box, values: NDArray[Any]) -> NDArray[np.uint32]:
        """What a piece contributes to each of its planes; may be called by many threads."""
        flat = np.ascontiguousarray(values).reshape(-1, values.shape[-1])
        # Begun with all ones, which the first step turns round, and with the last step undone.
        linear = [zlib.crc32(row.data, _ONES) ^ _ONES for row in flat]
        rows = np.array(linear, np.uint32).reshape(values.shape[:2])
        planes = np.bitwise_xor.reduce(
            _product(rows, self._below[piece.start[1] : piece.stop[1]]), axis=1
        )
        right = 8 * self._itemsize * (self._columns - piece.stop[2])
        return _product(planes, _power_of_x(np.array([right])))

    def add(self, piece: Box, contributed: NDArray[np.uint32]) -> None:
        self._checks[piece.start[0] : piece.stop[0]] ^= contributed

    def result(self) -> NDArray[np.uint32]:
        """Shape (planes,); once every voxel has been in one piece."""
        return self._checks


def _product(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Polynomials multiplied modulo that of CRC-32, element by element."""
    product = np.zeros(np.broadcast_shapes(a.shape, b.shape), np.uint32)
    one = np.uint32(1)
    for bit in range(31, -1, -1):
        product ^= (a >> np.uint32(bit) & one) * b
        b = (b >> one) ^ (b & one) * _POLYNOMIAL  # times x
    return product


def _power_of_x(exponents: NDArray[np.int64]) -> NDArray[np.uint32]:
    """x to these powers, modulo the polynomial of CRC-32."""
    found = np.full(exponents.shape, 1 << 31, np.uint32)
    square = np.full(1, 1 << 30, np.uint32)
    left = exponents.copy()
    while left.any():
        found = np.where(left & 1, _product(found, square), found)
        square, left = _product(square, square), left >> 1
    return found


# --- proof -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a loader made of a plan. All three must be 0."""

    duplicates: int
    """Samples that came more often than was planned."""
    missing: int
    """Samples that were planned and did not come."""
    wrong: int
    """Arrays of a sample that are not, byte for byte, those of the sample planned at that place."""

    @property
    def right(self) -> bool:
        return self == Delivery(0, 0, 0)


class Audit:
    """Counts duplicates, missing and wrong samples. It goes by the bytes that came and asks no
    loader what they are."""

    def __init__(self, packed: Packed) -> None:
        self._checks = packed.checks
        self._sample_of = {
            name: {int(check): sample for sample, check in enumerate(values)}
            for name, values in packed.checks.items()
        }
        self._planned: Counter[tuple[str, int]] = Counter()
        self._came: Counter[tuple[str, int]] = Counter()
        self._wrong = 0

    def batch(self, samples: NDArray[np.int64], batch: Mapping[str, NDArray[Any]]) -> None:
        """Count one batch: ``samples`` were planned, ``batch`` has a row for each in each array."""
        for name in self._checks:
            self._planned.update((name, int(sample)) for sample in samples)
            rows = batch.get(name, ())
            for place, row in enumerate(rows):
                check = checksum(row)
                came: int | None = int(samples[place]) if place < len(samples) else None
                if came is None or check != self._checks[name][came]:
                    self._wrong += 1
                    # Of samples that are alike, any: their bytes do not tell which one came.
                    came = self._sample_of[name].get(check)
                if came is not None:
                    self._came[name, came] += 1

    def result(self) -> Delivery:
        """Of all batches so far, which is an epoch or a part of one that ends with a batch."""
        # A sample comes in several arrays, and in the worst of them it is counted.
        extra, lacking = self._came - self._planned, self._planned - self._came
        return Delivery(_worst(extra), _worst(lacking), self._wrong)


def _worst(counts: Counter[tuple[str, int]]) -> int:
    by_sample: dict[int, int] = {}
    for (_, sample), count in counts.items():
        by_sample[sample] = max(count, by_sample.get(sample, 0))
    return sum(by_sample.values())
