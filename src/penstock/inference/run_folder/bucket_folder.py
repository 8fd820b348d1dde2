"""The folder of a run in a bucket: each file is an object that is written whole.

    run.json, statistics.json, summary.json, ...   as in a local folder
    done/RUN/WRITER.START/000000007.log            what done.log has; see `bucket_log`
    alive/WRITER.START.json                        the heartbeat of a process, with its last metrics

Objects cannot be appended to. So rows of metrics, retries and the like are written to a local
folder, which is copied when the process ends; all but metrics also every `BEAT_S`.

The folder itself has no lock. The lock beside the output keeps other runs away from it; the summary
says if an output has none. A run of another output is refused while a heartbeat is fresh.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import math
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from ...base import RUN_FILE, PenstockError, UsageError, has_login, is_draft, redact
from ...data import Bucket
from .block_log import Key, lost_line
from .bucket_log import RemoteLog
from .local import TAIL_BYTES, LocalFolder
from .names import ALIVE_FOLDER, LOGS_FOLDER, METRICS_FILE, is_run, of_each, rows_of

BEAT_S = 15.0
FRESH_S = 60.0
"""Seconds after its last heartbeat for which a process counts as at work. The clocks of two
machines are compared."""
ROWS = 40
"""Most rows of metrics in a heartbeat."""
_STORES = ("zarr.json", ".zarray", ".zgroup", "attributes.json")


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
        self._copied: dict[str, int] = {}
        """Size in bytes of each file of `here` when it was last copied."""
        self._beaten = -math.inf

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

    @property
    def retried(self) -> tuple[int, float]:
        return self.bucket.retries, self.bucket.retry_seconds

    def check(self) -> None:
        content, *stores = self.bucket.read_all([RUN_FILE, *_STORES])
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
        if (content := self.read(name)) is not None:
            stem, dot, suffix = name.partition(".")
            number = len(self.names(f"{stem}*{dot}{suffix}"))
            self.write(f"{stem}-{number}{dot}{suffix}", content)
            self.delete(name)

    def rows(self, name: str) -> Path:
        file = self.here / name
        if not file.exists() and (content := self.read(name)) is not None:
            file.write_bytes(content)
        return file

    def log(self, run: str, writer: str | None, outputs: Sequence[str]) -> RemoteLog:
        if writer is None and self._is_taken(run, outputs):
            raise BlockingIOError
        return RemoteLog(self.bucket, run, writer, partial(self._beat, run))

    def _is_taken(self, run: str, outputs: Sequence[str]) -> bool:
        """Whether a run with other outputs is at work here. One with the same outputs does not
        count, as it has lost their locks to this run."""
        before = json.loads(self.read(RUN_FILE) or b"{}")
        theirs = before.get("fingerprint", {}).get("outputs")
        return before.get("run") not in (None, run) and theirs != outputs and self.at_work() > 0

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

    def at_work(self) -> int:
        now = time.time()
        return sum(not beat["ended"] and now - beat["time"] < FRESH_S for beat in self._beats())

    def killed(self) -> bool:
        return not all(beat["ended"] for beat in self._beats())

    def telemetry(self) -> list[list[dict[str, Any]]]:
        return [beat["rows"] for beat in self._beats() if beat["rows"]]

    def tail(self, name: str) -> bytes:
        return (self.read(name) or b"")[-TAIL_BYTES:]

    def close(self) -> None:
        if self._here is None:
            return
        with contextlib.suppress(PenstockError, OSError):
            self._copy("*")
        shutil.rmtree(self._here, ignore_errors=True)
        self._here = None

    def _beats(self) -> list[dict[str, Any]]:
        contents = self.bucket.read_all(self.bucket.names(ALIVE_FOLDER))
        return [json.loads(content) for content in contents if content is not None]

    def _beat(self, run: str, name: str, ended: bool) -> None:
        """Write the heartbeat of a process, or that it has ended. Failures do not matter."""
        if not ended and time.monotonic() - self._beaten < BEAT_S:
            return
        self._beaten = time.monotonic()
        with contextlib.suppress(PenstockError, OSError):
            beat = {"run": run, "time": time.time(), "ended": ended, "rows": self._last_rows()}
            self.write(f"{ALIVE_FOLDER}{name}.json", json.dumps(beat).encode())
            self._copy("[!m]*")  # all but metrics, which grow all the time

    def _last_rows(self) -> list[dict[str, Any]]:
        """A sample of the last rows of metrics, which includes the very last."""
        if self._here is None:
            return []
        local, rows = LocalFolder(self._here), []
        for name in local.names(METRICS_FILE, of_each(METRICS_FILE)):
            rows = rows_of(local.tail(name))
        step = -(-len(rows) // ROWS) or 1
        return [{"time": row["time"], "gauges": row["gauges"]} for row in rows[::-step][::-1]]

    def _copy(self, pattern: str) -> None:
        """Copy the files whose size has changed since the last copy."""
        for file in [] if self._here is None else self._here.glob(pattern):
            if is_draft(file.name):
                continue
            if (size := file.stat().st_size) != self._copied.get(file.name):
                self.write(file.name, file.read_bytes())
                self._copied[file.name] = size
