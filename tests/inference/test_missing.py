"""Chunks that the input does not hold: counted once each, or refused with their place."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import tifffile

import penstock
from penstock.base.errors import StageError, UsageError
from penstock.cli import main
from penstock.data.stores.missing import ChunkCount

from ..parameters import mainly, paired
from .kit import Array, arange

SHAPE = (20, 33, 41)
KINDS = ["zarr2", "zarr3", "sharded", "n5"]
KNOBS: dict[str, Any] = {"model": "identity", "patch": 16, "overlap": 4, "block": 16,
                         "normalize": "none", "devices": "cpu"}  # fmt: skip
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


def spec(
    kind: str, path: Path, shape: tuple[int, ...] = SHAPE, fill: int = 0, dtype: str = "uint16"
) -> dict[str, Any]:
    """Chunks of 8 x 16 x 16 (inside shards of 16 x 32 x 32)."""
    chunks = [1] * (len(shape) - 3) + [8, 16, 16]
    place: dict[str, Any] = {"kvstore": {"driver": "file", "path": f"{path}/"}}
    if kind == "n5":
        meta = {"dimensions": shape[::-1], "blockSize": chunks[::-1], "dataType": dtype,
                "compression": {"type": "gzip"}}  # fmt: skip
        return place | {"driver": "n5", "metadata": meta}
    if kind == "zarr2":
        stored = np.dtype(dtype).str
        meta = {"shape": shape, "chunks": chunks, "dtype": stored, "fill_value": fill}
        return place | {"driver": "zarr", "metadata": meta}
    outer = [16, 32, 32] if kind == "sharded" else chunks
    codecs: list[Any] = [BYTES]
    if kind == "sharded":
        codecs = [{"name": "sharding_indexed", "configuration": {"chunk_shape": chunks,
                                                                 "codecs": codecs}}]  # fmt: skip
    grid = {"name": "regular", "configuration": {"chunk_shape": outer}}
    meta = {"shape": shape, "data_type": dtype, "chunk_grid": grid, "fill_value": fill,
            "codecs": codecs}  # fmt: skip
    return place | {"driver": "zarr3", "metadata": meta}


def written(kind: str, path: Path, fill: int = 0) -> tuple[dict[str, Any], Array]:
    """An array that holds all but three chunks, and one more that is all of one value."""
    data = arange(SHAPE) + 1
    data[16:20, 32:33, 32:41] = 7  # there, though it does not vary
    opened = spec(kind, path, fill=fill)
    store = ts.open(opened, create=True).result()
    stored = store if kind != "n5" else store.T
    stored.write(data).result()
    for box in (np.s_[0:8, 0:16, 0:16], np.s_[8:16, 16:32, 32:41], np.s_[16:20, 0:16, 16:32]):
        data[box] = fill
        if kind == "sharded":  # what is all fill value is not stored
            stored[box] = fill
    if kind != "sharded":
        names = {"zarr2": "{}.{}.{}", "zarr3": "c/{}/{}/{}", "n5": "{2}/{1}/{0}"}[kind]
        for index in ((0, 0, 0), (1, 1, 2), (2, 0, 1)):
            (path / names.format(*index)).unlink()
    return opened, data


@pytest.mark.parametrize(("kind", "seam"), mainly(paired(KINDS, ["trim", "blend"]), 0, 1))
def test_absent_chunks_are_counted_once_each(kind: str, seam: str, tmp_path) -> None:
    """Blocks and chunks lie askew, and blended blocks overlap."""
    source, data = written(kind, tmp_path / "in", fill=0 if kind == "n5" else 5)
    out = np.zeros_like(data)
    summary = penstock.run_inference(source, out, seam_mode=seam, **KNOBS)
    assert (out == data).all()
    assert summary.chunks == ChunkCount(3 * 3 * 3, 3)
    missing = [line for line in summary.lines() if line.startswith("Missing: 3 of 27 chunks")]
    assert len(missing) == 1


@pytest.mark.parametrize(
    ("kind", "normalize"), mainly([("zarr2", "none"), ("sharded", "global")], 1)
)
def test_a_missing_chunk_may_be_an_error(kind: str, normalize: str, tmp_path) -> None:
    source, data = written(kind, tmp_path / "in")
    knobs = KNOBS | {"normalize": normalize, "prep_workers": 1, "missing": "error"}
    with pytest.raises(
        StageError, match=r"^read failed at .*chunk \(0, 0, 0, 0, 0\) of .*not there"
    ):
        penstock.run_inference(source, data * 0, **knobs)
    whole = spec(kind, tmp_path / "whole")
    array = ts.open(whole, create=True).result()
    (array if kind != "n5" else array.T).write(data + 1).result()
    summary = penstock.run_inference(whole, data * 0, **knobs)
    assert summary.chunks == ChunkCount(27, 0)
    assert not any(line.startswith("Missing") for line in summary.lines())


def test_a_whole_shard_may_be_absent(tmp_path) -> None:
    source, data = written("sharded", tmp_path / "in")
    shard = tmp_path / "in/c/0/0/0"
    assert shard.exists()
    shard.unlink()
    summary = penstock.run_inference(source, data * 0, **KNOBS)
    assert summary.chunks.absent == 8 + 2  # one of the three was in it


def test_a_chunk_of_several_channels_counts_once(tmp_path) -> None:
    data = arange((4, 3, 8, 16, 16))
    source = {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{tmp_path}/in/"},
              "metadata": {"shape": data.shape, "chunks": [2, 2, 8, 8, 8],
                           "dtype": "<u2"}}  # fmt: skip
    ts.open(source, create=True).result().write(data).result()
    for name in ("0.0.0.0.0", "0.1.0.1.1", "1.0.0.0.1"):
        (tmp_path / "in" / name).unlink()
    out = np.zeros((4, 2, 8, 16, 16), "uint16")
    knobs = KNOBS | {"patch": 8, "overlap": 2}
    summary = penstock.run_inference(source, out, c="1:3", **knobs)
    assert summary.chunks == ChunkCount(2 * 2 * 4, 3)
    summary = penstock.run_inference(source, out[1:2, :1], c=2, t=1, **knobs)
    assert summary.chunks == ChunkCount(4, 1)


def test_a_tile_that_a_tiff_leaves_out_is_a_missing_chunk(tmp_path) -> None:
    data = arange((32, 48)) + 1
    data[16:, 16:32] = 0
    path = tmp_path / "in.tif"
    tiles = [data[y : y + 16, x : x + 16] for y in (0, 16) for x in (0, 16, 32)]
    tifffile.imwrite(path, (tile if tile.any() else None for tile in tiles), tile=(16, 16),
                     shape=data.shape, dtype=data.dtype, compression="zlib")  # fmt: skip
    knobs = KNOBS | {"patch": (12, 12), "block": (16, 16)}
    assert penstock.run_inference(path, np.zeros_like(data), **knobs).chunks == ChunkCount(6, 1)
    with pytest.raises(StageError, match=r"chunk \(0, 0, 0, 1, 1\)"):
        penstock.run_inference(path, np.zeros_like(data), missing="error", **knobs)


def test_what_has_no_chunks_misses_none_and_a_view_that_cannot_tell_is_refused(tmp_path) -> None:
    assert penstock.run_inference(arange(SHAPE), arange(SHAPE), **KNOBS).chunks is None
    penstock.run_inference(arange(SHAPE), arange(SHAPE), missing="error", **KNOBS)
    layer = {"driver": "array", "dtype": "uint16", "array": arange((2, 8, 8)).tolist()}
    virtual = {"driver": "stack", "layers": [layer]}
    with pytest.raises(UsageError, match=r"`missing` error: .* does not tell"):
        penstock.run_inference(virtual, arange((2, 8, 8)), missing="error", **KNOBS)


def test_a_cast_of_an_array_tells_too(tmp_path) -> None:
    source, data = written("zarr2", tmp_path / "in")
    view = {"driver": "cast", "dtype": "float32", "base": source}
    summary = penstock.run_inference(view, data.astype("float32"), **KNOBS)
    assert summary.chunks == ChunkCount(27, 3)


def test_only_chunks_of_one_value_are_asked_for(tmp_path, monkeypatch) -> None:
    """Or reading would cost twice as many requests."""
    from penstock.data.stores.tensorstore import TensorStoreSource

    source, data = written("zarr3", tmp_path / "in")
    asked, absent = [], TensorStoreSource.absent

    def count(self: TensorStoreSource, cells: Any) -> Any:
        asked.extend(cells)
        return absent(self, cells)

    monkeypatch.setattr(TensorStoreSource, "absent", count)
    penstock.run_inference(source, data * 0, **KNOBS)
    assert len(asked) == 1 + 3 + 1  # whether it tells, what is absent, what is all 7


@pytest.mark.slow
def test_an_output_keeps_chunks_of_its_fill_value_if_its_spec_says_so(tmp_path, capsys) -> None:
    data = arange((16, 16, 32))
    data[:, :, 16:] = 0
    np.save(tmp_path / "in.npy", data)

    def infer(into: object, out: object, *more: str) -> int:
        words = ["--in-spec", into, "--out-spec", out, "--model-type", "identity", "--patch", 8,
                 "--overlap", 0, "--block", 16, "--chunks", 16, "--devices", "cpu",
                 "--normalize", "none"]  # fmt: skip
        return main(["infer", *map(str, words), *more])

    kept = spec("zarr3", tmp_path / "kept.zarr", data.shape)
    kept |= {"create": True, "store_data_equal_to_fill_value": True}
    assert infer(tmp_path / "in.npy", tmp_path / "first.zarr") == 0
    assert infer(tmp_path / "in.npy", json.dumps(kept)) == 0
    capsys.readouterr()
    assert infer(tmp_path / "first.zarr", tmp_path / "no.zarr", "--missing", "error") == 1
    assert "is not there (--missing error)" in capsys.readouterr().err
    assert infer(tmp_path / "kept.zarr", tmp_path / "yes.zarr", "--missing", "error") == 0
