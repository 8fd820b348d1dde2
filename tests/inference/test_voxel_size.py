"""A network sees voxels of the size that it was trained at, and its outputs go back."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock
from penstock.base import InferConfig, Refused, UsageError
from penstock.data import Box, Resampling, open_sink, open_source
from penstock.inference.opening.network_voxels import network_grid
from penstock.inference.tiling.geometry import Geometry
from penstock.inference.tiling.parts import Parts
from penstock.inference.tiling.stitch import Assembly
from penstock.inference.tiling.traffic import open_peak
from penstock.models import Recipe, load_model

from ..geometries import geometries
from ..later import imported_later
from ..parameters import mainly
from .kit import Array, values

ndimage = imported_later("scipy.ndimage")
SHAPE = (12, 29, 23)
SIZES = (1.0, 0.5, 0.5)
AS_SEEN = (12, 18, 38)
"""The shape of the volume in voxels of 1, 0.8 and 0.3."""
AS_IT_IS: dict[str, Any] = {
    "model": "identity", "devices": "cpu", "patch": 8, "overlap": 2, "normalize": "none",
    "head_kind": "intensity", "denormalize": False, "out_dtype": "float32", "chunks": 4,
    "levels": "none", "overwrite": True,
}  # fmt: skip


def written(place: Path, array: Array, sizes: tuple[float, ...] | None = SIZES) -> str:
    """An OME-Zarr of an array (z, y, x) in micrometers; without a size in a plain Zarr array."""
    frame = open_source(array, name="in")
    if sizes is not None:
        frame.scale, frame.units = (1, 1, *sizes), (None, None, *["micrometer"] * 3)
    sink = open_sink(
        str(place), domain=frame.domain, dtype=array.dtype, like=frame, chunks=(8,) * 3
    )
    sink.create()
    sink.write(frame.domain, array[None, None])
    sink.close()
    return str(place)


@pytest.fixture(scope="module")
def volume(tmp_path_factory) -> str:
    array = np.random.default_rng(0).integers(0, 1000, SHAPE).astype("uint16")
    return written(tmp_path_factory.mktemp("voxels") / "in.ome.zarr", array)


def zoomed(array: Array, shape: tuple[int, ...], order: int) -> Array:
    zoom = [to / of for of, to in zip(array.shape, shape, strict=True)]
    made: Array = ndimage.zoom(
        array.astype(float), zoom, order=order, mode="nearest", grid_mode=True
    )
    return made


@pytest.fixture(autouse=True)
def _small_bricks(monkeypatch) -> None:
    monkeypatch.setattr("penstock.inference.planning.cuts.BRICK_VOXELS", 3000)


@pytest.mark.parametrize(("order", "seam"), mainly([(0, "blend"), (1, "trim"), (3, "blend")]))
def test_voxels_are_scipys_there_and_back(volume: str, tmp_path, order: int, seam: str) -> None:
    out = str(tmp_path / "out.ome.zarr")
    knobs = AS_IT_IS | {"voxel_size": "1 0.8 0.3", "resample_order": order, "seam_mode": seam}
    penstock.run_inference(volume, out, **knobs, output_voxel_size="network")
    there = zoomed(values(volume)[0, 0], AS_SEEN, order)
    frame = open_source(out)
    assert np.abs(values(out)[0, 0] - there).max() < 1000e-5
    assert frame.scale == pytest.approx((1, 1, 1, 29 * 0.5 / 18, 23 * 0.5 / 38))
    assert frame.translation == pytest.approx((0, 0, 0, 29 / 72 - 0.25, 23 / 152 - 0.25))
    penstock.run_inference(volume, out, **knobs)
    back = values(out)
    assert np.abs(back[0, 0] - zoomed(there, SHAPE, min(order, 1))).max() < 1000e-5
    assert open_source(out).scale == (1, 1, *SIZES)
    for more in ({"block": 8}, {"block": (12, 8, 20), "prep_workers": 1}, {"parts": 5}):
        penstock.run_inference(volume, out, **knobs, **more)
        assert np.array_equal(values(out), back)
        if order < 3:
            break


@pytest.mark.slow
@given(geometries(), st.tuples(*[st.integers(1, 12)] * 3), st.sampled_from([0, 1]))
def test_bricks_make_other_blocks(geometry: Geometry, shape: tuple[int, ...], order: int) -> None:
    back = Resampling(geometry.domain, Box.of(geometry.anchor, shape), order)
    geometry = replace(geometry, back=back)
    domain = geometry.domain
    array = np.random.default_rng(0).random(domain.shape)
    labels = np.arange(domain.size).reshape(domain.shape)
    whole = back.apply(array[None], domain, back.to)[0]
    nearest = back.of_order(0).apply(labels[None], domain, back.to)[0]
    made, chosen, most = np.full(shape, np.nan), np.full(shape, -1), 0
    for number, _ in enumerate(geometry.parts):
        assembly = Assembly(
            geometry, lambda head, sides: np.zeros((1, *sides), (float, int)[head]), [True, False]
        )
        for brick in Parts(geometry, 1).bricks([number]):
            support = np.zeros((1, *brick.support.shape))
            core = brick.core.within(brick.support)
            support[(slice(None), *core)] = array[brick.core.within(domain)]
            heads = [support, labels[brick.core.within(domain)][None]]
            for block in assembly.add(brick, heads):
                place, held = block.box.within(back.to), block.held
                made[place] = back.apply(block.arrays[0], held, block.box)[0]
                chosen[place] = back.of_order(0).apply(block.arrays[1], held, block.box)[0]
            most = max(most, sum(block.held.size for block in assembly.open.values()))
        assert not assembly.open
    assert np.array_equal(made, whole)
    assert np.array_equal(chosen, nearest)
    assert most <= open_peak(geometry)


class _Scores(nn.Module):
    """Two scores: the value, and what is left of 1000."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, 1000 - x], 1)


