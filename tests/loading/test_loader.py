"""The loader: every item once and in order, whatever the threads; errors at once; memory reused."""

from __future__ import annotations

import contextlib
import functools
import gc
import http.server
import json
import os
import random
import re
import shutil
import threading
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.base.errors import Refused, StageError, UsageError
from penstock.instruments.slow_server import Loopback
from penstock.loading.batch import Batch
from penstock.loading.cache import Foresight, NextUseCache
from penstock.loading.chunk_reads import chunk_indices, chunk_reads
from penstock.loading.contenders import registry
from penstock.loading.engines import decode, native, zarr_metadata
from penstock.loading.engines.selection import Normaliser
from penstock.loading.fields import Field, PatchGrid
from penstock.loading.iteration import _wanted
from penstock.loading.loader import Loader
from penstock.loading.order import Order, Position

from .test_cache import hits_of_lru, reads_of_belady

zarr = pytest.importorskip("zarr")
numcodecs = pytest.importorskip("numcodecs")
pytest.importorskip("tensorstore")

ENGINES = ("native", "tensorstore")
LAST = (12, 6, 5, 10)  # (sample, lat, lon, channels), the last chunk padded
FIRST = (12, 10, 6, 5)


def distinct(shape: tuple[int, ...], dtype: Any = np.float32, start: int = 1) -> NDArray[Any]:
    """No two values alike, none of them a fill value."""
    return np.arange(start, start + np.prod(shape), dtype=dtype).reshape(shape)


