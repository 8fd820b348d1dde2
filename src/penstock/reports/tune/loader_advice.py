"""Recommend the fewest workers and the shallowest queue that keep a step fed, or say why none do.

A step of C seconds is fed if the accelerator computes for the share A of the time that is asked
for. So a batch must come every C / A seconds at most. The measured batches of each launch, in their
order, are played against such steps by `simulation.simulate`. The fewest workers
win, and with them the shallowest queue with which every launch keeps the accelerator fed.

If none do, the ladder of ``penstock bench loader`` shows which step of reading is too slow.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from ...base import format_bytes, format_seconds, group_by, plural, significant, write_output
from ...instruments import Interval, Record
from ..cell import mean_interval
from ..queue import simulation as model
from ..queue.cell import QueueCell
from ..queue.report import spread_words
from ..queue.simulation import QueueModel

STEPS = 200
"""The number of steps that are played."""
BEGUN = 20
"""The first steps that do not count, in which the queue of the start is used up."""


@dataclass(frozen=True)
class Goal:
    """A step, its batch size, and the share of the time that the accelerator must compute."""

    step_s: float
    batch: int
    utilisation: float

    @property
    def most_s(self) -> float:
        """The most seconds between batches that feed the accelerator."""
        return self.step_s / self.utilisation


@dataclass(frozen=True)
class ReadAlone:
    """The batches of one number of workers while nothing computed."""

    workers: int
    launches: tuple[NDArray[np.float64], ...]
    """The seconds from each batch to the next, in an array for each launch."""

    @cached_property
    def interval(self) -> Interval:
        interval = mean_interval(self.launches)
        assert interval is not None
        return interval

    def utilisations(self, step_s: float, queue: int) -> list[float]:
        """The accelerator's utilisation with each launch's batches."""
        feed = QueueModel(1, queue, self.interval.value, step_s)
        played = (
            model.simulate(feed, STEPS, in_hand=0, reads=launch.tolist())
            for launch in self.launches
        )
        return [model.utilisation(run.seconds[BEGUN - 1 :], step_s) for run in played]


@dataclass(frozen=True)
class Advice:
    """Settings for `LoaderConfig`, or None, and the sentences with the reasons."""

    settings: dict[str, Any] | None
    sentences: tuple[str, ...]


def readings_of(records: Iterable[Record]) -> list[ReadAlone]:
    """The launches of scenario ``queue`` that only read, by workers, the fewest first."""
    launches = [QueueCell((r,)) for r in records if r.ok and r.scenario == "queue"]
    reading = (cell for cell in launches if cell.reads_only)
    by_workers = group_by(reading, lambda cell: cell.workers)
    return [
        ReadAlone(workers, tuple(cell.times[0][cell.queue + 1 :] for cell in cells))
        for workers, cells in sorted(by_workers.items())
    ]


def recommend_loader(
    reads: Sequence[ReadAlone],
    goal: Goal,
    queues: Sequence[int],
    batch_bytes: int,
) -> Advice:
    """Recommend the fewest workers and the shallowest of ``queues`` that reach the goal.

    Args:
        reads: The batches by workers, the fewest first.
        goal: What the accelerator needs.
        queues: The depths of the queue that fit into memory.
        batch_bytes: The bytes of a batch.

    Returns:
        Settings and their reasons, or no settings and the reason why the goal cannot be reached.
    """
    for reading in reads:
        if reading.interval.value > goal.most_s:
            continue
        for queue in sorted(queues):
            reached = reading.utilisations(goal.step_s, queue)
            if min(reached) >= goal.utilisation:
                return _fed(reading, queue, reached, reads, goal, batch_bytes)
    return Advice(None, (_starved(reads, goal, queues),))


def _fed(
    reading: ReadAlone,
    queue: int,
    reached: Sequence[float],
    reads: Sequence[ReadAlone],
    goal: Goal,
    batch_bytes: int,
) -> Advice:
    settings = {"batch_size": goal.batch, "workers": reading.workers, "fetch": 0, "queue": queue}
    memory = format_bytes((queue + 1) * batch_bytes)
    lines = [
        (
            f"{plural(reading.workers, 'worker')} and a queue of {queue} keep steps of "
            f"{format_seconds(goal.step_s)} fed: a batch of {goal.batch} comes every "
            f"{spread_words(reading.interval)}, and {_share(reached)} of the time is computing, of "
            f"{100 * goal.utilisation:g} % asked for. {queue + 1} batches take {memory}."
        ),
    ]
    fewer = [other for other in reads if other.workers < reading.workers]
    if fewer:
        best = min(fewer, key=lambda other: other.interval.value)
        lines.append(
            f"Fewer do not: with {plural(best.workers, 'worker')} a batch comes every "
            f"{spread_words(best.interval)}, {_against(best.interval, goal)}."
        )
    return Advice(settings, tuple(lines))


def _starved(reads: Sequence[ReadAlone], goal: Goal, queues: Sequence[int]) -> str:
    best = min(reads, key=lambda reading: reading.interval.value)
    line = (
        f"Nothing keeps steps of {format_seconds(goal.step_s)} fed: at best, with "
        f"{plural(best.workers, 'worker')}, a batch of {goal.batch} comes every "
        f"{spread_words(best.interval)}, {_against(best.interval, goal)}."
    )
    if best.interval.value > goal.most_s:
        return line
    reached = best.utilisations(goal.step_s, max(queues))
    return (
        f"{line} They come too unevenly for the deepest queue that fits, {max(queues)}: "
        f"{_share(reached)} of the time is computing, of {100 * goal.utilisation:g} %."
    )


def _against(interval: Interval, goal: Goal) -> str:
    factor = interval.value / goal.most_s
    needed = f"and {format_seconds(goal.most_s)} is needed"
    return f"{needed}: {significant(factor)} times too slow" if factor > 1 else needed


def _share(reached: Sequence[float]) -> str:
    least, median, most = (100 * float(of(reached)) for of in (min, np.median, max))
    ends = f"{least:.1f} - {most:.1f} %, " if len(reached) > 1 else ""
    return f"{median:.1f} % [{ends}{plural(len(reached), 'launch')}]"


def write_settings_yaml(
    flag: str, settings: Mapping[str, Any], sentences: Sequence[str], path: Path, replace: bool
) -> None:
    """Write settings as YAML, with sentences above them as comments.

    Args:
        flag: The flag that names the file.
        settings: The settings of a verb's ``--config``, or of a `penstock.Loader`.
        sentences: Their reasons.
        path: The file.
        replace: Replace a file that Penstock did not write.

    Raises:
        UsageError: The file cannot be written.
    """
    comments = (
        textwrap.fill(text, 98, initial_indent="# ", subsequent_indent="# ") for text in sentences
    )
    text = "\n".join([*comments, yaml.safe_dump(dict(settings), sort_keys=False)])
    write_output(flag, path, text, replace=replace)


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
    bench = (
        f"penstock bench queue {shlex.quote(data)} --batch-size {batch} --workers {workers} "
        f"--queue-sizes {queue} --compute-time {step_s:g}"
    )
    missing = ["--missing", settings["missing"]] if "missing" in settings else []
    train = f"penstock train emulator --batch-size {batch} --num-workers {workers}"
    return [" ".join([train, "--prefetch-factor", str(queue)]), " ".join([bench, *missing])]
