"""The log of a process in a bucket, where objects cannot be appended to.

    done/RUN/WRITER.START/000000007.log

Each start of a process writes numbered objects. The last one is written again about once a second,
whole and with the new lines, until it holds `LINES` of them; then the next begins. So no object is
ever merged or deleted, and a reader reads only the last one of each log twice. The names contain
the run: a process of an earlier run that was suspended and wakes up late adds nothing to this
run's list.
"""

from __future__ import annotations

import contextlib
import threading
import uuid

from ...base import PenstockError
from ...data import Bucket, is_transient
from .names import LOGS_FOLDER, plain_name

FLUSH_S = 1.0
"""Seconds between two writes of a log. A kill loses at most the notes of these seconds, and their
blocks are written again."""
LINES = 16_384
"""Lines of an object, about half a megabyte: little to write again each second, and few objects."""


class RemoteLog:
    """The log of one start of a process."""

    lacking: str | None = None
    """None: the lock beside the output guards the run folder too."""

    def __init__(self, bucket: Bucket, run: str, writer: str | None) -> None:
        self.bucket = bucket
        start = f"{plain_name(writer or 'alone')}.{uuid.uuid4().hex[:8]}"
        self.folder = f"{LOGS_FOLDER}{run}/{start}/"
        self._lines: list[str] = []
        """The lines of the last object, and those that wait for it."""
        self._stored = 0
        """Number of these lines that the store has."""
        self._number = 1
        self._lock, self._flushing = threading.Lock(), threading.Lock()
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="log", daemon=True)

    def begin(self, *, anew: bool) -> None:
        """Begin to store lines. If ``anew``, delete the logs of earlier runs."""
        if anew:
            self.bucket.delete(self.bucket.names(LOGS_FOLDER))
        self._thread.start()

    def append(self, line: str) -> None:
        """Add a line, which is stored within about a second. A closed log ignores it."""
        if self._error is not None:
            raise self._error
        with self._lock:
            if not self._ended.is_set():
                self._lines.append(line)

    def flush(self) -> None:
        """Store what was appended."""
        with self._flushing:
            lines = list(self._lines)
            if (count := len(lines)) == self._stored:
                return
            content = "".join(lines).encode()
            self.bucket.write(f"{self.folder}{self._number:09}.log", content)
            with self._lock:  # lines may be appended meanwhile
                self._stored = count
                if count >= LINES:
                    del self._lines[:count]
                    self._stored, self._number = 0, self._number + 1

    def close(self) -> None:
        """Store what was appended, if the store allows it."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
        if self._thread.is_alive():  # else it was never begun
            self._thread.join()
            with contextlib.suppress(PenstockError):  # their blocks are written again
                self.flush()

    def _work(self) -> None:
        while not self._ended.wait(FLUSH_S):
            try:
                self.flush()
            except PenstockError as error:
                if not is_transient(error):
                    self._error = error
