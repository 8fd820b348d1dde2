"""A packed data set on disk: its document, arrays, ids and checksums, opened for reading.

The checksums tell whether a loader delivered each sample once, with its true values.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, as_usage_error, check_equal, parsed_json, system_errors, well_formed
from ..stores.ome_levels import array_below

FORMAT, VERSION = "penstock-packed", 1
DOCUMENT = "dataset.json"
"""The file that makes a folder a packed data set; see `penstock.data.packed.write`."""


def parse_document(text: str | bytes, where: str, name: str = DOCUMENT) -> dict[str, Any]:
    """The parsed document of a packed data set.

    Args:
        text: the document, JSON.
        where: the name of the data set in messages.
        name: the name of the document.

    Returns:
        The document.

    Raises:
        UsageError: the text is no document of a packed data set, is of another version, or names
            what is not below it.
    """
    with as_usage_error(f"{where}: {name} cannot be read", ValueError):
        document = parsed_json(text)
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UsageError(f"{where}: {name} is not that of a packed data set")
    if (version := document.get("version")) != VERSION:
        raise UsageError(f"{where}: version {version} of the format; this Penstock reads {VERSION}")
    arrays = document.get("arrays")
    entries = arrays.values() if isinstance(arrays, dict) else ()
    named = [entry.get("path") for entry in entries if isinstance(entry, dict)]
    for path in (*named, *map(document.get, ("ids", "checks", "statistics"))):
        if isinstance(path, str):
            array_below(path, where)
    return document


def chunk_names(meta: Mapping[str, Any]) -> tuple[str, str]:
    """The parts of a chunk's name before its numbers and between them, by its Zarr metadata.

    >>> chunk_names({"zarr_format": 2})
    ('', '.')
    >>> chunk_names({"zarr_format": 3, "chunk_key_encoding": {"name": "default"}})
    ('c/', '/')
    """
    if meta["zarr_format"] == 2:
        return "", meta.get("dimension_separator", ".")
    encoding = meta["chunk_key_encoding"]
    default = encoding["name"] == "default"
    separator = encoding.get("configuration", {}).get("separator", "/" if default else ".")
    return f"c{separator}" if default else "", separator


UNFINISHED = f"{DOCUMENT}.part"
IDS, CHECKS, STATISTICS = "ids.npy", "checks.npz", "statistics.npz"
_METADATA = {".zattrs", ".zarray", "zarr.json", "attributes.json"}


LAYOUT_AXES = ("lat", "lon", "channels")
"""The axes of one sample, as in the seed's data."""


@dataclass(frozen=True, slots=True)
class ArrayLayout:
    """The layout of one array of every sample, without the sample axis, which comes first
    on disk.
    """

    shape: tuple[int, ...]
    """Sides of a sample along `LAYOUT_AXES`."""
    chunks: tuple[int, ...]
    channels: tuple[str, ...]
    """Names of the channels; see `channel_name`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one decoded sample, without padding."""
        return math.prod(self.shape) * np.dtype(np.float32).itemsize

    def stacked(self, fields: Iterable[NDArray[Any]]) -> NDArray[np.float32]:
        """A sample made of fields of shape (channels, lat, lon), one behind the other."""
        array, first = np.empty(self.shape, np.float32), 0
        for levels in fields:
            array[..., first : first + len(levels)] = np.moveaxis(levels, 0, -1)
            first += len(levels)
        return array


