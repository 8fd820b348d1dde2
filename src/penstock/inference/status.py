"""The state of a run, read only from the files of its folder. The run may be at work on another
machine, or be dead."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..base import format_seconds, plural, significant, system_errors
from .run_folder.folder import Notes, folder_at, read_document, read_run
from .run_folder.names import ENDING_FILE, FOUND_FOLDERS

State = Literal["running", "prepared", "done", "incomplete", "ended", "killed", "begun"]


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run."""

    state: State
    """``prepared`` is a run that waits for parts. ``incomplete`` is one that was done, and whose
    logs name fewer blocks than it wrote. ``ended`` is one that stopped by itself, ``killed`` one
    that left no reason. ``begun`` is one in a bucket: whether a process is at work is not known."""
    why: str
    """The reason why it ended, what is to be done next, and what is lost of its logs; may be
    empty."""
    blocks_done: int
    blocks_planned: int
    per_second: float | None
    """Recent blocks per second of all processes together. None if unknown."""
    failing: tuple[float, float] | None
    """Seconds for which a store has been failing, and how long it may. None if none is
    failing now."""
    processes: int
    """Number of processes that write the run now; 0 if that is not known."""

    def line(self) -> str:
        """The state in one line."""
        share = self.blocks_done / max(1, self.blocks_planned)
        done = f"{self.blocks_done:,} of {self.blocks_planned:,} blocks are written"
        words = [f"{self.state}: {done} ({share:.1%})"]
        if self.processes > 1:
            words.append(f"{self.processes} processes")
        if self.state == "running" and self.per_second:
            left = (self.blocks_planned - self.blocks_done) / self.per_second
            words.append(f"{significant(self.per_second)} blocks/s, {format_seconds(left)} left")
        if self.state == "running" and self.failing is not None:
            so_far, most = map(format_seconds, self.failing)
            words.append(f"a store has been failing for {so_far} of {most} at most")
        sentence = ", ".join(words)
        return f"{sentence}; {self.why}" if self.why else sentence


class RunLook:
    """Reads the folder of a run repeatedly, and each time only the new lines of its logs."""

    def __init__(self, place: Path | str) -> None:
        """``place`` is the path or URL of the folder."""
        self.folder = folder_at(place)
        self._notes: Notes | None = None

    def status(self) -> RunStatus:
        """The state of the run now. Nothing is changed.

        Raises `UsageError` if the folder cannot be read.
        """
        folder = self.folder
        with system_errors(f"{folder} cannot be read"):
            run = read_run(folder)
        notes = self._notes_of(run)
        done, planned = len(notes.blocks()), notes.planned
        state, *why = self._state(run, notes, done < planned)
        counts = {name: len(folder.names(f"{name}/*.npz")) for name in FOUND_FOLDERS}
        words = [f"{name} of {plural(count, 'block')}" for name, count in counts.items() if count]
        why += ["found so far: " + ", ".join(words)] if words else []
        if state not in ("running", "begun"):
            why.append(notes.lost(done))
        tails = folder.telemetry()
        alive = [tail[-1].get("gauges") or {} for tail in tails if _goes_on(tail)]
        return RunStatus(
            state=state,
            why="; ".join(filter(None, why)),
            blocks_done=done,
            blocks_planned=planned,
            per_second=_rate(tails) if state == "running" else None,
            failing=max(filter(None, map(_failing, alive)), default=None),
            processes=notes.processes or 0,
        )

    def _notes_of(self, run: Mapping[str, Any]) -> Notes:
        """The logs of a run, as the last look left them unless another run has begun."""
        if self._notes is None or str(run.get("run")) != self._notes.run:
            self._notes = Notes(self.folder, run)
        else:
            self._notes.ask()
        return self._notes

    def _state(self, run: Mapping[str, Any], notes: Notes, lacks: bool) -> tuple[State, str]:
        verb = run.get("verb", "infer")
        if notes.processes:
            return "running", ""
        if notes.complete:
            return "incomplete" if lacks else "done", ""
        if self.folder.names(ENDING_FILE):
            return "ended", str((read_document(self.folder, ENDING_FILE) or {}).get("error", ""))
        if run.get("settings", {}).get("prepare") and not self.folder.killed():
            return "prepared", f"next is {verb} --part i/n for each i of n, then --finish"
        if notes.processes is None:
            return "begun", "a bucket does not say whether a process writes it"
        return "killed", f"no process writes it; penstock {verb} --resume goes on"


def _rate(files: Iterable[Sequence[dict[str, Any]]]) -> float | None:
    """Blocks per second of all processes that are at work, from the last rows of each file."""
    rate = 0.0
    for rows in files:
        first, last = rows[0], rows[-1]
        seconds = last["time"] - first["time"]
        if seconds <= 0 or not _goes_on(rows):
            continue
        counts = [(row.get("gauges") or {}).get("blocks_written") or 0 for row in (first, last)]
        rate += (counts[1] - counts[0]) / seconds
    return rate or None


def _goes_on(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether the rows of a process are so new that it is at work."""
    seconds = rows[-1]["time"] - rows[0]["time"]
    return bool(time.time() - rows[-1]["time"] <= max(60, 10 * seconds / len(rows)))


def _failing(gauges: dict[str, Any]) -> tuple[float, float] | None:
    seconds = float(gauges.get("failing_seconds") or 0)
    return (seconds, float(gauges.get("retry_for") or 0)) if seconds else None
