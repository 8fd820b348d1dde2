"""Finds the records at a path that a user names: a ledger, the folder of a run, or a folder of
several."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, NamedTuple

from ..base import (
    ARGS,
    RESULTS,
    RUN_FILE,
    STEPS,
    STORE_FILES,
    SUITE_LEDGER,
    UsageError,
    plural,
    well_formed,
)
from ..instruments import LEDGER_FILE, Record, read_ledger
from .content import Chapter, Report

PlaceKind = Literal["ledger", "inference", "training", "kept"]
"""The kinds of places; ``kept`` is what another program wrote."""
MOST_FOLDERS = 20_000
"""Folders that are searched for records. More are a mistake, such as a home."""
LOG_SUFFIXES = (".out", ".out.gz", ".log", ".log.gz")
TRACKER_SUFFIXES = (".db", ".zip")
"""Ends of the names of logs of jobs, and of what trackers keep."""


class RecordPlace(NamedTuple):
    """A place of records of one kind."""

    kind: PlaceKind
    path: Path


def places_of(named: Path) -> list[RecordPlace]:
    """What a path holds.

    Args:
        named: A ledger, the output or folder of a run, or a folder that is searched for these.

    Returns:
        The places, each once, in the order of their names.

    Raises:
        UsageError: There are no records at this path.
    """
    ours = (place for place in places_at(named) if place.kind != "kept")
    if places := sorted(ours, key=_before_what_it_made):
        return places
    if named.suffix == ".penstock":
        raise UsageError(f"{named} is not a run folder of penstock infer: it has no run.json")
    if not named.is_dir() or named.suffix == ".ledger":
        return [RecordPlace("ledger", named)]  # its reader reports the fault
    raise UsageError(
        f"{named} holds neither records of a benchmark, nor the folder of a run or a training, "
        "nor logs of jobs, nor what a tracker kept"
    )


def places_at(named: Path) -> Iterator[RecordPlace]:
    """The places at a path that a user named, and below it; no link is followed.

    Args:
        named: The path.

    Yields:
        The places, in no order.

    Raises:
        UsageError: There are far too many folders below it.
    """
    if place := beside_output(named):
        yield place
    elif named.is_file():
        ledger = named.name.endswith((".jsonl", ".jsonl.gz"))
        yield RecordPlace("ledger" if ledger else "kept", named)
    for path, kind, names in folders_below(named) if place is None else ():
        if kind is not None:
            yield RecordPlace(kind, path)
            continue
        kept = (path / each for each in names if each.endswith(LOG_SUFFIXES + TRACKER_SUFFIXES))
        yield from (RecordPlace("kept", file) for file in kept if not file.is_symlink())


def beside_output(named: Path) -> RecordPlace | None:
    """The records beside an output: the folder of a run of infer, or the ledger of preprocess or
    predict; None if it has neither, or is a place of records itself."""
    kinds: tuple[tuple[str, PlaceKind], ...] = (("penstock", "inference"), ("ledger", "ledger"))
    for suffix, kind in kinds if named.name and kind_of_place(named) is None else ():
        beside = named.with_name(f"{named.name}.{suffix}")
        if kind_of_place(beside) == kind:
            return RecordPlace(kind, beside)
    return None


def kind_of_place(path: Path) -> PlaceKind | None:
    """The kind of a folder: a ledger, a run or a training; None if it is none of these."""
    if path.is_dir():
        if (path / LEDGER_FILE).is_file():
            return "ledger"
        if (path / RUN_FILE).is_file():
            return "inference"
        if (path / RESULTS).is_file() or ((path / ARGS).is_file() and (path / STEPS).is_dir()):
            return "training"
    return None


def _before_what_it_made(place: RecordPlace) -> Path:
    """Sort key of places: by name, and a suite before its trainings."""
    return place.path.parent if place.path.name == SUITE_LEDGER else place.path


def trainings_of(places: Sequence[RecordPlace]) -> list[Path]:
    """The folders of trainings that may be a study: those of a suite are compared by the suite."""
    suites = {place.path.parent for place in places if place.path.name == SUITE_LEDGER}
    trainings = [place.path for place in places if place.kind == "training"]
    return [path for path in trainings if path.parent not in suites]


def folders_below(folder: Path) -> Iterator[tuple[Path, PlaceKind | None, list[str]]]:
    """A folder and those below it; no link is followed, no array and no place entered.

    Yields:
        The folder, what it holds, and the names of files in it.

    Raises:
        UsageError: There are far too many.
    """
    for count, (at, folders, names) in enumerate(os.walk(folder)):
        if count >= MOST_FOLDERS:
            raise UsageError(
                f"{folder} holds more than {MOST_FOLDERS:,} folders; name one below it"
            )
        kind = kind_of_place(Path(at))
        inside = kind is not None or any(name in names for name in STORE_FILES)  # of an array
        folders[:] = [] if inside else sorted(n for n in folders if not n.startswith("."))
        yield Path(at), kind, sorted(names)


def reports_of_places(places: Sequence[RecordPlace]) -> list[Report]:
    """A report of each place.

    Raises:
        UsageError: A place cannot be read, or holds nothing that can be shown.
    """
    reports = []
    for place in places:
        with reading(place):
            reports.append(_report_of(place))
    return reports


def joined(reports: Sequence[Report], title: str) -> Report:
    """Several reports as one.

    Args:
        reports: The reports, at least one.
        title: The title of all.

    Returns:
        The report itself if there is only one; otherwise a report whose verdict has a sentence for
        each.
    """
    if len(reports) == 1:
        return reports[0]
    return Report(
        title,
        [f"{report.title}: {report.verdict[0]}" for report in reports],
        [f"{plural(len(reports), 'set')} of records"],
        [chapter for report in reports for chapter in _with_verdict(report)],
        [file for report in reports for file in report.files],
    )


def reading(place: RecordPlace) -> AbstractContextManager[None]:
    """Raise `UsageError` if the files of a place are not as Penstock left them."""
    return well_formed(f"{place.path} is not what Penstock left there")


def _report_of(place: RecordPlace) -> Report:
    # Who only looks for places needs none of the rooms that make reports.
    if place.kind == "inference":
        from .infer.report import is_labelling, report_of_labels, report_of_run

        return (report_of_labels if is_labelling(place.path) else report_of_run)(place.path)
    if place.kind == "training":
        from .training.report import report_of_training

        return report_of_training(place.path)
    from .ledger_report import report_of_records

    return report_of_records(read_ledger(place.path), place.path.name, [place.path])


def _with_verdict(report: Report) -> Iterator[Chapter]:
    """The chapters of one among several reports: its sentences lead the first."""
    for number, chapter in enumerate(report.chapters):
        title = chapter.title
        if report.title not in title:
            title = f"{report.title}: {title}"
        said = {line for section in chapter.sections for line in section.sentences}
        lines = [line for line in report.verdict if line not in said]
        lead = [*lines, *report.about] if number == 0 else []
        yield Chapter(title, chapter.sections, chapter.pictures, [*lead, *chapter.lead])


def records_of(places: Sequence[RecordPlace]) -> list[Record]:
    """The records of all ledgers among places."""
    return [r for place in places if place.kind == "ledger" for r in read_ledger(place.path)]
