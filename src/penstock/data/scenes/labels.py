"""The CSV files of xView3: labels, with many empty cells, and predictions. An empty cell means
unknown: it is neither yes nor no, neither 0 metres nor the mean.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base import UsageError, as_usage_error, check_ends, from_cell, system_errors, to_cell
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
        as_usage_error(f"{where} is not a CSV", UnicodeDecodeError, csv.Error),
        system_errors(f"{where} cannot be read"),
        path.open(newline="", encoding="utf-8-sig") as file,
    ):
        reader = csv.DictReader(file, restval="")
        names = reader.fieldnames or ()
        if lacking := [name for name in needed if name not in names]:
            raise UsageError(f"{where} has no column {lacking[0]}")
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
