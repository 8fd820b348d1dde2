"""Windows of a scene: each pixel owned by one."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.scenes.windows import Cut


@pytest.mark.parametrize(
    ("length", "chip", "overlap", "reads", "cores"),
    [
        (100, 40, 10, [(0, 40), (30, 70), (60, 100)], [(0, 35), (35, 65), (65, 100)]),  # exact
        (95, 40, 10, [(0, 40), (30, 70), (55, 95)], [(0, 35), (35, 62), (62, 95)]),  # moved in
        (40, 40, 10, [(0, 40)], [(0, 40)]),  # one
        (41, 40, 10, [(0, 40), (1, 41)], [(0, 20), (20, 41)]),  # one pixel more
        (7, 40, 10, [(0, 7)], [(0, 7)]),  # less than a chip
    ],
)
def test_cuts(length, chip, overlap, reads, cores) -> None:
    cut = Cut(length, chip, overlap)
    assert [cut.read(index) for index in range(cut.num)] == reads
    assert [cut.core(index) for index in range(cut.num)] == cores


@given(st.integers(1, 5000), st.integers(1, 900), st.data())
def test_cores_tile_and_chips_see_around_them(length: int, chip: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, chip - 1))
    cut = Cut(length, chip, overlap)
    reads = [cut.read(index) for index in range(cut.num)]
    cores = [cut.core(index) for index in range(cut.num)]
    assert cores[0][0] == 0 and cores[-1][1] == length
    for (_, stop), (first, _) in pairwise(cores):
        assert stop == first
    for (first, stop), (begin, end) in zip(reads, cores, strict=True):
        assert begin < end
        assert stop - first == min(chip, length)
        # Context on each side, but at the scene's own edges.
        assert begin - first >= (overlap // 2 if first else 0)
        assert stop - end >= (overlap // 2 if stop < length else 0)
