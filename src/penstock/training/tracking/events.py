"""What a training tells of itself, an event a line: a bounded queue, one thread, one file.

    steps ────▶ put, without waiting ──▶ [ at most 4,096 ] ──▶ thread ──▶ OUT/events.jsonl
    sampler ──▶

The file is the truth and the queue of every tracker: each follows it at its own pace, while the
training goes on or years later, so what is slow or broken behind the file is never felt before it.
Whoever tells something builds a small dict and no more. An event that finds no room, because the
disk hangs, is left out and counted.

    begin    run, name, project, tags, parameters, environment; step, from which a run goes on
    step     metrics of one step; epoch
    epoch    metrics of an epoch and of its validation; epoch
    system   metrics of the machine
    end      status, metrics of the whole run

Every event has ``time`` (unix) and ``step`` (done when it was told). ``metrics`` are finite numbers
by name. A run that is killed and goes on takes steps
again: `was_retaken` tells which events those are.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base import UsageError, describe

EVENTS = "events.jsonl"
ROOM = 4096
"""Events; some 2 MB."""
CLOSE_WITHIN_S = 5.0
"""How long a run waits at its end for a disk that hangs."""

Event = dict[str, Any]


class EventLog:
    """Appends what it is told to a file, in a thread of its own."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock = path, clock
        self.lost = 0
        """Events that are not in the file."""
        self.fault: str | None = None
        """Why the first of them is not."""
        self._queue: queue.Queue[Event | None] = queue.Queue(ROOM)
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def begin(self, **fields: Any) -> None:
        """Write the first event before anything follows the file; raises what is wrong with it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            # A run that was killed may have left half a line.
            self._file.write(b"\n" * bool(self.path.stat().st_size) + _line(self._event(**fields)))
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written: {error.strerror}") from error
        self._thread.start()

    def tell(self, event: str, step: int, **fields: Any) -> None:
        """Never waits and never raises: all that a step pays for being watched."""
        try:
            self._queue.put_nowait(self._event(event=event, step=step, **fields))
        except queue.Full:
            self._lose("the disk takes events too slowly")

    def close(self) -> None:
        """Write what was told. It may be called twice."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=CLOSE_WITHIN_S)
            self._thread.join(CLOSE_WITHIN_S)
            if self._thread.is_alive():
                self._lose("the disk hangs", self._queue.qsize())

    def _event(self, **fields: Any) -> Event:
        return {"time": round(self._clock(), 3), **fields}

    def _lose(self, why: str, number: int = 1) -> None:
        self.lost += number
        self.fault = self.fault or why

    def _run(self) -> None:
        torn = False
        while (event := self._queue.get()) is not None:
            try:
                # After a write that failed half way, the next event begins a line of its own.
                line = b"\n" * torn + _line(event)
                torn = self._file.write(line) != len(line)
                if torn:
                    self._lose("the disk is full")
            except (OSError, TypeError, ValueError) as error:  # a watcher ends no training
                torn = isinstance(error, OSError)
                self._lose(describe(error))
        self._file.close()


def _line(event: Event) -> bytes:
    if "metrics" in event:
        event = {**event, "metrics": _numbers(event["metrics"])}
    return json.dumps(event, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """What a tracker can draw: a value that is missing or no number is left out."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


MOST_BYTES = 2**16
"""Read at a time, so that a follower that is far behind stays small, and is seen to get on."""


def read_from(path: Path, offset: int) -> tuple[list[tuple[int, Event]], int]:
    """Whole events from a place in the file on, each with its place, and the place after them.

    A line that is still being written waits; one that was torn is left out.
    """
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(MOST_BYTES)
        if b"\n" not in data and len(data) == MOST_BYTES:  # no line of ours is so long
            data += file.readline()
    whole = data[: data.rfind(b"\n") + 1]
    events = []
    for line in whole.splitlines(keepends=True):
        if (event := _parsed(line)) is not None:
            events.append((offset, event))
        offset += len(line)
    return events, offset


def read_events(path: Path) -> Iterator[tuple[int, Event]]:
    """All events and their places, in the order in which they were told."""
    offset, before = 0, -1
    while offset != before:
        before = offset
        events, offset = read_from(path, offset)
        yield from events


def begins_of(out: Path) -> Iterator[tuple[int, Event]]:
    """The first event of each life of the run in a folder, with its place; none without a file."""
    with contextlib.suppress(FileNotFoundError):
        yield from (
            (place, event)
            for place, event in read_events(out / EVENTS)
            if event["event"] == "begin"
        )


def _parsed(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(event, dict) and isinstance(event.get("metrics", {}), dict)
    return event if whole and {"event", "time", "step"} <= event.keys() else None


def was_retaken(begins: Sequence[tuple[int, Event]], place: int, event: Event) -> bool:
    """Whether an event tells of a step that the run took again after it was killed, by all events
    ``begin`` and their places.

    >>> begins = [(0, {"step": 0}), (900, {"step": 40})]
    >>> was_retaken(begins, 500, {"event": "step", "step": 41})
    True
    """
    return event["event"] != "system" and any(
        place < at and begin["step"] < event["step"] for at, begin in begins
    )
