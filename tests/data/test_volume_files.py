"""Volumes without end, and volumes that are written piece by piece."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import StageError, UsageError
from penstock.data import Box, Specimen, open_source, volumes

from .kit import peak_of


def test_a_specimen_is_the_same_however_it_is_cut(specimen: Specimen) -> None:
    """Across the faces of noise tiles and of the period, too: `_little_grows` sets it."""
    around = Box((236, 470, 476), (248, 486, 513))
    clean, whole = specimen.clean(around), specimen.image(around)
    assert whole.dtype == np.uint16
    for part in (
        Box((238, 472, 477), (246, 486, 500)),
        Box((240, 480, 480), (241, 486, 513)),
        Box((239, 470, 479), (240, 481, 481)),
    ):
        np.testing.assert_array_equal(specimen.clean(part), clean[part.within(around)])
        np.testing.assert_array_equal(specimen.image(part), whole[part.within(around)])


def test_the_structures_of_a_specimen_come_again_and_its_noise_does_not(specimen: Specimen) -> None:
    here = Box((0, 0, 0), (8, 32, 32))
    there = here.shift(np.multiply(volumes.PERIOD, 14).tolist())
    np.testing.assert_array_equal(specimen.clean(here), specimen.clean(there))
    assert np.mean(specimen.image(here) != specimen.image(there)) > 0.9


def test_a_specimen_has_no_seam_where_a_period_ends(specimen: Specimen) -> None:
    """Planes that meet at the face of a period are mirrored there."""
    clean = specimen.clean(Box((234, 100, 0), (246, 200, 100)))
    np.testing.assert_array_equal(clean, clean[::-1])
    assert len(np.unique(clean, axis=0)) == 6


@pytest.mark.slow
def test_a_box_of_a_specimen_takes_memory_for_itself_alone(specimen: Specimen) -> None:
    small, flat = (Box.of([10**6] * 3, shape) for shape in ((64, 64, 64), (1, 512, 512)))
    assert peak_of(lambda: specimen.image(small)) < 30 * 2**20
    assert peak_of(lambda: specimen.image(flat)) < 30 * 2**20


def distinct(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    """Voxels that tell where they are, as far as 16 bits can."""
    index = np.ravel_multi_index(np.ogrid[box.slices], shape)
    return np.asarray(index * 40_503 >> 3, np.uint16)


def write_distinct(root: Path, shape: tuple[int, int, int], **settings: Any) -> np.ndarray:
    """What is in the volume that was written."""
    defaults = {"chunks": (8, 16, 16), "shards": None, "workers": 2, "overwrite": False}
    volumes.write_volume(root, shape, lambda box: distinct(box, shape), **(defaults | settings))
    source = open_source(root)
    assert source.axes == "zyx"
    return source.read(source.domain)[0, 0]


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ((20, 33, 50), {}),
        ((20, 33, 50), {"workers": 1, "chunks": (32, 64, 64)}),
        ((16, 32, 32), {"shards": (16, 32, 32)}),
        ((1, 40, 24), {}),
    ],
)
def test_a_volume_is_written_whole_however_it_is_cut(
    shape: tuple[int, int, int], settings: dict[str, Any], tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(volumes, "PIECE", 16)  # many pieces, along each axis
    expected = distinct(Box((0, 0, 0), shape), shape)
    np.testing.assert_array_equal(write_distinct(tmp_path / "v.zarr", shape, **settings), expected)


@pytest.mark.slow
def test_a_volume_is_written_in_memory_that_does_not_grow_with_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(volumes, "PIECE", 32)
    shape, chunks = (64, 256, 256), (32, 32, 32)
    settings: dict[str, Any] = {
        "chunks": chunks, "shards": None, "workers": 2, "overwrite": False
    }  # fmt: skip

    def write(name: str, shape: tuple[int, ...]) -> None:
        volumes.write_volume(tmp_path / name, shape, lambda box: distinct(box, shape), **settings)

    write("first.zarr", (32, 32, 32))  # what is imported once
    bound = 2 * 2**20
    assert 2 * math.prod(shape) == 4 * bound
    assert peak_of(lambda: write("v.zarr", shape)) < bound


def test_a_piece_that_fails_is_named_and_what_is_not_ours_is_left_alone(tmp_path) -> None:
    root = tmp_path / "v.zarr"

    def fail(box: Box) -> np.ndarray:
        raise ValueError("no light")

    with pytest.raises(StageError, match=r"generate.*Box.*no light"):
        volumes.write_volume(
            root, (8, 16, 16), fail, chunks=(8, 16, 16), shards=None, workers=1, overwrite=False
        )
    with pytest.raises(UsageError, match="use --overwrite"):
        write_distinct(root, (8, 16, 16))
    written = write_distinct(root, (8, 16, 16), overwrite=True)
    with pytest.raises(UsageError, match="are not multiples of chunks"):
        write_distinct(root, (8, 16, 16), shards=(9, 9, 9), overwrite=True)
    (root / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt, which is not part .* nothing is deleted"):
        write_distinct(root, (8, 16, 16), overwrite=True)
    source = open_source(root)
    np.testing.assert_array_equal(source.read(source.domain)[0, 0], written)
