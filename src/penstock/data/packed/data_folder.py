"""The folder of a packed data set while it is written: emptied, marked, finished.

Foreign files are never removed, and a folder counts as a whole data set only once it has its
document.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from ...base import Refused, UsageError, format_bytes, store_around
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

Item = TypeVar("Item")
Result = TypeVar("Result")


def check_outside(root: Path) -> None:
    """Refuse a folder inside another data set or an array, which it would spoil."""
    folders = [root.resolve().parent, *root.resolve().parent.parents]
    around = next((place for place in folders if _is_data_set(place)), None)
    if around is None and (array := store_around(folders[0])) is not None:
        raise UsageError(f"OUT {root} lies inside the array {array}; give a place outside it")
    if around is not None:
        raise UsageError(
            f"OUT {root} lies inside the packed data set {around}; give a place outside it"
        )


def _is_data_set(folder: Path) -> bool:
    for file in filter(Path.is_file, (folder / DOCUMENT, folder / UNFINISHED)):
        with contextlib.suppress(UsageError):
            return bool(read_document(file, ""))
    return False


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


def clear(root: Path, overwrite: bool, also: Iterable[str] = ()) -> None:
    """Make way for a data set: remove one that is there, and refuse anything else.

    ``also`` are names that may be there although the document does not list them.
    """
    there = names_in(root)
    if not there:
        return
    document = next((root / name for name in (DOCUMENT, UNFINISHED) if name in there), None)
    if document is None:
        raise UsageError(f"OUT {root} exists and is not a packed data set; nothing was removed")
    arrays = read_document(document, f"OUT {root}").get("arrays")
    if not overwrite:
        raise UsageError(f"OUT {root} exists; use --overwrite to replace it")
    entries = arrays.values() if isinstance(arrays, dict) else ()
    paths = [str(entry["path"]) for entry in entries if isinstance(entry, dict) and "path" in entry]
    ours = {DOCUMENT, UNFINISHED, IDS, CHECKS, STATISTICS, *paths, *also}
    if strangers := sorted(there - ours):
        raise UsageError(
            f"OUT {root} holds {strangers[0]}, which is not part of a packed data set; nothing was "
            "removed"
        )
    # The document goes first: from here on nobody takes the folder for a whole data set.
    mark_unfinished(root, paths)
    (root / DOCUMENT).unlink(missing_ok=True)
    for name in there - {DOCUMENT, UNFINISHED}:
        path = root / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


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
    folder = next(path for path in (root, *root.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(folder).free
    if need > free:
        raise Refused(
            f"{what} are {format_bytes(need)} before compression and {folder} has "
            f"{format_bytes(free)} free; lower {remedy}"
        )


def in_order(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int, ahead: int = 2
) -> Iterator[Result]:
    """Results in the order of the items.

    Args:
        work: Makes a result, in one of several threads.
        items: What results are made of.
        workers: The number of threads.
        ahead: The results for each thread that are made or held ahead of the next one.

    Yields:
        The results.
    """
    pending: deque[Future[Result]] = deque()
    rest = iter(items)
    with ThreadPoolExecutor(workers, thread_name_prefix="in order") as pool:
        try:
            for item in rest:
                pending.append(pool.submit(work, item))
                if len(pending) > ahead * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def finish(
    root: Path, arrays: Mapping[str, Mapping[str, Any]], samples: int, facts: Mapping[str, Any]
) -> None:
    """Write the document. An array has its ``path``, ``axes`` and ``decoded_bytes``."""
    entries, decoded, stored = {}, 0, 0
    for name, array in arrays.items():
        of_array = stored_bytes(root / array["path"])
        entries[name] = {
            **array,
            "stored_bytes": of_array,
            "compression_ratio": array["decoded_bytes"] / of_array,
        }
        decoded, stored = decoded + array["decoded_bytes"], stored + of_array
    document = {
        "format": FORMAT,
        "version": VERSION,
        "samples": samples,
        "arrays": entries,
        "ids": IDS,
        "checks": CHECKS,
        "decoded_bytes": decoded,
        "stored_bytes": stored,
        "compression_ratio": decoded / stored,
        **facts,
    }
    (root / UNFINISHED).write_text(json.dumps(document, indent=1) + "\n")
    (root / UNFINISHED).replace(root / DOCUMENT)
