"""The xView3 score: the official script's to the last digits, and quirk by quirk."""

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base import UsageError, XView3Rules
from penstock.cli import main
from penstock.data import Objects, read_labels, read_predictions, read_shoreline, shoreline_path
from penstock.data.scenes.xview3_score import Counts, XView3Score, best_threshold, score_xview3

from ..places import SHARED
from .kit import HIGH, LOW, as_predictions, some_labels

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


@needs_oracle
@pytest.mark.parametrize("name", SETTINGS)
def test_strict_is_the_official_script_to_the_last_digits(name: str) -> None:
    rules = XView3Rules(strict_official=True, **SETTINGS[name])
    predicted = read_predictions(ORACLE / "pred.csv")
    labels = Objects.join(read_labels(ORACLE / "gt.csv").values())
    scores = score_xview3(predicted, labels, rules, oracle_shore).as_dict()
    expected = json.loads((ORACLE / f"expected_{name}.json").read_text())
    assert list(scores) == list(expected)
    assert scores == pytest.approx(expected, rel=0, abs=1e-12)


@needs_oracle
def test_the_command_writes_the_official_keys(tmp_path, capsys) -> None:
    out = tmp_path / "scores.json"
    files = f"--inference_file {ORACLE}/pred.csv --label-file {ORACLE}/gt.csv --shore_root {ORACLE}"
    flags = "--distance_tolerance 200 --shore_tolerance 2 --drop_low_detect --costly_dist"
    command = f"score xview3 {files} {flags} --strict-official --output {out}"
    assert main(command.split()) == 0
    expected = json.loads((ORACLE / "expected_official.json").read_text())
    assert json.loads(out.read_text()) == pytest.approx(expected, rel=0, abs=1e-12)
    assert "aggregate         0.5973" in capsys.readouterr().out


LINE = [np.array([[0.0, column] for column in range(0, 1000, 10)])]
"""A shoreline along row 0."""


LONE = [np.array([[300.0, 300.0]])]


def both_ways(
    predicted: Objects, labels: Objects, shore: Any = LINE, **rules: Any
) -> list[XView3Score]:
    return [
        score_xview3(
            predicted, labels, XView3Rules(strict_official=strict, **rules), lambda scene: shore
        )
        for strict in (True, False)
    ]


def test_perfect_predictions_score_one() -> None:
    labels = some_labels()
    ours = score_xview3(as_predictions(labels), labels, shorelines=lambda scene: LINE)
    assert ours.as_dict() == pytest.approx(dict.fromkeys(ours.as_dict(), 1.0), abs=1e-12)
    assert (ours.location, ours.shore) == (Counts(4, 0, 0), Counts(2, 0, 0))


