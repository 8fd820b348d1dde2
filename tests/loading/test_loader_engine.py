"""Which engine reads, and why: small chunks need one that does not stop for each of them."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import StageError, UsageError
from penstock.instruments.page_cache import is_safe_to_map
from penstock.loading import Endless, Loader, Order
from penstock.loading.engines import native

from ..later import imported_later
from ..parameters import mainly
from .kit import write

zarr = imported_later("zarr")
numcodecs = pytest.importorskip("numcodecs")
ts = pytest.importorskip("tensorstore")

VALUES = np.arange(1, 1 + 40 * 8 * 12, dtype=np.float32).reshape(40, 8, 12)


def stored(path: Path, chunks: tuple[int, ...] = (1, 4, 6), **how: Any) -> Path:
    return write(path, VALUES, chunks, **how)


@pytest.mark.parametrize(
    ("how", "knobs", "engine", "why"),
    [
        ({}, {}, "tensorstore", "without Python's lock"),
        ({"zarr_format": 3, "shards": (4, 8, 12)}, {}, "tensorstore", "it is sharded"),
        ({"compressors": numcodecs.LZ4()}, {}, "native", "TensorStore does not read this"),
        ({}, {"cache": "1MiB"}, "tensorstore", "without Python's lock"),
        ({}, {"engine": "native"}, "native", "asked for"),
    ],
)
def test_auto_takes_what_fits_and_says_why(how, knobs, engine, why, tmp_path) -> None:
    path = stored(tmp_path / "a.zarr", (2, 4, 6), **how)
    with Loader(path, batch_size=5, shuffle="global", **knobs) as loader:
        assert loader.engine.name == engine
        assert str(loader.engine).startswith(f"{engine}: ") and why in str(loader.engine)
        for batch in loader:
            np.testing.assert_array_equal(batch["data"], VALUES[batch.samples])


def test_a_chunk_that_is_kept_is_read_once(tmp_path) -> None:
    path = stored(tmp_path / "a.zarr", (20, 8, 12))
    with pytest.raises(UsageError, match="cache is of engine tensorstore"):
        Loader(path, batch_size=5, engine="native", cache="1MiB")
    for cache, kept in (("1MiB", True), (0, False)):
        with Loader(path, batch_size=5, shuffle="global", cache=cache) as loader:
            list(loader)
            for file in path.glob("*.0.0"):
                file.rename(tmp_path / file.name)
            with contextlib.nullcontext() if kept else pytest.raises(StageError):
                for batch in loader:
                    np.testing.assert_array_equal(batch["data"], VALUES[batch.samples])
            for file in tmp_path.glob("*.0.0"):
                file.rename(path / file.name)


def test_large_chunks_side_by_side_are_copied_together(tmp_path, monkeypatch) -> None:
    path = stored(tmp_path / "a.zarr", chunks=(1, 8, 3))
    assert Loader(path, batch_size=4).engine.name == "tensorstore"
    monkeypatch.setattr(native, "_LARGE", 8 * 3 * 4)
    loader = Loader(path, batch_size=4)
    assert str(loader.engine).startswith("native: it copies large chunks together")


def test_auto_takes_the_engine_that_fits_max_memory(tmp_path) -> None:
    path = stored(tmp_path / "a.zarr", chunks=(10, 8, 12))
    native = Loader(path, batch_size=5, engine="native", workers=1)
    native.engine.save_memory()
    least = native.scratch_bytes + 3 * native.batch_bytes
    wide = Loader(path, batch_size=5, engine="tensorstore", workers=1)
    for limit in (least, wide.scratch_bytes + 3 * wide.batch_bytes):
        with Loader(path, batch_size=5, workers=1, max_memory=limit) as loader:
            needed = loader.scratch_bytes + 3 * loader.batch_bytes
            assert needed <= limit, str(loader.engine)
            for batch in loader:
                np.testing.assert_array_equal(batch["data"], VALUES[batch.samples])


@pytest.mark.parametrize("content", [b"abc", b""])
def test_a_chunk_that_was_cut_short_is_an_error(content: bytes, tmp_path) -> None:
    path = stored(tmp_path / "a.zarr", compressors=None)
    (path / "3.0.0").write_bytes(content)
    with pytest.raises(StageError, match=r"3\.0\.0"), Loader(path, batch_size=1) as loader:
        list(loader)


def test_only_files_of_this_machine_are_mapped(tmp_path, monkeypatch) -> None:
    import psutil

    here = [p for p in psutil.disk_partitions(all=True) if p.mountpoint == "/"]
    network = here[0]._replace(mountpoint=str(tmp_path), fstype="nfs4")
    assert not is_safe_to_map("s3://bucket/a.zarr")
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [*here, network])
    assert not is_safe_to_map(str(tmp_path / "a.zarr"))


@pytest.mark.parametrize("shuffle", ["none", "sample", "block", "global"])
def test_items_of_many_batches_are_those_of_each(shuffle: Any) -> None:
    for order in (
        Order(23, 4, shuffle=shuffle, window=2, chunk=3, patches_per_sample=3),
        Order(23, 3, shuffle=shuffle, rank=1, world_size=2, skip=5),
        Endless(23, 4, shuffle=shuffle),
    ):
        batches = range(1, min(order.num_batches, 12))
        together = order.run_of_items(1, batches)
        assert [each.tolist() for each in together] == [order.items(1, b).tolist() for b in batches]


@pytest.mark.parametrize("engine", ["native", "tensorstore"])
@pytest.mark.parametrize("how", mainly([{"compressors": None}, {}], 1))
def test_nothing_writes_into_a_returned_buffer(how: dict[str, Any], engine: str, tmp_path) -> None:
    """Reads may be under way when an iteration is left: their buffers stay away until they end."""
    path = stored(tmp_path / "a.zarr", (1, 8, 6), **how)
    loader = Loader(path, batch_size=20, shuffle="global", queue=2, engine=engine)
    for _ in range(4):
        batches = iter(loader)
        batches.close()  # before or amid the first reads
        back = []
        while (root := loader._ring.lend()) is not None:
            root[:] = 0xAB
            back.append(root)
        for batch in Loader(path, batch_size=20, engine=engine):  # time for what is still at work
            np.testing.assert_array_equal(batch["data"], VALUES[batch.samples])
        assert all((root == 0xAB).all() for root in back)
        del root, back
    loader.close()
