"""The report of a loader benchmark: the seed's table, one line for each case, the ladder.

The seconds of a batch are the time that a launch took for its batches over their number, as the
seed counted them: a queue hands batches out in bursts, and the median of such waits would be that
of a full queue. A cell's value is the median over its launches, with an interval (95 %) that is
bootstrapped over launches. Waits are the raw ones, each a batch, of all launches together. The wait
for the first batch of an epoch is left out.

MB is 10^6 bytes here, and MB/s "decoded" counts the bytes of the batch that was asked for, so that
all loaders and all rungs of the ladder are compared by what they deliver. What a reader fetched and
decoded beyond that is its read amplification.

The ladder takes the same batches a step further each time:

    L1  files     the files of each batch, in the order of the plan
    L2  decode    and their chunks decoded
    L3  scatter   and copied to where they belong in a batch that is used again
    L4  loader    the same through the loader: tickets, queue, ring of buffers
    L5  transfer  and to the device

Each rung does the work of the one below it and one step more, so the difference is the cost of that
step, and the step that costs most is the limit. A rung that is slower than one above it was
measured too slow: its cost cannot be separated from that of the steps above.

Figures: the time of a batch by threads, a panel for each batch size and a line for each loader, or
bars if there is one number of threads; and what a batch costs at each rung. Cases that differ in
anything else have figures of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ...base import format_bytes, format_seconds, group_by, plural, significant
from ...instruments import FAILED, Record
from ..cell import cell_ratio, column_of, inverse, machine_namer, speed_up
from ..charts.chart import Axis, Figure, Panel, Series
from ..table import Section, bracket, or_dash, scaled, spread, times_bracket
from .cell import (
    COLD_MOST,
    COUNTS,
    MB,
    SEED_NAMES,
    WARM_LEAST,
    LoaderCell,
    cache_label,
    loader_cells,
    read_again_of,
)
from .rungs import RUNGS, Ladder, ladder_headlines, ladder_sections


def loader_sections(records: Iterable[Record]) -> list[Section]:
    """The sections of a report: what was read, the seed's table, each case, sentences, ladders."""
    records = list(records)
    sections: list[Section] = []
    cells = loader_cells(records)
    machine = machine_namer(cells)
    for group in group_by(cells, lambda cell: cell.group).values():
        where = heading(group) + machine(group[0])
        shares = "p50", "p95", "p99", "max", "batches"
        waits = [
            ("batch", "threads", "loader", "first batch", *shares, *COUNTS),
            *(
                (
                    str(cell.batch),
                    str(cell.threads),
                    cell.loader,
                    or_dash(cell.first_s, format_seconds),
                    *(or_dash(cell.wait(q), format_seconds) for q in (0.5, 0.95, 0.99, 1.0)),
                    str(len(cell.waits)),
                    *(or_dash(cell.most(name), str) for name in COUNTS),
                )
                for cell in group
            ),
        ]
        sections += [
            Section(where),
            Section("Seconds for a batch", _seed_table(group)),
            Section(
                "Speed, and what it costs; MB is 10^6 bytes",
                _speed_table(group),
            ),
            Section(
                "Waits for single batches, and whether they were the right ones",
                waits,
                [*troubles(group), *comparisons(group)],
            ),
        ]
    return sections + ladder_sections(records)


def loader_headlines(records: Iterable[Record]) -> list[str]:
    """What limits the loader, how fast batches would come without the limit, and the fastest
    loader."""
    records = list(records)
    cells = [c for c in loader_cells(records) if c.launches and c.seconds]
    return [*ladder_headlines(records), *_fastest(cells)]


def _fastest(cells: Sequence[LoaderCell]) -> list[str]:
    """The loader with the most samples a second, of each data set and cache."""
    lines = []
    for group in group_by(cells, lambda cell: cell.group).values():
        best = max(group, key=lambda cell: cell.rate("samples") or 0.0)
        if best.time is None or not best.rate("samples"):
            continue
        where = f"batch {best.batch}, {plural(best.threads, 'thread')}"
        ends = bracket(best.time, plural(best.launches, "launch"))
        others = [c for c in group if c is not best and c.time is not None]
        lines.append(
            f"Most samples a second of {plural(len(group), 'case')}: {best.loader}, {where}: "
            f"{significant(best.rate('samples') or 0.0)}, {format_seconds(best.time.value)} a "
            f"batch {ends}{_doubt(best, others)}."
        )
    return lines


