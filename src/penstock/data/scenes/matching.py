"""Points matched by distance, and counted.

A pair is one prediction and one label closer than the tolerance, each in one pair at most. Pairs
are chosen so that there are as many as possible, and of such choices the one with the smallest sum
of distances.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ...base import require
from .scene import PIXEL_M

Indices = NDArray[np.intp]


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


def keep_strongest(
    points: NDArray[np.float64], scores: NDArray[np.float64], radius: float
) -> Indices:
    """Points without those that lie near a stronger one. An object that two overlapping chips
    detected is kept once.

    Args:
        points: rows and columns, shape (n, 2).
        scores: the strength of each point, shape (n,).
        radius: points closer than this to a stronger one that is kept are left out.

    Returns:
        Indices of the points that are kept, strongest first.

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
