"""The workloads: what the emulator and the detector learn from, and what their scores count."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("lightning_fabric")

from penstock.base.config.knobs import build
from penstock.base.config.train import TRAIN_DEFAULTS, TrainConfig
from penstock.base.errors import Incomplete, UsageError
from penstock.base.threads import usable_cores
from penstock.cli import main
from penstock.data.packed.format import ArrayLayout
from penstock.data.packed.write import write_dataset
from penstock.models.emulator import Messages, emulator, graph_of, grid_points, icosphere, nearest
from penstock.training.loop import train_workload
from penstock.training.workloads.emulator import EmulatorWorkload, last_seen

from ..places import SHARED
from .test_loop import torchrun

ERA = SHARED / "era-interim-uvz.nc"


pytestmark = pytest.mark.usefixtures("one_thread")


# --- the spiral --------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_spiral_is_learnt_by_its_defaults(tmp_path: Path) -> None:
    """As `penstock train spiral` has it: dropout and all, noise of 0.05, a minute."""
    assert main(["train", "spiral", "--device", "cpu", "--output-dir", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "training_results.json").read_text())
    assert results["best"]["score"] >= 0.95


# --- the emulator's net ------------------------------------------------------------------------


@pytest.mark.parametrize("level", range(4))
def test_an_icosphere_by_eulers_formula(level: int) -> None:
    points, pairs = icosphere(level)
    assert len(points) == 10 * 4**level + 2
    assert len(pairs) == sum(2 * 30 * 4**n for n in range(level + 1))
    assert {(i, j) for j, i in pairs.tolist()} == {(i, j) for i, j in pairs.tolist()}
    np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1.0)
    mirrored = {tuple(p) for p in np.round(points * (1, 1, -1), 9) + 0.0}
    assert mirrored == {tuple(p) for p in np.round(points, 9) + 0.0}


def test_messages_equal_a_loop_over_edges() -> None:
    points, vertices = grid_points(4, 6), icosphere(1)[0]
    pairs = nearest(points, vertices)
    graph = graph_of(points, vertices, pairs)
    torch.manual_seed(0)
    layer = Messages(5)
    sending, receiving = torch.randn(2, len(points), 5), torch.randn(2, len(vertices), 5)
    heard = torch.zeros(2, len(vertices), 5)
    counts = torch.zeros(len(vertices))
    for (sender, receiver), where in zip(pairs.tolist(), graph.where, strict=True):
        told = layer.where(where) + layer.sender(sending[:, sender])
        told = told + layer.receiver(receiving[:, receiver])
        heard[:, receiver] += layer.tell(torch.nn.functional.silu(told))
        counts[receiver] += 1
    heard /= counts.clamp(min=1)[:, None]
    changed = layer.norm(layer.change(torch.cat([receiving, heard], dim=-1)))
    expected = receiving + changed
    torch.testing.assert_close(layer(sending, receiving, graph), expected)


def test_the_net_cannot_tell_the_hemispheres_apart() -> None:
    torch.manual_seed(0)
    net = emulator(3, latent_size=8, message_steps=2, mesh_level=2)
    for parameter in net.parameters():  # the last layer begins at zero
        torch.nn.init.normal_(parameter, std=0.3)
    fields = torch.randn(1, 3, 10, 16)  # no point of which is as far from two nodes
    mirrored = net(fields.flip(2)).flip(2)
    torch.testing.assert_close(net(fields), mirrored, rtol=1e-3, atol=1e-4)
    assert net(fields).std() > 0.01


def test_the_net_takes_any_grid_and_batch() -> None:
    net = emulator(2, latent_size=8, mesh_level=1)
    for shape in ((1, 2, 5, 8), (3, 2, 4, 6)):
        assert net(torch.ones(shape)).shape == shape


# --- the emulator's training -------------------------------------------------------------------


ROWS, COLUMNS = 6, 8


def packed(root: Path, samples: int, first: int = 0) -> Path:
    """Fields that drift eastward by a column a step: `a`, which is seen twice, and `v`."""
    rng = np.random.default_rng(0)
    waves = rng.normal(size=(2, ROWS, COLUMNS)).astype(np.float32)

    def at(step: int) -> Any:
        return np.stack([np.roll(wave, step, axis=1) for wave in waves], axis=-1)

    def make(index: int) -> dict[str, Any]:
        now = first + index
        inputs = np.concatenate([at(now - 1)[..., :1], at(now)], axis=-1)
        return {"inputs": np.ascontiguousarray(inputs), "targets": at(now + 1)}

    axes = ("lat", "lon", "channels")
    names = {"inputs": ("a_t-1", "a_t+0", "v_500_t+0"), "targets": ("a_t+1", "v_500_t+1")}
    layouts = {
        name: ArrayLayout(axes, (ROWS, COLUMNS, len(n)), (ROWS, COLUMNS, len(n)), n)
        for name, n in names.items()
    }
    write_dataset(
        root, layouts, range(samples), make,
        codec="none", zarr_format=2, shards=None, workers=1, overwrite=False, facts={},
    )  # fmt: skip
    return root


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("packed")
    return {
        "train_data_root": packed(folder / "train", 13),
        "val_data_root": packed(folder / "val", 5, first=40),
    }


def settings_of(roots: dict[str, Path], out: Path, **changes: Any) -> TrainConfig:
    small = {"latent_size": 8, "mesh_level": 1, "message_steps": 1, "device": "cpu"}
    small |= {"epochs": 2, "batch_size": 2, "num_workers": 1}
    return build(
        TrainConfig, TRAIN_DEFAULTS["emulator"], small, roots, {"output_dir": out}, changes
    )


def weights(out: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = torch.load(out / "checkpoints" / "last.pt", weights_only=True)[
        "model"
    ]
    return found


@pytest.mark.parametrize("pieces", [1, 2, 7])
def test_an_epoch_in_pieces_is_the_same_epoch(
    pieces: int, roots: dict[str, Path], tmp_path: Path
) -> None:
    """Even where the run is stopped inside a piece."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_workload("emulator", settings_of(roots, whole))

    def stop(now: Any) -> None:
        if now.step == 9 and not now.validated:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(Incomplete, match="stopped by SIGUSR1 after step 10 of 14"):
        train_workload(
            "emulator", settings_of(roots, parts, chunks_per_epoch=pieces), progress=stop
        )
    train_workload("emulator", settings_of(roots, parts, chunks_per_epoch=pieces, resume=True))
    one, other = weights(whole), weights(parts)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_net_that_says_nothing_is_persistence(roots: dict[str, Path], tmp_path: Path) -> None:
    workload = EmulatorWorkload(settings_of(roots, tmp_path))
    model = workload.model()
    assert workload.names == ["a", "v_500"]
    assert workload.last == [1, 2]
    rng = np.random.default_rng(1)
    batch = {
        "inputs": torch.from_numpy(rng.normal(size=(2, ROWS, COLUMNS, 3))).float(),
        "targets": torch.from_numpy(rng.normal(size=(2, ROWS, COLUMNS, 2))).float(),
    }
    with torch.no_grad():
        scores = workload.scores(dict(enumerate(workload.answers(model, batch))))
    assert scores["val_relative_rmse"] == pytest.approx(1.0)
    # By hand: rows weigh as the cosine of their latitude.
    area = np.cos(np.radians([75, 45, 15, -15, -45, -75]))
    square = (batch["targets"][..., 0] - batch["inputs"][..., 1]).double().numpy() ** 2
    by_hand = np.sqrt((square.mean(axis=(0, 2)) * area).sum() / area.sum())
    assert scores["val_rmse_a"] == pytest.approx(by_hand, rel=1e-5)


