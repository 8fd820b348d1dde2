"""Opens the array that a TensorStore spec describes, for reading or for writing.

A user's spec reaches TensorStore as it was written; ``overwrite`` and ``resume`` change only its
open mode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from ...base import UsageError, scrub
from ..box import Box
from .cf_packing import Packing, packing_of
from .frames import (
    name_axes,
    said_of,
    sized_axes,
    source_axes,
    spaced_sizes,
    to_five,
    to_tczyx,
    unit_name,
)
from .kvstore import (
    BRIEF,
    address,
    check_deletable,
    explained_errors,
    first_sentence,
    half_deleted,
    innermost,
    is_store,
    local_path,
    open_kvstore,
    store_folder,
    ts,
)
from .ome_levels import Level, array_below
from .protocols import (
    AXES,
    check_dtype,
    source_fingerprint,
)
from .tensorstore import (
    EXISTING,
    TensorStoreSink,
    TensorStoreSource,
    box_of,
    cache_limits,
    grid_origin,
    opened_for_reading,
    settled,
)
from .zarr_groups import Group

_ABOVE = 2
"""Groups above an array in which its image may be described."""


def open_tensorstore_source(
    spec: Mapping[str, Any],
    *,
    cache_bytes: int,
    name: str,
    title: str | None = None,
    level: Level | None = None,
    axes: str | None = None,
    raw: bool = False,
) -> TensorStoreSource:
    """Open a spec for reading, whatever its open mode says.

    The values are those that the array's own attributes say (see `cf_packing`), or as they are
    stored if ``raw``.

    Its axes are those that the user says, else those of ``level``, else those of its own metadata,
    else they follow from its rank. A level of an OME-Zarr image is known as such also if its array
    is named by itself. Where it is none, the units of the spec's dimensions count. ``title`` is its
    name in messages.
    """
    spec = settled(spec)
    with explained_errors(name):
        title = scrub(title or address(ts.Spec(spec).kvstore))
    where = f"{name} {title}"
    with explained_errors(where):
        array = opened_for_reading(spec, cache_bytes)
        stored = array.spec().to_json()
        attributes = _attributes(array, innermost(stored))
    if key := innermost(stored).get("scale_metadata", {}).get("key"):  # of precomputed
        array_below(key, where)
    letters, frame = _frame(array, stored, attributes, level, axes, where)
    pools = cache_limits(spec)
    dtype = check_dtype(array.dtype.name, where)
    packing = None if raw or "base" in stored else _packing(array, stored, attributes, dtype, where)
    if packing is not None:
        frame["notes"] += (packing.note,)
    return TensorStoreSource(
        name=title,
        spec=spec,
        array=array,
        stored_axes=letters,
        dtype=dtype if packing is None else packing.dtype,
        packing=packing,
        cache_bytes=sum(pools) if pools else cache_bytes,
        **frame,
    )


def _frame(
    array: Any, stored: Mapping[str, Any], attributes: Mapping[str, Any], level: Level | None,
    said: str | None, where: str,
) -> tuple[str, dict[str, Any]]:  # fmt: skip
    """The stored axes of an array, and the members of `Framed` and ``ome_version``."""
    notes: list[str] = []
    if level is None:
        level, notes = _level_of(array, stored, where)
    labels = _labels(array, stored, attributes, where) if level is None else level.labels
    axes, taken = source_axes(said, labels, array.rank, where)
    if labels is None and said is None:
        axes = _by_rank(array, stored, axes)
    frame = _dimension_units(array, axes)
    if level is None:
        if labels and not frame:
            frame, turned = _by_coordinates(array, stored["driver"], labels, axes)
            notes += turned
        notes += said_of({"the input's grid mapping goes no further": "grid_mapping" in attributes})
    else:
        frame = level.frame(axes, array.shape[axes.index("c")] if "c" in axes else 1)
    return axes, {
        **frame,
        "notes": (*taken, *frame.get("notes", ()), *notes),
        "ome_version": None if level is None else level.version,
        "codec": _codec(array),
        "bands": any(label.lower() in ("band", "bands") for label in labels or ()),
    }


def _codec(array: Any) -> str:
    """How chunks of an array are encoded, in words."""
    said = array.codec.to_json() if array.codec is not None else {}
    compressor = said.get("compressor") or said.get("compression") or {}
    names = [str(compressor.get("id") or compressor.get("type") or said.get("encoding") or "")]
    codecs = list(said.get("codecs", ()))
    while codecs:
        codec = codecs.pop(0)
        names += [codec["name"].removesuffix("_indexed")] * (
            codec["name"] not in ("bytes", "crc32c")
        )
        codecs = [*codec.get("configuration", {}).get("codecs", ()), *codecs]
    return " ".join(name for name in names if name not in ("", "raw"))


def _level_of(array: Any, stored: Mapping[str, Any], where: str) -> tuple[Level | None, list[str]]:
    """The level of OME-Zarr that a whole array is, by a group above it, and notes; None if it is
    none."""
    if stored["driver"] not in ("zarr", "zarr3", "n5") or "output" in stored.get("transform", {}):
        return None, []
    place = array.kvstore.spec().to_json()
    parts = place.get("path", "").rstrip("/").split("/")
    for up in range(1, min(_ABOVE, len(parts)) + 1):
        above = {**place, "path": "".join(f"{part}/" for part in parts[:-up])}
        try:
            group = Group.of(open_kvstore(above, where), where)
            if (level := group.level_called("/".join(parts[-up:]))) is not None:
                return level, []
        except UsageError as error:
            return None, [f"the metadata of the group above the input is not read: {error}"]
    return None, []


def _attributes(array: Any, stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """The attributes of a Zarr array."""
    attributes: Any = stored.get("metadata", {}).get("attributes", {})
    if stored["driver"] == "zarr":  # which keeps them beside its metadata
        with suppress(ValueError):
            here = Group.of(array.kvstore, "")
            mine = {key: value for key, value in here.json(".zarray").items() if key[:2] == "_N"}
            attributes = {**mine, **here.json(".zattrs")}
    return attributes if isinstance(attributes, Mapping) else {}


def _labels(
    array: Any, stored: Mapping[str, Any], attributes: Mapping[str, Any], where: str
) -> Sequence[str] | None:
    """The names of the dimensions of an array, as it is seen; None if it has none."""
    if any(array.domain.labels):
        return tuple(array.domain.labels)
    names = attributes.get("_ARRAY_DIMENSIONS", _names_of_netcdf(attributes))
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(each, str) for each in names):
        raise UsageError(f"{where}: its _ARRAY_DIMENSIONS is {names!r}, which is no list of names")
    outputs = stored.get("transform", {}).get("output")
    if outputs is None or len(outputs) != len(names):
        return names
    seen = [""] * array.rank  # through the view of the spec
    for name, output in zip(names, outputs, strict=True):
        if "input_dimension" in output:
            seen[output["input_dimension"]] = name
    return seen


def _names_of_netcdf(attributes: Mapping[str, Any]) -> list[str] | None:
    """The names of dimensions as the C library of NetCDF writes them: paths in its group."""
    for key, member in (("_nczarr_array", "dimension_references"), ("_NCZARR_ARRAY", "dimrefs")):
        paths = attributes.get(key)
        paths = paths.get(member) if isinstance(paths, Mapping) else None
        if isinstance(paths, list):
            return [str(path).rpartition("/")[2] for path in paths]
    return None


def _packing(
    array: Any, stored: Mapping[str, Any], attributes: Mapping[str, Any], dtype: np.dtype[Any],
    where: str,
) -> Packing | None:  # fmt: skip
    """What the attributes of a Zarr array say of its numbers."""
    fill = array.fill_value if stored["driver"] == "zarr" else None
    fill = None if fill is None or fill.size != 1 else fill.item()
    return packing_of(attributes, dtype, where, fill)


def open_tensorstore_sink(
    spec: Mapping[str, Any],
    *,
    domain: Box,
    dtype: np.dtype[Any],
    overwrite: bool,
    resume: bool,
    name: str,
) -> TensorStoreSink:
    """Prepare to write the array of a spec. An array that exists stays as it is until `create`.

    `create` honours the spec's ``open``, ``create`` and ``delete_existing``; ``overwrite`` and
    ``resume`` override them. A spec that creates without a dtype or shape takes them from ``dtype``
    and ``domain``.
    """
    with explained_errors(name):
        asked = ts.Spec(settled(spec))
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
        with suppress(UsageError):  # stores other than Zarr and N5 are left to TensorStore
            stored = is_store(root, where)
    elif half:
        raise UsageError(f"{where}: exists; use --overwrite to replace it")
    sink = prepare_sink(asked, domain, dtype, where)
    folder = store_folder(spec, sink.local_path)
    return replace(sink, local_path=folder, root=root, replaces=() if stored else None)


def prepare_sink(
    asked: Any, domain: Box, dtype: np.dtype[Any], where: str, title: str | None = None
) -> TensorStoreSink:
    """The sink of a ``ts.Spec``: of the array that exists, or of the one that the spec creates."""
    array = None if asked.open_mode.delete_existing else _existing(asked, where)
    exists = array is not None
    if array is None:
        _check_bucket(asked.kvstore, where)
        array = asked = _complete(asked, domain, dtype, where)
    axes = _axes(array, where)
    with explained_errors(where):
        five = to_five(array, axes)
    box, place = box_of(five.domain), address(asked.kvstore)
    transform = (array if isinstance(array, ts.Spec) else array.spec()).transform
    outputs = transform.to_json().get("output") if transform else None
    return TensorStoreSink(
        name=scrub(title or place),
        where=where,
        spec=asked,
        stored_axes=axes,
        domain=box,
        dtype=check_dtype(array.dtype.name, where),
        write_grid=_write_grid(five, axes, where),
        grid_origin=grid_origin(five),
        local_path=local_path(asked.kvstore),
        address=place,
        fingerprint=source_fingerprint(place, axes, box.start, box.stop, outputs),
        exists=exists,
        references=not any(cache_limits(asked.to_json())),
    )


def label_spec(spec: Mapping[str, Any], *, axes: str, origin: Sequence[int], where: str) -> Any:
    """A ``ts.Spec`` whose dimensions are named ``axes`` and start at ``origin`` (t c z y x)."""
    with explained_errors(where):
        start = [origin[AXES.index(axis)] for axis in axes]
        return ts.Spec(spec)[ts.d[:].label[tuple(axes)]][ts.d[:].translate_to[start]]


def _existing(asked: Any, where: str) -> Any:
    """The array that ``asked`` would open, None where there is none."""
    mode = asked.open_mode
    must_be_new = mode.create and not mode.open
    try:
        array = ts.open(asked, context=ts.Context(BRIEF), write=True, **EXISTING).result()
    except ValueError as error:
        code = str(error).partition(":")[0]
        if code == "NOT_FOUND" and mode.create:
            return None
        if not (code == "FAILED_PRECONDITION" and must_be_new):
            cure = "; go on with the settings of its run, or --overwrite to begin anew"
            other = cure if code == "FAILED_PRECONDITION" and mode.create else ""
            raise UsageError(f"{where}: {first_sentence(error)}{other}") from error
        array = None
    if must_be_new:
        raise UsageError(f"{where}: exists; use --overwrite to replace it")
    return array


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


def _axes(array: Any, where: str) -> str:
    """The axes of an output, an open TensorStore or a ``ts.Spec``, in stored order."""
    stored = (array if isinstance(array, ts.Spec) else array.spec()).to_json()
    attributes = {} if isinstance(array, ts.Spec) else _attributes(array, innermost(stored))
    labels = _labels(array, stored, attributes, where)
    axes = name_axes(labels, array.rank, where)
    return axes if labels is not None else _by_rank(array, stored, axes)


def _by_rank(array: Any, stored: Mapping[str, Any], axes: str) -> str:
    """The axes of an array without names. N5 lists the fastest one first: x y z."""
    if innermost(stored)["driver"] != "n5":
        return axes
    order = array.chunk_layout.inner_order  # which says so, also through a transpose
    return "".join(axes[order.index(a)] for a in range(array.rank))


def _dimension_units(array: Any, axes: str) -> dict[str, Any]:
    """The frame of an array by the units of its dimensions."""
    units = array.dimension_units
    if not any(units):
        return {}
    scale = [float(unit.multiplier) if unit else 1.0 for unit in units]
    names = [unit_name(unit.base_unit) if unit else None for unit in units]
    return {"scale": to_tczyx(scale, axes, 1.0), "units": to_tczyx(names, axes, None)}


def _by_coordinates(
    array: Any, driver: str, labels: Sequence[str], axes: str
) -> tuple[dict[str, Any], list[str]]:
    """The frame of an array of xarray by the coordinates that lie beside it, and notes on it."""
    place = array.kvstore.spec().to_json() if driver in ("zarr", "zarr3") else {}
    above, beside = place.get("path", "").rstrip("/").rpartition("/")[0], []
    for name in labels if above else ():
        with suppress(ValueError, UsageError):  # it has none
            one = {**place, "path": f"{above}/{array_below(name, '')}/"}
            spec = {"driver": driver, "kvstore": one}
            places = ts.open(spec, context=ts.Context(BRIEF), **EXISTING).result()
            beside.append((name, places, _attributes(places, places.spec().to_json())))
    sizes, lost = spaced_sizes(beside)
    sized, turned = sized_axes(sizes, axes, labels)
    scale, units, translation = zip(*sized, strict=True)
    frame = {"scale": scale, "units": units, "translation": translation}
    return frame if any(units) else {}, [*turned, *lost]


def _write_grid(five: Any, axes: str, where: str) -> tuple[int, ...]:
    shape = five.chunk_layout.write_chunk.shape or (None,) * len(AXES)
    if any(not n for n, axis in zip(shape, AXES, strict=True) if axis in axes):
        raise UsageError(f'{where}: the spec does not say its chunk shape; give it as "metadata"')
    return tuple(n or 1 for n in shape)
