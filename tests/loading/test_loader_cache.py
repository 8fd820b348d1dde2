"""Decoded chunks that are kept: what is read again, and what the cache foresees."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.base.errors import StageError
from penstock.loading.cache import Foresight, NextUseCache
from penstock.loading.chunk_reads import chunk_indices
from penstock.loading.engines import native
from penstock.loading.fields import Field
from penstock.loading.iteration import _wanted
from penstock.loading.loader import Loader
from penstock.loading.order import Order, Position

from ..parameters import mainly
from .kit import (
    DAMAGES,
    arrays,
    cache_of,
    counted,
    distinct,
    hits_of_lru,
    reads_of_belady,
    slow,
    threads_of_loaders,
    uses_of,
    write,
)

numcodecs = pytest.importorskip("numcodecs")


def test_an_epoch_that_is_left_leaves_chunks_and_no_plans(
    data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was foreseen of it will not come; what was decoded is as good as ever."""
    how: dict[str, Any] = {"batch_size": 2, "shuffle": "global", "engine": "native"}
    with Loader(data, cache=20 * 480, **how) as loader:  # of 60 chunks
        cache = cache_of(loader)
        old = iter(loader)
        for _ in range(3):
            next(old)
        loader.close()
        assert 19 * 480 < cache.used <= cache.budget  # chunks of 480 bytes and of 80
        assert not cache._ahead
        new = iter(loader)
        next(new)
        assert cache._ahead
        ends: list[str] = []
        monkeypatch.setattr(loader.engine, "cancel", lambda: ends.append("cancel"))
        monkeypatch.setattr(loader.engine, "forget", lambda: ends.append("forget"))
        del old  # and with it what ends its threads, once more
        assert not ends, "the engine works for another iteration"
        assert sum(1 for _ in new) == 5
        assert ends == ["cancel", "forget"]


CACHED: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows-over-time": {"offsets": (-1, 0, 3)},
    "patches": {"patch": (3, 4)},
}


