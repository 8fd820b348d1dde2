"""Sends the events of a run to one of its trackers, while the run goes on or years later.

A tracker that fails is tried again after longer and longer waits; its failure is reported once.
OUT/track/NAME.json says how far a tracker has come, so no event is sent twice, and a resumed run
goes on in the same run of the tracker. ``penstock track sync OUT`` sends the missing events.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from ...base import PenstockError, UsageError, describe, lock_file, replacing, scrub
from .events import EVENTS, Event, begins_of, read_from, was_retaken
from .protocol import TRACKING_FOLDER
from .trackers import TRACKERS, check_trackers

LOOK_EVERY_S = 1.0
TRY_AGAIN_WITHIN_S = 60.0
IDLE_WITHIN_S = 60.0
"""The seconds that a complete run waits for a tracker that makes no progress. A tracker that makes
progress may take longer."""
LEAST_WORK_S = 0.1
"""The smallest processor time in seconds that counts as progress. A process that only waits uses
less, and one that imports a library uses more."""
_MOST_DOUBLINGS = 10
"""The maximum number of doublings of the wait for a tracker that fails: it may fail for weeks."""


class Stalled:
    """Tells whether a process that sends events has made no progress for `IDLE_WITHIN_S` seconds:
    it used no processor time, and its tracker took nothing.

    Args:
        pid: The process.
        progress: The file that says how far its tracker has come.
    """

    def __init__(self, pid: int, progress: Path) -> None:
        self._progress = progress
        self._worked, self._saved, self._since = 0.0, 0, time.monotonic()
        self._process = None
        with contextlib.suppress(psutil.Error):
            self._process = psutil.Process(pid)

    def __call__(self) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            times = self._process.cpu_times() if self._process else None
            worked = times.user + times.system if times else 0.0
            saved = self._progress.stat().st_mtime_ns if self._progress.exists() else 0
            if worked >= self._worked + LEAST_WORK_S or saved != self._saved:
                self._worked, self._saved, self._since = worked, saved, time.monotonic()
        return time.monotonic() - self._since > IDLE_WITHIN_S


def outcome_of_tracker(outcome: Mapping[str, Any], out: Path) -> str:
    """A sentence about the state of a tracker at the end of a run.

    Args:
        outcome: The tracker's entry in `training_results.json`.
        out: The folder of the run.

    Returns:
        Where the events are, or how many are missing and how to send them.
    """
    name, where = outcome["name"], outcome["where"]
    where = where if "://" in where else str(out / where)
    if outcome["status"] == "ok":
        later = f"; with a key and a network, penstock track sync {out} uploads it"
        return f"{name}: all is in {where}" + later * (name == "comet" and "://" not in where)
    why = f" ({outcome['error']})" if outcome["error"] else ""
    if outcome["dropped"] is None:
        return f"{name}: nobody knows what it has taken{why}"
    return (
        f"{name}: {outcome['dropped']} events are missing in {where}{why}; "
        f"penstock track sync {out} --to {name} sends them"
    )


@dataclass
class TrackerProgress:
    """How far a tracker has come with the events of a run."""

    where: str
    run: str | None = None
    sent: int = 0
    """The offset in the file of events up to which it has all events."""
    error: str | None = None
    """The error that stopped it, None if there was none."""

    @staticmethod
    def load(out: Path, name: str) -> list[TrackerProgress]:
        """The progress at every place where this tracker of a run was.

        Args:
            out: The folder of the run.
            name: The tracker.

        Returns:
            The progress of each place, the newest last; none if there is no file.

        Raises:
            UsageError: The file was not written by Penstock.
        """
        path = out / TRACKING_FOLDER / f"{name}.json"
        try:
            places = [TrackerProgress(**entry) for entry in json.loads(path.read_text())]
            if not all(isinstance(each.sent, int) for each in places):
                raise ValueError("it lacks the progress of its tracker")
        except FileNotFoundError:
            return []
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path} was not written by Penstock: {describe(error)}") from error
        return places

    def save(self, out: Path, name: str) -> None:
        """Write this progress behind that of other places.

        Args:
            out: The folder of the run.
            name: The tracker.
        """
        others = [other for other in TrackerProgress.load(out, name) if other.where != self.where]
        path = out / TRACKING_FOLDER / f"{name}.json"
        text = json.dumps([asdict(each) for each in (*others, self)], indent=1)
        with replacing(path) as draft:
            draft.write_text(text + "\n")


def deliver_events(
    out: Path,
    name: str,
    goes_on: Callable[[float], bool] = lambda seconds: False,
    tell: Callable[[str], None] = lambda sentence: None,
    store: Path | None = None,
) -> TrackerProgress:
    """Send a tracker the events that it lacks.

    Args:
        out: The folder of the run.
        name: The tracker.
        goes_on: Waits at most the given seconds and returns whether more events may come. While
            they may, a failure is tried again.
        tell: Called with a sentence about the first of several failures in a row.
        store: The folder of the database that several runs share; by default the one that the run
            was started with.

    Returns:
        How far the tracker has come; ``error`` says why it has not taken all.

    Raises:
        UsageError: There is no run, or another process sends its events.
        PenstockError: Another run has replaced this one in the folder.
    """
    begins = list(begins_of(out))
    if not begins:
        raise UsageError(f"{out} holds no {EVENTS} of a run; train with --track {name}")
    check_trackers([name])
    (out / TRACKING_FOLDER).mkdir(exist_ok=True)
    with (
        (out / TRACKING_FOLDER / f"{name}.lock").open("a") as lock,
        (out / EVENTS).open("rb") as file,
    ):
        while not lock_file(lock):
            if not goes_on(LOOK_EVERY_S):
                raise UsageError(f"another process sends the events of {out} to {name} now")
        return _Sending(out, name, file, begins, store).run(goes_on, tell)


class _Sending:
    """Sends the events of a run to one tracker. Its maker holds the tracker's lock."""

    def __init__(
        self,
        out: Path,
        name: str,
        file: IO[bytes],
        begins: list[tuple[int, Event]],
        store: Path | None,
    ) -> None:
        self._out, self._name, self._file, self._begins = out, name, file, begins
        places = TrackerProgress.load(out, name)
        asked = next((e["track_dir"] for _, e in reversed(begins) if e.get("track_dir")), None)
        store = store or (Path(asked) if asked else None)
        self._tracker = TRACKERS[name](out, [each.where for each in places if each.run], store)
        where = self._tracker.where
        there = (each for each in places if each.where == where)
        self._progress = next(there, TrackerProgress(where))
        self._run, self._place = "", self._progress.sent
        self._save()

    def run(self, goes_on: Callable[[float], bool], tell: Callable[[str], None]) -> TrackerProgress:
        progress, wait, failures = self._progress, 0.0, 0
        while True:
            going = goes_on(wait)  # called first, so that all events before the end are read
            events, place = read_from(self._out / EVENTS, self._place)
            if not (self._run or events or going):
                return progress  # it has all
            try:
                over = self._send(events, place, going)
                failures = 0
            except Exception as error:  # trackers share no type of error
                progress.error = scrub(f"{type(error).__name__}: {describe(error)}")
                if not failures:
                    tell(f"{self._name} at {progress.where}: {progress.error}")
                self._run, self._place = "", progress.sent
                failures, over = failures + 1, not going
            if events or over or failures:
                self._save()
            if over:
                return progress
            longer = 2 ** min(failures, _MOST_DOUBLINGS)
            wait = min(LOOK_EVERY_S * longer, TRY_AGAIN_WITHIN_S)
            if not going or (events and not failures):
                wait = 0.0

    def _send(self, events: list[tuple[int, Event]], place: int, going: bool) -> bool:
        """Send events. Returns whether they were the last."""
        tracker, progress = self._tracker, self._progress
        if not self._run:
            self._run = tracker.open(_one_begin(self._begins), progress.run, self._keep)
            progress.run = self._run if tracker.durable else progress.run
        tracker.send([event for at, event in events if not was_retaken(self._begins, at, event)])
        self._place = place
        over = not events and not going
        if over:
            tracker.close()
        if over or tracker.durable:
            progress.run, progress.sent = self._run, place
        progress.error = None
        return over

    def _keep(self, number: str) -> None:
        self._progress.run = number
        self._save()

    def _save(self) -> None:
        """Write the progress. Raises `PenstockError` if another run has replaced this one."""
        if not os.path.samestat(os.fstat(self._file.fileno()), (self._out / EVENTS).stat()):
            raise PenstockError(f"{self._out / EVENTS} is of another run now")
        self._progress.save(self._out, self._name)


def _one_begin(begins: Sequence[tuple[int, Event]]) -> Event:
    """The first event of a run, with its newest name and all of its tags."""
    tags = {key: text for _, begin in begins for key, text in begin.get("user_tags", {}).items()}
    names = [begin["name"] for _, begin in begins if "name" in begin]  # a resumption may lack it
    return {**begins[0][1], "name": names[-1], "user_tags": tags}


def trackers_of(out: Path) -> list[str]:
    """The trackers that a run was started with.

    Raises:
        UsageError: The folder holds no run.
    """
    names = [name for _, event in begins_of(out) for name in event.get("trackers", ())]
    if not names:
        raise UsageError(f"{out} holds no {EVENTS} of a run; train with --track")
    return list(dict.fromkeys(names))
