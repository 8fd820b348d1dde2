"""The report of a queue benchmark, beside a simulation and the seed's table.

Batches are first read while nothing computes, which gives the seconds from one batch to the next
for each number of workers. The simulation plays every case event by event from these seconds and
from the seconds of a step, with as many batches in the hands of its readers as they may hold. No
case is fitted to itself. Beside what was measured stand

    seconds per iteration    the mean of all, also of those from the full queue, as the seed had it
    cleared                  the first iteration, from 0, that ends with an empty queue

The steady state comes after the queue is empty, or if it never is.

Utilisation is the accelerator's, by the formula of MLPerf Storage, in the steady state. A second
column has it over all iterations but the first, which includes the batches that a full queue held
at the start. The formula needs the seconds of a step that never waits. Each launch times them
before reading begins. The median over all launches of a table is used, because the step is the same
in all of them.

Readings that no case is simulated from, such as those of `penstock tune loader`, have a table of
their own.

A value is the median over launches, and its spread is from the least to the most of them. The
interval (95 %) of a mean within launches is bootstrapped over launches and their iterations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...base import format_seconds, significant
from ...instruments import Record
from ..cell import machine_namer, middle
from ..table import Section
from ..words import or_dash, spread
from .cell import (
    LONGER,
    QueueCell,
    cleared_at,
    middle_of,
    none_computes,
    percent_words,
    queue_cells,
)
from .sentences import sentences
from .simulation import seed_row


def queue_sections(records: Iterable[Record]) -> list[Section]:
    """A section for each group of cells: a table and sentences."""
    groups = queue_cells(records)
    machine = machine_namer(cell for group in groups for cell in group)
    return [Section(heading(g) + machine(g[0]), table(g), sentences(g)) for g in groups]


def heading(group: Sequence[QueueCell]) -> str:
    case = group[0].case
    where = f"{case['data']}, batches of {group[0].batch}, order {case['shuffle']}"
    if none_computes(group):
        return f"{where}; read while nobody computes"
    step = case["compute"]
    took = next((cell.compute_s for cell in group if cell.measured), None)
    asked = case["compute_time"]
    if took and asked and not 1 / LONGER <= took / asked <= LONGER:
        step += f", asked for {format_seconds(asked)}"
    seconds = format_seconds(took) if took is not None else "?"
    iterations = f"{group[0].iterations} iterations from a full queue"
    return f"{where}; steps of {seconds} ({step}), {iterations}"


def table(group: Sequence[QueueCell]) -> list[tuple[str, ...]]:
    """A line for each cell: seconds per iteration, clearing and utilisation, measured, simulated,
    and in the seed's own table."""
    if none_computes(group):
        return [_READING, *map(_reading_line, group)]
    return [_STEPS, *map(_line, group)]


_STEPS = (
    "workers", "queue", "s/it", "simulated", "steady", "cleared", "simulated", "AU steady",
    "AU of all", "seed s/it", "seed cleared",
)  # fmt: skip
_READING = ("workers", "queue", "s/batch", "95 %", "samples/s", "batches", "launches", "status")


def _line(cell: QueueCell) -> tuple[str, ...]:
    if not cell.measured:
        return (str(cell.workers), str(cell.queue), cell.status, *[""] * 8)
    seed, simulated = seed_row(cell.workers, cell.queue), cell.simulated
    return (
        str(cell.workers),
        str(cell.queue) if cell.workers else "",
        or_dash(middle(cell.means)),
        significant(simulated.mean_s) if simulated else "",
        significant(cell.steady.value) if cell.steady else "",
        cleared_at(middle_of(cell.cleared)) if cell.workers else "",
        cleared_at(simulated.cleared) if simulated and cell.workers else "",
        percent_words(middle(cell.steady_utilisations)),
        percent_words(middle(cell.utilisations)),
        f"{seed.seconds:.1f}" if seed else "",
        "" if seed is None or seed.cleared is None else str(seed.cleared),
    )


def _reading_line(cell: QueueCell) -> tuple[str, ...]:
    """Seconds from one batch to the next, by workers."""
    interval = cell.alone
    read = ("-", "-", "-", "-")
    if interval is not None and interval.low is not None and interval.high is not None:
        rate = significant(cell.batch / interval.value)
        read = (significant(interval.value), spread(interval), rate, str(interval.n))
    queue = str(cell.queue) if cell.workers else ""
    return (str(cell.workers), queue, *read, str(cell.launches), cell.status)
