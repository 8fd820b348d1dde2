"""Read from the logs of a job which parts lack blocks, how much is written, and by whom."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

from ...base import plural
from ...data import Box
from ..planning.plan import Plan
from ..run_folder.block_set import BlockSet
from ..run_folder.folder import Notes
from ..run_folder.journal import Journal
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


def maker_notes(journal: Journal) -> Iterator[str]:
    """A sentence on which maker wrote how many blocks of a run, if there are several makers."""
    if journal.folder is None:
        return
    makers = [*journal.makers]
    counts = Notes(journal.folder, journal.run, makers).counted()[1]
    if len(counts) < 2:
        return
    names = dict.fromkeys(name for number in counts for name in makers[number])
    differing = [n for n in names if len({str(makers[number].get(n)) for number in counts}) > 1]
    shares = [
        f"{plural(count, 'block')} with "
        + ", ".join(f"{name} {makers[number].get(name)}" for name in differing)
        for number, count in sorted(counts.items())
    ]
    yield f"Mixed arithmetic: {'; '.join(shares)}: last bits may differ from block to block"
