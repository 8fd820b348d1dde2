"""The interface of a run folder, and a run folder on a local disk. `bucket` has one in a bucket."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from ...base import (
    TRACEBACK_FILE,
    UsageError,
    is_draft,
    is_locked,
    replacing,
)
from ...instruments import set_aside
from .contents import is_run, rows_of, tail_of
from .log_file import LogFile, LogFiles, copied_logs, logs_of, own_name
from .notes import Notes
from .unit_log import Key, lost_line, parse_line


class Log(Protocol):
    """The log of one process, which no other process writes."""

    @property
    def lacking(self) -> str | None:
        """The reason why no lock keeps other processes away; None if one does."""

    def begin(self, *, anew: bool) -> None:
        """Begin to write. If ``anew``, delete what an earlier start left."""

    def append(self, line: str) -> None:
        """Add a line."""

    @property
    def pending(self) -> int:
        """Number of lines that a kill would lose."""

    def flush(self) -> None:
        """Store what was appended, so that a kill does not lose it."""

    def close(self) -> None:
        """Store what was appended if that is possible, and let other processes write the run."""


class Folder(Protocol):
    """A folder of named files, each written whole, and of logs that are only appended to.

    A name may have slashes. Each method raises `OSError` or `UsageError` if it fails.
    """

    @property
    def place(self) -> Path | str:
        """Where it is: a path, or a URL."""

    @property
    def here(self) -> Path:
        """A folder of this machine for files that grow line by line."""

    @property
    def retried(self) -> tuple[int, float]:
        """The number of requests that failed and were repeated, and the seconds of these and of the
        waits after them."""

    def check(self) -> None:
        """Raise `UsageError` if no run can be begun here. Nothing is changed."""

    def make(self) -> None:
        """Make the folder if it is not there."""

    def read(self, name: str) -> bytes | None:
        """The content of a file, None if it is not there."""

    def write(self, name: str, content: bytes) -> None:
        """Write a file, completely or not at all."""

    def names(self, pattern: str) -> list[str]:
        """The files whose names match, sorted. A star stands for anything but a slash."""

    def delete(self, pattern: str) -> None:
        """Delete the files that match, or all files below a name that ends with a slash."""

    def set_aside(self, name: str) -> None:
        """Give a file of an earlier start a number, if it is there."""

    def rows(self, name: str) -> Path:
        """A local file below `here`, to append rows to. It begins with the rows of the folder."""

    def log(self, run: str, writer: str | None, outputs: Sequence[str]) -> Log:
        """Open the log of a process of a run with these outputs.

        Raises `BlockingIOError` if another process writes it.
        """

    def notes(self, run: str, makers: list[dict[str, Any]] | None = None) -> Notes:
        """A reader of the logs of a run. It adds the makers that only logs name to ``makers``."""

    def forget(self, run: str, keys: list[Key]) -> None:
        """Take units off the list. Raises `BlockingIOError` if a process writes the run."""

    def at_work(self) -> int:
        """The number of processes that write the run now."""

    def tail(self, name: str) -> bytes:
        """The end of a file, with enough bytes for its last rows."""

    def telemetry(self) -> list[list[dict[str, Any]]]:
        """The last rows of metrics of each process of this start; none of them is empty."""

    def close(self) -> None:
        """Store the files of `here` for good."""


class LocalFolder:
    """A run folder on a file system of this machine."""

    retried = (0, 0.0)

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def place(self) -> Path:
        return self.path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def here(self) -> Path:
        return self.path

    def check(self) -> None:
        folder = self.path
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise UsageError(f"--run-dir {folder}: {there} is not a folder that can be written to")
        check_ours(folder)

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def read(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, content: bytes) -> None:
        with replacing(self.path / name) as draft:
            draft.write_bytes(content)

    def names(self, pattern: str) -> list[str]:
        paths = self.path.glob(pattern)
        return sorted(path.relative_to(self.path).as_posix() for path in paths if path.is_file())

    def delete(self, pattern: str) -> None:
        if pattern.endswith("/"):
            shutil.rmtree(self.path / pattern, ignore_errors=True)
            return
        for path in self.path.glob(pattern):
            path.unlink()

    def set_aside(self, name: str) -> None:
        set_aside(self.path / name)

    def rows(self, name: str) -> Path:
        return self.path / name

    def log(self, run: str, writer: str | None, outputs: Sequence[str]) -> LogFile:
        name = "done.log" if writer is None else own_name("done.log", writer)
        return LogFile(self.path / name)

    def notes(self, run: str, makers: list[dict[str, Any]] | None = None) -> LogFiles:
        return LogFiles(self.path, run, [{}] if makers is None else makers)

    def forget(self, run: str, keys: list[Key]) -> None:
        if copied_logs(self.path):
            raise UsageError(
                f"--forget: {self} is a copy of a run folder in a bucket; name the bucket"
            )
        with contextlib.ExitStack() as held:
            logs = [
                held.enter_context(contextlib.closing(LogFile(path))) for path in logs_of(self.path)
            ]
            for log in logs:  # in each, as it is not known which log has a unit
                log.begin(anew=False)
                log.append("".join(map(lost_line, keys)))

    def at_work(self) -> int:
        return sum(is_locked(log) for log in logs_of(self.path))

    def tail(self, name: str) -> bytes:
        return tail_of(self.path / name)

    def telemetry(self) -> list[list[dict[str, Any]]]:
        began = (self.path / "run.json").stat().st_mtime - 1  # clocks of file systems are coarse
        tails = (rows_of(self.tail(path.name)) for path in self.path.glob("metrics*.jsonl"))
        fresh = ([row for row in tail if row["time"] >= began] for tail in tails)
        return [rows for rows in fresh if rows]

    def close(self) -> None:
        """Do nothing, as the files are in the folder already."""


def folder_at(place: Path | str) -> Folder:
    """The run folder at a path, or at the URL of a prefix in a bucket.

    Raises `UsageError` for other URLs.
    """
    if isinstance(place, str):
        from .bucket import RemoteFolder

        return RemoteFolder(place)
    return LocalFolder(place)


def check_ours(folder: Path) -> None:
    """Refuse a folder that holds files and is no run folder. Nothing in it is changed."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    # A run that ends before it has begun may leave these.
    names = {name for name in names if name != TRACEBACK_FILE and not is_draft(name)}
    if not names or _is_ours(folder, names):
        return
    others = f" and {len(names) - 1} more" if len(names) > 1 else ""
    raise UsageError(
        f"--run-dir {folder}: holds {min(names)}{others} and is not a run folder; name another one"
    )


def _is_ours(folder: Path, names: set[str]) -> bool:
    """Whether a folder is a run folder: by its run.json, or by its log if that is damaged or
    missing."""
    with contextlib.suppress(OSError):
        if is_run((folder / "run.json").read_bytes()):
            return True
    if "done.log" not in names:
        return False
    lines = (folder / "done.log").read_bytes().splitlines(keepends=True)
    if not lines:
        return names <= {"done.log", "statistics.json"}
    # The last line may be torn.
    return all(
        parse_line(line) or line[:1] in (b"?", b"#") for line in lines if line.endswith(b"\n")
    )
