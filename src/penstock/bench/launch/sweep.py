"""Launchers, and sweeps: every case several times, each time in a fresh process, in a fair order.

A launcher takes launches one by one when it can run them, and yields each with its record when it
ends: in this process one after the other, or on a cluster.

The launches of a case are spread over the whole sweep, one in each round of all cases, so that a
machine that gets warm or busy affects all cases alike. Within a round the cases are shuffled by the
seed. With two cases the second round is the first in reverse (ABBA), which cancels a steady drift.

    round 0   C A B        round 1   B C A        round 2 ...

On one machine each record is in the ledger before the next launch begins. Workers of a cluster take
launches in the same order; each record is in the ledger as soon as its launch has ended. A failure
is a record like any other, and the sweep goes on.

Successive halving tries many settings a little, and the better ones more:

    round 0   all cases        round 1   the first, and half of the others        round 2   ...

The first case, the job as it is, stays to the end, so that each is compared with launches of the
same minutes.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...base import PenstockError, UsageError
from ...instruments import Ledger, Record, case_key
from . import supervisor
from .request import Launch

Launcher = Callable[[Iterable[Launch]], Iterator[tuple[Launch, Record]]]


def in_turn(launches: Iterable[Launch]) -> Iterator[tuple[Launch, Record]]:
    """Run launches one after the other on this machine."""
    for launch in launches:
        yield launch, supervisor.run_launch(launch)


def ask_worker(
    scenario: str,
    case: Mapping[str, Any],
    timeout_s: float,
    launcher: Launcher = in_turn,
    *,
    may_fail: bool = False,
) -> Record:
    """Check a case in a fresh process, without a measurement.

    Args:
        scenario: the name of the scenario.
        case: its knobs.
        timeout_s: the seconds that the process may take.
        launcher: runs the process.
        may_fail: whether to return a valid case that cannot be measured as a failed record, instead
            of raising.

    Returns:
        A record with the resolved case and its facts.

    Raises:
        UsageError: the case is not valid; its message is that of the process.
        PenstockError: the case cannot be measured; its message is that of the failure.
    """
    ((_, answer),) = launcher([Launch(scenario, case, timeout_s, task="check")])
    if answer.error is None:
        return answer
    if answer.status == "unsupported":
        raise UsageError(answer.error.message)
    if may_fail:
        return answer
    raise PenstockError(answer.error.message)


LAUNCHES = {"quick": 1, "standard": 5, "rigorous": 10}
"""Launches of each case by effort. A case with one launch is not compared."""
CERTAIN = ("oom_device", "oom_host", "unsupported", "wrong_result")
"""Failures that another launch of the same case would have too."""

HOPELESS = "an earlier launch of the case ended with {}"

Case = Mapping[str, Any]


@dataclass(frozen=True)
class SweepStep:
    """The progress of a sweep, before a launch (without a record) or after it."""

    number: int
    """The number of launches so far, skipped ones included."""
    total: int
    case: Case
    launch: int
    record: Record | None = None
    skipped: str = ""
    """The reason why this launch was not run."""


def launch_order(cases: int, launches: int, seed: int) -> list[tuple[int, int]]:
    """Pairs (case, launch), round by round.

    >>> launch_order(2, 4, seed=0)
    [(0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2), (1, 3), (0, 3)]
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
    launcher: Launcher = in_turn,
    progress: Callable[[SweepStep], None] = lambda step: None,
) -> list[Record]:
    """Run the launches that are missing, and return the records of all.

    Args:
        scenario: the name of the scenario.
        cases: the knobs of each case.
        launches: how often each case is launched.
        ledger: takes each record as its launch ends.
        rules: when a launch stops: the fields of `measure.Rules`.
        timeout_s: the seconds of a launch after which it is killed.
        memory_limit: the bytes that a launch may map; None for no limit.
        seed: the random seed of the order.
        resume: whether to skip launches that the ledger holds.
        launcher: runs the launches.
        progress: is called before and after each launch.

    Returns:
        The records of these cases, the resumed ones among them, in the order of the sweep.
    """
    keys = [case_key(scenario, case) for case in cases]
    records = [r for r in ledger.records() if r.key in keys] if resume else []
    # A failed launch counts too: running out of memory or time is its result.
    behind = {(record.key, record.launch) for record in records}
    state = _Counter(launch_order(len(cases), launches, seed), progress)
    for record in records:
        state.note(record)

    def missing() -> Iterator[Launch]:
        for place, (index, number) in enumerate(state.pairs):
            case, key = cases[index], keys[index]
            skipped = "the ledger has it" if (key, number) in behind else state.hopeless.get(key)
            if skipped:
                state.step(case, number, skipped=skipped)
                continue
            state.step(case, number)
            yield Launch(
                scenario, dict(case), timeout_s, number, place,
                rules=dict(rules), memory_limit=memory_limit,
            )  # fmt: skip

    ran = []
    for launch, record in launcher(missing()):
        record = ledger.append(record)
        ran.append(record)
        state.note(record)
        state.step(launch.case, launch.number, record=record)
    return records + sorted(ran, key=lambda record: record.order or 0)


@dataclass
class _Counter:
    pairs: list[tuple[int, int]]
    tell: Callable[[SweepStep], None]
    hopeless: dict[str, str] = field(default_factory=dict)
    """The keys of cases that are not launched again, each with the reason."""
    passed: int = 0
    """Launches that have ended or were skipped."""

    def step(self, case: Case, launch: int, **outcome: Any) -> None:
        """Report a launch before it runs, or with its record or the reason why it was skipped."""
        self.passed += bool(outcome)
        self.tell(SweepStep(self.passed, len(self.pairs), case, launch, **outcome))

    def note(self, record: Record) -> None:
        if record.status in CERTAIN:
            self.hopeless[record.key] = HOPELESS.format(record.status)


ROUNDS = 4
"""Most launches of a case."""


def halved(
    cases: Sequence[Any],
    measure: Callable[[Any, int], Record],
    cost: Callable[[Record], float],
    is_over: Callable[[], bool],
    seed: int,
) -> list[list[Record]]:
    """Launch cases in rounds, and leave out the slower half of them after each round.

    Args:
        cases: The cases; the first is never left out for its time.
        measure: Runs a launch of a case, of the given number.
        cost: What a launch says of its case; less is better.
        is_over: Whether no further launch may begin.
        seed: The seed of the order in a round.

    Returns:
        The records of each case.
    """
    records: list[list[Record]] = [[] for _ in cases]
    running, rng = list(range(len(cases))), random.Random(seed)
    for number in range(ROUNDS):
        order = rng.sample(running, len(running))
        order.sort(key=bool)  # the first case, to which all others are compared
        for index in order:
            if records[0] and is_over():
                return records
            records[index].append(measure(cases[index], number))
        others = [each for each in running[1:] if records[each][-1].ok]
        if not others or not records[0][-1].ok:
            break
        others.sort(key=lambda each: statistics.median(map(cost, records[each])))
        running = [running[0], *others[: -(-len(others) // 2)]]
    return records
