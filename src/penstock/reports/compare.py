"""Comparison: is B faster or slower than A, by how much, and how sure is that?

A and B are records of two runs of the same cases, such as before and after a change. Cases are
paired by their key. The verdict on a pair takes two things together, chance and size:

    slower, faster   chance does not explain the difference (p of a permutation test of the launch
                     medians, corrected for the number of cases; interval of the ratio without 1),
                     and the best estimate is beyond the threshold
    same             the whole interval of the ratio is within the threshold
    inconclusive     neither; more launches may tell
    fails, mended    launches of B fail where those of A ran, or the other way round

The threshold is the change that one acts on. Unless given, it is measured by A/A: every way to
halve the launches of a case on one side gives a ratio where nothing changed, and 95 % of those are
within the threshold. Halves have fewer launches than A and B, so this errs on the safe side. It is
2 % at least, because the place of code and data in memory alone may do that much, and 10 % at most,
because nobody would call two runs that far apart the same.

One launch on a side is never compared: what differs between two processes may be just that.

Cases that ran on unlike machines, or did unlike work, are left out and named, and the others are
compared.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from ..base import NotComparable, UsageError, significant
from ..instruments import (
    FAILED,
    Interval,
    Record,
    benjamini_hochberg,
    case_key,
    hierarchical_bootstrap_ratio,
    launch_medians,
    permutation_test,
    relabellings,
)

Verdict = Literal["faster", "slower", "same", "inconclusive", "fails", "mended"]

_DRAWS = 2000
_LEAST, _MOST = 0.02, 0.10
"""Bounds of a threshold that is measured."""


@dataclass(frozen=True, slots=True)
class Row:
    """One case on both sides."""

    label: str
    """The knobs in which it differs from other cases."""
    key: str
    case: dict[str, Any]
    a_seconds: float | None
    """Median of the launch medians."""
    b_seconds: float | None
    a_launches: int
    """Those that ran."""
    b_launches: int
    ratio: Interval | None
    """Time of B over time of A."""
    p: float | None
    """That chance makes such a difference, corrected for the number of cases."""
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """What B is to A."""

    metric: str
    confidence: float
    threshold: float
    threshold_source: str
    rows: tuple[Row, ...]
    only_a: tuple[str, ...]
    """Labels of the cases that B lacks."""
    only_b: tuple[str, ...]
    caveats: tuple[str, ...]
    """Why cases should not be compared, where that was asked for all the same."""
    left_out: tuple[str, ...] = ()
    """Why cases of both were not compared, with their labels."""
    unlike: int = 0
    """Cases of both that were not compared."""

    @property
    def regressed(self) -> bool:
        return any(row.verdict in ("slower", "fails") for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"regressed": self.regressed, "sentence": self.sentence()}

    def sentence(self) -> str:
        """The verdicts, counted, with the largest change of each direction."""
        parts = []
        for verdict in ("fails", "slower", "mended", "faster", "same", "inconclusive"):
            rows = [row for row in self.rows if row.verdict == verdict]
            part = f"{len(rows)} {verdict}"
            ratios = [(row.ratio, row.label) for row in rows if row.ratio is not None]
            if ratios and verdict in ("slower", "faster"):
                ratio, label = max(ratios, key=lambda found: abs(math.log(found[0].value)))
                part += f" ({'most: ' * (len(rows) > 1)}{label}, {_ratio(ratio)} times as long)"
            parts += [part] * bool(rows)
        parts += [f"{self.unlike} not comparable"] * bool(self.unlike)
        for side, labels in (("A", self.only_a), ("B", self.only_b)):
            parts += [f"{len(labels)} more only in {side}"] * bool(labels)
        sizes = {n for row in self.rows for n in (row.a_launches, row.b_launches)}
        launches = "-".join(str(n) for n in sorted({min(sizes), max(sizes)}))
        return (
            f"{_count(self.rows, 'case')}, B against A: {', '.join(parts)}; "
            f"{launches} launches a case and side, intervals of {100 * self.confidence:g} %, "
            f"threshold {_percent(self.threshold)} ({self.threshold_source})."
        )


def compare_records(
    a: Sequence[Record],
    b: Sequence[Record],
    *,
    threshold: float | None,
    confidence: float,
    anyway: bool,
    metric: str,
    seed: int,
) -> Comparison:
    """The verdict on every case that both have; the less ``samples_s[metric]``, the better.

    A case of which machine, schema, counted work or the model's structure differ is left out,
    unless ``anyway``. Raises `NotComparable` where they share no case, nothing ran, or all were
    left out.
    """
    shared, only_a, only_b = _paired(a, b, metric)
    reasons = {pair.key: _differences(pair) for pair in shared}
    told = _told(shared, reasons)
    pairs = shared if anyway else [pair for pair in shared if not reasons[pair.key]]
    if not pairs:
        more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
        raise NotComparable(f"{told[0]}{more}; --anyway compares all the same")
    _something_ran(pairs, metric)

    rng = np.random.default_rng(seed)
    source = "as given"
    if threshold is None:
        threshold, source = _noise(pairs, rng)
    tested = [pair for pair in pairs if _smallest_p(pair) <= 1 - confidence]
    p = benjamini_hochberg(
        permutation_test(
            [(launch_medians(x.a_times), launch_medians(x.b_times)) for x in tested], rng
        )
    )
    chance = {pair.key: float(value) for pair, value in zip(tested, p, strict=True)}
    rows = []
    for pair in pairs:
        ratio = None
        if pair.a_times and pair.b_times:
            ratio = hierarchical_bootstrap_ratio(
                pair.a_times, pair.b_times, _DRAWS, rng, confidence
            )
        verdict, reason = _judge(pair, ratio, chance.get(pair.key), threshold, confidence)
        rows.append(
            Row(
                label=pair.label,
                key=pair.key,
                case=pair.a[0].case,
                a_seconds=_median(pair.a_times),
                b_seconds=_median(pair.b_times),
                a_launches=len(pair.a_times),
                b_launches=len(pair.b_times),
                ratio=ratio,
                p=chance.get(pair.key),
                verdict=verdict,
                reason=reason,
            )
        )
    return Comparison(
        metric,
        confidence,
        threshold,
        source,
        tuple(rows),
        only_a,
        only_b,
        caveats=told if anyway else (),
        left_out=() if anyway else told,
        unlike=len(shared) - len(pairs),
    )


def select_records(records: Sequence[Record], settings: Mapping[str, str]) -> list[Record]:
    """The records with these knobs, as cases without them: two selections of one sweep pair up.

    Values are compared as text: ``{"amp": "true", "tile": "256"}``.
    """
    chosen = []
    for record in records:
        case = dict(record.case)
        if all(k in case and _text(case.pop(k)) == value for k, value in settings.items()):
            key = case_key(record.scenario, case)
            chosen.append(record.model_copy(update={"case": case, "key": key}))
    return chosen


@dataclass(frozen=True)
class _Pair:
    """All launches of one case on both sides, and the times of those that ran."""

    key: str
    label: str
    a: list[Record]
    b: list[Record]
    a_times: list[tuple[float, ...]]
    b_times: list[tuple[float, ...]]


def _paired(
    a: Sequence[Record], b: Sequence[Record], metric: str
) -> tuple[list[_Pair], tuple[str, ...], tuple[str, ...]]:
    """The cases of both, and the labels of those of A alone and of B alone."""
    a_cases, b_cases = _by_case(a), _by_case(b)
    labels = _labels([*a, *b])
    pairs = [
        _Pair(
            key,
            labels[key],
            left,
            b_cases[key],
            _times(left, metric),
            _times(b_cases[key], metric),
        )
        for key, left in a_cases.items()
        if key in b_cases
    ]
    if not pairs:
        told = []
        for name, cases in (("A", a_cases), ("B", b_cases)):
            scenarios = {launches[0].scenario for launches in cases.values()}
            told.append(f"{name} holds {_count(cases, 'case')} of {_listed(scenarios)}")
        raise NotComparable(f"A and B have no case in common: {', '.join(told)}")
    only_a = tuple(labels[key] for key in a_cases if key not in b_cases)
    only_b = tuple(labels[key] for key in b_cases if key not in a_cases)
    return pairs, only_a, only_b


def _by_case(records: Sequence[Record]) -> dict[str, list[Record]]:
    cases: dict[str, list[Record]] = {}
    for record in records:
        cases.setdefault(record.key, []).append(record)
    return cases


def _labels(records: Sequence[Record]) -> dict[str, str]:
    """Each case by the knobs in which not all are equal, by its scenario where there are none."""
    values: dict[str, set[str]] = {}
    for record in records:
        for knob, value in record.case.items():
            values.setdefault(knob, set()).add(_text(value))
    telling = [knob for knob, seen in values.items() if len(seen) > 1]
    return {
        record.key: " ".join(f"{k}={_text(record.case[k])}" for k in telling if k in record.case)
        or record.scenario
        for record in records
    }


def _times(records: Sequence[Record], metric: str) -> list[tuple[float, ...]]:
    # A time of 0, below the tick of the clock, has no ratio: it was not measured.
    found = (record.samples_s.get(metric) for record in records if record.ok)
    return [samples for samples in found if samples and min(samples) > 0]


def _something_ran(pairs: Sequence[_Pair], metric: str) -> None:
    ran = [record for pair in pairs for record in pair.a + pair.b if record.ok]
    if not ran:
        raise NotComparable("there is nothing to compare: no launch of a case that both have ran")
    metrics = {name for record in ran for name in record.samples_s}
    if metric not in metrics:
        raise UsageError(f"--metric {metric} was not measured; there is {_listed(metrics)}")


def _differences(pair: _Pair) -> list[str]:
    """What makes the launches of a case times of different things. What is not known does not
    differ."""
    launches = pair.a + pair.b
    found = []
    machines = _known(record.environment.get("machine_key") for record in launches)
    if len(machines) > 1:
        found.append(f"the launches ran on {len(machines)} machines, {_listed(machines)}")
    schemas = _known(record.schema_version for record in launches)
    if len(schemas) > 1:
        found.append(f"the records are of schemas {_listed(schemas)}")
    structures = _known(record.facts.get("structure") for record in launches)
    if len(structures) > 1:
        found.append(f"the structure of the model is {_listed(structures)}")
    for unit in sorted({unit for record in launches for unit in record.work}):
        counts = _known(record.work.get(unit) for record in launches)
        if len(counts) > 1:
            found.append(f"a step is {_listed(counts)} {unit}")
    return found


def _told(pairs: Sequence[_Pair], reasons: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Each reason once, with the labels of its cases."""
    labels: dict[str, list[str]] = {}
    for pair in pairs:
        for reason in reasons[pair.key]:
            labels.setdefault(reason, []).append(pair.label)
    return tuple(f"{reason} ({', '.join(own)})" for reason, own in labels.items())


