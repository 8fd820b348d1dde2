"""The patches of parts, and what is done again after a death, against a count of all blocks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.box import Box
from penstock.data.grid import indices
from penstock.inference.tiling.geometry import Block, Geometry
from penstock.inference.tiling.part_work import part_work
from penstock.inference.tiling.parts import Parts

from ..geometries import geometries
from ..laws import COSTLY


@st.composite
def parts_of_jobs(draw: st.DrawFn) -> Parts:
    """Any small job in parts of one region each, or of several regions of a unit each."""
    geometry = draw(geometries())
    step = tuple(u * draw(st.integers(1, 3)) for u in geometry.unit)
    region = geometry.unit if draw(st.booleans()) else step
    return Parts(replace(geometry, region=region), step, draw(st.integers(1, 2)))


@COSTLY
@given(parts_of_jobs())
def test_patches_of_each_part_and_of_those_before_it(parts: Parts) -> None:
    work = part_work(parts)
    assert len(work) == len(parts)
    each = [parts.extent([number]).patches for number in range(len(parts))]
    assert work.total == sum(each)
    assert [work.before(n) for n in range(len(parts) + 1)] == [0, *np.cumsum(each)]
    assert [work.at(work.before(n) + 0.5) for n in range(len(parts))] == [*range(len(parts))]


def left_after(geometry: Geometry, blocks: list[Block], done: int) -> int:
    """Patches of the blocks that a second worker computes, counted as `wanted_blocks` does."""

    def touched(block: Block) -> set[tuple[int, tuple[int, ...]]]:
        support = block.support & geometry.regions[block.region]
        return {(block.region, unit) for unit in indices(geometry.units.touching(support))}

    missing = {unit for block in blocks[done:] for unit in touched(block)}
    return sum(block.patches.size for block in blocks if touched(block) & missing)


@COSTLY
@given(parts_of_jobs())
def test_what_is_left_of_a_part_is_what_a_second_worker_computes(parts: Parts) -> None:
    """At the beginning of each block of the largest part, and in its middle."""
    work = part_work(parts)
    largest = max(parts, key=lambda part: parts.extent([part.number]).patches)
    blocks = [*parts.blocks(largest)]
    total = sum(block.patches.size for block in blocks)
    regions = {block.region for block in blocks}
    if len(regions) > 1:  # a part's regions count alike, so only parts of equal ones are exact
        sizes = {sum(b.patches.size for b in blocks if b.region == r) for r in regions}
        if len(sizes) > 1 or len(regions) != work.redo.regions:
            return
    begun = 0
    for number, block in enumerate(blocks):
        for inside in (0.01, 0.5):
            done = begun + inside * block.patches.size
            left = float(work.redo.left(done / total)) * total
            assert left == pytest.approx(left_after(parts.geometry, blocks, number))
        begun += block.patches.size


def test_a_part_that_is_written_unit_by_unit_loses_half_a_unit() -> None:
    geometry = Geometry(
        domain=Box.of((0, 0, 0), (64, 64, 64)), patch=(8,) * 3, overlap=(2,) * 3, seam="trim",
        unit=(16,) * 3, anchor=(0, 0, 0), region=(16,) * 3, patches_per_block=(9, 9, 9),
    )  # fmt: skip
    redo = part_work(Parts(geometry, (16, 32, 32), 1)).redo
    assert redo.regions == 4
    assert redo.mean_lost == pytest.approx(1 / 8, rel=1e-3)
