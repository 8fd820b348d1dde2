"""The xView3 score, matching and average precision."""

from __future__ import annotations

import json
import math
import pickle
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from penstock.base.config.data import XView3Rules
from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.data.scenes.average_precision import ImageResult, coco_ap, distinct
from penstock.data.scenes.labels import read_labels
from penstock.data.scenes.matching import Counts, keep_strongest, match, more_pairs
from penstock.data.scenes.objects import Objects
from penstock.data.scenes.predictions import (
    PREDICTED_COLUMNS,
    read_predictions,
    write_predictions,
)
from penstock.data.scenes.shoreline import read_shoreline, shoreline_path, write_shoreline
from penstock.data.scenes.xview3_score import XView3Score, best_threshold, score_xview3

from ..places import SHARED

LOW, HIGH = 0, 2
ORACLE = SHARED / "xview3-metric-oracle"
needs_oracle = pytest.mark.skipif(not ORACLE.is_dir(), reason=f"{ORACLE} is absent")
SETTINGS = {
    "official": {"drop_low_detect": True, "costly_dist": True},
    "nocostly": {"drop_low_detect": True},
    "nodrop": {"costly_dist": True},
    "scoreall": {"score_all": True, "costly_dist": True},
}


def oracle_shore(scene: str) -> list[np.ndarray[Any, Any]]:
    return read_shoreline(shoreline_path(ORACLE, scene))


# --- the oracle: results of the official script -------------------------------------------------


@needs_oracle
@pytest.mark.parametrize("name", SETTINGS)
def test_strict_is_the_official_script_to_the_last_digits(name: str) -> None:
    rules = XView3Rules(strict_official=True, **SETTINGS[name])
    predicted = read_predictions(ORACLE / "pred.csv")
    labels = Objects.join(read_labels(ORACLE / "gt.csv").values())
    found = score_xview3(predicted, labels, rules, oracle_shore).as_dict()
    expected = json.loads((ORACLE / f"expected_{name}.json").read_text())
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=0, abs=1e-12)


@needs_oracle
def test_the_command_writes_the_official_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.json"
    files = f"--inference_file {ORACLE}/pred.csv --label-file {ORACLE}/gt.csv --shore_root {ORACLE}"
    flags = "--distance_tolerance 200 --shore_tolerance 2 --drop_low_detect --costly_dist"
    command = f"score xview3 {files} {flags} --strict-official --output {out}"
    assert main(command.split()) == 0
    expected = json.loads((ORACLE / "expected_official.json").read_text())
    assert json.loads(out.read_text()) == pytest.approx(expected, rel=0, abs=1e-12)
    assert "aggregate         0.5973" in capsys.readouterr().out


@needs_oracle
@pytest.mark.parametrize("drop_low_detect", [False, True])
def test_what_is_not_a_quirk_is_scored_alike(drop_low_detect: bool) -> None:
    """On the oracle only the shore differs: there, scenes that have one side only are skipped."""
    predicted = read_predictions(ORACLE / "pred.csv")
    labels = Objects.join(read_labels(ORACLE / "gt.csv").values())
    both = [
        score_xview3(
            predicted,
            labels,
            XView3Rules(strict_official=strict, costly_dist=True, drop_low_detect=drop_low_detect),
            oracle_shore,
        ).as_dict()
        for strict in (True, False)
    ]
    for key in ("loc_fscore", "vessel_fscore", "fishing_fscore", "length_acc"):
        assert both[0][key] == pytest.approx(both[1][key], abs=1e-12), key


# --- matching -----------------------------------------------------------------------------------

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


@given(
    *[
        hnp.arrays(np.float64, st.tuples(st.integers(0, most), st.just(2)),
                   elements=st.integers(0, 70))
        for most in (14, 9)
    ]
)  # fmt: skip
def test_pairs_are_counted_as_predictions_come(predicted: Any, true: Any) -> None:
    counts = np.cumsum(more_pairs(predicted, true, 200.0))
    for number, count in enumerate(counts, 1):
        assert count == len(match(predicted[:number], true, 200.0)[0])


def test_exactly_at_the_tolerance_is_not_near() -> None:
    here, at, under = (np.array([[0.0, column]]) for column in (0, 20, 19.999))
    assert [more_pairs(here, there, 200.0).item() for there in (at, under)] == [False, True]
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