def test_meridional_winds_are_turned_in_the_south(roots: dict[str, Path], tmp_path: Path) -> None:
    model: Any = EmulatorWorkload(settings_of(roots, tmp_path)).model()
    assert model.turned_in[..., 0].tolist() == [[1] * 6, [1] * 6, [1, 1, 1, -1, -1, -1]]
    assert model.turned_out[..., 0].tolist() == [[1] * 6, [1, 1, 1, -1, -1, -1]]


@pytest.mark.slow
def test_an_emulator_on_two_ranks_equals_one_with_the_big_batch(tmp_path: Path) -> None:
    """12 samples by twos on each rank, or by fours; the loader gives each rank its share."""
    small = {"latent_size": 8, "mesh_level": 1, "message_steps": 1, "epochs": 2}
    small |= {"optimizer": "sgd", "learning_rate": 0.01}  # Adam makes steps of rounding errors
    data = {"train_data_root": packed(tmp_path / "train", 12)}
    data["val_data_root"] = packed(tmp_path / "val", 5, first=40)
    about = {"device": "cpu", "output_dir": tmp_path / "one", "batch_size": 4}
    train_workload("emulator", build(TrainConfig, TRAIN_DEFAULTS["emulator"], small, data, about))
    words = [f"--{k.replace('_', '-')}={v}" for k, v in {**small, **data, "batch_size": 2}.items()]
    done = torchrun(tmp_path / "two", "emulator", *words)
    assert done.returncode == 0, done.stderr
    one, two = (
        torch.load(tmp_path / name / "checkpoints" / "last.pt", weights_only=True)["model"]
        for name in ("one", "two")
    )
    assert all(torch.allclose(one[n], two[n], rtol=1e-4, atol=1e-5) for n in one)
    one, two = (
        json.loads((tmp_path / name / "training_results.json").read_text())
        for name in ("one", "two")
    )
    assert two["world_size"] == 2
    assert one["samples"] == two["samples"] == 24
    for name, value in one["final"].items():
        assert two["final"][name] == pytest.approx(value, rel=1e-3), name


