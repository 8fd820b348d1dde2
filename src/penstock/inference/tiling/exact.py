"""Patches and overlaps at which no voxel of a core sees a cut, by arithmetic.

    patch  ├─ before ─┼────── core ──────┼─ after ─┤
    next                      ├─ before ─┼────── core ──────┼─ after ─┤

Patches start on the grid of the network, which begins with the volume: the context before a core
and the stride are multiples of its period, and sides of patches are multiples of its step.

The untiled run that such tiles equal is the network on the whole volume, which is reflected at its
edges as patches are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from ...models import Reach

_SIDES = {2: (256, 1024), 3: (48, 192)}
"""The least and the largest side of a patch that is chosen, by the number of axes."""
_CORE = {2: 512, 3: 128}
"""The side of a core that is liked best: a chunk of a volume. Larger patches cost time in the
operating system, which maps their memory; smaller ones compute more context."""
_FLAT = {2: (512, 512), 3: (8, 512, 512)}
"""The patch of a network that sees one voxel, where chunks are thinner: as many voxels as the core,
in long rows."""
_MORE = 1.05
"""Share of the least work that a side may compute to be nearer to that."""
_GRAIN = 8
"""Sides of patches that are chosen are multiples of it, as kernels and memory like."""
SIDE_STEP = 16
"""Sides of patches that are tried or named are multiples of it, as most networks want."""
_MOST_WORK = 4.0
"""Voxels that are computed for one, at most, by a patch that is chosen."""


def least_overlap(reach: Reach, context: int = 0) -> tuple[int, ...]:
    """The least overlap at which tiling is exact.

    Args:
        reach: How far the network sees; it must be exact.
        context: Voxels that are wanted before and after a core, whatever the network sees.

    Returns:
        The overlap, an entry for each axis of the network.
    """
    overlaps = []
    for low, high, step, period in zip(
        reach.before, reach.after, reach.step, reach.period, strict=True
    ):
        unit = math.lcm(period, step // math.gcd(step, 2))  # of the half that lies before a core
        overlaps.append(-(-max(low, high, context) // unit) * unit * 2)
    return tuple(overlaps)


def is_exact(reach: Reach, patch: Sequence[int], overlap: Sequence[int]) -> bool:
    """Whether no voxel of a core sees a cut.

    Args:
        reach: How far the network sees.
        patch: The patch, an entry for each axis of the network.
        overlap: The overlap, likewise.

    Returns:
        False also for patches that were not checked, as their sides are no multiples of the step.
    """
    if not reach.exact:
        return False
    axes = zip(patch, overlap, reach.before, reach.after, reach.step, reach.period, strict=True)
    return all(
        p % step == 0
        and (p - o) % period == 0
        and o // 2 % period == 0
        and o // 2 >= low
        and o - o // 2 >= high
        for p, o, low, high, step, period in axes
    )


def chunk_and_halo(
    extent: Sequence[int], overlap: Sequence[int], step: Sequence[int], chunk: Sequence[int]
) -> tuple[int, ...] | None:
    """The patch for a volume: a chunk of it and its halo.

    Args:
        extent: Shape of the volume, an entry for each axis of the network.
        overlap: The overlap, likewise.
        step: The number of which sides must be multiples, likewise.
        chunk: Shape of a chunk of the volume, likewise.

    Returns:
        The patch; None if the overlap is so wide that patches would compute far more than the
        volume.
    """
    axes = len(extent)
    if not any(overlap) and max(step) == 1:  # no edge is seen, so no patch needs to go beyond it
        thin = axes == 2 or chunk[0] < _FLAT[3][0]
        return tuple(map(min, extent, _FLAT[axes])) if thin else _whole_chunks(extent, chunk)
    patch = tuple(_side(n, o, s, axes) for n, o, s in zip(extent, overlap, step, strict=True))
    work = math.prod(p / max(1, p - o) for p, o in zip(patch, overlap, strict=True))
    fits = all(p > o for p, o in zip(patch, overlap, strict=True))
    return patch if fits and work <= _MOST_WORK else None


def _whole_chunks(extent: Sequence[int], chunk: Sequence[int]) -> tuple[int, ...]:
    """About as many voxels as the core, in whole chunks or in an even share of one, so that each is
    decoded once and kept for no other patch."""
    sides, most = list(map(min, extent, chunk)), _CORE[3] ** 3
    while math.prod(sides) > most:
        longest = sides.index(max(sides))
        sides[longest] = -(-sides[longest] // 2)
    while 2 * math.prod(sides) <= most and any(map(operator.lt, sides, extent)):
        shorter = [axis for axis, side in enumerate(sides) if side < extent[axis]]
        least = min(shorter, key=sides.__getitem__)
        sides[least] = min(extent[least], 2 * sides[least])
    return tuple(sides)


def _side(extent: int, overlap: int, step: int, axes: int) -> int:
    """The side of a patch along an axis: of all sides that compute about the fewest voxels, that
    whose core is nearest to `_CORE`."""
    least, most = _SIDES[axes]
    grain = math.lcm(step, _GRAIN)
    sides = range(-(-least // grain) * grain, most + 1, grain)
    work = {side: -(-extent // (side - overlap)) * side for side in sides if side > overlap}
    if not work:
        return overlap
    few = _MORE * min(work.values())
    liked = _CORE[axes] + overlap
    return min((side for side in work if work[side] <= few), key=lambda side: abs(side - liked))
