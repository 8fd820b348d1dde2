"""What heads are: said, known or judged on a patch; and what becomes of their values.

Intensities go back to the range of the input, scores stay what they are, labels are never mixed and
never pass through a float. A numpy oracle cuts the volume anew.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import penstock
from penstock.base import InferConfig, StageError, UsageError, build
from penstock.inference.opening.job import Job

from ..parameters import mainly
from .kit import Array, arange, run

CPU: dict[str, Any] = {"patch": 8, "overlap": 2, "devices": "cpu"}
SHAPE = (10, 11, 12)
"""Of eight such patches."""


class Net(nn.Module):
    """A function as a module of the user's own."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def classes(x: Tensor) -> Tensor:
    """Labels 0, 1 and 2, by the brightness of a voxel that was brought to 0 to 1."""
    return (x > 0.3).long() + (x > 0.6).long()


def noise(shape: tuple[int, ...] = SHAPE, dtype: str = "uint16") -> Array:
    return np.random.default_rng(0).integers(0, 4000, shape).astype(dtype)


def into_zarr(source: Array, net: Any, tmp_path, **knobs: Any) -> Array:
    """Infer into a new output, whose dtype is ours to choose."""
    out = tmp_path / "out.zarr"
    penstock.run_inference(source, out, model=net, **(CPU | knobs))
    result: Array = (
        ts.open({"driver": "zarr3", "kvstore": f"file://{out}/0/"}).result().read().result()
    )
    return result


@pytest.mark.parametrize(
    ("made", "dtype", "label"), [("bool", "uint8", 1), ("uint64", "uint64", 2**62 + 1)]
)
def test_labels_have_the_dtype_of_the_net(made: str, dtype: str, label: int, tmp_path) -> None:
    net = Net(lambda x: ((x > 2000).long() * label).to(getattr(torch, made)))
    out = into_zarr(noise(), net, tmp_path, normalize="none")
    assert out.dtype == dtype
    assert (out == (noise() > 2000) * np.array(label, dtype)).all()


def test_a_label_that_does_not_fit_stops_the_job_and_the_named_dtype_holds_it(tmp_path) -> None:
    net = Net(lambda x: 300 * (x > 2000).long())
    with pytest.raises(StageError, match=r"from 0 to 300, which uint8 .*`out_dtype` 'uint16'"):
        into_zarr(noise(), net, tmp_path, normalize="none", out_dtype="uint8")
    out = into_zarr(noise(), net, tmp_path, normalize="none", out_dtype="uint16", overwrite=True)
    assert out.dtype == np.uint16
    assert (out == (noise() > 2000) * 300).all()


def test_labels_that_come_as_floats_must_be_whole(tmp_path) -> None:
    whole = Net(lambda x: 3 * (x > 2000).float())
    out = into_zarr(noise(), whole, tmp_path, normalize="none", head_kind="labels")
    assert out.dtype == np.int32
    assert set(np.unique(out)) == {0, 3}
    with pytest.raises(StageError, match="not whole numbers; give `head_kind` scores"):
        run(noise(), Net(lambda x: x / 3), normalize="none", head_kind="labels", patch=8, overlap=2)


def test_scores_are_floats_and_never_denormalised(tmp_path) -> None:
    data = noise()
    net = Net(lambda x: torch.sigmoid(4 * x - 2))
    out = into_zarr(data, net, tmp_path, normalize="global", head_kind="scores", seam_mode="blend")
    low, high = np.percentile(data, (0.5, 99.9))
    expected = 1 / (1 + np.exp(2 - 4 * (data - low) / (high - low)))
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, expected, atol=1e-5)


def softmax(x: Tensor) -> Tensor:
    return torch.cat([x, -x, 0 * x], 1).softmax(1)


@pytest.mark.parametrize(
    ("net", "said"),
    [(torch.sigmoid, "lies between 0"), (softmax, "lies between"),
     (lambda x: torch.cat([1 - x, x], 1), "sums to 1 over its 2 channels")],
)  # fmt: skip
def test_what_looks_like_probabilities_is_refused(net, said, tmp_path) -> None:
    out = tmp_path / "out.zarr"
    with pytest.raises(UsageError, match=f"{said}.*`head_kind` scores") as refused:
        penstock.run_inference(noise(), out, model=Net(net), **CPU)
    assert "\n" not in str(refused.value)
    assert not out.exists()


def test_a_patch_that_varies_is_looked_for() -> None:
    """Zeros in the middle of a volume say nothing: half is what a sigmoid makes of them."""
    data = np.zeros((40, 40, 40), "float32")
    data[8:12, 28:32, 8:12] = noise((4, 4, 4), "float32")
    with pytest.raises(UsageError, match="`head_kind`"):
        run(data, Net(torch.sigmoid), patch=8, overlap=2, normalize="none")


