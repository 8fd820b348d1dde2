"""How good detections are: matching by distance, the xView3 score, COCO's average precision.

    predictions ─┐                        ┌ localisation F1      every pair, stray and miss
                 ├─ match, scene by scene ─┼ shore F1             those within 2 km of the shore
    labels ──────┘   pairs under 200 m    ├ vessel F1, fishing F1    the classes of the pairs
                                          └ length accuracy      the lengths of the pairs

    aggregate = localisation x (1 + shore + vessel + fishing + length) / 5

Objects are points in a scene of 10 m pixels. A pair is one prediction and one label closer than the
tolerance, each in one pair at most, chosen so that there are as many pairs as there can be and
their distances add up to the least.

``strict_official`` gives the numbers of the official script of the xView3 challenge to the last
digits. By default what is askew in them is put right:

=====================================  =========================================================
official                               here
=====================================  =========================================================
scenes without predictions drop out    their labels are missed
predictions in scenes without labels   they are false
  are never counted
shore F1 skips scenes that have only   every scene counts
  labels or only predictions there
near the shore: labels by their        a pair by its label; a stray by the shoreline: perfect
  column, predictions by shoreline       predictions score 1
a vertex of the shoreline is far       it is near
  from the shore
far pairs compete with near ones,      they never do
  but for ``costly_dist``
a scene whose predictions were all     it is scored
  dropped ends the script
a missing length makes the accuracy    it is wrong by 100 %; a true length of 0 is unknown
  NaN; a true length of 0 makes it 0
what cannot be measured is 0           it is null, and so is the aggregate
=====================================  =========================================================
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .config import XView3Rules
from .errors import UsageError, require

PIXEL_M = 10.0
LONGEST_M = 500.0
"""Lengths above it count as this much; the longest ship ever built was 458 m."""

UNKNOWN, NO, YES = -1, 0, 1
LOW, MEDIUM, HIGH = 0, 1, 2
CONFIDENCE = {"LOW": LOW, "MEDIUM": MEDIUM, "HIGH": HIGH}

Shorelines = Callable[[str], Sequence[NDArray[np.float64]]]
"""The contours of a scene by its id; see `penstock.shoreline.read_shoreline`."""


# --- objects ------------------------------------------------------------------------------------


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
    def join(cls, parts: Sequence[Objects]) -> Objects:
        if not parts:
            return cls.of([], [])
        columns = ([getattr(part, field.name) for part in parts] for field in fields(cls))
        return cls(*(np.concatenate(column) for column in columns))


# --- matching -----------------------------------------------------------------------------------

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


# --- the xView3 score ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class XView3Score:
    """The score and its parts, each from 0 to 1; None where there was nothing to measure it on."""

    loc_fscore: float | None
    loc_fscore_shore: float | None
    vessel_fscore: float | None
    fishing_fscore: float | None
    length_acc: float | None
    aggregate: float | None

    location: Counts
    shore: Counts | None
    """None where no shorelines were given."""
    vessel: Counts
    fishing: Counts
    lengths: int
    """Pairs whose true length is known."""

    def as_dict(self) -> dict[str, float | None]:
        """The keys that the official script writes."""
        names = [field.name for field in fields(self)][:6]
        return {name: getattr(self, name) for name in names}


def score_xview3(
    predicted: Objects,
    labels: Objects,
    rules: XView3Rules | None = None,
    shorelines: Shorelines | None = None,
) -> XView3Score:
    """Score predictions against labels, over all scenes of either.

    Without ``shorelines``, or with a ``shore_tolerance`` of 0, there is no shore F1.
    """
    rules = rules or XView3Rules()
    strict = rules.strict_official
    if strict:
        labels = labels[np.isin(labels.scene, predicted.scene)]
    if not rules.score_all:
        if rules.drop_low_detect:
            dropped, of_label = _match_scenes(predicted, labels, rules)
            low = labels.confidence[of_label] == LOW
            predicted = predicted[np.delete(np.arange(len(predicted)), dropped[low])]
        labels = labels[labels.confidence > LOW]
    if strict:
        predicted = predicted[np.isin(predicted.scene, labels.scene)]
        if empty := sorted({*labels.scene} - {*predicted.scene}):
            raise UsageError(
                f"--strict-official: no prediction is left in scene {empty[0]}, where the official "
                "script ends with an error; leave out --strict-official"
            )

    pairs = _match_scenes(predicted, labels, rules)
    location = _counts(pairs, predicted, labels)
    shore = None
    if shorelines is not None and rules.shore_tolerance:
        of = _official_shore if strict else _shore
        shore = of(predicted, labels, pairs, rules, shorelines)

    of_prediction, of_label = pairs
    true_vessel = labels.is_vessel[of_label]
    vessel = _classes(predicted.is_vessel[of_prediction], true_vessel, strict)
    known_vessel = true_vessel == YES
    fishing = _classes(
        predicted.is_fishing[of_prediction][known_vessel],
        labels.is_fishing[of_label][known_vessel],
        strict,
    )
    length_acc, lengths = _lengths(
        predicted.length_m[of_prediction], labels.length_m[of_label], strict
    )

    parts = [
        location.f1,
        shore.f1 if shore is not None else None,
        vessel.f1,
        fishing.f1,
        length_acc,
    ]
    if strict:
        parts = [part or 0.0 for part in parts]
    loc_fscore, loc_fscore_shore, vessel_fscore, fishing_fscore, length_acc = parts
    return XView3Score(
        loc_fscore,
        loc_fscore_shore,
        vessel_fscore,
        fishing_fscore,
        length_acc,
        _aggregate(parts),
        location,
        shore,
        vessel,
        fishing,
        lengths,
    )


def _aggregate(parts: Sequence[float | None]) -> float | None:
    location, *others = parts
    if location == 0:  # nothing was found, and whatever else there is to score counts for nothing
        return 0.0
    known = [part for part in others if part is not None]
    if location is None or len(known) < len(others):
        return None
    return location * (1 + sum(known)) / 5


def _match_scenes(predicted: Objects, labels: Objects, rules: XView3Rules) -> tuple[Indices, ...]:
    """Pairs within each scene, as indices into all predictions and all labels."""
    far: Literal["never", "costly", "as they are"] = "never"
    if rules.strict_official:
        far = "costly" if rules.costly_dist else "as they are"
    pairs: list[tuple[Indices, Indices]] = [(np.empty(0, np.intp), np.empty(0, np.intp))]
    for scene in np.intersect1d(predicted.scene, labels.scene):
        here, there = (np.flatnonzero(objects.scene == scene) for objects in (predicted, labels))
        rows, columns = match(
            predicted.points[here], labels.points[there], rules.distance_tolerance, far=far
        )
        pairs.append((here[rows], there[columns]))
    return tuple(np.concatenate(side) for side in zip(*pairs, strict=True))


def _counts(pairs: tuple[Indices, ...], predicted: Objects, labels: Objects) -> Counts:
    found = len(pairs[0])
    return Counts(found, len(predicted) - found, len(labels) - found)


def _shore(
    predicted: Objects,
    labels: Objects,
    pairs: tuple[Indices, ...],
    rules: XView3Rules,
    shorelines: Shorelines,
) -> Counts:
    """A pair is near the shore as its label is, and a stray as the shoreline has it."""
    of_prediction, of_label = pairs
    near = labels.shore_km <= rules.shore_tolerance
    found = int(near[of_label].sum())
    strays = predicted[np.delete(np.arange(len(predicted)), of_prediction)]
    false = 0
    for scene in np.unique(strays.scene):
        distance = _to_shore_km(strays.points[strays.scene == scene], scene, shorelines)
        false += int((distance <= rules.shore_tolerance).sum())
    return Counts(found, false, int(near.sum()) - found)


def _official_shore(
    predicted: Objects,
    labels: Objects,
    pairs: tuple[Indices, ...],
    rules: XView3Rules,
    shorelines: Shorelines,
) -> Counts:
    """Near labels and near predictions are matched anew, in the scenes that have both."""
    counts = Counts()
    reach_km = rules.shore_tolerance + rules.distance_tolerance / 1000
    for scene in np.unique(labels.scene):
        true = labels[(labels.scene == scene) & (labels.shore_km <= rules.shore_tolerance)]
        found = predicted[predicted.scene == scene]
        distance = _to_shore_km(found.points, scene, shorelines, itself=False)
        found = found[distance <= reach_km]
        if len(true) and len(found):
            counts += _counts(_match_scenes(found, true, rules), found, true)
    return counts


def _to_shore_km(
    points: NDArray[np.float64], scene: str, shorelines: Shorelines, *, itself: bool = True
) -> NDArray[np.float64]:
    """Distance of each point from the nearest vertex, infinite where the scene has no shore.

    Without ``itself`` a vertex that the point stands on is passed over.
    """
    contours = [contour for contour in shorelines(str(scene)) if len(contour)]
    if not contours or not len(points):
        return np.full(len(points), np.inf)
    cKDTree = require("scipy.spatial", "train").cKDTree
    vertices = np.unique(np.concatenate(contours), axis=0)
    distance, _ = cKDTree(vertices).query(points, k=[1, 2])
    if not itself:
        distance = np.where(distance == 0, np.inf, distance)
    nearest: NDArray[np.float64] = distance.min(axis=1) * PIXEL_M / 1000
    return nearest


def _classes(predicted: NDArray[np.int8], true: NDArray[np.int8], strict: bool) -> Counts:
    """Of the pairs whose class is known. A prediction that says nothing does not say yes; the
    official script takes it for the opposite of the truth."""
    predicted, true = predicted[true != UNKNOWN], true[true != UNKNOWN]
    says_yes = (predicted == YES) | ((predicted == UNKNOWN) & strict & (true == NO))
    return Counts(
        int((says_yes & (true == YES)).sum()),
        int((says_yes & (true == NO)).sum()),
        int((~says_yes & (true == YES)).sum()),
    )


def _lengths(
    predicted: NDArray[np.float64], true: NDArray[np.float64], strict: bool
) -> tuple[float | None, int]:
    """Accuracy of lengths, and of how many pairs."""
    known = ~np.isnan(true) if strict else true > 0
    predicted, true = predicted[known], true[known]
    if not len(true):
        return (0.0 if strict else None), 0
    predicted, true = np.minimum(predicted, LONGEST_M), np.minimum(true, LONGEST_M)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.abs(predicted - true) / true
    if not strict:
        error[np.isnan(predicted)] = 1.0
    return float(1.0 - np.minimum(error.mean(), 1.0)), len(true)


def best_threshold(
    predicted: Objects, labels: Objects, rules: XView3Rules | None = None, *, most: int = 64
) -> tuple[float, float]:
    """The least score worth keeping, and the localisation F1 that it gives; 0 and 0 where no
    score gives any.

    Tries at most ``most`` thresholds, which are scores of predictions. Choose it on scenes that are
    not the ones it is reported for.
    """
    rules = rules or XView3Rules()
    known = predicted.score[~np.isnan(predicted.score)]
    best = (0.0, 0.0)
    if not len(known):
        return best
    for threshold in np.unique(np.quantile(known, np.linspace(0, 1, most), method="nearest")):
        score = score_xview3(predicted[predicted.score >= threshold], labels, rules)
        if (score.loc_fscore or 0.0) > best[1]:
            best = (float(threshold), score.loc_fscore or 0.0)
    return best


# --- files --------------------------------------------------------------------------------------

PREDICTED_COLUMNS = (
    "detect_scene_row",
    "detect_scene_column",
    "scene_id",
    "is_vessel",
    "is_fishing",
    "vessel_length_m",
)
"""Of a submission. A further column ``score`` is read if it is there; others are passed over."""
NEEDED_OF_LABELS = (*PREDICTED_COLUMNS, "distance_from_shore_km", "confidence")
LABEL_COLUMNS = (
    "detect_lat detect_lon vessel_length_m source detect_scene_row detect_scene_column is_vessel "
    "is_fishing distance_from_shore_km scene_id confidence top left bottom right detect_id"
).split()

_TERNARY = {
    "true": YES, "1": YES, "1.0": YES,
    "false": NO, "0": NO, "0.0": NO,
    "": UNKNOWN, "nan": UNKNOWN, "none": UNKNOWN, "null": UNKNOWN,
}  # fmt: skip


def read_predictions(path: Path, name: str = "--inference-file") -> Objects:
    """A submission: CSV with `PREDICTED_COLUMNS`. Raises `UsageError` naming file and line."""
    return _read(path, name, PREDICTED_COLUMNS, known=None)


def read_labels(path: Path, name: str = "--label-file") -> Objects:
    """The labels of xView3: CSV with columns of `LABEL_COLUMNS`, of which those that the score
    needs must be there. Raises `UsageError` naming file and line."""
    return _read(path, name, NEEDED_OF_LABELS, known={*LABEL_COLUMNS, ""})


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
            scene = objects.scene[index]
            writer.writerow((float(row), float(column), scene, vessel, fishing, length, score))


def _read(path: Path, name: str, needed: Sequence[str], known: set[str] | None) -> Objects:
    where = f"{name} {path}"
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or ()
            if missing := [column for column in needed if column not in columns]:
                raise UsageError(f"{where} has no column {missing[0]}")
            if known is not None and (unknown := [c for c in columns if c not in known]):
                raise UsageError(f"{where} has a column {unknown[0]}, which xView3 does not know")
            rows = [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{where} is no CSV: {error}") from error

    def column(of: str, parse: Callable[[str], Any]) -> list[Any]:
        values = []
        for line, row in rows:
            text = (row.get(of) or "").strip()
            try:
                values.append(parse(text))
            except (ValueError, KeyError):
                raise UsageError(f"{where}, line {line}: {of} cannot be {text!r}") from None
        return values

    labelled = "confidence" in needed
    place = _place if labelled else _finite  # a detection may lie a little beyond the edge
    points = [column(of, place) for of in ("detect_scene_row", "detect_scene_column")]
    return Objects.of(
        column("scene_id", _named),
        np.transpose(points),
        is_vessel=column("is_vessel", lambda text: _TERNARY[text.lower()]),
        is_fishing=column("is_fishing", lambda text: _TERNARY[text.lower()]),
        length_m=column("vessel_length_m", _measure),
        confidence=column("confidence", lambda text: CONFIDENCE[text.upper()]) if labelled else -1,
        shore_km=column("distance_from_shore_km", _measure) if labelled else math.nan,
        score=math.nan if labelled else column("score", _measure),
    )


def _named(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError
    return value


def _place(text: str) -> float:
    if (value := _finite(text)) < 0:
        raise ValueError
    return value


def _measure(text: str) -> float:
    if (value := float(text) if text else math.nan) < 0 or math.isinf(value):
        raise ValueError
    return value


# --- average precision --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ImageResult:
    """What was found in one image, and what there was. Boxes are (n, 4): x0, y0, x1, y1."""

    image: int | str
    boxes: NDArray[np.float64]
    scores: NDArray[np.float64]
    labels: NDArray[np.int64]
    true_boxes: NDArray[np.float64]
    true_labels: NDArray[np.int64]


def distinct(results: Iterable[ImageResult]) -> list[ImageResult]:
    """One result of each image, in the order of the images.

    Ranks that share a data set pad their shares to one length with images of others, which would
    then count twice: https://github.com/pytorch/pytorch/issues/64905.
    """
    first: dict[int | str, ImageResult] = {}
    for result in results:
        first.setdefault(result.image, result)
    return [first[image] for image in sorted(first, key=lambda image: (str(type(image)), image))]


def coco_ap(results: Iterable[ImageResult], *, by_class: bool = True) -> dict[str, float | None]:
    """COCO's average precision of boxes, each image once; None where there was nothing to find.

    ``by_class`` is the mean over the classes; without it a box of any class finds any object.
    """
    images = distinct(results)
    nothing: dict[str, float | None] = dict.fromkeys(("AP", "AP50", "AP75", "AR100"))
    if not any(len(result.true_boxes) for result in images):
        return nothing
    if not any(len(result.boxes) for result in images):
        return dict.fromkeys(nothing, 0.0)
    module = require("faster_coco_eval", "train")

    truths: list[dict[str, Any]] = []
    found: list[dict[str, Any]] = []
    for number, result in enumerate(images, 1):
        for box, label in zip(result.true_boxes, result.true_labels, strict=True):
            truths.append(_entry(len(truths) + 1, number, box, label, by_class) | {"iscrowd": 0})
        for box, label, score in zip(result.boxes, result.labels, result.scores, strict=True):
            entry = _entry(len(found) + 1, number, box, label, by_class)
            found.append(entry | {"score": float(score)})
    classes = sorted({entry["category_id"] for entry in (*truths, *found)})
    document = {
        "images": [{"id": number} for number in range(1, len(images) + 1)],
        "annotations": truths,
        "categories": [{"id": label, "name": str(label)} for label in classes],
    }
    truth = module.COCO(document)
    evaluation = module.COCOeval_faster(truth, truth.loadRes(found), iouType="bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    stats = evaluation.stats
    values = {"AP": stats[0], "AP50": stats[1], "AP75": stats[2], "AR100": stats[8]}
    return {key: None if value < 0 else float(value) for key, value in values.items()}


def _entry(number: int, image: int, box: NDArray[Any], label: int, by_class: bool) -> Any:
    x0, y0, x1, y1 = (float(side) for side in box)
    return {
        "id": number,
        "image_id": image,
        "category_id": int(label) if by_class else 1,
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "area": (x1 - x0) * (y1 - y0),
    }
