"""Recommend the smallest batch that keeps a device fed, from readings of several batch sizes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...base import format_bytes, format_seconds, plural, significant
from ..loader.cell import LoaderCell
from ..queue.sentences import spread_words
from .loader_advice import Advice, Goal, ReadAlone, recommend_loader


def step_of(batch: int, steps: Mapping[int, float]) -> tuple[float, int]:
    """The seconds of a step, and the batch that they were measured for: this or the next larger.

    A smaller batch gets its share of the larger batch's step. A real step hardly takes less,
    because its constant costs do not shrink. So a loader that feeds the scaled step feeds the real
    one. Nothing is claimed for batches larger than those that were timed.

    Args:
        batch: The batch size.
        steps: Seconds of a step by batch size; one is ``batch`` or more.

    Returns:
        The seconds, and the batch size in ``steps`` that they come from.

    >>> step_of(8, {4: 0.05, 16: 0.2})
    (0.1, 16)
    """
    timed = min(size for size in steps if size >= batch)
    return steps[timed] * batch / timed, timed


@dataclass(frozen=True)
class BatchTrial:
    """The readings of one batch size, and the memory of a loader with it."""

    goal: Goal
    timed_batch: int
    """The batch whose step was timed: this one, or a larger one whose time is scaled down."""
    timed_s: float
    batch_bytes: int
    memory: Mapping[int, int]
    """Total bytes that a loader takes, by queue size, for the queues that fit."""
    reads: Sequence[ReadAlone]

    @property
    def fastest(self) -> ReadAlone:
        return min(self.reads, key=lambda reading: reading.interval.value)

    @property
    def behind(self) -> float:
        """The factor by which reading alone is too slow; below 1 if it is fast enough."""
        return self.fastest.interval.value / self.goal.most_s

    def advice(self, rungs: Mapping[str, LoaderCell] | None = None) -> Advice:
        return recommend_loader(self.reads, self.goal, list(self.memory), self.batch_bytes, rungs)


def recommend_batch(
    tried: Sequence[BatchTrial], rungs: Mapping[str, LoaderCell] | None = None
) -> Advice:
    """Recommend the smallest batch that is fed, with the fewest workers and the shallowest queue.

    Args:
        tried: The batch sizes that were measured.
        rungs: The ladder of the batch size that came nearest, if none is fed.

    Returns:
        Settings and their reasons, or no settings and why the nearest batch size is not fed.
    """
    tried = sorted(tried, key=lambda batches: batches.batch_bytes)
    for number, batches in enumerate(tried):
        advice = batches.advice()
        if advice.settings is not None:
            queue = advice.settings["queue"]
            scratch = batches.memory[queue] - (queue + 1) * batches.batch_bytes
            memory = (
                f"In all the loader takes {format_bytes(batches.memory[queue])} of memory: the "
                f"batches and {format_bytes(scratch)} of scratch."
            )
            unfed = "; ".join(map(_not_fed, tried[:number]))
            smaller = [f"Smaller batches are not fed: {unfed}."] * bool(unfed)
            more = (memory, *_share(batches), *smaller)
            return Advice(advice.settings, (*advice.sentences, *more))
    nearest = nearest_of(tried)
    sentences = (*nearest.advice(rungs).sentences, *_share(nearest))
    if len(tried) > 1:
        others = [_not_fed(batches) for batches in tried if batches is not nearest]
        batch = nearest.goal.batch
        first = f"None of {len(tried)} batch sizes is fed; batches of {batch} come nearest."
        sentences = (first, *sentences, f"Of the others: {'; '.join(others)}.")
    return Advice(None, sentences)


def nearest_of(tried: Sequence[BatchTrial]) -> BatchTrial:
    """The batch size that is least behind; of equal ones the smallest."""
    return min(tried, key=lambda batches: (batches.behind, batches.batch_bytes))


def _share(batches: BatchTrial) -> list[str]:
    goal = batches.goal
    if goal.batch == batches.timed_batch:
        return []
    line = (
        f"A step of a batch of {goal.batch} is taken to last {format_seconds(goal.step_s)}, its "
        f"share of the {format_seconds(batches.timed_s)} of {batches.timed_batch}; a real one "
        "hardly lasts less. Measure it, and give it as "
        f"--step-time {goal.batch}=SECONDS {batches.timed_batch}={batches.timed_s:g}."
    )
    return [line]


def _not_fed(batches: BatchTrial) -> str:
    """Say by how much batches of one size come too slowly."""
    fastest, goal = batches.fastest, batches.goal
    pace = (
        f"one of {goal.batch} comes every {spread_words(fastest.interval)} with "
        f"{plural(fastest.workers, 'worker')} at best, and {format_seconds(goal.most_s)} is needed"
    )
    if batches.behind > 1:
        return f"{pace}, {significant(batches.behind)} times too slow"
    return f"{pace}, but too unevenly for a queue of {max(batches.memory)}"


def flags_of(settings: Mapping[str, Any], step_s: float, data: str) -> list[str]:
    """Write settings as command lines.

    Args:
        settings: The settings of an `Advice`.
        step_s: The seconds of a step.
        data: The path of the data.

    Returns:
        A command line that trains, and one that measures the queue with such steps.
    """
    batch, workers, queue = (settings[name] for name in ("batch_size", "workers", "queue"))
    train = f"--batch-size {batch} --num-workers {workers} --prefetch-factor {queue}"
    bench = f"--batch-size {batch} --workers {workers} --queue-sizes {queue}"
    if "missing" in settings:
        bench += f" --missing {settings['missing']}"
    return [
        f"penstock train emulator {train}",
        f"penstock bench queue {shlex.quote(data)} {bench} --compute-time {step_s:g}",
    ]