def write(
    path: Path, values: NDArray[Any], chunks: tuple[int, ...], zarr_format: int = 2, **how: Any
) -> Path:
    array = zarr.create_array(
        path, shape=values.shape, chunks=chunks, dtype=values.dtype, zarr_format=zarr_format, **how
    )
    array[...] = values
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Inputs and targets of 12 samples in 36 and 24 chunks."""
    folder = tmp_path_factory.mktemp("data")
    lz4 = {"compressors": numcodecs.Blosc("lz4")}
    return {
        "inputs": write(folder / "inputs.zarr", distinct(LAST), (1, 6, 5, 4), **lz4),
        "targets": write(folder / "targets.zarr", distinct((12, 4, 7), start=9000), (1, 4, 5)),
    }


@pytest.fixture
def copy(data: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """The same, to be damaged."""
    return {name: Path(shutil.copytree(path, tmp_path / path.name)) for name, path in data.items()}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    if ours():  # a full collection of torch's objects takes longer than most tests
        gc.collect()
    assert ours() == []


def ours() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("penstock-loader")]


def arrays(data: dict[str, Path]) -> dict[str, NDArray[Any]]:
    return {name: zarr.open_array(path, mode="r")[...] for name, path in data.items()}


def seen(loader: Loader) -> list[tuple[int, list[int], dict[str, bytes]]]:
    """All of an epoch: number, items and bytes of each batch."""
    return [
        (b.number, b.indices.tolist(), {name: array.tobytes() for name, array in b.items()})
        for b in loader
    ]


# --- tables: every layout against numpy ----------------------------------------------------------

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "v2-channels-last": (LAST, (1, 6, 5, 4), {}),
    "v2-slash": (
        LAST,
        (1, 6, 5, 4),
        {"chunk_key_encoding": {"name": "v2", "separator": "/"}},
    ),
    "v2-channels-first": (FIRST, (1, 4, 6, 5), {}),
    "v2-chunks-of-3-samples": (LAST, (3, 4, 5, 3), {}),
    "v2-uncompressed": (LAST, (2, 6, 5, 4), {"compressors": None}),
    "v2-zlib": (LAST, (1, 6, 5, 4), {"compressors": numcodecs.Zlib()}),
    "v2-delta-filter": (
        LAST,
        (1, 6, 5, 4),
        {"filters": [numcodecs.Delta("<f4")], "compressors": numcodecs.Zstd()},
    ),
    "v3-blosc": (LAST, (1, 6, 5, 4), {"zarr_format": 3, "compressors": "blosc"}),
    "v3-zstd": (FIRST, (2, 4, 6, 5), {"zarr_format": 3}),
    "v3-gzip": (LAST, (1, 6, 2, 4), {"zarr_format": 3, "compressors": "gzip"}),
    "v3-uncompressed": (LAST, (1, 6, 5, 4), {"zarr_format": 3, "compressors": None}),
    "v3-sharded": (LAST, (1, 3, 5, 5), {"zarr_format": 3, "shards": (2, 6, 5, 10)}),
    "one-value-per-sample": ((12,), (4,), {}),
}
BLOSC = zarr.codecs.BloscCodec
SELECTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"offsets": (-1, 0)},
    "ahead": {"offsets": (1,)},
    "channels": {"channels": (9, 1, 2, 3, 7)},
    "patches": {"patch": PatchGrid((4, 3), (2, 2), (-3, -2))},
    "all-of-it": {"offsets": (-2, 1), "channels": (0, 8, 4), "patch": PatchGrid((5,), (), (1,))},
}


def expected(values: NDArray[Any], batch: Batch, loader: Loader) -> NDArray[Any]:
    """Rows of a batch from the whole array, by plain numpy."""
    field = loader.fields["data"]
    rows = []
    for item, sample in zip(batch.indices.tolist(), batch.samples.tolist(), strict=True):
        cut = [slice(None)] * (values.ndim - 1)
        for axis, start in field.patch_start(item % field.patches_per_sample).items():
            cut[axis - 1] = slice(start, start + field.item_shape[axis - values.ndim])
        steps = [values[sample + offset][tuple(cut)] for offset in field.offsets]
        if field.channels is not None:
            axis = field.channel_axis % values.ndim - 1
            steps = [np.take(step, field.channels, axis) for step in steps]
        rows.append(np.stack(steps) if len(steps) > 1 else steps[0])
    return np.stack(rows)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_read_as_numpy_reads_it(layout: str, engine: str, tmp_path: Path) -> None:
    shape, chunks, how = LAYOUTS[layout]
    if how.get("compressors") == "blosc":
        how = how | {"compressors": BLOSC(cname="lz4", typesize=4)}
    if how.get("compressors") == "gzip":
        how = how | {"compressors": zarr.codecs.GzipCodec()}
    path = write(tmp_path / "a.zarr", values := distinct(shape), chunks, **how)
    if engine == "native" and layout == "v3-sharded":
        with pytest.raises(UsageError, match=r"sharded; engine native cannot .* tensorstore may"):
            Loader(path, batch_size=2, engine=engine)
        engine = "auto"
    if engine == "tensorstore" and "delta" in layout:
        with pytest.raises(UsageError, match="filters"):
            Loader(path, batch_size=2, engine=engine)
        engine = "auto"
    with Loader(path, batch_size=5, shuffle="global", seed=3, engine=engine, workers=3) as loader:
        order = []
        for batch in loader:
            assert np.array_equal(batch["data"], expected(values, batch, loader))
            order += batch.samples.tolist()
        assert sorted(order) == list(range(12)) != order


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("channel_axis", [-1, 1], ids=["channels-last", "channels-first"])
def test_every_selection_is_what_numpy_selects(
    channel_axis: int, selection: str, engine: str, tmp_path: Path
) -> None:
    shape = LAST if channel_axis == -1 else FIRST
    knobs = dict(SELECTIONS[selection])
    if channel_axis == 1 and "patch" in knobs:
        knobs["patch"] = PatchGrid((4, 3), (2, 2))
    path = write(tmp_path / "a.zarr", values := distinct(shape), (2, 4, 3, 4))
    with Loader(
        path, batch_size=4, shuffle="block", window=2, channel_axis=channel_axis, engine=engine,
        workers=2, **knobs,
    ) as loader:  # fmt: skip
        items: list[int] = []
        for batch in loader:
            assert np.array_equal(batch["data"], expected(values, batch, loader))
            items += batch.indices.tolist()
        assert sorted(items) == list(range(loader.order.num_items))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("how", [{}, {"zarr_format": 3}], ids=["v2", "v3"])
@pytest.mark.parametrize(
    ("grid", "channel_axis"),
    [
        ((3, 2, 5, 4), None),
        (PatchGrid((2, 4), (1, 3), (0, 2)), None),
        (PatchGrid((3, 5), (), (-3, -4)), None),
        (PatchGrid((2, 4), (2, 2), (0, 2)), 1),
    ],
)
def test_patches_on_all_axes_make_a_volume_one_sample(
    grid: Any, channel_axis: int | None, how: dict[str, Any], engine: str, tmp_path: Path
) -> None:
    path = write(
        tmp_path / "a.zarr", values := distinct(shape := (7, 6, 9, 4)), (2, 6, 4, 3), **how
    )
    knobs = {} if channel_axis is None else {"channels": (4, 0, 3), "channel_axis": channel_axis}
    whole = values if channel_axis is None else values.take((4, 0, 3), channel_axis)
    boxes = grid if isinstance(grid, PatchGrid) else PatchGrid(grid, axes=(0, 1, 2, 3))
    axes = [axis % 4 for axis in boxes.axes]
    lengths = [shape[axis] for axis in axes]
    found = np.zeros(whole.shape, bool)
    with Loader(
        path, batch_size=4, shuffle="global", patch=grid, workers=3, engine=engine, **knobs
    ) as loader:
        items: list[int] = []
        for batch in loader:
            assert batch.samples.tolist() == [0] * len(batch.indices)
            for row, item in zip(batch["data"], batch.indices.tolist(), strict=True):
                place = np.unravel_index(item, boxes.counts(lengths))
                box = [slice(None)] * 4
                for axis, start, size in zip(
                    axes, boxes.start(place, lengths), boxes.shape, strict=True
                ):
                    box[axis] = slice(start, start + size)
                assert np.array_equal(row, whole[tuple(box)])
                found[tuple(box)] = True
            items += batch.indices.tolist()
        assert sorted(items) == list(range(loader.order.num_items))
        assert found.all()
        assert loader.price().exact


def test_foreign_byte_order_is_made_native(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", values := distinct((4, 6), ">f8"), (1, 4))
    with Loader(path, batch_size=4) as loader:
        (batch,) = loader
    assert batch["data"].dtype == np.dtype("=f8")
    assert np.array_equal(batch["data"], values)


def test_a_packed_data_set_names_its_arrays_and_axes(data: dict[str, Path], tmp_path: Path) -> None:
    for path in data.values():
        shutil.copytree(path, tmp_path / path.name)
    axes = {"inputs": ["sample", "lat", "lon", "channels"], "targets": ["sample", "channels", "x"]}
    entries = {n: {"path": f"{n}.zarr", "axes": axes[n]} for n in data}
    manifest = {"format": "penstock-packed", "version": 1, "arrays": entries}
    (tmp_path / "dataset.json").write_text(json.dumps(manifest))
    with Loader(tmp_path, batch_size=12, channels={"targets": (2, 0)}) as loader:
        (batch,) = loader
    assert np.array_equal(batch["targets"], arrays(data)["targets"][:, [2, 0]])
    assert np.array_equal(batch["inputs"], arrays(data)["inputs"])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "layout", ["v2-channels-last", "v2-channels-first", "v2-chunks-of-3-samples"]
)
def test_normalised_to_the_bit_as_numpy_does(layout: str, engine: str, tmp_path: Path) -> None:
    shape, chunks, _ = LAYOUTS[layout]
    axis = 1 if "first" in layout else -1
    path = write(tmp_path / "a.zarr", values := distinct(shape), chunks)
    mean = np.linspace(-3, 40, 10).astype(np.float32)
    std = np.linspace(0.3, 7, 10).astype(np.float32)
    statistics = tmp_path / "statistics.json"
    statistics.write_text(json.dumps({"data": {"mean": mean.tolist(), "std": std.tolist()}}))
    wide = [-1 if a == axis % 4 else 1 for a in range(4)]
    wanted = (values - mean.reshape(wide)) / std.reshape(wide)
    with Loader(path, batch_size=12, channel_axis=axis, engine=engine, normalise=statistics) as one:
        (batch,) = one
        assert np.array_equal(batch["data"], wanted)
    some = (7, 2)
    with Loader(
        path, batch_size=12, channel_axis=axis, channels=some, engine=engine,
        normalise={"data": (mean, std)},
    ) as two:  # fmt: skip
        (batch,) = two
        assert np.array_equal(batch["data"], np.take(wanted, some, axis))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shuffle", ["none", "global"])
def test_patches_that_cut_the_channels_are_normalised_by_their_own(
    engine: str, shuffle: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.zarr", values := distinct(LAST), (1, 6, 5, 4))
    mean, std = np.linspace(-3, 40, 10, dtype="f4"), np.linspace(0.3, 7, 10, dtype="f4")
    wanted, patch = (values - mean) / std, PatchGrid((5, 4), (), (2, 3))  # the last overlaps
    with Loader(
        path, batch_size=4, patch=patch, engine=engine, shuffle=shuffle, workers=2,
        normalise={"data": (mean, std)},
    ) as loader:  # fmt: skip
        assert loader.order.patches_per_sample == 3
        for batch in loader:
            _, patches = loader.order.split(batch.indices)
            for row, sample, number in zip(batch["data"], batch.samples, patches, strict=True):
                start = (0, 4, 6)[number]
                assert np.array_equal(row, wanted[sample, :, :, start : start + 4])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("statistics", [(3.0, 2.0), (np.arange(12.0), np.arange(12.0) + 1)])
def test_one_number_a_sample_is_normalised_too(
    statistics: tuple[Any, Any], engine: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "a.zarr", values := distinct((12,)), (4,))
    mean, std = (np.asarray(value, np.float32) for value in statistics)
    normalise = {"data": statistics}
    with Loader(path, batch_size=5, shuffle="global", engine=engine, normalise=normalise) as loader:
        for batch in loader:
            assert np.array_equal(batch["data"], ((values - mean) / std)[batch.samples])


@given(st.tuples(*[st.integers(1, 7)] * 3), st.integers(0, 2), st.integers(4, 200))
def test_normalising_in_pieces_is_normalising_at_once(
    shape: tuple[int, ...], axis: int, piece: int
) -> None:
    array = distinct(shape)
    mean, std = np.arange(shape[axis]) * 3.0, np.arange(shape[axis]) + 0.7
    wide = [-1 if a == axis else 1 for a in range(3)]
    wanted = (array - mean.astype("f4").reshape(wide)) / std.astype("f4").reshape(wide)

    class Small(Normaliser):
        _PIECE = piece

    Small.apply(array, Normaliser(mean, std).rows(slice(None), axis, shape, array.dtype))
    assert np.array_equal(array, wanted)


@given(
    st.sampled_from(["u1", "f4", "f8", ">f4"]),
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 2)), min_size=1, max_size=4
    ),
)
def test_copying_runs_is_assigning(dtype: str, cuts: list[tuple[int, int, int]]) -> None:
    shape = [start + size * step for start, size, step in cuts]
    of = distinct(tuple(shape), dtype)[tuple(slice(a, None, s) for a, _, s in cuts)]
    to = np.zeros([n + 2 for n in of.shape], np.dtype(dtype).newbyteorder("="))
    wanted = to.copy()
    place = tuple(slice(1, 1 + n) for n in of.shape)
    wanted[place] = of
    decode.copy_runs(to[place], of)
    assert np.array_equal(to, wanted)


# --- laws: order and content do not depend on threads --------------------------------------------


def slow(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Chunks take their time, each another."""
    rng, read = random.Random(seed), decode.read_chunk_file
    nap = threading.Event()

    def read_slowly(*args: Any) -> Any:
        nap.wait(rng.random() * 0.002)
        return read(*args)

    monkeypatch.setattr(native, "read_chunk_file", read_slowly)
    monkeypatch.setattr(decode, "read_chunk_file", read_slowly)