# --- quirk by quirk -----------------------------------------------------------------------------

LINE = [np.array([[0.0, column] for column in range(0, 1000, 10)])]
"""A shoreline along row 0."""


def some_labels(scene: str = "a") -> Objects:
    """Two at the shore, two at sea, all HIGH."""
    return Objects.of(
        scene,
        [[50, 100], [60, 500], [700, 100], [800, 500]],
        is_vessel=[1, 1, 1, 0],
        is_fishing=[1, 0, -1, -1],
        length_m=[20.0, 100.0, 200.0, math.nan],
        confidence=HIGH,
        shore_km=[0.5, 0.6, 7.0, 8.0],
    )


def as_predictions(labels: Objects) -> Objects:
    return Objects.of(
        labels.scene,
        labels.points,
        is_vessel=labels.is_vessel,
        is_fishing=labels.is_fishing,
        length_m=np.nan_to_num(labels.length_m, nan=50.0),
        score=np.linspace(0.9, 0.6, len(labels)),
    )


def both_ways(predicted: Objects, labels: Objects, **rules: Any) -> list[XView3Score]:
    return [
        score_xview3(
            predicted, labels, XView3Rules(strict_official=strict, **rules), lambda scene: LINE
        )
        for strict in (True, False)
    ]


def test_perfect_predictions_score_one() -> None:
    labels = some_labels()
    ours = score_xview3(as_predictions(labels), labels, shorelines=lambda scene: LINE)
    assert ours.as_dict() == pytest.approx(dict.fromkeys(ours.as_dict(), 1.0), abs=1e-12)
    assert (ours.location, ours.shore) == (Counts(4, 0, 0), Counts(2, 0, 0))


def test_perfect_predictions_whose_column_and_shoreline_differ() -> None:
    """A label 2.1 km off by its column, 1.9 km by the shoreline: no stray at the shore."""
    labels = Objects.of("a", [[190, 100], [10, 700]], confidence=HIGH, shore_km=[2.1, 0.1])
    strict, ours = both_ways(as_predictions(labels), labels)
    assert strict.loc_fscore_shore == pytest.approx(2 / 3)
    assert ours.loc_fscore_shore == 1.0


def test_scenes_without_predictions_are_missed() -> None:
    labels = Objects.join([some_labels("a"), some_labels("b")])
    strict, ours = both_ways(as_predictions(some_labels("a")), labels)
    assert strict.location == Counts(4, 0, 0)
    assert ours.location == Counts(4, 0, 4)


def test_predictions_in_scenes_without_labels_are_false() -> None:
    predicted = as_predictions(Objects.join([some_labels("a"), some_labels("b")]))
    strict, ours = both_ways(predicted, some_labels("a"))
    assert strict.location == Counts(4, 0, 0)
    assert (ours.location, ours.shore) == (Counts(4, 4, 0), Counts(2, 2, 0))


def test_a_scene_with_one_side_at_the_shore_counts() -> None:
    labels = Objects.join([some_labels("a"), some_labels("b")])
    predicted = as_predictions(labels)
    predicted = predicted[(predicted.scene == "a") | (predicted.points[:, 0] > 600)]
    strict, ours = both_ways(predicted, labels)
    assert strict.shore == Counts(2, 0, 0)
    assert ours.shore == Counts(2, 0, 2)


def test_a_vertex_of_the_shoreline_is_near_it() -> None:
    lone = [np.array([[300.0, 300.0]])]
    labels = Objects.of("a", [[300, 310]], confidence=HIGH, shore_km=[0.1])
    predicted = Objects.of("a", [[300, 300], [300, 900]])
    counts = [
        score_xview3(
            predicted, labels, XView3Rules(strict_official=strict), lambda scene: lone
        ).shore
        for strict in (True, False)
    ]
    assert counts == [Counts(), Counts(1, 0, 0)]


