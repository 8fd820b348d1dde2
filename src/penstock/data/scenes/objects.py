"""Objects at sea, found or labelled: points in a scene, their classes, and xView3's CSV files.

A point is given in pixels of 10 m.
Labels have many empty cells. An empty cell means unknown: it is neither yes nor no, neither 0
metres nor the mean.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...base import UsageError, as_usage_error, check_ends, from_cell, system_errors, to_cell

UNKNOWN, NO, YES = -1, 0, 1
_OF_LABELS = ("points", "is_vessel", "is_fishing", "length_m", "confidence", "shore_km", "more")


@dataclass(frozen=True, slots=True, eq=False)
class Objects:
    """Objects at sea, predicted or labelled: columns of one length. `of` makes one."""

    scene: NDArray[np.str_]
    points: NDArray[np.float64]
    """(n, 2): row and column in the scene, in pixels."""
    is_vessel: NDArray[np.int8]
    """1 yes, 0 no, -1 unknown."""
    is_fishing: NDArray[np.int8]
    length_m: NDArray[np.float64]
    """NaN where it is unknown."""
    confidence: NDArray[np.int8]
    """0 LOW, 1 MEDIUM, 2 HIGH for a label; -1 where none was given, and for a prediction."""
    shore_km: NDArray[np.float64]
    """Distance of a label from the shore; 9999.99 where there is none, NaN where it is unknown."""
    score: NDArray[np.float64]
    """The score of a prediction from 0 to 1; NaN where none was given."""
    lines: NDArray[np.int32]
    """The line of a label in its file, from 1 with the header; 0 where it is not from a file."""
    more: NDArray[np.object_]
    """The other cells of a label's line by the name of their column; empty ones are left out."""

    @classmethod
    def of(
        cls,
        scene: ArrayLike,
        points: ArrayLike,
        *,
        is_vessel: ArrayLike = UNKNOWN,
        is_fishing: ArrayLike = UNKNOWN,
        length_m: ArrayLike = math.nan,
        confidence: ArrayLike = -1,
        shore_km: ArrayLike = math.nan,
        score: ArrayLike = math.nan,
        lines: ArrayLike = 0,
        more: Sequence[Mapping[str, str]] = (),
    ) -> Objects:
        """Objects from columns of one length; a single value stands for all of them.

        Args:
            scene: the name of the scene.
            points: row and column in the scene, in pixels, shape (n, 2).
            is_vessel: 1 yes, 0 no, -1 unknown.
            is_fishing: likewise.
            length_m: metres; None or NaN where unknown.
            confidence: of labels, 0 LOW, 1 MEDIUM, 2 HIGH; -1 where none was given.
            shore_km: of labels, kilometres from the shore; None or NaN where unknown.
            score: of predictions, from 0 to 1; NaN where there is none.
            lines: of labels, the line of their file.
            more: of labels, further cells by the name of their column; none if it is empty.

        Returns:
            The objects.
        """
        points = np.asarray(points, np.float64).reshape(-1, 2)

        def column(values: ArrayLike, dtype: Any) -> NDArray[Any]:
            return np.broadcast_to(np.asarray(values, dtype), len(points)).copy()

        return cls(
            column(scene, np.str_),
            points,
            column(is_vessel, np.int8),
            column(is_fishing, np.int8),
            column(length_m, np.float64),
            column(confidence, np.int8),
            column(shore_km, np.float64),
            column(score, np.float64),
            column(lines, np.int32),
            np.array([*map(dict, more or [{}] * len(points)), None], object)[:-1],
        )

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, rows: NDArray[Any] | slice) -> Objects:
        """The objects of some rows, by number or by mask."""
        return Objects(*(getattr(self, field.name)[rows] for field in fields(self)))

    @classmethod
    def join(cls, parts: Iterable[Objects]) -> Objects:
        """All objects of several parts, in their order; none of no parts."""
        parts = [*parts] or [cls.of([], [])]
        columns = ([getattr(part, field.name) for part in parts] for field in fields(cls))
        return cls(*(np.concatenate(column) for column in columns))

    def as_lists(self) -> dict[str, list[Any]]:
        """Columns of labels for `of`, without the scene, as JSON takes them: None for NaN.

        Line numbers are left out: they are facts of the file, not of the scene.
        """
        columns = {name: getattr(self, name).tolist() for name in _OF_LABELS}
        for name in ("length_m", "shore_km"):
            columns[name] = [None if math.isnan(value) else value for value in columns[name]]
        return columns

    def check_inside(self, size: tuple[int, int], path: Path) -> None:
        """Refuse a point that is not in the scene.

        Args:
            size: rows and columns of the scene.
            path: the file that the points are from.

        Raises:
            UsageError: a point lies outside; the message names its line.
        """
        outside = np.any((self.points < 0) | (self.points >= np.array(size)), axis=1)
        if outside.any():
            first = int(np.flatnonzero(outside)[0])
            row, column = self.points[first]
            raise UsageError(
                f"{path} line {self.lines[first]}: row {row:g}, column {column:g} is outside scene "
                f"{self.scene[first]}, which has {size[0]} x {size[1]} pixels"
            )


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