@settings(max_examples=15, deadline=None)
@given(
    workers=st.integers(1, 16),
    fetch=st.integers(0, 3),
    queue=st.integers(0, 5),
    batch_size=st.integers(1, 7),
    shuffle=st.sampled_from(["none", "sample", "block", "global"]),
    seed=st.integers(0, 99),
    cache=st.sampled_from([0, 480, 5000, 1 << 20]),  # of no chunk, one, ten, all
)
def test_each_item_once_and_in_one_order_whatever_the_threads(
    data: dict[str, Path],
    workers: int,
    fetch: int,
    queue: int,
    batch_size: int,
    shuffle: Any,
    seed: int,
    cache: int,
) -> None:
    whole = arrays(data)
    order = Order(12, batch_size, seed, shuffle, window=3)
    with (
        pytest.MonkeyPatch.context() as patch,
        Loader(
            data, batch_size=batch_size, shuffle=shuffle, window=3, seed=seed, workers=workers,
            fetch=fetch, queue=queue, engine="native", cache=cache,
        ) as loader,
    ):  # fmt: skip
        slow(patch, seed)
        for epoch in range(2):
            items = []
            for number, batch in enumerate(loader):
                assert (batch.epoch, batch.number) == (epoch, number)
                assert batch.indices.tolist() == order.items(epoch, number).tolist()
                for name, array in batch.items():
                    assert np.array_equal(array, whole[name][batch.samples])
                items += batch.samples.tolist()
            assert sorted(items) == list(range(12))


@settings(max_examples=15, deadline=None)
@given(
    stop=st.integers(0, 6),
    first=st.tuples(st.sampled_from([1, 2]), st.integers(1, 8)),
    second=st.tuples(st.sampled_from([1, 2]), st.integers(1, 8)),
    seed=st.integers(0, 9),
)
def test_a_resumed_epoch_is_the_rest_of_it_to_the_bit(
    data: dict[str, Path], stop: int, first: tuple[int, int], second: tuple[int, int], seed: int
) -> None:
    """Stopped at any batch, gone on with as many ranks and workers as one likes."""

    def ranks(world: int, workers: int) -> list[Loader]:
        return [
            Loader(
                data, batch_size=2 // world, shuffle="global", seed=seed, workers=workers,
                rank=rank, world_size=world,
            )
            for rank in range(world)
        ]  # fmt: skip

    def rows(loaders: list[Loader], count: int) -> list[bytes]:
        """The rows of all ranks, in the order of the global batches."""
        got = []
        iterators = [iter(loader) for loader in loaders]
        for _ in range(count):
            batches = [next(iterator) for iterator in iterators]
            for row in range(len(batches[0].samples)):
                got += [b"".join(a[row].tobytes() for a in b.values()) for b in batches]
        return got

    (plain,) = ranks(1, 1)
    wanted = rows([plain], 6)
    before = ranks(*first)
    got = rows(before, stop)
    state = json.loads(json.dumps(before[-1].state_dict()))
    after = ranks(*second)
    for loader in after:
        loader.load_state_dict(state)
        assert loader.epoch == (1 if stop == 6 else 0)
    if stop < 6:
        got += rows(after, 6 - stop)
    assert got == wanted
    assert [s.state_dict() for s in after] == [after[0].state_dict()] * len(after)
    for loader in [plain, *before, *after]:
        loader.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("world", "batch_size"), [(4, 1), (3, 2), (1, 5), (2, 4)])
def test_an_epoch_goes_on_in_batches_of_another_size(
    data: dict[str, Path], world: int, batch_size: int, engine: str
) -> None:
    """4 of 12 items are done, which is no whole number of most of these global batches."""
    how: dict[str, Any] = {"shuffle": "global", "seed": 5, "engine": engine}
    whole, order = arrays(data), Order(12, 2, 5, "global")
    with Loader(data, batch_size=2, world_size=2, **how) as before:
        next(iter(before))
        state = json.loads(json.dumps(before.state_dict()))
    assert state["items_done"] == 4
    ranks = [
        Loader(data, batch_size=batch_size, rank=rank, world_size=world, **how)
        for rank in range(world)
    ]
    for loader in ranks:
        loader.load_state_dict(state)
        loader.set_epoch(0)
    rest: list[int] = []
    for batches in zip(*ranks, strict=True):
        rest += _rows(batches)
        for batch in batches:
            for name, array in batch.items():
                assert np.array_equal(array, whole[name][batch.samples])
    wanted = order.items_at(0, np.arange(4, 12)).tolist()
    assert rest[:8] == wanted
    assert len(rest) - 8 == -8 % world
    for loader in ranks:
        assert loader.state_dict() == {**state, "epoch": 1, "items_done": 0}
    again = [item for batches in zip(*ranks, strict=True) for item in _rows(batches)]
    assert again[:12] == order.items_at(1, np.arange(12)).tolist(), "the next epoch is whole"
    for loader in ranks:
        loader.close()


