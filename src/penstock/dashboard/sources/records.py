"""The launches of a ledger. If a ledger grows, only its new lines are read."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from ...base import UsageError, format_seconds, system_errors
from ...instruments import LEDGER_FILE, Record, parse_record, record_cells
from ...scaling import TrainingRun, results_run
from ..listed_run import (
    LONGEST_LABEL,
    ListedRun,
    RunDetails,
    curve_of,
    key_of,
    label,
    numbers_of,
    settings_of_run,
    tags_of,
)

_OF_THE_MOMENT = ("load", "variables")
"""Parts of an environment that differ between launches, or have many values."""
_HEAD = 256
_MOST_NOTES = 20


class _LedgerLine(NamedTuple):
    """The place of a record's line in the file, and the parts of its name."""

    at: int
    length: int
    case: Mapping[str, Any]
    launch: int
    title: str


class LedgerTail:
    """The launches of a ledger. Each refresh continues where the last one ended."""

    def __init__(self, path: Path) -> None:
        self.path = path / LEDGER_FILE if path.is_dir() else path
        self._place = str(self.path.resolve())
        self._begin_anew(b"")

    def _begin_anew(self, head: bytes) -> None:
        self.runs: list[ListedRun] = []
        self.notes: list[str] = []
        """Sentences on lines that were skipped."""
        self._lines: list[_LedgerLine] = []
        self._head, self._size, self._read, self._count = head, 0, 0, 0
        self._cases: dict[str, dict[str, Any]] = {}
        self._values: dict[str, Any] = {}
        self._differing: dict[str, None] = {}

    def refresh(self) -> None:
        """Read the new lines, or all lines if the file was replaced.

        Raises `UsageError` if the file cannot be read.
        """
        try:
            with system_errors(f"the ledger {self.path} cannot be read"):
                self._read_on()
        except (EOFError, zlib.error) as error:
            raise UsageError(f"the ledger {self.path} cannot be read: {error}") from error

    def _read_on(self) -> None:
        data = self._fresh()
        before, old = len(self._differing), len(self.runs)
        with data:
            for line, record in self._parsed(data):
                self._lines.append(line)
                self.runs.append(self._shown(line, record))
        first = 0 if before != len(self._differing) else old
        for place in range(first, len(self.runs)):
            named = self._name(self._lines[place])
            self.runs[place] = replace(self.runs[place], name=named)

    def _fresh(self) -> BinaryIO:
        """The file, opened at the place to which it was read. A ``.gz`` is never appended to."""
        packed = self.path.suffix == ".gz"
        file = cast(BinaryIO, (gzip.open if packed else open)(self.path, "rb"))
        head = file.read(_HEAD)
        if not head.startswith(self._head) or self.path.stat().st_size < self._size:
            self._begin_anew(head)
        self._head, self._size = head, self.path.stat().st_size
        file.seek(self._read)
        return file

    def _parsed(self, file: BinaryIO) -> Iterator[tuple[_LedgerLine, Record]]:
        for text in file:
            if not text.endswith(b"\n"):  # the last line is still being written
                return
            at, self._read = self._read, self._read + len(text)
            self._count += 1
            try:
                record = parse_record(text)
            except (ValueError, UsageError) as error:
                if len(self.notes) < _MOST_NOTES:
                    why = label(error)
                    self.notes.append(f"{self.path}, line {self._count}: {why}; it is passed over")
                continue
            # Launches of a case share one object, so 100,000 records keep only their cases.
            case = self._cases.setdefault(record.key, record.case)
            self._learn(case)
            title = label(record.name or record.scenario)
            yield _LedgerLine(at, len(text), case, record.launch, title), record

    def _learn(self, case: Mapping[str, Any]) -> None:
        for name, value in case.items():
            if self._values.setdefault(name, value) != value:
                self._differing[name] = None

    def _name(self, line: _LedgerLine) -> str:
        """The run's name with the knobs in which its launches differ."""
        case = line.case
        knobs = (label(f"{name}={case[name]}") for name in self._differing if name in case)
        launch = f"launch {line.launch + 1}" if line.launch else ""
        return " ".join(filter(None, [line.title, *knobs, launch]))[:LONGEST_LABEL]

    def _shown(self, line: _LedgerLine, record: Record) -> ListedRun:
        environment = record.environment
        step = record.samples_s.get("step")
        seconds = median(step) if step else None
        return ListedRun(
            key=key_of(f"{self._place} {record.id}"),
            name=line.title,
            kind=f"bench {record.scenario}",
            status=record.status,
            source=f"{label(self.path)} {_plain(record.id)}",
            stamp=(line.at, line.length),
            workload=label(record.case.get("workload") or record.scenario),
            machine=machine_of(environment),
            model=label(record.case.get("model")),
            began=_unix(record.time),
            seconds=seconds,
            result="" if seconds is None else f"{format_seconds(seconds)} a step",
            tags=tags_of(record.tags),
            read=partial(self._details, line),
        )

    def _details(self, line: _LedgerLine) -> RunDetails:
        with system_errors(f"the ledger {self.path} cannot be read"):
            if self.path.suffix == ".gz":
                text = gzip.decompress(self.path.read_bytes())[line.at : line.at + line.length]
            else:
                with self.path.open("rb") as file:
                    file.seek(line.at)
                    text = file.read(line.length)
        try:
            return details_of(parse_record(text), self.path)
        except ValueError as error:
            raise UsageError(f"{self.path} has changed: {error}") from error


def details_of(record: Record, path: Path) -> RunDetails:
    """The details of a record."""
    cells = record_cells(record)
    ours = ("case.", "launch", "order", "steps_per_sample")
    metrics = {name: v for name, v in cells.items() if not name.startswith(ours)}
    kept = {k: v for k, v in record.environment.items() if k not in _OF_THE_MOMENT}
    curves = {
        f"{label(name)}_s": curve_of(
            samples, steps=np.arange(1, len(samples) + 1), seconds=np.cumsum(samples)
        )
        for name, samples in record.samples_s.items()
    }
    training = _training(record, path) if record.scenario == "train" else None
    devices = {} if training is None else {"devices": training.devices}
    return RunDetails(
        settings_of_run(record.case, devices, kept),
        numbers_of(metrics) | numbers_of(record.facts, "facts."),
        curves,
        training,
        error=label(record.error.message) if record.error else "",
    )


def _training(record: Record, path: Path) -> TrainingRun | None:
    results = {"world_size": 1, **record.case, "epochs": None}
    try:
        return results_run(results | (record.facts.get("training") or {}), f"{path}", None)
    except UsageError:
        return None


def machine_of(environment: Mapping[str, Any]) -> str:
    """A machine as text: its GPUs, or without any its processor."""
    machine, gpus = environment.get("machine"), environment.get("gpus")
    names: Sequence[str] = [str(gpu.get("name")) for gpu in gpus or () if isinstance(gpu, Mapping)]
    if names:
        return label(f"{len(names)} x {names[0]}")
    if isinstance(machine, Mapping) and machine.get("processor"):
        return label(f"{machine['processor']}, {machine.get('cores')} cores")
    return label(environment.get("machine_key"))


def _plain(name: str) -> str:
    """The identifier of a record; ours need no cleaning."""
    return name if name.isalnum() and len(name) <= 64 else label(name)


def _unix(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
