"""The folder of a run in a bucket: each file is an object that is written whole.

    run.json, statistics.json, summary.json, ...   as in a local folder
    done/RUN/WRITER.START/000000007.log            what done.log has

Objects cannot be appended to. So rows of metrics, retries and the like are written to a local
folder, which is copied when the process ends. And each start of a process writes numbered objects
as its log. The last one is written again about once a second, whole and with the new lines, until
it holds `LINES` of them; then the next begins. So no object is ever merged or deleted, and a reader
reads only the last one of each log twice. The names contain the run: a process of an earlier run
that was suspended and wakes up late adds nothing to this run's list.

The folder itself has no lock, and does not say whether a process is at work. The lock beside the
output keeps other runs away from it; the summary says if an output has none. A run of another
output is refused.
"""

from __future__ import annotations

import contextlib
import fnmatch
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ...base import (
    RUN_FILE,
    STORE_FILES,
    PenstockError,
    UsageError,
    has_login,
    is_draft,
    json_object,
    redact,
)
from ...data import Bucket, is_transient
from .block_log import Key, lost_line
from .names import LOGS_FOLDER, is_run, plain_name

FLUSH_S = 1.0
"""Seconds between two writes of a log. A kill loses at most the notes of these seconds, and their
blocks are written again."""
LINES = 16_384
"""Lines of an object, about half a megabyte: little to write again each second, and few objects."""


class RemoteFolder:
    """A run folder below a URL. Its methods are those of `LocalFolder`."""

    def __init__(self, url: str) -> None:
        if has_login(url):
            raise UsageError("--run-dir: the URL holds a login; give keys by the environment")
        if not re.match(r"(s3|gs)://[^|{}?#]+$", url):
            raise UsageError(
                f"--run-dir {redact(url)}: a run folder is a folder of this machine, or a prefix "
                "such as s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"
            )
        self.place = url.rstrip("/")
        self.bucket = Bucket(self.place)
        self._here: Path | None = None

    def __str__(self) -> str:
        return self.place

    @property
    def address(self) -> str:
        return self.bucket.address

    @property
    def here(self) -> Path:
        if self._here is None:
            self._here = Path(tempfile.mkdtemp(prefix="penstock-run-"))
        return self._here

    def check(self) -> None:
        content, *stores = self.bucket.read_all([RUN_FILE, *STORE_FILES])
        if content is not None and not is_run(content):
            raise UsageError(
                f"--run-dir {self}: holds another program's {RUN_FILE}; name another folder"
            )
        if any(store is not None for store in stores):
            raise UsageError(f"--run-dir {self}: is an array or a group; name another folder")

    def read(self, name: str) -> bytes | None:
        return self.bucket.read(name)

    def write(self, name: str, content: bytes) -> None:
        self.bucket.write(name, content)

    def names(self, *patterns: str) -> list[str]:
        # A store lists by what names begin with, and knows no patterns.
        return [
            name
            for pattern in patterns
            for name in self.bucket.names(pattern.partition("*")[0])
            if name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern)
        ]

    def delete(self, *patterns: str) -> None:
        for folder in (pattern for pattern in patterns if pattern.endswith("/")):
            self.bucket.delete(self.bucket.names(folder))
        self.bucket.delete(self.names(*patterns))

    def set_aside(self, name: str) -> None:
        self.delete(name)

    def log(self, run: str, writer: str | None, outputs: Sequence[str]) -> RemoteLog:
        before = json_object(self.read(RUN_FILE) or b"")
        theirs = before.get("fingerprint", {}).get("outputs", outputs)
        # The address of an output comes before what else is known of it.
        if [text.rpartition("#")[0] for text in theirs] != [o.rpartition("#")[0] for o in outputs]:
            raise UsageError(f"--run-dir {self}: has the run of another output; name another one")
        return RemoteLog(self.bucket, run, writer)

    def new_lines(self, run: str, seen: dict[str, int]) -> Iterator[Iterable[bytes]]:
        for log, objects in self._logs(run):
            # The last object that was read may have grown.
            unread = objects[max(0, seen.get(log, 0) - 1) :]
            seen[log] = len(objects)
            contents = self.bucket.read_all(unread)
            yield (line for text in contents for line in (text or b"").splitlines(True))

    def _logs(self, run: str) -> Iterator[tuple[str, list[str]]]:
        """The objects of each log of a run, in the order in which they were written."""
        names = self.bucket.names(f"{LOGS_FOLDER}{run}/")
        for log, objects in groupby(names, lambda name: name.rpartition("/")[0]):
            yield log, [*objects]

    def forget(self, run: str, keys: list[Key]) -> None:
        content = "".join(map(lost_line, keys)).encode()
        for log, objects in self._logs(run):  # in each, as it is not known which log has a block
            self.write(f"{log}/{len(objects) + 1:09}.log", content)

    def at_work(self) -> None:
        return None

    def killed(self) -> bool:
        return False

    def telemetry(self) -> list[list[dict[str, Any]]]:
        return []

    def close(self) -> None:
        if self._here is None:
            return
        # These files only inform. A store that is away by now must not turn a success into an
        # error.
        with contextlib.suppress(PenstockError, OSError):
            for file in self._here.iterdir():
                if not is_draft(file.name):
                    self.write(file.name, file.read_bytes())
        shutil.rmtree(self._here, ignore_errors=True)
        self._here = None


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
        # Two, as lines are appended while an object is under way, which may take seconds.
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
                # One that may pass is tried again by the next round, as the lines stay.
                if not is_transient(error):
                    self._error = error
