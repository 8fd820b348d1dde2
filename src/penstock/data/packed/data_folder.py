"""The folder of a packed data set while it is written: emptied, marked, finished.

Foreign files are never removed, and a folder counts as a whole data set only once it has its
document.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base import Refused, UsageError, format_bytes, nearest, remove, store_around
from .format import (
    CHECKS,
    DOCUMENT,
    FORMAT,
    IDS,
    STATISTICS,
    UNFINISHED,
    VERSION,
    read_document,
    stored_bytes,
)


def check_outside(root: Path) -> None:
    """Refuse a folder inside an array, which it would spoil."""
    if (array := store_around(root.resolve().parent)) is not None:
        raise UsageError(f"OUT {root} lies inside the array {array}; give a place outside it")


def names_in(root: Path) -> set[str]:
    """The names of all entries of an output folder; none if it does not exist.

    Raises `UsageError` if it is no folder, or lies inside other data.
    """
    check_outside(root)
    if not root.exists() and not root.is_symlink():
        return set()
    if not root.is_dir():
        raise UsageError(f"OUT {root} is not a folder")
    return {path.name for path in root.iterdir()}


def names_to_replace(root: Path, marks: Collection[str], what: str, overwrite: bool) -> set[str]:
    """The names of all entries of a folder that is made anew; none if it is empty. Raises
    `UsageError` unless one of ``marks`` says that ``what`` is in it, and that may be replaced."""
    there = names_in(root)
    if there and there.isdisjoint(marks):
        raise UsageError(f"OUT {root} exists and holds no {what}; nothing was removed")
    if there and not overwrite:
        raise UsageError(f"OUT {root} exists; use --overwrite to replace it")
    return there


def check_strangers(place: str, strangers: Iterable[str], what: str) -> None:
    """Refuse to remove a folder that holds what is not ours."""
    if first := min(strangers, default=""):
        raise UsageError(f"{place} holds {first} beside {what}; nothing was removed")


def clear(root: Path, overwrite: bool) -> None:
    """Make way for a data set: remove one that is there, and refuse anything else."""
    there = names_to_replace(root, (DOCUMENT, UNFINISHED), "packed data set", overwrite)
    if not there:
        return
    document = root / (DOCUMENT if DOCUMENT in there else UNFINISHED)
    arrays = read_document(document, f"OUT {root}").get("arrays")
    entries = arrays.values() if isinstance(arrays, dict) else ()
    paths = [str(entry["path"]) for entry in entries if isinstance(entry, dict) and "path" in entry]
    ours = {DOCUMENT, UNFINISHED, IDS, CHECKS, STATISTICS, *paths}
    check_strangers(f"OUT {root}", there - ours, "a packed data set")
    # The document goes first: from here on nobody takes the folder for a whole data set.
    mark_unfinished(root, paths)
    (root / DOCUMENT).unlink(missing_ok=True)
    remove(root / name for name in there - {DOCUMENT, UNFINISHED})


def mark_unfinished(root: Path, paths: Sequence[str]) -> None:
    """List the arrays that will be here, so that an unfinished folder can be recognised as ours."""
    arrays = {path.removesuffix(".zarr"): {"path": path} for path in paths}
    document = {"format": FORMAT, "version": VERSION, "arrays": arrays}
    (root / UNFINISHED).write_text(json.dumps(document))


def check_room(root: Path, need: int, what: str, remedy: str) -> None:
    """Check that the disk has room for an output.

    Args:
        root: The folder to write.
        need: Its bytes before compression.
        what: Its content in messages, such as ``64 samples``.
        remedy: The flag that makes it smaller.

    Raises:
        Refused: The disk is too full.
    """
    folder = nearest(root)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise Refused(
            f"{what} are {format_bytes(need)} before compression and {folder} has "
            f"{format_bytes(free)} free; lower {remedy}"
        )


def finish(
    root: Path, arrays: Mapping[str, Mapping[str, Any]], samples: int, facts: Mapping[str, Any]
) -> None:
    """Write the document. An array has its ``path``, ``axes`` and ``decoded_bytes``."""
    decoded = sum(array["decoded_bytes"] for array in arrays.values())
    stored = sum(stored_bytes(root / array["path"]) for array in arrays.values())
    document = {
        "format": FORMAT,
        "version": VERSION,
        "samples": samples,
        "arrays": arrays,
        "ids": IDS,
        "checks": CHECKS,
        "decoded_bytes": decoded,
        "stored_bytes": stored,
        "compression_ratio": decoded / stored,
        **facts,
    }
    (root / UNFINISHED).write_text(json.dumps(document, indent=1) + "\n")
    (root / UNFINISHED).replace(root / DOCUMENT)
