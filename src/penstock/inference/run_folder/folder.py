"""The folder of a run, wherever it lies, and what its documents and logs say."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from ...base import RUN_FILE, SUMMARY_FILE, UsageError, plural
from ...data import Sink, Source
from .block_log import BlockSet, Checks, Key, read_entries, read_lines
from .bucket_folder import RemoteFolder, RemoteLog
from .local import LocalFolder, LogFile
from .names import LOG_FILE

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
    with suppress(ValueError):
        if isinstance(document := json.loads(content), dict):
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
        self.planned: int = run.get("blocks") or 0
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
            lost = f"cut: it names {named:,} of the {self.planned:,} blocks that were written"
        return lost and (
            f"{self.folder}/{LOG_FILE} is {lost}; blocks without a line count as not written: "
            "penstock repair OUTPUT, or infer --resume, computes them again"
        )
