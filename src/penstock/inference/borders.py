"""The patches on the borders of parts: what it costs to compute them twice, or to spill.

Parts, units and blocks are products of intervals, so every count here is made of one short table
for each axis. A piece of a unit is what one block brings to it; a unit on a border is all pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..base import InferConfig, format_bytes, format_count, format_seconds
from .memory import Facts, block_voxel_bytes
from .part_work import part_work
from .parts import IDLE_PARTS, Parts
from .traffic import blocks_along

SPILL_BANDWIDTH = 200e6
"""Bytes per second that a worker is taken to write and to read of what is spilled. A local disk
gives several times that; on a file system that many workers share it is what each can hope for."""


@dataclass(frozen=True, slots=True)
class Spill:
    """What a job spills."""

    bytes: int
    """Bytes of all pieces, each written once and read once."""
    peak: int
    """Most bytes that lie there at once, if parts end in about their order."""

    def line(self) -> str:
        """Both for a reader."""
        return f"{format_bytes(self.bytes)} spilled in all, about {format_bytes(self.peak)} at once"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to do with borders, as the plan expects it."""

    parts: int
    patches: int
    seconds: float | None
    """None where nothing says how long a patch takes."""


@dataclass(frozen=True, slots=True)
class Ways:
    """Both ways, and which is taken."""

    recomputed: Way
    spilled: Way
    spill: Spill
    spills: bool
    """True if parts spill."""
    why: str
    one: int
    """Patches that one process computes."""

    def lines(self) -> Iterator[tuple[str, str]]:
        """Both ways for a reader, line by line: (what, how much)."""
        yield "  recompute", self._words(self.recomputed)
        yield "  spill", f"{self._words(self.spilled)}; {self.spill.line()}"
        yield "  taken", f"{'spill' if self.spills else 'recompute'}: {self.why}"

    def _words(self, way: Way) -> str:
        took = "" if way.seconds is None else f", {format_seconds(way.seconds)} predicted"
        parts = f"{format_count(way.parts)} parts, " * (self.recomputed.parts != self.spilled.parts)
        times = way.patches / self.one
        return f"{parts}{format_count(way.patches)} patches, {times:.2f} of one process's{took}"


def weigh(
    config: InferConfig,
    facts: Facts,
    recomputed: Parts,
    spilled: tuple[Parts, Spill],
    *,
    fits: bool,
) -> Ways:
    """Choose what the settings ask for, or else what is predicted to end first.

    Args:
        config: The settings of the job.
        facts: With the seconds that a patch takes, if they are known.
        recomputed: Parts that compute their borders twice.
        spilled: Parts that spill, and what.
        fits: Whether these fit the memory.

    Returns:
        Both ways, and the choice.
    """
    parts, spill = spilled
    ways = _way(recomputed, facts, 0), _way(parts, facts, spill.bytes)
    if config.spill == "always":
        spills, why = True, "--spill always"
    elif config.cluster is None:
        spills, why = False, "only the workers of --cluster spill"
    elif config.max_spill is not None and spill.peak > config.max_spill:
        limit = format_bytes(config.max_spill)
        spills, why = False, f"--max-spill {limit} is less than would lie spilled at once"
    elif not fits:
        spills, why = False, "the other does not fit the memory"
    elif ways[0].seconds is None or ways[1].seconds is None:
        spills, why = False, "nothing says how long a patch takes; --rate does"
    else:
        spills, why = ways[1].seconds < ways[0].seconds, "it is predicted to end first"
    one = parts.geometry.cores.cells.size * parts.num_volumes
    return Ways(*ways, spill, spills, why, one)


def _way(parts: Parts, facts: Facts, spilled: int) -> Way:
    """The seconds are those from the first part to the end."""
    work, each = part_work(parts), facts.patch_seconds
    if each is None:
        return Way(len(parts), work.total, None)
    last = max(work.largest, work.total / parts.workers + IDLE_PARTS * work.largest)
    moved = 2 * spilled / SPILL_BANDWIDTH / min(parts.workers, len(parts))
    return Way(len(parts), work.total, last * each + moved)