def read_labels(
    path: Path, say: Callable[[str], None] | None = None, *, once: bool = True
) -> dict[str, Objects]:
    """The labels of every scene that a CSV names, sorted by scene.

    A line with a ``scene_id`` alone is of a scene without an object. Columns that it has beside
    those that are needed are carried, in ``more``. A line that says the same as an earlier one is
    the same label, and counts once.

    Args:
        path: The CSV.
        say: Takes a sentence on lines that are there twice.
        once: False to count each line, as the official script does.

    Returns:
        The labels, by scene.

    Raises:
        UsageError: the file cannot be read or a row is wrong; the message names file and line.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    lines: set[str] = set()
    repeats: list[int] = []
    for label in _parsed(path, str(path), NEEDED, _label):
        scene, line = label.pop("scene"), label.pop("lines", 0)
        of_scene, text = rows.setdefault(scene, []), f"{scene} {label}"
        if once and text in lines:
            repeats.append(line)
        elif label["points"]:
            of_scene.append({**label, "lines": line})
        lines.add(text)
    if repeats and say is not None:
        say(
            f"{path}: labels that an earlier line has already: {len(repeats)}, the first in line "
            f"{repeats[0]}; each counts once"
        )
    return {scene: _objects(scene, of) for scene, of in sorted(rows.items())}


def _objects(scene: str | list[str], rows: Sequence[Mapping[str, Any]]) -> Objects:
    columns = {name: [row[name] for row in rows] for name in (rows or [{"points": 0}])[0]}
    return Objects.of(scene, **columns)


def _label(line: int, cells: Mapping[str, str]) -> dict[str, Any]:
    """The scene and the columns of `Objects` from a line of labels; without points where its scene
    was searched and has no object."""
    scene = _scene(cells)
    if None in cells:
        raise ValueError("more cells than columns")
    if not any(cells[name].strip() for name in NEEDED if name != "scene_id"):
        return {"scene": scene, "points": None}
    return {
        "scene": scene,
        "points": [
            _number(cells, name, least=0) for name in ("detect_scene_row", "detect_scene_column")
        ],
        "is_vessel": _ternary(cells, "is_vessel"),
        "is_fishing": _ternary(cells, "is_fishing"),
        "length_m": _measure(cells, "vessel_length_m"),
        "confidence": _confidence(cells["confidence"]),
        "shore_km": _measure(cells, "distance_from_shore_km"),
        "lines": line,
        "more": {
            name: text
            for name, text in cells.items()
            if text and name not in (*NEEDED, *_INDEX_COLUMNS)
        },
    }


def _parsed(
    path: Path,
    where: str,
    needed: Iterable[str],
    parse: Callable[[int, dict[str, str]], dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Each row of a CSV, which has all ``needed`` columns, as `parse` makes it of line and cells.
    A `ValueError` of it is a `UsageError` that names the line."""
    check_ends(path, where)
    with (
        as_usage_error(f"{where} is not a CSV in UTF-8", UnicodeDecodeError, csv.Error),
        system_errors(f"{where} cannot be read"),
        path.open(newline="", encoding="utf-8-sig") as file,
    ):
        reader = csv.DictReader(file, restval="")
        names = reader.fieldnames or ()
        if lacking := [name for name in needed if name not in names]:
            raise UsageError(
                f"{where} has no column {lacking[0]}; commas part its columns, and it has "
                f"{', '.join(names) or 'none'}"
            )
        if twice := [name for name in names if name and names.count(name) > 1]:
            raise UsageError(f"{where} has two columns {twice[0]}")
        for row in reader:
            try:
                parsed = parse(reader.line_num, row)
            except ValueError as error:
                raise UsageError(f"{where} line {reader.line_num}: {error}") from None
            yield parsed


