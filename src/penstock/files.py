"""Files that are there whole or not at all, whatever is killed or stops."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UsageError, describe


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path beside ``path`` to write to; what is written takes its place when the block ends.

    Where the block fails, ``path`` is what it was and nothing is left beside it.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield draft
        with draft.open("rb") as written:
            os.fsync(written.fileno())
        if path.exists():
            shutil.copymode(path, draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def settled(path: str | Path) -> Path:
    """An absolute path without ``~`` and ``..``, which TensorStore does not take.

    Links are followed only where a ``..`` stands, since it means the folder behind them.
    """
    path = Path(path).expanduser()
    return path.resolve() if ".." in path.parts else path.absolute()


def check_folder(out: Path, flag: str) -> None:
    """Raise `UsageError` unless ``out`` is a folder to write to, or can be made one."""
    there = next(place for place in (out, *out.absolute().parents) if place.exists())
    if not there.is_dir():
        raise UsageError(f"{flag} {out}: {there} is not a folder")
    if not os.access(there, os.W_OK):
        raise UsageError(f"{flag} {out}: {there} may not be written to")


def write_json(path: str | Path, document: Any, indent: int | None = 2) -> None:
    """A document as JSON, which has no NaN: what is no finite number is null.

    Without ``indent`` it is one line, for those that are numbers for the most part.
    """
    text = json.dumps(_finite(document), indent=indent, allow_nan=False)
    with replacing(path) as draft:
        draft.write_text(text + "\n", encoding="utf-8")


def read_json(path: Path) -> Any:
    """What a file holds. Raises `UsageError` where there is none, or where it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {describe(error)}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
