"""All runs below the folders that the user names, read again when their files change."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from ...base import UsageError, describe
from ..places import beside_output, folders_below
from .folder_runs import shown_inference, shown_training
from .ledger_runs import runs_of_ledger
from .shown_run import RunDetails, ShownRun, label

LOOK_EVERY_S = 2.0
_SEARCH_EVERY_S = 10.0
_SHARE = 0.05
"""Largest share of the time that is spent on looking for runs, so slow file systems get less
load."""
_MOST_NOTES = 50
_KEPT_SUFFIXES = (".db", ".zip", ".out", ".out.gz", ".log", ".log.gz")
_FAULTS = (OSError, KeyError, TypeError, ValueError, AttributeError)
"""Errors of reading a file that is not as its writer left it."""

RunPlaceKind = Literal["ledger", "inference", "training", "tracked", "kept"]
ReadOthers = Callable[[Path], Sequence[ShownRun]]
"""Reads the runs of a file of another program. The command line hands it over."""


class RunPlace(NamedTuple):
    """A file or a folder that runs are read from."""

    kind: RunPlaceKind
    path: Path


class Catalogue:
    """The runs. One thread refreshes them; other threads read the last state."""

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
        self._places: list[RunPlace] = []
        self._held: dict[RunPlace, tuple[object, Sequence[ShownRun], Sequence[str]]] = {}
        self._searched = 0.0
        self.runs: Sequence[ShownRun] = ()
        """All runs, the newest first."""
        self.by_key: dict[str, ShownRun] = {}
        self.notes: Sequence[str] = ()
        """Sentences on what cannot be read."""
        self.version = 0
        """A number that grows when runs change."""
        self.refresh()

    @classmethod
    def holding(cls, runs: Sequence[ShownRun]) -> Catalogue:
        """A catalogue of these runs, in this order, which is never refreshed."""
        catalogue = cls(())
        catalogue.runs, catalogue.by_key = runs, {run.key: run for run in runs}
        return catalogue

    def refresh(self) -> None:
        """Look for places from time to time, and read those whose files have changed.

        Raises `UsageError` if there are far too many folders.
        """
        now = time.monotonic()
        if now >= self._searched:
            self._places = list(dict.fromkeys(p for path in self._named for p in places_at(path)))
            took = time.monotonic() - now
            self._searched = now + max(_SEARCH_EVERY_S, took / _SHARE)
        held = {}
        for place in self._places:
            before, stamp = self._held.get(place), _stamp(place)
            # A run that goes on may end without a change of its files: its process is gone.
            goes_on = before is not None and any(run.status == "running" for run in before[1])
            kept = before is not None and before[0] == stamp and not goes_on
            held[place] = before if kept and before else (stamp, *self._read(place))
        if held != self._held:
            self._held = held
            runs = {run.key: run for _, each, _ in held.values() for run in each}
            self.by_key = runs
            self.runs = sorted(runs.values(), key=lambda run: -(run.began or 0.0))
            self.notes = [note for *_, notes in held.values() for note in notes][:_MOST_NOTES]
            self.version += 1

    def _read(self, place: RunPlace) -> tuple[list[ShownRun], list[str]]:
        try:
            if place.kind == "ledger":
                return runs_of_ledger(place.path)
            if place.kind == "training":
                return [shown_training(place.path)], []
            if place.kind == "inference":
                return [shown_inference(place.path)], []
            return list(self._others(place.path)), []
        except UsageError as error:
            return [], [f"{label(error)}; it is passed over"]
        except _FAULTS as error:
            what = f"{type(error).__name__}: {describe(error)}"
            return [], [f"{place.path} is not as its run wrote it ({what}); it is passed over"]

    def details(self, run: ShownRun) -> RunDetails:
        """All that is known of a run; an error in words if it has been removed since."""
        try:
            return run.read()
        except (UsageError, *_FAULTS) as error:
            return RunDetails(error=label(f"{run.source} cannot be read: {describe(error)}"))

    def follow(self, ended: threading.Event) -> None:
        """Refresh until ``ended`` is set."""
        pause = LOOK_EVERY_S
        while not ended.wait(pause):
            before = time.monotonic()
            try:
                self.refresh()
            except (UsageError, OSError) as error:  # the folders may come back
                self.notes = [label(error)]
            pause = max(LOOK_EVERY_S, (time.monotonic() - before) / _SHARE)


def places_at(named: Path) -> Iterator[RunPlace]:
    """The places at a path that a user named, and below it; no link is followed.

    Raises `UsageError` if there are far too many folders below it.
    """
    if named.is_file():
        ledger = named.name.endswith((".jsonl", ".jsonl.gz"))
        yield RunPlace("ledger" if ledger else "kept", named)
        return
    if place := beside_output(named):
        yield RunPlace(*place)
        return
    for path, kind, folders, names in folders_below(named):
        if kind is not None:
            yield RunPlace(kind, path)
        elif "meta.yaml" in names and {"params", "metrics"} & set(folders):
            folders.clear()
            yield RunPlace("tracked", path)
        else:
            files = (path / name for name in names if name.endswith(_KEPT_SUFFIXES))
            yield from (RunPlace("kept", file) for file in files if not file.is_symlink())


def _stamp(place: RunPlace) -> object:
    """The states of the files of a place. Another stamp means that they have changed."""
    inside = [place.path]
    if place.path.is_dir():
        deep = "metrics/**/*" if place.kind == "tracked" else "steps/*"
        inside = [*sorted(place.path.glob("*")), *sorted(place.path.glob(deep))]
    states = []
    for path in inside:
        try:
            state = path.stat()
        except OSError:
            continue
        states.append((path.name, state.st_mtime_ns, state.st_size))
    return tuple(states)
