"""Resampling box by box against scipy on the whole."""

import itertools
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.data import Box, ResampledSource, Resampling, on_grid, open_source

from ..later import imported_later

ndimage = imported_later("scipy.ndimage")
SHAPES = [
    ((13, 31, 40), (26, 17, 40)),
    ((7, 20, 33), (21, 9, 50)),
    ((1, 25, 26), (1, 49, 13)),
    ((2, 3, 30), (5, 1, 31)),
]


def zoomed(array: NDArray[Any], shape: tuple[int, ...], order: int) -> NDArray[Any]:
    zoom = [to / of for of, to in zip(array.shape, shape, strict=True)]
    return ndimage.zoom(array, zoom, order=order, mode="nearest", grid_mode=True)


def some_boxes(domain: Box, seed: int) -> list[Box]:
    rng = np.random.default_rng(seed)
    boxes = []
    for _ in range(12):
        start = [int(rng.integers(0, n)) for n in domain.shape]
        shape = [int(rng.integers(1, n - a + 1)) for a, n in zip(start, domain.shape, strict=True)]
        boxes.append(Box.of(start, shape).shift(domain.start))
    return boxes


@pytest.mark.parametrize("order", [0, 1, 3])
@pytest.mark.parametrize(("of", "to"), SHAPES)
def test_any_box_has_the_bits_of_the_whole_which_are_those_of_scipy(of, to, order) -> None:
    array = np.random.default_rng(1).random(of)
    way = Resampling(Box.of((3, -2, 5), of), Box.of((0, 1, -4), to), order)
    whole = way.apply(array[None], way.of, way.to)[0]
    assert np.abs(whole - zoomed(array, to, order)).max() < 1e-6
    for box in some_boxes(way.to, 2):
        needed = way.needed(box)
        part = way.apply(array[(None, *needed.within(way.of))], needed, box)[0]
        assert np.array_equal(part, whole[box.within(way.to)])


def test_slices_are_resampled_and_the_nearest_one_is_taken() -> None:
    array = np.random.default_rng(1).random((9, 12, 7))
    way = Resampling(Box.of((0, 0, 0), array.shape), Box.of((0, 0, 0), (14, 8, 11)), 3, nearest=0)
    slices = np.stack([zoomed(plane[None], (1, 8, 11), 3)[0] for plane in array])
    expected = slices[((np.arange(14) + 0.5) * 9 / 14).astype(int)]
    assert np.abs(way.apply(array[None], way.of, way.to)[0] - expected).max() < 1e-5
    assert way.back(1).nearest == 0


STEPS = Fraction(15, 7), Fraction(2, 3), Fraction(1)


@pytest.mark.parametrize("order", [0, 1, 3])
def test_the_centres_of_first_voxels_may_lie_over_each_other(order: int) -> None:
    array = np.random.default_rng(1).random((13, 21, 9))
    of, to = Box.of((3, -2, 5), array.shape), Box.of((1, 0, -4), (7, 32, 9))
    way = Resampling(of, to, order, centred=STEPS)
    places = [np.arange(n) * float(step) for n, step in zip(to.shape, STEPS, strict=True)]
    wanted = ndimage.map_coordinates(
        array, np.meshgrid(*places, indexing="ij"), order=order, mode="nearest"
    )
    whole = way.apply(array[None], of, to)[0]
    assert np.abs(whole - wanted).max() < 1e-5
    for box in some_boxes(to, 2):
        needed = way.needed(box)
        part = way.apply(array[(None, *needed.within(of))], needed, box)[0]
        assert np.array_equal(part, whole[box.within(to)])
    assert way.begins == pytest.approx((3 - 15 / 7, -2, 9))
    assert way.back(1).back(order) == way
    two = Resampling(of, to, 0, centred=(Fraction(1, 2),) * 3)
    assert [int(two.needed_along(0, i, i + 1)[0]) - 3 for i in range(1, 9)] == [
        0,
        0,
        1,
        2,
        2,
        2,
        3,
        4,
    ]


