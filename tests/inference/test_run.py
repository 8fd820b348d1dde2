"""The laws of the pipeline on real arrays and nets; dtypes, axes, channels, heads, values."""

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock
from penstock.base import InferConfig, UsageError, threads
from penstock.data.stores.in_memory import MemorySink
from penstock.data.stores.sliced import SlicedSource
from penstock.inference import run as infer
from penstock.models import devices

from ..laws import COSTLY
from ..parameters import mainly, paired
from .kit import arange, conv, job, run


@st.composite
def jobs(draw: st.DrawFn) -> tuple[tuple[int, ...], dict[str, Any]]:
    shape = tuple(draw(st.integers(1, 12)) for _ in range(3))
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


@given(jobs(), st.sampled_from(["percentile", "global", "none"]))
def test_identity_returns_its_input(job: Any, normalize: str) -> None:
    shape, knobs = job
    data = arange(shape)
    assert (run(data, normalize=normalize, **knobs) == data).all()


@given(jobs(), st.sampled_from(["uint16", "int16", "float32"]))
def test_identity_blended_returns_its_input(job: Any, dtype: str) -> None:
    shape, knobs = job
    data = arange(shape, dtype)
    blended = run(data, normalize="none", seam_mode="blend", **knobs)
    np.testing.assert_allclose(blended, data, rtol=1e-6, atol=1e-3)


@COSTLY
@given(st.data(), st.sampled_from(["trim", "blend"]), st.sampled_from(["uint16", "float32"]))
def test_the_bits_are_the_same_however_cut(data: st.DataObject, seam: str, dtype: str) -> None:
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
    volume = np.random.default_rng(8).integers(0, 5000, (11, 12, 14)).astype("uint16")
    knobs: dict[str, Any] = {"patch": 10, "overlap": 6, "normalize": "global"}
    expected = run(volume, conv(), **knobs)
    for trim in (0, 3):
        assert (run(volume, conv(), trim_voxels=trim, **knobs) == expected).all()
    with pytest.raises(UsageError, match="`trim_voxels` 4 needs an `overlap` of at least 8"):
        run(volume, conv(), trim_voxels=4, **knobs)
    said = InferConfig.model_fields["trim_voxels"].description
    assert said is not None and "middle of the overlap" in said


@pytest.mark.slow
def test_delays_do_not_change_the_result(monkeypatch) -> None:
    volume = np.random.default_rng(2).integers(0, 5000, (12, 20, 28)).astype("uint16")
    knobs = {"patch": 12, "overlap": 4, "block": 16, "batch": 5, "seam_mode": "blend"}
    calm = run(volume, conv(), normalize="global", **knobs)
    rng, pause = random.Random(3), threading.Event().wait
    for kind, name in ((SlicedSource, "read"), (MemorySink, "write")):
        method = getattr(kind, name)

        def late(self: Any, *args: Any, method: Callable[..., Any] = method) -> Any:
            pause(rng.random() / 200)
            return method(self, *args)

        monkeypatch.setattr(kind, name, late)
    for workers in (1, 5):
        shaken = run(volume, conv(), normalize="global", prep_workers=workers, **knobs)
        assert (shaken == calm).all()


def test_a_run_can_be_driven_once_and_says_how_far_it_is(tmp_path) -> None:
    seen: list[penstock.Progress] = []
    summary = infer.run_job(job(tmp_path), seen.append)
    assert seen[-1].blocks_done == seen[-1].blocks_planned == 27
    assert seen[-1].patches_done == seen[-1].patches_planned
    assert summary.blocks_written == 27
    assert summary.voxels == 24**3
    assert summary.input_bytes == 2 * 24**3
    stages = {"read", "normalise", "forward", "stitch", "checksum", "write", "note"}
    assert set(summary.stages) == stages
    assert any(line.startswith("Throughput: ") for line in summary.lines())


@pytest.mark.slow
def test_several_devices_share_the_work_and_agree(monkeypatch) -> None:
    """Two lanes on one processor stand for two GPUs: the same code but for the copies."""
    volume = np.random.default_rng(6).integers(0, 5000, (12, 20, 34)).astype("uint16")
    knobs = {"patch": 12, "overlap": 4, "block": 16, "batch": 5, "normalize": "global"}
    alone = run(volume, conv(), seam_mode="blend", **knobs)
    monkeypatch.setattr(devices, "find_devices", lambda names: [torch.device("cpu")] * 3)
    assert (run(volume, conv(), seam_mode="blend", **knobs) == alone).all()
    assert (
        run(volume, conv(), seam_mode="blend", prep_workers=1, max_inflight_batches=1, **knobs)
        == alone
    ).all()