def _known(values: Iterable[Any]) -> set[str]:
    return {_text(value) for value in values if value is not None}


def _noise(pairs: Sequence[_Pair], rng: np.random.Generator) -> tuple[float, str]:
    """The threshold by A/A, and where it comes from."""
    changes = []
    for launches in (side for pair in pairs for side in (pair.a_times, pair.b_times)):
        if len(launches) >= 4:
            half = len(launches) // 2
            halves = relabellings(half, len(launches) - half, rng)
            logs = np.broadcast_to(np.log(launch_medians(launches)), halves.shape)
            one, other = (
                np.median(logs[side].reshape(len(halves), -1), axis=1) for side in (halves, ~halves)
            )
            changes.append(np.abs(one - other))
    if not changes:
        return _LEAST, "the least; too few launches to measure noise"
    noise = float(np.expm1(np.quantile(np.concatenate(changes), 0.95)))
    measured = f"halves of the same launches differ by {_percent(noise)}"
    if noise < _LEAST:
        return _LEAST, f"the least; {measured}"
    return (_MOST, f"the most; {measured}") if noise > _MOST else (noise, measured)


def _smallest_p(pair: _Pair) -> float:
    """What so many launches can show at best; one on a side shows nothing."""
    n, m = len(pair.a_times), len(pair.b_times)
    return 2 / math.comb(n + m, n) if min(n, m) > 1 else 1.0


