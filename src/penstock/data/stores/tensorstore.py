"""Any array that TensorStore opens: Zarr, N5, precomputed, casts and views, local or remote.

A user's spec reaches TensorStore as it was written; ``overwrite`` and ``resume`` change its open
mode and no more. What comes back is put right twice: axes are permuted to t c z y x, and messages
lose the dump of the spec that TensorStore appends and are kept to one short line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, scrub
from ..box import Box
from ..grid import Grid
from .kvstore import (
    DELETING,
    IMPATIENT,
    STORE_MARKERS,
    address,
    check_deletable,
    explained_errors,
    first_sentence,
    half_deleted,
    is_store,
    kvstore_of,
    local_path,
    open_kvstore,
    settled_spec,
    store_folder,
    ts,
)
from .protocols import (
    AXES,
    OUTPUT_DTYPES,
    canonical,
    check_dtype,
    file_stamp,
    name_axes,
    source_fingerprint,
    to_five,
    unit_name,
)

# What a spec may say without another array being meant.
_TRANSIENT = re.compile(
    r"context|cache_pool|data_copy_|recheck_|assume_|open$|create$|delete_existing$|"
    r"(file_io|s3|gcs|http)_|aws_credentials|experimental_"
)


_PATIENT = {
    f"{kind}_request_retries": {"max_retries": retries, "initial_delay": "1s"}
    for kind, retries in (("http", 6), ("s3", 10), ("gcs", 10))
}
# These stand above a spec's own mode, so that reading from a sink's spec deletes nothing.
_EXISTING = {"open": True, "create": False, "delete_existing": False, "read": True}


@dataclass(eq=False, repr=False)
class TensorStoreSource:
    """Reads a TensorStore; made by `open_tensorstore_source`."""

    name: str
    spec: Mapping[str, Any]
    array: Any
    """The open TensorStore as stored."""
    stored_axes: str
    dtype: np.dtype[Any]
    scale: tuple[float, ...] | None
    units: tuple[str | None, ...]
    translation: tuple[float, ...]
    cache_bytes: int
    ome_version: str | None
    """Set where the array is a level of an OME-Zarr group."""

    def __post_init__(self) -> None:
        self._view = to_five(self.array, self.stored_axes)
        self.axes = canonical(self.stored_axes)
        self.domain = _box(self._view.domain)
        layout = self._view.chunk_layout
        self.chunks = tuple(n or 1 for n in layout.read_chunk.shape or (1,) * 5)
        self.grid_origin = _grid_origin(self._view)
        spec = self.array.spec()
        self.address = address(spec.kvstore)
        self.fingerprint = source_fingerprint(
            self.address, self.stored_axes, _meaning(spec.to_json())
        )

    def read(self, box: Box, out: NDArray[Any] | None = None) -> NDArray[Any]:
        assert box in self.domain, f"{box} is not in {self.domain}"
        view = self._view[box.slices]
        with plainly():
            if out is None:
                array: NDArray[Any] = view.read().result()
                return array
            ts.array(out).write(view[ts.d[:].translate_to[0]]).result()
        return out

    @cached_property
    def tells_absent(self) -> bool:
        first = Grid(self.domain, self.chunks, self.grid_origin)[0]
        try:
            self.absent([first])
        except (NotImplementedError, ValueError):  # a virtual array; or reading will tell it
            return False
        return True

    def absent(self, cells: Sequence[Box]) -> list[Box]:
        asked = [
            self._view[cell.slices].storage_statistics(query_not_stored=True) for cell in cells
        ]
        with plainly():
            told = [future.result().not_stored for future in asked]
        return [cell for cell, not_stored in zip(cells, told, strict=True) if not_stored]

    def with_cache(self, num_bytes: int) -> TensorStoreSource:
        if _pools(self.spec):
            return self
        array = ts.open(self.spec, context=_cache(num_bytes), **_EXISTING).result()
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
    """Whether whole chunks are encoded from the caller's array without a copy. A cache would keep
    that array after it is the caller's again, and merge what it then holds into a later write."""
    root: Any = None
    """The ``ts.KvStore`` of the store; None for a driver that has none."""
    documents: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the group that the array is in, by key."""
    replaces: Sequence[str] | None = None
    """The paths of the arrays of the store that `create` deletes; None where it deletes nothing."""

    def check(self) -> None:
        if self.replaces is not None:
            with explained_errors(
                self.where
            ):  # no such key is there; deleting needs the right to delete
                self.root.write(f"{DELETING}-check", None).result()

    def create(self) -> None:
        """Killed at any point, it leaves what the next one takes for a store, or for nothing."""
        with explained_errors(self.where):
            if self.replaces is not None:
                self.root.write(DELETING, json.dumps({"arrays": self.replaces}).encode()).result()
                for keys in ("", DELETING), (f"{DELETING}\0", ""):  # all others
                    self.root.delete_range(ts.KvStore.KeyRange(*keys)).result()
            for key, document in self.documents.items():
                # When a job resumes, what the first run or the user wrote stands.
                if self.root.read(key).result().state != "value":
                    text = json.dumps(document, indent=2, allow_nan=False)
                    self.root.write(key, text.encode()).result()
            array = ts.open(self.spec, context=ts.Context(_PATIENT), read=True, write=True).result()
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
        """Nothing to do: all metadata is written by `create`."""


def open_tensorstore_source(
    spec: Mapping[str, Any],
    *,
    cache_bytes: int,
    name: str,
    title: str | None = None,
    labels: Sequence[str] | None = None,
    scale: Mapping[str, float] | None = None,
    units: Mapping[str, str | None] | None = None,
    translation: Mapping[str, float] | None = None,
    ome_version: str | None = None,
) -> TensorStoreSource:
    """Open a spec for reading, whatever its open mode says.

    ``labels`` name its axes, else the labels of its domain do, else its rank. ``scale``, ``units``
    and ``translation`` go by axis letter, else the spec's dimension units stand. ``title`` is what
    messages call it.
    """
    spec = _placed(spec)
    with explained_errors(name):
        title = scrub(title or address(ts.Spec(spec).kvstore))
    where = f"{name} {title}"
    with explained_errors(where):
        ts.open(spec, context=ts.Context(IMPATIENT), **_EXISTING).result()
        array = ts.open(spec, context=_cache(cache_bytes), **_EXISTING).result()
    axes = _axes(array, where, labels)
    if scale is None:
        scale, units = _dimension_units(array, axes)
    pools = _pools(spec)
    return TensorStoreSource(
        name=title,
        spec=spec,
        array=array,
        stored_axes=axes,
        dtype=check_dtype(array.dtype.name, where),
        scale=tuple(scale.get(axis, 1.0) for axis in AXES) if scale else None,
        units=tuple((units or {}).get(axis) for axis in AXES),
        translation=tuple((translation or {}).get(axis, 0.0) for axis in AXES),
        cache_bytes=sum(pools) if pools else cache_bytes,
        ome_version=ome_version,
    )


def open_tensorstore_sink(
    spec: Mapping[str, Any],
    *,
    domain: Box,
    dtype: np.dtype[Any],
    overwrite: bool,
    resume: bool,
    name: str,
) -> TensorStoreSink:
    """Prepare to write what a spec describes; an array that exists stands as it is.

    The spec's ``open``, ``create`` and ``delete_existing`` are honoured when the sink is created.
    ``overwrite`` and ``resume`` stand above them. A spec that creates without saying dtype or shape
    takes them from ``dtype`` and ``domain``.
    """
    with explained_errors(name):
        asked = ts.Spec(_placed(spec))
    where, stored = f"{name} {scrub(address(asked.kvstore))}", False
    root = open_kvstore(asked.kvstore, where) if asked.kvstore or overwrite else None
    half = root is not None and half_deleted(root) is not None
    if resume and not half:
        asked.update(open_mode=ts.OpenMode(open=True, create=True))
    elif overwrite or resume:
        if stored := is_store(root, where):
            check_deletable(root, where)
        asked.update(open_mode=ts.OpenMode(create=True, delete_existing=stored))
    elif root is not None and asked.open_mode.delete_existing:
        with suppress(UsageError):  # what is no Zarr or N5 is left to TensorStore
            stored = is_store(root, where)
    elif half:
        raise UsageError(f"{where}: exists; use --overwrite to replace it")
    sink = prepare_sink(asked, domain, dtype, where)
    folder = store_folder(spec, sink.local_path)
    return replace(sink, local_path=folder, root=root, replaces=() if stored else None)


def prepare_sink(
    asked: Any, domain: Box, dtype: np.dtype[Any], where: str, title: str | None = None
) -> TensorStoreSink:
    """The sink of a ``ts.Spec``, taken from what exists there or from what the spec will create."""
    found = None if asked.open_mode.delete_existing else _existing(asked, where)
    exists = found is not None
    if found is None:
        _check_bucket(asked.kvstore, where)
        found = asked = _complete(asked, domain, dtype, where)
    axes = _axes(found, where)
    with explained_errors(where):
        five = to_five(found, axes)
    box, place = _box(five.domain), address(asked.kvstore)
    transform = (found if isinstance(found, ts.Spec) else found.spec()).transform
    outputs = transform.to_json().get("output") if transform else None
    return TensorStoreSink(
        name=scrub(title or place),
        where=where,
        spec=asked,
        stored_axes=axes,
        domain=box,
        dtype=check_dtype(found.dtype.name, where, OUTPUT_DTYPES),
        write_grid=_write_grid(five, axes, where),
        grid_origin=_grid_origin(five),
        local_path=local_path(asked.kvstore),
        address=place,
        fingerprint=source_fingerprint(place, axes, box.start, box.stop, outputs),
        exists=exists,
        references=not any(_pools(asked.to_json())),
    )


def label_spec(spec: Mapping[str, Any], *, axes: str, origin: Sequence[int], where: str) -> Any:
    """A ``ts.Spec`` whose dimensions are named ``axes`` and start at ``origin`` (t c z y x)."""
    with explained_errors(where):
        start = [origin[AXES.index(axis)] for axis in axes]
        return ts.Spec(spec)[ts.d[:].label[tuple(axes)]][ts.d[:].translate_to[start]]


@contextmanager
def plainly() -> Iterator[None]:
    """Turn an error of reading or writing into the same of one sentence."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(first_sentence(error)) from error


