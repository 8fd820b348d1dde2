"""The pipeline end to end, on real arrays and real small nets: laws, odd inputs, faults."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

import penstock
from penstock.base import threads
from penstock.base.config.infer import InferConfig
from penstock.base.config.knobs import build
from penstock.base.errors import StageError, UsageError
from penstock.data.box import Box
from penstock.data.stores import kvstore
from penstock.data.stores.memory import MemorySink, MemorySource
from penstock.data.stores.tensorstore import TensorStoreSink
from penstock.inference import journal, reading, stitch
from penstock.inference import run as infer
from penstock.inference.job import Job
from penstock.models import devices
from penstock.models import load as model

from .test_job import SMALL

Array = NDArray[Any]


def run(source: Array, net: Any = "identity", out: Array | None = None, **knobs: Any) -> Array:
    """Infer into a new array and return it."""
    result = np.full_like(source, 77) if out is None else out
    penstock.run_inference(source, result, model=net, devices="cpu", **knobs)
    return result


def arange(shape: tuple[int, ...], dtype: str = "uint16") -> Array:
    """Distinct values, so that a misplaced voxel shows."""
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


def conv(channels: int = 1, seed: int = 0) -> nn.Module:
    """Two seeded 3-D convolutions of width 4; each output sees two voxels around it."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv3d(channels, 4, 3, padding=1), nn.GELU(), nn.Conv3d(4, 1, 3, padding=1)
    )


@st.composite
def jobs(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any]]:
    shape = tuple(draw(st.integers(1, 16)) for _ in range(3))
    patch = tuple(draw(st.integers(3, 9)) for _ in range(3))
    knobs = {
        "patch": patch,
        "overlap": tuple(draw(st.integers(0, p - 3)) for p in patch),
        "block": tuple(max(p, draw(st.integers(1, 12))) for p in patch),
        "batch": draw(st.integers(1, 40)),
        "prep_workers": draw(st.integers(1, 4)),
        "writer_workers": draw(st.integers(1, 3)),
        "max_inflight_batches": draw(st.none() | st.integers(1, 4)),
        "max_memory": draw(st.sampled_from([None, "4GiB"])),
    }
    return shape, knobs


# --- laws --------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(jobs(), st.sampled_from(["percentile", "global", "none"]))
def test_identity_returns_its_input(job: Any, normalize: str) -> None:
    shape, knobs = job
    data = arange(shape)
    assert (run(data, normalize=normalize, **knobs) == data).all()


@settings(max_examples=25, deadline=None)
@given(jobs(), st.sampled_from(["uint16", "int16", "float32"]))
def test_identity_blended_returns_its_input(job: Any, dtype: str) -> None:
    shape, knobs = job
    data = arange(shape, dtype)
    blended = run(data, normalize="none", seam_mode="blend", **knobs)
    np.testing.assert_allclose(blended, data, rtol=1e-6, atol=1e-3)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from(["trim", "blend"]), st.sampled_from(["uint16", "float32"]))
def test_the_result_is_the_same_to_the_bit_however_it_is_cut(
    data: st.DataObject, seam: str, dtype: str
) -> None:
    shape, first = data.draw(jobs())
    _, second = data.draw(jobs())
    second |= {"patch": first["patch"], "overlap": first["overlap"]}
    second["block"] = tuple(max(a, b) for a, b in zip(second["block"], first["patch"], strict=True))
    volume = np.random.default_rng(1).normal(size=shape).astype("float32")
    if dtype == "uint16":
        volume = (1000 + 300 * volume).clip(0).astype("uint16")
    a, b = (run(volume, conv(), normalize="global", seam_mode=seam, **k) for k in (first, second))
    assert (a == b).all()


def test_seams_lie_in_the_middle_of_the_overlap_whatever_is_to_be_cut_at_least() -> None:
    volume = np.random.default_rng(8).integers(0, 5000, (20, 25, 30)).astype("uint16")
    knobs: dict[str, Any] = {"patch": 10, "overlap": 6, "normalize": "global"}
    expected = run(volume, conv(), **knobs)
    for trim in range(4):
        assert (run(volume, conv(), trim_voxels=trim, **knobs) == expected).all()
    with pytest.raises(UsageError, match="trim_voxels=4 needs an overlap= of at least 8"):
        run(volume, conv(), trim_voxels=4, **knobs)
    said = InferConfig.model_fields["trim_voxels"].description
    assert said is not None and "middle of the overlap" in said