@pytest.mark.parametrize(
    ("shuffle", "selection"),
    mainly(
        [
            ("none", "plain"),
            ("block", "plain"),
            ("global", "windows-over-time"),
            ("sample", "patches"),
        ],
        2,
        3,
    ),
)
def test_the_cache_reads_what_belady_reads_that_sees_the_whole_epoch(
    shuffle: str, selection: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 samples in 24 chunks, in two arrays whose chunks are equally large."""
    paths = {
        "inputs": write(tmp_path / "a.zarr", distinct((48, 6, 8)), (6, 6, 4), compressors=None),
        "targets": write(tmp_path / "b.zarr", distinct((48, 6, 4)), (6, 6, 4), compressors=None),
    }
    size, won = 6 * 6 * 4 * 4, 0
    uses: list[Any] = []
    read = counted(monkeypatch)
    how: dict[str, Any] = {"batch_size": 3, "shuffle": shuffle, "window": 4, "engine": "native"}
    if selection == "patches":
        paths.pop("inputs")  # of another number of patches
    for capacity in (0, 1, 2, 3, 5, 11, 24):
        with Loader(paths, cache=capacity * size, workers=1, **how, **CACHED[selection]) as loader:
            uses = uses or uses_of(loader)
            read.clear()
            for _ in loader:
                pass
            best = reads_of_belady(uses, capacity)
            least_recent = len(uses) - hits_of_lru(uses, capacity)
            assert len(read) == best <= least_recent
            won += best < least_recent
            if capacity:
                cache = cache_of(loader)
                assert not cache._ahead and cache.used == min(capacity, len(set(uses))) * size
    assert shuffle == "none" or won >= 3, "which is more than the least recently used does"


def test_the_rest_of_an_epoch_is_foreseen_where_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.zarr", values := distinct((96, 8)), (4, 8), compressors=None)
    read = counted(monkeypatch)
    how: dict[str, Any] = {"shuffle": "global", "engine": "native", "workers": 1}
    with Loader(path, batch_size=5, **how) as before:
        batches = iter(before)
        for _ in range(3):
            next(batches)
        state = before.state_dict()
    with Loader(path, batch_size=2, cache=6 * 128, **how) as loader:
        loader.load_state_dict(state)
        assert loader.order.skip == 1
        uses = uses_of(loader, first=7)
        read.clear()
        for batch in loader:
            assert np.array_equal(batch["data"], values[batch.samples])
        assert len(read) == reads_of_belady(uses, 6) < len(uses) - hits_of_lru(uses, 6)


def test_a_chunk_that_many_threads_want_at_once_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.zarr", values := distinct((36, 8)), (12, 8), compressors=None)
    slow(monkeypatch, 1)
    read = counted(monkeypatch)
    with Loader(path, batch_size=1, workers=8, queue=8, cache="1MiB", engine="native") as loader:
        for batch in loader:
            assert np.array_equal(batch["data"], values[batch.samples])
    assert sorted(read) == [f"{path}/{n}.0" for n in range(3)]


def test_a_damaged_chunk_that_many_threads_want_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", distinct((36, 8)), (12, 8), compressors=numcodecs.Zstd())
    DAMAGES["cut"](path / "1.0")
    loader = Loader(path, batch_size=1, workers=8, queue=8, cache="1MiB", engine="native")
    for _ in range(2):
        with pytest.raises(StageError, match=f"{path}/1.0"):
            for batch in loader:
                assert batch.samples[0] < 12
        assert threads_of_loaders() == [] and not cache_of(loader)._making
        loader.set_epoch(0)


def values_of(cache: NextUseCache[Any, Any]) -> list[NDArray[Any]]:
    return [resident.value for resident in cache._residents.values()]


def test_with_little_sight_and_many_threads_the_bytes_stay_the_same(
    data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = arrays(data)
    monkeypatch.setattr(Foresight, "_AT_FIRST", 20)
    monkeypatch.setattr(Foresight, "_FOR_EACH", 0)
    slow(monkeypatch, 3)
    with Loader(
        data, batch_size=2, shuffle="global", workers=6, queue=3, cache=12 * 480,
        engine="native",
    ) as loader:  # fmt: skip
        for epoch in range(4):
            for number, batch in enumerate(loader):
                assert batch.indices.tolist() == loader.order.items(epoch, number).tolist()
                for name, array in batch.items():
                    assert np.array_equal(array, whole[name][batch.samples])
            cache = cache_of(loader)
            assert not cache._ahead and cache.used == sum(c.nbytes for c in values_of(cache))
            assert 0 < cache.used <= cache.budget


@pytest.mark.parametrize("batch_size", [1, 16])
def test_a_hundred_million_samples_are_foreseen_in_the_memory_that_is_said(
    batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of one row of one chunk, none of which comes twice: no use takes more."""
    field = Field("inputs", (10**8, 6, 7, 8), (1, 6, 7, 8), np.dtype("f4"))
    order = Order(10**8, batch_size, shuffle="global")
    cache: NextUseCache[Any, Any] = NextUseCache(1)
    most = 1000
    monkeypatch.setattr(Foresight, "_AT_FIRST", most)
    tracemalloc.start()
    try:
        foresight = Foresight(
            cache,
            _wanted(order, Position(0, 0), 0, lambda: None),
            lambda batch: [("inputs", i) for i in chunk_indices(field, batch.samples, None)],
            most,
        )
        foresight.take()
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert most <= len(cache._ahead) < most + 2 * batch_size
    assert held < most * native._NOTE


def test_a_small_chunk_takes_no_more_of_the_cache_than_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images and their labels, all of which fit to the byte."""
    paths = {
        "images": write(tmp_path / "a.zarr", distinct((16, 512)), (1, 512), compressors=None),
        "labels": write(tmp_path / "b.zarr", distinct((16, 1)), (1, 1), compressors=None),
    }
    read = counted(monkeypatch)
    room = 16 * 2048 + 16 * 4
    with Loader(paths, batch_size=2, cache=room, engine="native", workers=1) as loader:
        for _ in range(2):
            assert sum(1 for _ in loader) == 8
        assert len(read) == 32 and cache_of(loader).used == room


def test_a_chunk_that_another_worker_has_put_is_read_all_the_same(tmp_path: Path) -> None:
    """Two batches want a chunk at once: both miss it, and one of them has put it."""
    path = write(tmp_path / "a.zarr", values := distinct((12, 8)), (6, 4))
    with Loader(path, batch_size=4, cache="1MiB", workers=2, engine="native") as loader:
        assert isinstance(loader.engine, native.NativeEngine)
        cache = loader.engine.cache
        assert cache is not None
        get = cache.get

        def miss(key: Any, use: int) -> Any:
            kept = get(key, use)
            if kept is None:
                _, (row, column) = key
                chunk = values[row * 6 : row * 6 + 6, column * 4 : column * 4 + 4].copy()
                cache.put(key, chunk, 128)
            return kept

        cache.get = miss  # type: ignore[method-assign]
        for batch in loader:
            assert np.array_equal(batch["data"], values[batch.samples])