def _placed(spec: Any) -> Any:
    """A user's spec with its key-value stores where `kvstore_of` finds them, however deep."""
    if isinstance(spec, list):
        return [_placed(value) for value in spec]
    if not isinstance(spec, Mapping):
        return spec
    placed = {key: _placed(value) for key, value in spec.items()}
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


def _cache(num_bytes: int) -> Any:
    return ts.Context({"cache_pool": {"total_bytes_limit": num_bytes}, **_PATIENT})


def _pools(spec: Any) -> list[int]:
    """The limits of the cache pools that a user's spec sets, however deep."""
    if isinstance(spec, Mapping):
        here = [v for k, v in spec.items() if k.startswith("cache_pool") and isinstance(v, Mapping)]
        below = [limit for value in spec.values() for limit in _pools(value)]
        return [pool.get("total_bytes_limit", 0) for pool in here] + below
    if isinstance(spec, list):
        return [limit for value in spec for limit in _pools(value)]
    return []


def _existing(asked: Any, where: str) -> Any:
    """The array that ``asked`` would open, None where there is none."""
    mode = asked.open_mode
    must_be_new = mode.create and not mode.open
    try:
        found = ts.open(asked, context=ts.Context(IMPATIENT), write=True, **_EXISTING).result()
    except ValueError as error:
        code = str(error).partition(":")[0]
        if code == "NOT_FOUND" and mode.create:
            return None
        if not (code == "FAILED_PRECONDITION" and must_be_new):
            raise UsageError(f"{where}: {first_sentence(error)}") from error
        found = None
    if must_be_new:
        raise UsageError(f"{where}: exists; use --overwrite to replace it")
    return found


