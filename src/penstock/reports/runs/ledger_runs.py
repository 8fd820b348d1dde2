"""The launches of a ledger as rows of a list."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from typing import BinaryIO, cast

import numpy as np

from ...base import UsageError, system_errors
from ...instruments import LEDGER_FILE, Record, parse_record, record_cells
from ..run_settings import differing_knobs
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


def runs_of_ledger(place: Path) -> tuple[list[ShownRun], list[str]]:
    """The launches of a ledger, each named by the knobs in which its cases differ.

    Args:
        place: The ledger, a folder or a file.

    Returns:
        A row for each launch, and sentences on lines that were skipped.

    Raises:
        UsageError: The file cannot be read.
    """
    path = place / LEDGER_FILE if place.is_dir() else place
    runs: list[tuple[ShownRun, Record]] = []
    notes: list[str] = []
    # Launches of a case share one object, so 100,000 records keep only their cases.
    cases: dict[str, Record] = {}
    at = 0
    try:
        with system_errors(f"the ledger {path} cannot be read"), _opened(path) as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):  # the last line is still being written
                    break
                begin, at = at, at + len(text)
                try:
                    record = parse_record(text)
                except (ValueError, UsageError) as error:
                    where = f"{path}, line {number}"
                    notes += [f"{where}: {label(error)}; it is passed over"] * (
                        len(notes) < _MOST_NOTES
                    )
                    continue
                read = partial(_details, path, begin, len(text))
                run = replace(run_of_record(record, str(path)), read=read)
                runs.append((run, cases.setdefault(record.key, record)))
    except (EOFError, zlib.error) as error:
        raise UsageError(f"the ledger {path} cannot be read: {error}") from error
    knobs = differing_knobs(cases.values())
    return [named_by(knobs, run, record) for run, record in runs], notes


def _details(path: Path, at: int, length: int) -> RunDetails:
    with system_errors(f"the ledger {path} cannot be read"), _opened(path) as file:
        file.seek(at)
        text = file.read(length)
    try:
        return details_of_record(parse_record(text))
    except ValueError as error:
        raise UsageError(f"{path} has changed: {error}") from error


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, (gzip.open if path.suffix == ".gz" else open)(path, "rb"))


def named_by(knobs: Sequence[str], run: ShownRun, record: Record) -> ShownRun:
    """A launch whose title has the values of these knobs in the case of ``record``."""
    named = (label(f"{name}={record.case[name]}") for name in knobs if name in record.case)
    title = " ".join([run.title, *named])[:LONGEST_LABEL]
    return replace(run, title=title, name=run.name.replace(run.title, title, 1))


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
