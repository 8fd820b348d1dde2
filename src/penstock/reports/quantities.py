"""Two sides of a case, quantity by quantity: phases, waits, rates, memory and scores.

If both sides have several launches, a phase gets a verdict as a case does. If a side has one
launch, the interval comes from its steps. It holds for these runs and says nothing about another
launch, so there is no verdict. A quantity with one value in each launch has no interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base import format_bytes, format_seconds, significant
from ..instruments import Interval, Record, hierarchical_bootstrap_ratio, own_noise
from .verdicts import ALIKE, ComparedCase, Judge, Pair, chances, ratio_words
from .words import or_dash

BLOCKS = 20
"""Number of stretches of steps that stand for launches if there is only one launch. Neighbouring
steps are alike, so stretches are resampled and not steps."""
ONE_RUN = "one launch each: these runs only"
_NO_INTERVAL = "no interval"


@dataclass(frozen=True, slots=True)
class Quantity:
    """One quantity on both sides of a case."""

    name: str
    kind: str
    """``seconds``, ``rate``, ``bytes`` or ``score``."""
    a: float | None
    """The median over launches; None if no launch of A has it."""
    b: float | None
    ratio: Interval | None
    """B over A; None if a side lacks it, or is 0."""
    verdict: str
    """A verdict of `Judge`, or why there is none."""

    def line(self) -> tuple[str, ...]:
        """The line of a table."""
        form = _FORMS[self.kind]
        ratio = "-" if self.ratio is None else ratio_words(self.ratio)
        return self.name, or_dash(self.a, form), or_dash(self.b, form), ratio, self.verdict


_FORMS: dict[str, Callable[[float], str]] = {
    "seconds": format_seconds,
    "rate": significant,
    "bytes": format_bytes,
    "score": lambda value: f"{value:.4g}",
}
HEAD = ("quantity", "A", "B", "B / A", "of it")


def quantities_of(
    pair: Pair, row: ComparedCase, metric: str, judge: Judge, rng: np.random.Generator
) -> list[Quantity]:
    """Every quantity that a side of a case has.

    Args:
        pair: The launches of a case on both sides.
        row: The verdict on the case.
        metric: The phase that the verdict is on.
        judge: The rules of a verdict.
        rng: The source of random numbers.

    Returns:
        The phases first, then rates, memory and scores.
    """
    a, b = ([record for record in side if record.ok] for side in (pair.a, pair.b))
    names = dict.fromkeys(name for record in (*a, *b) for name in record.samples_s)
    rows = [_of_phase(pair, name, judge, rng) for name in names]
    if row.ratio is not None and row.ratio.low is not None:
        # Resampled once: one quantity has one ratio, and one verdict.
        said = Quantity(metric, "seconds", row.a_seconds, row.b_seconds, row.ratio, row.verdict)
        rows = [said if each.name == metric else each for each in rows]
    rows += _of_values(a, b, "rate", lambda record: record.facts.get("rates") or {})
    rows += _of_values(a, b, "score", lambda record: record.facts.get("scores") or {})
    rows += _of_values(a, b, "bytes", lambda record: record.memory.model_dump())
    return [row for row in rows if row.a or row.b]


def _of_phase(pair: Pair, name: str, judge: Judge, rng: np.random.Generator) -> Quantity:
    of_a, of_b = (
        [times for r in side if r.ok and (times := r.samples_s.get(name))]
        for side in (pair.a, pair.b)
    )
    a, b = (
        float(np.median([np.median(t) for t in side])) if side else None for side in (of_a, of_b)
    )
    if not (a and b):
        return Quantity(name, "seconds", a, b, None, "-")
    if min(len(of_a), len(of_b)) > 1 and min(map(min, of_a + of_b)) > 0:
        phase = Pair(pair.key, name, pair.a, pair.b, of_a, of_b)
        ratio = phase.ratio(rng)
        chance = chances([phase], rng)
        verdict = judge.case(phase, ratio, chance.get(pair.key)).verdict
        return Quantity(name, "seconds", a, b, ratio, verdict)
    of_a, of_b = (_stretches(side[0]) if len(side) == 1 else side for side in (of_a, of_b))
    if min(len(of_a), len(of_b)) < 2:
        return Quantity(name, "seconds", a, b, Interval(b / a, None, None, 1), _NO_INTERVAL)
    drawn = hierarchical_bootstrap_ratio(of_a, of_b, rng)
    assert drawn.low is not None and drawn.high is not None
    # The median of stretches is not that of all steps, whose ratio the table shows.
    ratio = Interval(b / a, min(drawn.low, b / a), max(drawn.high, b / a), drawn.n)
    alike = abs(math.log(b / a)) <= math.log1p(own_noise(of_a, of_b))
    return Quantity(name, "seconds", a, b, ratio, ALIKE if alike and b != a else ONE_RUN)


def _stretches(times: Sequence[float]) -> list[Any]:
    """The steps of a launch in stretches of at least about three steps."""
    return list(np.array_split(np.asarray(times), min(BLOCKS, len(times) // 3) or 1))


def _of_values(
    a: Sequence[Record], b: Sequence[Record], kind: str, values: Callable[[Record], Any]
) -> list[Quantity]:
    """Quantities with one value in each launch."""
    sides = [[values(record) for record in side] for side in (a, b)]
    rows = []
    for name in dict.fromkeys(name for side in sides for each in side for name in each):
        read = [
            [v for each in side if isinstance(v := each.get(name), int | float)] for side in sides
        ]
        one, other = (float(np.median(side)) if side else None for side in read)
        ratio, verdict = None, "-"
        if one and other and min(*read[0], *read[1]) > 0 and kind != "score":
            of_a, of_b = ([[value] for value in side] for side in read)
            ratio = hierarchical_bootstrap_ratio(of_a, of_b, np.random.default_rng(0))
        if ratio is not None or (one is not None and other is not None):
            verdict = _ends(read)
        rows.append(Quantity(name.replace("_", " "), kind, one, other, ratio, verdict))
    return rows


def _ends(read: Sequence[Sequence[float]]) -> str:
    return f"{len(read[0])} + {len(read[1])} launches" if min(map(len, read)) > 1 else _NO_INTERVAL
