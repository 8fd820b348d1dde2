"""Detectors over whole scenes: the same as over chips, nothing twice, refused in one sentence."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if not all(map(find_spec, ("torchvision", "rasterio", "lightning_fabric", "numcodecs"))):
    pytest.skip("torchvision, rasterio or lightning is not installed", allow_module_level=True)


from penstock.base import TRAIN_DEFAULTS, PredictConfig, TrainConfig, UsageError, build
from penstock.cli import main
from penstock.data import Cut, Objects
from penstock.data.scenes.objects import PREDICTED_COLUMNS, read_predictions
from penstock.data.scenes.rasters import NODATA

from ..parameters import mainly
from ..rows import rows_of
from .kit import lighten, train_workload

if TYPE_CHECKING:
    from penstock.training.predict import PredictionSummary


SIZE, CHIP, OVERLAP = "80", "48", "16"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def _light() -> Iterator[None]:
    """Nets that are soon made: what is asked here is of scenes, windows and words."""
    with pytest.MonkeyPatch.context() as patch:
        lighten(patch)
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("scenes")
    words = ["--scenes", "2", "--size", SIZE, SIZE, "--objects", "9", "--seed", "5"]
    assert main(["generate", "xview3", str(root / "data"), *words]) == 0
    words = ["--chip_size", CHIP, "--overlap", OVERLAP]
    for name, split in (("train", "train"), ("val", "validation")):
        words += [f"--{name}_label_file", str(root / "data" / "labels" / f"{split}.csv")]
    words += ["--data_root", str(root / "data"), "--output_dir", str(root / "chips")]
    assert main(["preprocess", *words]) == 0
    return root


def config_of(data: Path, out: Path) -> TrainConfig:
    chips = {f"{split}_chips_path": data / "chips" / split for split in ("train", "val")}
    small = {"backbone": "mobilenet", "epochs": 1, "max_steps": 1, "batch_size": 2}
    small |= {"num_workers": 0, "device": "cpu", "output_dir": out, "background": 0.0}
    return build(TrainConfig, TRAIN_DEFAULTS["detector"], small, chips)


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory) -> Path:
    """One step of training: it has learnt nothing, and finds much."""

    out = tmp_path_factory.mktemp("run")
    train_workload("detector", config_of(data, out))
    return out


def predicted(run: Path, root: Path, out: Path, **changes: Any) -> PredictionSummary:
    from penstock.training.predict import predict_scenes

    settings = {"data_root": root, "output": out, "device": "cpu", "batch_size": 3}
    return predict_scenes(run / "best_model.pth", build(PredictConfig, settings, changes))


@pytest.mark.slow
def test_a_scene_gives_what_its_chips_give(data: Path, run: Path, tmp_path) -> None:
    """The other way to the same: cut into chips, stored, read by number, joined by the workload."""
    import torch

    from penstock.training.workloads.detector_workload import DetectorWorkload

    out = tmp_path / "p.csv"
    done = predicted(run, data / "data" / "validation", out, score_threshold=0.05)
    workload = DetectorWorkload(config_of(data, tmp_path))
    net = workload.model()
    net.load_state_dict(torch.load(run / "best_model.pth", weights_only=True))
    net.eval()
    with torch.no_grad():
        answers = {
            index: workload.answers(net, workload.collate([workload.val[index]]))[0]
            for index in range(len(workload.val))
        }
    expected = workload.joined(answers)
    assert done.windows == len(workload.val) and done.scenes == 1
    assert done.settings.record == workload.chips.record
    assert len(expected) == len(done.objects) > 50
    order, other = (np.lexsort(of.points.T) for of in (expected, done.objects))
    for column in Objects.__slots__:
        if column == "more":
            continue
        one, two = getattr(expected, column)[order], getattr(done.objects, column)[other]
        if one.dtype.kind == "f":
            np.testing.assert_allclose(one, two, rtol=1e-3, atol=1e-3)
        else:
            assert (one == two).mean() > 0.99, "kinds on the edge of another may tip"
    back = read_predictions(out)
    np.testing.assert_array_equal(back.points, done.objects.points)
    np.testing.assert_array_equal(back.score, done.objects.score)


@pytest.mark.slow
def test_the_command_writes_what_is_scored(data: Path, run: Path, tmp_path, capsys) -> None:
    results = json.loads((run / "training_results.json").read_text())
    threshold = results["history"][0]["val_best_threshold"]
    scenes, out = data / "data" / "validation", tmp_path / "p.csv"
    words = [str(run / "best_model.pth"), "--data-root", str(scenes), "--output", str(out)]
    assert main(["predict", *words, "--device", "cpu"]) == 0
    output = capsys.readouterr()
    rows = rows_of(out)
    assert tuple(rows[0]) == (*PREDICTED_COLUMNS, "score")
    assert f"{len(rows)} objects in 1 scene" in output.out
    assert all(float(row["score"]) >= threshold for row in rows)
    assert f"least score {threshold:.3f}, the best on the run's validation scenes" in output.out
    assert re.search(r"^(\d+) of \1 windows$", output.err, re.MULTILINE)
    assert not list(tmp_path.glob("*.part*"))
    labels = data / "data" / "labels" / "validation.csv"
    words = ["--inference_file", str(out), "--label_file", str(labels), "--shore_root"]
    words += [str(data / "data" / "shoreline"), "--output", str(tmp_path / "score.json")]
    assert main(["score", "xview3", *words]) == 0
    score = json.loads((tmp_path / "score.json").read_text())
    assert score["loc_fscore"] == pytest.approx(
        results["history"][0]["val_best_loc_fscore"], abs=0.1
    ), "but for labels of LOW confidence, of which a scene has one or two"


@pytest.mark.slow
def test_a_stopped_run_goes_on_at_its_scene(data: Path, run: Path, tmp_path, monkeypatch) -> None:
    from penstock.training import predict

    scenes, out, seen = tmp_path / "scenes", tmp_path / "p.csv", list[str]()
    for number, split in enumerate(("train", "validation")):
        source = next(path for path in (data / "data" / split).iterdir() if path.is_dir())
        shutil.copytree(source, scenes / f"scene{number}")
    asked: dict[str, Any] = {"score_threshold": 0.3, "overlap": 0}
    predicted(run, scenes, tmp_path / "whole.csv", **asked)
    real = predict.detect

    def stopped(net: Any, scene: Any, *rest: Any) -> Objects:
        seen.append(scene.name)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return real(net, scene, *rest)

    monkeypatch.setattr(predict, "detect", stopped)
    with pytest.raises(KeyboardInterrupt):
        predicted(run, scenes, out, **asked)
    assert not out.exists()
    with pytest.raises(UsageError, match="--resume goes on with it"):
        predicted(run, scenes, out, **asked)
    with pytest.raises(UsageError, match=r"was made with threshold 0\.3, not 0\.4"):
        predicted(run, scenes, out, **asked | {"score_threshold": 0.4}, resume=True)
    done = predicted(run, scenes, out, **asked, resume=True)
    assert seen == ["scene0", "scene1", "scene1"]
    assert (done.scenes, done.skipped) == (1, 1)
    assert out.read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert not list(tmp_path.glob("*.parts"))


@pytest.mark.slow
def test_windows_without_data_are_passed_over(data: Path, run: Path, tmp_path) -> None:
    import rasterio

    from penstock.training.workloads.detector_workload import _SAME_OBJECT

    shutil.copytree(data / "data" / "validation", tmp_path / "v")
    for path in tmp_path.glob("v/*/V*_dB.tif"):
        with rasterio.open(path, "r+") as file:
            values = file.read(1)
            assert (values[:, : int(CHIP)] != NODATA).any()
            values[: int(CHIP), : int(CHIP)] = NODATA
            file.write(values, 1)
    done = predicted(run, tmp_path / "v", tmp_path / "p.csv")
    assert (done.empty, done.windows) == (1, 3)
    _, corner = Cut(int(SIZE), int(CHIP), int(OVERLAP)).core(0)
    around = _SAME_OBJECT / 2
    assert not ((done.objects.points < corner - around).all(axis=1)).any()


@pytest.mark.slow
def test_what_the_user_says_comes_before_what_the_run_says(data: Path, run: Path, tmp_path) -> None:
    root = data / "data" / "validation"
    done = predicted(run, root, tmp_path / "q.csv", overlap=24, score_threshold=0.3)
    assert done.windows == 9 and done.settings.threshold == 0.3
    # Without a run beside them weights do, where the user says the rest.
    shutil.copy(run / "best_model.pth", tmp_path)
    said: dict[str, Any] = {"channels": "vh,vv,bathymetry", "backbone": "mobilenet"}
    said |= {"chip_size": 48, "overlap": 24, "dtype": "float16", "score_threshold": 0.3}
    again = predicted(tmp_path, root, tmp_path / "r.csv", **said)
    np.testing.assert_array_equal(again.objects.points, done.objects.points)


@pytest.mark.parametrize("verb", mainly(["predict", "train"], 0))
def test_a_device_that_is_not_there_is_refused(
    verb: str, data: Path, run: Path, tmp_path, monkeypatch, capsys
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    scenes = str(data / "data" / "validation")
    said = {
        "predict": [str(run / "best_model.pth"), "--data-root", scenes, "--output"],
        "train": ["spiral", "--output-dir"],
    }[verb]
    assert main([verb, *said, str(tmp_path / "out"), "--device", "cuda"]) == 2
    assert "--device cuda: torch finds no such device here" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "sentence", "gone", "written"),
    [
        ("--channels vh,vv", "was trained on chips of channels vh,vv,bathymetry, not ch", "", {}),
        ("--chip-size 80", f"--chip-size: .* of chip size {CHIP}, not chip size 80", "", {}),
        ("--dtype float32", "--dtype: .*chips of dtype float16, not dtype float32", "", {}),
        ("", "there are no weights .*best_model.pth", "run/best_model.pth", {}),
        (
            "",
            "args.json is of workload spiral, and this takes detectors",
            "",
            {"run/args.json": '{"workload": "spiral"}'},
        ),
        (
            "--score-threshold 0.5",
            "give --channels: the run of .*best_model.pth is not beside it",
            "run/training_results.json",
            {},
        ),
        ("", "bathymetry.tif is missing, and the detector", "scenes/*/bathymetry.tif", {}),
        (
            "",
            "--data-root .*scenes holds no scenes: no folder in it has a VH_dB.tif",
            "scenes/*",
            {"scenes/labels/mine.txt": "mine"},
        ),
        ("--data-root /no/such", "--data-root /no/such is not a folder", "", {}),
        ("--scenes abc", "--scenes abc: there is no such scene in --data-root", "", {}),
        (f"--overlap {CHIP}", f"--overlap {CHIP} must be less than --chip-size {CHIP}", "", {}),
        ("--score-threshold 0", "--score-threshold .0.: input should be greater than 0", "", {}),
        (
            "--overwrite",
            "p.csv.parts is where finished scenes are kept, and Penstock did not write it",
            "",
            {"p.csv.parts/mine.txt": "mine"},
        ),
        ("", "p.csv exists; use --overwrite to replace it", "", {"p.csv": "mine"}),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    words: str,
    sentence: str,
    gone: str,
    written: dict[str, str],
    data: Path,
    run: Path,
    tmp_path,
    capsys,
) -> None:
    """Said by flags, or by what is gone and what is written among a good run and its scenes."""
    shutil.copytree(data / "data" / "validation", tmp_path / "scenes")
    (tmp_path / "run").mkdir()
    for name in ("best_model.pth", "args.json", "training_results.json"):
        shutil.copy(run / name, tmp_path / "run")
    out = tmp_path / "p.csv"
    said = ["--data-root", str(tmp_path / "scenes"), "--output", str(out), "--device", "cpu"]
    for path in tmp_path.glob(gone) if gone else ():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name, text in written.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "run" / "best_model.pth"), *said, *words.split()]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("penstock predict: ") and re.search(sentence, last), last
    assert not out.exists() or out.read_text() == "mine"
