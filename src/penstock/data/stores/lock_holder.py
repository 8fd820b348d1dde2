"""The holder of a lock: who it is, whether its process lives, and whether it can go on at all."""

from __future__ import annotations

import contextlib
import os
import platform
import time
import uuid
from functools import cache
from pathlib import Path
from typing import Any

import psutil

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
