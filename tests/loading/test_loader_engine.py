"""Which engine reads, and why: small chunks need one that does not stop for each of them."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
import threading
import weakref
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import StageError
from penstock.base.threads import Channel, Flow
from penstock.instruments.page_cache import is_safe_to_map
from penstock.loading.engines import native
from penstock.loading.loader import Loader
from penstock.loading.order import Endless, Order

from .kit import thinned, write

zarr = pytest.importorskip("zarr")
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
        ({}, {"cache": "1MiB"}, "native", "will be used next"),
        ({}, {"fetch": 2}, "native", "read ahead"),
        ({}, {"engine": "native"}, "native", "asked for"),
    ],
)
def test_auto_takes_what_fits_and_says_why(
    how: dict[str, Any], knobs: dict[str, Any], engine: str, why: str, tmp_path: Path
) -> None:
    path = stored(tmp_path / "a.zarr", (2, 4, 6), **how)
    with Loader(path, batch_size=5, shuffle="global", **knobs) as loader:
        assert loader.engine.name == engine
        assert str(loader.engine).startswith(f"{engine}: ") and why in str(loader.engine)
        for batch in loader:
            np.testing.assert_array_equal(batch["data"], VALUES[batch.samples])


def test_large_chunks_side_by_side_are_copied_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = stored(tmp_path / "a.zarr", chunks=(1, 8, 3))
    assert Loader(path, batch_size=4).engine.name == "tensorstore"
    monkeypatch.setattr(native, "_LARGE", 8 * 3 * 4)
    loader = Loader(path, batch_size=4)
    assert str(loader.engine).startswith("native: it copies large chunks together")


def test_auto_takes_the_engine_that_fits_max_memory(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(
    ("chunks", "shuffle"),
    thinned(
        product(((1, 4, 3), (7, 8, 5), (40, 3, 12)), ("none", "block", "global")),
        lambda chunks, shuffle: shuffle == "none" or chunks == (7, 8, 5),
    ),
)
def test_slices_and_indices_bring_the_same(
    chunks: tuple[int, ...], shuffle: str, tmp_path: Path
) -> None:
    """Samples in a row are read as a slice, others by index; a part of the channels by either."""
    path = stored(tmp_path / "a.zarr", chunks=chunks)
    how: dict[str, Any] = {"batch_size": 7, "shuffle": shuffle, "window": 2}
    with Loader(path, channels=[11, 2, 3], **how) as loader:
        assert loader.engine.name == "tensorstore"
        rows = 0
        for batch in loader:
            rows += len(batch.samples)
            np.testing.assert_array_equal(batch["data"], VALUES[batch.samples][..., [11, 2, 3]])
    assert rows == 40


@pytest.mark.parametrize("content", [b"abc", b""])
def test_a_chunk_that_was_cut_short_is_an_error(content: bytes, tmp_path: Path) -> None:
    path = stored(tmp_path / "a.zarr", compressors=None)
    (path / "3.0.0").write_bytes(content)
    with pytest.raises(StageError, match=r"3\.0\.0"), Loader(path, batch_size=1) as loader:
        list(loader)


def test_only_files_of_this_machine_are_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    ranked = Order(23, 3, shuffle=shuffle, rank=1, world_size=2, skip=5)
    together = ranked.run_of_items(1, (2, 0), globally=True)
    assert [each.tolist() for each in together] == [
        ranked.global_items(1, batch).tolist() for batch in (2, 0)
    ]


def test_an_error_wakes_who_waits_for_a_channel() -> None:
    flow = Flow()
    channel: Channel[int] = Channel(flow)
    ended: list[str] = []

    def wait() -> None:
        try:
            channel.get()
        finally:
            ended.append("woken")

    flow.spawn("waits", wait)
    flow.fail(ValueError("first"))
    flow.settle()
    assert ended == ["woken"]


@pytest.mark.parametrize("engine", ["native", "tensorstore"])
@pytest.mark.parametrize("how", [{"compressors": None}, {}])
def test_nothing_writes_into_a_buffer_that_came_back(
    how: dict[str, Any], engine: str, tmp_path: Path
) -> None:
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


def test_a_write_that_was_cancelled_keeps_its_memory(tmp_path: Path) -> None:
    """As a loop may drop its futures, and as `Loader` cancels what nobody waits for."""
    path = stored(tmp_path / "a.zarr", compressors=None)
    array = ts.open({"driver": "zarr", "kvstore": f"file://{path}/"}).result()
    for cancelled in (True, False):
        buffer = np.zeros(VALUES.nbytes, np.uint8)
        root = np.frombuffer(buffer.data, np.uint8)
        gone = threading.Event()
        weakref.finalize(root, gone.set)
        future = ts.array(root.view(np.float32).reshape(VALUES.shape)).write(array)
        if cancelled:
            future.cancel()
        del future, root
        assert gone.wait(60), "its memory comes back"
        there = buffer.copy()
        array.read().result()
        np.testing.assert_array_equal(buffer, there, "nothing is written from then on")


FAULTS = """
import resource, sys
from penstock import Loader

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for batch in loader:
        del batch
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with Loader(sys.argv[1], batch_size=8, workers=2) as loader:
    # The heap of a thread grows whenever more chunks than before are decoded at once.
    print(min(faults() for epoch in range(6)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that gives memory back")
def test_the_room_of_a_decoded_chunk_is_kept_for_the_next(tmp_path: Path) -> None:
    """In a fresh process, whose heap nobody has made to keep what is freed."""
    images = np.random.default_rng(0).integers(0, 99, (16, 256, 256, 3), np.uint8)
    compressor = zarr.codecs.ZstdCodec()
    array = zarr.create_array(
        tmp_path / "images.zarr", shape=images.shape, chunks=(1, *images.shape[1:]), dtype="u1",
        compressors=compressor,
    )  # fmt: skip
    array[:] = images
    words = [sys.executable, "-c", FAULTS, str(tmp_path / "images.zarr")]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    num_pages = images.nbytes // resource.getpagesize()
    assert int(done.stdout) < num_pages / 4