def test_an_image_between_0_and_1_may_stay_there() -> None:
    data = np.random.default_rng(1).random((16, 16, 16)).astype("float32")
    assert (run(data, Net(lambda x: x), patch=8, overlap=2, normalize="none") == data).all()
    clipped = run(noise(), Net(lambda x: x), patch=8, overlap=2, normalize="global", clip_norm=())
    assert clipped.max() > 3000


def test_channels_of_the_input_that_add_up_to_1_may_do_so_in_the_output() -> None:
    data = np.random.default_rng(1).normal(0, 3, (3, 16, 16, 16)).astype("float32")
    knobs: dict[str, Any] = {"patch": 8, "overlap": 2, "normalize": "none", "in_channels": 3}
    with pytest.raises(UsageError, match="`head_kind`"):
        run(data, Net(lambda x: x - x.mean(1, keepdim=True) + 1 / 3), **knobs)
    data[2] = 1 - data[0] - data[1]
    assert (run(data, Net(lambda x: x), **knobs) == data).all()


def test_complex_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="complex"):
        run(noise(), Net(lambda x: torch.complex(x, x)), patch=8, overlap=2)


def lines(net: Any, **knobs: Any) -> list[str]:
    outs = knobs.pop("out_spec", np.zeros(SHAPE))
    plan = penstock.plan_inference(noise(), outs, model=net, **(CPU | knobs))
    return [text for what, text in plan.lines() if what == "head"]


def test_a_plan_says_what_is_assumed() -> None:
    assert lines(Net(lambda x: x))[0].startswith("out: intensity, assumed")
    assert lines(Net(classes))[0].startswith("out: labels, assumed")
    for shown in (lines("identity"), lines(Net(torch.sigmoid), head_kind="scores")):
        assert "assumed" not in shown[0]


def two(x: Tensor) -> dict[str, Tensor]:
    return {"soft": torch.sigmoid(x), "seg": x.clamp(0, 1).round()}


OUTS = (np.zeros(SHAPE, "float32"), np.zeros(SHAPE, "int32"))


@pytest.mark.parametrize(
    ("said", "kinds"),
    [("scores", ["scores", "scores"]), (["scores", "labels"], ["scores", "labels"]),
     ({"seg": "labels", "soft": "scores"}, ["scores", "labels"]),
     (["seg=labels", "soft=intensity"], ["intensity", "labels"])],
)  # fmt: skip
def test_kinds_are_said_for_all_for_each_or_by_name(said: Any, kinds: list[str]) -> None:
    shown = lines(Net(two), out_spec=OUTS, head_kind=said, normalize="none")
    assert [line.split(": ")[1].partition(";")[0] for line in shown] == kinds


