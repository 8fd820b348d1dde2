"""Read from the logs of a job which parts lack units, how much is written, and by whom."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

from ...base import plural
from ...data import Box
from ..planning.plan import Plan
from ..run_folder.journal import Journal
from ..run_folder.unit_set import UnitSet
from ..tiling.parts import Parts


def written_in(parts: Parts, number: int, done: UnitSet) -> int:
    """Number of units of a part that are ``done``."""
    part = parts[number]
    return done.count(part.volume, parts.units(part))


def missing_parts(plan: Plan, done: UnitSet) -> dict[int, int]:
    """The parts that lack units, and how many units each lacks.

    ``done`` are the units that are written.
    """
    parts: Parts | None = plan.parts
    if parts is None or len(done) == plan.num_units:
        return {}
    lacking = (
        (part.number, parts.units(part).size - written_in(parts, part.number, done))
        for part in parts
    )
    return {number: count for number, count in lacking if count}


def voxels_of(plan: Plan, done: UnitSet) -> int:
    """Number of voxels in units."""
    units = plan.geometry.units
    boxes = [  # of units that are equally large: the first and the last of an axis may be cut
        Box(*zip(*box, strict=True))
        for box in product(*map(_alike, units.cells.start, units.cells.stop))
    ]
    return sum(
        done.count(volume, box) * units.cell(box.start).size
        for volume in range(plan.facts.num_volumes)
        for box in boxes
    )


def _alike(first: int, stop: int) -> Iterator[tuple[int, int]]:
    """The first unit of an axis, the last, and those between."""
    return pairwise(sorted({first, first + 1, stop - 1, stop}))


def maker_notes(journal: Journal) -> Iterator[str]:
    """A sentence on which maker wrote how many units of a run, if there are several makers."""
    if journal.folder is None:
        return
    makers = [*journal.makers]
    counts = journal.folder.notes(journal.run, makers).counts()
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
