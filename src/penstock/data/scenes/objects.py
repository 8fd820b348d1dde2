"""Objects at sea, found or labelled: matched by distance, counted, read and written.

Objects are points in a scene of 10 m pixels. A pair is one prediction and one label closer than the
tolerance, each in one pair at most, chosen so that there are as many pairs as there can be and
their distances add up to the least.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...base import UsageError, from_cell, require, to_cell
from .labels import NO, UNKNOWN, YES, Labels, ternary
from .scene import PIXEL_M


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
    """Of a label: 0 LOW, 1 MEDIUM, 2 HIGH; -1 of a prediction."""
    shore_km: NDArray[np.float64]
    """Distance of a label from the shore; NaN where it is unknown."""
    score: NDArray[np.float64]
    """Of a prediction, from 0 to 1; NaN where none was given."""

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
    ) -> Objects:
        """Objects from columns; a single value stands for all of them."""
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
        )

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, rows: NDArray[Any] | slice) -> Objects:
        """Those of some rows, by number or by truth."""
        return Objects(*(getattr(self, field.name)[rows] for field in fields(self)))

    @classmethod
    def labelled(cls, labels: Mapping[str, Labels]) -> Objects:
        """The labels of scenes."""
        return cls.join(
            [
                cls.of(
                    scene,
                    of.points,
                    is_vessel=of.is_vessel,
                    is_fishing=of.is_fishing,
                    length_m=of.length_m,
                    confidence=of.confidence,
                    shore_km=of.shore_km,
                )
                for scene, of in labels.items()
            ]
        )

    @classmethod
    def join(cls, parts: Sequence[Objects]) -> Objects:
        if not parts:
            return cls.of([], [])
        columns = ([getattr(part, field.name) for part in parts] for field in fields(cls))
        return cls(*(np.concatenate(column) for column in columns))


Indices = NDArray[np.intp]


def match(
    predicted: NDArray[np.float64],
    true: NDArray[np.float64],
    tolerance_m: float,
    *,
    far: Literal["never", "costly", "as they are"] = "never",
) -> tuple[Indices, Indices]:
    """Pairs of predicted and true points, closer than the tolerance, as indices into each.

    ``far`` is what pairs beyond the tolerance cost while the best assignment is sought: so much
    that they never stand in the way of one within it, or as the official script has it, with
    ``costly_dist`` or without.

    >>> match(np.array([[0.0, 0], [9, 9]]), np.array([[9.0, 8], [500, 0]]), 200.0)
    (array([1]), array([0]))
    """
    if not (len(predicted) and len(true)):
        return np.empty(0, np.intp), np.empty(0, np.intp)
    assign = require("scipy.optimize", "train").linear_sum_assignment
    cdist = require("scipy.spatial.distance", "train").cdist
    distance = cdist(predicted, true) * PIXEL_M
    cost = distance
    if far == "costly":
        cost = np.where(distance > tolerance_m, 9_999_999 * PIXEL_M, distance)
    elif far == "never":
        most_of_all = tolerance_m * (1 + min(distance.shape))
        cost = np.where(distance >= tolerance_m, most_of_all, distance)
    rows, columns = assign(cost)
    near = distance[rows, columns] < tolerance_m
    return rows[near], columns[near]


def more_pairs(
    predicted: NDArray[np.float64], true: NDArray[np.float64], tolerance_m: float
) -> NDArray[np.bool_]:
    """Of predicted points, one after another: whether with it there can be one pair more than
    without. Of the first so many, the sum is the number of pairs that `match` finds.

    >>> more_pairs(np.array([[9.0, 9], [9, 8], [0, 0]]), np.array([[9.0, 7], [9, 25]]), 200.0)
    array([ True,  True, False])
    """
    more = np.zeros(len(predicted), bool)
    if not (len(predicted) and len(true)):
        return more
    tree = require("scipy.spatial", "train").cKDTree(true * PIXEL_M)
    near = tree.query_ball_point(predicted * PIXEL_M, np.nextafter(tolerance_m, 0))
    owner: dict[int, int] = {}  # the prediction of each label that has one
    label_of: dict[int, int] = {}  # and the other way round

    def free_label(newest: int, wants: dict[int, int]) -> int | None:
        """One that becomes free, if others change theirs; ``wants`` is who would take which."""
        waiting = [newest]
        for prediction in waiting:  # which grows
            for label in near[prediction]:
                if label not in wants:
                    wants[label] = prediction
                    if label not in owner:
                        return int(label)
                    waiting.append(owner[label])
        return None

    for newest in range(len(predicted)):
        wants: dict[int, int] = {}
        label = free_label(newest, wants)
        more[newest] = label is not None
        while label is not None:
            prediction = wants[label]
            left = label_of.get(prediction)
            owner[label], label_of[prediction] = prediction, label
            label = left
    return more


def keep_strongest(
    points: NDArray[np.float64], scores: NDArray[np.float64], radius: float
) -> Indices:
    """Indices of points, strongest first, without those closer than ``radius`` to a stronger one
    that is kept: detections of one object by overlapping chips become one.

    >>> keep_strongest(np.array([[0.0, 0], [0, 3], [0, 6]]), np.array([0.5, 0.9, 0.4]), 4)
    array([1])
    """
    if not len(points):
        return np.empty(0, np.intp)
    cKDTree = require("scipy.spatial", "train").cKDTree
    order = np.argsort(-scores, kind="stable")
    near = cKDTree(points[order]).query_ball_point(points[order], radius, return_sorted=True)
    place = np.arange(len(order))
    gone = np.zeros(len(order), bool)
    for index in place:
        if not gone[index]:
            others = np.asarray(near[index])
            gone[others[others > index]] = True
    return order[~gone]


@dataclass(frozen=True, slots=True)
class Counts:
    """Right, stray and missed. Counts of scenes, ranks and restarts add up."""

    true_positive: int = 0
    false_positive: int = 0
    false_negative: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            self.true_positive + other.true_positive,
            self.false_positive + other.false_positive,
            self.false_negative + other.false_negative,
        )

    @property
    def f1(self) -> float | None:
        """None where there was nothing to find and nothing was found."""
        all_of_both = 2 * self.true_positive + self.false_positive + self.false_negative
        return 2 * self.true_positive / all_of_both if all_of_both else None


PREDICTED_COLUMNS = (
    "detect_scene_row",
    "detect_scene_column",
    "scene_id",
    "is_vessel",
    "is_fishing",
    "vessel_length_m",
)
"""Of a submission. A further column ``score`` is read if it is there; others are passed over."""


def read_predictions(path: Path) -> Objects:
    """A submission: CSV with `PREDICTED_COLUMNS`. Raises `UsageError` naming file and line."""
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
    """Write a submission, with the scores as a further column."""
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