def _scene(cells: Mapping[str, str]) -> str:
    if not (scene := from_cell(cells["scene_id"].strip())):
        raise ValueError("scene_id is empty")
    return scene


def _ternary(cells: Mapping[str, str], name: str) -> int:
    """1 for True, 0 for False, -1 for an empty cell."""
    value = _TERNARY.get(cells[name].strip().lower())
    if value is None:
        raise ValueError(f"{name}: {cells[name]!r} may be True, False or empty")
    return value


def _measure(cells: Mapping[str, str], name: str) -> float:
    """Metres or kilometres or a score, NaN where the cell is empty."""
    if cells.get(name, "").strip().lower() in ("", "nan"):
        return math.nan
    return _number(cells, name, least=0)


def _number(cells: Mapping[str, str], name: str, least: float = -math.inf) -> float:
    try:
        number = float(cells[name])
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is {cells[name].strip()!r}, no number")
    if number < least:
        raise ValueError(f"{name} is {cells[name]!r}, below {least}")
    return number


def _confidence(text: str) -> int:
    """-1 for an empty cell: the score then takes it neither for LOW nor for sure."""
    word = text.strip().upper()
    if word in ("", "NAN"):
        return -1
    if word not in CONFIDENCE:
        raise ValueError(f"confidence is {text!r}; it may be {', '.join(CONFIDENCE)}")
    return CONFIDENCE.index(word)


# --- predictions ----------------------------------------------------------------------------------

PREDICTED_COLUMNS = (
    "detect_scene_row",
    "detect_scene_column",
    "scene_id",
    "is_vessel",
    "is_fishing",
    "vessel_length_m",
)
"""Columns of a submission. A column ``score`` is read too; any other is ignored."""


def read_predictions(path: Path) -> Objects:
    """Read a submission, a CSV with `PREDICTED_COLUMNS`.

    Raises:
        UsageError: the file cannot be read or a cell is wrong; the message names file and line.
    """
    rows = [*_parsed(path, f"--inference-file {path}", PREDICTED_COLUMNS, _prediction)]
    return _objects([row.pop("scene") for row in rows], rows)


def _prediction(line: int, cells: Mapping[str, str]) -> dict[str, Any]:
    return {
        "scene": _scene(cells),
        "points": [_number(cells, "detect_scene_row"), _number(cells, "detect_scene_column")],
        "is_vessel": _ternary(cells, "is_vessel"),
        "is_fishing": _ternary(cells, "is_fishing"),
        "length_m": _measure(cells, "vessel_length_m"),
        "score": _measure(cells, "score"),
    }


def write_predictions(path: Path, objects: Objects) -> None:
    """Write a submission, with the scores as a further column.

    Args:
        path: the CSV to write.
        objects: the predictions.
    """
    texts = {YES: "True", NO: "False", UNKNOWN: ""}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*PREDICTED_COLUMNS, "score"))
        for index, (row, column) in enumerate(objects.points):
            measures = (objects.length_m[index], objects.score[index])
            length, score = ("" if math.isnan(value) else repr(float(value)) for value in measures)
            classes = (objects.is_vessel[index], objects.is_fishing[index])
            vessel, fishing = (texts[int(value)] for value in classes)
            scene = to_cell(str(objects.scene[index]))
            writer.writerow((float(row), float(column), scene, vessel, fishing, length, score))