def _judge(
    pair: _Pair, ratio: Interval | None, p: float | None, threshold: float, confidence: float
) -> tuple[Verdict, str]:
    """A verdict and the sentence that gives its reason."""
    a_failed, b_failed = (_failures(side) for side in (pair.a, pair.b))
    n, m = len(pair.a_times), len(pair.b_times)
    if b_failed and (not a_failed or (n and not m)):
        return "fails", f"A ran, B: {b_failed}"
    if a_failed and (not b_failed or (m and not n)):
        return "mended", f"B ran, A: {a_failed}"
    notes = "".join(
        f"; {name}: {told}"
        for name, told in (
            ("A", a_failed),
            ("B", b_failed),
            ("A", _unsettled(pair.a)),
            ("B", _unsettled(pair.b)),
        )
        if told
    )
    if ratio is None:
        if a_failed == b_failed != "":
            return "same", f"both: {a_failed}"
        return "inconclusive", f"{n} launches of A and {m} of B measured this{notes}"
    if min(n, m) == 1:
        return "inconclusive", f"one launch is never compared (A has {n}, B has {m}){notes}"
    if p is None:
        enough = next(k for k in range(2, 99) if 2 / math.comb(2 * k, k) <= 1 - confidence)
        return "inconclusive", (
            f"{n} launches of A and {m} of B cannot tell at {100 * confidence:g} %; "
            f"{enough} of each can{notes}"
        )
    assert ratio.low is not None
    assert ratio.high is not None
    told = f"B takes {_ratio(ratio)} times as long, p {significant(p, 2)}"
    limit = 1 + threshold
    if 1 / limit <= ratio.low <= ratio.high <= limit:
        return "same", f"{told}; all of it within {_percent(threshold)}{notes}"
    sure = p <= 1 - confidence and ratio.excludes(1)
    if sure and not 1 / limit <= ratio.value <= limit:
        verdict: Verdict = "slower" if ratio.value > 1 else "faster"
        return verdict, f"{told}; beyond {_percent(threshold)}{notes}"
    if sure:
        return "inconclusive", f"{told}; it differs, perhaps within {_percent(threshold)}{notes}"
    return "inconclusive", f"{told}; chance may do that{notes}"


