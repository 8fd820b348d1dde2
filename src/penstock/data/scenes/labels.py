"""The labels of xView3: a CSV with a point for each object, and many cells that say nothing.

What a cell leaves empty is unknown, which is neither yes nor no, neither 0 metres nor average.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, describe

UNKNOWN, NO, YES = -1, 0, 1
CONFIDENCE = ("LOW", "MEDIUM", "HIGH")
LOW = 0
NO_SHORE_KM = 9999.99

COLUMNS = (
    "detect_lat detect_lon vessel_length_m source detect_scene_row detect_scene_column is_vessel "
    "is_fishing distance_from_shore_km scene_id confidence top left bottom right detect_id"
).split()
"""Of the file, in the order of the real one."""
NEEDED = (
    "scene_id detect_scene_row detect_scene_column is_vessel is_fishing vessel_length_m "
    "confidence distance_from_shore_km"
).split()
_INDEX_COLUMNS = {"", "Unnamed: 0"}
"""What a table library names the row numbers that it writes; they are ignored."""
_TERNARY = {
    "true": YES, "1": YES, "1.0": YES,
    "false": NO, "0": NO, "0.0": NO,
    "": UNKNOWN, "nan": UNKNOWN, "none": UNKNOWN, "null": UNKNOWN,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of one scene, in the order of the file."""

    points: NDArray[np.float64]
    """Row and column in the scene, shape (n, 2)."""
    is_vessel: NDArray[np.int8]
    """-1 unknown, 0, 1."""
    is_fishing: NDArray[np.int8]
    """-1 unknown, 0, 1."""
    length_m: NDArray[np.float64]
    """NaN unknown."""
    confidence: NDArray[np.int8]
    """0 LOW, 1 MEDIUM, 2 HIGH."""
    shore_km: NDArray[np.float64]
    """Distance from shore; 9999.99 where there is none, NaN unknown."""
    lines: NDArray[np.int32]
    """Line of the file, from 1 with its header; 0 where they are not from a file."""

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, which: NDArray[Any] | slice) -> Labels:
        return Labels(*(getattr(self, field.name)[which] for field in fields(self)))

    @classmethod
    def of(cls, columns: Mapping[str, Sequence[Any]]) -> Labels:
        """From a list for each field, which may say None for NaN; without ``lines`` they are 0."""
        columns = {"lines": [0] * len(columns["points"]), **columns}
        found = {name: np.array(columns[name], dtype) for name, dtype in _DTYPES.items()}
        return cls(**{**found, "points": found["points"].reshape(-1, 2)})

    def as_lists(self) -> dict[str, list[Any]]:
        """What `of` takes; for JSON, which has no NaN. Lines are left out: they say where in its
        file a scene stands, and nothing of the scene."""
        names = (field.name for field in fields(self) if field.name != "lines")
        told = {name: getattr(self, name).tolist() for name in names}
        for name in ("length_m", "shore_km"):
            told[name] = [None if math.isnan(value) else value for value in told[name]]
        return told

    def check_inside(self, size: tuple[int, int], scene: str, path: Path) -> None:
        """Refuse a point that is not in the scene."""
        outside = np.any((self.points < 0) | (self.points >= np.array(size)), axis=1)
        if outside.any():
            first = int(np.flatnonzero(outside)[0])
            row, column = self.points[first]
            raise UsageError(
                f"{path} line {self.lines[first]}: row {row:g}, column {column:g} is outside scene "
                f"{scene}, which has {size[0]} x {size[1]} pixels"
            )


_DTYPES: dict[str, Any] = {
    "points": np.float64,
    "is_vessel": np.int8,
    "is_fishing": np.int8,
    "length_m": np.float64,
    "confidence": np.int8,
    "shore_km": np.float64,
    "lines": np.int32,
}


def read_labels(path: Path) -> dict[str, Labels]:
    """The labels of every scene that a CSV names, sorted by scene.

    Raises `UsageError` that names the file and the line.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    for line, cells in label_rows(path):
        try:
            row = {
                "points": [_place(cells, "detect_scene_row"), _place(cells, "detect_scene_column")],
                "is_vessel": _known(cells, "is_vessel"),
                "is_fishing": _known(cells, "is_fishing"),
                "length_m": _measure(cells, "vessel_length_m"),
                "confidence": _confidence(cells["confidence"]),
                "shore_km": _measure(cells, "distance_from_shore_km"),
                "lines": line,
            }
            if not cells["scene_id"].strip():
                raise ValueError("scene_id is empty")
        except ValueError as error:
            raise UsageError(f"{path} line {line}: {error}") from None
        rows.setdefault(cells["scene_id"].strip(), []).append(row)
    return {
        scene: Labels.of({name: [row[name] for row in rows[scene]] for name in _DTYPES})
        for scene in sorted(rows)
    }


def label_rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Line and cells of each row of a label CSV whose columns are those of labels."""
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
    """1, 0 or -1 for True, False or nothing."""
    known = _TERNARY.get(text.strip().lower())
    if known is None:
        raise ValueError(f"{text!r} may be True, False or empty")
    return known


def _known(cells: Mapping[str, str], name: str) -> int:
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
