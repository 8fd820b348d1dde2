"""What limited a benchmark, and what to change, from its records.

For twice the threads, a ladder or a queue gives a bound: at best, the limiting step takes half the
time. If the ledger also holds a case with twice the threads, its measured gain is compared with
that prediction.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from ..base import format_seconds, group_by, plural
from ..bench import known_roof
from ..instruments import Interval, Record
from .cell import cell_ratio, inverse
from .change import Change, Held
from .headlines import gain_without
from .loader.ladder import RUNGS, Ladder, ladders_of, same_case_but_rung
from .mfu import mfu_lines
from .model.report import roof_line
from .queue.cell import QueueCell, none_computes, queue_cells
from .suite.cell import SuiteCell, runs_together

_THREADED = ("L1", "L2", "L3")
"""Rungs that more threads may speed up."""
_NOTABLE = 0.05


def explain_records(records: Sequence[Record]) -> tuple[list[Change], list[Held], list[str]]:
    """Explain the records of a benchmark.

    Args:
        records: Launches of any scenarios.

    Returns:
        The changes that they support, the changes that they tested, and sentences on the share of
        the machine's measured peak.
    """
    changes: list[Change] = []
    held: list[Held] = []
    for group in (*_of_ladders(records), *_of_queues(records), *_of_suites(records)):
        changes += group[0]
        held += group[1]
    return changes, held, _roofs(records)


def _roofs(records: Sequence[Record]) -> list[str]:
    """Shares of the machine's measured peak: the best model's and the fastest training's."""
    models = [record for record in records if record.scenario == "model"]
    line = roof_line(models, known_roof) if models else ""
    trained = [record for record in records if record.scenario == "train" and record.ok]
    fastest = max(trained, key=lambda r: r.facts["training"]["samples_per_s"] or 0.0, default=None)
    of_training = mfu_lines(fastest.facts["training"], fastest.case) if fastest else []
    return [*[line] * bool(line), *of_training]


Explained = tuple[list[Change], list[Held]]


def _of_ladders(records: Iterable[Record]) -> Iterable[Explained]:
    for alike in same_case_but_rung([each for each in ladders_of(records) if each.measured]):
        for same in group_by(alike, lambda ladder: _top(ladder).batch).values():
            by_threads = {_top(ladder).threads: ladder for ladder in same}
            yield _by_doubling(by_threads, _of_ladder, _ladder_gain)


def _top(ladder: Ladder) -> Any:
    return ladder.measured[list(ladder.measured)[-1]]


def _of_ladder(ladder: Ladder) -> Change | None:
    limit, top = ladder.limiting, list(ladder.measured)[-1]
    if limit not in _THREADED:
        return None
    whole = gain_without(ladder, top, limit, list(ladder.costs))
    if whole is None:
        return None
    cell = ladder.measured[top]
    # Half of the step's time: 1 / (1 - cost / 2), from 1 / (1 - cost) = gain.
    half, high = (2 * end / (end + 1) for end in (whole.value, whole.high or whole.value))
    share = ladder.costs[limit] / ladder.seconds[top]
    cores = (cell.environment("limits") or {}).get("affinity") or math.inf
    computes = limit != "L1" and cell.threads >= cores  # threads beyond the cores add nothing
    why = f"{RUNGS[limit]} takes {format_seconds(ladder.costs[limit])} of a batch, {share:.0%}"
    words = ["penstock", "bench", "loader", str(cell.case["data"]), "--threads"]
    words += [str(2 * cell.threads), "--batch-sizes", str(cell.batch)]
    return Change(
        f"{2 * cell.threads} {'cores' if computes else 'threads'} in place of {cell.threads} "
        f"(batch {cell.batch})",
        why,
        Interval(half, 1.0, high, whole.n),
        f"least if others use the cores, most if {RUNGS[limit]} takes half; "
        f"{plural(whole.n, 'launch')} of each",
        {} if computes else {"threads": 2 * cell.threads},
        "" if computes else shlex.join(words),
    )


