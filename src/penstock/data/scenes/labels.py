"""The labels of xView3: a CSV with a point for each object, and many cells that say nothing.

An empty cell means unknown: neither yes nor no, neither 0 metres nor the mean.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ...base import UsageError, describe
from .objects import NO, UNKNOWN, YES, Objects

CONFIDENCE = ("LOW", "MEDIUM", "HIGH")
LOW = 0
NO_SHORE_KM = 9999.99

COLUMNS = (
    "detect_lat detect_lon vessel_length_m source detect_scene_row detect_scene_column is_vessel "
    "is_fishing distance_from_shore_km scene_id confidence top left bottom right detect_id"
).split()
"""The columns of the file, in the order of the real one."""
NEEDED = (
    "scene_id detect_scene_row detect_scene_column is_vessel is_fishing vessel_length_m "
    "confidence distance_from_shore_km"
).split()
_INDEX_COLUMNS = {"", "Unnamed: 0"}
"""Names that table libraries give to the row numbers that they write; they are ignored."""
_TERNARY = {
    "true": YES, "1": YES, "1.0": YES,
    "false": NO, "0": NO, "0.0": NO,
    "": UNKNOWN, "nan": UNKNOWN, "none": UNKNOWN, "null": UNKNOWN,
}  # fmt: skip


def read_labels(path: Path) -> dict[str, Objects]:
    """The labels of every scene that a CSV names, sorted by scene.

    Raises:
        UsageError: the file cannot be read or a row is wrong; the message names file and line.
    """
    columns: dict[str, dict[str, list[Any]]] = {}
    for line, cells in label_rows(path):
        try:
            row: dict[str, Any] = {
                "points": [_place(cells, "detect_scene_row"), _place(cells, "detect_scene_column")],
                "is_vessel": _ternary_of(cells, "is_vessel"),
                "is_fishing": _ternary_of(cells, "is_fishing"),
                "length_m": _measure(cells, "vessel_length_m"),
                "confidence": _confidence(cells["confidence"]),
                "shore_km": _measure(cells, "distance_from_shore_km"),
                "lines": line,
            }
            if not cells["scene_id"].strip():
                raise ValueError("scene_id is empty")
        except ValueError as error:
            raise UsageError(f"{path} line {line}: {error}") from None
        of_scene = columns.setdefault(cells["scene_id"].strip(), {name: [] for name in row})
        for name, value in row.items():
            of_scene[name].append(value)
    return {scene: Objects.of(scene, **columns[scene]) for scene in sorted(columns)}


def label_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """The line and the cells of each row of a label CSV."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="")
            names = reader.fieldnames or []
            if unknown := [name for name in names if name not in {*COLUMNS, *_INDEX_COLUMNS}]:
                raise UsageError(f"{path} has a column {unknown[0]!r}, which labels do not have")
            if lacking := [name for name in NEEDED if name not in names]:
                raise UsageError(f"{path} has no column {lacking[0]}")
            for row in reader:
                if None in row:
                    raise UsageError(f"{path} line {reader.line_num} has more cells than columns")
                yield reader.line_num, row
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is no CSV: {describe(error)}") from error


def ternary(text: str) -> int:
    """1 for True, 0 for False, -1 for an empty cell."""
    value = _TERNARY.get(text.strip().lower())
    if value is None:
        raise ValueError(f"{text!r} may be True, False or empty")
    return value


def _ternary_of(cells: Mapping[str, str], name: str) -> int:
    try:
        return ternary(cells[name])
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _place(cells: Mapping[str, str], name: str) -> float:
    number = _number(cells, name)
    if number < 0:
        raise ValueError(f"{name} is {cells[name]!r}, which is outside of any scene")
    return number


def _measure(cells: Mapping[str, str], name: str) -> float:
    """Metres or kilometres, NaN where the cell is empty."""
    if cells[name].strip().lower() in ("", "nan"):
        return math.nan
    number = _number(cells, name)
    if number < 0:
        raise ValueError(f"{name} is {cells[name]!r}, less than nothing")
    return number


def _number(cells: Mapping[str, str], name: str) -> float:
    try:
        number = float(cells[name])
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is {cells[name].strip()!r}, no number")
    return number


def _confidence(text: str) -> int:
    word = text.strip().upper()
    if word not in CONFIDENCE:
        raise ValueError(f"confidence is {text!r}; it may be {', '.join(CONFIDENCE)}")
    return CONFIDENCE.index(word)
