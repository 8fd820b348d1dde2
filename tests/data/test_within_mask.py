"""A mask with a bit for each voxel, filled plane by plane, against scipy on the whole."""

import numpy as np
import pytest

from penstock.data import Box, FilledMask, Grid

from ..later import imported_later

ndimage = imported_later("scipy.ndimage")


@pytest.mark.parametrize("shape", [(19, 14, 23), (1, 30, 30), (3, 2, 9), (8, 25, 25)])
@pytest.mark.parametrize("share", [0.4, 0.62, 0.75, 1.0])
def test_what_is_enclosed_is_what_scipy_fills(shape: tuple[int, ...], share: float) -> None:
    values = np.random.default_rng(5).random(shape) < share
    box = Box.of((4, -3, 7), shape)
    mask = FilledMask(box)
    for part in Grid(box, (5, 6, 7)):
        mask.put(part, values[part.within(box)])
    assert np.array_equal(mask.read(box), values)
    mask.fill()
    assert np.array_equal(mask.read(box), ndimage.binary_fill_holes(values))
    wider = box.grow((2, 1, 3), (1, 4, 1))
    assert np.array_equal(mask.read(wider)[box.within(wider)], mask.read(box))
    assert mask.read(wider).sum() == mask.read(box).sum()
    assert np.array_equal(FilledMask(box, mask.bits.copy()).read(box), mask.read(box))


def test_regions_that_meet_only_in_another_plane_are_one() -> None:
    values = np.ones((7, 7, 9), bool)
    values[1:6, 3, 1] = values[5, 3, 1:8] = values[2:6, 3, 7] = False
    mask = FilledMask(Box.of((0, 0, 0), values.shape))
    mask.put(mask.box, values)
    mask.fill()
    assert mask.read(mask.box).all(), "a loop in the shape of a U is enclosed"
    values[0, 3, 7] = values[1, 3, 7] = False
    mask = FilledMask(Box.of((0, 0, 0), values.shape))
    mask.put(mask.box, values)
    mask.fill()
    assert np.array_equal(mask.read(mask.box), values), "one of its ends leads out"
