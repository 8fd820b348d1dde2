"""What a queue benchmark measured, beside what the model of the queue says and what the seed found.

The batches are first read with nobody computing: the seconds from one to the next, for each number
of workers. That alone, with the seconds of a step, is what `queueing` predicts from; no case is
fitted to itself. Predicted are

    seconds per iteration    the mean of all, those from the full queue too, as the seed had it
    steady state             once the queue is empty, or where it never is
    cleared                  the first iteration, from 0, that ends with an empty queue

by playing the queue event by event, with as many batches in the hands of its readers as they may
hold, and it is that which what was measured is held against. Beside it stand the seed's formulas:
n0 = q R / (R - C), and the mean that follows from it. They are of readers that each hold a batch
while the queue is full; ours hold none, and clear it as theirs would clear one that is shallower by
a batch.

Utilisation is the accelerator's by the formula of MLPerf Storage. It is judged in the steady state.
Over all iterations but the first, which stands beside it, what a full queue held at the beginning
counts, and that came for nothing. The formula asks for the seconds of a step that never waits. Each
launch times them before anybody reads, and one value stands for all launches of a table, the
median: the step is the same in all, and how it was timed must not rank them.

Readings alone that no case is predicted from, as `penstock tune loader` leaves them, are a table of
their own.

A value is the median over launches, and its spread is from the least to the most of them; the
interval (95 %) of a mean within launches is bootstrapped over launches and their iterations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import queueing, report
from .queueing import SEED, SEED_ITERATIONS, SEED_SOURCE, Feed, SeedRow, Timeline
from .record import Record
from .report import Cell, Row, Section
from .stats import CONFIDENCE, Interval
from .units import format_seconds, significant

NEEDS = ("workers", "queue", "seconds_per_iteration")
COLUMNS = tuple(
    "timestamp workers queue batch_size compute compute_time model tile device compute_s "
    "iterations seconds_per_iteration low_seconds high_seconds steady_s read_s model_seconds "
    "simulated_seconds cleared model_cleared simulated_cleared utilisation low_utilisation "
    "high_utilisation steady_utilisation model_utilisation seed_seconds seed_cleared iteration_s "
    "depth simulated_depth data shuffle seed launches failed status error cores affinity "
    "cgroup_cpus machine_key commit key".split()
)
APART = ("data", "shuffle", "seed", "batch", "compute", "compute_time", "iterations", "model",
         "tile", "device")  # fmt: skip
"""Knobs that tell tables apart."""

_DRAWS = 2000
_LONGER = 1.05
"""A step that computes so many times as long beside readers as alone contends with them."""
_MISSED = 0.05
"""A step of the model that is farther than this from the measured one is called missed."""
_NEAR = 0.02
"""Utilisation as near to the model's as this was foreseen."""