def test_delays_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = np.random.default_rng(2).integers(0, 5000, (30, 40, 50)).astype("uint16")
    knobs = {"patch": 12, "overlap": 4, "block": 16, "batch": 5, "seam_mode": "blend"}
    calm = run(volume, conv(), normalize="global", **knobs)
    rng, pause = random.Random(3), threading.Event().wait
    for kind, name in ((MemorySource, "read"), (MemorySink, "write")):
        method = getattr(kind, name)

        def late(self: Any, *args: Any, method: Callable[..., Any] = method) -> Any:
            pause(rng.random() / 200)
            return method(self, *args)

        monkeypatch.setattr(kind, name, late)
    for workers in (1, 5):
        shaken = run(volume, conv(), normalize="global", prep_workers=workers, **knobs)
        assert (shaken == calm).all()


@pytest.mark.parametrize("seam", ["trim", "blend"])
@pytest.mark.parametrize("shape", [(30, 33, 41), (3, 20, 50), (1, 1, 1)])
def test_tiled_equals_untiled_where_the_context_covers_the_net(
    shape: tuple[int, ...], seam: str
) -> None:
    """The net sees 2 voxels around it. Trimmed by 4 a tile cannot matter; blended only where the
    rims of patches, which see zeros of the net's own padding, are given no weight to speak of."""
    volume = np.random.default_rng(4).normal(size=shape).astype("float32")
    net = nn.Sequential(nn.Conv3d(1, 1, 3, padding=1, bias=False)) if seam == "blend" else conv()
    tiled = run(
        volume, net, normalize="none", patch=16, overlap=8, seam_mode=seam, min_blend_weight=1e-6
    )
    padded = np.pad(volume, 8, mode="reflect")
    with torch.inference_mode():
        whole = net(torch.from_numpy(padded)[None, None])[0, 0, 8:-8, 8:-8, 8:-8].numpy()
    tolerance = 1e-5 if seam == "trim" else 0.1
    np.testing.assert_allclose(tiled, whole, atol=tolerance)


# --- inputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", "uint8 int8 uint16 int16 float16 float32 float64".split())
@pytest.mark.parametrize("normalize", ["none", "global", "percentile"])
def test_dtypes_survive_the_way_through(dtype: str, normalize: str) -> None:
    data = (arange((5, 9, 7), "int64") % 200 - (0 if dtype[0] == "u" else 100)).astype(dtype)
    out = run(data, normalize=normalize, patch=4, overlap=2)
    if np.dtype(dtype).kind == "f" and normalize != "none":
        np.testing.assert_allclose(out, data, rtol=2e-3 if dtype == "float16" else 1e-5, atol=1e-4)
    else:
        assert (out == data).all()


@pytest.mark.parametrize(
    ("shape", "patch"),
    [((40, 50), 16), ((40, 50), (16, 8)), ((3, 40, 50), (16, 8)), ((2, 3, 4, 20, 21), 8),
     ((30, 70, 70), 64), ((1, 1), 8), ((2, 1, 9, 9), (1, 4, 4))],
)  # fmt: skip
def test_two_to_five_axes_thin_and_flat(shape: tuple[int, ...], patch: Any) -> None:
    data = arange(shape)
    assert (run(data, patch=patch, overlap=2, normalize="global") == data).all()


def test_a_2d_net_runs_plane_by_plane() -> None:
    net = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    nn.init.constant_(net.weight, 1 / 9)
    volume = np.random.default_rng(5).normal(size=(3, 20, 30)).astype("float32")
    out = run(volume, net, patch=12, overlap=4, normalize="none")
    padded = np.pad(volume, ((0, 0), (2, 2), (2, 2)), mode="reflect")
    with torch.inference_mode():
        whole = net(torch.from_numpy(padded)[:, None])[:, 0, 2:-2, 2:-2].numpy()
    np.testing.assert_allclose(out, whole, atol=1e-5)


def test_times_and_channels_are_selected() -> None:
    data = arange((3, 4, 2, 6, 7))
    out = np.zeros((2, 1, 2, 6, 7), "uint16")
    run(data, out=out, t="1:3", c=2, patch=4, overlap=0)
    assert (out == data[1:3, 2:3]).all()
    same = np.zeros_like(data)  # an output as large as the input: the same indices
    run(data, out=same, t=[0, 2], c="1,3", patch=4, overlap=0)
    assert (same[[0, 2]][:, [1, 3]] == data[[0, 2]][:, [1, 3]]).all()
    assert (same[1] == 0).all()


