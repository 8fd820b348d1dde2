"""A job on many workers in words: when it ends, at what cost, and how many parts are best.

Unknown numbers are not guessed: without a rate of workers there are no times, and without a
bandwidth the store counts as fast enough.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from errno import ENOENT
from functools import cached_property
from pathlib import Path

import numpy as np

from ...base import (
    InferConfig,
    ScaleConfig,
    UsageError,
    format_bytes,
    format_count,
    format_seconds,
    plural,
    significant,
)
from ..run_folder.local import folder_at
from .at_scale import HOPELESS, Expected, Fleet, Load, expect, load_of, patches_of_one
from .memory import in_words
from .plan import Plan, make_plan, plans_by_parts
from .simulation import Outcome, simulate

WORTH = 0.01
"""Tolerance, as a share of the shortest time. Of the cuts within it, the one with the fewest parts
is taken."""
SHOWN = 1.5
"""Cuts that take more than this many times as long as the best are not shown."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A way to cut the job, and what is expected of it."""

    plan: Plan
    load: Load
    expected: Expected
    outcomes: Sequence[Outcome] = ()

    @property
    def parts(self) -> int:
        return len(self.load.work)

    @cached_property
    def ended(self) -> list[Outcome]:
        """The simulated runs that ended."""
        return [run for run in self.outcomes if math.isfinite(run.seconds)]

    @property
    def seconds(self) -> float:
        """The seconds of the job, by simulation if it was simulated, else by formula."""
        if not self.outcomes:
            return self.expected.seconds
        return statistics.median(run.seconds for run in self.outcomes)

    @property
    def redone(self) -> float:
        """The share of patches computed again, by simulation or formula."""
        if not self.outcomes:
            return self.expected.redone
        return statistics.median(run.redone for run in self.outcomes) / self.load.work.total

    @property
    def tasks_per_second(self) -> float:
        """Tasks given out per second, by simulation or formula."""
        if not self.outcomes:
            return self.expected.tasks_per_second
        tasks = statistics.median(run.tasks for run in self.outcomes)
        return tasks / (self.seconds - self.load.before)


def scale_lines(config: InferConfig, scale: ScaleConfig, plan: Plan) -> Iterator[tuple[str, str]]:
    """What is expected of a plan on many workers, line by line: (what, how much).

    Args:
        config: The settings of the job, with the number of workers.
        scale: The settings of workers and store.
        plan: The plan of the job, in parts.

    Returns:
        Lines for a reader.

    Raises:
        UsageError: The run folder that is given as the rate has none.
    """
    rate = scale.rate
    notes: list[str] = []
    if isinstance(rate, Path | str):
        rate, notes = measured_rate(rate, plan)
    yield "borders", f"{_borders(config, plan)} more patches than one process computes"
    if scale.bandwidth is not None:
        moved = plan.read_bytes + plan.output_bytes + plan.statistics_bytes
        if plan.spill is not None:
            moved += plan.spill.moved
        yield (
            "store",
            (
                f"{format_bytes(moved)} to read and write before compression, "
                f"{format_seconds(moved / scale.bandwidth)} or more at "
                f"{format_bytes(scale.bandwidth)}/s"
            ),
        )
    if rate is None:
        yield "time", "not known; --rate gives the voxels per second of a worker, or a run folder"
        return
    fleet = Fleet.of(scale, config.workers or 1, rate)
    yield "workers", _workers(fleet)
    candidates = _candidates(config, plan, fleet)
    mine = next(each for each in candidates if each.plan is plan)
    yield from _expected_lines(mine, fleet)
    if scale.runs:
        candidates = _played(candidates, mine, fleet, scale)
        mine = next(each for each in candidates if each.plan is plan)
        yield from _played_lines(mine, scale)
    yield from _compared_lines(config, candidates, mine)
    if plan.statistics_bytes and scale.bandwidth is None:
        notes.append(
            f"the {format_bytes(plan.statistics_bytes)} that are read for percentiles before the "
            "first part take time that is not counted; --bandwidth counts it"
        )
    yield from (("note", note) for note in notes)


