"""The CSV files of xView3: labels, with many empty cells, and predictions. An empty cell means
unknown: it is neither yes nor no, neither 0 metres nor the mean.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...base import UsageError, describe, from_cell, to_cell
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

    A line with a ``scene_id`` alone is of a scene without an object. Columns that it has beside
    those that are needed are carried, in ``more``.

    Raises:
        UsageError: the file cannot be read or a row is wrong; the message names file and line.
    """
    rows: dict[str, list[dict[str, Any]]] = {}
    for line, cells in _rows(path, str(path), NEEDED):
        if None in cells:
            raise UsageError(f"{path} line {line} has more cells than columns")
        scene = cells["scene_id"].strip()
        of_scene = rows.setdefault(scene, [])
        if scene and not any(cells[name].strip() for name in NEEDED if name != "scene_id"):
            continue  # a scene that was searched, without an object
        try:
            of_scene.append(_label(cells))
            of_scene[-1]["lines"] = line
            if not scene:
                raise ValueError("scene_id is empty")
        except ValueError as error:
            raise UsageError(f"{path} line {line}: {error}") from None
    return {
        scene: Objects.of(
            scene, **{"points": [], **{name: [row[name] for row in of] for name in (of or [{}])[0]}}
        )
        for scene, of in sorted(rows.items())
    }


def _label(cells: Mapping[str, str]) -> dict[str, Any]:
    """Columns of `Objects` from a line of labels; `ValueError` if a cell is wrong."""
    return {
        "points": [
            _place(cells["detect_scene_row"], "detect_scene_row"),
            _place(cells["detect_scene_column"], "detect_scene_column"),
        ],
        "is_vessel": _ternary(cells["is_vessel"], "is_vessel"),
        "is_fishing": _ternary(cells["is_fishing"], "is_fishing"),
        "length_m": _measure(cells["vessel_length_m"], "vessel_length_m"),
        "confidence": _confidence(cells["confidence"]),
        "shore_km": _measure(cells["distance_from_shore_km"], "distance_from_shore_km"),
        "more": {
            name: text
            for name, text in cells.items()
            if text and name not in (*NEEDED, *_INDEX_COLUMNS)
        },
    }


def _rows(path: Path, where: str, needed: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The line and the cells of each row of a CSV, which has all ``needed`` columns."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="")
            names = reader.fieldnames or ()
            if lacking := [name for name in needed if name not in names]:
                raise UsageError(f"{where} has no column {lacking[0]}")
            for row in reader:
                yield reader.line_num, row
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{where} is not a CSV: {describe(error)}") from error


def _ternary(text: str, name: str = "") -> int:
    """1 for True, 0 for False, -1 for an empty cell."""
    value = _TERNARY.get(text.strip().lower())
    if value is None:
        raise ValueError(f"{name}: {text!r} may be True, False or empty")
    return value


def _place(text: str, name: str) -> float:
    number = _number(text, name)
    if number < 0:
        raise ValueError(f"{name} is {text!r}, which is outside of any scene")
    return number


def _measure(text: str, name: str = "") -> float:
    """Metres or kilometres or a score, NaN where the cell is empty."""
    if text.strip().lower() in ("", "nan"):
        return math.nan
    number = _number(text, name)
    if number < 0:
        raise ValueError(f"{name} is {text!r}, below 0")
    return number


def _number(text: str, name: str = "") -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is {text.strip()!r}, no number")
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
    where = f"--inference-file {path}"
    rows = [*_rows(path, where, PREDICTED_COLUMNS)]

    def column(of: str, parse: Callable[[str], Any]) -> list[Any]:
        values = []
        for line, row in rows:
            text = from_cell((row.get(of) or "").strip())
            try:
                values.append(parse(text))
            except ValueError:
                raise UsageError(f"{where}, line {line}: {of} cannot be {text!r}") from None
        return values

    places = [column(of, _number) for of in ("detect_scene_row", "detect_scene_column")]
    return Objects.of(
        column("scene_id", _named),
        np.transpose(places),
        is_vessel=column("is_vessel", _ternary),
        is_fishing=column("is_fishing", _ternary),
        length_m=column("vessel_length_m", _measure),
        score=column("score", _measure),
    )


def _named(text: str) -> str:
    if not text:
        raise ValueError
    return text


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
