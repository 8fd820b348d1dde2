"""The files of a run folder: where it lies, and how its JSON is written and read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base import UsageError, scrubbed
from ...data import Located
from .local import Folder, folder_at
from .log_file import of_each, own_name, read_units
from .unit_log import Key

HALVED_FILE = "halved.jsonl"


class RunFiles:
    """The folder of a run, in which several processes may write."""

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

    def halved(self) -> set[Key]:
        """The units whose patches ran in smaller batches, from the lists of all processes."""
        return set() if self.folder is None else halved_in(self.folder)

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


def halved_in(folder: Folder) -> set[Key]:
    """The units of a run folder whose patches ran in smaller batches."""
    names = [*folder.names(HALVED_FILE), *folder.names(of_each(HALVED_FILE))]
    return set().union(*(read_units(folder.read(name) or b"") for name in names))


def read_document(folder: Folder, name: str) -> dict[str, Any] | None:
    """The JSON object in a file of a run folder, None if there is no such file.

    Raises `UsageError` if it is damaged.
    """
    if (content := folder.read(name)) is None:
        return None
    try:
        document: dict[str, Any] = dict(json.loads(content))
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"--resume: {folder}/{name} is damaged; give --overwrite to begin anew"
        ) from error
    return document


def default_run_dir(sink: Located) -> Path | None:
    """The run folder of an output: beside a local store, in the working folder for a remote one.
    None for an array in memory.

    If the name of the store does not say which array is meant, a hash of its address is added.
    """
    store = sink.local_path
    if store is not None and str(store.resolve()) == sink.address:
        return store.with_name(store.name + ".penstock")
    if store is None:
        if "://" not in sink.address:
            return None
        store = Path(sink.address.rstrip("/").rpartition("/")[2])
    address = hashlib.sha256(sink.address.encode()).hexdigest()[:8]
    return store.with_name(f"{store.name}-{address}.penstock")
