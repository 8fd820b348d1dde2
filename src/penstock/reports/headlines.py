"""The verdicts on a ledger, in sentences: what limits each benchmark, and what would help.

The first sentence of a kind of benchmark is its verdict. Each sentence gives the number of launches
and, if there are several, an interval. If nothing was measured, the sentence says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..base import format_seconds, group_by, plural, significant
from ..instruments import Record
from .cell import Cell, cell_ratio, middle, speed_up
from .loader.cell import LoaderCell, loader_cells
from .loader.rungs import ladders_of
from .queue.cell import QueueCell, none_computes, queue_cells
from .suite.cell import runs_together
from .suite.report import best_and_limits
from .tune.model_advice import recommend
from .words import bracket, of_launches

_GOALS = ("throughput", "training", "latency")
_NAMED = 3
"""Most ladders that the verdict names. The chapter has all."""


def model_headlines(records: Iterable[Record]) -> list[str]:
    """The settings that a sweep supports, those with the most throughput first."""
    records = [record for record in records if record.scenario == "model"]
    if not any(record.ok for record in records):
        return [_nothing(records)]
    advice = recommend(records)
    choices = sorted(advice.choices, key=lambda choice: _GOALS.index(choice.goal))
    return [*(choice.sentence for choice in choices), *advice.notes]


def loader_headlines(records: Iterable[Record]) -> list[str]:
    """What limits the loader, how fast batches would come without the limit, and the fastest
    loader."""
    records = [record for record in records if record.scenario in ("loader", "ladder")]
    if not any(record.ok for record in records):
        return [_nothing(records)]
    cells = [c for c in loader_cells(records) if c.launches and c.seconds]
    return [*ladder_headlines(records), *_fastest(cells)]


def ladder_headlines(records: Iterable[Record]) -> list[str]:
    """The limit at each batch size and number of threads, and how fast batches come without it."""
    ladders = [ladder for ladder in ladders_of(records) if ladder.measured]
    ladders.sort(key=lambda ladder: -max(ladder.seconds.values()))
    lines = [ladder.sentence() for ladder in ladders if ladder.limiting]
    if len(lines) > _NAMED:
        more = f"{len(lines) - _NAMED} more combinations of batch and threads are below."
        return [*lines[:_NAMED], more]
    return lines


def _fastest(cells: Sequence[LoaderCell]) -> list[str]:
    """The loader with the most samples a second, of each data set and cache."""
    lines = []
    for group in group_by(cells, lambda cell: cell.group).values():
        best = max(group, key=lambda cell: cell.speed("samples") or 0.0)
        if best.time is None or not best.speed("samples"):
            continue
        where = f"batch {best.batch}, {plural(best.threads, 'thread')}"
        ends = bracket(best.time, plural(best.launches, "launch"))
        others = [c for c in group if c is not best and c.time is not None]
        lines.append(
            f"Most samples a second of {plural(len(group), 'case')}: {best.loader}, {where}: "
            f"{significant(best.speed('samples') or 0.0)}, {format_seconds(best.time.value)} a "
            f"batch {ends}{_doubt(best, others, 'samples')}."
        )
    return lines


def _doubt(best: Cell, others: Sequence[Cell], work: str) -> str:
    """Words on the cells that may do as many units a second as the best; empty if none may."""
    single = [cell for cell in others if min(cell.launches, best.launches) < 2]
    gains = (
        speed_up(cell_ratio(cell, best), cell, best, work) for cell in others if cell not in single
    )
    alike = sum(gain is None or not gain.excludes(1) for gain in gains)
    words = f", not distinguishable from {plural(alike, 'other')}" if alike else ""
    return words + (f", not compared with {plural(len(single), 'other')}" if single else "")


def queue_headlines(records: Iterable[Record]) -> list[str]:
    """How long the accelerator waits at best, what limits it, and what a faster reader gains."""
    records = [record for record in records if record.scenario == "queue"]
    if not any(record.ok for record in records):
        return [_nothing(records)]
    return [line for group in queue_cells(records) if (line := _of_queue(group))]


def _of_queue(group: Sequence[QueueCell]) -> str:
    measured = [cell for cell in group if cell.measured]
    if none_computes(group):
        best = min((c for c in measured if c.alone), key=lambda c: c.alone.value, default=None)  # type: ignore[union-attr]
        if best is None or best.alone is None:
            return ""
        ends = bracket(best.alone, plural(best.alone.n, "batch"))
        return (
            f"While nobody computes, a batch comes every {format_seconds(best.alone.value)} {ends} "
            f"at best, with {best.name}."
        )
    settled = [cell for cell in measured if cell.settled]
    if not settled:
        return (
            f"No case of {len(group)} reached the steady state, so it is not known how long "
            "the accelerator waits; use more --iterations of bench queue."
        )
    best = max(settled, key=lambda cell: round(float(np.median(cell.steady_utilisations)), 3))
    waits = [1 - used for used in best.steady_utilisations]
    waited = middle(waits) or 0.0
    ends = of_launches(waits, "{:.0%}".format)
    line = f"the accelerator waited {waited:.0%} of the time [{ends}] at best, with {best.name}"
    if best.alone is None:
        return f"{line[:1].upper()}{line[1:]}; reading alone was not measured."
    if best.alone.value <= best.compute_s:
        return (
            f"Bound by computing: a batch comes every {format_seconds(best.alone.value)} and a "
            f"step takes {format_seconds(best.compute_s)}; {line}."
        )
    need = best.alone.value / best.compute_s
    return (
        f"Bound by reading: a batch comes every {format_seconds(best.alone.value)} "
        f"{bracket(best.alone, plural(best.alone.n, 'batch'))} and a step takes "
        f"{format_seconds(best.compute_s)}; {line}. A reader {need:.2f}x as fast would keep it fed."
    )


def suite_headlines(records: Iterable[Record]) -> list[str]:
    """What limits the runs of each preset, and the run with the most samples a second."""
    records = [record for record in records if record.scenario == "train"]
    lines = []
    for runs in runs_together(records).values():
        lines += best_and_limits(runs)
    return lines or [_nothing(records)]


def _nothing(records: Iterable[Record]) -> str:
    """Say that no launch was ok."""
    status = [record.status for record in records]
    counts = ", ".join(f"{status.count(each)} {each}" for each in dict.fromkeys(status))
    return (
        f"Nothing was measured: of {plural(len(status), 'launch')} none was ok ({counts}), so "
        "the speed is not known."
    )