def _ladder_gain(a: Ladder, b: Ladder) -> Interval | None:
    shared = [name for name in a.measured if name in b.measured]
    return inverse(cell_ratio(a.measured[shared[-1]], b.measured[shared[-1]])) if shared else None


def _by_doubling(by_size: dict[int, Any], change_of: Any, gain: Any) -> Explained:
    """The change for the largest size, and what the changes of smaller sizes gained."""
    held = []
    for size, each in by_size.items():
        twice = by_size.get(2 * size or 2)
        change = change_of(each) if twice is not None else None
        measured = gain(each, twice) if change else None
        if change and measured:
            held.append(Held(change, "the test in this ledger", measured))
    last = change_of(by_size[max(by_size)])
    return [last] * bool(last), held


def _of_queues(records: Iterable[Record]) -> Iterable[Explained]:
    for group in queue_cells(records):
        if none_computes(group):
            continue
        settled = [cell for cell in group if cell.steady is not None and cell.workers]
        by_workers = group_by(settled, lambda cell: cell.workers)
        best = {w: min(c, key=lambda cell: cell.steady.value) for w, c in by_workers.items()}  # type: ignore[union-attr]
        if best:
            yield _by_doubling(best, _of_queue, _queue_gain)


def _of_queue(cell: QueueCell) -> Change | None:
    steady, step = cell.steady, cell.compute_s
    assert steady is not None
    waited = 1 - step / steady.value
    if waited < _NOTABLE:
        return None
    most = min(2.0, steady.value / step)
    high = min(2.0, (steady.high or steady.value) / step)
    words = ["penstock", "bench", "queue", str(cell.case["data"]), "--workers"]
    words += [str(2 * cell.workers), "--queue-sizes", str(cell.queue)]
    words += ["--batch-size", str(cell.batch), "--compute-time", f"{step:.4g}"]
    return Change(
        f"{plural(2 * cell.workers, 'worker')} in place of {cell.workers}",
        f"steps of {format_seconds(step)} wait for batches for {waited:.0%} of the time",
        Interval(most, 1.0, high, len(cell.settled)),
        "least if others use the cores, most if reading takes half; "
        f"{plural(len(cell.settled), 'launch')}",
        {"workers": 2 * cell.workers},
        shlex.join(words),
    )


def _queue_gain(a: QueueCell, b: QueueCell) -> Interval | None:
    one, other = a.steady, b.steady
    if one is None or other is None:
        return None
    low, high = (
        None if of is None or to is None else of / to
        for of, to in ((one.low, other.high), (one.high, other.low))
    )
    return Interval(one.value / other.value, low, high, min(len(a.settled), len(b.settled)))


def _of_suites(records: Iterable[Record]) -> Iterable[Explained]:
    for runs in runs_together(r for r in records if r.scenario == "train").values():
        for same in group_by(runs, lambda run: run.batch).values():
            measured = {run.workers: run for run in same if run.throughput is not None}
            if measured:
                yield _by_doubling(measured, _of_suite, _suite_gain)


def _of_suite(run: SuiteCell) -> Change | None:
    waits = run.shares_of("data")
    if not waits or max(waits) < _NOTABLE:
        return None
    more = 2 * run.workers or 2
    middle = sorted(waits)[len(waits) // 2]
    what = f"{plural(more, 'worker')} that load batches in place of {run.workers}"
    return Change(
        f"{what} (batch {run.batch})",
        f"steps wait for data for {middle:.0%} of the epochs",
        Interval(1 / (1 - middle), 1.0, 1 / (1 - min(max(waits), 0.99)), len(waits)),
        f"least if others use the cores, most if no step waits; {plural(len(waits), 'launch')}",
        {"num_workers": more},
        f"penstock suite, with {more} in num_workers of the preset",
    )


def _suite_gain(a: SuiteCell, b: SuiteCell) -> Interval | None:
    if not (a.throughput and b.throughput):
        return None
    ratio = [other / one for one in a.rates for other in b.rates]
    n = min(len(a.rates), len(b.rates))
    low, high = (min(ratio), max(ratio)) if n > 1 else (None, None)
    return Interval(b.rates_median / a.rates_median, low, high, n)
