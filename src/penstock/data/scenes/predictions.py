"""Predictions of objects at sea: the CSV of a submission, read and written."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ...base import UsageError, from_cell, to_cell
from .labels import ternary
from .objects import NO, UNKNOWN, YES, Objects

PREDICTED_COLUMNS = (
    "detect_scene_row",
    "detect_scene_column",
    "scene_id",
    "is_vessel",
    "is_fishing",
    "vessel_length_m",
)
"""Columns of a submission. ``score`` is read too where it is there; others are passed over."""


def read_predictions(path: Path) -> Objects:
    """Read a submission, a CSV with `PREDICTED_COLUMNS`.

    Raises:
        UsageError: the file cannot be read or a cell is wrong; the message names file and line.
    """
    where = f"--inference-file {path}"
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or ()
            if missing := [column for column in PREDICTED_COLUMNS if column not in columns]:
                raise UsageError(f"{where} has no column {missing[0]}")
            rows = [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{where} is no CSV: {error}") from error

    def column(of: str, parse: Callable[[str], Any]) -> list[Any]:
        values = []
        for line, row in rows:
            text = from_cell((row.get(of) or "").strip())
            try:
                values.append(parse(text))
            except ValueError:
                raise UsageError(f"{where}, line {line}: {of} cannot be {text!r}") from None
        return values

    places = [column(of, _finite) for of in ("detect_scene_row", "detect_scene_column")]
    return Objects.of(
        column("scene_id", _named),
        np.transpose(places),
        is_vessel=column("is_vessel", ternary),
        is_fishing=column("is_fishing", ternary),
        length_m=column("vessel_length_m", _measure),
        score=column("score", _measure),
    )


def _named(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _finite(text: str) -> float:
    """A place: a detection may lie a little beyond the edge of its scene."""
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value


def _measure(text: str) -> float:
    if (value := float(text) if text else math.nan) < 0 or math.isinf(value):
        raise ValueError
    return value


def write_predictions(path: Path, objects: Objects) -> None:
    """Write a submission, with the scores as a further column.

    Args:
        path: the CSV to write.
        objects: the predictions.
    """
    ternary = {YES: "True", NO: "False", UNKNOWN: ""}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow((*PREDICTED_COLUMNS, "score"))
        for index, (row, column) in enumerate(objects.points):
            measures = (objects.length_m[index], objects.score[index])
            length, score = ("" if math.isnan(value) else repr(float(value)) for value in measures)
            classes = (objects.is_vessel[index], objects.is_fishing[index])
            vessel, fishing = (ternary[int(value)] for value in classes)
            scene = to_cell(str(objects.scene[index]))
            writer.writerow((float(row), float(column), scene, vessel, fishing, length, score))
