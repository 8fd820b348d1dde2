"""Any array that TensorStore opens: Zarr, N5, precomputed, casts and views, local or remote.

A user's spec reaches TensorStore as it was written; ``overwrite`` and ``resume`` change its open
mode and no more. What comes back is put right twice: axes are permuted to t c z y x, and messages
lose the dump of the spec that TensorStore appends and are kept to one short line.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from ..box import Box
from ..errors import UsageError, describe, require
from ..files import settled
from ..grid import Grid
from ..keys import scrub
from ..store import (
    AXES,
    OUTPUT_DTYPES,
    canonical,
    check_dtype,
    file_stamp,
    fingerprint,
    name_axes,
    to_five,
    unit_name,
)

ts = require("tensorstore", "infer")

# Metadata files, and a key that each has in a store; the others prove nothing.
_MARKERS = {
    "zarr.json": "zarr_format",
    ".zarray": "zarr_format",
    ".zgroup": "zarr_format",
    "attributes.json": "dimensions",
    ".zattrs": None,
    ".zmetadata": None,
}
# A key that a store has from the moment its deletion begins until another one stands in its place.
# It holds the paths of its arrays, which nothing else tells any longer if the deleting is killed.
_DELETING = ".penstock-deleting"
# Keys of a store: metadata files and chunks, such as 0.0.1, 0/0/1, c/0/1 or c.0.1.
_PART = r"(?:c|(?:c\.)?\d+(?:\.\d+)*)"
_NAMES = "|".join(map(re.escape, (*_MARKERS, _DELETING)))
_STORE_KEY = re.compile(rf"(?:{_PART}/)*(?:{_PART}|{_NAMES})")

# What a spec may say without another array being meant.
_TRANSIENT = re.compile(
    r"context|cache_pool|data_copy_|recheck_|assume_|open$|create$|delete_existing$|"
    r"(file_io|s3|gcs|http)_|aws_credentials|experimental_"
)
_LONGEST = 300  # characters of a message

# TensorStore retries an unreachable host for a quarter of an hour and says nothing. The first
# opening is given a few seconds, since it may be a typing error in a host name; what a job reads
# and writes afterwards one minute over HTTP, and three in a bucket, which may ask to slow down.
_IMPATIENT = {
    f"{kind}_request_retries": {"max_retries": 4, "initial_delay": "200ms"}
    for kind in ("s3", "gcs", "http")
}
_PATIENT = {
    f"{kind}_request_retries": {"max_retries": retries, "initial_delay": "1s"}
    for kind, retries in (("http", 6), ("s3", 10), ("gcs", 10))
}
# These stand above a spec's own mode, so that reading from a sink's spec deletes nothing.
_EXISTING = {"open": True, "create": False, "delete_existing": False, "read": True}


@dataclass(eq=False, repr=False)
class TensorStoreSource:
    """Reads a TensorStore; made by `open_source`."""

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
        self.fingerprint = fingerprint(self.address, self.stored_axes, _meaning(spec.to_json()))

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
    """Writes a TensorStore; made by `open_sink`."""

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
            with explaining(self.where):  # no such key is there; deleting needs the right to delete
                self.root.write(f"{_DELETING}-check", None).result()

    def create(self) -> None:
        """Killed at any point, it leaves what the next one takes for a store, or for nothing."""
        with explaining(self.where):
            if self.replaces is not None:
                self.root.write(_DELETING, json.dumps({"arrays": self.replaces}).encode()).result()
                for keys in ("", _DELETING), (f"{_DELETING}\0", ""):  # all others
                    self.root.delete_range(ts.KvStore.KeyRange(*keys)).result()
            for key, document in self.documents.items():
                # When a job resumes, what the first run or the user wrote stands.
                if self.root.read(key).result().state != "value":
                    text = json.dumps(document, indent=2, allow_nan=False)
                    self.root.write(key, text.encode()).result()
            array = ts.open(self.spec, context=ts.Context(_PATIENT), read=True, write=True).result()
            if self.replaces is not None:
                self.root.write(_DELETING, None).result()
        self._view = to_five(array, self.stored_axes)

    def write(self, box: Box, array: NDArray[Any]) -> None:
        assert box in self.domain, f"{box} is not in {self.domain}"
        assert array.dtype == self.dtype, f"{array.dtype} is not {self.dtype}"
        view = self._view[box.slices]
        with plainly():
            view.write(array, can_reference_source_data_indefinitely=self.references).result()

    def close(self) -> None:
        """Nothing to do: all metadata is written by `create`."""


def open_source(
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
    with explaining(name):
        title = scrub(title or address(ts.Spec(spec).kvstore))
    where = f"{name} {title}"
    with explaining(where):
        ts.open(spec, context=ts.Context(_IMPATIENT), **_EXISTING).result()
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


def open_sink(
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
    with explaining(name):
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
    folder = _store_folder(spec, sink.local_path)
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
    with explaining(where):
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
        fingerprint=fingerprint(place, axes, box.start, box.stop, outputs),
        exists=exists,
        references=not any(_pools(asked.to_json())),
    )


def label_spec(spec: Mapping[str, Any], *, axes: str, origin: Sequence[int], where: str) -> Any:
    """A ``ts.Spec`` whose dimensions are named ``axes`` and start at ``origin`` (t c z y x)."""
    with explaining(where):
        start = [origin[AXES.index(axis)] for axis in axes]
        return ts.Spec(spec)[ts.d[:].label[tuple(axes)]][ts.d[:].translate_to[start]]


def kvstore(path: str) -> Any:
    """The TensorStore key-value store whose keys lie below a path or URL.

    AWS_ENDPOINT_URL, the standard variable, redirects ``s3://`` to another server.
    """
    if path.startswith("file://"):
        head, *chain = path.split("|", 1)
        path = "|".join([f"file://{quote(_settled(unquote(head[7:])))}", *chain])
    if "|" in path:  # TensorStore's own chain of stores, such as a zip file in a bucket
        return path
    if "://" not in path:
        return {"driver": "file", "path": f"{settled(path)}/"}
    path = f"{path.rstrip('/')}/"
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    if path.startswith("s3://") and endpoint:
        url = urlsplit(path)
        key = unquote(url.path).lstrip("/")
        return {"driver": "s3", "bucket": url.netloc, "path": key, "endpoint": endpoint}
    return path


def open_kvstore(spec: Any, where: str) -> Any:
    """The open ``ts.KvStore`` of a spec or URL."""
    with explaining(where):
        return ts.KvStore.open(spec, context=ts.Context(_IMPATIENT)).result()


def is_store(root: Any, where: str) -> bool:
    """Whether Zarr or N5 metadata lies there, or what a killed deletion of it left.

    A folder of other things is a `UsageError`; one of folders alone, or of a key that was being
    written when a run was killed, is empty.
    """
    with explaining(where):
        found = {marker: root.read(marker).result() for marker in (*_MARKERS, _DELETING)}
    found = {marker: read.value for marker, read in found.items() if read.state == "value"}
    if _DELETING in found:
        return True
    if any(_MARKERS[marker] in _members(value) for marker, value in found.items()):
        return True
    folder = local_path(root.spec())
    if found or (folder and folder.exists() and (not folder.is_dir() or _holds_files(folder))):
        raise UsageError(f"{where}: holds something that is no Zarr or N5 store; it is left alone")
    return False


def _holds_files(folder: Path) -> bool:
    names = (name for _, _, names in os.walk(folder) for name in names)
    return not all(name.endswith(".__lock") for name in names)


def half_deleted(root: Any) -> list[str] | None:
    """The paths of the arrays of a store whose deletion was killed; None of any other."""
    try:
        read = root.read(_DELETING).result()
    except (ValueError, OSError, NotImplementedError):  # told of by what is read next
        return None
    if read.state != "value":
        return None
    return [str(path) for path in _members(read.value).get("arrays", ())]


def check_deletable(root: Any, where: str, arrays: Sequence[str] = ()) -> None:
    """Refuse to delete a store that holds what the layout of Zarr or N5 does not explain.

    Deleting takes all that lies below it. ``arrays`` are paths of arrays that it says it holds.
    All keys are listed, which costs less than the deleting.
    """
    with explaining(where):
        keys = [key.decode(errors="replace") for key in root.list().result()]
    prefixes = tuple(f"{path.strip('/')}/" for path in arrays)
    foreign = []
    for key in keys:
        prefix = next((p for p in prefixes if key.startswith(p)), "")
        if not _STORE_KEY.fullmatch(key.removeprefix(prefix)):
            foreign.append(key)
    if foreign:
        first, *rest = sorted(foreign)
        others = f" and {len(rest)} more" if rest else ""
        raise UsageError(
            f"{where}: also holds {first}{others}, which is no part of the array; nothing is "
            "deleted, so move it away or write elsewhere"
        )


def _members(text: bytes) -> Mapping[str, Any]:
    """The object that is the JSON ``text``, empty where it is none."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}


