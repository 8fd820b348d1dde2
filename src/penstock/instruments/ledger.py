"""The ledger: an append-only file of records, one JSON line for each launch.

    FOLDER/records.jsonl

A launch is on the disk before the next begins. A process that is killed while it writes leaves a
line without its newline: half a record, which a reader skips and the next `append` cuts off. Any
other line that is no record is an error that names the line. Nothing is rewritten, so several
processes may read, copy and append to a ledger at once. A CSV is an export.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from ..base import (
    UsageError,
    as_usage_error,
    canonical,
    check_ends,
    csv_text,
    ends_torn,
    json_object,
    lock_file,
    system_errors,
    to_cell,
    write_output,
)
from . import record as records_of
from .record import Record
from .stats.intervals import median_interval

LEDGER_FILE = "records.jsonl"


class Ledger:
    """The records of a folder. The first `append` makes it.

    Args:
        folder: the folder.
        labels: the name and the tags of the run whose records are appended; see `run_labels`.
    """

    def __init__(self, folder: Path, labels: Mapping[str, Any] | None = None) -> None:
        self.path = Path(folder) / LEDGER_FILE
        self.labels = dict(labels or {})

    def append(self, record: Record) -> Record:
        """Add a record, labelled. It is whole and on the disk when this returns.

        Args:
            record: the record of a launch.

        Returns:
            The record as it was written.

        Raises:
            UsageError: the folder cannot be written.
        """
        record = record.model_copy(update=self.labels)
        line = record.line().encode() + b"\n"
        with system_errors(f"{self.path} cannot be written"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            created = not self.path.exists()
            with self.path.open("a+b", buffering=0) as file:
                lock_file(file, wait=True)  # given back when the file is closed
                _mend(file)
                written = file.write(line)
                if written != len(line):
                    raise OSError(f"{written} of {len(line)} bytes of a record were written")
                os.fsync(file.fileno())
            if created:
                _sync_folder(self.path.parent)
        return record

    def records(self) -> list[Record]:
        """The records in the order in which they were appended; none where there is no file."""
        return read_ledger(self.path) if self.path.exists() else []


def read_ledger(path: Path) -> list[Record]:
    """The records of a ledger's folder, or of a file of such lines with any name, ``.gz`` or not.

    Raises:
        UsageError: the file cannot be read, or a line is not a record.
    """
    path = Path(path)
    path = path / LEDGER_FILE if path.is_dir() else path
    check_ends(path, f"the ledger {path}")
    with as_usage_error(f"the ledger {path} cannot be read", OSError, EOFError, zlib.error):
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    *lines, rest = content.split(b"\n")
    if lines and not lines[0].startswith(b"{"):
        begin = lines[0][:40].decode("utf-8", "replace")
        raise UsageError(
            f"{path} is not a ledger: it begins with {begin!r}; penstock scaling reads logs of "
            "jobs and what trackers kept, penstock plot the CSV of a benchmark"
        )
    if json_object(rest):  # it lacks only its newline: no shorter piece of a record is JSON
        lines.append(rest)
    elif rest and not rest.startswith(b"{"):  # no torn record: `_mend` would cut off a user's text
        raise UsageError(f"{path} is not a ledger: it ends with {rest[:40]!r}")
    return [_parse(line, path, number) for number, line in enumerate(lines, 1)]


def _parse(line: bytes, path: Path, number: int) -> Record:
    try:
        return records_of.parse_record(line)
    except ValueError as error:
        raise UsageError(f"{path}, line {number}: {error}") from error


def _mend(file: IO[bytes]) -> None:
    """End the last line, or cut off the half line that a kill left."""
    if not ends_torn(file):
        return
    file.seek(0)
    content = file.read()
    rest = content.rpartition(b"\n")[2]
    if json_object(rest):
        file.write(b"\n")
    else:
        file.truncate(len(content) - len(rest))


def _sync_folder(folder: Path) -> None:
    """Sync a folder to the disk. Before that, a new file may have no name after a crash."""
    if os.name == "nt":  # there a folder cannot be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def ledger_to_csv(records: Sequence[Record], path: Path, replace: bool = False) -> None:
    """Write a row for each launch, with statistics in place of samples. Unknown values are empty.

    Args:
        records: the launches.
        path: the file, which is written whole or not at all.
        replace: whether a file that Penstock did not write is replaced.

    Raises:
        UsageError: it cannot be written.
    """
    rows = [record_cells(record) for record in records]
    cells = ({name: to_cell(value) for name, value in each.items()} for each in rows)
    write_output("--csv", path, csv_text(_columns(rows), cells), replace=replace)


def record_cells(record: Record) -> dict[str, Any]:
    """A record as flat cells, named by their place in it: ``case.batch``, ``step.median_s``."""
    names = ("id", "time", "scenario", "key", "launch", "order", "status", "name")
    medians: dict[str, Any] = {}
    for name, samples in record.samples_s.items():
        median = median_interval(samples)
        medians |= {
            f"{name}.n": median.n,
            f"{name}.median_s": median.value,
            f"{name}.low_s": median.low,
            f"{name}.high_s": median.high,
        }
    error = record.error
    return {
        **{name: getattr(record, name) for name in names},
        **_named("tags", record.tags),
        "machine_key": record.environment.get("machine_key"),
        **_named("case", record.case),
        **_named("work", record.work),
        "stop": record.stop,
        "steps_per_sample": record.steps_per_sample,
        **medians,
        **_named("warmup", record.warmup.model_dump(exclude={"samples_s"})),
        **_named("memory", record.memory.model_dump()),
        "error.stage": error and error.stage,
        "error.message": error and error.message,
    }


def _named(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as cells; several in one are JSON."""
    return {
        f"{kind}.{name}": canonical(value) if isinstance(value, list | tuple | dict) else value
        for name, value in values.items()
    }


def _columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Every name that any row has, grouped by kind, in the order of the first row that has it."""
    names = dict.fromkeys(name for cells in rows for name in cells)
    kinds = list(dict.fromkeys(name.partition(".")[0] for name in names))
    return sorted(names, key=lambda name: kinds.index(name.partition(".")[0]))