@pytest.mark.parametrize(
    ("said", "message"),
    [("mask", "'mask' is not intensity, scores, labels"), (["scores"] * 3, "names 3 kinds but"),
     ({"nose": "labels"}, "`head_kind` 'nose': the model has no such head, but soft, seg"),
     (["seg=labels", "scores"], "and not both"), ({"seg": "labels"}, "head soft lies between")],
)  # fmt: skip
def test_a_kind_that_cannot_be_is_refused(said: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        lines(Net(two), out_spec=OUTS, head_kind=said, normalize="none")


def test_a_run_of_another_kind_is_another_run(tmp_path) -> None:
    data, out, net = noise(), tmp_path / "out.zarr", Net(lambda x: (x > 2000).to(torch.int32))
    knobs: dict[str, Any] = {"model": net, "normalize": "none", "out_dtype": "int32", **CPU}
    penstock.run_inference(data, out, **knobs)
    with pytest.raises(UsageError, match="had heads"):
        penstock.run_inference(data, out, resume=True, head_kind="intensity", **knobs)


class Mixed(nn.Module):
    """Heads that depend on all that a patch sees, so that it matters whose voxel it is."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        whole = x.sum((2, 3, 4), keepdim=True)
        label = ((whole.long() % 7) * 16777217 + (x > 2000).long()).expand_as(x)
        soft = torch.cat([x, 2 * x + whole / 1e6, -x], 1)
        return {"image": x + whole / 1e4, "seg": label, "soft": soft}


def by_numpy(
    data: Array, patch: int, overlap: int, blended: Sequence[bool]
) -> list[NDArray[np.float64]]:
    """Every patch alone through the net, and put together by its owner or by raised cosines."""
    stride, before = patch - overlap, overlap // 2
    counts = [-(-n // stride) for n in data.shape]
    pads = [(before, c * stride - n + overlap) for c, n in zip(counts, data.shape, strict=True)]
    padded = np.pad(data.astype("float32"), pads, mode="reflect")
    ramp = np.ones(patch)
    if overlap:
        rise = np.sin(np.pi * (np.arange(overlap) + 0.5) / (2 * overlap)) ** 2
        ramp[:overlap] = rise
        ramp[-overlap:] = np.minimum(ramp[-overlap:], rise[::-1])
    ramp = np.maximum(ramp, 0.05)
    weights = ramp[:, None, None] * ramp[:, None] * ramp
    results = [np.zeros((c, *padded.shape)) for c in (1, 1, 3)]
    totals = [np.zeros(padded.shape) for _ in results]
    for index in itertools.product(*map(range, counts)):
        place = tuple(slice(i * stride, i * stride + patch) for i in index)
        heads = Mixed()(torch.from_numpy(padded[place])[None, None]).values()
        for result, total, head, blend in zip(results, totals, heads, blended, strict=True):
            values = head[0].double().numpy()
            if blend:
                result[(slice(None), *place)] += values * weights
                total[place] += weights
            else:
                core = tuple(slice(p.start + before, p.start + before + stride) for p in place)
                owned = (slice(before, before + stride),) * 3
                result[(slice(None), *core)], total[core] = values[(slice(None), *owned)], 1
    inside = tuple(slice(before, before + n) for n in data.shape)
    pairs = zip(results, totals, strict=True)
    return [result[(slice(None), *inside)] / total[inside] for result, total in pairs]


def sinks(shape: tuple[int, ...]) -> tuple[Array, ...]:
    return (np.zeros((1, *shape), "float32"), np.zeros((1, *shape), "int64"),
            np.zeros((3, *shape), "float32"))  # fmt: skip


@pytest.mark.parametrize(
    ("seam", "cut"),
    mainly([("trim", ((7, 11, 13), 3)), ("blend", ((7, 11, 13), 3)), ("blend", ((1, 20, 9), 4)),
     ("trim", ((11, 12, 13), 0))], 0, 2),
)  # fmt: skip
def test_heads_are_each_stitched_in_their_way(seam: str, cut: tuple[tuple[int, ...], int]) -> None:
    shape, overlap = cut
    data, outs = noise(shape), sinks(shape)
    penstock.run_inference(
        data, outs, model=Mixed(), patch=(6, 6, 6), overlap=(overlap,) * 3, block=8,
        normalize="none", seam_mode=seam, head_kind={"image": "intensity", "soft": "scores"},
        devices="cpu",
    )  # fmt: skip
    image, seg, soft = by_numpy(data, 6, overlap, (seam == "blend", False, seam == "blend"))
    np.testing.assert_allclose(outs[0], image, rtol=1e-5)
    assert (outs[1] == seg.astype(np.int64)).all()
    np.testing.assert_allclose(outs[2], soft, rtol=1e-5, atol=1e-2)


def test_where_the_input_is_no_number_labels_are_0() -> None:
    data = noise((12, 12, 12), "float32")
    data[3, 4, 5] = np.nan
    for seam in ("trim", "blend"):
        outs = sinks(data.shape)
        penstock.run_inference(data, outs, model=Mixed(), normalize="none", seam_mode=seam,
                               head_kind={"soft": "scores"}, **CPU)  # fmt: skip
        assert np.isnan(outs[0]).sum() == 1 and np.isnan(outs[0][0, 3, 4, 5])
        assert outs[1][0, 3, 4, 5] == 0


def test_a_plan_holds_sums_only_of_what_is_blended() -> None:
    shape = (64, 64, 64)
    data, outs = noise(shape), sinks(shape)
    knobs: dict[str, Any] = {"in_spec": data, "patch": 16, "overlap": 4, "devices": "cpu",
                             "normalize": "global", "seam_mode": "blend", "block": 32}  # fmt: skip
    labels = build(InferConfig, knobs, {"model_type": Net(classes), "out_spec": outs[1]})
    assert Job(labels).geometry.seam == "trim"
    kinds = {"soft": "scores"}
    mixed = build(InferConfig, knobs, {"model_type": Mixed(), "out_spec": outs, "head_kind": kinds})
    assert Job(mixed).plan.facts.brick_voxel_bytes == (4, 8, 12)


class Turns(nn.Module):
    """Returns something else from the sixth forward on."""

    def __init__(self, then: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.then, self.calls = then, 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return x if self.calls <= 6 else self.then(x)


@pytest.mark.parametrize(
    ("then", "said"),
    [(lambda x: x[..., :-1], r"returned \(2, 1, 8, 8, 7\) of torch.float32 as out, and not "),
     (lambda x: x[:1], r"\(1, 1, 8"), (lambda x: x.double(), "torch.float64"),
     (lambda x: (x, x), "returned 2 heads, out0, out1, and not 1, out"),
     (lambda x: None, "NoneType as out"), (lambda x: {"b": x}, "returned 1 head.*, b, and not")],
)  # fmt: skip
def test_what_a_model_returns_is_always_checked(then: Callable[[Tensor], Any], said: str) -> None:
    with pytest.raises(StageError, match=rf"^forward failed at brick \d+ Box\(.*{said}"):
        run(arange((20, 20, 20)), Turns(then), patch=8, overlap=2, block=8, normalize="none")


def test_heads_that_change_places_are_told_apart_by_name() -> None:
    class Swaps(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            self.calls += 1
            heads = {"a": x, "b": x + 1}
            return heads if self.calls % 2 else dict(reversed(heads.items()))

    data, a, b = arange((20, 20, 20)), np.zeros((20, 20, 20), "i4"), np.zeros((20, 20, 20), "i4")
    penstock.run_inference(data, (a, b), model=Swaps(), normalize="none", **CPU)
    assert (a == data).all() and (b == data + 1).all()


@pytest.mark.parametrize("seam", ["trim", "blend"])
def test_the_summary_says_where_much_was_clipped(seam: str) -> None:
    data = np.zeros((10, 10, 10), "uint16")
    data[:, :, :2] = 300
    out = np.zeros(data.shape, "uint8")
    knobs: dict[str, Any] = CPU | {"model": "identity", "normalize": "none", "seam_mode": seam}
    summary = penstock.run_inference(data, out, **knobs)
    (head,) = summary.clipped
    assert (head.clipped, head.values, head.dtype) == (200, 1000, "uint8")
    clipped = [line for line in summary.lines() if line.startswith("Clipped")]
    assert len(clipped) == 1 and "20.0 %" in clipped[0] and "--out-dtype" in clipped[0]
    data[:, :, :2], data[0, 0, :9] = 255, 256
    summary = penstock.run_inference(data, out, **knobs)
    assert summary.clipped[0].clipped == 9
    assert not any(line.startswith("Clipped") for line in summary.lines())


def test_what_is_rounded_is_not_clipped() -> None:
    data = np.array([[-0.5, 255.49, -0.4, 255.5, -0.6, 70000.0]], "float32")
    knobs: dict[str, Any] = {"model": "identity", "patch": 2, "overlap": 0, "normalize": "none"}
    for dtype, count in (("uint8", 3), ("float16", 1), ("float32", 0), ("int32", 0)):
        out = np.zeros(data.shape, dtype)
        summary = penstock.run_inference(data, out, devices="cpu", **knobs)
        assert summary.clipped[0].clipped == count, dtype


@pytest.mark.parametrize(
    ("dtype", "seam", "normalize"),
    [("uint32", "trim", "none"), ("int32", "blend", "global"), ("float64", "trim", "percentile")],
)
def test_the_identity_keeps_every_bit_of_32(dtype: str, seam: str, normalize: str) -> None:
    rng = np.random.default_rng(3)
    if dtype == "float64":
        data = rng.random((9, 10, 11)) * 1e-3 + 101325
    else:
        info = np.iinfo(dtype)
        data = rng.integers(info.min, info.max, (9, 10, 11), dtype, endpoint=True)
        data[0, 0, :2] = info.min, info.max
    out = run(data, patch=6, overlap=2, seam_mode=seam, normalize=normalize)
    if dtype == "float64":
        np.testing.assert_allclose(out, data, rtol=1e-14)
    else:
        assert (out == data).all()


def test_a_small_range_far_from_zero_reaches_a_net_whole() -> None:
    """In float32, 2^30 and its neighbours are 64 apart."""
    data = (2**30 + arange((8, 8, 8), "int64") % 64).astype("int32")
    net = nn.Conv3d(1, 1, 1, bias=False)
    nn.init.ones_(net.weight)
    assert (run(data, net, patch=8, overlap=0, normalize="global") == data).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("default", "seam", "name"),
    mainly([(torch.bfloat16, "trim", "identity"), (torch.float64, "blend", "denoise-tiny")], 1),
)
def test_a_default_dtype_changes_nothing(default: torch.dtype, seam: str, name: str) -> None:
    data = noise((8, 8, 8))
    knobs: dict[str, Any] = {"patch": 8, "overlap": 4, "normalize": "global", "seam_mode": seam}
    expected = run(data, name, **knobs)
    torch.set_default_dtype(default)
    try:
        result = run(data, name, **knobs)
        assert torch.get_default_dtype() == default
    finally:
        torch.set_default_dtype(torch.float32)
    assert (result == expected).all()