@dataclass(frozen=True)
class QueueCell(Cell):
    """All launches of one number of workers with one size of the queue."""

    step_s: float | None = None
    """Of a step that never waits, by all cells of the group; else by its own launches."""

    @property
    def workers(self) -> int:
        return int(self.case["workers"])

    @property
    def queue(self) -> int:
        return int(self.case["queue"])

    @property
    def name(self) -> str:
        if not self.workers:
            return "0 workers"
        return f"{self.workers} worker{'s' * (self.workers != 1)}, queue {self.queue}"

    @property
    def reads_only(self) -> bool:
        return bool(self.case["compute"] == "none")

    @property
    def iterations(self) -> int:
        return int(self.case["iterations"])

    @cached_property
    def compute_s(self) -> float:
        """Of a step that never waits."""
        if self.step_s is not None:
            return self.step_s
        return float(np.median([record.facts["compute_s"] for record in self.measured]))

    @cached_property
    def left(self) -> list[list[int]]:
        """Of each launch, the batches in the queue at the end of each iteration."""
        return [list(record.facts["left"]) for record in self.measured]

    @cached_property
    def means(self) -> list[float]:
        """Of each launch, the seconds of an iteration by the seed's definition."""
        return [float(np.mean(seconds)) for seconds in self.times]

    @cached_property
    def cleared(self) -> list[int | None]:
        return [queueing.cleared(left) for left in self.left]

    @cached_property
    def utilisations(self) -> list[float]:
        """Of each launch, over all iterations but the first; those from the full queue count."""
        return [queueing.utilisation(seconds.tolist(), self.compute_s) for seconds in self.times]

    def share(self, phase: str) -> float | None:
        """What of the iterations but the first went to ``get`` or to ``compute``, the median over
        launches; None where those were not timed apart."""
        found = [
            sum(record.samples_s[phase][1:]) / sum(record.samples_s["step"][1:])
            for record in self.measured
            if phase in record.samples_s
        ]
        return median(found) if found else None

    @property
    def computing_s(self) -> float | None:
        """Of computing in a step, beside the readers."""
        found = [r.samples_s["compute"][1:] for r in self.measured if "compute" in r.samples_s]
        return median([float(np.mean(seconds)) for seconds in found]) if found else None

    def settled(self, drains: bool) -> list[NDArray[np.float64]]:
        """Of each launch that shows three of them, the seconds of iterations in the steady state.

        Once the queue was cleared it begins, after the next iteration, which waits for a read that
        is half done. Where it was not, all iterations but the first are in it if the queue stays
        full, and none if it ``drains`` or is seen to: then it would have been cleared later.
        """
        found = []
        for seconds, left, at in zip(self.times, self.left, self.cleared, strict=True):
            if at is not None:
                found.append(seconds[at + 2 :])
            elif not (self.workers and (drains or _sinks(left))):
                found.append(seconds[1:])
        return [seconds for seconds in found if len(seconds) >= 3]

    @cached_property
    def interval(self) -> Interval | None:
        """From one batch to the next, of a cell that computes nothing. What was in the queue at the
        beginning, and what was begun with it, was read beforehand."""
        return mean_interval([seconds[self.queue + 1 :] for seconds in self.times])


def _sinks(left: Sequence[int]) -> bool:
    """Whether a queue is half a batch less full in its second half than in its first."""
    half = len(left) // 2
    return float(np.mean(left[:half]) - np.mean(left[half:])) > 0.5


