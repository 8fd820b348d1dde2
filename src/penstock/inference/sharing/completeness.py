"""Read from the logs of a job which parts lack units, how much is written, and by whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Set
from itertools import pairwise

from ...base import plural
from ..planning.plan import Plan
from ..run_folder.journal import Journal
from ..tiling.parts import Parts


def missing_parts(plan: Plan, done: Set[tuple[int, ...]]) -> dict[int, int]:
    """The parts that lack units, and how many units each lacks.

    ``done`` are the units that are written, each (volume, z, y, x).
    """
    parts: Parts | None = plan.parts
    if parts is None or len(done) == plan.num_units:
        return {}
    there = Counter(parts.number_of(volume, unit) for volume, *unit in done)
    lacking = ((part.number, parts.units(part).size - there[part.number]) for part in parts)
    return {number: count for number, count in lacking if count}


def voxels_of(plan: Plan, done: Set[tuple[int, ...]]) -> int:
    """Number of voxels in units, each (volume, z, y, x)."""
    units, sides = plan.geometry.units, []
    for axis, (first, stop) in enumerate(zip(units.cells.start, units.cells.stop, strict=True)):
        lines = [units.anchor[axis] + i * units.step[axis] for i in range(first, stop + 1)]
        low, high = units.domain.start[axis], units.domain.stop[axis]
        inside = [min(max(line, low), high) for line in lines]
        sides.append({first + i: b - a for i, (a, b) in enumerate(pairwise(inside))})
    z, y, x = sides
    return sum(z[k] * y[j] * x[i] for _, k, j, i in done)


def maker_notes(journal: Journal) -> Iterator[str]:
    """A sentence on which maker wrote how many units of a run, if there are several makers."""
    if journal.folder is None:
        return
    makers = [*journal.makers]
    notes = journal.folder.notes(journal.run, makers).fresh()
    counts = Counter(note.maker for note in notes.values())
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
