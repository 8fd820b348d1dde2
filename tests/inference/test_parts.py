"""A job cut into parts: each unit is in one of them, and shares leave nothing out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import Refused, UsageError
from penstock.data.box import Box
from penstock.data.grid import indices
from penstock.inference.planning.plan import make_plan
from penstock.inference.tiling.geometry import Geometry
from penstock.inference.tiling.parts import Parts, fit_parts

from ..geometries import geometries
from ..laws import COSTLY
from .kit import SEED, config, facts

CUBE = Geometry(
    domain=Box.of((0, 0, 0), (512, 512, 512)), patch=(64,) * 3, overlap=(10,) * 3, seam="trim",
    unit=(64,) * 3, anchor=(0, 0, 0), region=(512,) * 3, patches_per_block=(2, 2, 2),
)  # fmt: skip


@st.composite
def cut(draw: st.DrawFn) -> Parts:
    """Any small job in parts of any whole regions."""
    geometry = draw(geometries())
    step = tuple(r * draw(st.integers(1, 3)) for r in geometry.region)
    return Parts(geometry, step, draw(st.integers(1, 3)))


@given(cut())
def test_every_unit_is_in_one_part_and_each_part_knows_its_own(parts: Parts) -> None:
    writers = Counter((part.volume, unit) for part in parts for unit in indices(parts.units(part)))
    volumes, units = range(parts.num_volumes), [*indices(parts.geometry.units.cells)]
    assert writers == Counter((volume, unit) for volume in volumes for unit in units)
    for part in parts:
        assert all(
            parts.number_of(part.volume, unit) == part.number for unit in indices(parts.units(part))
        )


@COSTLY
@given(cut())
def test_the_blocks_of_all_parts_are_those_of_the_job(parts: Parts) -> None:
    volumes = range(parts.num_volumes)
    whole = Counter(
        (b.volume, b.region, b.patches) for v in volumes for b in parts.geometry.blocks(volume=v)
    )
    of_parts = Counter(
        (b.volume, b.region, b.patches) for part in parts for b in parts.blocks(part)
    )
    assert of_parts == whole
    extent = parts.extent(range(len(parts)))
    assert extent.patches == parts.geometry.count_patches() * parts.num_volumes
    assert extent.voxels == parts.geometry.domain.size * parts.num_volumes
    assert extent.units == len(parts.geometry.units) * parts.num_volumes


@given(cut(), st.integers(1, 9))
def test_shares_follow_each_other_and_leave_nothing_out(parts: Parts, elements: int) -> None:
    if elements > len(parts):
        with pytest.raises(UsageError, match=rf"--part 1/{elements}: the job has {len(parts)} "):
            parts.share(1, elements)
        return
    shares = [parts.share(element, elements) for element in range(1, elements + 1)]
    assert [number for share in shares for number in share] == [*range(len(parts))]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(geometries(), st.integers(1, 4), st.integers(1, 40))
def test_parts_are_whole_units_and_as_many_as_asked_for(
    geometry: Geometry, workers: int, least: int
) -> None:
    parts = fit_parts(geometry, 2, workers, least)
    assert all(s % u == 0 for s, u in zip(parts.step, geometry.unit, strict=True))
    assert len(parts) >= min(least, len(geometry.units) * 2)


@pytest.mark.parametrize(("workers", "most"), [(1, 1.0), (2, 0.61), (8, 0.22), (64, 0.07)])
def test_workers_that_are_alike_end_together(workers: int, most: float) -> None:
    """``most`` is the last worker's share of the patches that one process computes."""
    parts = fit_parts(CUBE, 1, workers, None)
    geometry = replace(CUBE, region=parts.step)
    patches = [geometry.patches_for(part.box).size for part in parts]
    shares = [sum(patches[worker::workers]) for worker in range(workers)]
    assert max(shares) <= most * CUBE.count_patches()


def test_a_part_that_the_memory_does_not_hold_is_cut_further() -> None:
    volume, sizes = facts((20480, 10640, 14192)), []
    for limit in ("40GB", "3GB"):
        plan = make_plan(config(max_memory=limit, workers=4), volume, SEED)
        plan.refuse()
        assert plan.parts is not None
        assert plan.geometry.region == plan.parts.step
        sizes.append(len(plan.parts))
    assert sizes[0] < sizes[1]
    with pytest.raises(Refused, match="MiB of host memory"):
        make_plan(config(max_memory="400MB", workers=4), volume, SEED).refuse()


def test_a_petabyte_is_cut_without_a_list() -> None:
    plan = make_plan(config(workers=1000), facts((80_000, 80_000, 80_000)), SEED)
    assert plan.parts is not None
    last = plan.parts[len(plan.parts) - 1]
    assert last.box.stop == (80_000, 80_000, 80_000)
    assert plan.num_patches < 1.2 * make_plan(config(), facts((80_000,) * 3), SEED).num_patches
