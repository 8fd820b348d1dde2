"""Compare two runs of the same cases: is B faster or slower than A, by how much, and how sure?

A and B are records, such as those before and after a change. Cases are paired by their key. The
verdict on a pair combines chance and size:

    slower, faster   chance does not explain the difference (p of a permutation test of the launch
                     medians, corrected for the number of cases; interval of the ratio without 1),
                     the best estimate is beyond the threshold, and beyond what halves of one
                     side's own launches differ by
    same             the whole interval of the ratio is within the threshold
    inconclusive     neither; more launches may decide
    fails, mended    launches of B fail where those of A ran, or the other way round

The threshold is the change that one acts on. If it is not given, it is measured by A/A: the
launches of a case on one side are halved in every way. Each half over the other is a ratio where
nothing changed, and 95 % of these ratios are within the threshold. Halves have fewer launches than
A and B, so this errs on the safe side. The threshold is at least 2 %, because the place of code and
data in memory alone may change a time that much. It is at most 10 %, because nobody would call two
runs the same that differ by more.

A single launch on a side is never compared, because two processes may always differ.

Cases that ran on different machines, or did different work, are left out and named. The other
cases are compared.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..base import NotComparable, UsageError, group_by, plural
from ..instruments import CONFIDENCE, Record
from .run_settings import differing_knobs, settings_that_differ
from .table import hosts_of, listed
from .verdicts import (
    ComparedCase,
    Pair,
    Quantity,
    chances,
    judged,
    noise_threshold,
    percent_words,
    quantities_of,
    ratio_words,
)


@dataclass(frozen=True, slots=True)
class CaseDetail:
    """What a case was started with, and each of its quantities, on both sides."""

    label: str
    settings: tuple[tuple[str, str, str], ...]
    """The settings that differ: name, value of A, value of B."""
    quantities: tuple[Quantity, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How B compares with A."""

    metric: str
    threshold: float
    threshold_source: str
    rows: tuple[ComparedCase, ...]
    only_a: tuple[str, ...]
    """Labels of the cases that B lacks."""
    only_b: tuple[str, ...]
    caveats: tuple[str, ...]
    """Reasons against comparing some of the cases, which were compared anyway."""
    left_out: tuple[str, ...] = ()
    """The reasons why shared cases were not compared, with their labels."""
    unlike: int = 0
    """The number of shared cases that were not compared."""
    hosts: str = ""
    """A sentence if the sides ran on different hosts of one kind; otherwise empty."""
    details: tuple[CaseDetail, ...] = ()
    """The cases that were compared, quantity by quantity; empty if details were not asked for."""

    @property
    def regressed(self) -> bool:
        return any(row.verdict in ("slower", "fails") for row in self.rows)

    @property
    def undecided(self) -> list[str]:
        """Labels of the cases that may be slower by more than the threshold: the measurements do
        not exclude it."""
        limit = 1 + self.threshold
        return [
            row.label
            for row in self.rows
            if row.verdict == "inconclusive"
            and (row.ratio is None or row.ratio.high is None or row.ratio.high > limit)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self) | {"regressed": self.regressed, "sentence": self.sentence()}

    def sentence(self) -> str:
        """Count the verdicts and name the largest change in each direction."""
        parts = []
        for verdict in ("fails", "slower", "mended", "faster", "same", "inconclusive"):
            rows = [row for row in self.rows if row.verdict == verdict]
            part = f"{len(rows)} {verdict}"
            ratios = [(row.ratio, row.label) for row in rows if row.ratio is not None]
            if ratios and verdict in ("slower", "faster"):
                ratio, label = max(ratios, key=lambda each: abs(math.log(each[0].value)))
                part += (
                    f" ({'most: ' * (len(rows) > 1)}{label}, {ratio_words(ratio)} times as long)"
                )
            parts += [part] * bool(rows)
        parts += [f"{self.unlike} not comparable"] * bool(self.unlike)
        for side, labels in (("A", self.only_a), ("B", self.only_b)):
            parts += [f"{len(labels)} more only in {side}"] * bool(labels)
        sizes = {n for row in self.rows for n in (row.a_launches, row.b_launches)}
        launches = "-".join(str(n) for n in sorted({min(sizes), max(sizes)}))
        launches += " launch" if sizes == {1} else " launches"
        return (
            f"{plural(len(self.rows), 'case')}, B against A: {', '.join(parts)}; "
            f"{launches} a case and side, intervals of {100 * CONFIDENCE:g} %, "
            f"threshold {percent_words(self.threshold)} ({self.threshold_source})."
        )


def compare_records(
    a: Sequence[Record],
    b: Sequence[Record],
    *,
    threshold: float | None,
    anyway: bool,
    metric: str,
    detailed: bool = False,
) -> Comparison:
    """Give a verdict on every case that both sides have. Less time is better.

    Args:
        a: The launches of one side, in any order.
        b: The launches of the other side. Its times are divided by those of ``a``.
        threshold: The relative change that one acts on. None measures it by A/A.
        anyway: Compare cases, too, whose machine, schema, work or model differ.
        metric: The name in ``Record.samples_s`` of the seconds that are compared.
        detailed: Compare the settings and every quantity of each case, too.

    Returns:
        A row for each case that was compared, and the labels of the others with the reasons.

    Raises:
        NotComparable: The sides share no case, no shared case ran, or all were left out.
        UsageError: No launch measured ``metric``.
    """
    shared, only_a, only_b = pair_cases(a, b, metric)
    reasons = {pair.key: differences(pair) for pair in shared}
    unlike = reasons_with_labels(shared, reasons)
    compared = [pair for pair in shared if anyway or not reasons[pair.key]]
    if not compared:
        more = f" (and {len(unlike) - 1} more)" if len(unlike) > 1 else ""
        raise NotComparable(f"{unlike[0]}{more}; --anyway compares them anyway")
    check_measured(compared, metric)

    rng = np.random.default_rng(0)  # the same comparison of the same records, to the digit
    source = "as given"
    if threshold is None:
        threshold, source = noise_threshold(compared, rng)
    chance = chances(compared, rng)
    rows = [judged(p, p.ratio(rng), chance.get(p.key), threshold) for p in compared]
    return Comparison(
        metric,
        threshold,
        source,
        tuple(rows),
        only_a,
        only_b,
        caveats=unlike if anyway else (),
        left_out=() if anyway else unlike,
        unlike=len(shared) - len(compared),
        hosts=_other_hosts(compared),
        details=_details(zip(compared, rows, strict=True), metric, threshold, rng)
        if detailed
        else (),
    )


