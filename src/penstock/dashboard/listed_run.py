"""A run as the dashboard lists it, and its details, which are read when it is selected.

Texts are plain and clipped; each renderer escapes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..base import group_by
from ..reports import shown
from ..scaling import TrainingRun, plain
from ..training import flat

LONGEST_LABEL = 120
"""Most characters of a name, a word or a tag in a list."""
_LONGEST_SETTING = 2000
Floats = NDArray[np.float64]
Stamp = tuple[object, ...]
"""States of the files that a run is read from. Another stamp means that they have changed."""


@dataclass(frozen=True)
class RunCurve:
    """The values of a metric in the order in which they were measured.

    ``values`` and its places (steps, epochs, seconds) have the same length. An unknown place is
    NaN.
    """

    values: Floats
    steps: Floats
    epochs: Floats
    seconds: Floats
    """Seconds since the run began."""
    of_machine: bool = False
    """True for a metric of the machine rather than of what was computed."""


@dataclass(frozen=True)
class RunDetails:
    """The details of a run."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Knobs and environment by dotted names; numbers in one spelling."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, RunCurve] = field(default_factory=dict)
    training: TrainingRun | None = None
    """The run for scaling studies; None if it is no training."""
    folder: Path | None = None
    """A folder that may hold pictures."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A row of the list."""

    key: str
    """The name of the run in links. The same place always gives the same key."""
    name: str
    kind: str
    status: str
    source: str
    """The place that the run was read from, as shown to the user."""
    stamp: Stamp = ()
    workload: str = ""
    machine: str = ""
    model: str = ""
    began: float | None = None
    """Unix time."""
    seconds: float | None = None
    """Seconds by which results are sorted."""
    result: str = ""
    """The main numbers as text."""
    tags: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[], RunDetails] = field(default=RunDetails, repr=False, compare=False)
    """Function that reads the details. It raises `UsageError` if the run was removed."""


def key_of(place: str) -> str:
    """A short name for a place, the same in every process.

    >>> key_of("/runs/a")
    '15bfcf7e1a'
    """
    return hashlib.sha256(place.encode(errors="surrogatepass")).hexdigest()[:10]


def label(value: Any) -> str:
    """A foreign text for the list, clipped and in one line; empty if there is none."""
    return "" if value is None else _label(str(value)[: 1000 * LONGEST_LABEL])


@lru_cache(2**12)  # many records share few texts
def _label(text: str) -> str:
    return " ".join(shown(text, LONGEST_LABEL).split())


def tags_of(value: Any) -> dict[str, str]:
    """Tags of a record, clipped; none if the value is no mapping."""
    if not isinstance(value, Mapping):
        return {}
    return {label(key): label(text) for key, text in value.items()}


def settings_of_run(*documents: Mapping[str, Any]) -> dict[str, str]:
    """The settings in nested documents by dotted names, without unset ones."""
    return {
        label(name): shown(plain(text), _LONGEST_SETTING)
        for document in documents
        for name, text in flat(document).items()
    }


def numbers_of(value: Mapping[str, Any], before: str = "") -> dict[str, float]:
    """The finite numbers of a nested document by dotted names.

    >>> numbers_of({"a": 1, "b": {"c": 0.5, "d": "x"}, "e": None})
    {'a': 1.0, 'b.c': 0.5}
    """
    numbers: dict[str, float] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            numbers |= numbers_of(item, f"{before}{label(name)}.")
        elif isinstance(item, int | float) and not isinstance(item, bool) and np.isfinite(item):
            numbers[before + label(name)] = float(item)
    return numbers


def curve_of(
    values: ArrayLike,
    *,
    steps: ArrayLike | None = None,
    epochs: ArrayLike | None = None,
    seconds: ArrayLike | None = None,
    of_machine: bool = False,
) -> RunCurve:
    """Make a curve. Places that are not given are NaN."""
    array = np.asarray(values, np.float64)
    at_steps, at_epochs, at_seconds = (
        np.full(len(array), np.nan) if given is None else np.asarray(given, np.float64)
        for given in (steps, epochs, seconds)
    )
    return RunCurve(array, at_steps, at_epochs, at_seconds, of_machine)


def told_apart(runs: Sequence[ListedRun]) -> list[str]:
    """The names of runs. If two runs have the same name, each gets its key, too."""
    several = {name for name, same in group_by(runs, lambda run: run.name).items() if same[1:]}
    return [f"{run.name} ({run.key})" if run.name in several else run.name for run in runs]