def _check_bucket(spec: Any, where: str) -> None:
    """Refuse a bucket that does not exist: TensorStore would try to create in it for ever."""
    if spec is None or local_path(spec):
        return
    keys = ts.KvStore.KeyRange(".zarray", ".zarray0")  # one key at most; listing names the bucket
    try:
        open_kvstore(spec, where).list(keys).result()
    except ValueError as error:
        if str(error).startswith("NOT_FOUND"):  # the right to list is not needed for writing
            raise UsageError(f"{where}: {first_sentence(error)}") from error
    except NotImplementedError as error:  # HTTP: the one store that neither lists nor writes
        raise UsageError(f"{where}: an output cannot be written over HTTP") from error


def _complete(asked: Any, domain: Box, dtype: np.dtype[Any], where: str) -> Any:
    """``asked`` with a dtype and a domain, the job's where it has none."""
    asked = asked.copy()
    with explained_errors(where):
        if asked.dtype is None:
            asked.update(dtype=dtype.name)
        if asked.domain is None:
            rank = asked.rank or len(AXES)
            asked.update(domain=ts.IndexDomain(shape=domain.stop[-rank:]))
    return asked


def _axes(array: Any, where: str, labels: Sequence[str] | None = None) -> str:
    """The axes of an open TensorStore or of a ``ts.Spec``, in stored order."""
    if labels is None and any(array.domain.labels):
        labels = array.domain.labels
    if labels is not None and len(labels) != array.rank:
        raise UsageError(f"{where}: {array.rank} dimensions but axes {list(labels)}")
    axes = name_axes(labels, array.rank, where)
    if labels is None and _driver(array) == "n5":
        # N5 lists the fastest axis first: x y z. Its layout says so, also through a transpose.
        order = array.chunk_layout.inner_order
        axes = "".join(axes[order.index(a)] for a in range(array.rank))
    return axes