def _doubt(best: LoaderCell, others: Sequence[LoaderCell]) -> str:
    """Words on the cells that may do as many samples a second as the best; empty if none may."""
    single = [cell for cell in others if min(cell.launches, best.launches) < 2]
    gains = (
        speed_up(cell_ratio(cell, best), cell, best, "samples")
        for cell in others
        if cell not in single
    )
    alike = sum(gain is None or not gain.excludes(1) for gain in gains)
    words = f", not distinguishable from {plural(alike, 'other')}" if alike else ""
    return words + (f", not compared with {plural(len(single), 'other')}" if single else "")


def heading(group: Sequence[LoaderCell]) -> str:
    """The data, its order, and where it is."""
    case = group[0].case
    return ", ".join([str(case["data"]), f"shuffle {case['shuffle']}", cache_label(group)])


def _seed_table(group: Sequence[LoaderCell]) -> list[tuple[str, ...]]:
    """A line for each batch size and number of threads, a column for each loader."""
    names = list(dict.fromkeys(cell.loader for cell in group))
    at = {
        (cell.batch, cell.threads, cell.loader): cell.status
        if cell.seconds is None
        else significant(cell.seconds)
        for cell in group
    }
    lines = [("batch", "threads", *(SEED_NAMES.get(name, name) for name in names))]
    for place in dict.fromkeys((cell.batch, cell.threads) for cell in group):
        lines.append((*map(str, place), *(at.get((*place, name), "-") for name in names)))
    return lines


def _speed_table(group: Sequence[LoaderCell]) -> list[tuple[str, ...]]:
    head = "batch", "threads", "loader", "s/batch", "95 %", "MB/s decoded", "stored", "samples/s"
    lines: list[tuple[str, ...]] = [
        (*head, "read x", "CPU s/GB", "memory", "launches", "status"),
    ]
    lines += [
        (
            str(cell.batch),
            str(cell.threads),
            cell.loader,
            or_dash(cell.seconds),
            spread(cell.time),
            or_dash(scaled(cell.rate("bytes"), 1 / MB)),
            or_dash(scaled(cell.stored_speed, 1 / MB)),
            or_dash(cell.rate("samples")),
            or_dash(cell.per_launch("read_amplification")),
            or_dash(cell.per_launch("cpu_s_per_gb")),
            or_dash(cell.host_peak, format_bytes),
            str(cell.launches),
            cell.status,
        )
        for cell in group
    ]
    return lines


def troubles(group: Sequence[LoaderCell]) -> list[str]:
    """Sentences on failures, and on a cache that was not as asked for."""
    failed = [f"{c.loader} {FAILED[c.status]}: {c.error}" for c in group if c.status != "ok"]
    lines = [*dict.fromkeys(failed)]
    asked, medians = group[0].case["cache"], [c.per_launch("resident") for c in group]
    shares = [share for share in medians if share is not None]
    if asked == "cold" and shares and max(shares) > COLD_MOST:
        lines.append(
            f"The cache was not cold: up to {100 * max(shares):.0f} % of the data was in memory."
        )
    if (again := read_again_of(group)) > COLD_MOST:
        lines.append(
            f"After the first batch, {100 * again:.0f} % of the bytes had been read for an earlier "
            "batch, because a chunk holds several samples: they came from memory, even with a "
            "cold cache."
        )
    if asked == "warm" and shares and min(shares) < WARM_LEAST:
        lines.append(
            f"The cache was not warm: as little as {100 * min(shares):.0f} % of the data was in "
            "memory, because it is larger than the free memory."
        )
    return lines


def comparisons(group: Sequence[LoaderCell]) -> list[str]:
    """Compare each other loader with the first one, at the same threads and batch size."""
    lines = []
    sound = [cell for cell in group if cell.launches]
    for base in (cell for cell in sound if cell.loader == group[0].loader):
        where = f"Batch {base.batch}, {plural(base.threads, 'thread')}"
        others = [
            cell
            for cell in sound
            if cell is not base and (cell.batch, cell.threads) == (base.batch, base.threads)
        ]
        if others and base.launches == 1:
            lines.append(f"{where}: one launch each, not compared.")
            continue
        lines += [f"{where}: {_against(base, other)}." for other in others]
    return lines