def at_rate(config: InferConfig, scale: ScaleConfig, plan: Plan) -> Plan:
    """Plan again with the measured rate of a worker, which decides how borders are treated.

    Args:
        config: The settings of the job, with the number of workers.
        scale: The rate, if there is one.
        plan: The plan without the rate.

    Returns:
        The plan, maybe with other parts.

    Raises:
        UsageError: The run folder that is given as the rate has none.
    """
    rate = scale.rate
    if rate is None or plan.ways is None:
        return plan
    if isinstance(rate, Path | str):
        rate, _ = measured_rate(rate, plan)
    seconds = plan.voxels / rate / patches_of_one(config, plan)
    timed = replace(plan.facts, patch_seconds=seconds, patch_seconds_from="--rate")
    return make_plan(config, timed, plan.shape)


def measured_rate(place: Path | str, plan: Plan) -> tuple[float, list[str]]:
    """The voxels per second of one worker, measured by a run of infer.

    Args:
        place: The run folder: a path, or a URL.
        plan: The plan that the rate is for.

    Returns:
        The rate (the median over several workers), and sentences on how that run differs.

    Raises:
        UsageError: There is no summary of a run that computed anything.
    """
    try:
        folder = folder_at(place)
        content = folder.read("summary.json")
        if content is None:
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
        summary, run = json.loads(content), json.loads(folder.read("run.json") or b"")
        shares = [(worker["voxels"], worker["seconds"]) for worker in summary["workers"]]
        shares = shares or [(summary["voxels"], summary["seconds"])]
        patch, overlap = (tuple(run["fingerprint"][name]) for name in ("patch", "overlap"))
    except OSError as error:
        raise UsageError(
            f"--rate {place}: {error.strerror}; it is neither a number of voxels per second nor "
            "the folder of a run that has ended"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"--rate {place}: summary.json or run.json is damaged") from None
    rates = [voxels / seconds for voxels, seconds in shares if voxels and seconds]
    if not rates:
        raise UsageError(f"--rate {place}: that run computed nothing; give another run")
    notes = []
    if (patch, overlap) != (plan.shape.patch, plan.shape.overlap):
        notes.append(
            f"the rate was measured with patches of {in_words(patch)} and an overlap of "
            f"{in_words(overlap)}, unlike this plan"
        )
    return statistics.median(rates), notes


def _borders(config: InferConfig, plan: Plan) -> str:
    return _percent(plan.num_patches / patches_of_one(config, plan) - 1)


def _percent(share: float) -> str:
    return f"{significant(100 * share)} %"


def _workers(fleet: Fleet) -> str:
    words = [f"{fleet.workers:,} of {significant(fleet.rate / 1e6)} Mvox/s"]
    if fleet.mtbf is not None:
        back = "never" if fleet.restart is None else f"after {format_seconds(fleet.restart)}"
        words.append(f"each fails every {format_seconds(fleet.mtbf)} and is back {back}")
    if fleet.slow:
        words.append(f"{fleet.slow:,} take {fleet.slowness:g} times as long")
    return "; ".join(words)


def _candidates(config: InferConfig, plan: Plan, fleet: Fleet) -> list[Candidate]:
    """The plan and other ways to cut the job, fewest parts first."""
    assert plan.parts is not None
    others = [
        other
        for other in plans_by_parts(config, plan.facts, plan.shape, spills=plan.geometry.spills)
        if other.parts is not None and other.parts.step != plan.parts.step
    ]
    loads = [(each, load_of(config, each, fleet)) for each in (plan, *others)]
    candidates = [Candidate(each, load, expect(load, fleet)) for each, load in loads]
    return sorted(candidates, key=lambda candidate: candidate.parts)


def _expected_lines(mine: Candidate, fleet: Fleet) -> Iterator[tuple[str, str]]:
    expected = mine.expected
    if math.isinf(expected.seconds):
        yield (
            "expected",
            (
                f"no end within {HOPELESS} times the time of workers that never fail: too few are "
                "up, or they fail before anything is written"
            ),
        )
        return
    yield (
        "expected",
        (
            f"{format_seconds(expected.seconds)} by formula, bound by {expected.bound_by}; "
            f"{_efficiency(mine.plan, fleet, expected.seconds)} of the speed of as many workers "
            "that never wait, fail or compute borders"
        ),
    )
    if expected.before:
        yield "  statistics", f"{format_seconds(expected.before)} before the first part"
    tail = max(0.0, expected.tail)
    yield "  at the end", f"{format_seconds(tail)} in which workers find no more parts"
    if fleet.mtbf is not None:
        yield (
            "  failures",
            (
                f"{format_count(expected.failures)}; {_percent(expected.redone)} of the patches "
                "are computed again"
            ),
        )
    yield "  client", _client(expected.tasks_per_second, fleet)


