"""Points matched by distance, against every assignment."""

from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.data.scenes.detections import keep_strongest
from penstock.data.scenes.xview3_score import Counts, match

coordinates = hnp.arrays(
    np.float64, st.tuples(st.integers(0, 4), st.just(2)), elements=st.integers(0, 60)
)


def best_by_trial(predicted: Any, true: Any, tolerance: float) -> tuple[int, float]:
    """The most pairs and their least total distance, by trying every assignment."""
    swap = len(predicted) > len(true)
    few, many = (true, predicted) if swap else (predicted, true)
    best = (0, 0.0)
    for choice in permutations(range(len(many)), len(few)):
        distances = [float(np.hypot(*(few[i] - many[j]))) * 10 for i, j in enumerate(choice)]
        near = [distance for distance in distances if distance < tolerance]
        best = min(best, (-len(near), sum(near)))
    return -best[0], best[1]


@given(coordinates, coordinates)
def test_a_matching_has_the_most_pairs_and_the_least_distance(predicted: Any, true: Any) -> None:
    rows, columns = match(predicted, true, 200.0)
    assert len({*rows.tolist()}) == len({*columns.tolist()}) == len(rows)
    distance = np.linalg.norm(predicted[rows] - true[columns], axis=1) * 10
    assert (distance < 200).all()
    pairs, total = best_by_trial(predicted, true, 200.0)
    assert (len(rows), distance.sum()) == (pairs, pytest.approx(total, abs=1e-6))


def test_exactly_at_the_tolerance_is_not_near() -> None:
    here, at, under = (np.array([[0.0, column]]) for column in (0, 20, 19.999))
    for far in ("never", "costly", "as they are"):
        assert len(match(here, at, 200.0, far=far)[0]) == 0
        assert len(match(here, under, 200.0, far=far)[0]) == 1


@given(
    hnp.arrays(np.float64, st.tuples(st.integers(0, 12), st.just(2)), elements=st.integers(0, 30)),
    st.integers(0, 9),
)
def test_the_strongest_are_kept_and_stand_apart(points: Any, radius: int) -> None:
    scores = np.random.default_rng(len(points)).random(len(points))
    kept: list[int] = []
    for index in np.argsort(-scores):
        if all(np.hypot(*(points[index] - points[other])) > radius for other in kept):
            kept.append(int(index))
    assert keep_strongest(points, scores, radius).tolist() == kept


def test_counts_add_up() -> None:
    total = Counts(3, 1, 0) + Counts(1, 0, 1)
    assert total == Counts(4, 1, 1)
    assert total.f1 == pytest.approx(0.8)
    assert Counts(0, 2, 0).f1 == 0
    assert Counts().f1 is None
