"""Weights that add up to one, and an assembly that loses nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.box import Box
from penstock.inference.tiling.geometry import Geometry
from penstock.inference.tiling.stitch import Assembly, axis_weights

from ..geometries import geometries


@given(st.integers(1, 30), st.data(), st.floats(0.001, 1), st.integers(1, 8))
def test_weights_are_a_partition_of_unity(
    patch: int, data: st.DataObject, floor: float, count: int
) -> None:
    overlap = data.draw(st.integers(0, patch - 1))
    stride = patch - overlap
    total = np.zeros(stride * (count - 1) + patch)
    for index in range(count):
        weights = axis_weights(patch, overlap, floor, index, count)
        assert (weights > 0).all()
        total[index * stride : index * stride + patch] += weights
    np.testing.assert_allclose(total, 1, rtol=1e-6)


@given(geometries(), st.integers(1, 2))
def test_assembly_gives_every_unit_once_and_whole(geometry: Geometry, channels: int) -> None:
    data = np.arange(channels * geometry.domain.size, dtype=np.float32)
    data = data.reshape(channels, *geometry.domain.shape)
    result, owned = np.full_like(data, -1), np.full_like(data, -1)
    assembly = Assembly(  # the second head is of labels, whatever the seam
        geometry,
        lambda head, shape: np.zeros((channels, *shape), np.float32),
        [geometry.seam == "blend", False],
    )
    for block in geometry.blocks():
        piece = data[(slice(None), *block.support.within(geometry.domain))]
        core = data[(slice(None), *block.core.within(geometry.domain))]
        if geometry.seam == "blend":
            piece = piece * _weight(geometry, block.patches, block.support)
        for unit in assembly.add(block, [piece, core]):
            where = (slice(None), *unit.box.within(geometry.domain))
            assert (result[where] == -1).all(), "a unit came twice"
            result[where], owned[where] = unit.arrays
    assert not assembly.open
    np.testing.assert_allclose(result, data, rtol=1e-5)
    assert (owned == data).all()


def _weight(geometry: Geometry, patches: Box, support: Box) -> np.ndarray:
    """What a block's patches together count at each voxel of its support, axis by axis."""
    axes = []
    for axis in range(3):
        total = np.zeros(support.shape[axis])
        count = geometry.cores.cells.shape[axis]
        for i in range(patches.start[axis], patches.stop[axis]):
            index = list(patches.start)
            index[axis] = i
            read = geometry.patch_read(index)
            weights = axis_weights(geometry.patch[axis], geometry.overlap[axis], 0.05, i, count)
            part = read & geometry.domain
            low, high = part.start[axis], part.stop[axis]
            total[low - support.start[axis] : high - support.start[axis]] += weights[
                low - read.start[axis] : high - read.start[axis]
            ]
        axes.append(total)
    return axes[0][:, None, None] * axes[1][:, None] * axes[2]


def test_units_of_an_earlier_run_are_left_alone() -> None:
    geometry = Geometry(
        Box((0, 0, 0), (4, 4, 4)),
        (2, 2, 2),
        (0, 0, 0),
        "trim",
        (2, 4, 4),
        (0, 0, 0),
        (4, 4, 4),
        (1, 1, 1),
    )
    assembly = Assembly(
        geometry,
        lambda head, shape: np.zeros((1, *shape)),
        [False],
        wanted=lambda volume, index: index != (0, 0, 0),
    )
    units = [
        unit
        for block in geometry.blocks()
        for unit in assembly.add(block, [np.ones((1, *block.support.shape))])
    ]
    assert [unit.index for unit in units] == [(1, 0, 0)]


def test_a_window_without_overlap_is_flat() -> None:
    assert axis_weights(5, 0, 0.05, 1, 3).tolist() == [1] * 5


@pytest.mark.parametrize("overlap", [4, 5, 7])
def test_far_from_the_edges_all_patches_weigh_alike(overlap: int) -> None:
    a = axis_weights(8, overlap, 0.05, 40, 100)
    assert (a == axis_weights(8, overlap, 0.05, 60, 100)).all()
    assert (a == a[::-1]).all()