def _efficiency(plan: Plan, fleet: Fleet, seconds: float) -> str:
    return _percent(plan.voxels / (fleet.workers * fleet.rate * seconds))


def _client(rate: float, fleet: Fleet) -> str:
    share = _percent(rate / fleet.tasks_per_second)
    return (
        f"{significant(rate)} tasks/s given out, {share} of the "
        f"{significant(fleet.tasks_per_second)} tasks/s that Dask is assumed to manage"
    )


def _played(
    candidates: Sequence[Candidate], mine: Candidate, fleet: Fleet, scale: ScaleConfig
) -> list[Candidate]:
    """Simulate the choice by formula, its two neighbours and the plan itself."""
    place = candidates.index(_choice(candidates))
    near = candidates[max(0, place - 1) : place + 2]
    return [
        Candidate(
            each.plan, each.load, each.expected, simulate(each.load, fleet, scale.runs, scale.seed)
        )
        for each in candidates
        if each in near or each is mine
    ]


def _choice(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate with the fewest parts that takes about as long as the fastest."""
    soonest = min(candidate.seconds for candidate in candidates)
    return next(each for each in candidates if each.seconds <= (1 + WORTH) * soonest)


def _played_lines(mine: Candidate, scale: ScaleConfig) -> Iterator[tuple[str, str]]:
    runs = plural(len(mine.outcomes), "simulated run")
    if len(mine.ended) < len(mine.outcomes):
        lost = len(mine.outcomes) - len(mine.ended)
        yield "simulated", f"{lost} of {runs} (--seed {scale.seed}) have no end"
    if not mine.ended:
        return

    def of(value: Callable[[Outcome], float], said: Callable[[float], str]) -> str:
        low, middle, high = np.quantile([*map(value, mine.ended)], (0.025, 0.5, 0.975))
        return f"{said(middle)} [{said(low)} - {said(high)}]"

    before = mine.expected.before
    total = mine.load.work.total
    yield (
        "simulated",
        (
            f"{of(lambda run: run.seconds, format_seconds)}: the median of {runs} (--seed "
            f"{scale.seed}), and where 95 % of them lie"
        ),
    )
    yield "  failures", of(lambda run: run.failures, format_count)
    redone = of(lambda run: run.redone / total, _percent)
    yield "  redone", f"{redone} of the patches are computed again"
    tasks = of(lambda run: run.tasks / (run.seconds - before), significant)
    yield "  client", f"{tasks} tasks/s given out"


def _compared_lines(
    config: InferConfig, candidates: Sequence[Candidate], mine: Candidate
) -> Iterator[tuple[str, str]]:
    soonest = min(candidate.seconds for candidate in candidates)
    if math.isinf(soonest):
        yield "parts", "the job does not end with any number of parts"
        return
    for each in candidates:
        if each.seconds > SHOWN * soonest and each is not mine:
            continue
        patches = each.load.work.mean / each.load.speed
        yield (
            f"  {format_count(each.parts)} parts",
            (
                f"{_seconds(each.seconds)}, {format_seconds(patches)} a part, borders "
                f"{_borders(config, each.plan)}, redone {_percent(each.redone)}, "
                f"{significant(each.tasks_per_second)} tasks/s"
            ),
        )
    best = _choice(candidates)
    if best is mine:
        yield "choice", f"the {format_count(mine.parts)} parts of this plan"
    else:
        sooner = f"; {_seconds(mine.seconds)} with those of this plan"
        yield "choice", f"--parts {best.parts}: {_seconds(best.seconds)}{sooner}"


def _seconds(seconds: float) -> str:
    return "no end" if math.isinf(seconds) else format_seconds(seconds)
