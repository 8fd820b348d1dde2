"""The emulator: its net, its training, and what its scores count."""

import json
import os
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base import TRAIN_DEFAULTS, Incomplete, TrainConfig, UsageError, build
from penstock.cli import main

from ..later import imported_later
from ..places import SHARED
from .kit import COLUMNS, ROWS, assert_same, forked_ranks, packed, train_workload, weights

torch = imported_later("torch")

if not all(map(find_spec, ("lightning_fabric",))):
    pytest.skip("lightning_fabric is not installed", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("one_thread")


ERA = SHARED / "era-interim-uvz.nc"


@pytest.mark.parametrize("level", range(4))
def test_an_icosphere_by_eulers_formula(level: int) -> None:
    from penstock.models.emulator import icosphere

    points, pairs = icosphere(level)
    assert len(points) == 10 * 4**level + 2
    assert len(pairs) == sum(2 * 30 * 4**n for n in range(level + 1))
    assert {(i, j) for j, i in pairs.tolist()} == {(i, j) for i, j in pairs.tolist()}
    np.testing.assert_allclose(np.linalg.norm(points, axis=1), 1.0)
    mirrored = {tuple(p) for p in np.round(points * (1, 1, -1), 9) + 0.0}
    assert mirrored == {tuple(p) for p in np.round(points, 9) + 0.0}


def test_messages_equal_a_loop_over_edges() -> None:
    from penstock.models.emulator import Messages, graph_of, grid_points, icosphere, nearest

    points, vertices = grid_points(4, 6), icosphere(1)[0]
    pairs = nearest(points, vertices)
    graph = graph_of(points, vertices, pairs)
    torch.manual_seed(0)
    layer = Messages(5)
    sending, receiving = torch.randn(2, len(points), 5), torch.randn(2, len(vertices), 5)
    received = torch.zeros(2, len(vertices), 5)
    counts = torch.zeros(len(vertices))
    for (sender, receiver), where in zip(pairs.tolist(), graph.where, strict=True):
        message = layer.where(where) + layer.sender(sending[:, sender])
        message = message + layer.receiver(receiving[:, receiver])
        received[:, receiver] += layer.tell(torch.nn.functional.silu(message))
        counts[receiver] += 1
    received /= counts.clamp(min=1)[:, None]
    changed = layer.norm(layer.change(torch.cat([receiving, received], dim=-1)))
    expected = receiving + changed
    torch.testing.assert_close(layer(sending, receiving, graph), expected)


def test_the_net_cannot_tell_the_hemispheres_apart() -> None:
    from penstock.models.emulator import emulator

    torch.manual_seed(0)
    net = emulator(3, latent_size=8, message_steps=2, mesh_level=2)
    for parameter in net.parameters():  # the last layer begins at zero
        torch.nn.init.normal_(parameter, std=0.3)
    fields = torch.randn(1, 3, 10, 16)  # no point of which is as far from two nodes
    mirrored = net(fields.flip(2)).flip(2)
    torch.testing.assert_close(net(fields), mirrored, rtol=1e-3, atol=1e-4)
    assert net(fields).std() > 0.01


@pytest.fixture(scope="module")
def roots(tmp_path_factory) -> dict[str, Path]:
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


@pytest.mark.slow
def test_an_epoch_in_pieces_is_the_same_epoch(roots: dict[str, Path], tmp_path) -> None:
    """Even where the run is stopped inside a piece."""

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_workload("emulator", settings_of(roots, whole))

    def stop(now: Any) -> None:
        if now.step == 9 and not now.validated:
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(Incomplete, match="stopped by SIGUSR1 after step 10 of 14"):
        train_workload("emulator", settings_of(roots, parts, chunks_per_epoch=2), progress=stop)
    train_workload("emulator", settings_of(roots, parts, chunks_per_epoch=2, resume=True))
    assert_same(weights(whole), weights(parts))


@pytest.mark.slow
def test_validating_on_what_is_trained_on_is_told(roots: dict[str, Path], tmp_path) -> None:
    (tmp_path / "packed").symlink_to(roots["train_data_root"])
    same = settings_of(roots, tmp_path / "out", max_steps=1, val_data_root=tmp_path / "packed")
    said: list[str] = []
    train_workload("emulator", same, say=said.append)
    assert "13 of 13 samples of --val-data-root" in " ".join(said)


def test_a_net_that_says_nothing_is_persistence(roots: dict[str, Path], tmp_path) -> None:
    from penstock.training.workloads.emulator_workload import EmulatorWorkload

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


def test_meridional_winds_are_turned_in_the_south(roots: dict[str, Path], tmp_path) -> None:
    from penstock.training.workloads.emulator_workload import EmulatorWorkload

    model: Any = EmulatorWorkload(settings_of(roots, tmp_path)).model()
    assert model.turned_in[..., 0].tolist() == [[1] * 6, [1] * 6, [1, 1, 1, -1, -1, -1]]
    assert model.turned_out[..., 0].tolist() == [[1] * 6, [1, 1, 1, -1, -1, -1]]


@pytest.mark.slow
def test_an_emulator_on_two_ranks_equals_one_with_the_big_batch(tmp_path) -> None:
    """12 samples by twos on each rank, or by fours; the loader gives each rank its share."""

    small = {"latent_size": 8, "mesh_level": 1, "message_steps": 1, "epochs": 2}
    small |= {"optimizer": "sgd", "learning_rate": 0.01}  # Adam makes steps of rounding errors
    data = {"train_data_root": packed(tmp_path / "train", 12)}
    data["val_data_root"] = packed(tmp_path / "val", 5, first=40)
    about = {"device": "cpu", "output_dir": tmp_path / "one", "batch_size": 4}
    train_workload("emulator", build(TrainConfig, TRAIN_DEFAULTS["emulator"], small, data, about))
    words = [f"--{k.replace('_', '-')}={v}" for k, v in {**small, **data, "batch_size": 2}.items()]
    done = forked_ranks(tmp_path / "two", "emulator", *words)
    assert done.codes == [0, 0], done.said
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    assert all(torch.allclose(one[n], two[n], rtol=1e-4, atol=1e-5) for n in one)
    one, two = (
        json.loads((tmp_path / name / "training_results.json").read_text())
        for name in ("one", "two")
    )
    assert two["world_size"] == 2
    assert one["samples"] == two["samples"] == 24
    for name, value in one["final"].items():
        assert two["final"][name] == pytest.approx(value, rel=1e-3), name


def test_values_that_are_not_finite_are_left_out_and_counted(tmp_path) -> None:
    """A field that is unknown in one place, as an ocean's on land."""
    from penstock.training.workloads.emulator_workload import EmulatorWorkload

    small = {"latent_size": 4, "mesh_level": 0, "message_steps": 1, "device": "cpu"}
    roots = {f"{n}_data_root": packed(tmp_path / n, 4) for n in ("train", "val")}
    workload = EmulatorWorkload(
        build(TrainConfig, TRAIN_DEFAULTS["emulator"], small, roots, {"output_dir": tmp_path})
    )
    torch.manual_seed(0)
    model = workload.model()
    rng = np.random.default_rng(1)
    batch = {
        "inputs": torch.from_numpy(rng.normal(size=(2, ROWS, COLUMNS, 3)).astype(np.float32)),
        "targets": torch.from_numpy(rng.normal(size=(2, ROWS, COLUMNS, 2)).astype(np.float32)),
    }
    batch["inputs"][:, 2, 3, 1] = batch["targets"][0, 4, 5, 0] = torch.nan
    loss, metrics = workload.loss(model, batch)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert float(metrics["train_left_out"]) == pytest.approx(3 / (2 * ROWS * COLUMNS * 2))
    with torch.no_grad():
        answers = dict(enumerate(workload.answers(model.eval(), batch)))
    scores = workload.scores(answers)
    inputs, targets = (batch[n].double().movedim(-1, 1) for n in ("inputs", "targets"))
    square = (inputs[:, workload.last] - targets) ** 2
    area = model.area.double().expand_as(square)
    valid = square.isfinite()
    for channel, name in enumerate(workload.names):
        there = valid[:, channel]
        mean = np.average(square[:, channel][there], weights=area[:, channel][there])
        assert scores[f"val_persistence_{name}"] == pytest.approx(np.sqrt(mean), rel=1e-6)
    assert scores["val_left_out"] == pytest.approx(3 / (2 * ROWS * COLUMNS * 2))
    assert np.isfinite(scores["val_relative_rmse"])


@pytest.mark.slow
@pytest.mark.skipif(not ERA.is_file(), reason=f"{ERA} is not here")
def test_the_emulator_beats_persistence_on_a_transition_that_it_never_saw(tmp_path) -> None:
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
    assert train_workload("emulator", config)["final"]["val_relative_rmse"] < 0.9


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"train_data_root": None}, "--train-data-root is required by the emulator"),
        ({"val_data_root": "none"}, "--val-data-root none: no packed data set"),
        ({"chunks_per_epoch": 8}, "--chunks-per-epoch 8: an epoch of 13 samples has 7 batches"),
    ],
)
def test_bad_input_of_the_emulator(changes, message, roots, tmp_path) -> None:
    with pytest.raises(UsageError, match=message):
        train_workload("emulator", settings_of(roots, tmp_path, **changes))