def test_far_pairs_never_take_the_place_of_near_ones() -> None:
    """In a row, a label, 25 pixels on a prediction, 19 a label, 25 a prediction: the least total
    distance pairs the outer ones, both too far, and leaves the pair in the middle."""
    labels = Objects.of("a", [[0, 0], [0, 44]], confidence=HIGH)
    predicted = Objects.of("a", [[0, 25], [0, 69]])
    strict, ours = both_ways(predicted, labels)
    costly, _ = both_ways(predicted, labels, costly_dist=True)
    assert strict.location == Counts(0, 2, 2)
    assert ours.location == costly.location == Counts(1, 1, 1)


def test_a_scene_left_without_predictions() -> None:
    labels = Objects.of("a", [[9, 9], [500, 500]], confidence=[LOW, HIGH])
    predicted = Objects.of("a", [[9, 9]])
    ours = score_xview3(predicted, labels, XView3Rules(drop_low_detect=True))
    assert ours.location == Counts(0, 0, 1)
    with pytest.raises(UsageError, match="no prediction is left in scene a"):
        score_xview3(predicted, labels, XView3Rules(drop_low_detect=True, strict_official=True))


def test_low_labels() -> None:
    labels = Objects.of("a", [[9, 9], [500, 500]], confidence=[LOW, HIGH])
    predicted = Objects.of("a", [[9, 9], [500, 501]])
    found = {
        name: score_xview3(predicted, labels, XView3Rules(**rules)).location
        for name, rules in {
            "as it is": {},
            "dropped": {"drop_low_detect": True},
            "all": {"score_all": True},
        }.items()
    }
    assert found == {
        "as it is": Counts(1, 1, 0), "dropped": Counts(1, 0, 0), "all": Counts(2, 0, 0),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("predicted_m", "true_m", "strict", "ours"),
    [
        ([50.0], [100.0], 0.5, 0.5),
        ([600.0], [900.0], 1.0, 1.0),  # both count as 500
        ([400.0], [100.0], 0.0, 0.0),  # no less than nothing
        ([math.nan, 100.0], [100.0, 100.0], math.nan, 0.5),  # a missing length
        ([10.0, 100.0], [0.0, 100.0], 0.0, 1.0),  # a true length of nought
        ([10.0], [math.nan], 0.0, None),  # nothing to measure it on
    ],
)
def test_lengths(
    predicted_m: list[float], true_m: list[float], strict: float, ours: float | None
) -> None:
    points = np.arange(2.0 * len(true_m)).reshape(-1, 2) * 100
    labels = Objects.of("a", points, length_m=true_m, confidence=HIGH)
    predicted = Objects.of("a", points, length_m=predicted_m)
    found = [score.length_acc for score in both_ways(predicted, labels)]
    assert found == pytest.approx([strict, ours], nan_ok=True)


@pytest.mark.parametrize(
    ("predicted", "true", "strict", "ours"),
    [
        (1, 1, Counts(1, 0, 0), Counts(1, 0, 0)),
        (1, 0, Counts(0, 1, 0), Counts(0, 1, 0)),
        (0, 1, Counts(0, 0, 1), Counts(0, 0, 1)),
        (0, 0, Counts(), Counts()),
        (1, -1, Counts(), Counts()),
        (-1, 1, Counts(0, 0, 1), Counts(0, 0, 1)),
        (-1, 0, Counts(0, 1, 0), Counts()),  # saying nothing is not saying yes
    ],
)
def test_classes(predicted: int, true: int, strict: Counts, ours: Counts) -> None:
    labels = Objects.of("a", [[9, 9]], is_vessel=true, confidence=HIGH)
    scores = both_ways(Objects.of("a", [[9, 9]], is_vessel=predicted), labels)
    assert [score.vessel for score in scores] == [strict, ours]
    labels = Objects.of("a", [[9, 9]], is_vessel=1, is_fishing=true, confidence=HIGH)
    scores = both_ways(Objects.of("a", [[9, 9]], is_fishing=predicted), labels)
    assert [score.fishing for score in scores] == [strict, ours]
    labels = Objects.of("a", [[9, 9]], is_vessel=0, is_fishing=true, confidence=HIGH)
    scores = both_ways(Objects.of("a", [[9, 9]], is_fishing=predicted), labels)
    assert [score.fishing for score in scores] == [Counts(), Counts()]


