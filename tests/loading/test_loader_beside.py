"""Chunks that lie side by side in a batch are copied together, and nobody can tell."""

import json
from itertools import product
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import Refused, StageError, UsageError
from penstock.loading import Loader, PatchGrid
from penstock.loading.engines import native

from ..traced import traced
from .kit import distinct, expected, write

SHAPE, CHUNKS = (8, 6, 5, 30), (2, 3, 5, 4)
"""Seven chunks of 4 channels and one of 2, twice over the height."""
SOME = (*range(4, 16), *range(20, 28), 3)


def sizes(loader: Loader, samples: int = 4) -> list[int]:
    """How many chunks each task of a batch has."""
    of = np.arange(2, 2 + samples)
    tasks = loader.engine.tasks(of, np.zeros_like(of))
    return [len(t.tasks) if isinstance(t, native.SideBySide) else 1 for t in tasks]


GIVEN: dict[str, tuple[dict[str, Any], set[int]]] = {
    "all": ({}, {7}),
    "times": ({"offsets": (-1, 0)}, {7}),
    "range": ({"channels": tuple(range(4, 20))}, {4}),
    "some": ({"channels": SOME}, {5}),  # 4-15 and 20-27 are one behind the other in the batch
    "strided": ({"channels": (0, 2, 4, 6)}, set()),
    "turned": ({"channels": (*range(16, 20), *range(16))}, {4}),
    "few": ({"channels": (*range(8, 20), *range(8))}, set()),  # too few to be worth it
    "patches": ({"patch": PatchGrid((4, 3), (2, 2), (-3, -2))}, {7}),
    "cut": ({"patch": PatchGrid((18,), (12,), (-1,))}, {4}),
}
"""What a loader is given, and how many chunks the tasks have that have several."""


@pytest.mark.parametrize(("case", "dtype"), [*product(GIVEN, ["<f4"]), ("some", ">f4")])
def test_the_batch_is_what_numpy_makes(case: str, dtype: str, tmp_path) -> None:
    given, together = GIVEN[case]
    path = write(tmp_path / "a.zarr", values := distinct(SHAPE, dtype), CHUNKS)
    with Loader(path, batch_size=4, shuffle="global", workers=1, engine="native", **given) as made:
        assert set(sizes(made)) - {1} == together
        for batch in made:
            assert np.array_equal(batch["data"], expected(values, batch, made))


def test_its_memory_is_that_which_is_said(tmp_path, monkeypatch) -> None:
    shape, chunks = (2, 128, 128, 32), (1, 128, 128, 4)
    path = write(tmp_path / "a.zarr", values := distinct(shape), chunks, compressors=None)
    chunk = values[0].nbytes // 8
    for most, together in ((8 * chunk, 8), (5 * chunk, 5), (3 * chunk, 1)):
        monkeypatch.setattr(native, "_BESIDE", most)
        with Loader(path, batch_size=2, queue=0, workers=1, engine="native") as loader:
            engine = loader.engine
            assert engine.scratch_bytes == (1 + together) * chunk + native._SLACK
            batch = {"data": np.empty_like(values)}
            with traced() as peak:
                engine.read_into(np.arange(2), batch)
                assert together * chunk < peak() < engine.scratch_bytes + 200_000
            assert np.array_equal(batch["data"], values)


def test_a_chunk_among_them_that_is_broken_is_named(tmp_path) -> None:
    path = write(tmp_path / "a.zarr", distinct(SHAPE), CHUNKS)
    (broken := path / "1.0.0.5").write_bytes(broken.read_bytes()[:-1])
    with Loader(path, batch_size=4, workers=1, engine="native") as loader:
        assert max(sizes(loader)) == 7
        with pytest.raises(StageError, match=r"1\.0\.0\.5"):
            list(loader)


def test_where_memory_is_short_it_is_chunk_by_chunk(tmp_path) -> None:
    path = write(tmp_path / "a.zarr", values := distinct(SHAPE), CHUNKS)
    knobs: dict[str, Any] = {"batch_size": 4, "workers": 1, "queue": 1, "engine": "native"}
    chunk = 4 * int(np.prod(CHUNKS))
    least = 2 * chunk + native._SLACK + 2 * values[:4].nbytes
    for spare, together in ((6 * chunk, 7), (6 * chunk - 1, 1), (0, 1)):
        with Loader(path, max_memory=least + spare, **knobs) as loader:
            assert max(sizes(loader)) == together
            assert loader.scratch_bytes == (1 + together) * chunk + native._SLACK
            for batch in loader:
                assert np.array_equal(batch["data"], expected(values, batch, loader))
    with pytest.raises(Refused, match="max_memory"):
        Loader(path, max_memory=least - 1, **knobs)


def test_closing_lets_go_of_the_room(tmp_path) -> None:
    path = write(tmp_path / "a.zarr", distinct(SHAPE), CHUNKS)
    loader = Loader(path, batch_size=4, workers=1, engine="native")
    pool = loader.engine.decoded
    assert len(list(loader)) == 2 and pool._free
    loader.close()
    assert not pool._free
    assert len(list(loader)) == 2


def test_zarr_3_that_does_not_name_its_chunks_is_refused(tmp_path) -> None:
    path = write(tmp_path / "a.zarr", distinct(SHAPE), CHUNKS, zarr_format=3)
    meta = json.loads((path / "zarr.json").read_text())
    del meta["chunk_key_encoding"]
    (path / "zarr.json").write_text(json.dumps(meta))
    with pytest.raises(UsageError, match=r"zarr\.json: not the metadata of a Zarr array"):
        Loader(path, batch_size=4, engine="native", missing="fill")