@dataclass(frozen=True, slots=True)
class PackedArray:
    """One array of a data set, by its Zarr metadata."""

    name: str
    path: Path
    axes: tuple[str, ...]
    """``sample`` first."""
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    """Shape of what is decoded at once: a chunk, or in a sharded array a chunk inside a shard."""
    shards: tuple[int, ...] | None
    dtype: np.dtype[Any]
    prefix: str
    """The part of a chunk's name before its numbers."""
    separator: str
    """The text between two numbers of a chunk's name."""
    channels: tuple[str, ...]
    """Names of the channels; empty where the data set does not give them."""

    @property
    def sample_bytes(self) -> int:
        """Bytes of one decoded sample, without padding."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def box(self, item: int) -> tuple[slice, ...]:
        """The indices of a sample in the array."""
        return (slice(item, item + 1), *map(slice, self.shape[1:]))


@dataclass(frozen=True, slots=True)
class Packed:
    """A finished packed data set."""

    root: Path
    arrays: Mapping[str, PackedArray]
    ids: NDArray[np.int64]
    """The id of each sample, shape (samples,)."""
    checks: Mapping[str, NDArray[np.uint32]]
    """The CRC-32 of each sample's C-contiguous bytes for each array, shape (samples,)."""
    document: Mapping[str, Any]
    """The content of `dataset.json`."""

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.ids)

    @property
    def sample_bytes(self) -> int:
        """Bytes of one decoded sample over all arrays."""
        return sum(array.sample_bytes for array in self.arrays.values())

    def statistics(self) -> dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """The mean and the standard deviation (over ``n``) of each channel, by array.

        A channel that never changes has deviation 0, and one that holds NaN has NaN.
        """
        with np.load(self.root / STATISTICS) as saved:
            return {name: (saved[f"{name}.mean"], saved[f"{name}.std"]) for name in self.arrays}


def channel_name(variable: str, level: str | None, offset: int | None) -> str:
    """The name of a channel: its variable, its level and its step from the sample's time.

    >>> channel_name("tmp", "500", -1), channel_name("land", None, None)
    ('tmp_500_t-1', 'land')
    """
    time = None if offset is None else f"t{offset:+d}"
    return "_".join(part for part in (variable, level, time) if part is not None)


def open_dataset(root: str | Path, name: str = "DATA") -> Packed:
    """Open the data set in a folder.

    Args:
        root: the folder.
        name: the flag that messages name.

    Returns:
        The data set, whose arrays are not yet read.

    Raises:
        UsageError: the folder holds no whole data set.
    """
    root = Path(root)
    where = f"{name} {root}"
    if not (root / DOCUMENT).is_file():
        if (root / UNFINISHED).is_file():
            raise UsageError(f"{where}: a data set that was not finished; generate it again")
        raise UsageError(f"{where}: no packed data set: there is no {DOCUMENT}")
    document = read_document(root / DOCUMENT, where)
    try:
        with well_formed(f"{where}: its metadata is malformed"):
            ids = np.load(root / document["ids"])
            arrays = {
                key: open_packed_array(root, key, entry, where)
                for key, entry in document["arrays"].items()
            }
            with np.load(root / CHECKS) as saved:
                checks = {key: saved[key] for key in arrays}
            lengths = {DOCUMENT: document.get("samples"), document["ids"]: len(ids)}
            lengths |= {f"checks of {key}": len(values) for key, values in checks.items()}
            lengths |= {str(array.path.name): array.shape[0] for array in arrays.values()}
            check_equal(f"{where}: the numbers of samples", lengths)
    except OSError as error:
        raise UsageError(f"{where}: {error.filename}: {error.strerror}") from error
    return Packed(root, arrays, ids, checks, document)


def read_document(path: Path, where: str) -> dict[str, Any]:
    """The document of a packed data set on this machine; see `parse_document`.

    Args:
        path: the file.
        where: the name of the data set in messages.

    Returns:
        The document.

    Raises:
        UsageError: the file cannot be read, or is no such document.
    """
    with system_errors(f"{where}: {path.name} cannot be read"):
        text = path.read_bytes()
    return parse_document(text, where, path.name)


