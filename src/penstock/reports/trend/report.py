"""A trend in sentences: each step with its commits, its size and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...base import format_seconds, plural, significant
from ...instruments import LevelStep, Record, fewest_values, steps_of
from ..table import Section
from ..verdicts import percent_words, ratio_words
from ..words import listed
from .series import Point, Series, changed_libraries, series_of


@dataclass(frozen=True)
class Trend:
    """A series and its steps."""

    series: Series
    steps: tuple[LevelStep, ...]
    rate: float
    """Rate of false alarms of the search for steps."""

    @property
    def too_short(self) -> bool:
        return len(self.series.points) < fewest_values(self.rate)

    def around(self, step: LevelStep) -> tuple[Point, Point]:
        """The last point that surely has the old level, and the first that surely has the new."""
        return self.series.points[step.first - 1], self.series.points[step.last]

    def ends(self, step: LevelStep) -> tuple[Point, Point]:
        """The points on both sides of a step, by the best estimate."""
        return self.series.points[step.at - 1], self.series.points[step.at]


@dataclass(frozen=True)
class WatchedCases:
    """The trends of all cases, and the limit of a gate."""

    trends: tuple[Trend, ...]
    rate: float
    metric: str
    least: float
    """Smallest relative change that counts as a step."""

    def slower(self, since: str | None = None) -> list[tuple[Trend, LevelStep]]:
        """The steps at which a case became slower.

        Args:
            since: The beginning of a hash: only steps after this commit count. None for all.

        Returns:
            The steps, in the order of the series.
        """
        steps = [(trend, step) for trend in self.trends for step in trend.steps]
        return [
            (trend, step)
            for trend, step in steps
            if step.ratio.value > 1 and step.at > trend.series.place_of(since)
        ]

    @property
    def undecided(self) -> list[Trend]:
        """The series in which no step could be found."""
        return [trend for trend in self.trends if trend.too_short]


def watch(
    records: Sequence[Record],
    *,
    metric: str,
    rate: float,
    least: float,
    seed: int,
    folder: Path | None = None,
) -> WatchedCases:
    """Find the steps in the cases of launches.

    Args:
        records: Launches of any cases, machines and commits.
        metric: The name of the seconds that are watched.
        rate: The share of false alarms of all series together.
        least: The least change that is a step, 0.02 for 2 %.
        seed: The seed of the random orders.
        folder: A folder of the repository that knows the commits; None for the current one.

    Returns:
        A trend for each case on each machine.

    Raises:
        UsageError: No launch measured ``metric``.
    """
    series = series_of(records, metric, folder)
    # Correct (Bonferroni) for the number of series that are long enough to show a step.
    long = [one for one in series if len(one.points) >= fewest_values(rate)]
    each = rate / max(1, len(long))
    rng = np.random.default_rng(seed)
    trends = []
    for one in series:
        steps = steps_of([point.samples for point in one.points], each, rng)
        trends.append(Trend(one, tuple(s for s in steps if _size(s) >= least), each))
    return WatchedCases(tuple(trends), rate, metric, least)


def _size(step: LevelStep) -> float:
    """The size of a step, upward or downward."""
    return max(step.ratio.value, 1 / step.ratio.value) - 1


def trend_sections(watched: WatchedCases) -> list[Section]:
    """A section for each series: its points, and a sentence for each step."""
    machines = {trend.series.machine for trend in watched.trends}
    sections = []
    for trend in watched.trends:
        on = f", machine {trend.series.machine or 'not known'}" if len(machines) > 1 else ""
        table = [("commit", "day", watched.metric, "launches", "")]
        new = {step.at: step for step in trend.steps}
        for number, point in enumerate(trend.series.points):
            mark = f"<- {ratio_words(new[number].ratio)}" if number in new else ""
            level = format_seconds(point.level)
            table.append((point.name, point.day, level, str(len(point.samples)), mark))
        sections.append(Section(trend.series.label + on, table, step_lines(trend)))
    return sections


def step_lines(trend: Trend) -> list[str]:
    """A sentence for each step, or on why there is none."""
    series, number = trend.series, len(trend.series.points)
    of = f"{plural(number, 'commit')}, {plural(series.launches, 'launch')}"
    if trend.too_short:
        least = fewest_values(trend.rate)
        why = f"{of}, and a step needs at least {least} commits at {percent_words(trend.rate)}"
        return [f"Too short for steps: {why} false alarms; use penstock compare for two commits."]
    lines = [_step_line(trend, step) for step in trend.steps]
    if not lines:
        lines.append(f"No step in {of} ({percent_words(trend.rate)} false alarms).")
    if not series.by_ancestry:
        lines.append("The order is that of the launches: git does not know their commits here.")
    return lines


def _step_line(trend: Trend, step: LevelStep) -> str:
    before, after = trend.ends(step)
    change = "slower" if step.ratio.value > 1 else "faster"
    chance = "p below 0.001" if step.p < 1e-3 else f"p {significant(step.p, 2)}"
    line = (
        f"{change.capitalize()} from {before.name} to {after.name}: {ratio_words(step.ratio)} "
        f"times as long, {format_seconds(before.level)} to {format_seconds(after.level)} "
        f"[{plural(len(trend.series.points), 'commit')}, {chance}]"
    )
    if before.commit and before.commit == after.commit:
        return f"{line}; it is one commit on two days: the machine changed and not the code."
    count = trend.series.between(before, after)
    if count is not None and count > 1:
        line += f"; {count} commits lie in that range, of which the last was measured"
    if (step.first, step.last) != (step.at, step.at):
        first, last = trend.around(step)
        line += f"; with 95 % it lies from {first.name} to {last.name}"
    if others := changed_libraries(before.libraries, after.libraries):
        line += f"; libraries changed there, too: {listed(others)}"
    return f"{line}."


def trend_summary(watched: WatchedCases) -> str:
    """All series in one sentence."""
    steps = [step for trend in watched.trends for step in trend.steps]
    slower = sum(step.ratio.value > 1 for step in steps)
    short = len(watched.undecided)
    words = [f"{slower} slower, {len(steps) - slower} faster"]
    words += [f"{short} too short to show one"] * bool(short)
    return (
        f"{len(watched.trends)} series: {plural(len(steps), 'step')} of "
        f"{percent_words(watched.least)} or more, {', '.join(words)}; "
        f"{percent_words(watched.rate)} false alarms in all series together."
    )


def trend_document(watched: WatchedCases) -> dict[str, Any]:
    """Plain values, for JSON."""
    return {
        "format": "penstock-trend",
        "version": 1,
        "metric": watched.metric,
        "rate": watched.rate,
        "summary": trend_summary(watched),
        "series": [
            {
                "label": trend.series.label,
                "machine": trend.series.machine,
                "by_ancestry": trend.series.by_ancestry,
                "points": [
                    {"commit": p.commit, "day": p.day, "samples_s": p.samples}
                    for p in trend.series.points
                ],
                "steps": [
                    {
                        "from": trend.ends(step)[0].commit,
                        "to": trend.ends(step)[1].commit,
                        "surely_from": trend.around(step)[0].commit,
                        "surely_to": trend.around(step)[1].commit,
                        "ratio": step.ratio.value,
                        "low": step.ratio.low,
                        "high": step.ratio.high,
                        "p": step.p,
                    }
                    for step in trend.steps
                ],
                "sentences": step_lines(trend),
            }
            for trend in watched.trends
        ],
    }