def local_path(spec: Any) -> Path | None:
    """The folder of a ``ts.KvStore.Spec``, None where it is not in a file system."""
    parts = spec.to_json() if spec else {}
    return Path(parts["path"]) if parts.get("driver") == "file" else None


def _store_folder(spec: Mapping[str, Any], array: Path | None) -> Path | None:
    """The folder of the store that a local array lies in: above the spec's ``path``, which leads
    into a group.

    A key-value store may be a folder of many stores; then the first name on the way that ends like
    a store's is meant.
    """
    while isinstance(spec.get("base"), Mapping):
        spec = spec["base"]
    if array is None:
        return None
    depth = len(Path(spec.get("path", "").strip("/")).parts)
    folders = [array, *array.parents][depth::-1]
    named = (folder for folder in folders if folder.suffix in (".zarr", ".n5"))
    return next(named, folders[0] if folders[0].name else array)


def address(spec: Any) -> str:
    """One text for one place, however a ``ts.KvStore.Spec`` names it."""
    return _address(spec.to_json()) if spec else "no key-value store"


def _address(parts: Mapping[str, Any]) -> str:
    path = parts.get("path", "").rstrip("/")
    if parts["driver"] == "file":
        return str(Path(path).resolve())
    base = _address(parts["base"]) if isinstance(parts.get("base"), Mapping) else ""
    host = parts.get("endpoint") or parts.get("base_url", "")
    places = base, host.rstrip("/"), parts.get("bucket"), path.lstrip("/")
    return f"{parts['driver']}://{'/'.join(filter(None, places))}"


