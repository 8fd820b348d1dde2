"""Tiling against brute force: traffic, weights, assembly, and a job cut into parts."""

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data import Box, Grid, indices, reflect
from penstock.inference.tiling.geometry import Geometry, patches_in_row
from penstock.inference.tiling.parts import Parts, fit_parts
from penstock.inference.tiling.stitch import Assembly, shares, window
from penstock.inference.tiling.traffic import (
    CacheLevel,
    largest_brick,
    open_peak,
    read_range,
    reads,
)
from penstock.models.recipe import Sliding

from ..geometries import STEPS, geometries

LEVELS: tuple[CacheLevel, ...] = ("layer", "row", "none")


@given(geometries(long=True))
def test_the_largest_brick_is_as_long_as_the_longest_on_every_axis(geometry: Geometry) -> None:
    lengths: dict[str, list[tuple[int, ...]]] = {"read": [], "support": [], "hull": []}
    for brick in Parts(geometry, 1).bricks():
        lengths["read"].append(brick.read.shape)
        lengths["support"].append(brick.support.shape)
        lengths["hull"].append(brick.read.hull(read_range(brick.read, geometry.domain)).shape)
    largest = largest_brick(geometry)
    for name, shapes in lengths.items():
        assert getattr(largest, name).shape == tuple(map(max, zip(*shapes, strict=True))), name


@given(st.integers(-30, 30), st.integers(1, 12), st.integers(-60, 60), st.integers(1, 60))
def test_reflected_reads_touch_what_is_seen(low: int, length: int, start: int, extent: int) -> None:
    domain, box = Box.of((low,), (length,)), Box.of((start,), (extent,))
    shown = reflect(np.arange(start, start + extent), low, low + length)
    assert read_range(box, domain) == Box((int(shown.min()),), (int(shown.max()) + 1,))


def decoded(geometry: Geometry, chunk: tuple[int, ...], origin: tuple[int, ...]) -> list[int]:
    """Voxels decoded at each of `LEVELS`, by a set of chunks that each cache has seen."""
    chunks = Grid(geometry.domain, chunk, origin)
    total = dict.fromkeys(LEVELS, 0)
    for part in geometry.parts:
        seen: dict[CacheLevel, set[Any]] = {"layer": set(), "row": set(), "none": set()}
        cells = geometry.bricks_of(part)
        for index in indices(cells.cells):
            read = read_range(geometry.read_of(cells.cell(index)), geometry.domain)
            for i in indices(chunks.touching(read)):
                # A cache of a layer forgets nothing; one of a row, all that is of other layers.
                seen["layer"].add(i)
                seen["row"].add((index[0], i))
                seen["none"].add((index, i))
        for level in LEVELS:
            touched = (i if level == "layer" else i[1] for i in seen[level])
            total[level] += sum(chunks.cell(i).size for i in touched)
    return [total[level] for level in LEVELS]


@given(
    geometries(long=True),
    st.tuples(*[st.integers(1, 9)] * 3),
    st.tuples(*[st.integers(-50, 50)] * 3),
)
def test_decoded_voxels_are_those_of_the_chunks_touched(geometry, chunk, origin) -> None:
    counted = [reads(geometry, chunk, level, origin=origin)[1] for level in LEVELS]
    assert counted == decoded(geometry, chunk, origin)


@given(geometries(long=True), st.tuples(*[st.integers(1, 9)] * 3))
def test_better_caches_hold_more_decode_less(geometry: Geometry, chunk: tuple[int, ...]) -> None:
    held, voxels = zip(*(reads(geometry, chunk, level) for level in LEVELS), strict=True)
    assert list(held) == sorted(held, reverse=True)
    assert held[2] == 0
    assert list(voxels) == sorted(voxels)


def most_open(geometry: Geometry) -> int:
    """Blocks opened at the first brick that touches them and closed after the last."""
    peak = 0
    for part in geometry.parts:
        first: dict[tuple[int, ...], int] = {}
        last: dict[tuple[int, ...], int] = {}
        bricks = geometry.bricks_of(part)
        for step, patches in enumerate(bricks):
            for block in indices(geometry.blocks.touching(geometry.support_of(patches) & part)):
                first.setdefault(block, step)
                last[block] = step
        change = np.zeros(len(bricks) + 1, int)
        for block, step in first.items():
            change[step] += geometry.blocks.cell(block).size
            change[last[block] + 1] -= geometry.blocks.cell(block).size
        peak = max(peak, int(np.cumsum(change).max()))
    return peak


