"""Scores that are reduced before they are written, and means over views of the input."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.base.errors import StageError, UsageError
from penstock.cli import main
from penstock.models import probabilities_of, to_probabilities_

from ..later import imported_later
from ..parameters import mainly
from .kit import Array, values

zarr = imported_later("zarr")
SHAPE = (14, 22, 19)
VOLUME = np.random.default_rng(0).normal(0, 1, SHAPE).astype("float32")
KNOBS: dict[str, Any] = {"patch": 10, "overlap": 3, "devices": "cpu", "normalize": "none"}


class Classes(nn.Module):
    """Probabilities of four classes."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Conv3d(1, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(self.net(x), 1)


def scores(seam: str, **knobs: Any) -> Array:
    out = np.zeros((4, *SHAPE), "float32")
    penstock.run_inference(
        VOLUME, out, model=Classes(), head_kind="scores", seam_mode=seam, **KNOBS, **knobs
    )
    return out


def reduced(seam: str, how: str, *outs: Array, model: Any = None, **knobs: Any) -> Any:
    return penstock.run_inference(
        VOLUME, [*outs], **{"model": model or Classes(), "reduce": how, "seam_mode": seam}
        | KNOBS | knobs
    )  # fmt: skip


@pytest.mark.parametrize("seam", mainly(["trim", "blend"], 1))
def test_scores_are_reduced_after_seams_are_joined(seam: str) -> None:
    right = scores(seam)
    labels = np.zeros(SHAPE, "uint8")
    reduced(seam, "argmax", labels, head_kind="scores")  # which it takes anyway
    np.testing.assert_array_equal(labels, right.argmax(0))
    above = np.zeros((4, *SHAPE), "uint8")
    reduced(seam, "threshold:0.4", above)
    np.testing.assert_array_equal(above, right > 0.4)
    numbers, best = np.zeros((2, *SHAPE), "int32"), np.zeros((2, *SHAPE), "float32")
    reduced(seam, "top:2", numbers, best, block=10)
    order = np.argsort(-right, axis=0, kind="stable")[:2]
    np.testing.assert_array_equal(numbers, order)
    np.testing.assert_array_equal(best, np.take_along_axis(right, order, 0))


@pytest.mark.parametrize(("views", "count"), [("flips", 8), ("rotations", 4)])
def test_a_mean_over_views_is_that_of_each(views: str, count: int) -> None:
    net, total, turns = Classes(), torch.zeros(4, *SHAPE), []
    padded = torch.from_numpy(VOLUME)[None, None]
    if views == "flips":
        turns = [[a for a in (2, 3, 4) if number >> a - 2 & 1] for number in range(8)]
    with torch.no_grad():
        for number in range(count):
            if views == "flips":
                total += net(padded.flip(turns[number])).flip(turns[number])[0]
            else:
                total += net(padded.rot90(number, (3, 4))).rot90(-number, (3, 4))[0]
    made = scores("trim", tta=views)
    inner = np.s_[:, 1:-1, 1:-1, 1:-1]  # the network pads edges with zeros, and a job reflects
    np.testing.assert_allclose(made[inner], (total / count)[inner], atol=1e-6)


class Wild(Classes):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 2, torch.nan, super().forward(x))


@pytest.mark.parametrize(
    ("how", "knobs", "sentence"),
    [
        ("median", {}, "`reduce` median is not argmax, threshold:X or top:K"),
        ("top:0", {}, "`reduce` top:0 is not argmax"),
        ("threshold:nan", {}, "`reduce` threshold:nan is not argmax"),
        ("top:9", {}, "`reduce` top:9: head out has 4 channels"),
        ("argmax", {"model": nn.Conv3d(1, 1, 3, padding=1)}, "argmax: head out has 1 channel"),
        ("argmax", {"head_kind": "labels"}, "leave out `head_kind`"),
        ("argmax", {"tta": "rotations", "patch": (8, 8, 10)}, "not 8 and 10"),
    ],
)
def test_what_cannot_be_reduced_is_refused(how: str, knobs: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        reduced("blend", how, np.zeros(SHAPE, "uint8"), **knobs)
    assert sentence in str(caught.value)


def test_scores_that_are_not_finite_are_no_labels() -> None:
    with pytest.raises(StageError, match=r"NaN or infinite"):
        reduced("trim", "argmax", np.zeros(SHAPE, "uint8"), model=Wild())


@pytest.mark.slow
@pytest.mark.parametrize(("seam", "version"), mainly([("trim", "0.4"), ("blend", "0.5")], 1))
def test_scores_in_whole_numbers_say_what_they_stand_for(seam: str, version: str, tmp_path) -> None:
    right, out = scores(seam), str(tmp_path / "out.zarr")
    how = {"model": Classes(), "head_kind": "scores", "seam_mode": seam, "out_dtype": "uint8",
           "ome_zarr": version}  # fmt: skip
    penstock.run_inference(VOLUME, out, levels=2, **how, **KNOBS)
    array = zarr.open_group(out)["0"]
    assert (array.dtype, array.attrs["scale_factor"]) == (np.uint8, 1 / 255)
    for level in (0, 1):  # both are read as what they stand for
        source = penstock.open_source(out, level=level)
        assert source.dtype == np.float32 and 0.3 < source.read(source.domain).max() <= 1
    np.testing.assert_allclose(values(out)[0], right, atol=0.5 / 255 + 1e-6)
    assert main(["verify", out]) == 0
    penstock.run_inference(VOLUME, out, levels=2, resume=True, **how, **KNOBS)
    numbers, best = str(tmp_path / "n.zarr"), str(tmp_path / "best.zarr")
    reduced(seam, "top:2", numbers, best, out_dtype=("uint8", "uint16"))  # type: ignore[arg-type]
    np.testing.assert_allclose(values(best)[0], -np.sort(-right, 0)[:2], atol=1e-5)
    assert values(numbers).dtype == np.uint8


def test_a_plan_says_that_whole_numbers_keep_no_scores(tmp_path, capsys) -> None:
    np.save(tmp_path / "in.npy", VOLUME)
    words = ["infer", "--in-spec", str(tmp_path / "in.npy"), "--model", "identity", "--dry-run"]
    words += "--head-kind scores --out-dtype uint8 --normalize none --devices cpu".split()
    said = {}
    for out in ("a.n5", "a.ome.tif", "a.zarr"):
        assert main([*words, "--out-spec", str(tmp_path / out)]) == 0
        said[out] = "so one from 0 to 1 becomes 0 or 1" in capsys.readouterr().out
    assert said == {"a.n5": True, "a.ome.tif": True, "a.zarr": False}


@pytest.mark.parametrize("exclusive", [True, False])
def test_probabilities_of_a_voxel_have_the_same_bits_in_any_shape(exclusive: bool) -> None:
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(9, 7, 11, 13)) * 60).astype("float32")
    whole = logits.copy()
    to_probabilities_(whole, exclusive=exclusive)
    wanted = probabilities_of(torch.from_numpy(logits[None]), exclusive=exclusive)[0].numpy()
    assert np.abs(whole - wanted).max() < 1e-6
    for _ in range(30):
        starts = [int(rng.integers(0, n)) for n in logits.shape[1:]]
        box = (slice(None), *(slice(a, a + int(rng.integers(1, 9))) for a in starts))
        for part in (logits[box].copy(), logits.copy()[box]):
            to_probabilities_(part, exclusive=exclusive)
            assert np.array_equal(part, whole[box])