def _details(
    rows: Iterable[tuple[Pair, ComparedCase]],
    metric: str,
    threshold: float,
    rng: np.random.Generator,
) -> tuple[CaseDetail, ...]:
    return tuple(
        CaseDetail(
            pair.label,
            tuple(settings_that_differ(pair.a, pair.b)),
            tuple(quantities_of(pair, row, metric, threshold, rng)),
        )
        for pair, row in rows
    )


def _other_hosts(pairs: Sequence[Pair]) -> str:
    """Say that A and B ran on different hosts, which may cause a difference like a change does."""
    a, b = (hosts_of(r for pair in pairs for r in getattr(pair, side)) for side in "ab")
    if not (a and b) or a.keys() == b.keys():
        return ""
    return (
        f"A ran on {listed(sorted(a))}, B on {listed(sorted(b))}: a difference may come from "
        "the hosts, even if they are of one kind"
    )


def pair_cases(
    a: Sequence[Record], b: Sequence[Record], metric: str
) -> tuple[list[Pair], tuple[str, ...], tuple[str, ...]]:
    """Pair the cases of two sides.

    Returns:
        The cases of both sides, and the labels of those that A and that B has alone.

    Raises:
        NotComparable: They have none in common.
    """
    a_cases, b_cases = (
        group_by(sorted(side, key=lambda record: record.time), lambda record: record.key)
        for side in (a, b)
    )
    labels = _labels([*a, *b])
    shared = [
        Pair(key, labels[key], left, right, _times(left, metric), _times(right, metric))
        for key, left in a_cases.items()
        if (right := b_cases.get(key))
    ]
    if not shared:
        sides = []
        for name, cases in (("A", a_cases), ("B", b_cases)):
            scenarios = sorted({launches[0].scenario for launches in cases.values()})
            sides.append(
                f"{name} holds {plural(len(cases), 'case')} of {listed(scenarios or ['nothing'])}"
            )
        raise NotComparable(f"A and B have no case in common: {', '.join(sides)}")
    return (
        shared,
        tuple(labels[key] for key in a_cases if key not in b_cases),
        tuple(labels[key] for key in b_cases if key not in a_cases),
    )


def _labels(records: Sequence[Record]) -> dict[str, str]:
    """Label each case with the knobs whose values vary, or with its scenario if none varies."""
    telling = differing_knobs(records)
    return {
        record.key: " ".join(f"{k}={_text(record.case[k])}" for k in telling if k in record.case)
        or record.scenario
        for record in records
    }


def _times(records: Sequence[Record], metric: str) -> list[tuple[float, ...]]:
    # A time of 0 is below the tick of the clock: it has no ratio and counts as not measured.
    series = (record.samples_s.get(metric) for record in records if record.ok)
    return [samples for samples in series if samples and min(samples) > 0]


def check_measured(pairs: Sequence[Pair], metric: str) -> None:
    """Raise `NotComparable` if nothing ran, `UsageError` if no launch measured ``metric``."""
    ran = [record for pair in pairs for record in pair.a + pair.b if record.ok]
    if not ran:
        raise NotComparable("there is nothing to compare: no launch of a shared case succeeded")
    metrics = sorted({name for record in ran for name in record.samples_s})
    if metric not in metrics:
        raise UsageError(
            f"--metric {metric} was not measured; there is {listed(metrics or ['nothing'])}"
        )


def differences(pair: Pair) -> list[str]:
    """Say why the launches of a case did not time the same thing. Missing values are ignored."""
    launches = pair.a + pair.b
    machines = _texts(record.environment.get("machine_key") for record in launches)
    kinds = {
        f"the launches ran on {len(machines)} machines,": machines,
        "the records are of schemas": _texts(record.schema_version for record in launches),
        "the structure of the model is": _texts(r.facts.get("structure") for r in launches),
    }
    reasons = [f"{what} {listed(values)}" for what, values in kinds.items() if len(values) > 1]
    for unit in sorted({unit for record in launches for unit in record.work}):
        counts = _texts(record.work.get(unit) for record in launches)
        reasons += [f"a step is {listed(counts)} {unit}"] * (len(counts) > 1)
    return reasons


def reasons_with_labels(
    pairs: Sequence[Pair], reasons: Mapping[str, Sequence[str]]
) -> tuple[str, ...]:
    """Each reason once, with the labels of its cases."""
    each = ((reason, pair.label) for pair in pairs for reason in reasons[pair.key])
    by_reason = group_by(each, lambda one: one[0]).items()
    return tuple(f"{reason} ({', '.join(label for _, label in of)})" for reason, of in by_reason)


def _texts(values: Iterable[Any]) -> list[str]:
    return sorted({_text(value) for value in values if value is not None})


def _text(value: Any) -> str:
    """A knob's value as one types it: ``256``, ``true``, ``float32``."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value)
