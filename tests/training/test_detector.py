"""The detector as a workload: which chips it learns from, and what its scores count."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base import TRAIN_DEFAULTS, Incomplete, TrainConfig, UsageError, build, usable_cores
from penstock.cli import main
from penstock.reports.training.pictures import read_detections

from ..rows import rows_of
from .kit import assert_same, forked_ranks, kill_at, lighten, train_workload, weights

if TYPE_CHECKING:
    from penstock.training.workloads.detector_workload import DetectorWorkload

if not all(map(find_spec, ("lightning_fabric", "torchvision", "rasterio"))):
    pytest.skip("torchvision or rasterio is not installed", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")


@given(seed=st.integers(0, 50), side=st.integers(4, 9))
def test_a_turned_box_holds_what_it_held(seed: int, side: int) -> None:
    import torch

    from penstock.training.workloads.detector_workload import turn

    image = torch.arange(side * side, dtype=torch.float32).reshape(1, side, side)
    boxes = torch.tensor([[1.0, 0.0, 3.0, 4.0], [0.0, 2.0, 4.0, 3.0]])
    torch.manual_seed(seed)
    turned, target = turn(image, {"boxes": boxes, "labels": torch.tensor([1, 2])})

    def held(picture: torch.Tensor, box: torch.Tensor) -> list[float]:
        x0, y0, x1, y1 = (int(edge) for edge in box)
        return sorted(picture[0, y0:y1, x0:x1].flatten().tolist())

    for before, after in zip(boxes, target["boxes"], strict=True):
        assert held(image, before) == held(turned, after) != []


@pytest.mark.parametrize("background, expected", [(0.0, 3), (1.0, 6), (1.4, 7), (9.0, 8)])
def test_chips_with_objects_are_all_chosen(background: float, expected: int) -> None:
    from penstock.training.workloads.detector_workload import chosen

    counts = np.array([0, 2, 0, 1, 0, 0, 5, 0])
    chips = chosen(counts, background, seed=3)
    assert len(chips) == expected
    assert {1, 3, 6} <= set(chips.tolist())
    assert chips.tolist() == sorted(set(chips.tolist()))
    assert chips.tolist() == chosen(counts, background, seed=3).tolist()


@pytest.fixture(scope="module")
def chips(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("scenes")
    data, cut = folder / "data", folder / "chips"
    size = ["--size", "112", "112"]
    assert main(["generate", "xview3", str(data), "--scenes", "2", *size]) == 0
    files = {name: data / "labels" / f"{name}.csv" for name in ("train", "validation")}
    words = ["--data_root", str(data), "--output_dir", str(cut)]
    words += ["--chip_size", "64", "--overlap", "16"]
    words += ["--train_label_file", str(files["train"]), "--channels", "vh,vv"]
    assert main(["preprocess", *words, "--val_label_file", str(files["validation"])]) == 0
    return {
        "train_chips_path": cut / "train", "val_chips_path": cut / "val",
        "train_label_file": files["train"], "val_label_file": files["validation"],
        "val_data_root": data / "validation",
    }  # fmt: skip


def detector_config(chips: dict[str, Path], out: Path, **changes: Any) -> TrainConfig:
    small = {"backbone": "mobilenet", "epochs": 1, "batch_size": 2, "num_workers": 0}
    small |= {"device": "cpu", "output_dir": out, "max_steps": 2}
    return build(TrainConfig, TRAIN_DEFAULTS["detector"], small, chips, changes)


def workload_of(chips: dict[str, Path], out: Path, **changes: Any) -> DetectorWorkload:
    from penstock.training.workloads.detector_workload import DetectorWorkload

    return DetectorWorkload(detector_config(chips, out, **changes))


@pytest.mark.slow
def test_validating_on_what_is_trained_on_is_told(chips: dict[str, Path], tmp_path) -> None:
    shutil.copytree(chips["train_chips_path"], tmp_path / "copy")
    files = dict.fromkeys(("train_label_file", "val_label_file", "val_data_root"))
    same = workload_of(chips | files, tmp_path, val_chips_path=tmp_path / "copy")
    (note_on_scenes,) = (note for note in same.notes if "trained on too" in note)
    assert "1 of 1 scene of" in note_on_scenes
    assert "trained on too" not in " ".join(workload_of(chips, tmp_path).notes)


@pytest.mark.slow
def test_the_detector_learns_and_is_scored(chips: dict[str, Path], tmp_path, monkeypatch) -> None:
    lighten(monkeypatch)
    results = train_workload("detector", detector_config(chips, tmp_path))
    assert results["steps"] == 2
    final = results["final"]
    assert {"val_loc_fscore", "val_aggregate", "val_AP", "val_AP50", "val_best_threshold"} <= {
        *final
    }
    epoch = results["history"][0]
    parts = [epoch[name] for name in epoch if name.startswith("loss_")]
    assert len(parts) == 5
    assert sum(parts) == pytest.approx(epoch["train_loss"], rel=1e-4)
    samples = read_detections(tmp_path / "pictures.npz")
    assert samples and samples[0].name.endswith("column 0")


@pytest.mark.slow
def test_a_detector_that_was_stopped_ends_in_the_weights_of_a_whole_run(
    chips: dict[str, Path], tmp_path, monkeypatch
) -> None:
    lighten(monkeypatch)

    def config(name: str, **changes: Any) -> TrainConfig:
        return detector_config(chips, tmp_path / name, epochs=2, max_steps=4, **changes)

    train_workload("detector", config("whole"))
    with pytest.raises(Incomplete):
        train_workload("detector", config("parts"), progress=kill_at(2))
    assert train_workload("detector", config("parts", resume=True))["resumed_at_steps"]
    assert_same(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


@pytest.mark.slow
def test_a_detector_is_scored_alike_on_one_and_two_ranks(chips: dict[str, Path], tmp_path) -> None:
    """From the same weights, as a rate of next to nothing leaves them; each chip counts once,
    though two ranks of batches of 3 are given some of them twice."""
    words = ["detector", "--epochs=1", "--max-steps=1", "--batch-size=3", "--num-workers=0"]
    words += ["--backbone=mobilenet", "--learning-rate=1e-30", "--weight-decay=0"]
    words += [f"--{name.replace('_', '-')}={path}" for name, path in chips.items()]
    done = forked_ranks(tmp_path / "two", *words)
    assert done.codes == [0, 0], done.said
    out = ["--device", "cpu", "--output-dir", str(tmp_path / "one")]
    assert main(["train", *words, *out]) == 0
    one, two = (
        json.loads((tmp_path / name / "training_results.json").read_text())["final"]
        for name in ("one", "two")
    )
    assert one.keys() == two.keys()
    for name in one:
        assert two[name] == pytest.approx(one[name], abs=1e-6), name


def test_perfect_answers_score_perfectly(chips: dict[str, Path], tmp_path) -> None:
    """Each chip tells of all that it sees; what is not in its core is left out, none is lost."""

    import torch

    workload = workload_of(chips, tmp_path)

    class Oracle:
        def __init__(self) -> None:
            self.seen = 0

        def __call__(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
            target = workload.val[self.seen][1]
            self.seen += 1
            # What is not known of an object cannot be wrong.
            kinds = torch.where(target["labels"] > 3, 2, target["labels"])
            return [{**target, "labels": kinds, "scores": torch.ones(len(kinds))}]

    oracle: Any = Oracle()
    answers = {
        index: workload.answers(oracle, workload.collate([workload.val[index]]))[0]
        for index in range(len(workload.val))
    }
    objects = workload.joined(answers)
    labels = rows_of(chips["val_label_file"])
    assert len(objects) == pytest.approx(len(labels), abs=2)  # neighbours within 50 m are one
    scores = workload.scores(answers)
    assert scores["val_loc_fscore"] > 0.97
    assert scores["val_vessel_fscore"] == scores["val_fishing_fscore"] == 1.0
    assert scores["val_length_acc"] > 0.9
    pictures = workload.pictures(answers)
    most = max(len(answer["true_boxes"]) for answer in answers.values())
    assert (pictures["true_0"] == pictures["predicted_0"]).all() and len(pictures["true_0"]) == most
    assert pictures["image_0"].dtype == np.uint8 and 0 < pictures["image_0"].mean() < 255
    assert len(pictures["names"]) == min(6, len(answers)) and (pictures["scores_0"] == 1).all()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train_chips_path": None}, "--train-chips-path is required by the detector"),
        ({"val_data_root": "/no/such"}, "--val-data-root /no/such is not a folder"),
    ],
)
def test_bad_input_of_the_detector(changes, message, chips, tmp_path) -> None:
    with pytest.raises(UsageError, match=message):
        workload_of(chips, tmp_path, **changes)


def test_labels_of_other_chips_are_refused(chips: dict[str, Path], tmp_path) -> None:
    lines = chips["train_label_file"].read_text().splitlines(keepends=True)
    other = tmp_path / "other.csv"
    changed = {"train_label_file": other}
    cells = lines[2].split(",")
    cells[lines[0].split(",").index("detect_scene_row")] = "1"
    reason = r"has other labels of scene .* its chips were cut with; run penstock preprocess again"
    for labels in (lines[:-1], [*lines[:2], ",".join(cells), *lines[3:]]):
        other.write_text("".join(labels))
        with pytest.raises(UsageError, match=reason):
            workload_of(chips, tmp_path, **changed)
    with pytest.raises(UsageError, match=reason):
        workload_of(chips, tmp_path, train_label_file=chips["val_label_file"])


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("dtype", "float32", "has dtype float32 and --train-chips-path dtype float16"),
        ("chip_size", 112, "has chip size 112 and --train-chips-path chip size 64"),
        ("scaling", [[0, 1], [0, 1]], "has scaling .*0, 1.* and --train-chips-path scaling .*-40"),
    ],
)
def test_chips_that_were_cut_otherwise_are_not_validated_on(
    key: str, value: Any, sentence: str, chips: dict[str, Path], tmp_path
) -> None:
    shutil.copytree(chips["val_chips_path"], tmp_path / "val")
    for path in (tmp_path / "val").rglob("*.json"):
        if "format" in (document := json.loads(path.read_text())):
            path.write_text(json.dumps({**document, key: value}))
    with pytest.raises(UsageError, match=f"--val-chips-path {sentence}"):
        workload_of(chips, tmp_path, val_chips_path=tmp_path / "val")


def test_an_unknown_length_is_not_blamed_for_a_loss(chips: dict[str, Path], tmp_path) -> None:
    """A label without a length is usual; the learning rate was too high."""
    import torch

    from penstock.training.step import why_not_finite

    target = {"boxes": torch.ones(1, 4), "lengths": torch.tensor([torch.nan])}
    batch = np.array([8]), [torch.ones(1, 1, 4, 4), [target], torch.ones(1, 6)]
    workload = workload_of(chips, tmp_path, learning_rate=9.0)
    why = why_not_finite([batch], workload, workload.config)
    assert why == "lower --learning-rate 9.0 or set --clip-norm"


def test_what_is_found_in_an_empty_scene_is_false(chips: dict[str, Path], tmp_path) -> None:
    """Its chips are background to train on, and count in the score."""
    shutil.copytree(chips["val_chips_path"], tmp_path / "val")
    path = next((tmp_path / "val").glob("*/manifest.json"))
    document = json.loads(path.read_text())
    bare = {name: [] for name in document["labels"]}
    path.write_text(json.dumps({**document, "labels": bare}))
    labels = tmp_path / "none.csv"
    labels.write_text(chips["val_label_file"].read_text().splitlines()[0] + "\n")
    changed = {"val_chips_path": tmp_path / "val", "val_label_file": labels}
    workload = workload_of(chips, tmp_path, **changed)
    box = np.array([[10.0, 10.0, 20.0, 20.0]])
    detected = {"points": [[15.0, 15.0]], "is_vessel": [1], "is_fishing": [0], "length_m": [50.0],
             "score": [0.9], "boxes": box, "scores": [0.9], "labels": [1],
             "true_boxes": np.zeros((0, 4)), "true_labels": []}  # fmt: skip
    answer = {name: np.asarray(values) for name, values in detected.items()}
    assert len(workload.val) == len(workload.chips) and not workload.chips.num_points.any()
    assert workload.scores({0: answer})["val_loc_fscore"] == 0


def test_scenes_that_chips_were_not_cut_from_are_refused(chips: dict[str, Path], tmp_path) -> None:
    """A root is the folder of the split, or the one above it."""

    data = chips["val_data_root"].parent
    workload_of(chips, tmp_path, train_data_root=data, val_data_root=data)
    with pytest.raises(
        UsageError, match=r"--train-data-root .*validation has no scene \w+, of whi"
    ):
        workload_of(chips, tmp_path, train_data_root=data / "validation")
    shutil.copytree(data / "train", tmp_path / "train")
    changed = {"train_data_root": tmp_path}
    raster = next(tmp_path.glob("train/*/VH_dB.tif"))
    raster.write_bytes(raster.read_bytes() + b"more")
    with pytest.raises(UsageError, match=r"VH_dB.tif has \d+ bytes and had \d+ when its chips"):
        workload_of(chips, tmp_path, **changed)
    raster.unlink()
    with pytest.raises(UsageError, match=r"VH_dB\.tif is missing, and the chips of its scene hold"):
        workload_of(chips, tmp_path, **changed)


@pytest.mark.slow
def test_what_it_is_measured_with_is_noted(chips: dict[str, Path], tmp_path, monkeypatch) -> None:
    from penstock.models import compiled_operators

    lighten(monkeypatch)

    said: list[str] = []
    config = detector_config(chips, tmp_path, max_steps=1, num_workers=usable_cores() + 1)
    results = train_workload("detector", config, say=said.append)
    assert results["facts"]["compiled_operators"] == compiled_operators()
    assert results["facts"]["chips"]["channels"] == ["vh", "vv"]
    assert "they take turns" in said[-1], "in our words, and torch's own warning is no error here"