TWO = Objects.join([some_labels("a"), some_labels("b")])
AT_SHORE = as_predictions(TWO)
SHORE_OF_A = AT_SHORE[(AT_SHORE.scene == "a") | (AT_SHORE.points[:, 0] > 600)]
BY_COLUMN = Objects.of("a", [[190, 100], [10, 700]], confidence=HIGH, shore_km=[2.1, 0.1])
ON_VERTEX = Objects.of("a", [[300, 310]], confidence=HIGH, shore_km=[0.1])
IN_ROW = Objects.of("a", [[0, 0], [0, 44]], confidence=HIGH)
"""Label, 25 pixels on a prediction, 19 on a label, 25 on a prediction: the least total distance
pairs the outer ones, both too far, and leaves the pair in the middle."""
QUIRKS: dict[str, tuple[Objects, Objects, str, Counts, Counts]] = {
    "scenes without predictions are missed": (
        as_predictions(some_labels("a")), TWO, "location", Counts(4, 0, 0), Counts(4, 0, 4)),
    "predictions in scenes without labels are false": (
        AT_SHORE, some_labels("a"), "location", Counts(4, 0, 0), Counts(4, 4, 0)),
    "and false at the shore": (
        AT_SHORE, some_labels("a"), "shore", Counts(2, 0, 0), Counts(2, 2, 0)),
    "a scene with one side at the shore counts": (
        SHORE_OF_A, TWO, "shore", Counts(2, 0, 0), Counts(2, 0, 2)),
    "2.1 km off by its column, 1.9 km by the shoreline: no stray": (
        as_predictions(BY_COLUMN), BY_COLUMN, "shore", Counts(1, 1, 0), Counts(1, 0, 0)),
    "a vertex of the shoreline is near it": (
        Objects.of("a", [[300, 300], [300, 900]]), ON_VERTEX, "shore", Counts(), Counts(1, 0, 0)),
    "far pairs never take the place of near ones": (
        Objects.of("a", [[0, 25], [0, 69]]), IN_ROW, "location", Counts(0, 2, 2), Counts(1, 1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("quirk", QUIRKS)
def test_quirks_of_the_official_script_are_repaired(quirk: str) -> None:
    predicted, labels, part, strict, ours = QUIRKS[quirk]
    shore = LONE if "vertex" in quirk else LINE
    both = both_ways(predicted, labels, shore)
    assert [getattr(score, part) for score in both] == [strict, ours]
    if labels is IN_ROW:
        assert both_ways(predicted, labels, costly_dist=True)[0].location == ours


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
    scores = {
        name: score_xview3(predicted, labels, XView3Rules(**rules)).location
        for name, rules in {
            "as it is": {},
            "dropped": {"drop_low_detect": True},
            "all": {"score_all": True},
        }.items()
    }
    assert scores == {
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
def test_lengths(predicted_m, true_m, strict, ours) -> None:
    points = np.arange(2.0 * len(true_m)).reshape(-1, 2) * 100
    labels = Objects.of("a", points, length_m=true_m, confidence=HIGH)
    predicted = Objects.of("a", points, length_m=predicted_m)
    accuracies = [score.length_acc for score in both_ways(predicted, labels)]
    assert accuracies == pytest.approx([strict, ours], nan_ok=True)


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
    predicted = some(40)
    rules = XView3Rules(strict_official=strict, costly_dist=True)
    one = score_xview3(predicted, true, rules, lambda scene: LINE).as_dict()
    mixed = predicted[rng.permutation(40)], true[rng.permutation(30)]
    assert score_xview3(*mixed, rules, lambda scene: LINE).as_dict() == pytest.approx(one)


def test_the_best_threshold_is_found_among_thousands_of_strays() -> None:
    """Of 64 quantiles of these scores the strongest leaves 1 detection, and the next 128."""
    rng = np.random.default_rng(0)
    places = rng.permutation(90_000)[:8050]
    points = 40.0 * np.stack([places // 300, places % 300], axis=1)
    scores = np.concatenate([rng.uniform(0.8, 0.9, 50), rng.uniform(0.1, 0.8, 8000)])
    labels = Objects.of("a", points[:50], confidence=HIGH)
    predicted = Objects.of("a", points, score=scores)
    assert best_threshold(predicted, labels) == (scores[:50].min(), 1.0)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ab"), st.booleans()), max_size=12),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 9)), max_size=14),
    st.booleans(),
)
def test_the_best_threshold_is_taken(true: list[Any], answers: list[Any], drop: bool) -> None:
    """All others were tried. Places are of one or several labels, all LOW there or none."""
    low = {(place, scene) for place, scene, is_low in true if is_low}
    labels = Objects.of(
        np.array([scene for _, scene, _ in true], np.str_),
        [[100.0 * place, 5 * number] for number, (place, _, _) in enumerate(true)],
        confidence=[LOW if (place, scene) in low else HIGH for place, scene, _ in true],
    )
    predicted = Objects.of(
        np.array(["ab"[at % 2] for _, at, _ in answers], np.str_),
        [[100.0 * place + at, 20 * at] for place, at, _ in answers],
        score=[score / 10 for *_, score in answers],
    )
    rules = XView3Rules(drop_low_detect=drop)
    tried = [
        score_xview3(predicted[predicted.score >= least], labels, rules).loc_fscore or 0.0
        for least in np.unique(predicted.score)
    ]
    threshold, f1 = best_threshold(predicted, labels, rules)
    assert f1 == max(tried, default=0.0)
    if f1:
        kept = predicted[predicted.score >= threshold]
        assert score_xview3(kept, labels, rules).loc_fscore == f1