@dataclass(frozen=True, slots=True)
class _Along:
    """The voxels that blocks bring to the units of an axis, by layers of parts: (parts,)."""

    sums: NDArray[np.int64]
    """The share of each block counted: of a blended head."""
    values: NDArray[np.int64]
    """Each voxel counted once: of any other head."""
    own_sums: NDArray[np.int64]
    """Those of units whose blocks are all of their own part."""
    own_values: NDArray[np.int64]
    sources: tuple[NDArray[np.int64], NDArray[np.int64]]
    """The first and the last layer whose blocks bring something."""


def spill_of(parts: Parts, facts: Facts) -> Spill:
    """What parts spill.

    Args:
        parts: Parts that spill.
        facts: The heads of the job.

    Returns:
        Bytes, in all and at once.
    """
    along = [_along(parts, axis) for axis in range(3)]
    # The first axis that is cut is that of the layers: parts are visited along it last.
    cut = next((a for a in range(3) if len(along[a].sums) > 1), 0)
    layers = np.zeros(len(along[cut].sums))
    for size, sums in zip(block_voxel_bytes(facts), facts.sum_itemsizes, strict=True):
        every = [each.sums if sums else each.values for each in along]
        inner = [each.own_sums if sums else each.own_values for each in along]
        for layer, sign in ((every, 1), (inner, -1)):
            plane = math.prod(int(layer[a].sum()) for a in range(3) if a != cut)
            layers += sign * size * plane * layer[cut].astype(np.float64)
    return Spill(int(layers.sum()) * parts.num_volumes, _peak(parts, layers, along, cut))


def _peak(parts: Parts, layers: NDArray[np.float64], along: list[_Along], cut: int) -> int:
    """Most bytes at once, if layers of parts are done in turn and joined as soon as may be.

    The pieces of a layer are there from the first layer that brings some to the last. Workers are
    as many parts ahead as there are workers.
    """
    in_layer = math.prod(len(each.sums) for each in along) // len(layers)
    ahead = -(-(parts.workers - 1) // in_layer)
    volumes = min(parts.num_volumes, 2 + ahead // len(layers))
    change = np.zeros(ahead + volumes * len(layers) + 1)
    for volume in range(volumes):
        first, last = (volume * len(layers) + ends for ends in along[cut].sources)
        np.add.at(change, first, layers)
        np.add.at(change, last + ahead + 1, -layers)
    return int(np.cumsum(change).max())


def _along(parts: Parts, axis: int) -> _Along:
    geometry = parts.geometry
    region, _, support = blocks_along(geometry, axis)
    low, high = geometry.domain.start[axis], geometry.domain.stop[axis]
    cells, size, anchor = geometry.units.cells, geometry.unit[axis], geometry.anchor[axis]
    lines = anchor + size * np.arange(cells.start[axis], cells.stop[axis] + 1, dtype=np.int64)
    lines = lines.clip(low, high)
    start, stop = lines[:-1], lines[1:]
    home = (start - anchor) // geometry.region[axis] - geometry.regions.cells.start[axis]
    first = np.searchsorted(support.stop, start, side="right")
    last = np.searchsorted(support.start, stop) - 1
    inner = (region[first] == home) & (region[last] == home)
    brought = np.array(
        [
            np.sum(np.minimum(support.stop[a : b + 1], v) - np.maximum(support.start[a : b + 1], u))
            for a, b, u, v in zip(first, last, start, stop, strict=True)
        ]
    )

    def by_part(voxels: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.bincount(home, weights=voxels).astype(np.int64)

    length, begins = stop - start, np.searchsorted(home, np.arange(home[-1] + 1))
    ends = np.append(begins[1:], len(home)) - 1
    sums, values, own_sums, own_values = map(
        by_part, (brought, length, brought * inner, length * inner)
    )
    return _Along(sums, values, own_sums, own_values, (region[first][begins], region[last][ends]))