def _rows(batches: tuple[Batch, ...]) -> list[int]:
    """The samples of a global batch in their order."""
    rows: list[int] = np.stack([batch.samples for batch in batches], axis=1).ravel().tolist()
    return rows


def test_the_end_is_told_however_often_one_asks(data: dict[str, Path]) -> None:
    with Loader(data, batch_size=6, cache="1MiB", engine="native") as loader:
        batches = iter(loader)
        assert len([*batches]) == 2
        assert next(batches, None) is None and next(batches, None) is None
        assert loader.epoch == 1
        other = iter(loader)
        next(other)
        assert next(batches, None) is None, "and it does not end the one that came after"
        assert next(other, None) is not None


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
        assert not cache._ahead and not cache.look()
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


def values_of(cache: NextUseCache[Any, Any]) -> list[NDArray[Any]]:
    return [resident.value for resident in cache._residents.values()]


def cache_of(loader: Loader) -> NextUseCache[Any, Any]:
    assert isinstance(loader.engine, native.NativeEngine) and loader.engine.cache is not None
    return loader.engine.cache


def test_epochs_advance_and_a_break_ends_one(data: dict[str, Path]) -> None:
    with Loader(data, batch_size=4, shuffle="global", seed=1) as loader:
        epochs = [[b.samples.tolist() for b in loader] for _ in range(2)]
        assert epochs[0] != epochs[1]
        for batch in loader:
            assert batch.epoch == 2
            break
        assert {b.epoch for b in loader} == {3}
        loader.set_epoch(0)
        assert [b.samples.tolist() for b in loader] == epochs[0]
        next(iter(loader))
        state = loader.state_dict()
        assert (state["epoch"], state["items_done"]) == (1, 4)
        loader.load_state_dict(state)
        loader.set_epoch(1)  # what a training loop says at each epoch does not undo the state
        assert [b.samples.tolist() for b in loader] == epochs[1][1:]


@pytest.mark.parametrize("cache", [0, 5000])
def test_two_loaders_at_once_do_not_meet(data: dict[str, Path], cache: int) -> None:
    with (
        Loader(data, batch_size=3, workers=3, shuffle="global", seed=1, cache=cache) as one,
        Loader(data, batch_size=3, workers=2, shuffle="global", seed=2, cache=cache) as two,
    ):
        alone = seen(one), seen(two)
        one.set_epoch(0), two.set_epoch(0)
        both = [(a.samples.tolist(), b.samples.tolist()) for a, b in zip(one, two, strict=True)]
    pairs = zip(*([items for _, items, _ in epoch] for epoch in alone), strict=True)
    assert both == list(pairs)


# --- memory --------------------------------------------------------------------------------------


def address(batch: Batch) -> int:
    return batch["inputs"].ctypes.data


@pytest.mark.parametrize("engine", ENGINES)
def test_buffers_come_back_and_are_used_again(data: dict[str, Path], engine: str) -> None:
    with Loader(data, batch_size=1, queue=2, engine=engine) as loader:
        addresses = [address(batch) for _ in range(3) for batch in loader]
    assert len(addresses) == 36
    assert len(set(addresses)) <= 3, "queue of 2 and the one in use"


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
    with Loader(data, batch_size=4) as loader:
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


def test_too_little_memory_is_refused_with_the_numbers(data: dict[str, Path]) -> None:
    with pytest.raises(Refused, match=r"max_memory 10\.0 KiB .* \(queue 4 and .* lower batch_size"):
        Loader(data, batch_size=6, queue=4, max_memory="10KiB")
    loader = Loader(data, batch_size=6, queue=0, engine="native")
    room = loader.scratch_bytes + 3 * loader.batch_bytes
    with pytest.raises(Refused, match="queue 2 would fit"):
        Loader(data, batch_size=6, queue=4, max_memory=room, engine="native")
    Loader(data, batch_size=6, queue=2, max_memory=room, engine="native")


@pytest.mark.parametrize("queue", [0, 1, 3])
def test_max_memory_holds_and_holding_everything_is_an_error(
    data: dict[str, Path], queue: int
) -> None:
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


def test_a_cache_of_decoded_chunks_reads_each_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", values := distinct((12, 8)), (6, 4))
    with Loader(path, batch_size=2, shuffle="global", cache="1MiB", queue=1, workers=1) as loader:
        for _ in range(3):
            for batch in loader:
                assert np.array_equal(batch["data"], values[batch.samples])
            assert loader.traffic.decoded_bytes in (0, values.nbytes)
        assert loader.traffic.decoded_bytes == 0, "all was there after the first epoch"