def _failures(launches: Sequence[Record]) -> str:
    """``2 of 5 launches crashed``; empty where all ran."""
    counts = Counter(record.status for record in launches if not record.ok)
    return ", ".join(
        f"{count} of {_count(launches, 'launch', 'launches')} {FAILED[status]}"
        for status, count in sorted(counts.items())
    )


def _unsettled(launches: Sequence[Record]) -> str:
    count = sum(record.ok and record.warmup.settled is False for record in launches)
    return f"{count} of {_count(launches, 'launch', 'launches')} never settled" if count else ""


def _median(launches: Sequence[tuple[float, ...]]) -> float | None:
    return float(np.median(launch_medians(launches))) if launches else None


def _ratio(ratio: Interval) -> str:
    if ratio.low is None or ratio.high is None:
        return significant(ratio.value, 4)
    low, high = significant(ratio.low, 4), significant(ratio.high, 4)
    return f"{significant(ratio.value, 4)} [{low} to {high}]"


def _percent(part: float) -> str:
    return f"{significant(100 * part, 2)} %"


def _count(things: Sized, one: str, many: str = "") -> str:
    return f"{len(things)} {one if len(things) == 1 else many or one + 's'}"


def _listed(words: Iterable[str]) -> str:
    return " and ".join(sorted(words)) or "nothing"


def _text(value: Any) -> str:
    """A knob's value as one types it: ``256``, ``true``, ``float32``."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value)