def test_what_cannot_be_measured_is_null() -> None:
    labels = some_labels()
    ours = score_xview3(as_predictions(labels), labels)
    assert (ours.loc_fscore, ours.loc_fscore_shore, ours.aggregate) == (1.0, None, None)
    strict = score_xview3(as_predictions(labels), labels, XView3Rules(strict_official=True))
    assert (strict.loc_fscore_shore, strict.aggregate) == (0.0, pytest.approx(0.8))
    nothing = score_xview3(Objects.of([], []), labels)
    assert (nothing.loc_fscore, nothing.vessel_fscore, nothing.aggregate) == (0.0, None, 0.0)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_the_score_does_not_know_the_order_of_rows(seed: int, strict: bool) -> None:
    rng = np.random.default_rng(seed)

    def some(count: int, **columns: Any) -> Objects:
        return Objects.of(
            rng.choice(["a", "b", "c"], count),
            rng.uniform(0, 200, (count, 2)),
            is_vessel=rng.integers(-1, 2, count),
            is_fishing=rng.integers(-1, 2, count),
            length_m=rng.uniform(10, 300, count),
            **columns,
        )

    true = some(30, confidence=rng.integers(1, 3, 30), shore_km=rng.uniform(0, 4, 30))
    found = some(40)
    rules = XView3Rules(strict_official=strict, costly_dist=True)
    one = score_xview3(found, true, rules, lambda scene: LINE).as_dict()
    mixed = found[rng.permutation(40)], true[rng.permutation(30)]
    assert score_xview3(*mixed, rules, lambda scene: LINE).as_dict() == pytest.approx(one)


def test_the_best_threshold_leaves_the_strays() -> None:
    labels = some_labels()
    right = as_predictions(labels)
    strays = Objects.of("a", [[300, 300], [400, 300]], score=[0.3, 0.59])
    threshold, f1 = best_threshold(Objects.join([strays, right]), labels)
    assert (threshold, f1) == (0.6, 1.0)
    assert best_threshold(Objects.of([], []), labels) == (0.0, 0.0)


