"""Buffers that come back, and memory that is what was said."""

import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import Refused
from penstock.loading.batch import Batch
from penstock.loading.engines import native
from penstock.loading.loader import Loader

from ..parameters import mainly
from ..traced import traced
from .kit import ENGINES, arrays, write

numcodecs = pytest.importorskip("numcodecs")
pytest.importorskip("tensorstore")


def address(batch: Batch) -> int:
    return batch["inputs"].ctypes.data


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_held_keeps_its_content(data: dict[str, Path], engine: str) -> None:
    whole = arrays(data)
    with Loader(data, batch_size=1, queue=1, engine=engine) as loader:
        views = [(b.samples[0], b["targets"][0, 1:3].T) for b in loader]
        views += [(b.samples[0], b["targets"][0, 1:3].T) for b in loader]
        held = list(loader)
        assert len({address(batch) for batch in held}) == 12
        for sample, view in views:
            assert np.array_equal(view, whole["targets"][sample, 1:3].T)
        del views, view, held
        assert len({address(batch) for batch in loader}) == 2
        assert loader._ring.made == 2


def test_a_batch_goes_with_its_last_view(data: dict[str, Path]) -> None:
    # TensorStore lets go of a batch it was reading a moment after it says that it has ended.
    with Loader(data, batch_size=4, engine="native") as loader:
        batches = iter(loader)
        batch = next(batches)
        ends, view = weakref.ref(batch["inputs"]), batch["inputs"][0, 0]
        batches.close()
        del batch
        assert ends() is None
        view = view[:1]
        loader.close()
        assert loader._ring.made == 1, "free buffers are gone, the one that is held is not"
        del view
        loader.close()
        assert loader._ring.made == 0


def test_a_loader_that_is_closed_holds_no_batch_that_nobody_took(data: dict[str, Path]) -> None:
    loader, until = Loader(data, batch_size=1, queue=4, engine="tensorstore"), time.monotonic() + 5
    batches = iter(loader)
    next(batches)
    loader.close()
    while loader._ring.made and time.monotonic() < until:  # TensorStore lets go a moment later
        time.sleep(0.01)
        loader.close()
    assert loader._ring.made == 0


def test_too_little_memory_is_refused_with_the_numbers(data: dict[str, Path]) -> None:
    with pytest.raises(Refused, match=r"max_memory 10\.0 KiB .* \(queue 4 and .* lower batch_size"):
        Loader(data, batch_size=6, queue=4, max_memory="10KiB")
    loader = Loader(data, batch_size=6, queue=0, engine="native")
    room = loader.scratch_bytes + 3 * loader.batch_bytes
    with pytest.raises(Refused, match="queue 2 would fit"):
        Loader(data, batch_size=6, queue=4, max_memory=room, engine="native")
    Loader(data, batch_size=6, queue=2, max_memory=room, engine="native")


@pytest.mark.parametrize("queue", [0, 1, 3])
def test_max_memory_holds_and_holding_all_is_an_error(data: dict[str, Path], queue: int) -> None:
    free = Loader(data, batch_size=1, queue=queue, workers=2)
    limit = free.scratch_bytes + (max(queue, 1) + 1) * free.batch_bytes
    loader = Loader(data, batch_size=1, queue=queue, workers=2, max_memory=limit)
    for _ in loader:
        assert loader._ring.made <= max(queue, 1) + 1
    del _
    held = []
    with pytest.raises(Refused, match="are still held; let go of some"):
        for batch in loader:
            held.append(batch)
    assert len(held) == max(queue, 1) + 1
    del held, batch
    assert sum(1 for _ in loader) == 12
    loader.close()


GZIP = {"compressors": numcodecs.GZip()}
COPIES: dict[str, tuple[dict[str, Any], int]] = {
    "lz4": ({"compressors": numcodecs.Blosc("lz4")}, 0),
    "zstd": ({"compressors": numcodecs.Zstd()}, 0),
    "none": ({"compressors": None}, 0),
    "gzip": (GZIP, 3),
    "filter": ({"filters": [numcodecs.Delta("<u4")], "compressors": numcodecs.Zstd()}, 3),
    "filter-gzip": ({"filters": [numcodecs.Delta("<u4")], **GZIP}, 3),
    "filter-alone": ({"filters": [numcodecs.Shuffle(4)], "compressors": None}, 3),
    "v3-gzip": ({"zarr_format": 3, "compressors": "gzip"}, 3),
    "v3-crc32c": ({"zarr_format": 3, "compressors": "crc32c"}, 0),
}


@pytest.mark.parametrize("how", mainly(COPIES, 0, 1, 2))
@pytest.mark.filterwarnings("ignore:.*not in the Zarr version 3 spec")
def test_what_a_codec_decodes_into_counts_as_memory(how: str, tmp_path) -> None:
    kind, copies = COPIES[how]
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**32, (1, 512, 512), np.uint32)  # hard to compress
    path = write(tmp_path / "a.zarr", values, values.shape, **kind)
    with Loader(path, batch_size=1, queue=0, workers=1, engine="native") as loader:
        engine = loader.engine
        assert isinstance(engine, native.NativeEngine)
        assert engine.scratch_bytes == (2 + copies) * values.nbytes + native._SLACK
        batch = {"data": np.empty_like(values)}
        samples = np.zeros(1, np.int64)
        engine.read_into(samples, batch)
        engine.clear()
        with traced() as peak:
            engine.read_into(samples, batch)
            assert peak() < engine.scratch_bytes + 200_000
        assert np.array_equal(batch["data"], values)


def test_what_tensorstore_asks_for_at_once_counts_too(data: dict[str, Path]) -> None:
    how: dict[str, Any] = {"batch_size": 2, "engine": "tensorstore", "workers": 2}
    free = Loader(data, queue=2, **how)
    inputs, targets = (field.chunk_nbytes for field in free.fields.values())
    # Of inputs a sample is 3 chunks, of targets 2; two batches are read at once, in four tasks.
    assert free.scratch_bytes == 2 * inputs + 2 * (2 * 3 * inputs + 2 * 2 * targets)
    limit = free.scratch_bytes + 3 * free.batch_bytes
    with pytest.raises(Refused, match=r"max_memory .* of scratch and cache"):
        Loader(data, queue=2, max_memory=limit - 1, **how)
    with Loader(data, queue=2, max_memory=limit, **how) as loader:
        assert sum(1 for _ in loader) == 6
