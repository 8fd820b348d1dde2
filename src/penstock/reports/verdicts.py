"""Verdicts on the cases of two sides, chance and size taken together; and their quantities, one by
one: phases, waits, rates, memory and scores.

If both sides have several launches, a phase gets a verdict as a case does. If a side has one
launch, the interval comes from its steps. It holds for these runs and says nothing about another
launch, so there is no verdict. A quantity with one value in each launch has no interval.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..base import format_bytes, format_seconds, plural, significant
from ..instruments import (
    CONFIDENCE,
    FAILED,
    Interval,
    Record,
    benjamini_hochberg,
    differences_of_halves,
    hierarchical_bootstrap_ratio,
    launch_medians,
    own_noise,
    permutation_test,
)
from .table import or_dash

Verdict = Literal["faster", "slower", "same", "inconclusive", "fails", "mended"]

ALIKE = "not distinguishable: A or B differs from itself as much"
"""The reason where halves of one side differ by more than the sides; see `own_noise`."""
_RISK = 1 - CONFIDENCE
_LEAST, _MOST = 0.02, 0.10
"""Bounds of a threshold that is measured."""


@dataclass(frozen=True, slots=True)
class ComparedCase:
    """One case on both sides."""

    label: str
    """The knobs in which it differs from other cases."""
    key: str
    case: dict[str, Any]
    a_seconds: float | None
    """Median of the launch medians."""
    b_seconds: float | None
    a_launches: int
    """The number of launches that ran."""
    b_launches: int
    ratio: Interval | None
    """Time of B over time of A."""
    p: float | None
    """The probability that chance makes such a difference, corrected for the number of cases."""
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class Pair:
    """All launches of one case on both sides, and the times of those that ran."""

    key: str
    label: str
    """The knobs in which it differs from other cases."""
    a: list[Record]
    b: list[Record]
    a_times: list[tuple[float, ...]]
    """The samples of each launch of A that ran."""
    b_times: list[tuple[float, ...]]

    def ratio(self, rng: np.random.Generator) -> Interval | None:
        """The time of B over that of A; None if one side was not measured."""
        if not (self.a_times and self.b_times):
            return None
        return hierarchical_bootstrap_ratio(self.a_times, self.b_times, rng)


def judged(pair: Pair, ratio: Interval | None, p: float | None, threshold: float) -> ComparedCase:
    """Judge a pair by the ratio of its times and the probability ``p`` of chance. ``threshold`` is
    the change that one acts on."""
    verdict, reason = _verdict_of(pair, ratio, p, threshold)
    return ComparedCase(
        label=pair.label,
        key=pair.key,
        case=pair.a[0].case,
        a_seconds=_median(pair.a_times),
        b_seconds=_median(pair.b_times),
        a_launches=len(pair.a_times),
        b_launches=len(pair.b_times),
        ratio=ratio,
        p=p,
        verdict=verdict,
        reason=reason,
    )


def _verdict_of(
    pair: Pair, ratio: Interval | None, p: float | None, threshold: float
) -> tuple[Verdict, str]:
    """A verdict and the sentence that gives its reason."""
    a_failed, b_failed = (_failures(side) for side in (pair.a, pair.b))
    n, m = len(pair.a_times), len(pair.b_times)
    if b_failed and (not a_failed or (n and not m)):
        return "fails", f"A ran, B: {b_failed}"
    if a_failed and (not b_failed or (m and not n)):
        return "mended", f"B ran, A: {a_failed}"
    notes = _notes(A=a_failed, B=b_failed) + _notes(A=_unsettled(pair.a), B=_unsettled(pair.b))
    if ratio is None:
        if a_failed == b_failed != "":
            return "same", f"both: {a_failed}"
        return "inconclusive", f"{plural(n, 'launch')} of A and {m} of B measured this{notes}"
    if min(n, m) == 1:
        return "inconclusive", f"one launch is never compared (A has {n}, B has {m}){notes}"
    if p is None:
        enough = next(k for k in range(2, 99) if 2 / math.comb(2 * k, k) <= _RISK)
        return "inconclusive", (
            f"{n} launches of A and {m} of B cannot tell at {100 * CONFIDENCE:g} %; "
            f"{enough} of each can{notes}"
        )
    verdict, why = _by_size(ratio, p, threshold)
    if verdict in ("slower", "faster"):
        noise = own_noise(pair.a_times, pair.b_times)
        if abs(math.log(ratio.value)) <= math.log1p(noise):
            verdict, why = "inconclusive", f"{ALIKE} (up to {percent_words(noise)})"
    chance = f"B takes {ratio_words(ratio)} times as long, p {significant(p, 2)}"
    return verdict, f"{chance}; {why}{notes}"


def _by_size(ratio: Interval, p: float, threshold: float) -> tuple[Verdict, str]:
    """The verdict on a ratio whose ``p`` is known, and the end of its sentence."""
    assert ratio.low is not None and ratio.high is not None
    limit, percent = 1 + threshold, percent_words(threshold)
    if 1 / limit <= ratio.low <= ratio.high <= limit:
        return "same", f"all of it within {percent}"
    if not (p <= _RISK and ratio.excludes(1)):
        return "inconclusive", "this may be chance"
    if 1 / limit <= ratio.value <= limit:
        return "inconclusive", f"it differs, perhaps within {percent}"
    return "slower" if ratio.value > 1 else "faster", f"beyond {percent}"


def chances(pairs: Sequence[Pair], rng: np.random.Generator) -> dict[str, float]:
    """The probability of chance for each case, by key, corrected for the number of cases.

    Cases with too few launches for any verdict are left out.
    """
    tested = [pair for pair in pairs if _smallest_p(pair) <= _RISK]
    medians = [(launch_medians(pair.a_times), launch_medians(pair.b_times)) for pair in tested]
    p = benjamini_hochberg(permutation_test(medians, rng))
    return {pair.key: float(value) for pair, value in zip(tested, p, strict=True)}


def noise_threshold(pairs: Sequence[Pair], rng: np.random.Generator) -> tuple[float, str]:
    """The threshold from A/A, and words for its source."""
    sides = (side for pair in pairs for side in (pair.a_times, pair.b_times))
    changes = [differences_of_halves(launches, rng) for launches in sides if len(launches) >= 4]
    if not changes:
        return _LEAST, "the least; too few launches to measure noise"
    noise = float(np.expm1(np.quantile(np.concatenate(changes), 0.95)))
    measured = f"halves of the same launches differ by {percent_words(noise)}"
    if noise < _LEAST:
        return _LEAST, f"the least; {measured}"
    return (_MOST, f"the most; {measured}") if noise > _MOST else (noise, measured)


def _smallest_p(pair: Pair) -> float:
    """The smallest p that so many launches can reach. One launch on a side shows nothing."""
    n, m = len(pair.a_times), len(pair.b_times)
    return 2 / math.comb(n + m, n) if min(n, m) > 1 else 1.0


def _notes(**sides: str) -> str:
    return "".join(f"; {name}: {note}" for name, note in sides.items() if note)


def _failures(launches: Sequence[Record]) -> str:
    """Failures in words, ``2 of 5 launches crashed``; empty if all launches ran."""
    counts = Counter(record.status for record in launches if not record.ok)
    return ", ".join(
        f"{count} of {plural(len(launches), 'launch')} {FAILED[status]}"
        for status, count in sorted(counts.items())
    )


def _unsettled(launches: Sequence[Record]) -> str:
    count = sum(record.ok and record.warmup.settled is False for record in launches)
    return f"{count} of {plural(len(launches), 'launch')} never settled" if count else ""


def _median(launches: Sequence[tuple[float, ...]]) -> float | None:
    return float(np.median(launch_medians(launches))) if launches else None


def ratio_words(ratio: Interval) -> str:
    if ratio.low is None or ratio.high is None:
        return significant(ratio.value, 4)
    low, high = significant(ratio.low, 4), significant(ratio.high, 4)
    return f"{significant(ratio.value, 4)} [{low} to {high}]"


def percent_words(part: float) -> str:
    return f"{significant(100 * part, 2)} %"


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
    """A verdict of `judged`, or why there is none."""

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
    pair: Pair, row: ComparedCase, metric: str, threshold: float, rng: np.random.Generator
) -> list[Quantity]:
    """Every quantity that a side of a case has.

    Args:
        pair: The launches of a case on both sides.
        row: The verdict on the case.
        metric: The phase that the verdict is on.
        threshold: The change that one acts on.
        rng: The source of random numbers.

    Returns:
        The phases first, then rates, memory and scores.
    """
    a, b = ([record for record in side if record.ok] for side in (pair.a, pair.b))
    names = dict.fromkeys(name for record in (*a, *b) for name in record.samples_s)
    rows = [_of_phase(pair, name, threshold, rng) for name in names]
    if row.ratio is not None and row.ratio.low is not None:
        # Resampled once: one quantity has one ratio, and one verdict.
        said = Quantity(metric, "seconds", row.a_seconds, row.b_seconds, row.ratio, row.verdict)
        rows = [said if each.name == metric else each for each in rows]
    rows += _of_values(a, b, "rate", lambda record: record.facts.get("rates") or {})
    rows += _of_values(a, b, "score", lambda record: record.facts.get("scores") or {})
    rows += _of_values(a, b, "bytes", lambda record: record.memory.model_dump())
    return [row for row in rows if row.a or row.b]


def _of_phase(pair: Pair, name: str, threshold: float, rng: np.random.Generator) -> Quantity:
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
        verdict = judged(phase, ratio, chance.get(pair.key), threshold).verdict
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
    a, b = map(len, read)
    return f"{a} + {plural(b, 'launch')}" if min(a, b) > 1 else _NO_INTERVAL