def test_the_best_threshold_is_found_among_thousands_of_strays() -> None:
    """Of 64 quantiles of these scores the strongest leaves 1 detection, and the next 128."""
    rng = np.random.default_rng(0)
    places = rng.permutation(90_000)[:8050]
    points = 40.0 * np.stack([places // 300, places % 300], axis=1)
    scores = np.concatenate([rng.uniform(0.8, 0.9, 50), rng.uniform(0.1, 0.8, 8000)])
    labels = Objects.of("a", points[:50], confidence=HIGH)
    found = Objects.of("a", points, score=scores)
    assert best_threshold(found, labels) == (scores[:50].min(), 1.0)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ab"), st.booleans()), max_size=12),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 9)), max_size=14),
    st.booleans(),
)
def test_the_score_that_promises_most_is_the_best(
    true: list[Any], found: list[Any], drop: bool
) -> None:
    """All others were tried. Places are of one or several labels, all LOW there or none."""
    low = {(place, scene) for place, scene, is_low in true if is_low}
    labels = Objects.of(
        np.array([scene for _, scene, _ in true], np.str_),
        [[100.0 * place, 5 * number] for number, (place, _, _) in enumerate(true)],
        confidence=[LOW if (place, scene) in low else HIGH for place, scene, _ in true],
    )
    predicted = Objects.of(
        np.array(["ab"[at % 2] for _, at, _ in found], np.str_),
        [[100.0 * place + at, 20 * at] for place, at, _ in found],
        score=[score / 10 for *_, score in found],
    )
    rules = XView3Rules(drop_low_detect=drop)
    tried = [
        score_xview3(predicted[predicted.score >= least], labels, rules).loc_fscore or 0.0
        for least in np.unique(predicted.score)
    ]
    threshold, f1 = best_threshold(predicted, labels, rules, most=1)
    assert f1 == max(tried, default=0.0)
    if f1:
        kept = predicted[predicted.score >= threshold]
        assert score_xview3(kept, labels, rules).loc_fscore == f1


# --- files --------------------------------------------------------------------------------------

HEADER = ",".join([*PREDICTED_COLUMNS, "distance_from_shore_km", "confidence"])


def test_predictions_come_back(tmp_path: Path) -> None:
    labels = some_labels()
    predicted = Objects.of(
        labels.scene, labels.points + 0.25, is_vessel=[1, 0, -1, 1], is_fishing=[0, 1, -1, 0],
        length_m=[1 / 3, math.nan, 2, 3], score=[0.1, 0.2, math.nan, 1],
    )  # fmt: skip
    write_predictions(tmp_path / "p.csv", predicted)
    back = read_predictions(tmp_path / "p.csv")
    for column in Objects.__slots__:
        np.testing.assert_array_equal(getattr(back, column), getattr(predicted, column))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scene_id\na\n", "has no column detect_scene_row"),
        (f"{HEADER},speed\n", "has a column 'speed', which labels do not have"),
        (
            f"{HEADER}\n1,2,a,maybe,,,1,HIGH\n",
            "line 2: is_vessel: 'maybe' may be True, False or empty",
        ),
        (
            f"{HEADER}\n1,2,a,True,,,1,HIGH\n1,2,a,,,,1,SURE\n",
            "line 3: confidence is 'SURE'; it may be LOW, MEDIUM, HIGH",
        ),
        (f"{HEADER}\nnan,2,a,True,,,1,HIGH\n", "line 2: detect_scene_row is 'nan', no number"),
        (
            f"{HEADER}\n1,-2,a,True,,,1,HIGH\n",
            "line 2: detect_scene_column is '-2', which is outside of any scene",
        ),
        (f"{HEADER}\n1,2,,True,,,1,HIGH\n", "line 2: scene_id is empty"),
        (
            f"{HEADER}\n1,2,a,True,,-5,1,HIGH\n",
            "line 2: vessel_length_m is '-5', less than nothing",
        ),
        (f"{HEADER}\n", "holds no labels to score against"),
    ],
)
def test_what_is_wrong_with_labels_is_said_in_one_sentence(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels, predicted = tmp_path / "labels.csv", tmp_path / "p.csv"
    labels.write_text(text)
    write_predictions(predicted, as_predictions(some_labels()))
    command = ["score", "xview3", "--inference_file", str(predicted), "--label_file", str(labels)]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert message in error and str(labels) in error
    assert len(error.splitlines()) == 1


def test_the_command_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    predicted, labels, out = tmp_path / "p.csv", tmp_path / "labels.csv", tmp_path / "out.json"
    write_predictions(predicted, as_predictions(some_labels()))
    labels.write_text(f"{HEADER}\n50,100,a,True,True,20,0.5,HIGH\n")
    command = ["score", "xview3", "--inference_file", str(predicted), "--label_file", str(labels)]
    assert main([*command, "--output", str(out)]) == 0
    assert "There is no aggregate: the shore F1 needs --shore-root" in capsys.readouterr().out
    assert json.loads(out.read_text())["aggregate"] is None
    assert main([*command, "--scene_id", "b"]) == 2
    assert "--scene-id b: there is no such scene" in capsys.readouterr().err
    assert main([*command, "--shore_root", str(tmp_path)]) == 2
    assert "a_shoreline.npy: No such file" in capsys.readouterr().err


# --- shorelines ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(), (3,), (3, 5), (4, 4)])
def test_shorelines_come_back(lengths: tuple[int, ...], tmp_path: Path) -> None:
    contours = [np.arange(2.0 * n).reshape(n, 2) for n in lengths]
    write_shoreline(tmp_path / "s.npy", contours)
    for path in (tmp_path / "s.npy", tmp_path / "plain.npy"):
        if path.name == "plain.npy":
            if len(set(lengths)) != 1:
                return
            np.save(path, np.array(contours))
        back = read_shoreline(path)
        assert [c.tolist() for c in back] == [c.tolist() for c in contours]
    assert len(np.load(tmp_path / "s.npy", allow_pickle=True)) == len(lengths), "as numpy has it"


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("evil"),))


def test_a_shoreline_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    array = np.empty(1, object)
    array[0] = Evil()
    np.save(tmp_path / "s.npy", array, allow_pickle=True)
    with pytest.raises(UsageError, match=r"s\.npy cannot be read: it holds .*, which is no array"):
        read_shoreline(tmp_path / "s.npy")
    assert not Path("evil").exists()


