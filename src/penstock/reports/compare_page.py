"""A comparison as a report: its cases, and tables of its quantities."""

from __future__ import annotations

from collections.abc import Sequence

from ..base import format_seconds, plural
from .compare import CaseDetail, Comparison
from .content import Chapter, Report
from .table import Section, or_dash
from .verdicts import ALIKE, HEAD, ONE_RUN, ComparedCase, ratio_words

_HEAD = ("case", "A", "B", "B / A", "launches", "verdict")
_ORDER = ("fails", "slower", "mended", "faster", "inconclusive", "same")


def detail_sections(comparison: Comparison) -> list[Section]:
    """The settings that differ and the quantities of each case that was compared."""
    sections = []
    for detail in comparison.details:
        several = len(comparison.details) > 1
        name = f": {detail.label}" if several else ""
        if detail.settings:
            changed = [("setting", "A", "B"), *detail.settings]
            sections.append(Section(f"Settings that differ{name}", changed))
        table = [HEAD, *(row.line() for row in detail.quantities)]
        sections.append(Section(f"Phase by phase{name}", table, _words(detail)))
    return sections


def _words(detail: CaseDetail) -> list[str]:
    """Sentences on the intervals and on the phase that changed most."""
    lines = []
    moved = [
        q
        for q in detail.quantities
        if q.kind == "seconds" and q.ratio is not None and not q.name.endswith(("step", "waits"))
    ]
    if moved:
        most = max(moved, key=lambda q: abs((q.b or 0.0) - (q.a or 0.0)))
        assert most.a is not None and most.b is not None and most.ratio is not None
        by = f"{format_seconds(abs(most.b - most.a))} {'more' if most.b > most.a else 'less'}"
        doubt = "" if most.ratio.excludes(1) else ", which may be chance"
        doubt = f", {ALIKE}" if most.verdict == ALIKE else doubt
        lines.append(
            f"{most.name} changed most: {by}, {ratio_words(most.ratio)} times as long{doubt}."
        )
    if any(q.verdict in (ONE_RUN, ALIKE) for q in detail.quantities):
        lines.append(
            "The intervals are over the steps of these two runs: with one launch on a side, it "
            "says nothing about another launch."
        )
    if not detail.settings:
        lines.append("No setting differs.")
    return lines


def report_of_comparison(comparison: Comparison, source: str, gate: str = "") -> Report:
    """A comparison as the report of a page.

    Args:
        comparison: How B compares with A.
        source: What A and B are, in words.
        gate: The sentence of a gate; empty if there is none.

    Returns:
        The report: the verdict, then the cases and the quantities of each.
    """
    cases = _cases(comparison)
    about = [f"{comparison.hosts}."] * bool(comparison.hosts)
    verdict = [gate] * bool(gate) + [comparison.sentence()]
    chapter = Chapter("Comparison", [cases, *detail_sections(comparison)])
    return Report(source, verdict, about, [chapter])


def _cases(comparison: Comparison) -> Section:
    """The table of the cases, those that changed first, and sentences: the reason of each that
    changed, and what was not compared."""
    rows = sorted(comparison.rows, key=lambda row: _ORDER.index(row.verdict))
    shown = [row for row in rows if row.verdict != "same"]
    lines = [f"{row.label}: {row.verdict}: {row.reason}." for row in shown]
    lines += [f"Not compared: {reason}." for reason in comparison.left_out]
    for side, labels in (("A", comparison.only_a), ("B", comparison.only_b)):
        lines += [f"Only in {side}: {'; '.join(labels)}."] * bool(labels)
    lines += [f"Compared although not comparable: {each}." for each in comparison.caveats]
    return Section("Cases", [_HEAD, *map(_line, rows)], lines)


def _line(row: ComparedCase) -> tuple[str, ...]:
    return (
        row.label,
        or_dash(row.a_seconds, format_seconds),
        or_dash(row.b_seconds, format_seconds),
        "-" if row.ratio is None else ratio_words(row.ratio),
        f"{row.a_launches} + {row.b_launches}",
        row.verdict,
    )


def gate_sentence(comparison: Comparison, undecided: Sequence[str]) -> str:
    """The result of a gate, in a sentence.

    Args:
        comparison: How B compares with A.
        undecided: Labels of the cases that may be slower by more than the limit, or may not.

    Returns:
        The sentence.
    """
    limit = f"{100 * comparison.threshold:g} %"
    if comparison.regressed:
        slower = [row.label for row in comparison.rows if row.verdict in ("slower", "fails")]
        cases = plural(len(slower), "case")
        return f"The gate fails: {cases} slower by more than {limit}, or failing."
    if undecided:
        return (
            f"The gate is undecided: {len(undecided)} of {plural(len(comparison.rows), 'case')} "
            f"may be slower by more than {limit}; run more launches."
        )
    return f"The gate holds: no case of {len(comparison.rows)} is slower by more than {limit}."