@given(
    st.integers(-9, 9), st.integers(1, 30), st.integers(1, 30), st.sampled_from([0, 1]),
    st.none() | st.fractions(Fraction(1, 5), 5, max_denominator=9), st.data(),
)  # fmt: skip
def test_a_voxel_is_given_to_those_that_need_it(low, of, to, order, step, data) -> None:
    """Along one axis, against the voxels that each voxel needs by itself."""
    centred = step and (step,) * 3
    way = Resampling(
        Box.of((low,) * 3, (of,) * 3), Box.of((2,) * 3, (to,) * 3), order, centred=centred
    )
    start = data.draw(st.integers(low, low + of - 1))
    stop = data.draw(st.integers(start + 1, low + of))
    wanted = []
    for place in range(2, 2 + to):
        first, end = way.needed_along(0, place, place + 1)
        if first < stop and end > start:
            wanted.append(place)
    given_start, given_stop = way.given_along(0, start, stop)
    assert [*range(int(given_start), int(given_stop))] == wanted


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize(("of", "to"), SHAPES)
def test_pieces_add_up_to_the_whole(of: tuple[int, ...], to: tuple[int, ...], order: int) -> None:
    array = np.random.default_rng(1).random(of)
    way = Resampling(Box.of((0, 0, 0), of), Box.of((0, 0, 0), to), order)
    total = np.zeros(to)
    cuts = [sorted({0, n // 3, n // 2, n}) for n in of]
    for sides in itertools.product(*(itertools.pairwise(each) for each in cuts)):
        held = Box(tuple(a for a, _ in sides), tuple(b for _, b in sides))
        if held.size and (box := way.given(held)).size:
            total[box.slices] += way.apply(array[(None, *held.slices)], held, box)[0]
    assert np.allclose(total, way.apply(array[None], way.of, way.to)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "float32"])
def test_a_source_on_another_grid_is_within_a_hundred_thousandth_of_scipy(dtype: str) -> None:
    array = (np.random.default_rng(3).random((9, 21, 16)) * 200).astype(dtype)
    source = open_source(np.stack([array, array[::-1]]), name="in")
    way = Resampling(source.domain[2:], Box.of((0, 0, 0), (18, 13, 17)), 3)
    made = ResampledSource(source, way)
    whole = made.read(made.domain)[0]
    assert np.abs(whole[1] - zoomed(array[::-1].astype(float), (18, 13, 17), 3)).max() < 200e-5
    for box in some_boxes(way.to, 4):
        lead = Box.of((0, 0), (1, 2))
        assert np.array_equal(made.read(lead + box)[0], whole[(slice(None), *box.slices)])


@pytest.mark.parametrize("order", [0, 1, 3])
def test_a_grid_may_begin_in_a_box_whose_edge_stands_for_what_lies_beyond(order: int) -> None:
    array = np.random.default_rng(4).random((9, 20, 17))
    inner = Box((2, 3, 1), (7, 16, 17)), Box((3, 2, 4), (9, 10, 30))
    way = Resampling(Box.of((0,) * 3, array.shape), Box.of((0,) * 3, (14, 13, 32)), order, 0, inner)
    wanted = Resampling(*inner, order, 0).apply(array[(None, *inner[0].slices)], *inner)[0]
    for box in [way.to, inner[1], *some_boxes(way.to, 5)]:
        needed = way.needed(box)
        made = way.apply(array[(None, *needed.slices)], needed, box)[0]
        there = box & inner[1]
        assert np.array_equal(made[there.within(box)], wanted[there.within(inner[1])])
        assert not way.beyond(box)[there.within(box)].any()
        assert way.beyond(box).sum() == box.size - there.size
    source = open_source(array)
    shown = ResampledSource(source, way)
    assert shown.translation[2:] == pytest.approx(
        (2 - 0.5 - 2.5 * 5 / 6, 3 - 0.5 - 1.5 * 13 / 8, 1 - 0.5 - 3.5 * 16 / 26)
    )
    assert shown.fingerprint != ResampledSource(source, replace(way, inner=None)).fingerprint


def test_a_place_in_the_middle_of_two_voxels_is_rounded_as_scipy_rounds_it() -> None:
    for of, to in [(2, 49), (4, 98), (2, 3), (14, 107), (100, 49)]:
        way = Resampling(Box.of((0,) * 3, (of, 1, 1)), Box.of((0,) * 3, (to, 1, 1)), 0)
        line = np.arange(float(of))
        wanted = ndimage.map_coordinates(
            line, [of / to * (np.arange(to) + 0.5) - 0.5], order=0, mode="nearest"
        )
        made = way.apply(line[None, :, None, None], way.of, way.to)
        assert np.array_equal(made.ravel(), wanted)
        for voxel in range(of):
            start, stop = way.given_along(0, voxel, voxel + 1)
            assert [*range(start, stop)] == np.flatnonzero(wanted == voxel).tolist()


def test_what_is_not_finite_spoils_only_what_is_interpolated_from_it() -> None:
    array = np.ones((4, 12, 12), np.float32)
    array[2, 6, 6] = np.nan
    source = open_source(array, name="in")
    for order in (0, 1, 3):
        way = Resampling(source.domain[2:], Box.of((0, 0, 0), (4, 24, 24)), order)
        made = ResampledSource(source, way).read(Box.of((0,) * 5, (1, 1, 4, 24, 24)))[0, 0]
        spoilt = np.argwhere(np.isnan(made))
        reach = (12, 13) if order == 0 else (11, 14)
        assert spoilt.min(axis=0).tolist() == [2, reach[0], reach[0]]
        assert spoilt.max(axis=0).tolist() == [2, reach[1], reach[1]]


def test_a_frame_on_another_grid_begins_at_the_same_place_in_the_world() -> None:
    source = open_source(np.zeros((4, 10, 10), "uint8"), name="in")
    source.scale, source.translation = (1, 1, 2.0, 0.5, 0.5), (0, 0, 10.0, 5.0, 0.0)
    frame = on_grid(source, Box.of((0, 0, 0), (8, 5, 10)), (0.5, 2.0, 1.0))
    assert frame.scale == (1, 1, 1.0, 1.0, 0.5)
    assert frame.translation == (0, 0, 9.5, 5.25, 0.0)
    assert frame.domain.shape == (1, 1, 8, 5, 10)
