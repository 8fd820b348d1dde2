"""The files of one process in the folder of a run, which several processes may share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base import scrubbed
from .folder import folder_at
from .names import own_name


class OwnFiles:
    """The folder of a run, and the names of this process's own files in it."""

    def __init__(self, place: Path | str | None) -> None:
        """``place`` is the path or URL of the folder, None for a run without one."""
        self.folder = None if place is None else folder_at(place)
        self.writer: str | None = None
        """Name of this process among several that write the run; None if it writes alone."""
        self._retries, self._retry_seconds = 0, 0.0

    @property
    def here(self) -> Path | None:
        """A folder of this machine for the records of this process."""
        return None if self.folder is None else self.folder.here

    def save(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file of the folder, completely or not at all."""
        if self.folder is not None:
            text = json.dumps(scrubbed(content), indent=2, default=str) + "\n"
            self.folder.write(name, text.encode())

    def own_name(self, name: str) -> str:
        """The name of this process's own file, if several processes share the run."""
        return name if self.writer is None else own_name(name, self.writer)

    def own_rows(self, name: str) -> Path | None:
        """The local file to which this process appends rows."""
        return None if self.folder is None else self.folder.rows(self.own_name(name))

    def named(self, name: str) -> str:
        """The path of a file of the folder, for messages."""
        return name if self.folder is None else f"{self.folder}/{name}"

    @property
    def retried(self) -> tuple[int, float]:
        """The number of tries outside the stages that failed and were followed by another, such as
        of the lock or of the run folder, and their seconds."""
        count, seconds = (0, 0.0) if self.folder is None else self.folder.retried
        return self._retries + count, self._retry_seconds + seconds

    def note_retries(self, count: int, seconds: float) -> None:
        """Count tries of something that is no store of the job, such as the lock."""
        self._retries += count
        self._retry_seconds += seconds
