"""The folder of a run, wherever it lies, and what its documents and logs say.

`LocalFolder` is one on a local disk, `bucket_folder` has one in a bucket, with the same methods. A
log is only appended to, and by one process, so that a kill cannot lose what is done.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import IO, Any, TypeAlias

from ...base import (
    RUN_FILE,
    SUMMARY_FILE,
    TRACEBACK_FILE,
    UsageError,
    ends_torn,
    is_draft,
    is_locked,
    json_object,
    lock_file,
    nearest,
    parsed_json,
    plural,
    replacing,
    set_aside,
    well_formed,
)
from ...data import Sink, Source
from .block_log import (
    ENDED_TORN,
    BlockSet,
    Checks,
    Key,
    is_line,
    lost_line,
    read_entries,
    read_lines,
)
from .bucket_folder import RemoteFolder, RemoteLog
from .names import LOG_FILE, LOGS_FOLDER, METRICS_FILE, is_run, of_each, own_name

TAIL_BYTES = 2**20
"""Number of bytes that are read at the end of a file of rows, about 20 minutes of metrics."""


class LocalFolder:
    """A folder of named files, each written whole, and of logs that are only appended to; this one
    on a file system of this machine.

    A name may have slashes. Each method raises `OSError` or `UsageError` if it fails.
    """

    def __init__(self, path: Path) -> None:
        self.place = self.path = path

    def __str__(self) -> str:
        return str(self.place)

    @property
    def here(self) -> Path:
        """A folder of this machine for files that grow line by line."""
        return self.path

    def check(self) -> None:
        """Raise `UsageError` if no run can be begun here. Nothing is changed."""
        there = nearest(self.path)
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise UsageError(f"--run-dir {self}: {there} is not a folder that can be written to")
        self._check_ours()

    def _check_ours(self) -> None:
        """Refuse a folder that holds files and is no run folder."""
        names = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        # A run that ends before it has begun may leave these.
        names = {name for name in names if name != TRACEBACK_FILE and not is_draft(name)}
        if not names or is_run(self.read(RUN_FILE) or b""):
            return
        # The run.json may be damaged or missing, and then the log says whose folder it is. Its last
        # line may be torn.
        *lines, torn = (self.read(LOG_FILE) or b"").split(b"\n")
        begun = names == {LOG_FILE} and not torn
        if all(map(is_line, lines)) and (lines or begun):
            return
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise UsageError(
            f"--run-dir {self}: holds {min(names)}{others} and is not a run folder; name another "
            "one"
        )

    def read(self, name: str) -> bytes | None:
        """The content of a file, None if it is not there."""
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a file, completely or not at all."""
        with replacing(self.path / name) as draft:
            draft.write_bytes(content)

    def names(self, *patterns: str) -> list[str]:
        """The files whose names match any of the patterns. A star stands for anything but a
        slash."""
        paths = [path for pattern in patterns for path in sorted(self.path.glob(pattern))]
        return [path.relative_to(self.path).as_posix() for path in paths if path.is_file()]

    def delete(self, *patterns: str) -> None:
        """Delete the files that match, or all files below a name that ends with a slash."""
        for pattern in patterns:
            if pattern.endswith("/"):
                shutil.rmtree(self.path / pattern, ignore_errors=True)
        for name in self.names(*patterns):
            (self.path / name).unlink()

    def set_aside(self, name: str) -> None:
        """Give a file of an earlier start a number, if it is there."""
        set_aside(self.path / name)

    def log(self, run: str, writer: str | None, outputs: Sequence[str]) -> LogFile:
        """Open the log of a process of a run with these outputs. The folder is made if need be.

        Raises `BlockingIOError` if another process writes it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        return LogFile(self.path / (LOG_FILE if writer is None else own_name(LOG_FILE, writer)))

    def new_lines(self, run: str, seen: dict[str, int]) -> Iterator[Iterable[bytes]]:
        """The lines of each log of a run, from where the last look ended. They are read before the
        next log is asked for.

        ``seen`` says how far each log was read, in units of the folder's own, and is updated.
        """
        # A folder that was copied from a bucket has several files for a log: see `bucket_folder`.
        for _, parts in groupby(self._logs(run), lambda name: name.rpartition("/")[0] or name):
            yield (line for name in parts for line in self._lines(name, seen))

    def _lines(self, name: str, seen: dict[str, int]) -> Iterator[bytes]:
        """The lines of a log, one by one, as it may be larger than the memory. A last line that is
        not whole is read again by the next look: it may be under way."""
        with (self.path / name).open("rb") as file:
            file.seek(seen.get(name, 0))
            for line in file:
                if not line.endswith(b"\n"):
                    yield line
                    return  # the rest may come right now, and would be taken for a line
                seen[name] = seen.get(name, 0) + len(line)
                yield line

    def _logs(self, run: str = "*") -> list[str]:
        # Also what is no file: a log that cannot be read must not pass for one without lines.
        patterns = LOG_FILE, of_each(LOG_FILE), f"{LOGS_FOLDER}{run}/*/*.log"
        paths = [path for pattern in patterns for path in sorted(self.path.glob(pattern))]
        return [path.relative_to(self.path).as_posix() for path in paths]

    def forget(self, run: str, keys: list[Key]) -> None:
        """Take blocks off the list of a run that no process writes."""
        with contextlib.ExitStack() as held:
            # All are locked before the first is changed: if a process still writes one, none is.
            logs = [LogFile(self.path / name) for name in self._logs(run)]
            for log in logs:
                held.callback(log.close)
            for log in logs:  # in each, as it is not known which log has a block
                log.begin(anew=False)
                log.append("".join(map(lost_line, keys)))

    def at_work(self) -> int:
        """The number of processes that write the run now; None if the store does not say."""
        return sum(is_locked(self.path / log) for log in self._logs())

    def killed(self) -> bool:
        """Whether one of several processes that share the run has left no summary."""
        logs, ends = (
            {name.partition("-")[2].rpartition(".")[0] for name in self.names(of_each(file))}
            for file in (LOG_FILE, SUMMARY_FILE)
        )
        return not logs <= ends

    def telemetry(self) -> list[list[dict[str, Any]]]:
        """The last rows of metrics of each process of this start; none of them is empty."""
        began = (self.path / RUN_FILE).stat().st_mtime - 1  # clocks of file systems are coarse
        each = map(self._last_rows, self.names(METRICS_FILE, of_each(METRICS_FILE)))
        fresh = ([row for row in rows if row["time"] >= began] for rows in each)
        return [rows for rows in fresh if rows]

    def _last_rows(self, name: str) -> list[dict[str, Any]]:
        """The rows at the end of a file, without incomplete ones."""
        with (self.path / name).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return [row for row in map(json_object, file) if "time" in row]

    def close(self) -> None:
        """Store the files of `here` for good. They are in the folder already."""


class LogFile:
    """A log that this process appends to and no other may write meanwhile."""

    def __init__(self, path: Path) -> None:
        """Open and lock the file, which is made if it is not there. Nothing in it is changed.

        Raises `BlockingIOError` if another process has locked it.
        """
        self._file: IO[bytes] | None = path.open("a+b")
        self._lock = threading.Lock()
        if not lock_file(self._file):
            self.close()
            raise BlockingIOError(f"{path} is another process's")
        # Some file systems take every lock and keep none. So it is asked whether this one is seen.
        self.lacking = None if is_locked(path) else "its file system, or this system, has none"
        """The reason why the file has no lock, None if it has one."""

    def begin(self, *, anew: bool) -> None:
        """Empty the file if it is begun ``anew``, else make its last line whole."""
        assert self._file is not None
        if anew:
            self._file.truncate(0)
        elif ends_torn(self._file):
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


Folder: TypeAlias = LocalFolder | RemoteFolder
"""The folder of a run: both kinds have the same methods."""
Log: TypeAlias = LogFile | RemoteLog
"""The log of one process, which no other process writes."""


def folder_at(place: Path | str) -> Folder:
    """The run folder at a path, or at the URL of a prefix in a bucket.

    Raises `UsageError` for other URLs.
    """
    return RemoteFolder(place) if isinstance(place, str) else LocalFolder(place)


def is_complete(place: Path | str) -> bool:
    """Whether a run folder is that of a run that is complete: its summary is written last.

    Args:
        place: The path or the URL of the folder, which need not be there.
    """
    return bool(folder_at(place).names(SUMMARY_FILE))


def check_outside(
    named: Iterable[tuple[str, Path | str | None]], source: Source, sinks: Iterable[Sink]
) -> None:
    """Refuse files and folders, each with its flag, that lie inside the input or an output."""
    arrays = [("input", source.address), *(("output", sink.address) for sink in sinks)]
    for flag, place in named:
        here = RemoteFolder(place).address if isinstance(place, str) else place and place.resolve()
        for what, address in arrays:
            if here is not None and f"{here}/".startswith(f"{address}/"):
                raise UsageError(f"{flag} {place} lies inside the {what}")


def read_document(folder: Folder, name: str) -> dict[str, Any] | None:
    """The JSON object in a file of a run folder, None if there is no such file.

    Raises `UsageError` if it is damaged.
    """
    if (content := folder.read(name)) is None:
        return None
    with contextlib.suppress(ValueError):
        if isinstance(document := parsed_json(content), dict):
            return document
    raise UsageError(
        f"{folder}/{name} is damaged; put it back from a copy, or let infer --overwrite begin anew"
    )


def read_run(place: Folder | Path | str) -> dict[str, Any]:
    """The run.json of a run folder, empty if there is none.

    Raises `UsageError` if it is damaged.
    """
    folder = folder_at(place) if isinstance(place, Path | str) else place
    return read_document(folder, RUN_FILE) or {}


def check_same(folder: Folder | Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise `UsageError` if a run was begun with other facts than those of ``now``."""
    if (name := differing(before, now)) is not None:
        raise UsageError(
            f"the run in {folder} had {name} {before.get(name)!r}, and here it is {now[name]!r}; "
            "go on with the same, or --overwrite to begin anew"
        )


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first key whose value differs."""
    return next((name for name, value in now.items() if before.get(name) != value), None)


class Notes:
    """The logs of a run, each read on from where the last look ended.

    Blocks are not taken off the list while a run is at work, so what an earlier look gave stays
    true.
    """

    def __init__(self, folder: Folder, run: Mapping[str, Any]) -> None:
        """``run`` is the run.json of the folder."""
        self.folder, self.run = folder, str(run.get("run"))
        with well_formed(f"{folder}/{RUN_FILE} is damaged"):
            self.planned = int(run.get("blocks") or 0)
            self._plan = [range(*line) for line in run.get("cells", ())]
        self._seen: dict[str, int] = {}
        """How far each log was read."""
        self._blocks = BlockSet()
        self.damaged: list[bytes] = []
        """The lines that cannot be read, or that name no block of the plan. While a process writes
        a log, its last line may be under way."""
        self.ask()

    def ask(self) -> None:
        """Ask how many processes are at work, and whether the run is complete. This comes before a
        look, as a process may write its last blocks and end meanwhile."""
        self.processes = self.folder.at_work()
        self.complete = bool(self.folder.names(SUMMARY_FILE))

    def fresh(self) -> dict[Key, Checks]:
        """The blocks noted since the last look, and their checks; from the first look all. Each
        takes some hundred bytes."""
        notes: dict[Key, Checks] = {}
        for lines in self._new_lines():
            notes |= read_lines(lines, self.damaged, self._plan)
        return notes

    def blocks(self) -> BlockSet:
        """All blocks noted so far. The set grows with the next look."""
        for lines in self._new_lines():
            noted = BlockSet()  # of one log, as a block that one log lost may stand in another
            for key, checks in read_entries(lines, self.damaged, self._plan):
                if checks is None:
                    noted.discard(key)
                else:
                    noted.add(key)
            self._blocks.update(noted)
        return self._blocks

    def _new_lines(self) -> Iterator[Iterable[bytes]]:
        # One that was under way is read again.
        self.damaged = [line for line in self.damaged if line.endswith(b"\n")]
        return self.folder.new_lines(self.run, self._seen)

    def lost(self, named: int) -> str:
        """What the logs lack, in a sentence; empty if they are whole or were still written. They
        name ``named`` blocks; those of a run that is done name all that are planned."""
        if named >= self.planned or self.processes:  # then a line may be under way
            return ""
        lost = ""
        if self.damaged:
            lost = f"cut or damaged in {plural(len(self.damaged), 'line')}"
        elif self.complete:
            lost = (
                f"cut: it names {named:,} of the {plural(self.planned, 'block')} that were written"
            )
        return lost and (
            f"{self.folder}/{LOG_FILE} is {lost}; blocks without a line count as not written: "
            "penstock repair OUTPUT, or infer --resume, computes them again"
        )
