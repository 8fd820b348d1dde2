"""A log on a local disk: only appended to, and by one process, so that a kill cannot lose what is
done. A run has ``done.log``, and a ``done-NAME.log`` for each process that shares it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import IO

from .block_log import ENDED_TORN

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


class LogFile:
    """A log that this process appends to and no other may write meanwhile."""

    def __init__(self, path: Path) -> None:
        """Open and lock the file, which is made if it is not there. Nothing in it is changed.

        Raises `BlockingIOError` if another process has locked it.
        """
        self._file: IO[bytes] | None = path.open("a+b")
        self._lock = threading.Lock()
        try:
            self.lacking = _claim(self._file)
            """The reason why the file has no lock, None if it has one."""
        except BlockingIOError:
            self.close()
            raise

    def begin(self, *, anew: bool) -> None:
        """Empty the file if it is begun ``anew``, else make its last line whole."""
        assert self._file is not None
        if anew:
            self._file.truncate(0)
        elif self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read() != b"\n":
                self.append(ENDED_TORN)

    def append(self, line: str) -> None:
        """Add a line and sync it to the disk. A closed log ignores it."""
        with self._lock:
            if self._file is not None:
                self._file.write(line.encode())
                self._file.flush()
                os.fsync(self._file.fileno())

    def flush(self) -> None:
        """Do nothing, as each line is safe already."""

    def close(self) -> None:
        """Close the file and free its lock."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # `append` has raised it already
                self._file.close()
            self._file = None


def _claim(file: IO[bytes]) -> str | None:
    """Lock an open file for this process, until it is closed or the process ends.

    Returns the reason why there is no lock, or None. Raises `BlockingIOError` if another process
    has locked the file.
    """
    if fcntl is None:
        return "this system has no flock"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        return f"its file system refuses it: {error.strerror}"
    return None
