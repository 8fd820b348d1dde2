"""Networks that change the number of voxels by a constant factor."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn
from torch.nn import functional

import penstock
from penstock.base import UsageError
from penstock.cli import main
from penstock.data import Box, ScaledGrid, open_source

from ..parameters import mainly
from .kit import Array, values

SHAPE = (13, 38, 29)


def volume(shape: tuple[int, ...] = SHAPE) -> Array:
    return np.random.default_rng(0).integers(0, 900, shape).astype("uint16")


class Pooled(nn.Module):
    """Means of windows, features for every n-th voxel, and the input as it is."""

    def __init__(self, *sides: int) -> None:
        super().__init__()
        self.sides = sides

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        pool = functional.avg_pool3d if len(self.sides) == 3 else functional.avg_pool2d
        return {"coarse": pool(x, self.sides), "same": x + 0.0}


class Finer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.interpolate(x, scale_factor=2, mode="nearest")


def pooled(array: Array, sides: tuple[int, ...]) -> Array:
    """The means of windows, reflected past the upper edges as a job does."""
    more = [(0, -n % side) for n, side in zip(array.shape, sides, strict=True)]
    whole = np.pad(array.astype(float), more, mode="reflect")
    parts = [n for all_, side in zip(whole.shape, sides, strict=True) for n in (all_ // side, side)]
    return whole.reshape(parts).mean(axis=(1, 3, 5))


KNOBS: dict[str, Any] = {
    "devices": "cpu", "normalize": "none", "head_kind": "intensity", "denormalize": False,
    "out_dtype": "float32", "overwrite": True, "levels": "none",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small_bricks(monkeypatch) -> None:
    monkeypatch.setattr("penstock.inference.planning.cuts.BRICK_VOXELS", 9000)


@pytest.mark.slow
@pytest.mark.parametrize("seam", mainly(["trim", "blend"], 0))
def test_features_for_every_nth_voxel_have_their_own_shape_and_scale(tmp_path, seam: str) -> None:
    array, outs = volume(), [str(tmp_path / "coarse.ome.zarr"), str(tmp_path / "same.ome.zarr")]
    knobs = KNOBS | {"model": Pooled(1, 4, 2), "patch": 16, "seam_mode": seam, "chunks": (8, 4, 8)}
    penstock.run_inference(array, outs, **knobs, in_voxel_size="3 1 1 um")
    coarse = values(outs[0])[0, 0]
    assert coarse.shape == (13, 10, 15)
    assert np.allclose(coarse, pooled(array, (1, 4, 2)), rtol=0, atol=1e-3)
    assert np.allclose(values(outs[1])[0, 0], array, rtol=0, atol=1e-3)
    frame = open_source(outs[0])
    assert frame.scale == (1, 1, 3, 4, 2)
    assert frame.translation == (0, 0, 0, 1.5, 0.5)
    for more in ({"block": 16, "parts": 4}, {"block": 32, "prep_workers": 1}):
        again = [str(tmp_path / "c2.ome.zarr"), str(tmp_path / "s2.ome.zarr")]
        penstock.run_inference(array, again, **knobs, **more, in_voxel_size="3 1 1 um")
        assert np.array_equal(values(again[0])[0, 0], coarse)


@pytest.mark.slow
def test_super_resolution_has_finer_voxels_in_2d_and_3d(tmp_path) -> None:
    array, out = volume((9, 22, 19)), str(tmp_path / "out.ome.zarr")
    knobs = KNOBS | {"model": Finer(), "chunks": 8}
    penstock.run_inference(array, out, **knobs, patch=16, overlap=5, in_voxel_size="3 1 1 um")
    finer = array.repeat(2, 0).repeat(2, 1).repeat(2, 2)
    assert np.array_equal(values(out)[0, 0], finer)
    assert open_source(out).scale == (1, 1, 1.5, 0.5, 0.5)
    assert open_source(out).translation == (0, 0, -0.75, -0.25, -0.25)
    for more in ({"block": 16}, {"block": 20, "chunks": 10}):
        penstock.run_inference(array, out, **knobs | more, patch=16, overlap=5)
        assert np.array_equal(values(out)[0, 0], finer)
    penstock.run_inference(array, out, **knobs, patch=(16, 16), overlap=5)
    assert np.array_equal(values(out)[0, 0], array.repeat(2, 1).repeat(2, 2))


@pytest.mark.slow
def test_a_run_of_two_grids_goes_on_and_is_verified(tmp_path) -> None:
    net = tmp_path / "net.py"
    net.write_text(
        "import torch\n"
        "class Net(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        fine = x.repeat_interleave(2, 2).repeat_interleave(2, 3)\n"
        "        coarse = torch.nn.functional.max_pool3d(x, 4)\n"
        "        return {'fine': fine.repeat_interleave(2, 4), 'coarse': coarse}\n"
        "def make():\n    return Net()\n"
    )
    np.save(tmp_path / "in.npy", volume())
    outs = [str(tmp_path / "fine.ome.zarr"), str(tmp_path / "coarse.ome.zarr")]
    flags = [
        *("--in-spec", str(tmp_path / "in.npy"), "--out-spec", *outs, "--devices", "cpu"),
        *("--model-type", f"{net}:make", "--patch", "16", "--overlap", "8", "--block", "16"),
        *("--chunks", "4", "--head-kind", "scores", "--normalize", "none", "--mask", "MASK"),
    ]
    mask = np.ones(SHAPE, "uint8")
    mask[:, :20] = 0
    np.save(tmp_path / "mask.npy", mask)
    flags[flags.index("MASK")] = str(tmp_path / "mask.npy")
    for step in (["--prepare"], ["--part", "1/2"], ["--part", "2/2"], ["--finish"]):
        assert main(["infer", *flags, "--workers", "2", *step]) == 0
    fine = values(outs[0])[0, 0]
    wanted = (volume() * mask).repeat(2, 0).repeat(2, 1).repeat(2, 2)
    assert np.array_equal(fine, wanted)
    assert values(outs[1])[0, 0].shape == (4, 10, 8)
    assert not values(outs[1])[0, 0, :, :5].any()
    verify = ["verify", outs[0], "--recompute", "0.5", "--trust-model"]
    assert main([*verify, "--model", f"{net}:make"]) == 0


def test_a_mask_on_another_grid_is_that_of_the_nearest_voxels() -> None:
    mask = np.array([True, False, False, True, True])[None, None]
    box = Box((0, 0, 0), (1, 1, 5))
    for factor, wanted in ((2, [1, 1, 0, 0, 0, 0, 1, 1, 1, 1]), (Fraction(1, 2), [0, 1, 1])):
        grid = ScaledGrid((Fraction(1), Fraction(1), Fraction(factor)))
        assert grid.mask(mask, box)[0, 0].tolist() == [*map(bool, wanted)]


@pytest.mark.parametrize(
    ("net", "knobs", "message"),
    [
        (Pooled(4, 4, 4), {"overlap": 6}, "`overlap` must be a multiple of 8"),
        (Pooled(4, 4, 4), {"overlap": 10, "patch": 18}, "the two must be equal, or one a whole"),
        (nn.Conv3d(1, 1, 9), {"overlap": 0}, "no constant factor"),
        (nn.Conv3d(1, 1, 3), {}, "the two must be equal"),
        (Finer(), {"voxel_size": "2um", "in_voxel_size": "1um"}, "output_voxel_size"),
    ],
)
def test_what_cannot_be_exact_is_refused(net, knobs, message) -> None:
    outs = [np.zeros(SHAPE, "float32")] * (2 if isinstance(net, Pooled) else 1)
    with pytest.raises(UsageError, match=message):
        penstock.plan_inference(
            volume(), outs, **{"model": net, "patch": 16, "normalize": "none",
                               "head_kind": "scores", "devices": "cpu"} | knobs,
        )  # fmt: skip


def test_a_default_overlap_is_the_next_that_fits() -> None:
    outs = [np.zeros((4, 10, 8), "float32"), np.zeros(SHAPE, "float32")]
    plan = penstock.plan_inference(
        volume(), outs, model=Pooled(4, 4, 4), patch=32, normalize="none", head_kind="scores",
        devices="cpu",
    )  # fmt: skip
    assert plan.geometry.overlap == (16, 16, 16)
    assert plan.output_bytes == 4 * (4 * 10 * 8 + 13 * 38 * 29)
