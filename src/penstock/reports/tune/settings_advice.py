"""Settings that ``penstock tune`` recommends, of a loader and of an inference.

Of a loader it is the fewest workers and the shallowest queue that keep a step fed, or why none do.

A step of C seconds is fed if the accelerator computes for the share A of the time that is asked
for. So a batch must come every C / A seconds at most. The measured batches of each launch, in their
order, are played against such steps by `simulation.simulate`. The fewest workers
win, and with them the shallowest queue with which every launch keeps the accelerator fed.

If none do, the ladder of ``penstock bench loader`` shows which step of reading is too slow.

Settings of an inference are recommended from launches over a few of its patches. A launch says what
a patch costs; the plan says how many patches the volume takes. A setting wins if it is faster than
the job as it is beyond the noise of the launches.
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
from ..cell import bootstrap_ratio, mean_interval
from ..queue import simulation as model
from ..queue.cell import QueueCell
from ..queue.report import spread_words
from ..queue.simulation import QueueModel
from ..table import bracket

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
        feed = QueueModel(queue, self.interval.value, step_s)
        played = (model.simulate(feed, STEPS, reads=launch.tolist()) for launch in self.launches)
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


_LEAST_LAUNCHES = 2
"""Fewest launches of which it is known how much they differ."""


def whole_seconds(record: Record) -> NDArray[np.float64]:
    """The seconds that the whole job would take, by each run of a launch.

    Args:
        record: A launch of scenario ``infer`` that ended well.

    Returns:
        Seconds, without those of the start; shape (runs,).
    """
    each = np.asarray(record.samples_s["run"]) / record.work["patches"]
    return each * record.facts["patches"]


@dataclass(frozen=True)
class TriedSettings:
    """One setting, and its launches."""

    name: str
    case: Mapping[str, Any]
    records: Sequence[Record]

    @property
    def launches(self) -> list[NDArray[np.float64]]:
        """The seconds of the whole job, by each launch that ended well."""
        return [whole_seconds(record) for record in self.records if record.ok]

    @property
    def seconds(self) -> Interval:
        interval = mean_interval(self.launches)
        assert interval is not None
        return interval

    def ratio_to(self, other: TriedSettings) -> Interval:
        """Its time over that of another trial."""
        return bootstrap_ratio(other.launches, self.launches)

    def line(self, to: TriedSettings) -> str:
        """Its time in words, beside that of another trial."""
        if not self.launches:
            errors = [record.error.message for record in self.records if record.error]
            return f"{self.name}: {errors[0] if errors else 'not tried, as the time was up'}"
        took = f"{self.name}: {format_seconds(self.seconds.value)}"
        if self is to:
            return f"{took} {bracket(self.seconds, plural(len(self.launches), 'launch'))}"
        ratio = self.ratio_to(to)
        ends = bracket(ratio, plural(len(self.launches), "launch"), "{:.2f}".format)
        return f"{took}, {ratio.value:.2f} of the time of {to.name} {ends}"


def best_trial(trials: Sequence[TriedSettings]) -> tuple[TriedSettings, list[str]]:
    """The trial whose settings to take, and sentences on all of them.

    Args:
        trials: The first is the job as it is.

    Returns:
        The fastest trial that is faster than the first beyond the noise, or else the first.
    """
    first, *others = trials
    said = [trial.line(first) for trial in trials]
    tried = [trial for trial in others if len(trial.launches) >= _LEAST_LAUNCHES]
    fastest = min(tried, key=lambda trial: trial.seconds.value, default=None)
    if fastest is not None and len(first.launches) >= _LEAST_LAUNCHES:
        ratio = fastest.ratio_to(first)
        if ratio.value < 1 and ratio.excludes(1):
            return fastest, said
        said.append(f"Of {plural(len(others), 'other setting')}, none is faster beyond the noise")
    elif others:
        said.append(
            "One launch does not say how much launches differ: give tune infer more --most-seconds"
        )
    return first, said


def prediction(trial: TriedSettings) -> str:
    """How long the whole job will take, in a sentence."""
    seconds, start = trial.seconds, trial.records[0].warmup.setup_s or 0.0
    ends = bracket(seconds, plural(len(trial.launches), "launch"))
    patches = trial.records[0].facts["patches"]
    return (
        f"The whole volume, {plural(patches, 'patch')}, takes about "
        f"{format_seconds(seconds.value)} {ends} after a start of {format_seconds(start)}, "
        "without the levels of its output"
    )
