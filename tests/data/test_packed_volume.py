"""Volumes without end, and volumes on disk whose planes have checksums."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.base.errors import StageError, UsageError
from penstock.data import volumes
from penstock.data.box import Box
from penstock.data.packed import volume as volume_room
from penstock.data.packed.audit import Audit, Delivery
from penstock.data.packed.format import Packed, open_dataset
from penstock.data.volumes import Specimen
from penstock.loading.loader import Loader

from .kit import peak_of, read


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


def test_the_structures_of_a_specimen_come_again_and_its_noise_does_not(
    specimen: Specimen,
) -> None:
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


def write_volume(root: Path, shape: tuple[int, int, int], **settings: Any) -> Packed:
    defaults = {"chunks": (8, 16, 16), "shards": None, "workers": 2, "overwrite": False}
    return volume_room.write_volume(
        root, shape, lambda box: distinct(box, shape), facts={"seed": 0}, **(defaults | settings)
    )


@pytest.mark.parametrize(
    ("shape", "settings"),
    [
        ((20, 33, 50), {}),
        ((20, 33, 50), {"workers": 1, "chunks": (32, 64, 64)}),
        ((16, 32, 32), {"shards": (16, 32, 32)}),
        ((1, 40, 24), {}),  # one plane is a sample, too
    ],
)
def test_every_plane_of_a_volume_has_the_checksum_of_its_bytes(
    shape: tuple[int, int, int],
    settings: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(volume_room, "PIECE", 16)  # many pieces, along each axis
    packed = write_volume(tmp_path / "v.zarr", shape, **settings)
    expected = distinct(Box((0, 0, 0), shape), shape)
    np.testing.assert_array_equal(read(packed, "volume"), expected)
    assert packed.checks["volume"].tolist() == [zlib.crc32(plane.tobytes()) for plane in expected]


@pytest.mark.slow
def test_a_volume_is_written_in_memory_that_does_not_grow_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(volume_room, "PIECE", 16)
    shape, chunks = (64, 1024, 64), (16, 16, 32)
    write_volume(tmp_path / "first.zarr", (32, 32, 64), chunks=chunks)  # what is imported once
    bound = 2 * 2**20
    assert 2 * math.prod(shape) == 4 * bound
    taken = peak_of(lambda: write_volume(tmp_path / "v.zarr", shape, chunks=chunks))
    assert taken < bound


def deliver(root: Path) -> Delivery:
    """What our loader makes of all planes."""
    packed = open_dataset(root)
    audit = Audit(packed)
    with Loader(str(root), batch_size=3, workers=2, shuffle="sample") as loader:
        for batch in loader:
            audit.batch(batch.samples, batch)
    return audit.result()


def test_a_flipped_voxel_is_found(tmp_path: Path) -> None:
    ts = pytest.importorskip("tensorstore")
    packed = write_volume(tmp_path / "v.zarr", (12, 20, 24))
    assert deliver(packed.root) == Delivery(0, 0, 0)
    kvstore = {"driver": "file", "path": str(packed.arrays["volume"].path)}
    array = ts.open({"driver": "zarr3", "kvstore": kvstore}).result()
    array[7, 11, 13] = int(array[7, 11, 13].read().result()) ^ 1
    assert deliver(packed.root) == Delivery(0, 1, 1)


def test_a_volume_that_was_not_finished_is_known_and_can_be_replaced(tmp_path: Path) -> None:
    root = tmp_path / "v.zarr"

    def fail(box: Box) -> np.ndarray:
        raise ValueError("no light")

    with pytest.raises(StageError, match=r"generate.*Box.*no light"):
        volume_room.write_volume(
            root, (8, 16, 16), fail, chunks=(8, 16, 16), shards=None, workers=1,
            overwrite=False, facts={},
        )  # fmt: skip
    with pytest.raises(UsageError, match="was not finished"):
        open_dataset(root)
    with pytest.raises(UsageError, match="use --overwrite"):
        write_volume(root, (8, 16, 16))
    assert write_volume(root, (8, 16, 16), overwrite=True).num_samples == 8


def test_what_cannot_be_written_leaves_the_old_volume_alone(tmp_path: Path) -> None:
    packed = write_volume(tmp_path / "v.zarr", (8, 16, 16))
    with pytest.raises(UsageError, match="are not multiples of chunks"):
        write_volume(packed.root, (8, 16, 16), shards=(9, 9, 9), overwrite=True)
    (packed.root / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt, which is not part .* nothing was removed"):
        write_volume(packed.root, (8, 16, 16), overwrite=True)
    assert deliver(packed.root) == Delivery(0, 0, 0)
    with pytest.raises(UsageError, match="N5 has no place for checksums"):
        write_volume(tmp_path / "v.n5", (8, 16, 16))
    with pytest.raises(UsageError, match="a volume has none"):
        packed.statistics()
