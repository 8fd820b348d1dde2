"""Several arrays as one in a batch: where each channel comes from, and what cannot be stacked."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.base.errors import Refused, UsageError
from penstock.loading.loader import Loader

from ..later import imported_later

zarr = imported_later("zarr")
pytest.importorskip("tensorstore")

ENGINES = ("native", "tensorstore")
VALUES: dict[str, NDArray[np.float32]] = {
    name: np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    for seed, (name, shape) in enumerate(
        {
            "u": (9, 4, 6, 5),  # sample, lat, lon, level
            "v": (9, 4, 6, 3),
            "ps": (9, 4, 6),
            "first": (9, 2, 4, 6),  # sample, level, lat, lon
        }.items()
    )
}
CHUNKS = {"u": (1, 4, 6, 2), "v": (2, 4, 3, 3), "ps": (1, 4, 6), "first": (1, 1, 4, 6)}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stack")
    for name, values in VALUES.items():
        array = zarr.create_array(
            folder / name, shape=values.shape, chunks=CHUNKS[name], dtype=values.dtype
        )
        array[...] = values
    return {name: folder / name for name in VALUES}


def only(data: dict[str, Path], *names: str) -> dict[str, Path]:
    return {name: data[name] for name in names}


@pytest.mark.parametrize("engine", ENGINES)
def test_channels_of_arrays_lie_one_behind_the_other(data: dict[str, Path], engine: str) -> None:
    asked: dict[str, Any] = {"channel_axis": {"u": -1, "v": -1}, "channels": {"u": (4, 0, 1)}}
    stack = {"inputs": ["v", "ps", "u"]}
    with Loader(
        only(data, "u", "v", "ps"), stack=stack, batch_size=4, shuffle="sample", engine=engine,
        drop_last=False, workers=3, **asked,
    ) as loader:  # fmt: skip
        assert loader.stacks["inputs"].channels == [
            *(("v", 0, 0), ("v", 0, 1), ("v", 0, 2)),
            ("ps", 0, 0),
            *(("u", 0, 4), ("u", 0, 0), ("u", 0, 1)),
        ]
        seen = 0
        for batch in loader:
            assert list(batch) == ["inputs"]
            assert batch["inputs"].flags.c_contiguous
            rows = batch.samples
            parts = [
                VALUES["v"][rows],
                VALUES["ps"][rows][..., None],
                VALUES["u"][rows][..., [4, 0, 1]],
            ]
            np.testing.assert_array_equal(batch["inputs"], np.concatenate(parts, axis=-1))
            seen += len(rows)
    assert seen == 9


@pytest.mark.parametrize("engine", ENGINES)
def test_times_become_channels_and_other_arrays_stay(data: dict[str, Path], engine: str) -> None:
    """Inputs at t-1 and t of two variables; the target is one of them, at t+1, under a name of its
    own."""
    places = {**only(data, "u", "ps"), "u_next": data["u"]}
    offsets = {"u": (-1, 0), "ps": (-1, 0), "u_next": (1,)}
    with Loader(
        places, stack={"inputs": ["u", "ps"]}, offsets=offsets, channel_axis={"u": 3},
        batch_size=3, shuffle="global", engine=engine,
    ) as loader:  # fmt: skip
        assert loader.stacks["inputs"].channels[4:7] == [("u", -1, 4), ("u", 0, 0), ("u", 0, 1)]
        for batch in loader:
            now = batch.samples
            u, ps = VALUES["u"], VALUES["ps"][..., None]
            parts = [u[now - 1], u[now], ps[now - 1], ps[now]]
            np.testing.assert_array_equal(batch["inputs"], np.concatenate(parts, axis=-1))
            np.testing.assert_array_equal(batch["u_next"], u[now + 1])


@pytest.mark.parametrize("engine", ENGINES)
def test_channels_first_and_patches(data: dict[str, Path], engine: str) -> None:
    with Loader(
        only(data, "first", "ps"), stack={"x": ["ps", "first"]}, channel_axis={"first": 1},
        offsets={"first": (0, 1)}, patch=(2, 3), batch_size=5, shuffle="global", engine=engine,
    ) as loader:  # fmt: skip
        for batch in loader:
            assert batch["x"].shape[1:] == (5, 2, 3)
            for row, item in enumerate(batch.indices.tolist()):
                sample, patch = divmod(item, loader.order.patches_per_sample)
                y, x = 2 * (patch // 2), 3 * (patch % 2)
                cut = (slice(y, y + 2), slice(x, x + 3))
                first = VALUES["first"]
                parts = [VALUES["ps"][sample][None], first[sample], first[sample + 1]]
                wanted = np.concatenate([part[(slice(None), *cut)] for part in parts])
                np.testing.assert_array_equal(batch["x"][row], wanted)


def test_a_packed_data_set_says_which_axis_the_channels_are(tmp_path) -> None:
    from penstock.cli import main

    out = tmp_path / "packed"
    assert main(["generate", "ufs-p1", str(out), "--samples", "2", "--grid", "4", "8"]) == 0
    with Loader(out, batch_size=2, shuffle="none") as apart:
        alone = {name: array.copy() for name, array in next(iter(apart)).items()}
    with Loader(out, stack={"all": ["inputs", "targets"]}, batch_size=2, shuffle="none") as loader:
        whole = next(iter(loader))["all"]
        joined = np.concatenate([alone["inputs"], alone["targets"]], axis=-1)
        np.testing.assert_array_equal(whole, joined)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"stack": {"x": ["u", "w"]}}, "stack names w; the arrays are u, v, ps, first"),
        ({"stack": {"x": "u"}}, "stack {'x': 'u'} is not a mapping of a name to a list of arrays"),
        ({"stack": {"x": []}}, "stack x: names no array"),
        ({"stack": {"x": ["u"], "y": ["u"]}}, "has an array twice; DATA may be a mapping"),
        ({"stack": {"ps": ["u"]}}, "stack ps: an array that is not stacked has that name"),
        ({"stack": {"x": ["u", "ps"]}}, "stack x: the shapes but for channels of its arrays"),
        (
            {"stack": {"x": ["u", "first"]}, "channel_axis": {"u": 3, "first": 1}},
            "stack x: the channel axes of its arrays differ: u 3, first 1",
        ),
        (
            {"stack": {"x": ["u"]}, "channel_axis": {"u": 0}},
            "stack x: its samples, axis 0, cannot be its channels too",
        ),
    ],
)
def test_what_is_no_stack_is_said(data: dict[str, Path], asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Loader(data, batch_size=2, **asked)
    assert said in str(caught.value)


def test_arrays_of_other_types_are_not_stacked(data: dict[str, Path], tmp_path) -> None:
    zarr.create_array(tmp_path / "n", shape=(9, 4, 6), chunks=(1, 4, 6), dtype="int16")[...] = 1
    with pytest.raises(UsageError, match="dtypes of its arrays differ: ps float32, n int16"):
        Loader({"ps": data["ps"], "n": tmp_path / "n"}, stack={"x": ["ps", "n"]}, batch_size=2)


def test_memory_is_that_of_the_stack(data: dict[str, Path]) -> None:
    with Loader(
        only(data, "u", "ps"), stack={"x": ["u", "ps"]}, channel_axis={"u": -1}, batch_size=8
    ) as loader:
        assert loader.batch_bytes == 8 * 4 * 6 * 6 * 4
    with pytest.raises(Refused, match="max_memory"):
        Loader(only(data, "u"), stack={"x": ["u"]}, batch_size=8, max_memory=1000)


def test_pinned_memory_counts_as_torch_rounds_it(data: dict[str, Path]) -> None:
    alone = only(data, "ps")
    assert Loader(alone, batch_size=7).batch_bytes == 704  # 7 * 4 * 6 * 4, in steps of 64
    assert Loader(alone, batch_size=7, pin=True).batch_bytes == 1024
