"""The launches of a ledger. If a ledger grows, only its new lines are read."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from ...base import UsageError, system_errors
from ...instruments import LEDGER_FILE, Record, parse_record, record_cells
from .shown_run import (
    LONGEST_LABEL,
    RunDetails,
    ShownRun,
    curve_of,
    key_of,
    label,
    numbers_of,
    settings_of,
    status_word,
    tags_of,
)

_OF_THE_MOMENT = ("load", "variables")
"""Parts of an environment that differ between launches, or have many values."""
_NO_METRICS = ("case.", "tags.", "launch", "order", "steps_per_sample")
_NOT_SHOWN = (".low_s", ".high_s", ".n")
"""Ends of the names of intervals, which launches show better, and of counts."""
_MOST_NOTES = 20


class _LedgerLine(NamedTuple):
    """The place of a record's line in the file, and what names it."""

    at: int
    length: int
    case: Mapping[str, Any]
    launch: int
    title: str


class LedgerRuns:
    """The launches of a ledger. Each refresh continues where the last one ended."""

    def __init__(self, path: Path) -> None:
        self.path = path / LEDGER_FILE if path.is_dir() else path
        self._begin_anew(-1)

    def _begin_anew(self, number: int) -> None:
        self.runs: list[ShownRun] = []
        self.notes: list[str] = []
        """Sentences on lines that were skipped."""
        self._number, self._read, self._count = number, 0, 0
        self._lines: list[_LedgerLine] = []
        self._cases: dict[str, Mapping[str, Any]] = {}

    def refresh(self) -> None:
        """Read the new lines, or all lines if the file was replaced.

        Raises `UsageError` if the file cannot be read.
        """
        try:
            with system_errors(f"the ledger {self.path} cannot be read"):
                state = self.path.stat()
                packed = self.path.suffix == ".gz"
                # A file that was replaced has another number; one that was cut is shorter.
                if state.st_ino != self._number or (state.st_size < self._read and not packed):
                    self._begin_anew(state.st_ino)
                with _opened(self.path) as file:
                    file.seek(self._read)
                    before = len(self.runs)
                    for line, record in self._parsed(file):
                        self._lines.append(line)
                        self.runs.append(self._shown(line, record))
        except (EOFError, zlib.error) as error:
            raise UsageError(f"the ledger {self.path} cannot be read: {error}") from error
        if len(self.runs) > before:
            self._name_all()

    def _parsed(self, file: BinaryIO) -> Iterator[tuple[_LedgerLine, Record]]:
        for text in file:
            if not text.endswith(b"\n"):  # the last line is still being written
                return
            at, self._read, self._count = self._read, self._read + len(text), self._count + 1
            try:
                record = parse_record(text)
            except (ValueError, UsageError) as error:
                if len(self.notes) < _MOST_NOTES:
                    where = f"{self.path}, line {self._count}"
                    self.notes.append(f"{where}: {label(error)}; it is passed over")
                continue
            # Launches of a case share one object, so 100,000 records keep only their cases.
            case = self._cases.setdefault(record.key, record.case)
            title = label(record.name or record.scenario)
            yield _LedgerLine(at, len(text), case, record.launch, title), record

    def _name_all(self) -> None:
        """Name each case by the knobs in which the cases of the ledger differ."""
        knobs = differing_knobs(self._cases.values())
        for place, line in enumerate(self._lines):
            title = title_of(line.title, line.case, knobs)
            if self.runs[place].title != title:
                name = f"{title} launch {line.launch + 1}"
                self.runs[place] = replace(self.runs[place], name=name, title=title)

    def _shown(self, line: _LedgerLine, record: Record) -> ShownRun:
        run = run_of_record(record, str(self.path))
        return replace(run, read=partial(self._details, line))

    def _details(self, line: _LedgerLine) -> RunDetails:
        with system_errors(f"the ledger {self.path} cannot be read"), _opened(self.path) as file:
            file.seek(line.at)
            text = file.read(line.length)
        try:
            return details_of_record(parse_record(text))
        except ValueError as error:
            raise UsageError(f"{self.path} has changed: {error}") from error


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, (gzip.open if path.suffix == ".gz" else open)(path, "rb"))


def differing_knobs(cases: Iterable[Mapping[str, Any]]) -> list[str]:
    """The knobs whose values differ among cases."""
    values: dict[str, set[str]] = {}
    for case in cases:
        for name, value in case.items():
            values.setdefault(name, set()).add(str(value))
    return [name for name, each in values.items() if len(each) > 1]


def title_of(title: str, case: Mapping[str, Any], knobs: Iterable[str]) -> str:
    """The name of a case: what it is of, and its values of these knobs."""
    named = (label(f"{name}={case[name]}") for name in knobs if name in case)
    return " ".join([title, *named])[:LONGEST_LABEL]


def run_of_record(record: Record, source: str) -> ShownRun:
    """A record as a row, named by what it is of; ``source`` is the place that it is from."""
    step = record.samples_s.get("step")
    title = label(record.name or record.scenario)
    machine = label(record.environment.get("machine_key"))
    return ShownRun(
        key=key_of(f"{source} {record.id}"),
        case=key_of(f"{source} {record.key} {machine} {record.name}"),
        name=f"{title} launch {record.launch + 1}",
        title=title,
        kind=f"bench {record.scenario}",
        status=status_word(record.status),
        source=label(source),
        workload=label(record.case.get("workload") or record.scenario),
        machine=machine,
        model=label(record.case.get("model")),
        began=_unix(record.time),
        seconds=median(step) if step else None,
        tags=tags_of(record.tags),
        read=partial(details_of_record, record),
    )


def details_of_record(record: Record) -> RunDetails:
    """The details of a record."""
    cells = record_cells(record)
    metrics = {
        name: v
        for name, v in cells.items()
        if not (name.startswith(_NO_METRICS) or name.endswith(_NOT_SHOWN))
    }
    kept = {k: v for k, v in record.environment.items() if k not in _OF_THE_MOMENT}
    curves = {
        f"{label(name)}_s": curve_of(
            samples, step=np.arange(1, len(samples) + 1), seconds=np.cumsum(samples)
        )
        for name, samples in record.samples_s.items()
    }
    return RunDetails(
        settings_of(record.case, kept),
        numbers_of(metrics, {"facts": record.facts}),
        curves,
        error=label(record.error.message) if record.error else "",
    )


def _unix(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError):
        return None