@pytest.mark.parametrize("damage", ["cut", "text", "shape", "pickle"])
def test_a_damaged_shoreline_is_named(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "s.npy"
    write_shoreline(path, [np.zeros((9, 2))])
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    elif damage == "text":
        path.write_text("no array at all")
    elif damage == "shape":
        write_shoreline(path, [np.zeros((9, 3))])
    else:
        path.write_bytes(pickle.dumps([1, 2]))
    with pytest.raises(UsageError, match=r"shoreline .*s\.npy"):
        read_shoreline(path)


# --- average precision --------------------------------------------------------------------------


def slow_ap(results: list[ImageResult], threshold: float) -> float:
    """Average precision of one class at one overlap, by its definition: 101 recalls."""

    def overlap(a: Any, b: Any) -> float:
        width = min(a[2], b[2]) - max(a[0], b[0])
        height = min(a[3], b[3]) - max(a[1], b[1])
        shared = max(width, 0) * max(height, 0)
        areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (a, b)]
        return shared / (sum(areas) - shared)

    marks = []
    for result in results:
        free = set(range(len(result.true_boxes)))
        for index in np.argsort(-result.scores, kind="stable"):
            near = [(overlap(result.boxes[index], result.true_boxes[j]), j) for j in free]
            best = max(near, default=(0.0, -1))
            if best[0] >= threshold:
                free.discard(best[1])
            marks.append((result.scores[index], best[0] >= threshold))
    marks.sort(key=lambda mark: -mark[0])
    right = np.cumsum([hit for _, hit in marks])
    precision = right / np.arange(1, len(marks) + 1)
    recall = right / sum(len(result.true_boxes) for result in results)
    at = [precision[recall >= level] for level in np.linspace(0, 1, 101)]
    return float(np.mean([of.max() if len(of) else 0.0 for of in at]))


def some_results(seed: int, images: int = 6, classes: int = 1) -> list[ImageResult]:
    rng = np.random.default_rng(seed)
    results = []
    for image in range(images):
        count = int(rng.integers(1, 6))
        corner = rng.uniform(0, 200, (count, 2))
        true = np.concatenate((corner, corner + rng.uniform(10, 20, (count, 2))), 1)
        labels = rng.integers(1, classes + 1, count)
        boxes = np.concatenate((true + rng.normal(0, 1.5, true.shape), true[:1] + 50))
        found = np.append(labels, 1)
        results.append(ImageResult(image, boxes, rng.random(count + 1), found, true, labels))
    return results


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_coco_ap_is_the_area_under_the_curve(seed: int) -> None:
    results = some_results(seed)
    found = coco_ap(results)
    by_hand = [slow_ap(results, threshold) for threshold in np.arange(0.5, 1.0, 0.05)]
    assert found["AP50"] == pytest.approx(by_hand[0], abs=1e-9)
    assert found["AP75"] == pytest.approx(by_hand[5], abs=1e-9)
    assert found["AP"] == pytest.approx(np.mean(by_hand), abs=1e-9)


def test_images_that_two_ranks_saw_count_once() -> None:
    results = some_results(3, images=7)
    ranks = [results[0::2], results[1::2] + results[:1]]  # padded to one length
    gathered = [result for rank in ranks for result in rank]
    assert [result.image for result in distinct(gathered)] == list(range(7))
    assert coco_ap(gathered) == coco_ap(results)


def test_coco_ap_by_class_and_of_any() -> None:
    results = some_results(5, classes=3)
    wrong = [
        ImageResult(r.image, r.true_boxes, np.ones(len(r.true_boxes)), r.true_labels + 1,
                    r.true_boxes, r.true_labels)
        for r in results
    ]  # fmt: skip
    assert coco_ap(wrong)["AP"] == 0
    assert coco_ap(wrong, by_class=False)["AP"] == pytest.approx(1.0)


def test_coco_ap_of_nothing() -> None:
    none = np.zeros((0, 4)), np.zeros(0), np.zeros(0, np.int64)
    one = np.array([[1.0, 1, 9, 9]]), np.array([1])
    assert coco_ap([]) == coco_ap([ImageResult(0, one[0], np.ones(1), one[1], *none[::2])])
    assert set(coco_ap([]).values()) == {None}
    assert set(coco_ap([ImageResult(0, *none, *one)]).values()) == {0.0}
