"""A fence around writes: a run that takes an output waits until no other process is writing to it.

A process may be stopped between its look at the marker and the end of its write, and go on when the
output belongs to another run. So it holds a shared lock on the store's folder during both. A run
that takes the output first puts its name into the marker, then waits for an exclusive lock once:
writes that began before have ended by then, and later ones see the marker. The system frees the
locks of a process that ends. Stores that are not folders of this system have no fence.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def writing(folder: Path | None) -> Iterator[None]:
    """A context in which the process may look at the marker of a store and write into its
    folder."""
    with _locked(folder, shared=True):
        yield


def wait_for_writes(folder: Path | None, seconds: float) -> bool:
    """Wait until no write of another process into a store is under way.

    Args:
        folder: the folder of the store; None where it has none.
        seconds: how long to wait at most.

    Returns:
        False if a write was still under way at the end.
    """
    end = time.monotonic() + seconds
    while True:
        with _locked(folder, shared=False) as held:
            if held:
                return True
        if time.monotonic() > end:
            return False
        time.sleep(0.02)


@contextlib.contextmanager
def _locked(folder: Path | None, *, shared: bool) -> Iterator[bool]:
    """Lock a folder and yield whether that worked. On a file system without locks, yield True."""
    try:
        opened = None if folder is None or fcntl is None else os.open(folder, os.O_RDONLY)
    except OSError:  # it does not exist yet, or may not be read
        opened = None
    if opened is None:
        yield True
        return
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks
            pass
        yield True
    finally:
        os.close(opened)
