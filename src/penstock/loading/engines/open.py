"""Chooses and opens an engine for some arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...base import UsageError
from .engine import Engine
from .selection import Location, Selection


def open_engine(
    name: str,
    places: Mapping[str, Location],
    selection: Selection,
    *,
    workers: int,
    fetch: int,
    cache_bytes: int,
    missing: str,
) -> Engine:
    """The engine of a name; `fitting_arrays` for ``auto``."""
    if not places:
        raise UsageError("there are no arrays to read")
    selection.check(list(places))
    options: dict[str, Any] = {
        "workers": workers, "fetch": fetch, "cache_bytes": cache_bytes, "missing": missing
    }  # fmt: skip
    if name == "auto":
        return fitting_arrays(places, selection, options)
    if name == "native":
        from .native import NativeEngine

        return NativeEngine(places, selection, **options)
    if name == "tensorstore":
        from .tensorstore import TensorStoreEngine

        return TensorStoreEngine(places, selection, **options)
    raise UsageError(f"engine {name!r} is not one of auto, native, tensorstore")


def fitting_arrays(
    places: Mapping[str, Location], selection: Selection, options: Mapping[str, Any]
) -> Engine:
    """TensorStore, but where only the native engine does what is wanted.

    Between two chunks the native engine takes Python's lock, and its threads wait for one another:
    with chunks of 72 KiB for more than half of the time. TensorStore decodes a whole batch without
    that lock. ``benchmarks/loader.py --grid`` compares the two on many layouts.
    """
    from .native import NativeEngine
    from .tensorstore import TensorStoreEngine
    from .zarr_metadata import Unsupported

    engine: Engine
    try:
        engine = NativeEngine(places, selection, **options)
    except Unsupported as error:
        engine = TensorStoreEngine(places, selection, **options)
        engine.reason = str(error).partition(";")[0]
        return engine
    if options["cache_bytes"]:
        engine.reason = "its cache knows which chunks will be used next"
        return engine
    if options["fetch"]:
        engine.reason = "it has threads that only read ahead"
        return engine
    if engine.copies_large_chunks_together:
        engine.reason = "it copies large chunks together that lie side by side in a batch"
        return engine
    try:
        engine = TensorStoreEngine(places, selection, **options)
        engine.reason = "it decodes a whole batch without Python's lock"
    except UsageError as error:
        engine.reason = f"TensorStore does not read this: {error}"
    return engine