def open_packed_array(root: Path, name: str, entry: Mapping[str, Any], where: str) -> PackedArray:
    """One array of a data set, by the metadata of its Zarr.

    Args:
        root: the folder of the data set.
        name: the name of the array.
        entry: its entry in `dataset.json`.
        where: the name of the data set in messages.

    Returns:
        The array. Its values are not read.

    Raises:
        UsageError: there is no Zarr array, or its axes do not fit its shape.
    """
    path = root / entry["path"]
    if (path / ".zarray").is_file():
        metadata = parsed_json((path / ".zarray").read_text())
        chunks, shards, dtype = metadata["chunks"], None, metadata["dtype"]
    elif (path / "zarr.json").is_file():
        metadata = parsed_json((path / "zarr.json").read_text())
        shards, dtype = None, metadata["data_type"]
        chunks = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        if metadata["codecs"][0]["name"] == "sharding_indexed":
            shards, chunks = chunks, metadata["codecs"][0]["configuration"]["chunk_shape"]
    else:
        raise UsageError(f"{where}: {entry['path']} is not a Zarr array")
    axes = tuple(entry["axes"])
    if len(axes) != len(metadata["shape"]) or axes[0] != "sample":
        raise UsageError(
            f"{where}: {entry['path']} has shape {tuple(metadata['shape'])} and axes {list(axes)}; "
            "there must be a name for each, and sample first"
        )
    return PackedArray(
        name,
        path,
        axes,
        tuple(metadata["shape"]),
        tuple(chunks),
        tuple(shards) if shards else None,
        np.dtype(dtype),
        *chunk_names(metadata),
        tuple(entry.get("channels", ())),
    )


def checksum(array: NDArray[Any]) -> int:
    """CRC-32 of the C-contiguous bytes of an array."""
    return zlib.crc32(np.ascontiguousarray(array).data)


def stored_bytes(path: Path) -> int:
    """Bytes of the chunk files in a folder, without metadata."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name not in _METADATA)
    return sum(file.stat().st_size for file in files)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A comparison of the planned samples with the delivered ones. All three must be 0."""

    duplicates: int
    """Samples that came more often than was planned."""
    missing: int
    """Samples that were planned and did not come."""
    wrong: int
    """Arrays of a sample that are not, byte for byte, those of the sample planned at that place."""

    @property
    def right(self) -> bool:
        """Whether every planned sample came once, with its values."""
        return self == Delivery(0, 0, 0)


class Audit:
    """Counts duplicates, missing and wrong samples, by nothing but the delivered bytes."""

    def __init__(self, packed: Packed) -> None:
        self._checks = packed.checks
        self._sample_of = {
            name: {int(check): sample for sample, check in enumerate(values)}
            for name, values in packed.checks.items()
        }
        self._planned = {name: Counter[int]() for name in packed.checks}
        self._came = {name: Counter[int]() for name in packed.checks}
        self._wrong = 0

    def batch(self, samples: NDArray[np.int64], batch: Mapping[str, NDArray[Any]]) -> None:
        """Count one batch.

        Args:
            samples: the samples that were planned, shape (samples,).
            batch: for each array, a row for each sample.
        """
        for name, checks in self._checks.items():
            self._planned[name].update(samples.tolist())
            for place, row in enumerate(batch.get(name, ())):
                check = checksum(row)
                came: int | None = int(samples[place]) if place < len(samples) else None
                if came is None or check != checks[came]:
                    self._wrong += 1
                    # If several samples have these bytes, any of them may have come.
                    came = self._sample_of[name].get(check)
                if came is not None:
                    self._came[name][came] += 1

    def result(self) -> Delivery:
        """The delivery of all batches so far: an epoch, or its first batches."""
        # A sample comes in several arrays. The worst of them counts.
        pairs = [(self._came[name], self._planned[name]) for name in self._checks]
        extra = max(((came - planned).total() for came, planned in pairs), default=0)
        lacking = max(((planned - came).total() for came, planned in pairs), default=0)
        return Delivery(extra, lacking, self._wrong)


def num_shared_samples(one: Packed, other: Packed) -> int:
    """The number of samples of ``other`` that are in ``one``, by the checksums of their arrays.

    Args:
        one: a data set.
        other: another data set.

    Returns:
        The number of samples of ``other`` whose checksums are those of a sample of ``one``.
    """
    names = sorted(one.checks.keys() & other.checks.keys())
    ours, theirs = (
        [tuple(checks) for checks in zip(*(p.checks[n].tolist() for n in names), strict=True)]
        for p in (one, other)
    )
    seen = set(ours)
    return sum(sample in seen for sample in theirs)
