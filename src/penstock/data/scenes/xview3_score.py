"""The score of the xView3 challenge.

    predictions ─┐                        ┌ localisation F1      every pair, stray and miss
                 ├─ match, scene by scene ─┼ shore F1             those within 2 km of the shore
    labels ──────┘   pairs under 200 m    ├ vessel F1, fishing F1    the classes of the pairs
                                          └ length accuracy      the lengths of the pairs

    aggregate = localisation x (1 + shore + vessel + fishing + length) / 5

A pair is one prediction and one label closer than the tolerance, each in one pair at most. Pairs
are chosen so that there are as many as possible, and of such choices the one with the smallest sum
of distances.

``strict_official`` gives the numbers of the official script of the xView3 challenge to the last
digits. By default their quirks are repaired:

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, XView3Rules, require
from .objects import LOW, NO, UNKNOWN, YES, Objects
from .scene import PIXEL_M

LONGEST_M = 500.0
"""Lengths above it count as this much; the longest ship ever built was 458 m."""

Shorelines = Callable[[str], Sequence[NDArray[np.float64]]]
"""The contours of a scene by its id; see `penstock.data.scenes.shoreline.read_shoreline`."""


Indices = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Counts:
    """True positives, false positives and false negatives. They add up over scenes and ranks."""

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
        """The F1 score; None where there was nothing to find and nothing was found."""
        all_of_both = 2 * self.true_positive + self.false_positive + self.false_negative
        return 2 * self.true_positive / all_of_both if all_of_both else None


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
        """The scores by the keys that the official script writes."""
        return {
            "loc_fscore": self.loc_fscore,
            "loc_fscore_shore": self.loc_fscore_shore,
            "vessel_fscore": self.vessel_fscore,
            "fishing_fscore": self.fishing_fscore,
            "length_acc": self.length_acc,
            "aggregate": self.aggregate,
        }


def score_xview3(
    predicted: Objects,
    labels: Objects,
    rules: XView3Rules | None = None,
    shorelines: Shorelines | None = None,
) -> XView3Score:
    """Score predictions against labels, over all scenes of either.

    Source: the xView3 challenge, https://iuu.xview.us.

    Args:
        predicted: the predictions.
        labels: the labels.
        rules: how to score.
        shorelines: gives the contours of a scene. Without it, or with a ``shore_tolerance`` of 0,
            there is no shore F1.

    Returns:
        The score and its parts, each from 0 to 1.

    Raises:
        UsageError: the official script would end with an error, and ``strict_official`` is set.
    """
    rules = rules or XView3Rules()
    strict = rules.strict_official
    predicted, labels = _kept(predicted, labels, rules)
    pairs = _match_scenes(predicted, labels, rules)
    location = _counts(pairs, predicted, labels)
    shore = None
    if shorelines is not None and rules.shore_tolerance:
        if strict:
            shore = _official_shore(predicted, labels, rules, shorelines)
        else:
            shore = _shore(predicted, labels, pairs, rules, shorelines)

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
    parts: dict[str, Any] = {
        "loc_fscore": location.f1,
        "loc_fscore_shore": None if shore is None else shore.f1,
        "vessel_fscore": vessel.f1,
        "fishing_fscore": fishing.f1,
        "length_acc": length_acc,
    }
    if strict:
        parts = {name: part or 0.0 for name, part in parts.items()}
    parts["aggregate"] = _aggregate([*parts.values()])
    return XView3Score(
        **parts, location=location, shore=shore, vessel=vessel, fishing=fishing, lengths=lengths
    )


def _kept(predicted: Objects, labels: Objects, rules: XView3Rules) -> tuple[Objects, Objects]:
    """The predictions and the labels that are scored."""
    if rules.strict_official:
        labels = labels[np.isin(labels.scene, predicted.scene)]
    if not rules.score_all:
        if rules.drop_low_detect:
            dropped, of_label = _match_scenes(predicted, labels, rules)
            low = labels.confidence[of_label] == LOW
            predicted = predicted[np.delete(np.arange(len(predicted)), dropped[low])]
        labels = labels[labels.confidence > LOW]
    if rules.strict_official:
        predicted = predicted[np.isin(predicted.scene, labels.scene)]
        if empty := sorted({*labels.scene} - {*predicted.scene}):
            raise UsageError(
                f"--strict-official: no prediction is left in scene {empty[0]}, where the official "
                "script ends with an error; leave out --strict-official"
            )
    return predicted, labels


def _aggregate(parts: Sequence[float | None]) -> float | None:
    location, *others = parts
    if location == 0:  # nothing was found, so no other part of the score counts
        return 0.0
    measured = [part for part in others if part is not None]
    if location is None or len(measured) < len(others):
        return None
    return location * (1 + sum(measured)) / 5


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
    right = len(pairs[0])
    return Counts(right, len(predicted) - right, len(labels) - right)


def _shore(
    predicted: Objects,
    labels: Objects,
    pairs: tuple[Indices, ...],
    rules: XView3Rules,
    shorelines: Shorelines,
) -> Counts:
    """A pair is near the shore where its label is, a stray prediction where the shoreline is."""
    of_prediction, of_label = pairs
    near = labels.shore_km <= rules.shore_tolerance
    right = int(near[of_label].sum())
    strays = predicted[np.delete(np.arange(len(predicted)), of_prediction)]
    false = 0
    for scene in np.unique(strays.scene):
        distance = _to_shore_km(strays.points[strays.scene == scene], scene, shorelines)
        false += int((distance <= rules.shore_tolerance).sum())
    return Counts(right, false, int(near.sum()) - right)


def _official_shore(
    predicted: Objects,
    labels: Objects,
    rules: XView3Rules,
    shorelines: Shorelines,
) -> Counts:
    """Labels and predictions near the shore are matched anew, in scenes that have both."""
    counts = Counts()
    reach_km = rules.shore_tolerance + rules.distance_tolerance / 1000
    for scene in np.unique(labels.scene):
        true = labels[(labels.scene == scene) & (labels.shore_km <= rules.shore_tolerance)]
        here = predicted[predicted.scene == scene]
        distance = _to_shore_km(here.points, scene, shorelines, itself=False)
        here = here[distance <= reach_km]
        if len(true) and len(here):
            counts += _counts(_match_scenes(here, true, rules), here, true)
    return counts


def _to_shore_km(
    points: NDArray[np.float64], scene: str, shorelines: Shorelines, *, itself: bool = True
) -> NDArray[np.float64]:
    """The distance of each point from the nearest vertex, infinite where the scene has no shore.

    Without ``itself``, a vertex that the point stands on does not count.
    """
    contours = [contour for contour in shorelines(str(scene)) if len(contour)]
    if not contours or not len(points):
        return np.full(len(points), np.inf)
    cKDTree = require("scipy.spatial", "train").cKDTree
    vertices = np.unique(np.concatenate(contours), axis=0)
    distance, _ = cKDTree(vertices).query(points, k=[1, 2])
    if not itself:
        distance = np.where(distance == 0, np.inf, distance)
    return distance.min(axis=1) * PIXEL_M / 1000


def _classes(predicted: NDArray[np.int8], true: NDArray[np.int8], strict: bool) -> Counts:
    """Counts over the pairs whose true class is known. A prediction without a class is not a yes;
    the official script takes it for the opposite of the truth."""
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
    """The accuracy of lengths, and the number of pairs that it is measured on."""
    measured = ~np.isnan(true) if strict else true > 0
    predicted, true = predicted[measured], true[measured]
    if not len(true):
        return (0.0 if strict else None), 0
    predicted, true = np.minimum(predicted, LONGEST_M), np.minimum(true, LONGEST_M)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.abs(predicted - true) / true
    if not strict:
        error[np.isnan(predicted)] = 1.0
    return float(1.0 - np.minimum(error.mean(), 1.0)), len(true)


def best_threshold(
    predicted: Objects, labels: Objects, rules: XView3Rules | None = None
) -> tuple[float, float]:
    """The threshold of scores with the best localisation F1. Choose it on other scenes than those
    that you report.

    Some 48 thresholds are tried, the strongest ones densely, and then 16 around the best of them.

    Args:
        predicted: predictions with scores.
        labels: the labels of their scenes.
        rules: how to score.

    Returns:
        The threshold and the localisation F1 that it gives; 0 and 0 where none gives any.
    """
    scores = np.unique(predicted.score[~np.isnan(predicted.score)])[::-1]
    tried = {-1: 0.0}
    ranks = np.geomspace(1, max(len(scores), 1), 48).astype(int) - 1
    for _ in range(2):
        for rank in {*ranks.tolist()} & {*range(len(scores))}:
            kept = predicted[predicted.score >= scores[rank]]
            tried[rank] = score_xview3(kept, labels, rules).loc_fscore or 0.0
        best = max(tried, key=lambda rank: tried[rank])
        low = max((rank for rank in tried if rank < best), default=best)
        high = min((rank for rank in tried if rank > best), default=best)
        ranks = np.linspace(low, high, 18).astype(int)
    return (float(scores[best]), tried[best]) if tried[best] else (0.0, 0.0)


def match(
    predicted: NDArray[np.float64],
    true: NDArray[np.float64],
    tolerance_m: float,
    *,
    far: Literal["never", "costly", "as they are"] = "never",
) -> tuple[Indices, Indices]:
    """Pairs of predicted and true points, closer than the tolerance, as indices into each.

    ``far`` is the cost of pairs beyond the tolerance while the best assignment is sought. With
    ``never`` they never displace a pair within it; ``costly`` and ``as they are`` are the official
    script's, with and without ``costly_dist``.

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
