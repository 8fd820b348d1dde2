"""Training any model on pairs of arrays: what is read, what is held back, what is learnt."""

import itertools
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

if find_spec("lightning_fabric") is None:
    pytest.skip("lightning_fabric is not installed", allow_module_level=True)

import penstock
from penstock.base import TRAIN_DEFAULTS, TrainConfig, UsageError, build, read_yaml
from penstock.cli import main
from penstock.data import AXES, Box, Scaling, open_source
from penstock.loading.fields import PatchGrid
from penstock.reports.tune.model_advice import recommend, write_model_yaml

from ..parameters import mainly
from ..reports.kit import TIMES, sized
from .kit import NET, tiny, train_workload


def config_of(tmp_path, **changes: Any) -> TrainConfig:
    settings = {
        "model": NET, "tile_size": "8", "batch_size": 4, "epochs": 2, "device": "cpu",
        "num_workers": 2, "output_dir": tmp_path / "out",
    }  # fmt: skip
    return build(TrainConfig, TRAIN_DEFAULTS["pairs"], settings, changes)


@pytest.fixture
def volumes(tmp_path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    clean = rng.integers(0, 4000, (8, 16, 40)).astype(np.uint16)
    noisy = clean + rng.integers(0, 500, clean.shape).astype(np.uint16)
    np.save(tmp_path / "clean.npy", clean)
    np.save(tmp_path / "noisy.npy", noisy)
    return {"in_spec": str(tmp_path / "noisy.npy"), "target_spec": str(tmp_path / "clean.npy")}


@given(
    shape=st.tuples(*(st.integers(1, 30) for _ in range(4))),
    channels=st.integers(1, 3),
    sides=st.lists(st.integers(1, 12), min_size=2, max_size=3),
)
def test_nothing_is_both_trained_on_and_held_back(shape, channels, sides) -> None:
    from penstock.training.workloads.pairs import split

    whole = (shape[0], channels, *shape[1:])
    tile = PatchGrid(tuple(sides), axes=tuple(range(5 - len(sides), 5)))
    try:
        train_part, val_part = split(whole, tile)
    except UsageError:
        least = [1, 1, 1, 1, 1]
        least[5 - len(sides) :] = sides
        twice = any(
            n >= 2 * m for n, m in zip(np.delete(whole, 1), np.delete(least, 1), strict=True)
        )
        fits = all(n >= m for n, m in zip(whole, least, strict=True))
        assert not (twice and fits)
        return
    assert (train_part & val_part).size == 0
    assert train_part.size + val_part.size == np.prod(whole)
    assert val_part.size >= 0.15 * np.prod(whole) - 1e-9
    for part in (train_part, val_part):
        sizes = [part.shape[axis] for axis in tile.axes]
        assert all(n >= side for n, side in zip(sizes, sides, strict=True))


def test_tiles_cover_their_part_and_are_where_they_say() -> None:
    from penstock.training.workloads.pairs import Tiles

    values = np.arange(2 * 3 * 7 * 9 * 10, dtype=np.float32).reshape(2, 3, 7, 9, 10)
    source, target = open_source(values), open_source(values[:, :1] * 2)
    part = Box.of((0, 0, 1, 0, 2), (2, 3, 6, 9, 8))
    scalings = Scaling(10.0, 4.0), Scaling(20.0, 8.0)
    tiles = Tiles(source, target, part, PatchGrid((4, 5), axes=(3, 4)), *scalings)
    seen = np.zeros(values.shape, bool)
    for index in range(len(tiles)):
        given_, wanted = tiles[index]
        assert given_.shape == (3, 4, 5)
        assert wanted.shape == (1, 4, 5)
        raw = given_.numpy() * 4 + 10
        assert np.array_equal(wanted.numpy() * 8 + 20, raw[:1] * 2)
        where = np.isin(values, raw.round())
        assert where.sum() == raw.size
        seen |= where
    assert np.array_equal(np.argwhere(seen).min(0), (0, 0, 1, 0, 2))
    assert seen.sum() == part.size
    with pytest.raises(IndexError):
        tiles[len(tiles)]


def test_what_is_not_finite_is_shown_as_the_lower_bound() -> None:
    from penstock.training.workloads.pairs import Tiles

    values = np.ones((4, 8, 8), np.float32)
    values[0, 0, :3] = np.nan, np.inf, -np.inf
    tiles = Tiles(
        open_source(values), open_source(values), Box.of((0,) * 5, (1, 1, 4, 8, 8)),
        PatchGrid((4, 8, 8), axes=(2, 3, 4)), Scaling(), Scaling(),
    )  # fmt: skip
    given_, wanted = tiles[0]
    assert given_[0, 0, 0, :4].tolist() == [0, 0, 0, 1]
    assert wanted[0, 0, 0, :4].isfinite().tolist() == [False, False, False, True]


def test_a_target_that_is_the_input_is_told(volumes: dict[str, Any], tmp_path) -> None:
    said: list[str] = []
    same = volumes | {"target_spec": volumes["in_spec"], "epochs": 1, "num_workers": 0}
    train_workload("pairs", config_of(tmp_path, **same), say=said.append)
    assert "noisy.npy is --in-spec itself" in " ".join(said)


@pytest.mark.slow
def test_a_model_learns_and_infer_runs_it(tmp_path) -> None:
    import torch

    from penstock.data.volumes import clean_volume

    clean = clean_volume((24, 32, 64), seed=1).astype(np.float32)
    noisy = clean + np.random.default_rng(2).normal(0, clean.std(), clean.shape).astype(np.float32)
    np.save(tmp_path / "clean.npy", clean)
    np.save(tmp_path / "noisy.npy", noisy)
    config = config_of(
        tmp_path, in_spec=str(tmp_path / "noisy.npy"), target_spec=str(tmp_path / "clean.npy"),
        epochs=6, learning_rate=0.01, tile_size="16",
    )  # fmt: skip
    results = train_workload("pairs", config)
    final = results["final"]
    assert final["val_psnr"] > final["val_psnr_input"] + 1
    out = np.zeros_like(clean)
    penstock.run_inference(
        noisy, out, model=NET, weights=tmp_path / "out" / "best_model.pth",
        patch=16, overlap=4, devices="cpu",
    )  # fmt: skip
    assert np.mean((out - clean) ** 2) < 0.6 * np.mean((noisy - clean) ** 2)
    # The score of the best epoch, in the unit of the image, tile by tile of what was held back.
    net = tiny()
    net.load_state_dict(torch.load(tmp_path / "out" / "best_model.pth", weights_only=True))
    low, high = np.percentile(noisy[..., :48], (0.5, 99.9))
    lower, upper = np.percentile(clean[..., :48], (0.5, 99.9))
    errors = []
    for z, y in itertools.product((0, 8), (0, 16)):
        place = np.s_[z : z + 16, y : y + 16, 48:]
        shown = torch.from_numpy((noisy[place] - low) / (high - low)).float()[None, None]
        made = net(shown).detach().numpy()[0, 0] * (upper - lower) + lower
        errors.append(np.mean((made - clean[place]) ** 2))
    psnr = 10 * np.log10((upper - lower) ** 2 / np.mean(errors))
    assert results["best"]["score"] == pytest.approx(psnr, abs=0.01)


@pytest.mark.slow
def test_checkpointing_changes_nothing_but_memory(volumes: dict[str, Any], tmp_path) -> None:
    results = []
    for on in (False, True):
        changes = {"epochs": 1, "checkpointing": on, "output_dir": tmp_path / str(on)}
        results.append(train_workload("pairs", config_of(tmp_path, **volumes, **changes)))
    assert results[0]["final"] == results[1]["final"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    mainly(
        [{"dtype": "bfloat16"}, {"dtype": "float16", "channels_last": True}, {"amp": True}], 1, 2
    ),
)
def test_other_ways_to_compute(changes: dict[str, Any], volumes: dict[str, Any], tmp_path) -> None:
    settings = config_of(tmp_path, **volumes, **changes, epochs=1).model_dump(exclude_unset=True)
    assert np.isfinite(penstock.run_training("pairs", **settings)["final"]["val_psnr"])


def test_train_accepts_the_yaml_of_a_benchmark(volumes: dict[str, Any], tmp_path) -> None:
    case = {"mode": "train", "checkpointing": True, "device": "cuda:0"}
    (path,) = write_model_yaml(recommend(sized(TIMES, case=case)), tmp_path / "bench.yaml")
    config = build(TrainConfig, TRAIN_DEFAULTS["pairs"], read_yaml(path), volumes)
    assert (config.model, config.tile_size, config.batch_size) == ("prithvi-refiner-tiny", "384", 4)
    assert (config.checkpointing, config.device) == (True, "cuda")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ({"target_spec": None}, "--target-spec is required by pairs"),
        ({"tile_size": "40"}, "has no room for a tile to train on and another"),
        ({"tile_size": "8x8"}, "--tile-size 8x8 has 2 axes; model"),
        ({"model": "identity"}, "--model identity has no parameters to train"),
        ({"model": "nothing"}, "'nothing' is unknown"),
        ({"channels": 3}, "--in-spec has 1 channel; model tests.training.kit:tiny takes 3"),
        ({"dtype": "float16", "amp": True}, "--amp casts float32 weights"),
        ({"weights": "no.pt"}, "--weights no.pt: there is no such file"),
    ],
)
def test_bad_input_is_one_sentence(words, sentence, volumes, tmp_path, capsys) -> None:
    given_ = {"model": NET, "tile_size": "8", "output_dir": tmp_path / "out", **volumes, **words}
    flags = [
        part
        for name, value in given_.items()
        if value is not None
        for part in ([f"--{name}"] if value is True else [f"--{name}", str(value)])
    ]
    assert main(["train", "pairs", "--device", "cpu", *flags]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_axes_and_series_of_both_arrays(tmp_path) -> None:
    import tifffile

    from penstock.training.workloads.pairs import Pairs

    values = np.arange(5 * 2 * 20 * 24, dtype="f4").reshape(5, 2, 20, 24)
    np.save(tmp_path / "a.npy", values)
    with tifffile.TiffWriter(tmp_path / "a.ome.tif") as file:
        for image in (values[:, 0], values):
            file.write(image, metadata={"axes": "TCYX" if image.ndim == 4 else "TYX"})
    net = tmp_path / "net.py"
    net.write_text("import torch\ndef two():\n    return torch.nn.Conv2d(2, 2, 3, padding=1)\n")
    how = {"model": f"{net}:two", "normalize": "none"}

    def pairs(name: str, **more: Any) -> Any:
        specs = {"in_spec": str(tmp_path / name), "target_spec": str(tmp_path / name)}
        return Pairs(config_of(tmp_path, **how, **specs, **more))

    for workload in (pairs("a.npy", axes="tcyx"), pairs("a.ome.tif", series=1)):
        np.testing.assert_array_equal(workload.train[0][0], values[0, :, :8, :8])
    with pytest.raises(UsageError, match=r"--in-spec has 5 channels; model .* takes 2"):
        pairs("a.npy")
    with pytest.raises(UsageError, match=r"--in-spec .*a\.ome\.tif: holds 2 series"):
        pairs("a.ome.tif")


def test_extents_must_agree(tmp_path) -> None:
    from penstock.training.workloads.pairs import Pairs

    np.save(tmp_path / "a.npy", np.zeros((16, 16, 16), np.uint8))
    np.save(tmp_path / "b.npy", np.zeros((16, 16, 17), np.uint8))
    specs = {"in_spec": str(tmp_path / "a.npy"), "target_spec": str(tmp_path / "b.npy")}
    with pytest.raises(UsageError, match=r"extent \(1, 16, 16, 17\) along t z y x"):
        Pairs(config_of(tmp_path, **specs))


assert AXES == "tczyx"  # what the shapes above are written in
