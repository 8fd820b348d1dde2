"""Read from the logs of a job which parts lack blocks, and how much is written."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

from ...data import Box
from ..planning.plan import Plan
from ..run_folder.block_set import BlockSet
from ..tiling.parts import Parts


def written_in(parts: Parts, number: int, done: BlockSet) -> int:
    """Number of blocks of a part that are ``done``."""
    part = parts[number]
    return done.count(part.volume, parts.blocks(part))


def missing_parts(plan: Plan, done: BlockSet) -> dict[int, int]:
    """The parts that lack blocks, and how many blocks each lacks.

    ``done`` are the blocks that are written.
    """
    parts = plan.parts
    if len(done) == plan.num_blocks:
        return {}
    lacking = (
        (part.number, parts.blocks(part).size - written_in(parts, part.number, done))
        for part in parts
    )
    return {number: count for number, count in lacking if count}


def voxels_of(plan: Plan, done: BlockSet) -> int:
    """Number of voxels in blocks."""
    blocks = plan.geometry.blocks
    boxes = [  # of blocks that are equally large: the first and the last of an axis may be cut
        Box(*zip(*box, strict=True))
        for box in product(*map(_alike, blocks.cells.start, blocks.cells.stop))
    ]
    return sum(
        done.count(volume, box) * blocks.cell(box.start).size
        for volume in range(plan.facts.num_volumes)
        for box in boxes
    )


def _alike(first: int, stop: int) -> Iterator[tuple[int, int]]:
    """The first block of an axis, the last, and those between."""
    return pairwise(sorted({first, first + 1, stop - 1, stop}))