@given(geometries(long=True))
def test_the_open_peak_is_that_of_the_worst_part(geometry: Geometry) -> None:
    assert open_peak(geometry) == most_open(geometry)


@given(st.integers(1, 30), st.data(), st.floats(0.001, 1), st.integers(1, 90))
def test_weights_add_up_to_1(patch: int, data: st.DataObject, floor: float, length: int) -> None:
    overlap, steps = data.draw(st.integers(0, patch - 1)), data.draw(st.sampled_from(STEPS))
    row = patches_in_row(steps, (0, length), (0, length), patch, overlap)
    low = int(row.begins[0])
    total = np.zeros(int(row.begins[-1]) + patch - low)
    for index, begin in enumerate(row.begins):
        weights = shares(window(Sliding(), 0, patch, overlap, floor), [row.neighbours(index)])
        assert (weights > 0).all()
        total[begin - low : begin - low + patch] += weights
    np.testing.assert_allclose(total, 1, rtol=1e-6)


@given(st.integers(1, 30), st.data(), st.integers(1, 90))
def test_patches_that_end_with_the_volume_are_where_nnunet_and_monai_have_them(
    patch: int, data: st.DataObject, length: int
) -> None:
    overlap = data.draw(st.integers(0, patch - 1))
    near, far = (
        patches_in_row(steps, (5, 5 + length), (5, 5 + length), patch, overlap).begins - 5
        for steps in ("moved", "narrowed")
    )
    if length <= patch:
        assert near.tolist() == far.tolist() == [-((patch - length) // 2)]
        return
    stride, rest = patch - overlap, length - patch
    assert near.tolist() == [*range(0, rest, stride), rest]
    longest = patch / 2 if overlap == patch // 2 else stride
    gaps = np.diff(far)
    assert far[0] == 0 and far[-1] == rest and gaps.max() <= np.ceil(longest)
    assert len(far) == int(np.ceil(rest / longest)) + 1 and np.ptp(gaps) <= 1


@given(geometries(), st.integers(1, 2))
def test_assembly_gives_every_block_once_and_whole(geometry: Geometry, channels: int) -> None:
    data = np.arange(channels * geometry.domain.size, dtype=np.float32)
    data = data.reshape(channels, *geometry.domain.shape)
    result, owned = np.full_like(data, -1), np.full_like(data, -1)
    assembly = Assembly(  # the second head is of labels, whatever the seam
        geometry,
        lambda head, shape: np.zeros((channels, *shape), np.float32),
        [geometry.seam == "blend", False],
    )
    for brick in Parts(geometry, 1).bricks():
        piece = data[(slice(None), *brick.support.within(geometry.domain))]
        core = data[(slice(None), *brick.core.within(geometry.domain))]
        if geometry.seam == "blend":
            piece = piece * _weight(geometry, brick.patches, brick.support)
        for block in assembly.add(brick, [piece, core]):
            where = (slice(None), *block.box.within(geometry.domain))
            assert (result[where] == -1).all(), "a block came twice"
            result[where], owned[where] = block.arrays
    assert not assembly.open
    np.testing.assert_allclose(result, data, rtol=1e-5)
    assert (owned == data).all()


@given(geometries(), st.data())
def test_blocks_without_sample_have_no_arrays(geometry: Geometry, data: st.DataObject) -> None:
    ones = np.ones(geometry.domain.shape, np.float32)
    sample, reached, absent = (np.zeros(ones.shape, bool) for _ in range(3))
    blocks, assembly = [], Assembly(
        geometry,
        lambda head, shape: np.zeros((1, *shape), bool if head else np.float32),
        [False, True],
    )  # fmt: skip
    for brick in Parts(geometry, 1).bricks():
        reach = geometry.reach(brick).within(geometry.domain)
        if data.draw(st.booleans()):
            sample[geometry.owned(brick).within(geometry.domain)] = True
            reached[reach] = True
            heads = [ones[brick.core.within(geometry.domain)][None], None]
        else:
            absent[reach] = True
            heads = [None, np.broadcast_to(True, (1, *brick.support.shape))]
        blocks += assembly.add(brick, heads)
    for block in blocks:
        where = block.box.within(geometry.domain)
        assert bool(block.arrays) == reached[where].any()
        for array, right in zip(block.arrays, (sample, absent), strict=bool(block.arrays)):
            np.testing.assert_array_equal(array[0], right[where])


def _weight(geometry: Geometry, patches: Box, support: Box) -> np.ndarray:
    """What a brick's patches together count at each voxel of its support, axis by axis."""
    axes = []
    for axis in range(3):
        total = np.zeros(support.shape[axis])
        row, sides = geometry.row(axis), (geometry.patch[axis], geometry.overlap[axis])
        for i in range(patches.start[axis], patches.stop[axis]):
            index = list(patches.start)
            index[axis] = i
            read = geometry.patch_read(index)
            weights = shares(window(Sliding(), axis, *sides, 0.05), [row.neighbours(i)])
            part = read & geometry.domain
            low, high = part.start[axis], part.stop[axis]
            total[low - support.start[axis] : high - support.start[axis]] += weights[
                low - read.start[axis] : high - read.start[axis]
            ]
        axes.append(total)
    return axes[0][:, None, None] * axes[1][:, None] * axes[2]


CUBE = Geometry(
    domain=Box.of((0, 0, 0), (512, 512, 512)), patch=(64,) * 3, overlap=(10,) * 3, seam="trim",
    block=(64,) * 3, anchor=(0, 0, 0), part=(512,) * 3, patches_per_brick=(2, 2, 2),
)  # fmt: skip


@st.composite
def cut(draw: st.DrawFn) -> Parts:
    """Any small job in any parts."""
    return Parts(draw(geometries()), draw(st.integers(1, 3)))


@given(cut())
def test_every_block_is_in_one_part(parts: Parts) -> None:
    writers = Counter(
        (part.volume, block) for part in parts for block in indices(parts.blocks(part))
    )
    volumes, blocks = range(parts.num_volumes), [*indices(parts.geometry.blocks.cells)]
    assert writers == Counter((volume, block) for volume in volumes for block in blocks)


@given(cut())
def test_all_parts_are_as_large_as_the_job(parts: Parts) -> None:
    extent = parts.extent(range(len(parts)))
    assert extent.patches == parts.geometry.count_patches() * parts.num_volumes
    assert extent.voxels == parts.geometry.domain.size * parts.num_volumes
    assert extent.blocks == len(parts.geometry.blocks) * parts.num_volumes


@given(cut(), st.integers(1, 9))
def test_shares_follow_each_other_and_leave_nothing_out(parts: Parts, elements: int) -> None:
    shares = [parts.share(element, elements) for element in range(1, elements + 1)]
    assert [number for share in shares for number in share] == [*range(len(parts))]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(geometries(), st.integers(1, 4), st.integers(1, 40))
def test_parts_are_whole_blocks_and_as_many_as_asked_for(geometry, workers, least) -> None:
    shape = fit_parts(geometry, 2, workers, least)
    assert all(s % u == 0 for s, u in zip(shape, geometry.block, strict=True))
    parts = Parts(replace(geometry, part=shape), 2)
    assert len(parts) >= min(least, len(geometry.blocks) * 2)


@pytest.mark.parametrize(("workers", "most"), [(1, 1.0), (2, 0.61), (8, 0.22), (64, 0.07)])
def test_workers_that_are_alike_end_together(workers: int, most: float) -> None:
    """``most`` is the last worker's share of the patches that one process computes."""
    geometry = replace(CUBE, part=fit_parts(CUBE, 1, workers, 1))
    patches = [geometry.patches_for(part.box).size for part in Parts(geometry, 1)]
    shares = [sum(patches[worker::workers]) for worker in range(workers)]
    assert max(shares) <= most * CUBE.count_patches()
