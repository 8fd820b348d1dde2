"""A user's TensorStore spec as JSON: its stores, its cache limits, the array that it describes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .kvstore import STORE_MARKERS, kvstore_of, settled_spec
from .protocols import file_stamp

# Members of a spec that do not change which array is meant.
_TRANSIENT = re.compile(
    r"context|cache_pool|data_copy_|recheck_|assume_|open$|create$|delete_existing$|"
    r"(file_io|s3|gcs|http)_|aws_credentials|experimental_"
)


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


def meaning(spec: Any) -> Any:
    """A spec's JSON without the members that change no voxels, and with stamps of local files."""
    if isinstance(spec, list):
        return [meaning(value) for value in spec]
    if not isinstance(spec, Mapping):
        return spec
    nested = ("base", "kvstore", "layers")
    kept = {
        key: meaning(value) if key in nested else value
        for key, value in spec.items()
        if not _TRANSIENT.match(key)
    }
    if spec.get("driver") == "file" and "path" in spec:
        path = Path(spec["path"]).resolve()
        files = [path] if path.is_file() else [path / name for name in (*STORE_MARKERS, "info")]
        kept |= {"path": str(path), "stamps": [file_stamp(f) for f in files if f.is_file()]}
    return kept
