"""Fixtures of the loader's tests."""

import gc
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from .kit import LAST, distinct, threads_of_loaders, write_plainly


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> dict[str, Path]:
    """Inputs and targets of 12 samples in 36 and 24 chunks."""
    numcodecs = pytest.importorskip("numcodecs")
    folder = tmp_path_factory.mktemp("data")
    lz4 = {"compressors": numcodecs.Blosc("lz4")}
    return {
        "inputs": write_plainly(folder / "inputs.zarr", distinct(LAST), (1, 6, 5, 4), **lz4),
        "targets": write_plainly(
            folder / "targets.zarr", distinct((12, 4, 7), start=9000), (1, 4, 5)
        ),
    }


@pytest.fixture
def copy(data: dict[str, Path], tmp_path) -> dict[str, Path]:
    """The same, to be damaged."""
    return {name: Path(shutil.copytree(path, tmp_path / path.name)) for name, path in data.items()}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for generation in range(3):  # the last has all of torch's objects, and takes longer than a test
        if threads_of_loaders():
            gc.collect(generation)
    assert threads_of_loaders() == []
