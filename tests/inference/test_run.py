"""The laws of the pipeline, end to end on real arrays and real small nets."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import penstock
from penstock.base.config.infer import InferConfig
from penstock.base.errors import UsageError
from penstock.data.stores.memory import MemorySink, MemorySource
from penstock.inference import run as infer
from penstock.models import devices

from ..laws import COSTLY
from ..parameters import crossed
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


# --- laws --------------------------------------------------------------------------------------


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
    volume = np.random.default_rng(8).integers(0, 5000, (11, 12, 14)).astype("uint16")
    knobs: dict[str, Any] = {"patch": 10, "overlap": 6, "normalize": "global"}
    expected = run(volume, conv(), **knobs)
    for trim in (0, 3):
        assert (run(volume, conv(), trim_voxels=trim, **knobs) == expected).all()
    with pytest.raises(UsageError, match="trim_voxels=4 needs an overlap= of at least 8"):
        run(volume, conv(), trim_voxels=4, **knobs)
    said = InferConfig.model_fields["trim_voxels"].description
    assert said is not None and "middle of the overlap" in said


def test_delays_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = np.random.default_rng(2).integers(0, 5000, (12, 20, 28)).astype("uint16")
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


@pytest.mark.parametrize(
    ("seam", "shape"), crossed(["trim", "blend"], [(18, 20, 25), (3, 20, 34), (1, 1, 1)])
)
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


def test_a_run_can_be_driven_once_and_says_how_far_it_is(tmp_path: Path) -> None:
    seen: list[penstock.Progress] = []
    summary = infer.run_job(job(tmp_path), seen.append)
    assert seen[-1].units_done == seen[-1].units_planned == 27
    assert seen[-1].patches_done == seen[-1].patches_planned
    assert summary.units_written == 27
    assert summary.voxels == 24**3
    assert summary.input_bytes == 2 * 24**3
    stages = {"read", "normalise", "forward", "stitch", "checksum", "write", "note"}
    assert set(summary.stages) == stages
    assert any(line.startswith("Throughput: ") for line in summary.lines())


def test_several_devices_share_the_work_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_exported_program_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"  # given as it is, and as text
    single = nn.Sequential(nn.Conv3d(1, 1, 3, padding=1))
    torch.export.save(torch.export.export(single.eval(), (torch.zeros(1, 1, 12, 12, 12),)), path)
    data = np.random.default_rng(0).normal(size=(12, 20, 25)).astype("float32")
    knobs: dict[str, Any] = {"patch": 12, "overlap": 4, "normalize": "none"}
    expected = run(data, single, **knobs)
    for net, batch in ((path, 1), (str(path), 3)):
        np.testing.assert_allclose(run(data, net, batch=batch, **knobs), expected, atol=1e-6)
