"""Tuning a loader: from how fast it reads alone to the least that keeps a step fed, or why not.

A step of C seconds is fed where the accelerator computes for the share A of the time that is asked
for, so a batch must come every C / A seconds at most. How the batches really came, launch by launch
and in their order, is played against such steps (`queueing.simulate`): the fewest workers win, and
with them the shallowest queue, of which every launch's batches keep the accelerator fed.

Where none does, the rungs of the ladder (files, decode, scatter: `loader_report`) say which ceiling
is in the way: the first one that is too slow by itself.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from ...base import UsageError, format_bytes, format_seconds, significant, writing_output
from ...instruments import Interval, Record
from ..loader.cell import WARM_LEAST, LoaderCell
from ..loader.ladder import RUNGS
from ..queue import model
from ..queue.course import QueueCell, mean_interval
from ..queue.model import Feed

STEPS = 200
"""So many steps are played."""
BEGUN = 20
"""Of these the first do not count: what was in the queue at the start is used up."""
CEILINGS = {"L1": "storage", "L2": "decode", "L3": "scatter"}
"""What is at its limit where a rung is too slow and the one below it is not."""


@dataclass(frozen=True)
class Goal:
    """What the accelerator needs."""

    step_s: float
    batch: int
    utilisation: float

    @property
    def most_s(self) -> float:
        """The longest time between batches that feeds it."""
        return self.step_s / self.utilisation


@dataclass(frozen=True)
class Reading:
    """How batches came with so many workers when nobody computed."""

    workers: int
    launches: tuple[NDArray[np.float64], ...]
    """Seconds from each batch to the next, of each launch."""

    @property
    def interval(self) -> Interval:
        found = mean_interval(self.launches)
        assert found is not None
        return found

    def utilisations(self, step_s: float, queue: int) -> list[float]:
        """Of the accelerator, launch by launch."""
        feed = Feed(1, queue, self.interval.value, step_s)
        played = (
            model.simulate(feed, STEPS, in_hand=0, reads=launch.tolist())
            for launch in self.launches
        )
        return [model.utilisation(run.seconds[BEGUN - 1 :], step_s) for run in played]


@dataclass(frozen=True)
class Advice:
    """Settings for `LoaderConfig`, or None, and the sentences that say why."""

    settings: dict[str, Any] | None
    sentences: tuple[str, ...]


def readings_of(records: Iterable[Record]) -> list[Reading]:
    """Of the launches of scenario ``queue`` that only read, fewest workers first."""
    found: dict[int, list[NDArray[np.float64]]] = {}
    for record in records:
        if record.ok and record.scenario == "queue" and record.case["compute"] == "none":
            cell = QueueCell((record,))
            found.setdefault(cell.workers, []).append(cell.times[0][cell.queue + 1 :])
    return [Reading(workers, tuple(found[workers])) for workers in sorted(found)]


def join_readings(reads: Sequence[Reading], more: Iterable[Reading]) -> list[Reading]:
    """The readings with the launches of others of the same workers."""
    launches = {reading.workers: reading.launches for reading in reads}
    for reading in more:
        launches[reading.workers] = launches.get(reading.workers, ()) + reading.launches
    return [Reading(workers, own) for workers, own in sorted(launches.items())]


def recommend_loader(
    reads: Sequence[Reading],
    goal: Goal,
    queues: Sequence[int],
    batch_bytes: int,
    rungs: Mapping[str, LoaderCell] | None = None,
) -> Advice:
    """The fewest workers and the shallowest of ``queues`` that reach the goal, or why none does."""
    for reading in reads:
        if reading.interval.value > goal.most_s:
            continue
        for queue in sorted(queues):
            reached = reading.utilisations(goal.step_s, queue)
            if min(reached) >= goal.utilisation:
                return _fed(reading, queue, reached, reads, goal, batch_bytes)
    return Advice(None, tuple(_starved(reads, goal, queues, rungs or {})))


def _fed(
    reading: Reading,
    queue: int,
    reached: Sequence[float],
    reads: Sequence[Reading],
    goal: Goal,
    batch_bytes: int,
) -> Advice:
    settings = {"batch_size": goal.batch, "workers": reading.workers, "fetch": 0, "queue": queue}
    memory = format_bytes((queue + 1) * batch_bytes)
    lines = [
        (
            f"{_workers(reading.workers)} and a queue of {queue} keep steps of "
            f"{format_seconds(goal.step_s)} fed: a batch of {goal.batch} comes every "
            f"{spread(reading.interval)}, and {_share(reached)} of the time is computing, of "
            f"{100 * goal.utilisation:g} % asked for. {queue + 1} batches take {memory}."
        ),
    ]
    fewer = [other for other in reads if other.workers < reading.workers]
    if fewer:
        best = min(fewer, key=lambda other: other.interval.value)
        lines.append(
            f"Fewer do not: with {_workers(best.workers)} a batch comes every "
            f"{spread(best.interval)}, {_against(best.interval, goal)}."
        )
    return Advice(settings, tuple(lines))


def _starved(
    reads: Sequence[Reading],
    goal: Goal,
    queues: Sequence[int],
    rungs: Mapping[str, LoaderCell],
) -> list[str]:
    best = min(reads, key=lambda reading: reading.interval.value)
    lines = [
        (
            f"Nothing keeps steps of {format_seconds(goal.step_s)} fed: at best, with "
            f"{_workers(best.workers)}, a batch of {goal.batch} comes every "
            f"{spread(best.interval)}, {_against(best.interval, goal)}."
        )
    ]
    if best.interval.value <= goal.most_s:
        reached = best.utilisations(goal.step_s, max(queues))
        lines[0] += (
            f" They come too unevenly for the deepest queue that fits, {max(queues)}: "
            f"{_share(reached)} of the time is computing, of {100 * goal.utilisation:g} %."
        )
        return lines
    return [*lines, ceiling(rungs, best, goal)]


def fastest_rungs(cells: Iterable[LoaderCell]) -> dict[str, LoaderCell]:
    """Each rung with the workers that it is quickest with: a ceiling is what none of them passes.

    One that was never measured is left out.
    """
    found: dict[str, list[LoaderCell]] = {}
    for cell in cells:
        if cell.launches:
            found.setdefault(str(cell.case["rung"]), []).append(cell)
    return {name: min(own, key=lambda cell: cell.seconds or 0.0) for name, own in found.items()}


def rungs_slower_than_whole(rungs: Mapping[str, LoaderCell], best: Reading) -> list[str]:
    """The rungs that took longer than the whole loader, of which they are parts: noise."""
    whole = best.interval.value
    return [
        name
        for name, cell in sorted(rungs.items())
        if name in CEILINGS and cell.launches and (cell.seconds or 0.0) > whole
    ]


def ceiling(rungs: Mapping[str, LoaderCell], best: Reading, goal: Goal) -> str:
    """Which ceiling forbids the goal, and by how much; none that the whole loader beats, and none
    by one launch."""
    measured = {name: cell for name, cell in rungs.items() if name in CEILINGS and cell.launches}
    if not measured:
        factor = best.interval.value / goal.most_s
        return (
            "Which ceiling forbids it is not known, for the steps of the ladder were not measured "
            f"here; reading as a whole would have to be {significant(factor)} times as fast."
        )
    noise = rungs_slower_than_whole(measured, best)
    for name, cell in sorted(measured.items()):
        # What does the same and more shows how quick this one can be.
        above = [other.seconds or 0.0 for rung, other in measured.items() if rung > name]
        if name in noise or cell.launches < 2 or min(above, default=math.inf) <= goal.most_s:
            continue
        taken = _taken(cell)
        if taken.value > goal.most_s:
            factor = taken.value / goal.most_s
            return (
                f"The ceiling is {_limit(name, cell)}: {_up_to(name)} alone take {_at_best(cell)}, "
                f"{significant(factor)} times what there is."
            )
    if noise:
        return (
            f"No ceiling is named: {_up_to(noise[0])} alone took {_at_best(measured[noise[0]])}, "
            f"and the whole loader {spread(best.interval)}. A part that takes longer than the "
            "whole is noise, such as other work on this machine; more --launches tell."
        )
    last = measured[max(measured)]
    if last.launches < 2:
        return (
            f"No ceiling is named: {_up_to(max(measured))} took {_at_best(last)}, and one launch "
            "does not tell."
        )
    return (
        f"No ceiling forbids it: {_up_to(max(measured))} take {_at_best(last)}, so what is lost is "
        "lost in the loader itself."
    )


def _taken(cell: LoaderCell) -> Interval:
    """Seconds of a batch."""
    taken = mean_interval(cell.times)
    assert taken is not None
    return taken


def _at_best(cell: LoaderCell) -> str:
    told = _spread(_taken(cell), cell.launches, "launch")
    return f"{told} for a batch at best, with {_workers(cell.threads)}"


def _limit(rung: str, cell: LoaderCell) -> str:
    """What is at its limit. No disk is, where the page cache holds the files."""
    resident = cell.per_launch("resident")
    if rung != "L1" or resident is None:
        return CEILINGS[rung]
    if resident >= WARM_LEAST:
        return "reading files, though they are in the page cache"
    return f"{CEILINGS[rung]}, with {100 * resident:.0f} % of it in the page cache"


def _up_to(rung: str) -> str:
    names = [RUNGS[name] for name in CEILINGS if name <= rung]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _against(interval: Interval, goal: Goal) -> str:
    factor = interval.value / goal.most_s
    needed = f"and {format_seconds(goal.most_s)} is needed"
    return f"{needed}: {significant(factor)} times too slow" if factor > 1 else needed


def _workers(number: int) -> str:
    return f"{number} worker{'s' * (number != 1)}"


def spread(interval: Interval) -> str:
    return _spread(interval, interval.n, "batch")


def _spread(interval: Interval, n: int, what: str) -> str:
    said = f"{n} {what}{'es' * (n != 1)}"
    if interval.low is not None and interval.high is not None and interval.n > 1:
        said = f"{format_seconds(interval.low)} - {format_seconds(interval.high)}, {said}"
    return f"{format_seconds(interval.value)} [{said}]"


def _share(reached: Sequence[float]) -> str:
    said = f"{len(reached)} launch{'es' * (len(reached) != 1)}"
    if len(reached) > 1:
        said = f"{100 * min(reached):.1f} - {100 * max(reached):.1f} %, {said}"
    return f"{100 * float(np.median(reached)):.1f} % [{said}]"


def write_loader_yaml(advice: Advice, path: Path, replace: bool = False) -> None:
    """Write the settings, the reasons above them as comments."""
    assert advice.settings is not None
    reasons = [
        textwrap.fill(line, 98, initial_indent="# ", subsequent_indent="# ")
        for line in advice.sentences
    ]
    try:
        with writing_output(path, replace=replace) as draft:
            draft.write_text(
                "\n".join([*reasons, yaml.safe_dump(advice.settings, sort_keys=False)]),
                encoding="utf-8",
            )
    except OSError as error:
        raise UsageError(f"--output {path} cannot be written: {error.strerror}") from error
