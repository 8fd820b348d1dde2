"""The place of an output's lock, or the reason why there can be none; and its holder: who it is,
whether its process lives, and whether it can go on at all."""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from ...base import (
    LOCK_SUFFIX,
    STORE_FILES,
    PenstockError,
    UsageError,
    describe,
    is_of_store,
)
from .kvstore import open_kvstore
from .protocols import Located, Sink
from .transient import is_transient

_DRIVERS = ("file", "s3", "gcs")


class NoLock(Exception):
    """The store cannot be locked; the message says why."""


def why_no_lock(sink: Sink) -> str | None:
    """The reason why an output cannot be locked, by its spec; None if its spec names none."""
    try:
        base_of(sink)
    except NoLock as why:
        return f"{sink.name} has no lock: {why}"
    return None


def has_lock(sink: Sink) -> bool:
    """Whether the lock of a local output is there: a run of `infer` writes or wrote it."""
    with contextlib.suppress(NoLock):
        place = place_of(sink)
        return place is not None and Path(place[0]["path"], place[1]).is_file()
    return False


def base_of(sink: Located) -> tuple[dict[str, Any], list[str]] | None:
    """The key-value store that holds an output's bytes, as TensorStore's JSON, and the names of the
    stores inside it that lead to the output. None for an output that no other process sees.
    """
    if sink.root is None:
        _check_in_memory(sink)
        return None
    spec, inside = sink.root.spec(retain_context=True).to_json(), list[str]()
    while isinstance(spec.get("base"), Mapping):
        inside.append(f"{spec['driver']}:{spec.get('path', '')}".rstrip("/"))
        spec = spec["base"]
    if spec["driver"] == "memory":
        return None
    if spec["driver"] not in _DRIVERS:
        raise NoLock(f"TensorStore's {spec['driver']} is not known to heed conditions")
    for knob, is_off in {
        "file_io_locking": spec.get("file_io_locking", {}).get("mode") == "none",
        "use_conditional_write": spec.get("use_conditional_write") is False,
    }.items():
        if is_off:
            raise NoLock(f"its spec turns {knob} off")
    if spec["driver"] == "s3":  # or TensorStore looks first and writes then, with a gap between
        spec["use_conditional_write"] = True
    return spec, inside


def _check_in_memory(sink: Located) -> None:
    """Raise `NoLock` for an output that other processes may see and TensorStore does not write."""
    array = getattr(sink, "array", None)
    while array is not None:
        if isinstance(array, mmap.mmap):
            raise NoLock("it is an array in a file that others may map too")
        array = getattr(array, "base", None)
    if sink.local_path is not None or "://" in sink.address:
        raise NoLock("the package that writes it has none")


def place_of(sink: Located) -> tuple[dict[str, Any], str, str] | None:
    """The folder and the name of an output's lock, and the output's path below that name."""
    base = base_of(sink)
    if base is None:
        return None
    spec, inside = base
    path, anchor = str(spec.get("path", "")), ""
    if spec["driver"] == "file":
        resolved = Path(path).resolve()
        path, anchor = resolved.relative_to(resolved.anchor).as_posix(), resolved.anchor
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts:
        raise NoLock("it has no folder beside which a lock could lie")
    top = _outermost({**spec, "path": anchor}, parts)
    folder = anchor + "".join(f"{part}/" for part in parts[:top])
    return (
        {**spec, "path": folder},
        f"{parts[top]}{LOCK_SUFFIX}",
        "/".join([*parts[top + 1 :], *inside]),
    )


def _outermost(root: Mapping[str, Any], parts: Sequence[str]) -> int:
    """The index of the first part that is a store by its name or by its metadata."""
    named = (i for i, part in enumerate(parts) if part.endswith((".zarr", ".n5")))
    top = next(named, len(parts) - 1)
    try:
        kvstore = open_kvstore(dict(root), "")
    except UsageError:
        return top
    metadata = [
        [kvstore.read("/".join([*parts[: i + 1], name])) for name in STORE_FILES]
        for i in range(top)
    ]
    for i, reads in enumerate(metadata):
        for read in reads:
            try:
                if is_of_store(read.result().value):
                    return i
            except (ValueError, OSError) as error:
                if is_transient(error):  # and the lock would lie elsewhere
                    raise PenstockError(f"{'/'.join(parts)}: {describe(error)}") from error
    return top  # the others may not be read


Entry = dict[str, Any]
HELD: set[str] = set()
"""The tokens of this process's locks that are not released."""


def this_holder(run: str, folder: Path | str | None) -> Entry:
    """This process as the holder of a lock for a run, which has a run folder."""
    return {
        "run": run,
        "folder": str(folder.resolve() if isinstance(folder, Path) else folder or "") or None,
        "host": platform.node(),
        "machine": _machine(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "since": time.time(),
        "token": uuid.uuid4().hex,
    }


@cache
def _machine() -> str:
    """A name for this boot of this machine, and for the namespace of its process ids."""
    words = [platform.node()]
    with contextlib.suppress(OSError):
        words.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError, AttributeError):
        words.append(str(Path("/proc/self/ns/pid").readlink()))
    return " ".join(words)


def is_living(holder: Entry) -> bool | None:
    """Whether the process of a holder is at work; None if this machine cannot tell."""
    if holder["pid"] is None or holder["machine"] != _machine():
        return None
    if holder["pid"] == os.getpid():
        return holder["token"] in HELD
    try:
        process = psutil.Process(holder["pid"])
        # A pid is used again; the start tells two processes apart, to the clock's resolution.
        same = abs(process.create_time() - holder["started"]) < 2
        return same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def is_left_behind(holder: Entry, beside: Path) -> bool:
    """Whether a run that began on this host has lost its run folder.

    Without it nothing of the run can go on. A process that still writes is stopped when it reads
    the lock, and none can join.

    Args:
        holder: The run.
        beside: The folder of the lock. A run folder elsewhere may just not be seen from here.
    """
    folder = Path(holder["folder"] or "")
    rebooted = holder["machine"].split()[1:2] != _machine().split()[1:2]
    return (
        holder["host"] == platform.node()
        and (holder["pid"] is None or rebooted)
        and folder.is_absolute()
        and folder.parent == beside
        and not folder.exists()
    )
