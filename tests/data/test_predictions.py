"""Files of a score: predictions, labels, shorelines."""

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import UsageError
from penstock.cli import main
from penstock.data.scenes.objects import (
    PREDICTED_COLUMNS,
    Objects,
    read_predictions,
    write_predictions,
)
from penstock.data.scenes.shoreline import read_shoreline, write_shoreline

from .kit import as_predictions, some_labels

HEADER = ",".join([*PREDICTED_COLUMNS, "distance_from_shore_km", "confidence"])


def test_predictions_come_back(tmp_path) -> None:
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
        ("scene_id;score\na;1\n", "commas part its columns, and it has scene_id;score"),
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
            "line 2: detect_scene_column is '-2', below 0",
        ),
        (f"{HEADER}\n1,2,,True,,,1,HIGH\n", "line 2: scene_id is empty"),
        (f"{HEADER}\nnorth,2,a,True,,,1,HIGH\n", "line 2: detect_scene_row is 'north', no number"),
        (f"{HEADER}\n1,2,a,True,,inf,1,HIGH\n", "line 2: vessel_length_m is 'inf', no number"),
        (f"{HEADER}\n1,2,a,True,,-5,1,HIGH\n", "line 2: vessel_length_m is '-5', below 0"),
        (f"{HEADER}\n", "holds no labels to score against"),
    ],
)
def test_what_is_wrong_with_labels_is_said(text: str, message: str, tmp_path, capsys) -> None:
    labels, predicted = tmp_path / "labels.csv", tmp_path / "p.csv"
    labels.write_text(text)
    write_predictions(predicted, as_predictions(some_labels()))
    command = ["score", "xview3", "--inference_file", str(predicted), "--label_file", str(labels)]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert message in error and str(labels) in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("scenes", "sentence"),
    [
        ("xy", "No scene id of --inference-file, such as x, is in --label-file (1 scene such as a"),
        ("ax", "1 of 2 scenes of --inference-file have no label, such as x."),
        ("a", ""),
    ],
)
def test_scenes_that_match_nothing_are_told(scenes: str, sentence: str, tmp_path, capsys) -> None:
    labels = tmp_path / "labels.csv"
    labels.write_text(f"{HEADER}\n1,2,a,True,False,20,1,HIGH\n")
    write_predictions(tmp_path / "p.csv", Objects.of([*scenes], [[1, 2]] * len(scenes)))
    words = ["--inference_file", str(tmp_path / "p.csv"), "--label_file", str(labels)]
    assert main(["score", "xview3", *words]) == 0
    output = capsys.readouterr().out
    assert (sentence in output) if sentence else ("--inference-file" not in output)


def test_the_command_says_what_is_missing(tmp_path, capsys) -> None:
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
    assert "a_shoreline.npy cannot be read: No such file" in capsys.readouterr().err
    assert main([*command[:-1], str(tmp_path / "none.csv")]) == 2
    assert "none.csv cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("lengths", [(), (3,), (3, 5), (4, 4)])
def test_shorelines_come_back(lengths: tuple[int, ...], tmp_path) -> None:
    contours = [np.arange(2.0 * n).reshape(n, 2) for n in lengths]
    write_shoreline(tmp_path / "s.npy", contours)
    for path in (tmp_path / "s.npy", tmp_path / "plain.npy"):
        if path.name == "plain.npy":
            if len(set(lengths)) != 1:
                return
            np.save(path, np.array(contours))
        assert [c.tolist() for c in read_shoreline(path)] == [c.tolist() for c in contours]
    assert len(np.load(tmp_path / "s.npy", allow_pickle=True)) == len(lengths), "as numpy has it"


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("evil"),))


def test_a_shoreline_runs_no_code(tmp_path, here) -> None:
    array = np.empty(1, object)
    array[0] = Evil()
    np.save(tmp_path / "s.npy", array, allow_pickle=True)
    with pytest.raises(
        UsageError, match=r"s\.npy cannot be read: it holds .*, which is not an array"
    ):
        read_shoreline(tmp_path / "s.npy")
    assert not Path("evil").exists()


@pytest.mark.parametrize("damage", ["cut", "text", "shape", "pickle"])
def test_a_damaged_shoreline_is_named(damage: str, tmp_path) -> None:
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
