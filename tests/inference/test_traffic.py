"""Traffic against brute force: every block looked at, every unit opened and closed by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.box import Box
from penstock.data.grid import Grid, indices, reflect
from penstock.inference.planning.plan import make_plan
from penstock.inference.tiling.geometry import Geometry, PatchShape
from penstock.inference.tiling.traffic import (
    CacheLevel,
    largest_block,
    open_peak,
    read_range,
    reads,
)

from ..parameters import crossed
from .kit import config, facts

LEVELS: tuple[CacheLevel, ...] = ("layer", "row", "none")


@st.composite
def long_geometries(draw: st.DrawFn) -> Geometry:
    """One axis long enough for every kind of block, with an overlap of up to 15 strides; the
    others short. Origins and anchors lie anywhere, regions are one or many."""
    long = draw(st.integers(0, 2))
    shape = tuple(draw(st.integers(1, 40 if axis == long else 5)) for axis in range(3))
    patch = tuple(draw(st.integers(1, 16 if axis == long else 4)) for axis in range(3))
    unit = tuple(draw(st.integers(1, 9)) for _ in range(3))
    return Geometry(
        domain=Box.of(tuple(draw(st.integers(-30, 30)) for _ in range(3)), shape),
        patch=patch,
        overlap=tuple(draw(st.integers(0, p - 1)) for p in patch),
        seam=draw(st.sampled_from(["trim", "blend"])),
        unit=unit,
        anchor=tuple(draw(st.integers(-12, 12)) for _ in range(3)),
        region=tuple(u * draw(st.integers(1, 5)) for u in unit),
        patches_per_block=tuple(draw(st.integers(1, 4)) for _ in range(3)),
    )


def along(**changes: Any) -> Geometry:
    """A geometry of one axis: x."""
    given_ = {"domain": 12, "patch": 3, "overlap": 0, "unit": 4, "region": 12, "per_block": 1}
    cut = given_ | changes
    return Geometry(
        domain=Box.of((0, 0, 0), (1, 1, cut["domain"])),
        patch=(1, 1, cut["patch"]),
        overlap=(0, 0, cut["overlap"]),
        seam=cut.get("seam", "trim"),
        unit=(1, 1, cut["unit"]),
        anchor=(0, 0, 0),
        region=(1, 1, cut["region"]),
        patches_per_block=(1, 1, cut["per_block"]),
    )


@given(long_geometries())
def test_the_largest_block_is_as_long_as_the_longest_on_every_axis(geometry: Geometry) -> None:
    lengths: dict[str, list[tuple[int, ...]]] = {"read": [], "support": [], "hull": []}
    for block in geometry.blocks():
        lengths["read"].append(block.read.shape)
        lengths["support"].append(block.support.shape)
        hull = block.read.hull(read_range(block.read, geometry.domain))
        lengths["hull"].append(hull.shape)
    largest = largest_block(geometry)
    for name, shapes in lengths.items():
        assert getattr(largest, name).shape == tuple(map(max, zip(*shapes, strict=True))), name


def test_a_blended_block_far_from_the_edge_can_be_the_largest() -> None:
    """Overlap of 7 strides: the supports of the first blocks are cut at the volume's edge."""
    geometry = along(domain=7600, patch=4000, overlap=3500, unit=256, region=7680, seam="blend")
    supports = [block.support.shape[2] for block in geometry.blocks()]
    assert supports[:4] == [2250, 2750, 3250, 3750]
    assert largest_block(geometry).support.shape == (1, 1, 4000)


@given(st.integers(-30, 30), st.integers(1, 12), st.integers(-60, 60), st.integers(1, 60))
def test_reflected_reads_touch_what_they_show(
    low: int, length: int, start: int, extent: int
) -> None:
    domain, box = Box.of((low,), (length,)), Box.of((start,), (extent,))
    shown = reflect(np.arange(start, start + extent), low, low + length)
    assert read_range(box, domain) == Box((int(shown.min()),), (int(shown.max()) + 1,))


def decoded(geometry: Geometry, chunk: tuple[int, ...], origin: tuple[int, ...]) -> list[int]:
    """Voxels decoded at each of `LEVELS`, by a set of chunks that each cache has seen."""
    chunks = Grid(geometry.domain, chunk, origin)
    total = dict.fromkeys(LEVELS, 0)
    for region in geometry.regions:
        seen: dict[CacheLevel, set[Any]] = {"layer": set(), "row": set(), "none": set()}
        cells = geometry.blocks_of(region)
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
    long_geometries(),
    st.tuples(*[st.integers(1, 9)] * 3),
    st.tuples(*[st.integers(-50, 50)] * 3),
)
def test_decoded_voxels_are_those_of_the_chunks_touched(
    geometry: Geometry, chunk: tuple[int, ...], origin: tuple[int, ...]
) -> None:
    counted = [reads(geometry, chunk, level, origin=origin)[1] for level in LEVELS]
    assert counted == decoded(geometry, chunk, origin)


