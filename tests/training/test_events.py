"""The file of events: whole lines whatever is killed, and nobody waits for it."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.training.tracking import events


def log_of(path: Path, *steps: dict[str, Any]) -> events.EventLog:
    log = events.EventLog(path, clock=lambda: 12.5)
    log.begin(event="begin", step=0)
    for number, metrics in enumerate(steps, 1):
        log.tell("step", number, metrics=metrics)
    log.close()
    return log


def test_events_are_lines_of_finite_numbers(tmp_path: Path) -> None:
    path = tmp_path / "out" / "events.jsonl"
    nan, inf = float("nan"), float("inf")
    log_of(path, {"a": 1, "b": None, "c": nan}, {"a": -inf, "d": 0.25})
    lines = [event for _, event in events.read_events(path)]
    assert lines == [
        {"time": 12.5, "event": "begin", "step": 0},
        {"time": 12.5, "event": "step", "step": 1, "metrics": {"a": 1.0}},
        {"time": 12.5, "event": "step", "step": 2, "metrics": {"d": 0.25}},
    ]
    assert json.loads(path.read_text().splitlines()[1]) == lines[1]


@given(cut=st.integers(0, 400), junk=st.sampled_from([b"", b'{"event"', b"\xff\n", b"[1]\n\n"]))
def test_a_torn_file_is_read_and_gone_on_with(
    tmp_path_factory: pytest.TempPathFactory, cut: int, junk: bytes
) -> None:
    """A run that was killed left half a line; all whole lines count, before it and after."""
    path = tmp_path_factory.mktemp("torn") / "events.jsonl"
    log_of(path, {"a": 1}, {"a": 2}, {"a": 3})
    whole = [event for _, event in events.read_events(path)]
    path.write_bytes(path.read_bytes()[:cut] + junk)
    kept = [event for _, event in events.read_events(path)]
    assert kept == whole[: len(kept)]
    log_of(path, {"a": 9})
    again = [event for _, event in events.read_events(path)]
    assert again[-1]["metrics"] == {"a": 9.0}
    assert len(again) >= len(kept) + 2


def test_a_file_is_read_from_any_event_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log_of(path, {"a": 1}, {"a": 2})
    placed = list(events.read_events(path))
    for number, (place, _) in enumerate(placed):
        rest, end = events.read_from(path, place)
        assert rest == placed[number:]
        assert end == path.stat().st_size
    with path.open("ab") as file:
        file.write(b'{"event":"step","ti')  # is being written
    assert events.read_from(path, end) == ([], end)


def test_a_long_file_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.jsonl"
    log_of(path, *({"a": number} for number in range(50)))
    whole = list(events.read_events(path))
    monkeypatch.setattr(events, "MOST_BYTES", 20)  # less than a line
    assert list(events.read_events(path)) == whole


class Hanging:
    """A disk that takes nothing until it is let go."""

    def __init__(self) -> None:
        self.freed, self.lines = threading.Event(), list[bytes]()

    def write(self, line: bytes) -> int:
        self.freed.wait()
        self.lines.append(line)
        return len(line)

    def close(self) -> None: ...


def test_a_disk_that_hangs_costs_events_and_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "CLOSE_WITHIN_S", 0.01)
    log = events.EventLog(tmp_path / "events.jsonl")
    log.begin(event="begin", step=0)
    disk = Hanging()
    log._file.close()
    log._file = disk  # type: ignore[assignment]
    for step in range(1, events.ROOM + 101):  # returns each time
        log.tell("step", step, metrics={})
    assert 99 <= log.lost <= 100  # the thread may have taken one
    log.close()
    assert log.fault == "the disk takes events too slowly"
    disk.freed.set()


def test_a_disk_that_is_full_is_told(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full")
    log = events.EventLog(tmp_path / "events.jsonl")
    log.begin(event="begin", step=0)
    log._file.close()
    log._file = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115
    log.tell("step", 1, metrics={})
    log.close()
    assert (log.lost, log.fault) == (1, "[Errno 28] No space left on device")


def test_steps_that_are_taken_again_are_known(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log_of(path, {"a": 1}, {"a": 2}, {"a": 3})
    log = events.EventLog(path)
    log.begin(event="begin", step=2)
    log.tell("step", 3, metrics={"a": 3.5})
    log.close()
    begins = [(at, e) for at, e in events.read_events(path) if e["event"] == "begin"]
    steps = [(at, e) for at, e in events.read_events(path) if e["step"] and "metrics" in e]
    kept = [e["metrics"]["a"] for at, e in steps if not events.was_retaken(begins, at, e)]
    assert kept == [1.0, 2.0, 3.5]
