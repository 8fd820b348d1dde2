"""Recommend settings of an inference from launches over a few of its patches.

A launch says what a patch costs; the plan says how many patches the volume takes. A setting wins if
it is faster than the job as it is beyond the noise of the launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import format_seconds, plural
from ...instruments import Interval, Record
from ..cell import bootstrap_ratio, mean_interval
from ..words import bracket

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
        said.append("One launch does not say how much launches differ: give more --most-seconds")
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