def test_several_channels_enter_one_model() -> None:
    class Sum(nn.Module):
        in_channels = 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(1, keepdim=True)

    data = arange((4, 3, 8, 9), "float32")
    out = np.zeros((2, 3, 8, 9), "float32")
    run(data, Sum(), out=out, patch=4, overlap=0, normalize="none")
    assert (out == data.reshape(2, 2, 3, 8, 9).sum(1)).all()


@pytest.mark.parametrize("form", ["tuple", "dict", "channels"])
@pytest.mark.parametrize("seam", ["trim", "blend"])
def test_several_heads_go_to_several_sinks_of_their_own_dtype(form: str, seam: str) -> None:
    class Heads(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            heads = (x, x > 50)
            if form == "channels":
                return torch.cat([head.float() for head in heads], 1)
            return heads if form == "tuple" else {"a": heads[0], "b": heads[1]}

    data = arange((4, 5, 6))
    same, mask = np.zeros_like(data), np.zeros(data.shape, "uint8")
    penstock.run_inference(
        data, (same, mask), model=Heads(), patch=4, overlap=2, normalize="none", devices="cpu",
        seam_mode=seam, head_kind=["intensity", "labels"],
    )  # fmt: skip
    assert (same == data).all()
    assert (mask == (data > 50)).all()


def test_percentiles_of_a_block_are_its_own() -> None:
    """Two blocks of other brightness are both brought to the same range."""
    data = np.concatenate([np.arange(512), 7 * np.arange(512)]).reshape(16, 8, 8).astype("float32")
    out = run(
        data, patch=4, overlap=0, block=8, denormalize=False, norm_lower=0, norm_upper=100, halo=0
    )
    for half in (out[:8], out[8:]):
        assert half.min() == 0
        assert half.max() == 1


@pytest.mark.parametrize("seam", ["trim", "blend"])
@pytest.mark.parametrize("overlap", [1, 2])
def test_percentiles_of_a_block_are_those_of_all_of_it(seam: str, overlap: int) -> None:
    """However its patches lie in the global grid."""
    data = np.concatenate([np.arange(512), 7 * np.arange(1024)]).reshape(24, 8, 8).astype("float32")
    out = run(
        data,
        patch=4,
        overlap=overlap,
        block=8,
        seam_mode=seam,
        denormalize=False,
        norm_lower=0,
        norm_upper=100,
        halo=0,
    )
    for start in (0, 8, 16):
        unit = data[start : start + 8]
        expected = (unit - unit.min()) / (unit.max() - unit.min())
        np.testing.assert_allclose(out[start : start + 8], expected, atol=1e-5)


def test_a_halo_is_as_wide_around_every_block() -> None:
    """And no wider than what patches see: 1 voxel of an overlap of 2."""
    data = np.zeros((24, 4, 4), "float32")
    data[6], data[7], data[16], data[17] = 8, 4, 2, 1
    out = run(
        data,
        patch=4,
        overlap=2,
        block=(8, 4, 4),
        denormalize=False,
        norm_lower=0,
        norm_upper=100,
        halo=2,
    )
    np.testing.assert_allclose(out[6:8, 0, 0], [1, 0.5])
    assert (out[8:16] == 0).all()
    np.testing.assert_allclose(out[16:18, 0, 0], [1, 0.5])


@pytest.mark.parametrize("dtype", ["float64", "uint32", "bool", "uint8"])
def test_blended_sums_of_every_dtype_fit_their_buffers(dtype: str) -> None:
    data = np.ones((8, 8, 8), dtype)
    out = run(data, patch=4, overlap=2, seam_mode="blend", normalize="none")
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype("float64"), data, atol=1e-6)


def test_clip_and_fixed_range() -> None:
    data = arange((1, 4, 100), "float32")
    out = run(
        data,
        patch=(4, 10),
        overlap=0,
        normalize="fixed",
        norm_lower=100,
        norm_upper=200,
        clip_norm=(),
        denormalize=False,
    )
    np.testing.assert_allclose(out, ((data - 100) / 100).clip(0, 1), atol=1e-6)


def test_a_least_range_is_what_narrower_ones_are_divided_by() -> None:
    """``--eps`` of aind_torch_utils, in every mode that scales."""
    data = np.zeros((8, 8, 8), "float32")
    data[0, 0, 0] = 6
    knobs: dict[str, Any] = {"patch": 8, "overlap": 0, "denormalize": False}
    for normalize in ("percentile", "global"):
        own = run(data, normalize=normalize, norm_lower=1, norm_upper=99, **knobs)
        told = run(data, normalize=normalize, norm_lower=1, norm_upper=99, eps=0.5, **knobs)
        assert (own.max(), told.max()) == (1, 12)
    fixed = {"normalize": "fixed", "norm_lower": 0, "norm_upper": 2}
    assert run(data, eps=0.5, **fixed, **knobs).max() == 3  # the range is wider than that
    assert run(data, eps=4, **fixed, **knobs).max() == 1.5