@pytest.mark.parametrize(
    ("rows", "columns", "why"),
    [
        (np.linspace(60, 30, 4), np.arange(0, 360, 60), "covers 40 of 180 degrees of latitude"),
        (np.linspace(-90, 90, 7), np.arange(4) * 10 - 20, "covers 40 of 360 degrees of longitude"),
        (np.linspace(-67.5, 67.5, 4), np.roll(np.arange(0, 360, 60), 2), None),
    ],
)
def test_a_region_is_not_taken_for_the_globe(rows, columns, why, tmp_path) -> None:
    xarray = pytest.importorskip("xarray")
    pytest.importorskip("netCDF4")
    values = np.random.default_rng(0).normal(size=(5, len(rows), len(columns)))
    coords = {"time": np.arange(5), "lat": rows, "lon": columns}
    fields = xarray.Dataset({"t": (("time", "lat", "lon"), values)}, coords)
    fields.to_netcdf(tmp_path / "t.nc", engine="netcdf4")
    assert main(["generate", "--from", str(tmp_path / "t.nc"), str(tmp_path / "data")]) == 0
    config = settings_of(
        dict.fromkeys(("train_data_root", "val_data_root"), tmp_path / "data"), tmp_path
    )
    from penstock.training.workloads.emulator_workload import EmulatorWorkload

    if why is None:
        EmulatorWorkload(config)
        return
    with pytest.raises(UsageError, match=f"--train-data-root .*data: its grid {why}"):
        EmulatorWorkload(config)


def test_what_persists_is_the_latest_that_was_seen() -> None:
    from penstock.training.workloads.emulator_workload import last_seen

    class Named:
        def __init__(self, *channels: str) -> None:
            self.channels = channels

    inputs: Any = Named("z_t+1", "z_t-1", "u_t+0", "z_t+0", "land", "sea_td2")
    targets: Any = Named("u_t+1", "z_t-2", "land", "sea_td2")  # the last has no time step
    assert last_seen(inputs, targets) == [2, 1, 4, 5]
    with pytest.raises(UsageError, match="the targets have w and the inputs do not"):
        last_seen(inputs, Named("w_t+1"))  # type: ignore[arg-type]