@pytest.mark.slow
def test_scores_go_back_before_they_become_labels(volume: str) -> None:
    knobs = AS_IT_IS | {"model": _Scores(), "voxel_size": "1 0.8 0.3", "chunks": None}
    del knobs["head_kind"], knobs["out_dtype"]
    out = np.zeros(SHAPE, "uint8")
    penstock.run_inference(volume, out, **knobs, reduce="argmax")
    scores = zoomed(zoomed(values(volume)[0, 0], AS_SEEN, 3), SHAPE, 1)
    sure = np.abs(scores - 500) > 0.01
    assert np.array_equal(out[sure], (scores < 500)[sure])


class _Labels(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.round().to(torch.int32)


def test_a_mask_of_the_inputs_shape_lies_over_it(volume: str, tmp_path) -> None:
    inside = np.zeros(SHAPE, "uint8")
    inside[3:9, 5:20, 6:15] = 1
    np.save(tmp_path / "mask.npy", inside)
    made = []
    for mask in (str(tmp_path / "mask.npy"), written(tmp_path / "mask.ome.zarr", inside)):
        made.append(np.zeros(SHAPE, "float32"))
        penstock.run_inference(volume, made[-1], **AS_IT_IS, voxel_size="1 0.8 0.3", mask=mask)
    assert made[0].any() and np.array_equal(*made)


def test_labels_go_back_by_the_nearest_voxel(volume: str) -> None:
    knobs = AS_IT_IS | {"model": _Labels(), "voxel_size": "1 0.8 0.3", "resample_order": 0}
    out = np.zeros(SHAPE, "int32")
    penstock.run_inference(volume, out, **knobs | {"head_kind": "labels", "out_dtype": None})
    nearest = zoomed(zoomed(values(volume)[0, 0], AS_SEEN, 0), SHAPE, 0)
    assert np.array_equal(out, nearest)


def spheres(step: float, count: int, side: int) -> tuple[Array, Array]:
    """Balls of radius 3 in a cube, in voxels of ``step``, and their centres."""
    rng = np.random.default_rng(5)
    centres: list[Array] = []
    while len(centres) < count:
        centre = rng.uniform(6, side - 6, 3)
        if all(np.linalg.norm(centre - other) > 10 for other in centres):
            centres.append(centre)
    places = (np.arange(round(side / step)) + 0.5) * step
    array = np.zeros((len(places),) * 3)
    for centre in centres:
        z, y, x = ((places - middle) ** 2 for middle in centre)
        distance = np.sqrt(z[:, None, None] + y[:, None] + x)
        array = np.maximum(array, 1 / (1 + np.exp((distance - 3) / 0.3)))
    noisy = array + rng.normal(0, 0.05, array.shape)
    return (1000 * np.clip(noisy + 0.5, 0, 2)).astype("uint16"), np.array(centres)


def _gaussian(sigma: float) -> nn.Module:
    weights = torch.exp(-((torch.arange(17) - 8.0) ** 2) / (2 * sigma**2))
    layers = []
    for axis in range(3):
        sides = [17 if each == axis else 1 for each in range(3)]
        padding = [8 if each == axis else 0 for each in range(3)]
        layers.append(nn.Conv3d(1, 1, sides, padding=padding, bias=False))
        layers[-1].weight.data = (weights / weights.sum()).view(1, 1, *sides)
    return nn.Sequential(*layers)


class _Blobs(nn.Module):
    """The difference of two Gaussians, which is largest in balls of radius 3."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = _gaussian(1.7), _gaussian(2.8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x / 1000
        return torch.sigmoid(40 * (self.narrow(x) - self.wide(x) - 0.24))


def f1_of(labels: Array, centres: Array, step: float) -> float:
    """Each object is counted for the one centre within 2 of its own."""
    parts, count = ndimage.label(labels)
    middles = np.array(ndimage.center_of_mass(parts > 0, parts, range(1, count + 1)))
    if not count:
        return 0.0
    apart = np.linalg.norm(((middles + 0.5) * step)[:, None] - centres, axis=-1)
    near = (apart < 2).sum()
    return float(2 * min(near, len(centres)) / (count + len(centres)))


@pytest.mark.slow
def test_objects_are_those_at_the_voxel_size_of_the_training(tmp_path) -> None:
    coarse, centres = spheres(1.0, 6, 32)
    fine, _ = spheres(0.5, 6, 32)
    knobs: dict[str, Any] = {
        "model": _Blobs(), "devices": "cpu", "patch": 48, "overlap": 16, "normalize": "none",
        "reduce": "threshold:0.5",
    }  # fmt: skip
    scored = {}
    for name, array, step, more in (
        ("trained", coarse, 1.0, {}),
        ("resampled", fine, 0.5, {"voxel_size": "1um"}),
        ("as it is", fine, 0.5, {}),
    ):
        spec, out = written(tmp_path / f"{name}.zarr", array, (step,) * 3), np.zeros_like(array)
        out = out.astype("uint8")
        penstock.run_inference(spec, out, **knobs, **more)
        scored[name] = f1_of(out, centres, step)
    print(scored)
    assert scored["trained"] > 0.9
    assert abs(scored["resampled"] - scored["trained"]) <= 0.02
    assert scored["as it is"] < 0.7


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"voxel_size": "0 1 1"}, "above 0"),
        ({"voxel_size": ("-1", "1", "1")}, "above 0"),
        ({"voxel_size": "nan"}, "above 0"),
        ({"voxel_size": "1 2"}, "not a size"),
        ({"voxel_size": "one"}, "not a size"),
        ({"voxel_size": "1e-300"}, "voxels of the"),
        ({"voxel_size": "1 s"}, "second"),
        ({"voxel_size": "1", "resample_order": 2}, "`resample_order`"),
        ({"voxel_size": "0.7", "missing": "error"}, "`missing` error"),
    ],
)
def test_bad_sizes_are_refused(volume: str, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        penstock.plan_inference(volume, np.zeros(SHAPE, "uint16"), model="identity", **knobs)


def test_a_size_that_blows_a_block_is_refused_by_the_plan(volume: str) -> None:
    plan = penstock.plan_inference(
        volume, np.zeros(SHAPE, "uint16"), model="identity", patch=64, voxel_size="100um",
        resample_order=1,
    )  # fmt: skip
    assert plan.memory.bricks < 2**26
    plan = penstock.plan_inference(
        volume, np.zeros(SHAPE, "uint16"), model="identity", voxel_size="0.001um", patch=200,
        max_memory="500MiB",
    )  # fmt: skip
    with pytest.raises(Refused, match="give a larger --voxel-size or a larger --max-memory"):
        plan.refuse()


def test_the_model_says_the_size_unless_the_user_does(volume: str, tmp_path, monkeypatch) -> None:
    recipe = Recipe("plans.json", spacing=(0.001, 0.0008, 0.0003), unit="millimeter")
    model = replace(load_model("identity", None, None), recipe=recipe)
    monkeypatch.setattr("penstock.inference.opening.job.load_model", lambda *_, **__: model)
    out = np.zeros(SHAPE, "uint16")

    def notes(spec: str = volume, **knobs: Any) -> str:
        plan = penstock.plan_inference(spec, out, model="identity", **knobs)
        return "; ".join(plan.facts.notes)

    assert "12 x 18 x 38 of them, by the network's voxel size (plans.json)" in notes()
    assert "--voxel-size 2um wins over 0.001 x 0.0008 x 0.0003" in notes(voxel_size="2um")
    assert "become" not in notes(voxel_size="none")
    assert "nothing is resampled" in notes(in_voxel_size="1 0.8 0.3 um")
    bare = np.zeros(SHAPE, "uint16")
    with pytest.raises(UsageError, match="says no voxel size, which"):
        penstock.plan_inference(bare, out, model="identity")
    plan = penstock.plan_inference(bare, out, model="identity", in_voxel_size="1 .5 .5 um")
    assert "12 x 18 x 38" in "; ".join(plan.facts.notes)
    zero = replace(model, recipe=replace(recipe, spacing=(math.nan, 0.0, 1.0)))
    monkeypatch.setattr("penstock.inference.opening.job.load_model", lambda *_, **__: zero)
    with pytest.raises(UsageError, match=r"\(plans.json\) is 0 along y; give a .* above 0"):
        notes()


def test_an_axis_that_the_way_back_would_not_take_alone_is_told() -> None:
    source = open_source(np.zeros((8, 8, 8), "uint8"))
    said = InferConfig(in_spec="a", out_spec="b", model_type="c")
    for have, wanted, is_said in (
        ((9.0, 1.0, 1.0), (1.0, 1.0, 4.0), True),
        ((9.0, 1.0, 1.0), (2.0, 1.0, 1.0), False),
    ):
        source.scale, source.units = (1, 1, *have), (None, None, *["millimeter"] * 3)
        recipe = Recipe("net", spacing=wanted, unit="millimeter", most_anisotropy=3.0)
        way, notes = network_grid(said, source, recipe)
        assert way is not None and way.nearest == 0 and way.order == 3
        assert any("on the way back" in note for note in notes) == is_said
        linear = replace(recipe, order=1)
        asked = said.model_copy(update={"resample_order": 3})
        ways = [network_grid(config, source, linear)[0] for config in (said, asked)]
        assert [way and way.order for way in ways] == [1, 3], "the user's wins"