def uses_of(loader: Loader, epoch: int = 0, first: int = 0) -> list[Any]:
    """The chunks that the batches of an epoch want, one after another."""
    uses: list[Any] = []
    for number in range(first, loader.order.num_batches):
        samples, patches = loader.order.split(loader.order.items(epoch, number))
        for name, field in loader.fields.items():
            reads = chunk_reads(field, samples + loader.first_sample, patches)
            uses += [(name, read.index) for read in reads]
    return uses


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are read from now on."""
    paths: list[str] = []
    read = decode.read_chunk_file

    def counting(path: str, *rest: Any) -> Any:
        paths.append(path)
        return read(path, *rest)

    monkeypatch.setattr(native, "read_chunk_file", counting)
    monkeypatch.setattr(decode, "read_chunk_file", counting)
    return paths


CACHED: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows-over-time": {"offsets": (-1, 0, 3)},
    "patches": {"patch": (3, 4)},
}


@pytest.mark.parametrize("selection", CACHED)
@pytest.mark.parametrize("shuffle", ["none", "sample", "block", "global"])
def test_the_cache_reads_what_belady_reads_that_sees_the_whole_epoch(
    shuffle: str, selection: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """96 samples in 48 chunks, in two arrays whose chunks are equally large."""
    paths = {
        "inputs": write(tmp_path / "a.zarr", distinct((96, 6, 8)), (6, 6, 4), compressors=None),
        "targets": write(tmp_path / "b.zarr", distinct((96, 6, 4)), (6, 6, 4), compressors=None),
    }
    size, won = 6 * 6 * 4 * 4, 0
    read = counted(monkeypatch)
    how: dict[str, Any] = {"batch_size": 3, "shuffle": shuffle, "window": 4, "engine": "native"}
    if selection == "patches":
        paths.pop("inputs")  # of another number of patches
    for capacity in (0, 1, 2, 3, 8, 21, 48):
        with Loader(paths, cache=capacity * size, workers=1, **how, **CACHED[selection]) as loader:
            uses = uses_of(loader)
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


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_damaged_chunk_that_many_threads_want_is_named(damage: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", distinct((36, 8)), (12, 8), compressors=numcodecs.Zstd())
    DAMAGES[damage](path / "1.0")
    loader = Loader(path, batch_size=1, workers=8, queue=8, cache="1MiB", engine="native")
    for _ in range(2):
        with pytest.raises(StageError, match=f"{path}/1.0"):
            for batch in loader:
                assert batch.samples[0] < 12
        assert ours() == [] and not cache_of(loader)._making
        loader.set_epoch(0)


@pytest.mark.parametrize("fetch", [0, 2])
def test_with_little_sight_and_many_threads_the_bytes_stay_the_same(
    fetch: int, data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the looks ahead fall, and while who looks is slow."""
    whole = arrays(data)
    monkeypatch.setattr(Foresight, "_AT_FIRST", 20)
    monkeypatch.setattr(Foresight, "_FOR_EACH", 0)
    slow(monkeypatch, 3)
    with Loader(
        data, batch_size=2, shuffle="global", workers=6, queue=3, fetch=fetch, cache=12 * 480,
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


def test_what_is_foreseen_counts_as_memory(data: dict[str, Path]) -> None:
    others = set()
    for cache in (1 << 20, 1 << 30):
        loader = Loader(data, batch_size=2, engine="native", workers=1, cache=cache)
        notes = loader.engine.foreseen * native._NOTE
        assert notes == max(4 << 20, cache // 16)
        others.add(loader.scratch_bytes - cache - notes)
    assert len(others) == 1 and min(others) > 0


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
        while foresight.look():
            pass
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert most <= len(cache._ahead) < most + batch_size
    assert held < most * native._NOTE


def test_a_small_chunk_takes_no_more_of_the_cache_than_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images and their labels, all of which fit to the byte, as is priced."""
    paths = {
        "images": write(tmp_path / "a.zarr", distinct((16, 512)), (1, 512), compressors=None),
        "labels": write(tmp_path / "b.zarr", distinct((16, 1)), (1, 1), compressors=None),
    }
    read = counted(monkeypatch)
    room = 16 * 2048 + 16 * 4
    with Loader(paths, batch_size=2, cache=room, engine="native", workers=1) as loader:
        assert loader.price().read_amplification_cached == 1
        for _ in range(2):
            assert sum(1 for _ in loader) == 8
        assert len(read) == 32 and cache_of(loader).used == room


GZIP = {"compressors": numcodecs.GZip()}
COPIES: dict[str, tuple[dict[str, Any], int]] = {
    "lz4": ({"compressors": numcodecs.Blosc("lz4")}, 0),
    "zstd": ({"compressors": numcodecs.Zstd()}, 0),
    "none": ({"compressors": None}, 0),
    "gzip": (GZIP, 3),
    "filter": ({"filters": [numcodecs.Delta("<u4")], "compressors": numcodecs.Zstd()}, 3),
    "filter-gzip": ({"filters": [numcodecs.Delta("<u4")], **GZIP}, 3),
    "filter-alone": ({"filters": [numcodecs.Shuffle(4)], "compressors": None}, 3),
    "v3-gzip": ({"zarr_format": 3, "compressors": zarr.codecs.GzipCodec()}, 3),
    "v3-crc32c": ({"zarr_format": 3, "compressors": zarr.codecs.Crc32cCodec()}, 0),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.filterwarnings("ignore:.*not in the Zarr version 3 spec")
def test_what_a_codec_decodes_into_counts_as_memory(how: str, tmp_path: Path) -> None:
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
        gc.collect()
        tracemalloc.start()
        try:
            engine.read_into(samples, batch)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < engine.scratch_bytes + 200_000
        assert np.array_equal(batch["data"], values)


@pytest.mark.parametrize("fetch", [0, 2])
def test_a_chunk_that_another_worker_has_put_is_read_all_the_same(
    fetch: int, tmp_path: Path
) -> None:
    """Two batches want a chunk at once: both miss it, and one of them has put it."""
    path = write(tmp_path / "a.zarr", values := distinct((12, 8)), (6, 4))
    with Loader(
        path, batch_size=4, cache="1MiB", workers=2, fetch=fetch, engine="native"
    ) as loader:
        assert isinstance(loader.engine, native.NativeEngine)
        cache = loader.engine.cache
        assert cache is not None
        get = cache.get

        def miss(key: Any, use: int) -> Any:
            found = get(key, use)
            if found is None:
                _, (row, column) = key
                chunk = values[row * 6 : row * 6 + 6, column * 4 : column * 4 + 4].copy()
                cache.put(key, chunk, 128)
            return found

        cache.get = miss  # type: ignore[method-assign]
        for batch in loader:
            assert np.array_equal(batch["data"], values[batch.samples])


def test_small_chunks_that_are_fetched_count_with_their_buffers(tmp_path: Path) -> None:
    """A buffer fits the largest chunk of any array, and is lent for the smallest too."""
    large = write(tmp_path / "a.zarr", distinct((8, 256, 512)), (1, 256, 512), compressors=None)
    small = write(tmp_path / "b.zarr", distinct((8, 64)), (1, 1), compressors=None)
    with Loader(
        {"a": large, "b": small}, batch_size=2, workers=2, fetch=2, engine="native"
    ) as loader:
        engine = loader.engine
        assert isinstance(engine, native.NativeEngine)
        lent: list[int] = []
        most, take, give = [0], engine.stored.take, engine.stored.give

        def taking(*args: Any) -> Any:
            lent.append(1)
            most[0] = max(most[0], len(lent))
            return take(*args)

        def giving(array: Any) -> None:
            lent.pop()
            give(array)

        engine.stored.take, engine.stored.give = taking, giving  # type: ignore[method-assign]
        for batch in loader:
            assert batch["a"].shape == (2, 256, 512)
        assert 0 < most[0] * engine.fetched_nbytes <= engine.fetched_bytes


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


def test_traffic_counts_padding(data: dict[str, Path]) -> None:
    with Loader(data["inputs"], batch_size=5, engine="native") as loader:
        for _ in loader:
            pass
        files = [p for p in data["inputs"].iterdir() if p.name[0] != "."]
        assert loader.traffic.stored_bytes == sum(p.stat().st_size for p in files)
        assert loader.traffic.decoded_bytes == 12 * 6 * 5 * 12 * 4


# --- faults: each ends at once, with the path ----------------------------------------------------


def chunk(data: dict[str, Path]) -> Path:
    return data["inputs"] / "7.0.0.1"


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


def corrupt(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:20] + bytes(path.stat().st_size - 20))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": Path.unlink,
    "empty": lambda path: truncate(path, 0),
    "cut-in-the-header": lambda path: truncate(path, 9),
    "cut": lambda path: truncate(path, path.stat().st_size - 7),
    "unreadable": lambda path: (path.unlink(), path.mkdir()),  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("fetch", [0, 2])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_chunk_is_named(
    copy: dict[str, Path], damage: str, fetch: int, engine: str
) -> None:
    DAMAGES[damage](chunk(copy))
    loader = Loader(copy, batch_size=2, workers=3, fetch=fetch, engine=engine)
    with pytest.raises(StageError, match=r"inputs\.zarr/7\.0\.0\.1") as caught:
        for batch in loader:
            assert 7 not in batch.samples
    assert caught.value.stage in ("read", "decode")
    assert ours() == []
    with pytest.raises(StageError):  # and again when iterated again
        list(loader)
    assert ours() == []


def test_what_a_blosc_header_promises_is_checked(copy: dict[str, Path]) -> None:
    stored = bytearray(chunk(copy).read_bytes())
    for place, value, message in (
        (12, len(stored) + 4096, "its header says"),
        (4, 1 << 30, "decodes to 1073741824 bytes"),
    ):
        wrong = stored.copy()
        wrong[place : place + 4] = value.to_bytes(4, "little")
        chunk(copy).write_bytes(wrong)
        with pytest.raises(StageError, match=message):
            list(Loader(copy, batch_size=2, engine="native"))


CODECS: dict[str, tuple[dict[str, Any], Callable[[bytes], bytes]]] = {
    "v2-blosc": ({"compressors": numcodecs.Blosc("lz4")}, numcodecs.Blosc("lz4").encode),
    "v2-zstd": ({"compressors": numcodecs.Zstd()}, numcodecs.Zstd().encode),
    "v2-lz4": ({"compressors": numcodecs.LZ4()}, numcodecs.LZ4().encode),
    "v2-zlib": ({"compressors": numcodecs.Zlib()}, numcodecs.Zlib().encode),
    "v2-gzip": ({"compressors": numcodecs.GZip()}, numcodecs.GZip().encode),
    "v2-uncompressed": ({"compressors": None}, bytes),
    "v2-shuffle": (
        {"filters": [numcodecs.Shuffle(4)], "compressors": numcodecs.Zstd()},
        numcodecs.Zstd().encode,
    ),
    "v3-zstd": ({"zarr_format": 3}, numcodecs.Zstd().encode),
    "v3-gzip": (
        {"zarr_format": 3, "compressors": zarr.codecs.GzipCodec()},
        numcodecs.GZip().encode,
    ),
    "v3-blosc": (
        {"zarr_format": 3, "compressors": BLOSC(cname="lz4", typesize=4)},
        numcodecs.Blosc("lz4").encode,
    ),
    "v3-blosc-crc32c": (
        {
            "zarr_format": 3,
            "compressors": [BLOSC(cname="lz4", typesize=4), zarr.codecs.Crc32cCodec()],
        },
        lambda data: numcodecs.CRC32C(location="end").encode(numcodecs.Blosc("lz4").encode(data)),
    ),
    "v3-crc32c": (
        {"zarr_format": 3, "compressors": [zarr.codecs.Crc32cCodec()]},
        numcodecs.CRC32C(location="end").encode,
    ),
}
"""How an array is stored, and what stores some bytes as one of its chunks."""


@pytest.mark.parametrize("length", [4, 64, 4 * 90 - 4, 4 * 90 + 4, 1 << 20])
@pytest.mark.parametrize("codec", CODECS)
def test_a_chunk_of_another_length_is_named(codec: str, length: int, tmp_path: Path) -> None:
    """Whole and valid, but for how many bytes are in it."""
    how, encode = CODECS[codec]
    path = write(tmp_path / "a.zarr", values := distinct((4, 90)), (1, 90), **how)
    wrong = path / ("c/2/0" if how.get("zarr_format") == 3 else "2.0")
    assert wrong.is_file()
    with Loader(path, batch_size=1, workers=1, engine="native") as loader:
        for batch in loader:
            assert np.array_equal(batch["data"], values[batch.samples])
    wrong.write_bytes(encode(bytes(length)))
    with pytest.raises(StageError, match=f"{wrong}") as caught:
        for batch in Loader(path, batch_size=1, workers=1, engine="native"):
            assert batch.samples.tolist() != [2]
    assert caught.value.stage in ("read", "decode")  # the longest is too long for a file
    if caught.value.stage == "decode":
        assert re.search(f"(decodes to|has) {length} bytes, not 360$", str(caught.value))


def test_two_frames_of_zstandard_are_one_chunk(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.zarr", values := distinct((2, 90)), (1, 90), compressors=numcodecs.Zstd()
    )
    first, second = values[1].tobytes()[:64], values[1].tobytes()[64:]
    encode = numcodecs.Zstd().encode
    (path / "1.0").write_bytes(encode(first) + encode(second))
    with Loader(path, batch_size=2, engine="native") as loader:
        (batch,) = loader
        assert np.array_equal(batch["data"], values)


@pytest.mark.parametrize("zarr_format", [2, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_missing_chunk_is_filled_only_where_that_is_asked(
    engine: str, zarr_format: int, tmp_path: Path
) -> None:
    values = distinct((4, 6))
    path = write(tmp_path / "a.zarr", values, (1, 3), zarr_format, fill_value=-5)
    (path / ("2.1" if zarr_format == 2 else "c/2/1")).unlink()
    with pytest.raises(StageError, match=r"c/2/1.*missing|2\.1.*missing"):
        list(Loader(path, batch_size=4, engine=engine))
    with Loader(path, batch_size=4, engine=engine, missing="fill") as loader:
        (batch,) = loader
    values[2, 3:] = -5
    assert np.array_equal(batch["data"], values)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_store_without_a_fill_value_fills_nothing(engine: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", distinct((4, 6)), (1, 3))
    metadata = json.loads((path / ".zarray").read_text()) | {"fill_value": None}
    (path / ".zarray").write_text(json.dumps(metadata))
    (path / "2.1").unlink()
    said = r"2\.1: .* sets no fill value" if engine == "native" else r"2\.1.* is missing"
    with pytest.raises(StageError, match=said):
        list(Loader(path, batch_size=4, engine=engine, missing="fill"))


def test_a_block_that_n5_lacks_is_zero_only_where_that_is_asked(tmp_path: Path) -> None:
    import tensorstore

    metadata = {"dimensions": [4, 6], "blockSize": [1, 3], "dataType": "float32"}
    store = {"driver": "file", "path": f"{tmp_path}/a.n5/"}
    values = distinct((4, 6))
    tensorstore.open(
        {"driver": "n5", "kvstore": store, "metadata": metadata}, create=True
    ).result().write(values).result()
    (tmp_path / "a.n5" / "2" / "1").unlink()
    with pytest.raises(StageError, match=r"2/1.* is missing"):
        list(Loader(tmp_path / "a.n5", batch_size=4))
    with Loader(tmp_path / "a.n5", batch_size=4, missing="fill") as loader:
        (batch,) = loader
    values[2, 3:] = 0
    assert np.array_equal(batch["data"], values)


def test_a_fill_value_that_is_none_of_its_dtype_is_left_to_tensorstore(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr", distinct((4, 6), np.uint8), (1, 3))
    metadata = json.loads((path / ".zarray").read_text()) | {"fill_value": -1}
    (path / ".zarray").write_text(json.dumps(metadata))
    with pytest.raises(zarr_metadata.Unsupported, match="engine native cannot read that"):
        zarr_metadata.read_layout(str(path))
    with pytest.raises(UsageError, match=r"a\.zarr"):  # nor does TensorStore take it
        Loader(path, batch_size=4)


class _Forbidding(http.server.SimpleHTTPRequestHandler):
    """As a bucket that may be read and not listed: what it lacks is forbidden."""

    def send_error(self, code: int, *args: Any, **_: Any) -> None:
        super().send_error(403 if code == 404 else code, *args)

    def log_message(self, *_: Any) -> None: ...


@contextlib.contextmanager
def forbidding(folder: Path) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(_Forbidding, directory=folder)
    ) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_a_store_that_may_not_be_listed_is_read(zarr_format: int, tmp_path: Path) -> None:
    write(tmp_path / "a.zarr", values := distinct((4, 6)), (1, 3), zarr_format)
    with forbidding(tmp_path) as url:
        with Loader(f"{url}/a.zarr", batch_size=4) as loader:
            (batch,) = loader
        assert np.array_equal(batch["data"], values)
        with pytest.raises(UsageError, match=r"none\.zarr.*403"):
            Loader(f"{url}/none.zarr", batch_size=4)


def test_a_failing_disk_is_reported_by_its_first_error(
    data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(native, "read_chunk_file", fail)
    monkeypatch.setattr(decode, "read_chunk_file", fail)
    with pytest.raises(StageError, match=r"read failed at .*zarr/\d.*: Input/output error"):
        next(iter(Loader(data, batch_size=2, workers=8, queue=4, engine="native")))
    assert ours() == []


def test_a_server_that_is_gone_ends_the_iteration_after_so_many_tries(
    data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorStore by itself would go on for a quarter of an hour."""
    never = {"http_request_retries": {"max_retries": 0}}
    monkeypatch.setattr("penstock.loading.engines.tensorstore._PATIENCE", never)
    with Loopback(data["inputs"].parent, 0.0) as server:
        loader = Loader(f"{server.url}/inputs.zarr", batch_size=2)
    with pytest.raises(StageError, match=r"read failed at http.*inputs\.zarr"):
        list(loader)


def test_a_transform_changes_replaces_or_fails(data: dict[str, Path]) -> None:
    whole, calls = arrays(data), []

    def change(batch: Batch) -> None:
        calls.append(batch.number)
        batch["inputs"] *= 2

    with Loader(data, batch_size=2, workers=8, queue=6, transform=change) as loader:
        for batch in loader:
            assert np.array_equal(batch["inputs"], 2 * whole["inputs"][batch.samples])
    assert calls == list(range(6)), "one after another, in order"

    def replace(batch: Batch) -> dict[str, NDArray[Any]]:
        noise = batch.rng().random(2, np.float32)
        return {"sum": batch["inputs"].sum((1, 2, 3)), "noise": noise}

    def run(workers: int) -> list[tuple[int, list[int], dict[str, bytes]]]:
        with Loader(data, batch_size=2, workers=workers, transform=replace) as loader:
            return seen(loader)

    assert run(1) == run(7)

    def fail(batch: Batch) -> None:
        if batch.number == 3:
            raise ZeroDivisionError("by nought")

    loader = Loader(data, batch_size=2, transform=fail)
    message = r"transform failed at batch 3 of epoch 0 \(samples 6, 7\): .*: by nought"
    with pytest.raises(StageError, match=message) as caught:
        list(loader)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("engine", ENGINES)
def test_leaving_early_closing_and_coming_back(data: dict[str, Path], engine: str) -> None:
    loader = Loader(data, batch_size=1, queue=3, workers=4, engine=engine)
    for _ in loader:
        break
    gc.collect()
    assert ours() == [], "the iterator is gone, so are its threads"
    old = iter(loader)
    next(old)
    assert len(list(loader)) == 12
    with pytest.raises(UsageError, match="closed or iterated anew"):
        next(old)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    loader.close()
    assert ours() == []
    with pytest.raises(UsageError, match="closed or iterated anew"):
        next(iterator)
    assert len(list(loader)) == 12
    never_begun = iter(loader)
    del never_begun
    assert ours() == []


@pytest.mark.slow
def test_a_reader_that_hangs_does_not_keep_close(
    data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk on a dead mount: the thread is left behind, and its buffer is not lent again."""
    let_go, hangs, read = threading.Event(), threading.Event(), decode.read_chunk_file

    def hang(path: str, *rest: Any) -> Any:
        if path.endswith("5.0.0.0"):
            hangs.set()
            let_go.wait(60)
        return read(path, *rest)

    monkeypatch.setattr(native, "read_chunk_file", hang)
    monkeypatch.setattr(decode, "read_chunk_file", hang)
    loader = Loader(data, batch_size=1, workers=2, queue=1, engine="native")
    batches = iter(loader)
    assert [next(batches).samples[0] for _ in range(5)] == [0, 1, 2, 3, 4]
    assert hangs.wait(60)
    loader.close()
    assert len(ours()) == 1
    stuck = [t for t in threading.enumerate() if t.name in ours()]
    let_go.set()
    stuck[0].join(10)


@pytest.mark.slow
def test_a_reader_that_hangs_does_not_keep_those_who_wait_for_its_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "a.zarr", values := distinct((12, 8)), (12, 8))
    let_go, hangs, read = threading.Event(), threading.Event(), decode.read_chunk_file

    def hang(*args: Any) -> Any:
        hangs.set()
        let_go.wait(60)
        return read(*args)

    monkeypatch.setattr(native, "read_chunk_file", hang)
    monkeypatch.setattr(decode, "read_chunk_file", hang)
    loader = Loader(path, batch_size=1, workers=4, queue=4, cache="1MiB", engine="native")
    batches = iter(loader)
    assert hangs.wait(60)
    loader.close()
    assert len(ours()) == 1
    stuck = [t for t in threading.enumerate() if t.name in ours()]
    monkeypatch.undo()
    assert sum(np.array_equal(b["data"], values[b.samples]) for b in loader) == 12
    let_go.set()
    stuck[0].join(10)
    del batches
    assert not cache_of(loader)._ahead and not cache_of(loader)._making


# --- processes and torch -------------------------------------------------------------------------


def test_a_fork_is_told_in_one_sentence(data: dict[str, Path]) -> None:
    loader = Loader(data, batch_size=2)
    loader._process -= 1  # as a fork would see it
    with pytest.raises(UsageError, match="do not live on in the fork"):
        iter(loader)


def test_torch_sees_the_same_memory(data: dict[str, Path]) -> None:
    torch = pytest.importorskip("torch")
    whole = arrays(data)
    with Loader(data, batch_size=3, workers=2) as loader:
        dataset = loader.as_torch()
        feeder = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=0)
        assert len(feeder) == 4
        for place, batch in enumerate(feeder):
            rows = slice(place * 3, place * 3 + 3)
            for name in data:
                assert torch.equal(batch[name], torch.from_numpy(whole[name][rows]))
        assert len({batch["inputs"].data_ptr() for batch in dataset}) <= 4
        state = dataset.state_dict()
        assert state["epoch"] == 2
        workers = torch.utils.data.DataLoader(
            dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn"
        )
        with pytest.raises(UsageError, match="num_workers=0"):
            next(iter(workers))


def test_torch_workers_by_fork_are_refused(
    data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    dataset = Loader(data, batch_size=3).as_torch()
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: "a worker")
    with pytest.raises(UsageError, match="use num_workers=0 and set the loader's workers"):
        iter(dataset)


def test_bfloat16_is_handed_to_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    ts = pytest.importorskip("tensorstore")
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "a.zarr")}}
    array = ts.open(spec, create=True, dtype=ts.bfloat16, shape=(4, 3)).result()
    array.write(distinct((4, 3)).astype(ts.bfloat16.numpy_dtype)).result()
    with Loader(tmp_path / "a.zarr", batch_size=4) as loader:
        (batch,) = loader.as_torch()
    assert torch.equal(batch["data"], torch.arange(1, 13, dtype=torch.bfloat16).reshape(4, 3))


@pytest.mark.parametrize(
    ("zarr_format", "changes"),
    [
        (2, {"dtype": [["a", "<i4"]]}),
        (3, {"data_type": {"name": "numpy.datetime64", "configuration": {"unit": "s"}}}),
    ],
)
def test_a_type_that_is_not_a_name_is_left_to_tensorstore(
    zarr_format: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path / "a.zarr", distinct((4, 6)), (1, 3), zarr_format)
    metadata = path / (".zarray" if zarr_format == 2 else "zarr.json")
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | changes))
    with pytest.raises(UsageError, match=r"its d(ata )?type is .*; engine native cannot read that"):
        Loader(path, batch_size=2, engine="native")


@pytest.mark.parametrize("name", ["penstock", "penstock-tensorstore"])
def test_as_a_contender_it_keeps_the_order_it_is_given(data: dict[str, Path], name: str) -> None:
    order = Order(12, 5, seed=4, shuffle="sample", drop_last=True)
    contender = registry.make_contender(name, data, order, threads=2, queue=1)
    whole = arrays(data)
    got = [{k: v.copy() for k, v in batch.items()} for batch in contender.batches()]
    assert len(got) == order.num_batches
    for number, batch in enumerate(got):
        for key, array in batch.items():
            assert np.array_equal(array, whole[key][order.items(0, number)])
    contender.close()


# --- what is refused -----------------------------------------------------------------------------


def test_what_cannot_be_read_is_said_before_anything_starts(
    data: dict[str, Path], tmp_path: Path, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    short = write(tmp_path / "short.zarr", distinct((11, 4, 7)), (1, 4, 5))
    statistics = tmp_path / "statistics.json"
    statistics.write_text(json.dumps({"inputs": {"mean": [0.0] * 10, "std": [1.0] * 10}}))
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (tmp_path / "none", {}, "there is no such folder"),
        (tmp_path, {}, "none of .zarray"),
        ({}, {}, "no arrays"),
        (
            data,
            {"offsets": {"inptus": (0,)}},
            "offsets names inptus; the arrays are inputs, targets",
        ),
        (data, {"batch_size": 0}, "^batch_size=0: "),
        (data, {"engine": "warp"}, "^engine='warp': "),
        (data, {"patch": {"inputs": PatchGrid((2,))}}, "different numbers of patches"),
        (data, {"patch": {"inputs": (2, 2), "targets": [2]}}, "numbers of patches: .*'inputs': "),
        (
            {**data, "targets": short},
            {},
            "the numbers of samples of the arrays differ: inputs 12, targets 11",
        ),
        (
            data["inputs"],
            {"normalise": statistics},
            r"statistics\.json holds statistics of inputs, and the arrays are data; DATA may be",
        ),
        (data, {"normalise": tmp_path / "none.npz"}, "normalise .*none.npz: .*No such file"),
        (
            data["inputs"],
            {"normalise": {"data": ([0.0] * 2, [1.0] * 2)}},
            "2 channels, the array has 10",
        ),
        (data["inputs"], {"normalise": {"data": ([0.0], [-1.0])}}, "channel 0 has .* std -1"),
        ("s3://test-bucket/nowhere.zarr", {"engine": "native"}, "remote|nowhere"),
        (data, {"offsets": 0}, "offsets 0 is not a list of whole numbers, nor one for each array"),
        (data, {"channels": {"inputs": 3}}, r"channels \{'inputs': 3\} is not a list of whole num"),
        (data, {"channels": [1.5]}, r"channels \[1\.5\] is not a list of whole numbers"),
        (data, {"patch": 4}, "patch 4 is not a list of whole numbers"),
        (data, {"channel_axis": "x"}, "channel_axis 'x' is not a whole number, nor one for each"),
        (data, {"normalise": 5}, "normalise 5 is neither a file of statistics nor a mapping"),
        (data, {"normalise": {"inputs": 5}}, "normalise .* neither a file of statistics nor"),
        (data, {"transform": 3}, "transform 3 cannot be called"),
    ]
    for what, knobs, message in cases:
        with pytest.raises(UsageError, match=message):
            Loader(what, **{"batch_size": 2, **knobs})
    assert ours() == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "dataset.json cannot be read: "),
        ("[]", "dataset.json is not that of a packed data set"),
        ('{"format": "zip"}', "dataset.json is not that of a packed data set"),
        ('{"format": "penstock-packed", "version": 9}', "version 9 of the format; this Penstock"),
        ('{"format": "penstock-packed", "version": 1}', "malformed: KeyError"),
        ('{"format": "penstock-packed", "version": 1, "arrays": {"a": {}}}', "malformed: KeyErr"),
        ('{"format": "penstock-packed", "version": 1, "arrays": 3}', "malformed: Attribute"),
        ('{"format": "penstock-packed", "version": 1, "arrays": {}}', "there are no arrays"),
    ],
)
def test_a_damaged_document_is_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text(text)
    with pytest.raises(UsageError, match=said):
        Loader(tmp_path, batch_size=2)


def test_patches_may_be_given_by_name(data: dict[str, Path]) -> None:
    def items(patch: Any) -> list[Any]:
        with Loader(data["inputs"], batch_size=6, channel_axis=1, patch=patch) as loader:
            return seen(loader)

    assert items({"data": (5, 5)}) == items((5, 5)) == items(PatchGrid((5, 5)))
