"""An open TensorStore as a source or a sink: Zarr, N5, precomputed, casts and views.

Two things are changed: axes are permuted to t c z y x, and messages are cut to one short line,
without the dump of the spec that TensorStore appends. What a user's spec says is read here, too:
its stores, its cache limits, the array that it describes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import PenstockError
from ..box import Box, Grid
from .cf_packing import Packing
from .frames import Framed, canonical, to_five
from .kvstore import (
    BRIEF,
    DELETING,
    METADATA_FILES,
    address,
    explained_errors,
    first_sentence,
    kvstore_of,
    settled_spec,
    ts,
)
from .protocols import AXES, BoxReader, file_stamp, source_fingerprint

# Members of a spec that do not change which array is meant.
_TRANSIENT = re.compile(
    r"context|cache_pool|data_copy_|recheck_|assume_|open$|create$|delete_existing$|"
    r"(file_io|s3|gcs|http)_|aws_credentials|experimental_"
)

# These override the modes in a user's spec, so that reading from the spec of an output
# (`delete_existing`) deletes nothing.
EXISTING = {"open": True, "create": False, "delete_existing": False, "read": True}


@dataclass(eq=False, repr=False)
class TensorStoreSource(BoxReader, Framed):
    """Reads a TensorStore; made by `open_tensorstore_source`."""

    name: str
    spec: Mapping[str, Any]
    array: Any
    """The open TensorStore as stored."""
    stored_axes: str
    dtype: np.dtype[Any]
    cache_bytes: int
    ome_version: str | None
    """The version of OME-Zarr; None if the array is no level of an OME-Zarr group."""
    packing: Packing | None = None
    """The meaning of stored numbers; None if they are the values."""

    def __post_init__(self) -> None:
        self._view = to_five(self.array, self.stored_axes)
        self.axes = canonical(self.stored_axes)
        self.domain = box_of(self._view.domain)
        layout = self._view.chunk_layout
        self.chunks = tuple(n or 1 for n in layout.read_chunk.shape or (1,) * 5)
        self.grid_origin = grid_origin(self._view)
        self.packed_itemsize = 0 if self.packing is None else self.packing.stored.itemsize
        """Bytes of a stored number, of which `read` holds as many as it gives values; 0 if stored
        numbers are the values."""
        spec = self.array.spec()
        self.address = address(spec.kvstore)
        self.fingerprint = source_fingerprint(
            self.address, self.stored_axes, _meaning(spec.to_json())
        )

    def fill(self, box: Box, out: NDArray[Any]) -> None:
        view = self._view[box.slices]
        with plainly():
            if self.packing is not None:
                self.packing.decode(view.read().result(), out)
            else:
                # A write into `out` decodes right there; a read would make an array of its own
                # first.
                ts.array(out).write(view[ts.d[:].translate_to[0]]).result()

    @cached_property
    def tells_absent(self) -> bool:
        first = Grid(self.domain, self.chunks, self.grid_origin)[0]
        try:
            self.absent([first])
        # Virtual arrays cannot tell; any other fault shows when a chunk is read.
        except (NotImplementedError, ValueError):
            return False
        return True

    def absent(self, cells: Sequence[Box]) -> list[Box]:
        asked = [
            self._view[cell.slices].storage_statistics(query_not_stored=True) for cell in cells
        ]
        with plainly():
            absent = [future.result().not_stored for future in asked]
        return [cell for cell, not_stored in zip(cells, absent, strict=True) if not_stored]

    def with_cache(self, num_bytes: int) -> TensorStoreSource:
        if cache_limits(self.spec):
            return self
        array = opened_for_reading(self.spec, num_bytes)
        return replace(self, array=array, cache_bytes=num_bytes)


@dataclass(eq=False, repr=False)
class TensorStoreSink:
    """Writes a TensorStore; made by `open_tensorstore_sink`."""

    name: str
    where: str
    spec: Any
    """The ``ts.Spec`` that `create` opens."""
    stored_axes: str
    domain: Box
    dtype: np.dtype[Any]
    write_grid: tuple[int, ...]
    grid_origin: tuple[int, ...]
    local_path: Path | None
    address: str
    fingerprint: str
    exists: bool
    references: bool
    """True if chunks are encoded from the caller's array without a copy. With a cache it is False:
    the cache would keep the array when the caller uses it again, and merge its new values into a
    later write."""
    root: Any = None
    """The ``ts.KvStore`` of the store; None for a driver that has none."""
    documents: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the group that the array is in, by key."""
    channels: Sequence[Mapping[str, Any]] = ()
    """Names, colours and windows of the channels of an image; see `Framed.omero`."""
    packing: Mapping[str, Any] = field(default_factory=dict)
    """The attributes that say what stored numbers stand for, of an array of OME-Zarr."""
    replaces: Sequence[str] | None = None
    """The paths of the arrays of the store that `create` deletes; None where it deletes nothing."""

    @property
    def fill(self) -> Any:
        """The value of voxels that were never written. Known after `create`."""
        value = self._view.fill_value
        return 0 if value is None else value

    def check(self) -> None:
        if self.replaces is not None:
            with explained_errors(self.where):
                # The key does not exist, but deleting it needs the right to delete.
                self.root.write(f"{DELETING}-check", None).result()

    def create(self) -> None:
        """Create the store. If it is killed, the next run finds a whole store or nothing."""
        with explained_errors(self.where):
            if self.replaces is not None:
                self.root.write(DELETING, json.dumps({"arrays": self.replaces}).encode()).result()
                for keys in ("", DELETING), (f"{DELETING}\0", ""):  # all but that key
                    self.root.delete_range(ts.KvStore.KeyRange(*keys)).result()
            for key, document in self.documents.items():
                # When a job resumes, the metadata of the first run or of the user is kept.
                if self.root.read(key).result().state != "value":
                    text = json.dumps(document, indent=2, allow_nan=False)
                    self.root.write(key, text.encode()).result()
            array = ts.open(self.spec, context=ts.Context(BRIEF), read=True, write=True).result()
            if self.replaces is not None:
                self.root.write(DELETING, None).result()
        self._view = to_five(array, self.stored_axes)

    def write(self, box: Box, array: NDArray[Any]) -> None:
        assert box in self.domain, f"{box} is not in {self.domain}"
        assert array.dtype == self.dtype, f"{array.dtype} is not {self.dtype}"
        view = self._view[box.slices]
        with plainly():
            view.write(array, can_reference_source_data_indefinitely=self.references).result()

    def close(self) -> None:
        """Check that the array is there still: TensorStore goes on writing chunks into a folder
        that was removed. All metadata is written by `create`."""
        with explained_errors(self.where):
            try:
                ts.open(self.spec, context=ts.Context(BRIEF), **EXISTING).result()
            except ValueError as error:
                if not str(error).startswith("NOT_FOUND"):
                    raise
                raise PenstockError(
                    f"{self.name} was removed while this run wrote it, so it is not complete; "
                    "run again with --overwrite"
                ) from error


