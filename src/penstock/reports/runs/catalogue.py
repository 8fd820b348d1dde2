"""All runs below the folders that the user names, read again when their files change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ...base import UsageError, describe
from ..places import RecordPlace, places_at, reading
from .record_rows import runs_of_ledger, shown_inference, shown_training
from .shown_run import RunDetails, ShownRun, label

LOOK_EVERY_S = 2.0
_SHARE = 0.05
"""Largest share of the time that is spent on looking for runs, so slow file systems get less
load."""
_MOST_NOTES = 50
_INSIDE = ("*", "steps/*")
"""The files of a place whose changes are changes of its runs."""

ReadOthers = Callable[[Path], Sequence[ShownRun]]
"""Reads the runs of a file of another program. The command line hands it over."""
_READERS: dict[str, ReadOthers] = {
    "ledger": runs_of_ledger,
    "training": lambda path: [shown_training(path)],
    "inference": lambda path: [shown_inference(path)],
}
"""The reader of each kind of place that is ours."""
_Held = tuple[object, Sequence[ShownRun], Sequence[str]]
"""The stamp of a place, its runs, and a sentence if they cannot be read."""


class Catalogue:
    """The runs. Threads may refresh it and read it at once."""

    def __init__(self, named: Iterable[Path], others: ReadOthers = lambda path: ()) -> None:
        """Read all runs.

        Args:
            named: Files and folders.
            others: Reads the logs of jobs and what trackers kept.

        Raises:
            UsageError: A path is missing, or there are far too many folders.
        """
        self._named, self._others = tuple(named), others
        for path in self._named:
            if not path.exists():
                raise UsageError(f"{path} cannot be read: No such file or directory")
        self._held: dict[RecordPlace, _Held] = {}
        self._next = 0.0
        self._lock = threading.Lock()
        self.runs: Sequence[ShownRun] = ()
        """All runs, the newest first."""
        self.by_key: dict[str, ShownRun] = {}
        self.notes: Sequence[str] = ()
        """Sentences on what cannot be read."""
        self.version = 0
        """A number that grows when runs change."""
        self._read_changes()

    @classmethod
    def holding(cls, runs: Sequence[ShownRun]) -> Catalogue:
        """A catalogue of these runs, in this order, which is never refreshed."""
        catalogue = cls(())
        catalogue.runs, catalogue.by_key = runs, {run.key: run for run in runs}
        return catalogue

    def refresh(self) -> None:
        """Read what has changed, unless that was done a moment ago."""
        with self._lock:
            began = time.monotonic()
            if began < self._next:
                return
            try:
                self._read_changes()
            except (UsageError, OSError) as error:  # the folders may come back
                self.notes = [label(error)]
            now = time.monotonic()
            self._next = now + max(LOOK_EVERY_S, (now - began) / _SHARE)

    def _read_changes(self) -> None:
        held: dict[RecordPlace, _Held] = {}
        for place in (place for path in self._named for place in places_at(path)):
            before, stamp = self._held.get(place), _stamp(place.path)
            # A run that goes on may end without a change of its files: its process is gone.
            goes_on = before is not None and any(run.status == "running" for run in before[1])
            if before is None or before[0] != stamp or goes_on:
                before = (stamp, *self._read(place))
            held[place] = before
        if held == self._held:
            return
        self._held = held
        self.by_key = {run.key: run for _, runs, _ in held.values() for run in runs}
        self.runs = sorted(self.by_key.values(), key=lambda run: -(run.began or 0.0))
        self.notes = [note for *_, notes in held.values() for note in notes][:_MOST_NOTES]
        self.version += 1

    def _read(self, place: RecordPlace) -> tuple[Sequence[ShownRun], Sequence[str]]:
        try:
            with reading(place):
                return _READERS.get(place.kind, self._others)(place.path), ()
        except (UsageError, OSError) as error:
            return (), [f"{label(error)}; it is passed over"]

    def details(self, run: ShownRun) -> RunDetails:
        """All that is known of a run; an error in words if it has been removed since."""
        try:
            return run.read()
        except (UsageError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            return RunDetails(error=label(f"{run.source} cannot be read: {describe(error)}"))


def _stamp(path: Path) -> object:
    """The states of the files of a place. Another stamp means that they have changed."""
    try:
        inside = [path, *(file for pattern in _INSIDE for file in path.glob(pattern))]
        states = [(file, file.stat()) for file in inside]
    except OSError:  # a file went away meanwhile
        return object()
    return {(file, state.st_mtime_ns, state.st_size) for file, state in states}
