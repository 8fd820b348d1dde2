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

from ...base import UsageError, parsed_json, scrub
from ..box import Box
from .cf_packing import Packing, packing_of
from .kvstore import (
    IMPATIENT,
    address,
    check_deletable,
    explained_errors,
    first_sentence,
    half_deleted,
    is_store,
    local_path,
    object_in,
    open_kvstore,
    store_folder,
    ts,
)
from .protocols import (
    AXES,
    INPUT_DTYPES,
    OUTPUT_DTYPES,
    check_dtype,
    name_axes,
    source_fingerprint,
    to_five,
    unit_name,
)
from .specs import cache_limits, settled
from .tensorstore import (
    EXISTING,
    TensorStoreSink,
    TensorStoreSource,
    box_of,
    cache_of,
    grid_origin,
)


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
    dtypes: Sequence[str] = INPUT_DTYPES,
    raw: bool = False,
) -> TensorStoreSource:
    """Open a spec for reading, whatever its open mode says.

    The values are those that the array's own attributes say (see `cf_packing`), or as they are
    stored if ``raw``.

    Its axes are named by ``labels``, else by the labels of its domain, else by its rank. ``scale``,
    ``units`` and ``translation`` are by axis letter; without them the spec's dimension units count.
    ``title`` is its name in messages, ``dtypes`` are the names of those that may be read.
    """
    spec = settled(spec)
    with explained_errors(name):
        title = scrub(title or address(ts.Spec(spec).kvstore))
    where = f"{name} {title}"
    with explained_errors(where):
        ts.open(spec, context=ts.Context(IMPATIENT), **EXISTING).result()
        array = ts.open(spec, context=cache_of(cache_bytes), **EXISTING).result()
    axes = _axes(array, where, labels)
    if scale is None:
        scale, units = _dimension_units(array, axes)
    pools = cache_limits(spec)
    dtype = check_dtype(array.dtype.name, where, dtypes)
    packing = None if raw else _packing(array, dtype, where)
    return TensorStoreSource(
        name=title,
        spec=spec,
        array=array,
        stored_axes=axes,
        dtype=dtype if packing is None else packing.dtype,
        packing=packing,
        scale=tuple(scale.get(axis, 1.0) for axis in AXES) if scale else None,
        units=tuple((units or {}).get(axis) for axis in AXES),
        translation=tuple((translation or {}).get(axis, 0.0) for axis in AXES),
        cache_bytes=sum(pools) if pools else cache_bytes,
        ome_version=ome_version,
    )


def _packing(array: Any, dtype: np.dtype[Any], where: str) -> Packing | None:
    """What the attributes of a Zarr array say of its numbers."""
    with explained_errors(where):
        spec, fill = array.spec().to_json(), None
        attributes: Any = spec.get("metadata", {}).get("attributes", {})
        if spec["driver"] == "zarr":  # which keeps attributes beside its metadata
            text, fill = object_in(array.kvstore, ".zattrs"), array.fill_value
            with suppress(ValueError):
                attributes = parsed_json(text or "{}")
        fill = None if fill is None or fill.size != 1 else float(fill)
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
        dtype=check_dtype(array.dtype.name, where, OUTPUT_DTYPES),
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
        array = ts.open(asked, context=ts.Context(IMPATIENT), write=True, **EXISTING).result()
    except ValueError as error:
        code = str(error).partition(":")[0]
        if code == "NOT_FOUND" and mode.create:
            return None
        if not (code == "FAILED_PRECONDITION" and must_be_new):
            raise UsageError(f"{where}: {first_sentence(error)}") from error
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
    named = {a: unit for a, unit in zip(axes, array.dimension_units, strict=True) if unit}
    scale = {axis: float(unit.multiplier) for axis, unit in named.items()}
    return scale or None, {axis: unit_name(unit.base_unit) for axis, unit in named.items()}


def _write_grid(five: Any, axes: str, where: str) -> tuple[int, ...]:
    shape = five.chunk_layout.write_chunk.shape or (None,) * len(AXES)
    if any(not n for n, axis in zip(shape, AXES, strict=True) if axis in axes):
        raise UsageError(f'{where}: the spec does not say its chunk shape; give it as "metadata"')
    return tuple(n or 1 for n in shape)
