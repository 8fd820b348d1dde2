"""Launches that have a time but no chapter of their own: preprocess and predict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..base import format_seconds, plural
from ..instruments import Record
from .cell import Cell
from .run_settings import cases_of_sides, settings_of_launch
from .table import Section
from .words import bracket, or_dash, spread

TIMED = ("preprocess", "predict")
"""Their scenarios."""


def timed_cells(records: Iterable[Record]) -> list[tuple[str, Cell]]:
    """The cases of timed launches, each with a label: what was run, and the settings that vary.

    Args:
        records: Launches of any scenario.

    Returns:
        The cases, in the order of their first launches.
    """
    (launches,) = cases_of_sides([record for record in records if record.scenario in TIMED])
    cells = [cell for name in TIMED for cell in Cell.of_records(launches, name)]
    return [(_label(cell.records), cell) for cell in cells]


def _label(records: Sequence[Record]) -> str:
    case = settings_of_launch(records[0]) | dict(records[0].case)
    words = [records[0].scenario]
    words += [f"{name}={case[name]}" for name in records[0].case if name in case]
    return " ".join(words)


def timed_headlines(records: Iterable[Record]) -> list[str]:
    """The time of each case, with its launches."""
    return [
        f"{label}: {format_seconds(cell.time.value)} "
        f"{bracket(cell.time, plural(cell.launches, 'launch'))}."
        if cell.time is not None
        else f"{label}: {cell.status}: {cell.error}."
        for label, cell in timed_cells(records)
    ]


def timed_sections(records: Iterable[Record]) -> list[Section]:
    """A table of the cases."""
    lines = [
        (
            label,
            or_dash(cell.time.value if cell.time else None, format_seconds),
            spread(cell.time, format_seconds),
            str(cell.launches),
            cell.status,
        )
        for label, cell in timed_cells(records)
    ]
    return [Section("Times", [("case", "time", "95 %", "launches", "status"), *lines])]