def _driver(array: Any) -> str:
    spec = (array if isinstance(array, ts.Spec) else array.spec()).to_json()
    while isinstance(spec.get("base"), Mapping):
        spec = spec["base"]
    return str(spec["driver"])


def _dimension_units(
    array: Any, axes: str
) -> tuple[dict[str, float] | None, dict[str, str | None]]:
    known = {a: unit for a, unit in zip(axes, array.dimension_units, strict=True) if unit}
    scale = {axis: float(unit.multiplier) for axis, unit in known.items()}
    return scale or None, {axis: unit_name(unit.base_unit) for axis, unit in known.items()}


def _write_grid(five: Any, axes: str, where: str) -> tuple[int, ...]:
    shape = five.chunk_layout.write_chunk.shape or (None,) * len(AXES)
    if any(not n for n, axis in zip(shape, AXES, strict=True) if axis in axes):
        raise UsageError(f'{where}: the spec does not say its chunk shape; give it as "metadata"')
    return tuple(n or 1 for n in shape)


def _grid_origin(five: Any) -> tuple[int, ...]:
    """Where a chunk starts; 0 on an axis without chunks."""
    return tuple(n or 0 for n in five.chunk_layout.grid_origin or (0,) * len(AXES))


def _meaning(spec: Any) -> Any:
    """A spec's JSON without what does not change its voxels, and with stamps of local files."""
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
        files = [path] if path.is_file() else [path / name for name in (*STORE_MARKERS, "info")]
        kept |= {"path": str(path), "stamps": [file_stamp(f) for f in files if f.is_file()]}
    return kept


def _box(domain: Any) -> Box:
    return Box(tuple(domain.inclusive_min), tuple(domain.exclusive_max))
