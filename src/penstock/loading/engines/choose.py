"""Chooses and opens an engine for some arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pkgutil import resolve_name

from ...base import UsageError
from .engine import Engine, EngineKnobs, Location, Selection

ENGINES = {
    "native": "penstock.loading.engines.native:NativeEngine",
    "tensorstore": "penstock.loading.engines.tensorstore_engine:TensorStoreEngine",
}
"""Engines by name, each ``module:Class``. A class is called with places, a selection, knobs."""


def open_engine(
    name: str, places: Mapping[str, Location], selection: Selection, knobs: EngineKnobs
) -> Engine:
    """Open an engine by name.

    ``auto`` takes TensorStore, unless the native engine alone can do what is asked. The
    threads of the native engine need Python's lock between two chunks and wait for one another:
    with chunks of 72 KiB for more than half of the time. TensorStore decodes a whole batch without
    that lock. ``benchmarks/loader.py --grid`` compares the two on many layouts.

    Args:
        name: ``auto``, or a name of `ENGINES`.
        places: The place of each array.
        selection: The part of each array that an item takes.
        knobs: Threads, cache, and the treatment of missing chunks.

    Returns:
        The engine. Its ``reason`` says why it was chosen.

    Raises:
        UsageError: There are no arrays, no such engine, or it cannot read the arrays.
    """

    def opened(name: str, reason: str) -> Engine:
        engine: Engine = resolve_name(ENGINES[name])(places, selection, knobs)
        engine.reason = reason
        return engine

    if not places:
        raise UsageError("there are no arrays to read")
    selection.check(list(places))
    if name in ENGINES:
        return opened(name, Engine.reason)
    if name != "auto":
        raise UsageError(f"engine {name!r} is not one of auto, {', '.join(ENGINES)}")
    from .native import NativeEngine
    from .zarr_chunks import Unsupported

    if not (knobs.fetch or knobs.cache_bytes):  # these are TensorStore's
        try:
            native = NativeEngine(places, selection, knobs)
        except Unsupported as error:
            return opened("tensorstore", str(error).partition(";")[0])
        if native.is_quicker():
            native.reason = "it copies large chunks together that lie side by side in a batch"
            return native
    try:
        return opened("tensorstore", "it decodes a whole batch without Python's lock")
    except UsageError as error:
        return opened("native", f"TensorStore does not read this: {error}")
