"""The logs of a run folder in a bucket, where objects cannot be appended to.

    done/RUN/WRITER.START/000000007.log

Each start of a process writes numbered objects, each with the lines of about a second. Their names
contain the run. So a process of an earlier run that was suspended and wakes up late adds nothing to
this run's list. A long job does not leave an object for each second: a writer merges `FAN` of them
into one, and `FAN` of those into one again. It writes the merged content over the last of them and
deletes the others. A reader that finds an object gone lists that log again.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

from ...base import PenstockError
from ...data import Bucket, is_transient
from .log_file import plain_name
from .notes import Notes
from .unit_log import Key, lost_line

LOGS = "done/"
FLUSH_S = 1.0
"""Seconds between two objects of a log. A kill loses at most the notes of these seconds, and their
units are written again."""
MOST_PENDING = 256
"""Number of waiting lines that are written at once."""
FAN = 32
MERGED_AT_END = 16 * 2**20
"""Size in bytes up to which a log is merged into one object when its process ends."""


class RemoteLog:
    """The log of one start of a process."""

    lacking: str | None = None
    """None: the lock beside the output guards the run folder too."""

    def __init__(
        self, bucket: Bucket, run: str, writer: str | None, beat: Callable[[str, bool], None]
    ) -> None:
        """``beat`` is called repeatedly, with the name of this start and whether it has ended."""
        self.bucket, self._beat = bucket, beat
        self.name = f"{plain_name(writer or 'alone')}.{uuid.uuid4().hex[:8]}"
        self.folder = f"{LOGS}{run}/{self.name}/"
        self._lines: list[str] = []
        self._lock = threading.Lock()
        self._flushing = threading.Lock()
        self._wake, self._ended = threading.Event(), False
        self._error: Exception | None = None
        self._number = self._bytes = 0
        self._levels: list[list[str]] = [[]]
        """The objects that are not merged yet, then those that are merged once, twice, ..."""
        self._thread = threading.Thread(target=self._work, name="log", daemon=True)

    def begin(self, *, anew: bool) -> None:
        """Write the first heartbeat. If ``anew``, delete the logs of earlier runs."""
        if anew:
            self.bucket.delete(self.bucket.names(LOGS))
        self._beat(self.name, False)
        self._thread.start()

    def append(self, line: str) -> None:
        """Add a line, which is stored within about a second. A closed log ignores it."""
        if self._error is not None:
            raise self._error
        with self._lock:
            if not self._ended:
                self._lines.append(line)
            if len(self._lines) >= MOST_PENDING:
                self._wake.set()

    @property
    def pending(self) -> int:
        return len(self._lines)

    def flush(self) -> None:
        """Write what was appended."""
        with self._flushing:
            with self._lock:
                lines = list(self._lines)
            if not lines:
                return
            self._number += 1  # even if the write fails, as it may still have succeeded
            name, content = f"{self.folder}{self._number:09}.log", "".join(lines).encode()
            self.bucket.write(name, content)
            with self._lock:
                del self._lines[: len(lines)]
            self._bytes += len(content)
            self._levels[0].append(name)
            self._merge_full_levels()

    def close(self) -> None:
        """Write what was appended if the store allows it, and note that the process has ended."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
        self._wake.set()
        if not self._thread.is_alive():  # it was never begun
            return
        self._thread.join()
        with contextlib.suppress(PenstockError):  # their units are written again
            self.flush()
        if self._bytes <= MERGED_AT_END:
            self._merge(sorted(name for level in self._levels for name in level))
        self._beat(self.name, True)

    def _work(self) -> None:
        while not self._ended:
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            try:
                self.flush()
            except PenstockError as error:
                if not is_transient(error):
                    self._error = error
            self._beat(self.name, False)

    def _merge_full_levels(self) -> None:
        level = 0
        while len(self._levels[level]) == FAN:
            merged = self._merge(self._levels[level])
            self._levels[level] = []
            level += 1
            if level == len(self._levels):
                self._levels.append([])
            if merged is not None:
                self._levels[level].append(merged)

    def _merge(self, names: Sequence[str]) -> str | None:
        """Merge objects into the last of them. None if the store refuses, and the objects stay."""
        if len(names) < 2:
            return None
        with contextlib.suppress(PenstockError):
            content = b"".join(filter(None, self.bucket.read_all(names)))
            self.bucket.write(names[-1], content)
            self.bucket.delete(names[:-1])
            return names[-1]
        return None


class RemoteNotes(Notes):
    """The logs of a run in a bucket. Each object is read once."""

    def __init__(self, bucket: Bucket, run: str, makers: list[dict[str, Any]]) -> None:
        """``makers`` as in `Notes`."""
        super().__init__(makers)
        self.bucket, self.folder = bucket, f"{LOGS}{run}/"
        self._seen: dict[str, set[str]] = {}
        """The objects of each log that were read."""

    def _logs(self) -> Iterator[Iterable[bytes]]:
        logs = by_log(self.bucket.names(self.folder))
        while logs:
            unread = {
                log: [name for name in names if name not in self._seen.get(log, ())]
                for log, names in logs.items()
            }
            contents = self.bucket.read_all(name for names in unread.values() for name in names)
            again = {}
            for log, names in unread.items():
                read = [next(contents) for _ in names]
                if None in read:  # merged since it was listed
                    again[log] = self.bucket.names(log)
                    continue
                self._seen[log] = {*logs[log]}
                yield chain.from_iterable(
                    lines.splitlines(keepends=True) for lines in read if lines
                )
            logs = again


def by_log(names: Iterable[str]) -> dict[str, list[str]]:
    """The objects of each log, in the order in which they were written."""
    logs: dict[str, list[str]] = {}
    for name in sorted(names):
        logs.setdefault(name.rpartition("/")[0] + "/", []).append(name)
    return logs


def forget_units(bucket: Bucket, run: str, keys: Iterable[Key]) -> None:
    """Take units off the list, in every log, as it is not known which log has a unit."""
    content = "".join(map(lost_line, keys)).encode()
    for log, names in by_log(bucket.names(f"{LOGS}{run}/")).items():
        last = int(names[-1].rpartition("/")[2].removesuffix(".log"))
        bucket.write(f"{log}{last + 1:09}.log", content)
