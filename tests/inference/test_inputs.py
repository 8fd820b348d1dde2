"""What goes in and comes out: dtypes, axes, channels, heads, values and stores of every kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import penstock
from penstock.base import threads
from penstock.base.errors import UsageError
from penstock.data.box import Box

from ..parameters import crossed
from .kit import arange, conv, run


@pytest.mark.parametrize(
    ("dtype", "normalize"),
    crossed(
        "uint8 int8 uint16 int16 float16 float32 float64".split(), ["none", "global", "percentile"]
    ),
)
def test_dtypes_survive_the_way_through(dtype: str, normalize: str) -> None:
    data = (arange((5, 9, 7), "int64") % 200 - (0 if dtype[0] == "u" else 100)).astype(dtype)
    out = run(data, normalize=normalize, patch=4, overlap=2)
    if np.dtype(dtype).kind == "f" and normalize != "none":
        np.testing.assert_allclose(out, data, rtol=2e-3 if dtype == "float16" else 1e-5, atol=1e-4)
    else:
        assert (out == data).all()


@pytest.mark.parametrize(
    ("shape", "patch"),
    [((20, 25), 8), ((20, 25), (8, 4)), ((3, 20, 25), (8, 4)), ((2, 3, 4, 12, 13), 8),
     ((9, 34, 34), 32), ((1, 1), 8), ((2, 1, 9, 9), (1, 4, 4))],
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


@pytest.mark.parametrize(
    ("form", "seam"), crossed(["tuple", "dict", "channels"], ["trim", "blend"])
)
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


@pytest.mark.parametrize(("seam", "overlap"), crossed(["trim", "blend"], [1, 2]))
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
    data = np.ones((6, 6, 6), dtype)
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
        "patch": 40, "overlap": 0, "block": 40, "prep_workers": 16, "normalize": "global"
    }  # fmt: skip
    plan = penstock.plan_inference(volume, volume * 0, model="identity", devices="cpu", **knobs)
    room = plan.memory.total - plan.memory.base - plan.memory.runtime
    assert (run(volume, **knobs) == volume).all()
    assert 1 <= len(readers) <= max(1, room // (2 * volume.nbytes)) < 16


@pytest.mark.parametrize(
    ("normalize", "seam"), crossed(["none", "global", "percentile", "fixed"], ["trim", "blend"])
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


@pytest.mark.parametrize(("value", "normalize"), crossed([0, 7, 65535], ["global", "percentile"]))
def test_a_constant_volume_stays_constant(value: int, normalize: str) -> None:
    data = np.full((5, 6, 7), value, "uint16")
    assert (run(data, patch=4, overlap=2, normalize=normalize) == value).all()


def test_one_voxel() -> None:
    data = np.array([[[1234]]], "uint16")
    assert run(data, conv(), patch=8, overlap=2).shape == (1, 1, 1)
    assert run(data, patch=8, overlap=2).item() == 1234


# --- stores -------------------------------------------------------------------------------------


def test_a_box_of_the_sink_is_where_the_source_says() -> None:
    """Sources and sinks with origins of their own."""
    import tensorstore as ts

    data = arange((5, 6, 7))
    spec = {"driver": "array", "dtype": "uint16", "array": data.tolist(),
            "transform": {"input_inclusive_min": [5, -3, 100], "input_exclusive_max": [10, 3, 107],
                          "output": [{"input_dimension": i, "offset": o}
                                     for i, o in enumerate((-5, 3, -100))]}}  # fmt: skip
    assert ts.open(spec).result().domain.origin == (5, -3, 100)
    out = np.zeros_like(data)
    penstock.run_inference(spec, out, model="identity", patch=4, overlap=2, devices="cpu")
    assert (out == data).all()
    assert Box((5, -3, 100), (10, 3, 107)).shape == out.shape


@pytest.mark.parametrize(
    ("source", "sink", "seam"),
    [
        pytest.param("zarr2", "sharded", "trim", marks=pytest.mark.slow),
        ("sharded", "n5", "blend"),
        pytest.param("n5", "zarr2", "trim", marks=pytest.mark.slow),
        pytest.param("ome", "ome", "trim", marks=pytest.mark.slow),
        ("tiff", "ome", "blend"),
    ],
)
def test_from_every_kind_of_store_to_every_kind(
    source: str, sink: str, seam: str, tmp_path: Path
) -> None:
    import tensorstore as ts
    import tifffile

    data = arange((9, 17, 10))

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