def mean_interval(launches: Sequence[NDArray[np.float64]]) -> Interval | None:
    """The mean over launches and their values, resampled in both; None of nothing."""
    if not launches:
        return None
    rng = np.random.default_rng(0)
    means = np.array([seconds.mean() for seconds in launches])
    drawn = np.array([rng.choice(own, (_DRAWS, len(own))).mean(axis=1) for own in launches])
    picks = rng.integers(len(launches), size=(_DRAWS, len(launches)))
    draws = drawn[picks, np.arange(_DRAWS)[:, None]].mean(axis=1)
    low, high = np.quantile(draws, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return Interval(float(means.mean()), float(low), float(high), sum(map(len, launches)))


@dataclass(frozen=True)
class Predicted:
    """What the model says of a cell."""

    feed: Feed
    timeline: Timeline

    @property
    def mean_s(self) -> float:
        return self.feed.mean_s(len(self.timeline.seconds))


@dataclass(frozen=True)
class Course:
    """A cell and, where its reading was measured alone, its prediction."""

    cell: QueueCell
    alone: Interval | None
    predicted: Predicted | None

    @cached_property
    def settled(self) -> list[NDArray[np.float64]]:
        """See `QueueCell.settled`."""
        return self.cell.settled(
            self.predicted is not None and self.predicted.feed.drain is not None
        )

    @cached_property
    def steady(self) -> Interval | None:
        """Seconds of an iteration in the steady state; None where it was not reached."""
        return mean_interval(self.settled)

    @property
    def utilisations(self) -> list[float]:
        """Of each launch that reached the steady state, in it."""
        return [self.cell.compute_s / float(seconds.mean()) for seconds in self.settled]

    @property
    def misses(self) -> list[int]:
        """Iterations between the predicted clearing of the queue and each launch's, least first;
        empty where it was not to be predicted within the iterations, or was not predicted."""
        if self.predicted is None or not self.cell.workers:
            return []
        last = self.cell.iterations
        at = self.predicted.timeline.cleared
        found = [last if k is None else k for k in self.cell.cleared]
        if at is None and all(k == last for k in found):
            return []
        return sorted(abs(k - (last if at is None else at)) for k in found)

    @property
    def off(self) -> int | None:
        """The median of the misses."""
        return self.misses[len(self.misses) // 2] if self.misses else None

    @property
    def row(self) -> Row:
        cell, predicted = self.cell, self.predicted
        case = cell.case
        seed = None if cell.reads_only else seed_row(cell.workers, cell.queue)
        limits = cell.environment("limits") or {}
        failure = next((r.error for r in cell.records if r.error is not None), None)
        values: dict[str, Any] = {
            **{name: case.get(name) for name in COLUMNS},
            "timestamp": max(record.time for record in cell.records),
            "batch_size": cell.batch,
            "read_s": self.alone and self.alone.value,
            "seed_seconds": seed and seed.seconds,
            "seed_cleared": seed and seed.cleared,
            "launches": cell.launches,
            "failed": len(cell.records) - cell.launches,
            "status": cell.status,
            "error": " ".join(failure.message.split()) if failure else "",
            "cores": (cell.environment("machine") or {}).get("cores"),
            "affinity": limits.get("affinity"),
            "cgroup_cpus": limits.get("cgroup_cpus"),
            "machine_key": cell.environment("machine_key"),
            "commit": report.commit_of(cell.environment("git")),
            "key": cell.records[0].key,
        }
        if cell.measured:
            values |= {
                "compute_s": cell.compute_s,
                "seconds_per_iteration": median(cell.means),
                "low_seconds": min(cell.means),
                "high_seconds": max(cell.means),
                "iteration_s": " ".join(f"{seconds:.6g}" for seconds in cell.times[0]),
                "depth": " ".join(map(str, cell.left[0])),
            }
        if cell.measured and not cell.reads_only:
            values |= {
                "steady_s": self.steady and self.steady.value,
                "steady_utilisation": median(self.utilisations) if self.settled else None,
                "cleared": _middle(cell.cleared),
                "utilisation": median(cell.utilisations),
                "low_utilisation": min(cell.utilisations),
                "high_utilisation": max(cell.utilisations),
            }
        if predicted is not None:
            values |= {
                "model_seconds": predicted.mean_s,
                "simulated_seconds": predicted.timeline.mean_s,
                "model_utilisation": predicted.feed.utilisation,
                "model_cleared": predicted.feed.drain,
                "simulated_cleared": predicted.timeline.cleared,
                "simulated_depth": " ".join(map(str, predicted.timeline.left)),
            }
        return {name: report.field(values[name]) for name in COLUMNS}


def median(values: Sequence[float]) -> float:
    return float(np.median(values))


def _middle(cleared: Sequence[int | None]) -> int | None:
    """The median of iterations of which None is later than all."""
    ordered = sorted(cleared, key=lambda k: (k is None, k or 0))
    return ordered[(len(ordered) - 1) // 2]


def seed_row(workers: int, queue: int) -> SeedRow | None:
    return next((row for row in SEED if (row.workers, row.queue) == (workers, queue)), None)


def courses(records: Iterable[Record]) -> list[list[Course]]:
    """The cells of scenario ``queue`` with their predictions, in groups that differ in workers and
    queue alone. A reading that no other cell is predicted from is a cell of a group, too."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record.scenario == "queue":
            machine = record.environment.get("machine_key")
            found.setdefault((record.key, machine), []).append(record)
    cells = [QueueCell(tuple(launches)) for launches in found.values()]
    alone = {_readers(cell): cell for cell in cells if cell.reads_only}
    beside = {_readers(cell) for cell in cells if not cell.reads_only}
    groups: dict[tuple[Any, ...], list[QueueCell]] = {}
    for cell in sorted(cells, key=lambda cell: (cell.workers, cell.queue)):
        if not (cell.reads_only and _readers(cell) in beside):
            about = (*(str(cell.case.get(n)) for n in APART), cell.environment("machine_key"))
            groups.setdefault(about, []).append(cell)
    return [
        [_course(cell, alone.get(_readers(cell))) for cell in _same_step(group)]
        for group in groups.values()
    ]


def _same_step(group: Sequence[QueueCell]) -> list[QueueCell]:
    """The cells, whose step is the same: its seconds, too."""
    timed = [record.facts["compute_s"] for cell in group for record in cell.measured]
    return [replace(cell, step_s=median(timed)) for cell in group] if timed else list(group)


def _readers(cell: QueueCell) -> tuple[Any, ...]:
    names = ("data", "batch", "shuffle", "seed", "workers")
    return (*(cell.case.get(name) for name in names), cell.environment("machine_key"))


def _course(cell: QueueCell, reader: QueueCell | None) -> Course:
    alone = reader.interval if reader is not None and reader.measured else None
    if alone is None or not cell.measured or cell.reads_only:
        return Course(cell, alone, None)
    # However many threads, they read one batch after the other: all together are one reader, whose
    # seconds for a batch were measured.
    feed = Feed(min(cell.workers, 1), cell.queue, alone.value, cell.compute_s)
    in_hand = cell.fact("in_hand")
    timeline = queueing.simulate(feed, cell.iterations, in_hand=in_hand)
    return Course(cell, alone, Predicted(feed, timeline))


def append_csv(records: Iterable[Record], path: Path) -> None:
    """Add a row for each case to a CSV of queue benchmarks."""
    rows = [course.row for group in courses(records) for course in group]
    report.append_rows(rows, path, COLUMNS, NEEDS)


# --- the table and what it says -----------------------------------------------------------------


def sections(records: Iterable[Record]) -> list[Section]:
    """For each group what was run, the table, what it says; then the seed's, whose table is of
    steps beside a queue."""
    groups = courses(records)
    ours = [Section(heading(g), table(g), sentences(g)) for g in groups]
    return ours if groups and all(_alone(g) for g in groups) else [*ours, seed_section()]


def _alone(group: Sequence[Course]) -> bool:
    """Whether nobody computed."""
    return group[0].cell.reads_only


def heading(group: Sequence[Course]) -> str:
    cell = group[0].cell
    case = cell.case
    where = f"{case['data']}, batches of {cell.batch}, order {case['shuffle']}"
    if _alone(group):
        return f"{where}; read while nobody computes"
    step = f"{case['compute']}"
    step += f" {case['model']} {case['tile']}" if case["compute"] == "train" else ""
    took = next((c.cell.compute_s for c in group if c.cell.measured), None)
    asked = case["compute_time"]
    if took and asked and not 1 / _LONGER <= took / asked <= _LONGER:
        step += f", asked for {format_seconds(asked)}"
    seconds = format_seconds(took) if took is not None else "?"
    return f"{where}; steps of {seconds} ({step}), {cell.iterations} iterations from a full queue"


def table(group: Sequence[Course]) -> list[tuple[str, ...]]:
    """Seconds per iteration and clearing, measured, by the seed's formulas and simulated, with the
    utilisation in the steady state and over all iterations; beside the seed's."""
    if _alone(group):
        return _reading_table(group)
    lines: list[tuple[str, ...]] = [
        ("workers", "queue", "s/it", "formula", "simulated", "steady", "cleared", "n0", "simulated",
         "AU steady", "model", "AU of all", "seed s/it", "seed cleared")
    ]  # fmt: skip
    for course in group:
        cell, predicted = course.cell, course.predicted
        seed = seed_row(cell.workers, cell.queue)
        if not cell.measured:
            lines.append((str(cell.workers), str(cell.queue), cell.status, *[""] * 11))
            continue
        lines.append(
            (
                str(cell.workers),
                str(cell.queue) if cell.workers else "",
                significant(median(cell.means)),
                significant(predicted.mean_s) if predicted else "",
                significant(predicted.timeline.mean_s) if predicted else "",
                significant(course.steady.value) if course.steady else "",
                _cleared(_middle(cell.cleared)) if cell.workers else "",
                _drain(predicted.feed.drain) if predicted and cell.workers else "",
                _cleared(predicted.timeline.cleared) if predicted and cell.workers else "",
                _percent(median(course.utilisations)) if course.settled else "",
                _percent(predicted.feed.utilisation) if predicted else "",
                _percent(median(cell.utilisations)),
                f"{seed.seconds:.1f}" if seed else "",
                "" if seed is None or seed.cleared is None else str(seed.cleared),
            )
        )
    return lines


def _reading_table(group: Sequence[Course]) -> list[tuple[str, ...]]:
    """From one batch to the next, by workers."""
    lines: list[tuple[str, ...]] = [
        ("workers", "queue", "s/batch", "95 %", "samples/s", "batches", "launches", "status")
    ]
    for course in group:
        cell, interval = course.cell, course.alone
        told = ("-", "-", "-", "-")
        if interval is not None and interval.low is not None and interval.high is not None:
            told = (
                significant(interval.value),
                f"{significant(interval.low)} - {significant(interval.high)}",
                significant(cell.batch / interval.value),
                str(interval.n),
            )
        queue = str(cell.queue) if cell.workers else ""
        lines.append((str(cell.workers), queue, *told, str(cell.launches), cell.status))
    return lines


def _cleared(iteration: int | None) -> str:
    return "never" if iteration is None else str(iteration)


def _clears(iteration: int | None) -> str:
    return "never cleared" if iteration is None else f"cleared at {iteration}"


def _drain(drain: float | None) -> str:
    return "never" if drain is None else f"{drain:.1f}"


def sentences(group: Sequence[Course]) -> list[str]:
    """What the group says, each with how many stand behind it and an interval."""
    measured = [course for course in group if course.cell.measured]
    lines = [
        f"{course.cell.name}: {course.cell.status}: {course.row['error']}."
        for course in group
        if course.cell.status != "ok"
    ]
    if _alone(group):
        return lines
    by_workers: dict[int, list[Course]] = {}
    for course in measured:
        by_workers.setdefault(course.cell.workers, []).append(course)
    for own in by_workers.values():
        lines += _of_workers(own)
    lines += _of_clearing(measured)
    return [*lines, *_of_utilisation(measured)]


def _of_workers(own: Sequence[Course]) -> list[str]:
    """What reading takes with so many workers, and what the depth of their queue does."""
    cell = own[0].cell
    who = f"{cell.workers} worker{'s' * (cell.workers != 1)}"
    lines = [*_of_steps(own, who), *_of_contention(own)]
    shown = [(course, course.steady) for course in own if course.steady is not None]
    if len(shown) < 2:
        return lines
    (first, a), (last, b) = shown[0], shown[-1]
    depths = f"With {who} a queue of {last.cell.queue} in place of {first.cell.queue}"
    launches = min(len(first.settled), len(last.settled))
    if launches == 1:
        lines.append(
            f"{depths}: {_spread(b, 'iterations')} in place of {_spread(a, 'iterations')} in the "
            "steady state, of one launch, which is not compared."
        )
        return lines
    low, high = (
        round((to or b.value) / (of or a.value) - 1, 6)
        for to, of in ((b.low, a.high), (b.high, a.low))
    )
    verb = "does not change" if low <= 0 <= high else "changes"
    lines.append(
        f"{depths} {verb} the steady state: {100 * (b.value / a.value - 1):+.1f} % "
        f"[{100 * low:+.1f} to {100 * high:+.1f} %, {launches} launches]."
    )
    return lines


def _of_steps(own: Sequence[Course], who: str) -> list[str]:
    """What a step took with so many workers, and then what the model has of it."""
    first = own[0]
    if first.alone is None or first.predicted is None:
        return []
    workers, feed = first.cell.workers, first.predicted.feed
    measured = [(course.cell.queue, course.steady) for course in own if course.steady is not None]
    took = f"With {who} no case reached the steady state"
    if measured:
        queues = [f" (queue {queue})" if workers else "" for queue, _ in measured]
        each = [
            f"{_spread(steady, 'iterations')}{queue}"
            for (_, steady), queue in zip(measured, queues, strict=True)
        ]
        took = f"With {who} a step took {', '.join(each)} in the steady state"
    step = format_seconds(feed.compute_s)
    if not workers:
        why = "and each step waits for it"
    elif feed.drain is None:
        why = f"no more than a step alone, {step}, so the queue would stay full"
    else:
        why = f"more than a step alone, {step}"
    reading = f"While nobody computed a batch came every {_spread(first.alone)}, {why}"
    beside = _model_beside(feed, first.alone, measured)
    return [f"{took}. {reading}; from this the model has {beside}."]


def _model_beside(feed: Feed, alone: Interval, measured: Sequence[tuple[int, Interval]]) -> str:
    """The model's step, and how far it is from those that were measured."""
    model = f"{format_seconds(feed.steady_s)} a step"
    if not measured:
        return f"{model}, which nothing here confirms"
    off = [(feed.steady_s / steady.value - 1, queue) for queue, steady in measured]
    worst, queue = max(off, key=lambda each: abs(each[0]))
    if abs(worst) <= _MISSED:
        return f"{model}, within {100 * _MISSED:.0f} % of what was measured"
    off_by = f"{100 * worst:+.0f} % off" + (f" with a queue of {queue}" if feed.workers else "")
    low, high = (
        feed.steady_s if end is None else replace(feed, read_s=end).steady_s
        for end in (alone.low, alone.high)
    )
    if all(low <= (s.high or s.value) and high >= (s.low or s.value) for _, s in measured):
        ends = f"[{format_seconds(low)} - {format_seconds(high)}]"
        return f"{model} {ends}, {off_by}, which may be chance"
    return f"{model}, and misses: that is {off_by}"


def _of_contention(own: Sequence[Course]) -> list[str]:
    """That a step takes longer beside so many workers, which no queue cures: its utilisation is low
    though it does not wait."""
    longer = [
        (cell, seconds)
        for cell in (course.cell for course in own)
        if cell.workers
        and (seconds := cell.computing_s) is not None
        and seconds > _LONGER * cell.compute_s
    ]
    if not longer:
        return []
    cell, seconds = max(longer, key=lambda each: each[1])
    waits = cell.share("get")
    waited = "" if waits is None else f", and waits for batches in {_percent(waits)} of its time"
    line = (
        f"A step beside {cell.name} computes for {format_seconds(seconds)} in place of "
        f"{format_seconds(cell.compute_s)} alone{waited}: what utilisation lacks beyond that is "
        "lost to contention and not to reading."
    )
    return [line]


def _of_clearing(measured: Sequence[Course]) -> list[str]:
    told = [course for course in measured if course.off is not None]
    if not told:
        return []
    near = [course for course in told if (course.off or 0) <= 1]
    worst = max(told, key=lambda course: course.off or 0)
    misses = [miss for course in told for miss in course.misses]
    line = (
        f"The simulation predicts the iteration that clears the queue within one in {len(near)} of "
        f"{len(told)} cases, and in {sum(miss <= 1 for miss in misses)} of {len(misses)} launches"
    )
    if len(near) < len(told):
        assert worst.predicted is not None
        line += (
            f"; the furthest is {worst.cell.name}, {_clears(_middle(worst.cell.cleared))} and "
            f"predicted to be {_clears(worst.predicted.timeline.cleared)}"
        )
    formula = (
        "Formula and n0 = q R / (R - C) are the seed's, of readers that each hold a batch while "
        "the queue is full; ours hold none, and by the simulation clear it sooner."
    )
    ours = all(course.cell.fact("in_hand") == 0 for course in told)
    return [line + ".", *([formula] if ours else [])]


def _of_utilisation(measured: Sequence[Course]) -> list[str]:
    """How well the accelerator is used in the steady state, and how far that is from the model."""
    shown, lines = [course for course in measured if course.settled], []
    if unseen := [course.cell for course in measured if not course.settled]:
        lines.append(
            f"The steady state was not reached within the {unseen[0].iterations} iterations with "
            f"{'; '.join(cell.name for cell in unseen)}: more --iterations tell."
        )
    if not shown:
        return lines
    near = [
        (abs(median(course.utilisations) - course.predicted.feed.utilisation), course)
        for course in shown
        if course.predicted is not None
    ]
    if near:
        furthest, worst = max(near, key=lambda each: each[0])
        assert worst.predicted is not None
        line = (
            "Utilisation in the steady state is within 2 points of the model's in "
            f"{sum(off <= _NEAR for off, _ in near)} of {len(near)} cases"
        )
        if furthest > _NEAR:
            line += (
                f"; the furthest is {worst.cell.name}, {_percent(median(worst.utilisations))} and "
                f"{_percent(worst.predicted.feed.utilisation)} by the model"
            )
        lines.append(line + ".")
    # As it is printed: of equals the fewest workers and the shallowest queue.
    best = max(shown, key=lambda course: round(median(course.utilisations), 3))
    cell = best.cell
    most = "The accelerator is used best"
    if len(shown) < len(measured):
        most = "Of those that reached the steady state, the accelerator is used best"
    line = (
        f"{most} with {cell.name}: "
        f"{queueing.verdict(median(best.utilisations))} in the steady state "
        f"[{_range(best.utilisations, _percent)}]"
    )
    if cell.workers:
        line += (
            f"; over all but the first of {cell.iterations} iterations, which a full queue fed to "
            f"begin with, {_percent(median(cell.utilisations))}"
        )
    if len(shown) > 1 and len(best.utilisations) == 1:
        line += "; of one launch, which is not compared"
    return [*lines, line + "."]


def _spread(interval: Interval, what: str = "batches") -> str:
    spread = f"{interval.n} {what}"
    if interval.low is not None and interval.high is not None:
        spread = f"{format_seconds(interval.low)} - {format_seconds(interval.high)}, {spread}"
    return f"{format_seconds(interval.value)} [{spread}]"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _range(values: Sequence[float], form: Any) -> str:
    if len(values) == 1:
        return "1 launch"
    return f"{form(min(values))} - {form(max(values))}, {len(values)} launches"


# --- the seed's table ---------------------------------------------------------------------------


def seed_table() -> list[tuple[str, ...]]:
    """The seed's rows, each beside the closed form and the simulation of it."""
    lines: list[tuple[str, ...]] = [
        ("workers", "queue", "seed s/it", "model", "simulated", "seed cleared", "n0", "simulated")
    ]
    for row in SEED:
        feed = queueing.seed_feed(row)
        timeline = queueing.simulate(feed, SEED_ITERATIONS)
        lines.append(
            (
                str(row.workers),
                str(row.queue) if row.workers else "",
                f"{row.seconds:.1f}",
                f"{feed.mean_s(SEED_ITERATIONS):.2f}",
                f"{timeline.mean_s:.2f}",
                "" if row.cleared is None else str(row.cleared),
                _drain(feed.drain) if row.workers else "",
                _cleared(timeline.cleared) if row.workers else "",
            )
        )
    return lines


def seed_section() -> Section:
    title = "The seed's own table, and what the model says of it"
    return Section(title, seed_table(), [f"Source: {SEED_SOURCE}."])
