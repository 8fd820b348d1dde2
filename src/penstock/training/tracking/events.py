"""The events of a training, one JSON line each, written by a thread behind a bounded queue.

    steps ────▶ put, without waiting ──▶ [ at most 4,096 ] ──▶ thread ──▶ OUT/events.jsonl
    sampler ──▶

Every tracker reads the file at its own pace, while the training goes on or years later, so a slow
or broken tracker does not slow the training. An event costs the training one small dict.
If the queue is full, because the disk hangs, an event is dropped and counted.

    begin    run, name, project, tags (words that describe it), user_tags, parameters, environment;
             step, at which a run begins or resumes
    step     metrics of one step; epoch
    epoch    metrics of an epoch and of its validation; epoch
    system   metrics of the machine
    end      status, metrics of the whole run

Every event has ``time`` (unix) and ``step``, the number of steps done. ``metrics`` are finite
numbers by name. A run that was killed and resumed repeats steps; `was_retaken` finds their events.
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

from ...base import describe, system_errors

EVENTS = "events.jsonl"
ROOM = 4096
"""The maximum number of events in the queue, about 2 MB."""
CLOSE_WITHIN_S = 5.0
"""The seconds that a run waits for a hanging disk before it ends."""

Event = dict[str, Any]


class EventLog:
    """Appends events to a file, in its own thread."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.path, self._clock = path, clock
        self.lost = 0
        """The number of events that are not in the file."""
        self.fault: str | None = None
        """The reason why the first of them is missing, None if none is."""
        self._queue: queue.Queue[Event | None] = queue.Queue(ROOM)
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def begin(self, **fields: Any) -> None:
        """Write the first event at once. Raises `UsageError` if the file cannot be written."""
        with system_errors(f"{self.path} cannot be written"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            # A killed run may have left half a line.
            self._file.write(b"\n" * bool(self.path.stat().st_size) + _line(self._event(**fields)))
        self._thread.start()

    def tell(self, event: str, step: int, **fields: Any) -> None:
        """Queue an event. It never waits and never raises."""
        try:
            self._queue.put_nowait(self._event(event=event, step=step, **fields))
        except queue.Full:
            self._lose("the disk takes events too slowly")

    def close(self) -> None:
        """Write the events in the queue. A second call does nothing."""
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
                # After half a line, the next event begins a new one.
                line = b"\n" * torn + _line(event)
                torn = self._file.write(line) != len(line)
                if torn:
                    self._lose("the disk is full")
            except (OSError, TypeError, ValueError) as error:  # tracking ends no training
                torn = isinstance(error, OSError)
                self._lose(describe(error))
        self._file.close()


def _line(event: Event) -> bytes:
    if "metrics" in event:
        event = {**event, "metrics": _numbers(event["metrics"])}
    return json.dumps(event, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are finite numbers; others are left out."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


MOST_BYTES = 2**16
"""The bytes to read at a time, so that a tracker that is far behind needs little memory."""


def read_from(path: Path, offset: int) -> tuple[list[tuple[int, Event]], int]:
    """The events from an offset in the file on, each with its offset, and the offset after them.

    A line that is not yet complete is left for the next call; a broken line is left out.
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
    """All events of a file and their offsets in bytes, in order."""
    offset, before = 0, -1
    while offset != before:
        before = offset
        events, offset = read_from(path, offset)
        yield from events


def begins_of(out: Path) -> Iterator[tuple[int, Event]]:
    """The event ``begin`` of each start of a run, with its offset; none if there is no file."""
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
    """Whether a resumed run repeated the step of an event.

    Args:
        begins: All events ``begin``, with their offsets.
        place: The offset of the event.
        event: The event.

    Returns:
        True if a later start of the run took the step again.

    >>> begins = [(0, {"step": 0}), (900, {"step": 40})]
    >>> was_retaken(begins, 500, {"event": "step", "step": 41})
    True
    """
    return event["event"] != "system" and any(
        place < at and begin["step"] < event["step"] for at, begin in begins
    )