@pytest.mark.slow
@pytest.mark.skipif(not ERA.is_file(), reason=f"{ERA} is not here")
def test_the_emulator_beats_persistence_on_a_transition_that_it_never_saw(tmp_path: Path) -> None:
    """Trained from January to July, judged from July to January, by its last weights."""
    for name, offset, target in (("train", "0", "1"), ("val", "1", "0")):
        words = ["--offsets", offset, "--target-offset", target]
        assert main(["generate", "--from", str(ERA), str(tmp_path / name), *words]) == 0
    roots = {f"{name}_data_root": tmp_path / name for name in ("train", "val")}
    config = settings_of(
        roots, tmp_path / "out",
        epochs=60, batch_size=1, grid_step=8, latent_size=32, mesh_level=2, message_steps=2,
        learning_rate=4e-3,
    )  # fmt: skip
    results = train_workload("emulator", config)
    assert results["final"]["val_relative_rmse"] < 0.9


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train_data_root": None}, "--train-data-root is required by the emulator"),
        ({"val_data_root": "none"}, "--val-data-root none: no packed data set"),
        ({"chunks_per_epoch": 8}, "--chunks-per-epoch 8: an epoch of 13 samples has 7 batches"),
    ],
)
def test_bad_input_of_the_emulator(
    changes: dict[str, Any], message: str, roots: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        train_workload("emulator", settings_of(roots, tmp_path, **changes))


def test_what_persists_is_the_latest_that_was_seen() -> None:
    class Named:
        def __init__(self, *channels: str) -> None:
            self.channels = channels

    inputs: Any = Named("z_t+1", "z_t-1", "u_t+0", "z_t+0", "land")
    assert last_seen(inputs, Named("u_t+1", "z_t-2", "land")) == [2, 1, 4]  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the targets have w and the inputs do not"):
        last_seen(inputs, Named("w_t+1"))  # type: ignore[arg-type]


# --- the detector ------------------------------------------------------------------------------

if not (find_spec("torchvision") and find_spec("rasterio")):  # importing it may fail: see vision
    pytest.skip("torchvision or rasterio is not installed", allow_module_level=True)

from penstock.models import torchvision_ops as vision  # noqa: E402
from penstock.models.detector import make_detector  # noqa: E402
from penstock.training.workloads.detector import (  # noqa: E402
    DetectorWorkload,
    chosen,
    turn,
)


@given(seed=st.integers(0, 50), side=st.integers(4, 9))
@settings(max_examples=30, deadline=None)
def test_a_turned_box_holds_what_it_held(seed: int, side: int) -> None:
    image = torch.arange(side * side, dtype=torch.float32).reshape(1, side, side)
    boxes = torch.tensor([[1.0, 0.0, 3.0, 4.0], [0.0, 2.0, 4.0, 3.0]])
    torch.manual_seed(seed)
    turned, target = turn(image, {"boxes": boxes, "labels": torch.tensor([1, 2])})

    def held(picture: torch.Tensor, box: torch.Tensor) -> list[float]:
        x0, y0, x1, y1 = (int(edge) for edge in box)
        return sorted(picture[0, y0:y1, x0:x1].flatten().tolist())

    for before, after in zip(boxes, target["boxes"], strict=True):
        assert held(image, before) == held(turned, after) != []


@pytest.mark.parametrize(
    "background, expected",
    [(0.0, 3), (1.0, 6), (1.4, 7), (9.0, 8)],
)
def test_chips_with_objects_are_all_chosen(background: float, expected: int) -> None:
    counts = np.array([0, 2, 0, 1, 0, 0, 5, 0])
    found = chosen(counts, background, seed=3)
    assert len(found) == expected
    assert {1, 3, 6} <= set(found.tolist())
    assert found.tolist() == sorted(set(found.tolist()))
    assert found.tolist() == chosen(counts, background, seed=3).tolist()


@pytest.fixture(scope="module")
def chips(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("scenes")
    data, cut = folder / "data", folder / "chips"
    size = ["--size", "256", "256"]
    assert main(["generate", "xview3", str(data), "--scenes", "2", *size]) == 0
    files = {name: data / "labels" / f"{name}.csv" for name in ("train", "validation")}
    words = ["--data_root", str(data), "--output_dir", str(cut), "--chip_size", "160"]
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


def test_validating_on_what_is_trained_on_is_told(
    chips: dict[str, Path], roots: dict[str, Path], tmp_path: Path
) -> None:
    def said(workload: str, config: TrainConfig) -> str:
        sentences: list[str] = []
        train_workload(workload, config, say=sentences.append)
        return " ".join(sentences)

    shutil.copytree(chips["train_chips_path"], tmp_path / "copy")
    (tmp_path / "packed").symlink_to(roots["train_data_root"])
    files = dict.fromkeys(("train_label_file", "val_label_file", "val_data_root"))
    same = detector_config(chips | files, tmp_path / "a", val_chips_path=tmp_path / "copy")
    assert "1 of 1 scenes of" in (told := said("detector", same)) and "trained on too" in told
    assert "trained on too" not in said("detector", detector_config(chips, tmp_path / "b"))
    same = settings_of(roots, tmp_path / "c", epochs=1, val_data_root=tmp_path / "packed")
    assert "13 of 13 samples of --val-data-root" in said("emulator", same)


def test_the_detector_takes_steps_and_is_scored(chips: dict[str, Path], tmp_path: Path) -> None:
    results = train_workload("detector", detector_config(chips, tmp_path))
    assert results["steps"] == 2
    final = results["final"]
    assert {"val_loc_fscore", "val_aggregate", "val_AP", "val_AP50", "val_best_threshold"} <= {
        *final
    }
    told = results["history"][0]
    parts = [told[name] for name in told if name.startswith("loss_")]
    assert len(parts) == 5
    assert sum(parts) == pytest.approx(told["train_loss"], rel=1e-4)


@pytest.mark.slow
def test_a_detector_that_was_stopped_ends_in_the_weights_of_a_whole_run(
    chips: dict[str, Path], tmp_path: Path
) -> None:
    def stop(now: Any) -> None:
        if now.step == 2 and not now.validated:
            os.kill(os.getpid(), signal.SIGTERM)

    def config(name: str, **changes: Any) -> TrainConfig:
        return detector_config(chips, tmp_path / name, epochs=2, max_steps=4, **changes)

    train_workload("detector", config("whole"))
    with pytest.raises(Incomplete):
        train_workload("detector", config("parts"), progress=stop)
    resumed = train_workload("detector", config("parts", resume=True))
    assert resumed["resumed_at_steps"]
    whole, parts = (
        torch.load(tmp_path / name / "checkpoints" / "last.pt", weights_only=True)["model"]
        for name in ("whole", "parts")
    )
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


@pytest.mark.slow
def test_a_detector_is_scored_alike_on_one_rank_and_on_two(
    chips: dict[str, Path], tmp_path: Path
) -> None:
    """From the same weights, as a rate of next to nothing leaves them; each chip counts once,
    though two ranks of batches of 3 are given some of them twice."""
    words = ["detector", "--epochs=1", "--max-steps=1", "--batch-size=3", "--num-workers=0"]
    words += ["--backbone=mobilenet", "--learning-rate=1e-30", "--weight-decay=0"]
    words += [f"--{name.replace('_', '-')}={path}" for name, path in chips.items()]
    done = torchrun(tmp_path / "two", *words)
    assert done.returncode == 0, done.stderr
    out = ["--device", "cpu", "--output-dir", str(tmp_path / "one")]
    assert main(["train", *words, *out]) == 0
    one, two = (
        json.loads((tmp_path / name / "training_results.json").read_text())["final"]
        for name in ("one", "two")
    )
    assert one.keys() == two.keys()
    for name in one:
        assert two[name] == pytest.approx(one[name], abs=1e-6), name


def test_perfect_answers_score_perfectly(chips: dict[str, Path], tmp_path: Path) -> None:
    """Each chip tells of all that it sees; what is not in its core is left out, none is lost."""
    workload = DetectorWorkload(detector_config(chips, tmp_path))

    class Oracle:
        def __init__(self) -> None:
            self.seen = 0

        def __call__(self, images: list[torch.Tensor]) -> list[dict[str, torch.Tensor]]:
            target = workload.val[self.seen][1]
            self.seen += 1
            # What is not known of an object cannot be wrong.
            kinds = torch.where(target["labels"] > 3, 2, target["labels"])
            scores = torch.ones(len(kinds))
            return [{**target, "labels": kinds, "scores": scores}]

    oracle: Any = Oracle()
    answers = {
        index: workload.answers(oracle, workload.collate([workload.val[index]]))[0]
        for index in range(len(workload.val))
    }
    found = workload.joined(answers)
    with chips["val_label_file"].open(newline="") as file:
        labels = list(csv.DictReader(file))
    assert len(found) == pytest.approx(len(labels), abs=2)  # neighbours within 50 m are one
    scores = workload.scores(answers)
    assert scores["val_loc_fscore"] > 0.97
    assert scores["val_vessel_fscore"] == scores["val_fishing_fscore"] == 1.0
    assert scores["val_length_acc"] > 0.9


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train_chips_path": None}, "--train-chips-path is required by the detector"),
        ({"val_data_root": "/no/such"}, "--val-data-root /no/such is not a folder"),
    ],
)
def test_bad_input_of_the_detector(
    changes: dict[str, Any], message: str, chips: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        DetectorWorkload(detector_config(chips, tmp_path, **changes))


def test_labels_of_other_chips_are_refused(chips: dict[str, Path], tmp_path: Path) -> None:
    lines = chips["train_label_file"].read_text().splitlines(keepends=True)
    other = tmp_path / "other.csv"
    config = detector_config(chips, tmp_path, train_label_file=other)
    other.write_text("".join(lines[:-1]))
    with pytest.raises(UsageError, match=r"its chips were cut with \d+; run penstock preprocess"):
        DetectorWorkload(config)
    cells = lines[2].split(",")
    cells[lines[0].split(",").index("detect_scene_row")] = "1"
    other.write_text("".join([*lines[:2], ",".join(cells), *lines[3:]]))
    with pytest.raises(UsageError, match=r"line 3: the chips of scene .* with another label there"):
        DetectorWorkload(config)
    with pytest.raises(UsageError, match="has no labels of scene"):
        DetectorWorkload(detector_config(chips, tmp_path, train_label_file=chips["val_label_file"]))


def test_scenes_that_chips_were_not_cut_from_are_refused(
    chips: dict[str, Path], tmp_path: Path
) -> None:
    """A root is the folder of the split, or the one above it."""
    data = chips["val_data_root"].parent
    DetectorWorkload(detector_config(chips, tmp_path, train_data_root=data, val_data_root=data))
    with pytest.raises(
        UsageError, match=r"--train-data-root .*validation has no scene \w+, of whi"
    ):
        DetectorWorkload(detector_config(chips, tmp_path, train_data_root=data / "validation"))
    shutil.copytree(data / "train", tmp_path / "train")
    config = detector_config(chips, tmp_path, train_data_root=tmp_path)
    raster = next(tmp_path.glob("train/*/VH_dB.tif"))
    raster.write_bytes(raster.read_bytes() + b"more")
    with pytest.raises(UsageError, match=r"VH_dB.tif has \d+ bytes and had \d+ when its chips"):
        DetectorWorkload(config)
    raster.unlink()
    with pytest.raises(UsageError, match=r"VH_dB\.tif is missing, and the chips of its scene hold"):
        DetectorWorkload(config)


def test_weights_of_another_detector_are_refused(chips: dict[str, Path], tmp_path: Path) -> None:
    weights = tmp_path / "w.pth"
    torch.save(make_detector(5, width=16).state_dict(), weights)
    with pytest.raises(UsageError, match=r"w\.pth belongs to another model than detector"):
        train_workload("detector", detector_config(chips, tmp_path, weights=weights))


@pytest.mark.slow
def test_what_it_was_measured_with_is_recorded_and_said_once(
    chips: dict[str, Path], tmp_path: Path
) -> None:
    said: list[str] = []
    config = detector_config(chips, tmp_path, max_steps=1, num_workers=usable_cores() + 1)
    results = train_workload("detector", config, say=said.append)
    assert results["facts"]["compiled_operators"] == vision.COMPILED
    assert results["facts"]["channels"] == ["vh", "vv"]
    assert [sentence for sentence in said if "torchvision" in sentence] == [vision.NOTE] * (
        not vision.COMPILED
    )
    assert "they take turns" in said[-1], "in our words, and torch's own warning is no error here"
