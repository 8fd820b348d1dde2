"""The state of a run, read only from the files of its folder. The run may be at work on another
machine, or be dead."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..base import UsageError, describe, format_seconds, plural, significant
from ..data import open_written
from .run_folder.bucket import RemoteFolder
from .run_folder.contents import is_run, rows_of
from .run_folder.ending import ENDING_FILE
from .run_folder.files import default_run_dir
from .run_folder.journal import WORKERS_FILE
from .run_folder.local import Folder, folder_at
from .run_folder.notes import Notes
from .run_folder.unit_set import UnitSet

State = Literal["running", "done", "ended", "killed"]
_OF_WORKERS = ("present", "died", "unfit", "retried")


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run."""

    state: State
    """``ended`` is a run that stopped by itself, ``killed`` one that left no reason."""
    why: str
    """The reason why it ended; empty otherwise."""
    units_done: int
    units_planned: int | None
    """None for a run of an older version."""
    per_second: float | None
    """Recent units per second of all processes together. None if unknown."""
    retries: int
    retry_seconds: float
    failing: tuple[float, float] | None
    """Seconds for which a store has been failing, and how long it may. None if none is
    failing now."""
    fault: str
    """The last fault of a read or a write that was tried again, with its time; may be empty."""
    processes: int
    """Number of processes that write the run now."""
    workers: Mapping[str, int] | None = None
    """The workers of a job on a cluster that are ``present``, have ``died`` and are ``unfit``, and
    the parts that were ``retried``. None for any other job."""

    @property
    def complete(self) -> bool:
        return self.units_planned is not None and self.units_done >= self.units_planned

    def line(self) -> str:
        """The state in one line."""
        of = f" of {self.units_planned:,}" if self.units_planned is not None else ""
        words = [f"{self.state}: {self.units_done:,}{of} blocks are written"]
        if self.units_planned:
            words[0] += f" ({self.units_done / self.units_planned:.1%})"
        words += self._of_workers()
        if self.state == "running" and self.per_second:
            words.append(f"{significant(self.per_second)} blocks/s")
            if self.units_planned is not None:
                left = (self.units_planned - self.units_done) / self.per_second
                words.append(f"{format_seconds(left)} left")
        if self.retries:
            times = plural(self.retries, "fault")
            words.append(f"{times} tried again in {format_seconds(self.retry_seconds)}")
        if self.state == "running" and self.failing is not None:
            so_far, most = map(format_seconds, self.failing)
            words.append(f"a store has been failing for {so_far} of {most} at most")
        sentence = ", ".join(words)
        if self.fault:
            sentence += f"; last fault {self.fault}"
        return f"{sentence}; {self.why}" if self.why else sentence

    def _of_workers(self) -> Iterator[str]:
        if self.workers is None:
            if self.processes > 1:
                yield f"{self.processes} processes"
            return
        if self.state == "running":
            yield plural(self.workers["present"], "worker")
        if died := self.workers["died"]:
            yield f"{plural(died, 'worker')} died"
        if unfit := self.workers["unfit"]:
            yield f"{plural(unfit, 'worker')} left out"
        if retried := self.workers["retried"]:
            yield f"{plural(retried, 'part')} failed and tried again"


def run_folder_of(named: str) -> Path | str:
    """The folder of a run.

    Args:
        named: The folder itself, or an output as ``--out-spec`` names it.

    Returns:
        The folder: a path, or a URL.

    Raises:
        UsageError: There is no run folder.
    """
    if re.match(r"(s3|gs)://", named):
        with contextlib.suppress(UsageError):
            folder = RemoteFolder(named)
            if is_run(folder.read("run.json") or b""):
                return folder.place
    place = Path(named).expanduser()
    beside = place.with_name(f"{place.name}.penstock") if place.name else place
    for local in (place, beside):
        with contextlib.suppress(OSError):
            if (local / "run.json").is_file():
                return local
    with contextlib.suppress(UsageError):
        folder_of_output = default_run_dir(open_written(named, "RUN"))
        if folder_of_output is not None and (folder_of_output / "run.json").is_file():
            return folder_of_output
    raise UsageError(f"{named} is neither the run folder nor an output of penstock infer")


def read_status(place: Path | str) -> RunStatus:
    """Read the state of a run. Nothing is changed.

    Raises `UsageError` if the folder cannot be read.
    """
    return RunLook(place).status()


class RunLook:
    """Reads the folder of a run repeatedly, and each time only the new lines of its logs."""

    def __init__(self, place: Path | str) -> None:
        """``place`` is the path or URL of the folder."""
        self.folder = folder_at(place)
        self._run: str | None = None
        self._notes: Notes | None = None
        self._units = UnitSet()

    def status(self) -> RunStatus:
        """The state of the run now. Nothing is changed.

        Raises `UsageError` if the folder cannot be read.
        """
        folder = self.folder
        run = self._read("run.json")
        self._look(str(run.get("run")))
        processes = folder.at_work()
        state, why = self._state(processes > 0)
        tails = folder.telemetry()
        last = [tail[-1].get("gauges") or {} for tail in tails]
        alive = [tail[-1].get("gauges") or {} for tail in tails if _goes_on(tail)]
        return RunStatus(
            state=state,
            why=why,
            units_done=len(self._units),
            units_planned=run.get("units") or None,
            per_second=_rate(tails) if state == "running" else None,
            retries=sum(int(gauges.get("retries") or 0) for gauges in last),
            retry_seconds=sum(float(gauges.get("retry_seconds") or 0) for gauges in last),
            failing=max(filter(None, map(_failing, alive)), default=None),
            fault=_last_fault(folder),
            processes=processes,
            workers=self._workers(),
        )

    def _workers(self) -> Mapping[str, int] | None:
        if not self.folder.names(WORKERS_FILE):
            return None
        facts = self._read(WORKERS_FILE)
        return {name: int(facts.get(name) or 0) for name in _OF_WORKERS}

    def _read(self, name: str) -> dict[str, Any]:
        try:
            document = json.loads(self.folder.read(name) or b"")
        except OSError as error:
            raise UsageError(f"{self.folder}/{name} cannot be read: {error.strerror}") from error
        except ValueError as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"{self.folder}/{name} is not JSON: {describe(error)}") from error
        return document if isinstance(document, dict) else {}

    def _look(self, run: str) -> None:
        """Take in the units noted since the last look; all of them if another run has begun."""
        if self._notes is None or run != self._run:
            self._run, self._notes, self._units = run, self.folder.notes(run), UnitSet()
        self._units.update(self._notes.units())

    def _state(self, at_work: bool) -> tuple[State, str]:
        if at_work:
            return "running", ""
        if self.folder.names("summary.json"):
            return "done", ""
        if self.folder.names(ENDING_FILE):
            return "ended", str(self._read(ENDING_FILE).get("error", ""))
        return "killed", "no process writes it; penstock infer --resume goes on"


def _rate(files: Iterable[Sequence[dict[str, Any]]]) -> float | None:
    """Units per second of all processes that are at work, from the last rows of each file."""
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


def _last_fault(folder: Folder) -> str:
    tails = (rows_of(folder.tail(name)) for name in folder.names("retries*.jsonl"))
    rows = [tail[-1] for tail in tails if tail]
    if not rows:
        return ""
    row = max(rows, key=lambda row: float(row["time"]))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["time"]))
    return f"{when}: {row.get('at')}: {row.get('error')}"
