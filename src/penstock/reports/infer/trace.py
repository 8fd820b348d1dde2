"""A trace of a run as a timeline: how many threads of each stage worked, from begin to end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BINS = 240
"""Parts of the time for which threads are counted. More do not show on a page."""
MOST_BYTES = 64 * 2**20
"""Bytes of a trace that are read: some half a million spans."""


@dataclass(frozen=True)
class StageTimeline:
    """How many threads of each stage worked in each part of the time."""

    seconds: float
    """The last second that is shown."""
    stages: dict[str, NDArray[np.float64]]
    """Mean number of threads at work, `BINS` values for each stage, in the order of their begin."""
    spans: int
    whole: bool
    """False if only a part of the trace was read."""


def read_timeline(path: Path) -> StageTimeline | None:
    """The timeline of a trace; None if it holds no span of work."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for name, begin, seconds in _spans(path):
        spans.setdefault(name, []).append((begin, begin + seconds))
    if not spans:
        return None
    end = max(stop for each in spans.values() for _, stop in each)
    return StageTimeline(
        end,
        {name: _working(np.array(each), end) for name, each in spans.items()},
        sum(map(len, spans.values())),
        path.stat().st_size <= MOST_BYTES,
    )


def _spans(path: Path) -> Iterator[tuple[str, float, float]]:
    """Each span of work: its stage, its begin and how long it took, in seconds."""
    read = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            read += len(line)
            if read > MOST_BYTES:
                return
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                event = json.loads(line.rstrip().rstrip(","))
                if event["ph"] == "X" and event["cat"] == "busy":
                    yield str(event["name"]), event["ts"] / 1e6, event["dur"] / 1e6


def _working(spans: NDArray[np.float64], end: float) -> NDArray[np.float64]:
    """The mean number of spans under way in each bin."""
    edges = np.linspace(0.0, end or 1.0, BINS + 1)
    # The time worked until each edge, all spans together: its differences are what bins hold.
    order = np.sort(spans, axis=0)
    begun, ended = order[:, 0], order[:, 1]
    sums = [np.concatenate(([0.0], np.cumsum(each))) for each in (begun, ended)]
    at = [np.searchsorted(each, edges) for each in (begun, ended)]
    done = at[0] * edges - sums[0][at[0]] - (at[1] * edges - sums[1][at[1]])
    return np.diff(done) / np.diff(edges)
