"""Fixtures that several test files of this folder share, each made once a session."""

from pathlib import Path

import pytest

from penstock.cli import main
from penstock.data import Specimen, write_data_set

from .kit import OVERLAP, SIZE, words_of


@pytest.fixture(scope="session")
def specimen() -> Specimen:
    return Specimen(3)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Two synthetic scenes to train on and one to validate on, in the layout of xView3."""
    for library in ("rasterio", "contourpy", "numcodecs"):
        pytest.importorskip(library)
    root = tmp_path_factory.mktemp("xview3")
    write_data_set(root, SIZE, scenes=3, validation=1, objects=12, tiff="strips", seed=0)
    return root


@pytest.fixture(scope="session")
def chipped(data: Path, tmp_path_factory) -> Path:
    """Chips of these scenes."""
    folder = tmp_path_factory.mktemp("chips")
    assert main(words_of(data, folder, "--overlap", str(OVERLAP))) == 0
    return folder