def test_chunk_lines_are_where_the_source_has_them() -> None:
    """Blocks of 3 in 12 voxels: no chunk of 3 is shared, unless the chunk lines lie elsewhere."""
    geometry = along()
    assert reads(geometry, (1, 1, 3), "none")[1] == 12
    assert reads(geometry, (1, 1, 3), "none", origin=(0, 0, 3))[1] == 12
    # Lines at 1, 4, 7, 10: blocks take 0-4, 1-7, 4-10 and 7-12.
    assert reads(geometry, (1, 1, 3), "none", origin=(5, 5, -2))[1] == 4 + 6 + 6 + 5
    assert reads(geometry, (1, 1, 3), "layer", origin=(5, 5, -2))[1] == 12


@given(long_geometries(), st.tuples(*[st.integers(1, 9)] * 3))
def test_better_caches_hold_more_and_decode_less(
    geometry: Geometry, chunk: tuple[int, ...]
) -> None:
    held, voxels = zip(*(reads(geometry, chunk, level) for level in LEVELS), strict=True)
    assert list(held) == sorted(held, reverse=True)
    assert held[2] == 0
    assert list(voxels) == sorted(voxels)


def most_open(geometry: Geometry) -> int:
    """Units opened at the first block that touches them and closed after the last."""
    peak = 0
    for region in geometry.regions:
        first: dict[tuple[int, ...], int] = {}
        last: dict[tuple[int, ...], int] = {}
        blocks = geometry.blocks_of(region)
        for step, patches in enumerate(blocks):
            for unit in indices(geometry.units.touching(geometry.support_of(patches) & region)):
                first.setdefault(unit, step)
                last[unit] = step
        change = np.zeros(len(blocks) + 1, int)
        for unit, step in first.items():
            change[step] += geometry.units.cell(unit).size
            change[last[unit] + 1] -= geometry.units.cell(unit).size
        peak = max(peak, int(np.cumsum(change).max()))
    return peak


@given(long_geometries())
def test_the_open_peak_is_that_of_the_worst_region(geometry: Geometry) -> None:
    assert open_peak(geometry) == most_open(geometry)


@pytest.mark.parametrize(
    ("changes", "peak"),
    [
        ({}, 8),  # units of 4, blocks of 3: two units are under way at blocks 1 and 2
        ({"unit": 12}, 12),  # one unit
        ({"per_block": 4}, 12),  # one block
        ({"patch": 4}, 4),  # blocks are units
        ({"patch": 7, "overlap": 6, "seam": "blend", "per_block": 2}, 12),  # one sees 1-9
        ({"region": 4}, 4),  # regions are units
        ({"domain": 5, "region": 4}, 4),  # the last region is a mere voxel
    ],
)
def test_open_peaks_along_one_axis(changes: dict[str, Any], peak: int) -> None:
    assert open_peak(along(**changes)) == peak == most_open(along(**changes))


def test_the_open_peak_is_exact_in_three_axes() -> None:
    """More blocks and units on each axis than the properties above can draw."""
    rng = np.random.default_rng(0)
    for seam, _ in itertools.product(["trim", "blend"], range(3)):
        patch = rng.integers(1, 7, 3)
        unit = rng.integers(2, 8, 3)
        geometry = Geometry(
            domain=Box.of(tuple(rng.integers(-9, 9, 3).tolist()), (14, 15, 16)),
            patch=tuple(patch.tolist()),
            overlap=tuple((rng.integers(0, 100, 3) % patch).tolist()),
            seam=seam,  # type: ignore[arg-type]
            unit=tuple(unit.tolist()),
            anchor=tuple(rng.integers(-9, 9, 3).tolist()),
            region=tuple((unit * (9, 2, 2)).tolist()),
            patches_per_block=tuple(rng.integers(1, 4, 3).tolist()),
        )
        assert open_peak(geometry) == most_open(geometry)


@pytest.mark.parametrize(
    ("side", "knobs", "grid"),
    crossed(
        [80_000, 100_000], [{}, {"seam_mode": "blend"}, {"normalize": "percentile"}], [32, 256]
    ),
)
def test_huge_volumes_are_planned_without_a_box_for_each_block(
    side: int, knobs: dict[str, str], grid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = 0
    check = Box.__post_init__

    def count(box: Box) -> None:
        nonlocal made
        made += 1
        check(box)

    monkeypatch.setattr(Box, "__post_init__", count)
    huge = facts((side,) * 3, write_grids=((grid,) * 3,))
    shape = PatchShape((min(grid, 64),) * 3, (10,) * 3, 3)
    chosen = config(block=grid, patch=min(grid, 64), overlap=10, **knobs)
    plan = make_plan(chosen, huge, shape)
    assert plan.num_units == math.ceil(side / grid) ** 3
    assert plan.num_patches >= math.ceil(side / (min(grid, 64) - 10)) ** 3
    assert made < 5000
