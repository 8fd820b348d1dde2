"""Box, grids, reflection and the geometry of bricks: tables, then laws."""

import itertools
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import Box, Grid, flatten, indices, reflect, unflatten
from penstock.inference.tiling.geometry import Brick, Geometry
from penstock.inference.tiling.parts import Parts

from ..geometries import geometries

sizes = st.integers(1, 40)


def test_a_box_that_ends_before_it_starts_is_refused() -> None:
    with pytest.raises(ValueError, match="past stop"):
        Box((3,), (2,))


@given(sizes, sizes, st.integers(-50, 50), st.integers(-50, 50))
def test_a_grid_tiles_its_domain_exactly(length: int, step: int, origin: int, anchor: int) -> None:
    grid = Grid(Box.of((origin,), (length,)), (step,), (anchor,))
    covered = [x for box in grid for x in range(box.start[0], box.stop[0])]
    assert covered == list(range(origin, origin + length))
    assert len(grid) == len(list(grid))
    assert all((box.start[0] - anchor) % step == 0 for box in list(grid)[1:])


def test_a_petabyte_grid_takes_no_memory() -> None:
    grid = Grid(Box((0, 0, 0), (10**6, 10**5, 10**5)), (64, 64, 64))
    assert len(grid) == 15625 * 1563 * 1563
    assert grid[len(grid) - 1].stop == (10**6, 10**5, 10**5)


@given(st.tuples(sizes, sizes, sizes), st.data())
def test_flat_and_nested_indices_agree(shape: tuple[int, ...], data: st.DataObject) -> None:
    cells = Box.of((3, -2, 0), shape)
    flat = data.draw(st.integers(0, cells.size - 1))
    assert flatten(unflatten(flat, cells), cells) == flat
    if cells.size < 1000:
        ranges = (range(a, b) for a, b in zip(cells.start, cells.stop, strict=True))
        assert list(indices(cells)) == list(itertools.product(*ranges))


@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 40))
def test_reflection_is_that_of_numpy(length: int, before: int, after: int) -> None:
    data = np.arange(length)
    ours = reflect(np.arange(-before, length + after), 0, length)
    assert (ours == np.pad(data, (before, after), mode="reflect")).all()


@given(geometries())
def test_cores_own_every_voxel_once(geometry: Geometry) -> None:
    counts = np.zeros(geometry.domain.shape, int)
    for index in indices(geometry.patches):
        core = geometry.core_of(Box.of(index, (1, 1, 1)))
        read = geometry.patch_read(index)
        assert read.shape == geometry.patch
        assert core in read
        counts[core.within(geometry.domain)] += 1
    assert (counts == 1).all()


@given(geometries())
def test_bricks_bring_every_part_all_that_it_needs(geometry: Geometry) -> None:
    """Each voxel of each part is in the support of as many bricks of it as have its patches."""
    of_part: dict[int, list[Brick]] = defaultdict(list)
    for brick in Parts(geometry, 1).bricks():
        of_part[brick.part].append(brick)
    for number, part in enumerate(geometry.parts):
        patches, bricks = geometry.patches_for(part), of_part[number]
        assert sum(brick.patches.size for brick in bricks) == patches.size
        counts = np.zeros(part.shape, int)
        for brick in bricks:
            counts[(brick.core & part).within(part)] += 1
            assert geometry.core_of(brick.patches) == brick.core
            assert brick.core in brick.support
        assert (counts == 1).all()


@given(geometries())
def test_counts_are_those_of_the_real_sequence(geometry: Geometry) -> None:
    bricks = list(Parts(geometry, 1).bricks())
    assert geometry.count_bricks() == len(bricks)
    assert geometry.count_patches() == sum(brick.patches.size for brick in bricks)
    assert [brick.number for brick in bricks] == list(range(len(bricks)))
