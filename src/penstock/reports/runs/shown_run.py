"""A run as a page lists it, and its details, which are read when they are shown.

Texts are plain and clipped; the page escapes them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...base import flattened
from ..content import Picture, shown

LONGEST_LABEL = 120
"""Most characters of a name, a word or a tag in a list."""
_LONGEST_SETTING = 2000
_STATUSES = {"ok": "complete", "done": "complete", "ended": "failed"}
"""The words of launches and of runs of infer for which trainings have another."""
_UNITS = (
    ("bytes_per_s", "B/s"), ("bytes", "B"), ("percent", "%"), ("samples_per_s", "samples/s"),
    ("voxels_per_s", "voxels/s"), ("_ms", "ms"), ("_s", "s"), ("seconds", "s"),
    ("host_peak", "B"), ("device_peak", "B"), ("device_reserved", "B"), ("device_driver", "B"),
    ("device_allocated", "B"), ("peak_rss", "B"), ("planned_peak", "B"), ("busy", "s"),
    ("waited", "s"), ("per_epoch", "s"),
)  # fmt: skip
"""Ends of names of metrics, and their units."""
_WORDS = (
    (r"(^|.*[._])rss(_bytes)?$", r"\1memory"), (r"(.+)_per_s$", r"\1 per second"),
    (r"(^|.*[._])(ms|s|seconds)$", r"\1time"), (r"(.+)_(bytes|percent)$", r"\1"),
)  # fmt: skip
"""Names of metrics that end in their units, and what a reader sees of them."""


@dataclass(frozen=True)
class RunCurve:
    """The values of a metric, with the step, the epoch and the seconds since the start of each. A
    place that is not known is NaN."""

    values: NDArray[np.float64]
    places: Mapping[str, NDArray[np.float64]]
    """The places by ``step``, ``epoch`` or ``seconds``, as far as they are known."""
    of_machine: bool = False
    """True for a metric of the machine rather than of what was computed."""


@dataclass(frozen=True)
class RunDetails:
    """The details of a run."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Knobs and environment by dotted names; numbers in one spelling."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, RunCurve] = field(default_factory=dict)
    pictures: Sequence[Picture] = ()
    """Pictures that are computed."""
    error: str = ""


@dataclass(frozen=True)
class ShownRun:
    """A row of the list."""

    key: str
    """The name of the run in links. The same place always gives the same key."""
    case: str
    """The key of its case: runs of one case repeat each other."""
    name: str
    kind: str
    status: str
    source: str
    """The place that the run was read from."""
    title: str = ""
    """The name of its case; empty for the name of the run."""
    workload: str = ""
    machine: str = ""
    model: str = ""
    began: float | None = None
    """Unix time."""
    seconds: float | None = None
    """Seconds by which results are sorted."""
    tags: Mapping[str, str] = field(default_factory=dict)
    read: Callable[[], RunDetails] = field(default=RunDetails, repr=False, compare=False)
    """Function that reads the details. It raises `UsageError` if the run was removed."""


def key_of(place: object) -> str:
    """A short name for a place, the same in every process.

    >>> key_of("/runs/a")
    '704e1951db'
    """
    return hashlib.sha256(str(place).encode(errors="surrogatepass")).hexdigest()[:10]


def label(value: Any, most: int = LONGEST_LABEL) -> str:
    """A foreign text for the list.

    Args:
        value: The text, or any value.
        most: Most characters that are kept.

    Returns:
        The text, clipped and in one line; empty for None.
    """
    return "" if value is None else " ".join(shown(str(value)[: 1000 * most], most).split())


def status_word(status: Any) -> str:
    """The word for how a run ended, the same for runs of all kinds."""
    return _STATUSES.get(str(status), label(status))


def tags_of(value: Any) -> dict[str, str]:
    """Tags of a record, clipped; none if the value is no mapping."""
    named = value.items() if isinstance(value, Mapping) else ()
    return {label(key): label(text) for key, text in named}


def settings_of(*documents: Mapping[str, Any]) -> dict[str, str]:
    """The settings in nested documents by dotted names, without those that are not set.

    >>> settings_of({"a": {"b": [1, 2]}, "c": None, "rate": "1e-3"})
    {'a.b': '1 2', 'rate': '0.001'}
    """
    return {
        label(name): _plain(value)
        for document in documents
        for name, value in flattened(document)
        if value or isinstance(value, bool | int)
    }


def numbers_of(*documents: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of nested documents by dotted names.

    >>> numbers_of({"a": 1, "b": {"c": 0.5, "d": "x"}, "e": None})
    {'a': 1.0, 'b.c': 0.5}
    """
    return {
        label(name): float(value)
        for document in documents
        for name, value in flattened(document)
        if isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value)
    }


def _plain(value: Any) -> str:
    """A setting as text in one spelling."""
    if isinstance(value, list | tuple):
        return " ".join(map(_plain, value))
    try:
        return f"{float(value):.15g}" if not isinstance(value, bool) else str(value)
    except (TypeError, ValueError):
        return label(value, _LONGEST_SETTING)


def unit_of(name: str) -> str:
    """The unit of a metric by its name.

    >>> unit_of("step.median_s"), unit_of("memory.host_peak"), unit_of("val_loss")
    ('s', 'B', '')
    """
    return next((unit for end, unit in _UNITS if name.endswith(end)), "")


def words_of(name: str) -> str:
    """A metric in words, without its unit, which stands with its values.

    >>> words_of("step.median_s"), words_of("voxels_per_s"), words_of("peak_rss")
    ('step median time', 'voxels per second', 'peak memory')
    """
    for pattern, words in _WORDS:
        name = re.sub(pattern, words, name)
    return re.sub(r"[._]+", " ", name)


def curve_of(values: ArrayLike, of_machine: bool = False, **places: ArrayLike | None) -> RunCurve:
    """Make a curve.

    Args:
        values: Its values.
        of_machine: Whether it is of the machine rather than of what was computed.
        **places: The ``step``, ``epoch`` or ``seconds`` of each value, as far as they are given.

    Returns:
        The curve.
    """
    given = {name: np.asarray(at, np.float64) for name, at in places.items() if at is not None}
    return RunCurve(np.asarray(values, np.float64), given, of_machine)


def curves_of_readings(rows: list[tuple[float, dict[str, float]]]) -> dict[str, RunCurve]:
    """Curves of the machine from readings, each with its seconds since the start."""
    points: dict[str, list[tuple[float, float]]] = {}
    for at, numbers in rows:
        for name, value in numbers.items():
            points.setdefault(name, []).append((at, value))
    return {
        name: curve_of([v for _, v in each], True, seconds=[t for t, _ in each])
        for name, each in points.items()
    }
