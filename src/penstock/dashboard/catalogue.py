"""All runs below the folders that the user names, read again when their files change."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from ..base import UsageError, describe
from ..reports import folders_below, kind_of_place
from .listed_run import ListedRun, RunDetails, Stamp, label
from .listing import Listing
from .sources.external import runs_of_others
from .sources.inferences import shown_inference
from .sources.records import LedgerTail
from .sources.trainings import shown_training

LOOK_EVERY_S = 2.0
_SEARCH_EVERY_S = 10.0
_SHARE = 0.05
"""Largest share of the time that is spent on looking for runs, so slow file systems get less
load."""
_KEPT_DETAILS = 64
_MOST_NOTES = 50
_KEPT_SUFFIXES = (".db", ".zip", ".wandb", ".out", ".out.gz", ".log", ".log.gz")
_FILES = {
    "training": (
        "args.json", "training_results.json", "steps/rank0.csv", "events.jsonl", "train.lock"
    ),
    "inference": ("run.json", "summary.json", "done.log", "metrics.jsonl"),
    "ledger": ("records.jsonl",),
    "tracked": ("meta.yaml", "metrics", "params"),
}  # fmt: skip
"""The files of each kind of folder that change while its run goes on."""

RunPlaceKind = Literal["ledger", "inference", "training", "tracked", "kept"]


class RunPlace(NamedTuple):
    """A file or a folder that runs are read from."""

    kind: RunPlaceKind
    path: Path


class Catalogue:
    """The runs. One thread refreshes them; other threads read the last state."""

    def __init__(self, named: Sequence[Path]) -> None:
        """``named`` are files and folders. Raises `UsageError` if one is missing."""
        for path in named:
            if not path.exists():
                raise UsageError(f"{path} cannot be read: No such file or directory")
        self._named = tuple(named)
        self._places: list[RunPlace] = []
        self._held: dict[RunPlace, tuple[Stamp, Sequence[ListedRun], Sequence[str]]] = {}
        self._tails: dict[Path, LedgerTail] = {}
        self._details: OrderedDict[str, tuple[Stamp, RunDetails]] = OrderedDict()
        self._lock = threading.Lock()
        self._searched = -1e9
        self.listing = Listing(())
        self.by_key: dict[str, ListedRun] = {}
        self.notes: Sequence[str] = ()
        """Sentences on what cannot be read."""
        self.version = 0
        """A number that grows when runs change."""

    def refresh(self) -> None:
        """Look for places from time to time, and read those whose files have changed.

        Raises `UsageError` if there are far too many folders.
        """
        now = time.monotonic()
        if now >= self._searched:
            self._places = list(dict.fromkeys(p for path in self._named for p in places_at(path)))
            took = time.monotonic() - now
            self._searched = now + max(_SEARCH_EVERY_S, took / _SHARE)
        changed = self._held.keys() != set(self._places)
        held = {}
        for place in self._places:
            before = self._held.get(place)
            stamp = _stamp(place)
            alive = before is not None and any(run.status == "running" for run in before[1])
            if before is not None and before[0] == stamp and not alive:
                held[place] = before
                continue
            held[place] = (stamp, *self._read(place, stamp))
            changed |= before is None or before[1:] != held[place][1:]
        self._held = held
        if changed:
            self._publish()

    def _read(self, place: RunPlace, stamp: Stamp) -> tuple[list[ListedRun], list[str]]:
        try:
            if place.kind == "ledger":
                tail = self._tails.setdefault(place.path, LedgerTail(place.path))
                tail.refresh()
                return list(tail.runs), list(tail.notes)
            if place.kind == "training":
                return [shown_training(place.path, stamp)], []
            if place.kind == "inference":
                return [shown_inference(place.path, stamp)], []
            return runs_of_others(place.path, stamp), []
        except UsageError as error:
            return [], [f"{label(error)}; it is passed over"]
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__}: {describe(error)}"
            return [], [f"{place.path} is not as its run wrote it ({what}); it is passed over"]

    def _publish(self) -> None:
        runs = {run.key: run for _, held, _ in self._held.values() for run in held}
        self.by_key = runs
        self.listing = Listing(sorted(runs.values(), key=lambda run: -(run.began or 0.0)))
        self.notes = [note for *_, notes in self._held.values() for note in notes][:_MOST_NOTES]
        self.version += 1

    @property
    def runs(self) -> Sequence[ListedRun]:
        """All runs, the newest first."""
        return self.listing.runs

    def details(self, run: ListedRun) -> RunDetails:
        """All that is known of a run.

        Raises `UsageError` if it has been removed.
        """
        with self._lock:
            kept = self._details.get(run.key)
            if kept is not None and kept[0] == run.stamp:
                self._details.move_to_end(run.key)
                return kept[1]
        try:
            details = run.read()
        except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{run.source} cannot be read: {describe(error)}") from error
        with self._lock:
            self._details[run.key] = run.stamp, details
            while len(self._details) > _KEPT_DETAILS:
                self._details.popitem(last=False)
        return details

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
    beside = named.with_name(f"{named.name}.penstock") if named.name else named
    if kind_of_place(named) is None and kind_of_place(beside) == "inference":
        yield RunPlace("inference", beside)
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


def _stamp(place: RunPlace) -> Stamp:
    if place.kind == "kept" or place.path.is_file():
        return _state(place.path)
    states = [_state(place.path / name) for name in _FILES[place.kind]]
    if place.kind == "tracked":
        states += [_state(path) for path in sorted((place.path / "metrics").glob("**/*"))]
    return tuple(states)


def _state(path: Path) -> tuple[object, ...]:
    try:
        state = path.stat()
    except OSError:
        return ()
    return state.st_mtime_ns, state.st_size
