"""The ways to cut a job into write units, regions, and parts that workers share.

A `Plan` is made for each way, and the cheapest one that fits the memory is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ...base import InferConfig, UsageError
from ..tiling.geometry import Geometry, PatchShape, per_axis
from ..tiling.parts import Parts, fit_parts
from .memory import Facts

BLOCK_VOXELS = 3_000_000
"""Most voxels that a compute block reads. Small blocks take little memory while they are under way;
below this size the fixed cost of a block begins to show."""
UNIT_VOXELS = 2**22
"""Most voxels in a write unit whose size is chosen here. Small units are written sooner, so a kill
loses less."""
OWN_UNIT_VOXELS = 2**24
"""Most voxels of a unit that has its own percentiles, and so its own patches (256 cubed). With
smaller units too many patches would be computed twice."""


@dataclass(frozen=True, slots=True)
class JobCut:
    """A way to cut a job."""

    shape: PatchShape
    geometry: Geometry
    parts: Parts | None


def cuts(
    config: InferConfig,
    facts: Facts,
    shape: PatchShape,
    part: tuple[int, ...] | None,
    *,
    spills: bool = False,
) -> Iterator[JobCut]:
    """The cuts to compare, the largest regions first. With ``spills``, parts spill their borders.

    Raises `UsageError` for a block that does not match the output's chunks.
    """
    unit = _fit_unit(config, facts, shape)
    volumes, by_unit = facts.num_volumes, config.normalize == "percentile"
    if part is not None:
        geometry = _geometry(config, facts, shape, unit, unit if by_unit else part)
        geometry = replace(geometry, spills=spills)
        yield JobCut(shape, geometry, Parts(geometry, part, volumes, config.shared_by or 1))
    elif config.shared_by is None:
        for region in _regions(config, facts, unit):
            yield JobCut(shape, _geometry(config, facts, shape, unit, region), None)
    else:
        geometry = replace(_geometry(config, facts, shape, unit, unit), spills=spills)
        least = config.parts or 1
        while True:
            parts = fit_parts(geometry, volumes, config.shared_by, least)
            if not by_unit:  # a part is one region, so each of its patches is computed once
                geometry = replace(geometry, region=parts.step)
                parts = replace(parts, geometry=geometry)
            yield JobCut(shape, geometry, parts)
            if by_unit or len(parts) < least or parts.step == unit:
                return
            least = 2 * len(parts)


def _regions(config: InferConfig, facts: Facts, unit: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Region shapes to compare, largest first. Regions are not cut along z, as blocks sweep it."""
    if config.normalize == "percentile":
        yield unit
        return
    units = [-(-n // u) + 1 for n, u in zip(facts.domain.shape, unit, strict=True)]
    while True:
        yield tuple(n * u for n, u in zip(units, unit, strict=True))
        axis = 1 if units[1] * unit[1] >= units[2] * unit[2] else 2
        if units[axis] == 1:
            axis = 3 - axis
        if units[axis] == 1:
            return
        units[axis] = -(-units[axis] // 2)


def _fit_unit(config: InferConfig, facts: Facts, shape: PatchShape) -> tuple[int, ...]:
    """The shape of a write unit: that of --block, or else one that is chosen here.

    Raises `UsageError` if --block is not whole chunks of every output.
    """
    grid = tuple(math.lcm(*axis) for axis in zip(*facts.write_grids, strict=True))
    extent = facts.domain.shape
    if config.block is None:
        unit = list(grid)
        most = OWN_UNIT_VOXELS if config.normalize == "percentile" else UNIT_VOXELS
        while True:
            growing = [a for a in range(3) if unit[a] < extent[a]]
            axis = min(growing, key=lambda a: (unit[a], -a), default=None)
            if axis is None or math.prod(unit) * 2 > most:
                return tuple(unit)
            unit[axis] *= 2
    block = per_axis(config.block, plane=False, thin=grid[0])
    for name, b, p, n in zip("zyx", block, shape.patch, extent, strict=True):
        if b < p and b < n:
            raise UsageError(f"--block {b} is smaller than --patch {p} (axis {name})")
    for name, b, g, n in zip("zyx", block, grid, extent, strict=True):
        if b % g and b < n:
            raise UsageError(
                f"--block {b} is not a multiple of the output's {g} (its chunks or shards along "
                f"{name}): each would be written more than once; give --block {-(-b // g) * g}"
            )
    return tuple(-(-min(b, n) // g) * g for b, g, n in zip(block, grid, extent, strict=True))


def _geometry(
    config: InferConfig,
    facts: Facts,
    shape: PatchShape,
    unit: tuple[int, ...],
    region: tuple[int, ...],
) -> Geometry:
    stride = tuple(p - o for p, o in zip(shape.patch, shape.overlap, strict=True))
    counts = [-(-n // s) for n, s in zip(facts.domain.shape, stride, strict=True)]
    if config.normalize == "percentile":
        # Each region is one block, as its percentiles are needed before its first patch. Blocks end
        # at multiples of this in the global grid, so it must cover the whole grid.
        per_block = counts
    else:
        per_block = [1, 1, 1]
        while growing := [a for a in range(3) if per_block[a] < counts[a]]:
            axis = min(growing, key=lambda a: (per_block[a] * stride[a], -a))
            per_block[axis] += 1
            read = (n * s + o for n, s, o in zip(per_block, stride, shape.overlap, strict=True))
            if math.prod(read) * facts.in_channels > BLOCK_VOXELS:
                per_block[axis] -= 1
                break
    return Geometry(
        domain=facts.domain,
        patch=shape.patch,
        overlap=shape.overlap,
        seam="blend" if any(facts.sum_itemsizes) else "trim",
        unit=unit,
        anchor=facts.anchor,
        region=region,
        patches_per_block=tuple(per_block),
    )