@contextmanager
def explaining(where: str) -> Iterator[None]:
    """Turn TensorStore's errors into a `UsageError` of one sentence."""
    try:
        yield
    except UsageError:
        raise
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        raise UsageError(f"{where}: {_sentence(error)}") from error


@contextmanager
def plainly() -> Iterator[None]:
    """Turn an error of reading or writing into the same of one sentence."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(_sentence(error)) from error


def _sentence(error: BaseException) -> str:
    text = re.sub(r"\s*\[(source locations|[\w-]+)=.*", "", str(error), flags=re.DOTALL)
    text = re.sub(r'^([A-Z_]+: )?(Error opening "\w+" driver: )?', "", text)
    line = scrub(describe(ValueError(text)))
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."


def _placed(spec: Any) -> Any:
    """A user's spec with its key-value stores where `kvstore` finds them, however deep."""
    if isinstance(spec, list):
        return [_placed(value) for value in spec]
    if not isinstance(spec, Mapping):
        return spec
    placed = {key: _placed(value) for key, value in spec.items()}
    for key in ("kvstore", "base"):
        if isinstance(placed.get(key), str):
            placed[key] = kvstore(placed[key])
    path, store = placed.get("path"), placed.get("kvstore")
    file = store if isinstance(store, Mapping) and store.get("driver") == "file" else None
    if spec.get("driver") == "file" and isinstance(path, str):
        placed["path"] = _settled(path)
    elif isinstance(path, str) and ".." in path.split("/") and file is not None:
        placed["kvstore"] = {**file, "path": _settled(f"{file.get('path', '')}/{path}/")}
        del placed["path"]
    return placed


def _settled(path: str) -> str:
    return f"{settled(path)}{'/' * path.endswith('/')}"


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
        found = ts.open(asked, context=ts.Context(_IMPATIENT), write=True, **_EXISTING).result()
    except ValueError as error:
        code = str(error).partition(":")[0]
        if code == "NOT_FOUND" and mode.create:
            return None
        if not (code == "FAILED_PRECONDITION" and must_be_new):
            raise UsageError(f"{where}: {_sentence(error)}") from error
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
            raise UsageError(f"{where}: {_sentence(error)}") from error
    except NotImplementedError as error:  # HTTP: the one store that neither lists nor writes
        raise UsageError(f"{where}: an output cannot be written over HTTP") from error


def _complete(asked: Any, domain: Box, dtype: np.dtype[Any], where: str) -> Any:
    """``asked`` with a dtype and a domain, the job's where it has none."""
    asked = asked.copy()
    with explaining(where):
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
        files = [path] if path.is_file() else [path / name for name in (*_MARKERS, "info")]
        kept |= {"path": str(path), "stamps": [file_stamp(f) for f in files if f.is_file()]}
    return kept


def _box(domain: Any) -> Box:
    return Box(tuple(domain.inclusive_min), tuple(domain.exclusive_max))
