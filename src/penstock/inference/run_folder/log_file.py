"""Logs on a local disk. Each is only appended to, and by one process, so that a kill cannot lose
what is done. A run has ``done.log``, and a ``done-NAME.log`` for each process that shares it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Iterable, Iterator
from itertools import chain, groupby
from pathlib import Path
from typing import IO, Any

from .notes import Notes
from .unit_log import Key

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
        self.path = path
        self._file: IO[str] | None = path.open("a")
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
        elif not _ends_whole(self.path):
            # A torn line is made invalid before it is ended, as half of "0 1 1 12" would say that
            # 0 1 1 1 is done.
            self._file.write("?\n")
            self._file.flush()

    pending = 0
    """Each line is safe once it is appended."""

    def flush(self) -> None:
        """Do nothing, as each line is safe already."""

    def append(self, line: str) -> None:
        """Add a line and sync it to the disk. A closed log ignores it."""
        with self._lock:
            if self._file is not None:
                self._file.write(line)
                self._file.flush()
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file and free its lock."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # `append` has raised it already
                self._file.close()
            self._file = None


def logs_of(folder: Path) -> Iterator[Path]:
    """The logs of a run folder."""
    if (alone := folder / "done.log").exists():
        yield alone
    yield from sorted(folder.glob("done-*.log"))


def own_name(name: str, writer: str) -> str:
    """The name of one writer's own file. The name of a writer may have any characters.

    >>> own_name("done.log", "tcp://10.0.0.1:80")
    'done-tcp-10.0.0.1-80.log'
    """
    stem, dot, suffix = name.partition(".")
    return f"{stem}-{plain_name(writer)}{dot}{suffix}"


def plain_name(writer: str) -> str:
    """The name of a writer as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9._*-]+", "-", writer).strip("-")


def of_each(name: str) -> str:
    """The glob pattern of the own files of all writers.

    >>> of_each("done.log")
    'done-*.log'
    """
    return own_name(name, "*")


def copied_logs(folder: Path, run: str = "*") -> list[Path]:
    """The parts of the logs of a run folder that was copied from a bucket, in their order."""
    return sorted(folder.glob(f"done/{run}/*/*.log"))


class LogFiles(Notes):
    """The logs of a run folder on a disk."""

    def __init__(self, folder: Path, run: str, makers: list[dict[str, Any]]) -> None:
        """``makers`` as in `Notes`."""
        super().__init__(makers)
        self.folder, self.run = folder, run
        self._read: dict[str, int] = {}
        """Number of bytes of each log that were read. An incomplete line is read again."""

    def _logs(self) -> Iterator[Iterable[bytes]]:
        for log in logs_of(self.folder):
            with log.open("rb") as file:
                file.seek(self._read.get(log.name, 0))
                yield self._whole_lines(log.name, file)
        for _, parts in groupby(copied_logs(self.folder, self.run), lambda part: part.parent):
            yield chain.from_iterable(part.read_bytes().splitlines(keepends=True) for part in parts)

    def _whole_lines(self, name: str, file: IO[bytes]) -> Iterator[bytes]:
        for line in file:  # one by one: a log may be larger than the memory
            if not line.endswith(b"\n"):
                break
            self._read[name] = self._read.get(name, 0) + len(line)
            yield line


def read_units(rows: bytes) -> set[Key]:
    """The units in the rows of a file, without a last row that a kill has torn."""
    units = set()
    for line in rows.splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            units.add(tuple(json.loads(line)["unit"]))
    return units


def _ends_whole(path: Path) -> bool:
    """Whether the last line of a file is whole, if there is one."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
        return file.read() in (b"", b"\n")


def _claim(file: IO[str]) -> str | None:
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
