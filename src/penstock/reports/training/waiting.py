"""The ranks of a training together: how long each computes and waits, and which rank the others
wait for.

    rank 0   │ own work      │▒▒ idle ▒▒│░ network ░│      idle: until the last rank is there
    rank 1   │ own work                 │░ network ░│      critical: the last to be there

The sum over ranks (all-reduce) ends for all at once. The rank that waits least came last: its wait
is network time, and what the others wait beyond it is idle time. Sums that overlap with computing
are not in the steps; a trace of the profiler (``--profile``) shows them.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ...base import format_seconds, plural
from ...instruments import median_interval
from ..words import bracket
from .fit_files import TrainingFolder

Span = tuple[float, float]
MOST_BYTES = 256 * 2**20
"""Bytes of a trace that are read."""
_SUMS = ("nccl", "gloo:", "c10d::allreduce", "allreduce", "all_reduce")
"""Beginnings of the names of communication in a trace."""
_NO_TRACE = (
    "How much of the sum over ranks is hidden behind computing is not known: no trace of a "
    "profiler shows it (train --profile)."
)


def rank_lines(run: TrainingFolder) -> list[str]:
    """Sentences on how ranks wait for each other; none for one rank."""
    if len(run.steps) < 2:
        return []
    return [*_of_steps(run), *overlap_lines(run.folder)]


def _of_steps(run: TrainingFolder) -> list[str]:
    count = min(len(each.loss) for each in run.steps)
    steps, waits = (
        np.array([each.seconds[name][-count:] for each in run.steps])
        for name in ("step", "communication")
    )
    timed = np.isfinite(waits).all(axis=0) & np.isfinite(steps).all(axis=0)
    if not timed.any():
        return ["How long ranks waited for each other is not known: no sum over ranks was timed."]
    steps, waits = steps[:, timed], waits[:, timed]
    network, last = waits.min(axis=0), waits.argmin(axis=0)
    idle = (waits - network).mean(axis=0)
    whole = float(steps.mean())
    of = plural(steps.shape[1], "step")
    ends = [(name, median_interval(s)) for name, s in (("network", network), ("idle", idle))]
    words = {n: f"{format_seconds(i.value)} {bracket(i, of)}" for n, i in ends}
    shares = {name: float(s.mean()) / whole for name, s in (("network", network), ("idle", idle))}
    critical, times = Counter(last.tolist()).most_common(1)[0]
    rank, ranks = run.steps[critical].rank, len(run.steps)
    fair = f"{1 / ranks:.0%} would be chance"
    return [
        (
            f"Of a step, {shares['network']:.0%} is the sum over ranks that no computing hides, "
            f"{words['network']}, and {shares['idle']:.0%} waiting for the last of {ranks} ranks, "
            f"{words['idle']}."
        ),
        f"Rank {rank} is the last in {times / len(last):.0%} of {of}; {fair}.",
    ]


def overlap_lines(folder: Path) -> list[str]:
    """How much of the sum over ranks is hidden behind computing, from traces of the profiler."""
    traces = sorted((folder / "profile").glob("rank*.json"))
    shares, seconds = [], 0.0
    for path in traces:
        sums, computing = spans_of(path)
        total = covered(sums)
        if total > 0:
            hidden = total + covered(computing) - covered([*sums, *computing])
            shares.append(hidden / total)
            seconds += total
    if not shares:
        return [_NO_TRACE]
    ends = f"{min(shares):.0%}-{max(shares):.0%}, " if len(shares) > 1 else ""
    summed, of = format_seconds(seconds), plural(len(shares), "trace")
    line = f"{float(np.mean(shares)):.0%} of the {summed} in which ranks summed was hidden behind"
    return [f"{line} computing [{ends}{of} of the profiler]."]


def spans_of(path: Path) -> tuple[list[Span], list[Span]]:
    """Spans in which a rank communicated and computed, from a trace of torch's profiler.

    Args:
        path: The trace.

    Returns:
        Spans in seconds; none if the file is too long or is no trace.
    """
    sums: list[Span] = []
    computing: list[Span] = []
    for name, category, span in _events(path):
        if name.lower().startswith(_SUMS):
            sums.append(span)
        elif category in ("kernel", "cpu_op"):
            computing.append(span)
    return sums, computing


def _events(path: Path) -> Iterator[tuple[str, str, Span]]:
    if path.stat().st_size > MOST_BYTES:
        return
    with contextlib.suppress(ValueError, OSError):
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        events = content.get("traceEvents", []) if isinstance(content, dict) else content
        kernels = any(e.get("cat") == "kernel" for e in events if isinstance(e, dict))
        for event in events:
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                category = str(event["cat"])
                if event["ph"] == "X" and not (kernels and category == "cpu_op"):
                    begin = float(event["ts"]) / 1e6
                    yield str(event["name"]), category, (begin, begin + float(event["dur"]) / 1e6)


def covered(spans: Sequence[Span]) -> float:
    """The seconds in which at least one span is under way.

    >>> covered([(0, 2), (1, 3), (5, 6)])
    4
    """
    seconds, end = 0.0, float("-inf")
    for begin, stop in sorted(spans):
        seconds += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return seconds
