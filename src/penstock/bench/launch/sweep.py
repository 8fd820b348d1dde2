"""A sweep: every case so many times, each time in a fresh process, in an order that is fair.

The launches of a case are spread over the whole sweep, a round of all cases for each, so that a
machine that grows warm or busy does so for all of them. Within a round the cases are shuffled by
a stored seed; of two cases the second round mirrors the first (ABBA), which cancels a steady drift.

    round 0   C A B        round 1   B C A        round 2 ...

Each record is in the ledger before the next launch begins. A failure is a record like any other,
and the sweep goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...instruments import Ledger, Record, case_key
from .supervisor import LaunchRequest, run_launch

LAUNCHES = {"quick": 1, "standard": 5, "rigorous": 10}
CERTAIN = ("oom_device", "oom_host", "unsupported", "wrong_result")
"""Failures that another launch of the same case would only meet again."""

HOPELESS = "an earlier launch of the case ended with {}"

Case = Mapping[str, Any]


def launches_of(effort: str) -> int:
    """Launches of each case. One launch is never compared with another."""
    return LAUNCHES[effort]


@dataclass(frozen=True)
class SweepStep:
    """Where a sweep stands: before a launch, where there is no record yet, and after it."""

    number: int
    """Of launches that are behind, those that were skipped too."""
    total: int
    case: Case
    launch: int
    record: Record | None = None
    skipped: str = ""
    """Why this launch was not run."""


def launch_order(cases: int, launches: int, seed: int) -> list[tuple[int, int]]:
    """Pairs (case, launch), round by round.

    >>> launch_order(2, 4, seed=0)
    [(1, 0), (0, 0), (0, 1), (1, 1), (1, 2), (0, 2), (0, 3), (1, 3)]
    """
    rng = random.Random(seed)
    row = list(range(cases))
    rng.shuffle(row)
    pairs: list[tuple[int, int]] = []
    for number in range(launches):
        pairs += [(case, number) for case in row]
        if cases == 2:
            row.reverse()
        else:
            rng.shuffle(row)
    return pairs


def run_sweep(
    scenario: str,
    cases: Sequence[Case],
    launches: int,
    ledger: Ledger,
    *,
    rules: Mapping[str, Any],
    timeout_s: float,
    memory_limit: int | None,
    seed: int,
    resume: bool,
    run: Callable[..., Record] = run_launch,
    progress: Callable[[SweepStep], None] = lambda step: None,
) -> list[Record]:
    """Run what is to be run and return the records of these cases, the resumed ones among them."""
    keys = [case_key(scenario, case) for case in cases]
    records = [r for r in ledger.records() if r.key in keys] if resume else []
    # One that failed is among them: that it ran out of memory or of time is its result.
    behind = {(record.key, record.launch) for record in records}
    hopeless = {r.key: HOPELESS.format(r.status) for r in records if r.status in CERTAIN}
    pairs = launch_order(len(cases), launches, seed)
    for place, (index, number) in enumerate(pairs):
        case, key = cases[index], keys[index]
        skipped = "the ledger has it" if (key, number) in behind else hopeless.get(key)
        if skipped:
            progress(SweepStep(place + 1, len(pairs), case, number, skipped=skipped))
            continue
        progress(SweepStep(place, len(pairs), case, number))
        request = LaunchRequest(scenario, dict(case), rules=dict(rules), memory_limit=memory_limit)
        record = run(request, launch=number, order=place, timeout_s=timeout_s)
        ledger.append(record)
        records.append(record)
        if record.status in CERTAIN:
            hopeless[key] = HOPELESS.format(record.status)
        progress(SweepStep(place + 1, len(pairs), case, number, record))
    return records
