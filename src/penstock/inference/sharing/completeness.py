"""Which parts of a job lack units, by the logs of all that wrote it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set

from ..planning.plan import Plan
from ..tiling.parts import Parts


def missing_parts(plan: Plan, done: Set[tuple[int, ...]]) -> dict[int, int]:
    """The parts that are not whole, and how many units each lacks.

    ``done`` are the units that are written, each (volume, z, y, x).
    """
    parts: Parts | None = plan.parts
    if parts is None or len(done) == plan.num_units:
        return {}
    there = Counter(parts.number_of(volume, unit) for volume, *unit in done)
    lacking = ((part.number, parts.units(part).size - there[part.number]) for part in parts)
    return {number: count for number, count in lacking if count}