def _against(base: LoaderCell, other: LoaderCell) -> str:
    ratio = cell_ratio(base, other)
    launches = f"{plural(ratio.n, 'launch')} each"
    if not ratio.excludes(1):
        ends = times_bracket(ratio, launches)
        return f"{base.loader} and {other.loader} are not distinguishable {ends}"
    verb = "faster" if ratio.value > 1 else "slower"
    factor = ratio if ratio.value > 1 else inverse(ratio)
    ends = times_bracket(factor, launches)
    return f"{base.loader} is {factor.value:.2f}x {verb} than {other.loader} {ends}"


def draw_loader(cells: Sequence[LoaderCell], source: str) -> Figure:
    """The time of a batch by threads, or by loader if there is one number of threads."""
    fastest_first = sorted(cells, key=lambda cell: float(cell.row["seconds_per_batch"] or "inf"))
    loaders = list(dict.fromkeys(cell.loader for cell in fastest_first))
    threads = sorted({cell.threads for cell in cells})
    words = [cells[0].row["data"]]
    words += [plural(count, "thread") for count in threads if len(threads) == 1]
    about = f"{', '.join(words)}; {plural(len(cells), 'case')} of {source}"
    panels = []
    for batch in sorted({cell.batch for cell in cells}):
        of_batch = [cell for cell in cells if cell.batch == batch]
        draw = _bars if len(threads) == 1 else _lines
        panels.append(draw(f"Batches of {batch}", of_batch, loaders))
    return Figure("Time of a batch", about, panels, 2)


def _lines(title: str, cells: Sequence[LoaderCell], loaders: Sequence[str]) -> Panel:
    """Lines over threads. Loaders differ by factors: on a linear axis the fast ones would
    overlap."""
    series = []
    for place, loader in enumerate(loaders):
        line = sorted((c for c in cells if c.loader == loader), key=lambda cell: cell.threads)
        x, (seconds, low, high) = column_of(line, "threads"), _seconds_of(line)
        look: dict[str, Any] = {"colour": place, "dashes": place // 6, "low": low, "high": high}
        series += [Series(loader, x, seconds, "dots", **look)] * bool(line)
    return Panel(title, Axis("Threads", whole=True), Axis("Time", "s", log=True), series)


def _bars(title: str, cells: Sequence[LoaderCell], loaders: Sequence[str]) -> Panel:
    series = []
    for colour, ours in enumerate((True, False)):
        same = [cell for cell in cells if cell.loader.startswith("penstock") is ours]
        seconds, low, high = _seconds_of(same)
        texts = [format_seconds(value) for value in seconds]
        places = [float(loaders.index(cell.loader)) for cell in same]
        series += [
            Series(label, places, seconds, "bars", colour, low=low, high=high, texts=texts)
            for label in (["Penstock" if ours else "others"] if same else [])
        ]
    return Panel(title, Axis("Loader", ticks=loaders), Axis("Time", "s"), series)


def _seconds_of(cells: Sequence[LoaderCell]) -> list[Any]:
    """The seconds of a batch of each cell, and the ends of their intervals."""
    return [column_of(cells, n) for n in ("seconds_per_batch", "low_seconds", "high_seconds")]


def draw_ladders(ladders: Sequence[Ladder]) -> Figure:
    """What each rung of a batch costs beyond the rung below it. The largest cost is marked."""
    case = next(iter(ladders[0].rungs.values())).case
    where = f"{case['data']}, cache {case['cache']}"
    return Figure("Cost of a batch, step by step", where, list(map(_ladder_panel, ladders)), 2)


def _ladder_panel(ladder: Ladder) -> Panel:
    names = list(ladder.measured)
    first = ladder.measured[names[0]]
    ends = np.array(list(ladder.seconds.values()))
    starts = np.array([0.0, *ends[:-1]])
    notes = [
        f"{format_seconds(end)}, {significant((ladder.measured[n].rate('bytes') or 0) / 1e6)} MB/s"
        for n, end in zip(names, ends, strict=True)
    ]
    series = []
    for label, marked in (("a step", False), ("the largest cost", True)):
        at = [place for place, name in enumerate(names) if (name == ladder.limiting) is marked]
        texts = [notes[place] for place in at]
        look: dict[str, Any] = {"base": starts[at], "texts": texts, "colour": int(marked)}
        series += [Series(label, np.array(at, float), ends[at], "bars", **look)] * bool(at)
    labels = [f"{name} {RUNGS[name]}" for name in names]
    labels[0] = f"up to {labels[0]}"
    title = f"Batches of {first.batch}, {plural(first.threads, 'thread')}"
    return Panel(title, Axis("Step", ticks=labels), Axis("Time", "s"), series)
