"""Values less their mean, over their standard deviation, to the bit as numpy computes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import UsageError
from penstock.loading.engines.chunk_selection import Normaliser
from penstock.loading.fields import PatchGrid
from penstock.loading.loader import Loader

from .kit import ENGINES, FIRST, LAST, distinct, write

pytest.importorskip("numcodecs")
pytest.importorskip("tensorstore")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("shape", "chunks", "axis"),
    [(LAST, (1, 6, 5, 4), -1), (FIRST, (1, 4, 6, 5), 1), (LAST, (3, 4, 5, 3), -1)],
    ids=["channels-last", "channels-first", "chunks-of-3-samples"],
)
def test_normalised_to_the_bit_as_numpy_does(
    shape: tuple[int, ...], chunks: tuple[int, ...], axis: int, engine: str, tmp_path: Path
) -> None:
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


def test_a_channel_that_never_changes_becomes_zero() -> None:
    array = np.array([[5.0, 1.0], [5.0, 3.0]], np.float32)
    normaliser = Normaliser([5.0, 2.0], [0.0, 1.0])
    Normaliser.apply(array, normaliser.rows(slice(None), 1, array.shape, array.dtype))
    assert array.tolist() == [[0.0, -1.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("s.json", b'{"u": {"mean": [1, null], "std": [1, 1]}}', "channel 1 has mean nan"),
        ("s.json", b'{"u": {"mean": ["a"], "std": [1]}}', "not lists of numbers"),
        ("s.json", b'{"u": {"mean": [1, 2], "std": [1, -1]}}', "channel 1 has mean 2.0 and std -1"),
        ("s.npz", b"", "s.npz"),
    ],
)
def test_damaged_statistics_are_one_sentence(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    path = write(tmp_path / "u", distinct((2, 3, 5)), (1, 3, 5))
    with pytest.raises(UsageError, match=said):
        Loader({"u": path}, normalise=tmp_path / name, batch_size=2)