@contextmanager
def plainly() -> Iterator[None]:
    """A context that turns errors of reading and writing into one sentence.

    Raises:
        ValueError: TensorStore failed to read or to write.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(first_sentence(error)) from error


def opened_for_reading(spec: Mapping[str, Any], cache_bytes: int) -> Any:
    """The array of a spec, with a cache of up to so many bytes of decoded chunks."""
    context = ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}, **BRIEF})
    said = {"assume_metadata": bool(spec.get("assume_metadata"))}  # which EXISTING would unsay
    return ts.open(spec, context=context, **EXISTING, **said).result()


def grid_origin(five: Any) -> tuple[int, ...]:
    """A coordinate on each axis where a chunk starts; 0 on an axis without chunks."""
    return tuple(n or 0 for n in five.chunk_layout.grid_origin or (0,) * len(AXES))


def box_of(domain: Any) -> Box:
    """The box of a ``ts.IndexDomain``."""
    return Box(tuple(domain.inclusive_min), tuple(domain.exclusive_max))


def settled(spec: Any) -> Any:
    """A user's spec with its key-value stores, at every depth, as `kvstore_of` gives them."""
    if isinstance(spec, list):
        return [settled(value) for value in spec]
    if not isinstance(spec, Mapping):
        return spec
    placed = {key: settled(value) for key, value in spec.items()}
    for key in ("kvstore", "base"):
        if isinstance(placed.get(key), str):
            placed[key] = kvstore_of(placed[key])
    path, store = placed.get("path"), placed.get("kvstore")
    file = store if isinstance(store, Mapping) and store.get("driver") == "file" else None
    if spec.get("driver") == "file" and isinstance(path, str):
        placed["path"] = settled_spec(path)
    elif isinstance(path, str) and ".." in path.split("/") and file is not None:
        placed["kvstore"] = {**file, "path": settled_spec(f"{file.get('path', '')}/{path}/")}
        del placed["path"]
    return placed


def cache_limits(spec: Any) -> list[int]:
    """The limits in bytes of the cache pools that a user's spec sets, at every depth."""
    if isinstance(spec, Mapping):
        here = [v for k, v in spec.items() if k.startswith("cache_pool") and isinstance(v, Mapping)]
        below = [limit for value in spec.values() for limit in cache_limits(value)]
        return [pool.get("total_bytes_limit", 0) for pool in here] + below
    if isinstance(spec, list):
        return [limit for value in spec for limit in cache_limits(value)]
    return []


def _meaning(spec: Any) -> Any:
    """A spec's JSON without the members that change no voxels, and with stamps of local files."""
    if isinstance(spec, list):
        return [_meaning(value) for value in spec]
    if not isinstance(spec, Mapping):
        return spec
    nested = ("base", "kvstore", "layers")
    kept = {
        key: _meaning(value) if key in nested else value
        for key, value in spec.items()
        if not _TRANSIENT.match(key)
    }
    if spec.get("driver") == "file" and "path" in spec:
        path = Path(spec["path"]).resolve()
        files = [path] if path.is_file() else [path / name for name in (*METADATA_FILES, "info")]
        kept |= {"path": str(path), "stamps": [file_stamp(f) for f in files if f.is_file()]}
    return kept
