"""What a run leaves beside its output, so that a killed one can go on: the run folder.

    run.json         settings and fingerprint of the run
    done.log         one line for each write unit, appended and synced after the unit is written
    statistics.json  exact global percentiles
    metrics.jsonl    rows of telemetry
    summary.json     written last, by a run that succeeded

A line that a kill tore is ignored, and its unit is written again: writing a unit twice does no
harm, and counting on one that was never written would.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from .errors import UsageError
from .files import replacing
from .keys import scrubbed
from .telemetry import set_aside

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Key = tuple[int, ...]


class Journal:
    """The record of one run. Without a folder it only counts."""

    def __init__(self, folder: Path | None, fingerprint: Mapping[str, Any]) -> None:
        self.folder = folder
        self.fingerprint: dict[str, Any] = scrubbed(json.loads(json.dumps(fingerprint)))
        self.done: set[Key] = set()
        self.statistics: dict[str, dict[str, Any]] = {}
        self.written = self.skipped = self.voxels = 0
        self._log: IO[str] | None = None
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: Path | None, fingerprint: Mapping[str, Any], *, resume: bool) -> Journal:
        """Read what an earlier run left, where ``resume``; creates nothing.

        Raises `UsageError` where that run was another one, naming the first difference.
        """
        journal = cls(folder, fingerprint)
        if folder is not None:
            there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
            if not there.is_dir() or not os.access(there, os.W_OK):
                raise UsageError(f"--run-dir {folder}: {there} is no folder that can be written to")
        if not resume or folder is None or not (folder / "run.json").exists():
            return journal
        before = _read(folder / "run.json").get("fingerprint", {})
        for name, value in journal.fingerprint.items():
            if before.get(name, value) != value:  # what an older version did not note is the same
                raise UsageError(
                    f"--resume: the run in {folder} had {name} {before[name]!r}, this one has "
                    f"{value!r}; give the same settings, or --overwrite instead"
                )
        log = folder / "done.log"
        lines = log.read_bytes().splitlines(keepends=True) if log.exists() else []
        journal.done = {key for line in lines if (key := _parse(line)) is not None}
        journal.skipped = len(journal.done)
        statistics = folder / "statistics.json"
        if statistics.exists():
            journal.statistics = _read(statistics)
        return journal

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Make the folder and start the log, keeping the units that were done before.

        Raises `UsageError`, and changes nothing, where another process is at this run.
        """
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "done.log"
        self._log = log.open("a")
        if not _claim(self._log):
            self.close()
            raise UsageError(f"--run-dir {self.folder}: another process is writing this output")
        if not self.done:
            self._log.truncate(0)
        elif not log.read_bytes().endswith(b"\n"):
            # Only appended to: a kill must not take what is done. A torn line is spoilt as it is
            # ended, or half of "0 1 1 12" would say that 0 1 1 1 is done.
            self._log.write("?\n")
            self._log.flush()
        (self.folder / "summary.json").unlink(missing_ok=True)
        if self.done:  # by the run that this one goes on with
            set_aside(self.folder / "metrics.jsonl")
        self.save("statistics.json", self.statistics)
        self.save("run.json", {"settings": settings, "fingerprint": self.fingerprint})

    def note(self, key: Key, voxels: int) -> None:
        """A unit has been written."""
        with self._lock:
            self.written += 1
            self.voxels += voxels
            if self._log is not None:
                self._log.write(_line(key))
                self._log.flush()
                os.fsync(self._log.fileno())

    def save_statistics(self, volume: int, found: Mapping[str, Any]) -> None:
        self.statistics[str(volume)] = dict(found)
        self.save("statistics.json", self.statistics)

    def save(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file of the folder, whole or not at all."""
        path = self.path(name)
        if path is not None:
            with replacing(path) as draft:
                draft.write_text(json.dumps(scrubbed(content), indent=2, default=str) + "\n")

    def path(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder / name

    def close(self) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):  # of a line that could not be written: `note` told
                self._log.close()
            self._log = None


def _claim(file: IO[str]) -> bool:
    """Lock an open file for this process, until it is closed or the process ends."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _line(key: Key) -> str:
    return " ".join(map(str, key)) + "\n"


def _parse(line: bytes) -> Key | None:
    """The unit of a line; None for one that is torn or damaged, whose unit is written again."""
    whole = re.fullmatch(rb"(\d+) (-?\d+) (-?\d+) (-?\d+)\n", line)
    return tuple(int(part) for part in whole.groups()) if whole else None


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UsageError(f"--resume: {path} is damaged; give --overwrite to begin anew") from error
    return content