def test_global_of_aind_torch_utils_is_a_fixed_range_that_is_clipped() -> None:
    """The words that the refusal of two intensities gives."""
    data = arange((1, 40, 100), "float32")
    words = {"normalize": "global", "norm_lower": 30, "norm_upper": 3000}
    with pytest.raises(UsageError, match=r"normalize=\'fixed\' .* clip_norm=\(0, 1\)$") as refusal:
        run(data, **words)
    assert "percentiles of the whole volume" in str(refusal.value)
    assert "aind_torch_utils means two intensities" in str(refusal.value)
    fixed = words | {"normalize": "fixed", "clip_norm": (0, 1), "denormalize": False}
    theirs = (np.clip(data, 30, 3000) - 30) / 2970
    np.testing.assert_allclose(run(data, patch=(4, 10), overlap=0, **fixed), theirs, atol=1e-6)


def test_floats_are_rounded_into_integers_and_kept_in_range() -> None:
    data = np.array([[-5.0, 0.4, 0.6, 254.5, 255.5, 1e9]], "float32")
    out = np.zeros(data.shape, "uint8")
    run(data, out=out, patch=4, overlap=0, normalize="none")
    assert out.tolist() == [[0, 0, 1, 254, 255, 255]]


def test_the_pass_for_percentiles_reads_with_no_more_than_the_plan_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    volume = arange((160, 160, 160))
    readers: list[str] = []
    spawn = threads.Flow.spawn

    def count(flow: Any, name: str, work: Callable[[], None]) -> None:
        readers.append(name) if name.startswith("statistics") else None
        spawn(flow, name, work)

    monkeypatch.setattr(threads.Flow, "spawn", count)
    knobs: dict[str, Any] = {
        "patch": 32, "overlap": 0, "block": 32, "prep_workers": 16, "normalize": "global"
    }  # fmt: skip
    plan = penstock.plan_inference(volume, volume * 0, model="identity", devices="cpu", **knobs)
    room = plan.memory.total - plan.memory.base - plan.memory.runtime
    assert (run(volume, **knobs) == volume).all()
    assert 1 <= len(readers) <= max(1, room // (2 * volume.nbytes)) < 16


@pytest.mark.parametrize("normalize", ["none", "global", "percentile", "fixed"])
@pytest.mark.parametrize("seam", ["trim", "blend"])
def test_nan_stays_where_it_was(normalize: str, seam: str) -> None:
    data = arange((6, 7, 8), "float32")
    data[2, 3, 4] = np.nan
    data[5, 6, 7] = np.inf
    spoilt = ~np.isfinite(data)
    out = run(data, patch=4, overlap=2, normalize=normalize, seam_mode=seam, norm_lower=1)
    assert (np.isnan(out) == spoilt).all()
    np.testing.assert_allclose(out[~spoilt], data[~spoilt], rtol=1e-5, atol=1e-3)
    whole = np.zeros(data.shape, "uint16")
    run(data, out=whole, patch=4, overlap=2, normalize=normalize, seam_mode=seam, norm_lower=1)
    assert (whole[spoilt] == 0).all()


@pytest.mark.parametrize("value", [0, 7, 65535])
@pytest.mark.parametrize("normalize", ["global", "percentile"])
def test_a_constant_volume_stays_constant(value: int, normalize: str) -> None:
    data = np.full((5, 6, 7), value, "uint16")
    assert (run(data, patch=4, overlap=2, normalize=normalize) == value).all()


def test_one_voxel() -> None:
    data = np.array([[[1234]]], "uint16")
    assert run(data, conv(), patch=8, overlap=2).shape == (1, 1, 1)
    assert run(data, patch=8, overlap=2).item() == 1234


# --- faults ------------------------------------------------------------------------------------


def job(tmp_path: Path, **knobs: Any) -> Job:
    config = {"in_spec": arange((40, 40, 40)), "out_spec": np.zeros((40, 40, 40), "uint16"),
              "model_type": "identity", "patch": 8, "overlap": 2, "devices": "cpu", "batch": 4,
              "block": 16}  # fmt: skip
    return Job(build(InferConfig, config | {"run_dir": tmp_path / "run"} | knobs))


class Broken(RuntimeError):
    """What the tests inject."""


def failing_after(calls: int, real: Callable[..., Any]) -> Callable[..., Any]:
    count = iter(range(10**9))

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(count) >= calls:
            raise Broken("a cosmic ray")
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("stage", "owner", "attribute"),
    [
        ("read", MemorySource, "read"),
        ("normalise", reading, "block_scaling"),
        ("forward", model.Identity, "forward"),
        ("stitch", stitch.Assembly, "_unit"),
        ("write", MemorySink, "write"),
    ],
)
@pytest.mark.parametrize("calls", [0, 3])
def test_a_fault_in_any_stage_surfaces_with_stage_and_block(
    stage: str, owner: Any, attribute: str, calls: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    started = job(tmp_path)
    monkeypatch.setattr(owner, attribute, failing_after(calls, getattr(owner, attribute)))
    before = threading.active_count()
    with pytest.raises(StageError, match=f"^{stage} failed at .*Box.*cosmic ray") as caught:
        infer.run_job(started)
    assert isinstance(caught.value.__cause__, Broken)
    assert threading.active_count() <= before


def test_values_that_are_not_finite_are_an_error_and_not_a_zero(tmp_path: Path) -> None:
    class Overflows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (x - x)

    with pytest.raises(StageError, match="not finite"):
        infer.run_job(job(tmp_path, model_type=Overflows()))


def test_a_block_that_was_never_written_is_never_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = job(tmp_path)
    note = journal.Journal.note

    def lost(self: journal.Journal, key: tuple[int, ...], voxels: int) -> None:
        if key != (0, 1, 1, 1):
            note(self, key, voxels)

    monkeypatch.setattr(journal.Journal, "note", lost)
    with pytest.raises(penstock.Incomplete, match="26 of 27 blocks"):
        infer.run_job(started)


def test_a_run_can_be_driven_once_and_says_how_far_it_is(tmp_path: Path) -> None:
    seen: list[penstock.Progress] = []
    summary = infer.run_job(job(tmp_path), seen.append)
    assert seen[-1].units_done == seen[-1].units_planned == 27
    assert seen[-1].patches_done == seen[-1].patches_planned
    assert summary.units_written == 27
    assert summary.voxels == 40**3
    assert summary.input_bytes == 2 * 40**3
    assert set(summary.stages) == {"read", "normalise", "forward", "stitch", "write"}
    assert any(line.startswith("Throughput: ") for line in summary.lines())


def test_several_devices_share_the_work_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two lanes on one processor stand for two GPUs: the same code but for the copies."""
    volume = np.random.default_rng(6).integers(0, 5000, (30, 40, 50)).astype("uint16")
    knobs = {"patch": 12, "overlap": 4, "block": 16, "batch": 5, "normalize": "global"}
    alone = run(volume, conv(), seam_mode="blend", **knobs)
    monkeypatch.setattr(devices, "find_devices", lambda names: [torch.device("cpu")] * 3)
    assert (run(volume, conv(), seam_mode="blend", **knobs) == alone).all()
    assert (
        run(volume, conv(), seam_mode="blend", prep_workers=1, max_inflight_batches=1, **knobs)
        == alone
    ).all()


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"overlap": 8}, "--overlap 8 must be less than --patch 8"),
        ({"trim_voxels": 2}, "--trim-voxels 2 needs an --overlap of at least 4, not 2"),
        ({"block": 4}, "--block 4 is smaller than --patch 8"),
        ({"t": 1}, "--t 1 is out of range: the input has 0 to 0"),
        ({"c": "0:3"}, "--c 1 is out of range"),
        ({"c": "x"}, "--c 'x' is not all"),
        ({"out_spec": np.zeros((40, 40, 39), "uint16")}, "has 39 along x but this job writes 40"),
        ({"devices": "cuda:7"}, "--devices cuda:7: this machine has"),
        ({"devices": "abacus"}, "--devices 'abacus'"),
        ({"model_type": "nonesuch"}, "--model-type 'nonesuch' is unknown"),
        ({"model_type": "os:nonesuch"}, "could not be made"),
        ({"weights": "nowhere.pt"}, "--weights nowhere.pt"),
        ({"patch": (8, 8), "model_type": conv()}, "has 2 axes but the model is made of 3-D"),
        ({"model_type": conv(3)}, "the model takes 3 at once"),
        ({"model_type": nn.MaxPool3d(2)}, "turns a patch of"),
        ({"out_spec": (np.zeros(1), np.zeros(1))}, "head"),
        ({"batch": 0}, "--batch 0: input should be greater than or equal to 1"),
        ({"normalize": "maybe"}, "--normalize 'maybe'"),
        ({"nonesuch": 1}, "there is no setting 'nonesuch'"),
        ({"norm_lower": 99, "norm_upper": 1}, "--norm-lower 99.0 must be less than"),
        ({"norm_lower": float("nan")}, "--norm-lower nan must be less than"),
        ({"norm_upper": 200}, "must be percentiles from 0 to 100"),
        ({"normalize": "global", "norm_lower": 0, "norm_upper": 1}, "one below 50 and one above"),
        ({"eps": 0}, "--eps 0: input should be greater than 0"),
        ({"compile_dynamic": "maybe"}, "--compile-dynamic 'maybe'"),
        ({"clip_norm": (1, 0)}, "--clip-norm 1.0 must be less than 0.0"),
        ({"clip_norm": (1,)}, "--clip-norm"),
        ({"out_spec": ()}, "--out-spec"),
        ({"model_type": "denoise-net"}, "denoise-net has no weights of its own"),
        ({"model_type": lambda x: x}, "is neither a name, a reference or a file, nor a module"),
        ({"max_memory": 0}, "--max-memory 0: input should be greater than or equal to 1"),
        ({"trace": Path(__file__).parent}, "--trace"),
        ({"metrics_json": Path(__file__) / "x.json"}, "--metrics-json"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(
    knobs: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        job(tmp_path, **knobs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_too_little_memory_is_refused_with_both_numbers_and_a_cure(tmp_path: Path) -> None:
    started = job(tmp_path, max_memory="1MiB")
    with pytest.raises(penstock.Refused, match=r"needs .* [MG]iB of host .* 1.00 MiB; give .*--"):
        infer.run_job(started)
    assert not (tmp_path / "run").exists()


def test_a_box_of_the_sink_is_where_the_source_says() -> None:
    """Sources and sinks with origins of their own."""
    import tensorstore as ts

    data = arange((10, 11, 12))
    spec = {"driver": "array", "dtype": "uint16", "array": data.tolist(),
            "transform": {"input_inclusive_min": [5, -3, 100], "input_exclusive_max": [15, 8, 112],
                          "output": [{"input_dimension": i, "offset": o}
                                     for i, o in enumerate((-5, 3, -100))]}}  # fmt: skip
    assert ts.open(spec).result().domain.origin == (5, -3, 100)
    out = np.zeros_like(data)
    penstock.run_inference(spec, out, model="identity", patch=4, overlap=2, devices="cpu")
    assert (out == data).all()
    assert Box((5, -3, 100), (15, 8, 112)).shape == out.shape


@pytest.mark.parametrize(
    ("source", "sink", "seam"),
    [
        ("zarr2", "sharded", "trim"),
        ("sharded", "n5", "blend"),
        ("n5", "zarr2", "trim"),
        ("ome", "ome", "trim"),
        ("tiff", "ome", "blend"),
    ],
)
def test_from_every_kind_of_store_to_every_kind(
    source: str, sink: str, seam: str, tmp_path: Path
) -> None:
    import tensorstore as ts
    import tifffile

    data = arange((20, 33, 41))

    def spec(kind: str, name: str) -> dict[str, Any]:
        place = {"kvstore": {"driver": "file", "path": str(tmp_path / name)}, "create": True}
        common = {"shape": list(data.shape)}
        if kind == "zarr2":
            meta = common | {"chunks": [8, 8, 8], "dtype": "<u2"}
            return place | {"driver": "zarr", "metadata": meta}
        if kind == "n5":
            meta = {"dimensions": list(data.T.shape), "blockSize": [8, 16, 8], "dataType": "uint16",
                    "compression": {"type": "gzip"}}  # fmt: skip
            return place | {"driver": "n5", "metadata": meta}
        grid = {"name": "regular", "configuration": {"chunk_shape": [8, 16, 16]}}
        codec = {"name": "sharding_indexed", "configuration": {"chunk_shape": [4, 8, 8]}}
        meta = common | {"data_type": "uint16", "chunk_grid": grid, "codecs": [codec]}
        return place | {"driver": "zarr3", "metadata": meta}

    def opened(kind: str, name: str) -> Any:
        if kind in ("ome", "tiff"):
            return str(tmp_path / name) + (".tif" if kind == "tiff" else ".ome.zarr")
        return spec(kind, name)

    where = opened(source, "in")
    if source == "tiff":
        tifffile.imwrite(where, data, photometric="minisblack", metadata={"axes": "ZYX"})
    elif source == "ome":
        penstock.run_inference(data, where, model="identity", devices="cpu", normalize="none")
    else:
        stored = data.T if source == "n5" else data
        ts.open(where).result().write(stored).result()
        where.pop("create")
    out = opened(sink, "out")
    penstock.run_inference(
        where, out, model=conv(), patch=12, overlap=4, normalize="global", devices="cpu",
        seam_mode=seam,
    )  # fmt: skip
    expected = run(data, conv(), patch=12, overlap=4, normalize="global", seam_mode=seam)
    if isinstance(out, dict):
        out.pop("create")
    written = penstock.open_source(out)
    result = written.read(written.domain)[0, 0]
    assert (result == expected).all()


def test_each_sink_has_places_of_its_own() -> None:
    """Two heads, one into a sink of what is selected, one into a sink of all there is."""

    class Heads(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x, x + 1

    data = arange((3, 4, 2, 5, 6))
    selected, whole = np.zeros((1, 1, 2, 5, 6), "uint16"), np.zeros_like(data)
    penstock.run_inference(
        data, (selected, whole), model=Heads(), t=1, c=2, patch=4, overlap=0, normalize="none",
        devices="cpu",
    )  # fmt: skip
    assert (selected[0, 0] == data[1, 2]).all()
    assert (whole[1, 2] == data[1, 2] + 1).all()
    whole[1, 2] = 0
    assert (whole == 0).all()


def test_a_finished_run_resumes_to_nothing(tmp_path: Path) -> None:
    source, out = arange((20, 20, 20)), tmp_path / "out.zarr"
    penstock.run_inference(source, out, **SMALL)
    summary = penstock.run_inference(source, out, resume=True, **SMALL)
    assert summary.units_written == 0
    assert summary.units_skipped == summary.units_planned
    assert "nothing left" in summary.bound_by


def test_a_second_process_on_the_same_output_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    source, out = arange((20, 20, 20)), tmp_path / "out.zarr"
    penstock.run_inference(source, out, **SMALL)
    first = journal.Journal.open(Path(f"{out}.penstock"), {}, resume=False)
    first.begin({})
    with pytest.raises(UsageError, match="another process is writing this output"):
        penstock.run_inference(source + 1, out, overwrite=True, **SMALL)
    first.close()
    written = penstock.open_source(out)
    assert (written.read(written.domain)[0, 0] == source).all()
    penstock.run_inference(source + 1, out, overwrite=True, **SMALL)
    assert (penstock.open_source(out).read(written.domain)[0, 0] == source + 1).all()


def test_a_killed_run_leaves_no_list_of_units_for_a_new_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--overwrite, killed while the output is made anew: what was done before counts no more."""
    source, out = arange((20, 20, 20)), tmp_path / "out.zarr"
    penstock.run_inference(source, out, **SMALL)
    create = TensorStoreSink.create

    def killed(self: TensorStoreSink) -> None:
        create(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(TensorStoreSink, "create", killed)
    with pytest.raises(KeyboardInterrupt):
        penstock.run_inference(source, out, overwrite=True, **SMALL)
    monkeypatch.setattr(TensorStoreSink, "create", create)
    summary = penstock.run_inference(source, out, resume=True, **SMALL)
    assert summary.units_skipped == 0
    written = penstock.open_source(out)
    assert (written.read(written.domain)[0, 0] == source).all()


def test_a_run_killed_while_the_old_output_is_deleted_goes_on(tmp_path: Path) -> None:
    """The old one had other chunks and another dtype, and some of it is there still."""

    source, out = arange((20, 20, 20)), tmp_path / "out.zarr"
    for way in ("resume", "overwrite"):
        penstock.run_inference(
            source, out, overwrite=True, out_dtype="float32", chunks=10, block=20, **SMALL
        )
        (out / kvstore.DELETING).write_text('{"arrays": ["0"]}')
        (out / "zarr.json").unlink()
        (out / "0/c/0/0/0").unlink()
        summary = penstock.run_inference(source, out, **{way: True}, **SMALL)
        assert summary.units_skipped == 0
        written = penstock.open_source(out)
        assert written.dtype == source.dtype
        assert (written.read(written.domain)[0, 0] == source).all()
        assert sorted(path.name for path in out.iterdir()) == ["0", "zarr.json"]


def test_what_may_not_be_replaced_is_refused_before_its_list_of_units_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = arange((20, 20, 20)), tmp_path / "out.zarr"
    penstock.run_inference(source, out, **SMALL)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def denied(self: TensorStoreSink) -> None:
        raise UsageError(f"{self.where}: Permission denied")

    monkeypatch.setattr(TensorStoreSink, "check", denied)
    with pytest.raises(UsageError, match="Permission denied"):
        penstock.run_inference(source, out, overwrite=True, **SMALL)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert after == before


# --- a run folder that cannot be written ---------------------------------------------------------


def full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("stage", "method", "file"),
    [("write", "note", "done.log"), ("statistics", "save_statistics", "statistics.json")],
)
def test_a_disk_that_fills_under_the_run_folder_is_told_with_stage_and_path(
    stage: str, method: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = job(tmp_path, normalize="global")
    monkeypatch.setattr(journal.Journal, method, full)
    with pytest.raises(StageError, match=f"^{stage} failed at .*{file}: .*No space left"):
        infer.run_job(started)


def test_a_line_that_could_not_be_noted_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of it in a buffer must not hide the stage as the log is closed."""
    disk = Path("/dev/full")
    if not disk.exists():
        pytest.skip("there is no /dev/full")
    started, begin = job(tmp_path), journal.Journal.begin

    def begun(self: journal.Journal, settings: Any, **more: Any) -> None:
        begin(self, settings, **more)
        assert self._log is not None
        self._log.close()
        self._log = disk.open("w")

    monkeypatch.setattr(journal.Journal, "begin", begun)
    with pytest.raises(StageError, match=r"^write failed at block .*done\.log: .*No space left"):
        infer.run_job(started)


def test_a_summary_that_cannot_be_written_costs_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, save = job(tmp_path), journal.Journal.save

    def saved(self: journal.Journal, name: str, content: Any) -> None:
        (full if name == "summary.json" else save)(self, name, content)

    monkeypatch.setattr(journal.Journal, "save", saved)
    with pytest.warns(RuntimeWarning, match=r"--run-dir .*run: summary\.json: No space left"):
        assert infer.run_job(started).units_written == 27


@pytest.mark.parametrize("name", ["done.log", "run.json"])
def test_a_run_folder_that_cannot_be_used_is_refused(name: str, tmp_path: Path) -> None:
    source, out, folder = arange((20, 20, 20)), tmp_path / "out.zarr", tmp_path / "run"
    penstock.run_inference(source, out, run_dir=folder, **SMALL)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(UsageError, match=r"^run_dir=.*run: Is a directory$"):
        penstock.run_inference(source, out, run_dir=folder, resume=True, **SMALL)


def test_a_run_folder_that_may_not_be_looked_into_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, exists = job(tmp_path), Path.exists

    def denied(self: Path) -> bool:
        if self == tmp_path / "run":
            raise PermissionError(13, "Permission denied", str(self))
        return exists(self)

    monkeypatch.setattr(Path, "exists", denied)
    with pytest.raises(UsageError, match=r"^--run-dir .*run: Permission denied$"):
        infer.run_job(started)


def test_resume_refuses_another_model_of_the_same_name(tmp_path: Path) -> None:
    source, out, code = arange((20, 20, 20)), tmp_path / "out.zarr", tmp_path / "mine.py"
    knobs: dict[str, Any] = {"model": f"{code}:net", "patch": 8, "overlap": 2, "devices": "cpu"}
    code.write_text("def net(x=None):\n    return lambda x: x * 1\n")
    penstock.run_inference(source, out, **knobs)
    code.write_text("def net(x=None):\n    return lambda x: x * 2\n")
    with pytest.raises(UsageError, match=r"resume=True: the run in .* had model"):
        penstock.run_inference(source, out, resume=True, **knobs)


def test_an_exported_program_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"  # given as it is, and as text
    torch.export.save(torch.export.export(conv().eval(), (torch.zeros(1, 1, 12, 12, 12),)), path)
    data = np.random.default_rng(0).normal(size=(20, 30, 25)).astype("float32")
    knobs: dict[str, Any] = {"patch": 12, "overlap": 4, "normalize": "none"}
    expected = run(data, conv(), **knobs)
    for net, batch in ((path, 1), (str(path), 3)):
        np.testing.assert_allclose(run(data, net, batch=batch, **knobs), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("returned", "said"),
    [("None", "NoneType"), ("[x, 2]", "int as out1"), ("x[:, :, 1:]", "turns a patch of")],
)
def test_a_model_that_returns_no_image_is_refused(returned: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(f"def net():\n    return lambda x: {returned}\n")
    with pytest.raises(UsageError, match=said):
        job(tmp_path, model_type=f"{tmp_path / 'odd.py'}:net")