@pytest.mark.parametrize(
    ("shape", "patch"),
    mainly([((20, 25), 8), ((20, 25), (8, 4)), ((3, 20, 25), (8, 4)), ((2, 3, 4, 12, 13), 8),
     ((9, 34, 34), 32), ((1, 1), 8), ((2, 1, 9, 9), (1, 4, 4))], 3, 5),
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


@pytest.mark.parametrize(("seam", "overlap"), paired(["trim", "blend"], [1, 2]))
def test_percentiles_of_a_block_are_those_of_all_of_it(seam: str, overlap: int) -> None:
    """However its patches lie in the global grid."""
    data = np.concatenate([np.arange(128), 7 * np.arange(256)]).reshape(24, 4, 4).astype("float32")
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
        block = data[start : start + 8]
        expected = (block - block.min()) / (block.max() - block.min())
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


def test_a_least_range_is_what_narrower_ones_are_divided_by() -> None:
    """``--eps`` of aind_torch_utils, in every mode that scales."""
    data = np.zeros((8, 8, 8), "float32")
    data[0, 0, 0] = 6
    knobs: dict[str, Any] = {"patch": 8, "overlap": 0, "denormalize": False}
    for normalize in ("percentile", "global"):
        plain = run(data, normalize=normalize, norm_lower=1, norm_upper=99, **knobs)
        widened = run(data, normalize=normalize, norm_lower=1, norm_upper=99, eps=0.5, **knobs)
        assert (plain.max(), widened.max()) == (1, 12)
    fixed = {"normalize": "fixed", "norm_lower": 0, "norm_upper": 2}
    assert run(data, eps=0.5, **fixed, **knobs).max() == 3  # the range is wider than that
    assert run(data, eps=4, **fixed, **knobs).max() == 1.5


def test_global_of_aind_torch_utils_is_a_fixed_range_that_is_clipped() -> None:
    """The words that the refusal of two intensities gives."""
    data = arange((1, 40, 100), "float32")
    words = {"normalize": "global", "norm_lower": 30, "norm_upper": 3000}
    with pytest.raises(UsageError, match=r"`normalize` fixed .* `clip_norm` 0 1$") as refusal:
        run(data, **words)
    assert "percentiles of the whole volume" in str(refusal.value)
    assert "aind_torch_utils means two intensities" in str(refusal.value)
    fixed = words | {"normalize": "fixed", "clip_norm": (0, 1), "denormalize": False}
    theirs = (np.clip(data, 30, 3000) - 30) / 2970
    np.testing.assert_allclose(run(data, patch=(4, 10), overlap=0, **fixed), theirs, atol=1e-6)


@pytest.mark.slow
def test_the_pass_for_percentiles_reads_with_no_more_than_the_plan_holds(monkeypatch) -> None:
    volume = arange((160, 160, 160))
    readers: list[str] = []
    spawn = threads.Flow.spawn

    def count(flow: Any, name: str, work: Callable[[], None]) -> None:
        readers.append(name) if name.startswith("statistics") else None
        spawn(flow, name, work)

    monkeypatch.setattr(threads.Flow, "spawn", count)
    knobs: dict[str, Any] = {
        "patch": 40, "overlap": 0, "block": 40, "prep_workers": 16, "normalize": "global"
    }  # fmt: skip
    plan = penstock.plan_inference(volume, volume * 0, model="identity", devices="cpu", **knobs)
    room = plan.memory.total - plan.memory.base - plan.memory.runtime
    assert (run(volume, **knobs) == volume).all()
    assert 1 <= len(readers) <= max(1, room // (2 * volume.nbytes)) < 16


@pytest.mark.parametrize(
    ("normalize", "seam"),
    mainly(paired(["none", "global", "percentile", "fixed"], ["trim", "blend"]), 1, 2),
)
def test_nan_stays_where_it_was(normalize: str, seam: str) -> None:
    data = arange((4, 5, 6), "float32")
    data[1, 2, 3] = np.nan
    data[3, 4, 5] = np.inf
    spoilt = ~np.isfinite(data)
    out = run(data, patch=4, overlap=2, normalize=normalize, seam_mode=seam, norm_lower=1)
    assert (np.isnan(out) == spoilt).all()
    np.testing.assert_allclose(out[~spoilt], data[~spoilt], rtol=1e-5, atol=1e-3)
    whole = np.zeros(data.shape, "uint16")
    summary = penstock.run_inference(
        data, whole, model="identity", devices="cpu", patch=4, overlap=2, block=4,
        normalize=normalize, seam_mode=seam, norm_lower=1,
    )  # fmt: skip
    assert (whole[spoilt] == 0).all()
    assert summary.not_finite == 2
    assert any(line.startswith("Not finite: 2 voxels of the input") for line in summary.lines())


@pytest.mark.parametrize("seam", ["trim", "blend"])
def test_the_identity_keeps_each_channel_where_another_has_no_value(seam: str) -> None:
    data = arange((3, 1, 5, 6), "float32")
    data[0, 0, 2, 3] = data[2, 0, 4, 5] = np.nan
    how = {"in_channels": 3, "normalize": "none", "axes": "czyx", "patch": 4, "overlap": 2}
    np.testing.assert_allclose(run(data, seam_mode=seam, **how), data, rtol=1e-6)
    best = np.zeros((1, 1, 5, 6), "uint8")
    how |= {"model": "identity", "devices": "cpu", "reduce": "argmax"}
    assert penstock.run_inference(data, best, block=4, **how).not_finite == 2
    assert best[0, 0].ravel().tolist() == [0 if k in (15, 29) else 2 for k in range(30)]


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
