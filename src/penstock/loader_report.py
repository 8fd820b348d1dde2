"""What a loader benchmark measured: the seed's table, one line for each case, the ladder.

The seconds of a batch are the time that a launch took for its batches over their number, as the
seed counted them: a queue hands batches out in bursts, and the median of such waits would be that
of a full queue. A cell's value is the median over its launches, with an interval (95 %) that is
bootstrapped over launches. Waits are the raw ones, each a batch, of all launches together. The wait
in which an epoch begins is for a first batch, and is not among them.

MB is 10^6 bytes here, and MB/s "decoded" counts the bytes of the batch that was asked for, so that
all loaders and all rungs of the ladder are compared by what they deliver. What a reader fetched and
decoded beyond that is its read amplification.

The ladder takes the same batches a step further each time:

    L0  device    as many bytes from one file, from end to end
    L1  files     the files of each batch, in the order of the plan
    L2  decode    and their chunks decoded
    L3  scatter   and copied to where they belong in a batch that is used again
    L4  loader    the same through the loader: tickets, queue, ring of buffers
    L5  transfer  and to the device

Each rung does what the one below it does and something more, so what it takes longer is the cost of
that, and the step with the greatest cost is what limits. A rung that one above it beats was
measured too slow: its cost is not told apart from that of the steps above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import report, stats
from .loaders import CONTENDERS
from .record import FAILED, Record
from .report import Cell, Row, Section, scaled
from .units import format_bytes, format_seconds, significant

MB = 10**6

SEED_NAMES = {"dask-sample": "per-sample", "dask-stacked": "stacked"}
"""What the seed called two of the loaders."""

RUNGS = {
    "L0": "device",
    "L1": "files",
    "L2": "decode",
    "L3": "scatter",
    "L4": "loader",
    "L5": "transfer",
}

NEEDS = ("loader", "threads", "batch_size")
COLUMNS = tuple(
    "timestamp loader threads batch_size seconds_per_batch low_seconds high_seconds "
    "samples_per_sec decoded_mb_per_sec stored_mb_per_sec first_batch_s wait_p50_s wait_p95_s "
    "wait_p99_s wait_max_s read_amplification cpu_s_per_gb host_peak_mb duplicates missing wrong "
    "cache resident fresh shuffle window latency_ms endpoint data dataset batches launches failed "
    "status error cores affinity cgroup_cpus seed machine_key commit key".split()
)

CASE_APART = tuple("data dataset shuffle window cache endpoint latency_ms seed batches".split())
"""Knobs that tell tables apart: only loaders, threads and batches are compared in one."""

_COLD_MOST = 0.05
"""More of the data than this in the page cache is not a cold cache."""
WARM_LEAST = 0.95
"""With this share of files in the page cache, it is memory that they are read from."""
FRESH_LEAST = 0.9
"""Of less than this, too much of what was waited for had been read before. A few batches more or
less in a queue, over some ten of them, are not much."""


class LoaderCell(Cell):
    """All launches of one loader, with so many threads, at one batch size."""

    @property
    def loader(self) -> str:
        return str(self.case["loader"])

    @property
    def threads(self) -> int:
        return int(self.case["threads"])

    @cached_property
    def _waits(self) -> list[NDArray[np.float64]]:
        """Of every batch, by launch."""
        return [_waits_of(record) for record in self.measured]

    @cached_property
    def times(self) -> list[NDArray[np.float64]]:
        """Seconds of a batch, one number for each launch: all its waits over their number."""
        return [np.array([np.mean(waits)]) for waits in self._waits]

    @cached_property
    def waits(self) -> NDArray[np.float64]:
        """Of every batch of every launch."""
        return np.concatenate([np.empty(0), *self._waits])

    def wait(self, q: float) -> float | None:
        return stats.quantile(self.waits, q) if len(self.waits) else None

    def per_launch(self, name: str) -> float | None:
        """The median over launches of a number among their facts."""
        values = [record.facts.get(name) for record in self.records]
        known = [value for value in values if value is not None]
        return float(np.median(known)) if known else None

    def most(self, name: str) -> int | None:
        """The most that any launch said, a failed one too."""
        return max((r.facts[name] for r in self.records if name in r.facts), default=None)

    @property
    def seconds(self) -> float | None:
        return self.time.value if self.time else None

    @property
    def read_ahead(self) -> float:
        """The share of its samples' bytes that was read before they were waited for; 0 where that
        is little, or not known."""
        fresh = self.per_launch("fresh")
        return 1 - fresh if fresh is not None and fresh < FRESH_LEAST else 0.0

    def speed(self, quantity: str) -> float | None:
        """Work of a batch for each of its seconds."""
        work = self.work(quantity)
        return work / self.seconds if work is not None and self.seconds else None

    @property
    def stored_speed(self) -> float | None:
        stored = self.per_launch("stored_bytes")
        return stored / self.seconds if stored is not None and self.seconds else None

    @property
    def first_s(self) -> float | None:
        firsts = [r.warmup.first_s for r in self.measured if r.warmup.first_s is not None]
        return float(np.median(firsts)) if firsts else None

    @property
    def error(self) -> str:
        failure = next((r.error for r in self.records if r.error is not None), None)
        return "" if self.status == "ok" or failure is None else " ".join(failure.message.split())

    @cached_property
    def row(self) -> Row:
        case, time = self.case, self.time or stats.Interval(np.nan, None, None, 0)
        limits = self.environment("limits") or {}
        values = {
            **{name: case.get(name) for name in COLUMNS},
            "timestamp": max(record.time for record in self.records),
            "batch_size": self.batch,
            "seconds_per_batch": time.value,
            "low_seconds": time.low,
            "high_seconds": time.high,
            "samples_per_sec": self.speed("samples"),
            "decoded_mb_per_sec": scaled(self.speed("bytes"), 1 / MB),
            "stored_mb_per_sec": scaled(self.stored_speed, 1 / MB),
            "first_batch_s": self.first_s,
            "wait_p50_s": self.wait(0.5),
            "wait_p95_s": self.wait(0.95),
            "wait_p99_s": self.wait(0.99),
            "wait_max_s": self.wait(1.0),
            "read_amplification": self.per_launch("read_amplification"),
            "cpu_s_per_gb": self.per_launch("cpu_s_per_gb"),
            "host_peak_mb": scaled(self.host_peak, 1 / MB),
            "duplicates": self.most("duplicates"),
            "missing": self.most("missing"),
            "wrong": self.most("wrong"),
            "resident": self.per_launch("resident"),
            "fresh": self.per_launch("fresh"),
            "launches": self.launches,
            "failed": len(self.records) - self.launches,
            "status": self.status,
            "error": self.error,
            "cores": (self.environment("machine") or {}).get("cores"),
            "affinity": limits.get("affinity"),
            "cgroup_cpus": limits.get("cgroup_cpus"),
            "machine_key": self.environment("machine_key"),
            "commit": report.commit_of(self.environment("git")),
            "key": self.records[0].key,
        }
        return {name: report.field(values[name]) for name in COLUMNS}


def _waits_of(record: Record) -> NDArray[np.float64]:
    """The waits of a launch but those for a first batch, unless there are no others."""
    waits = np.asarray(record.samples_s["step"])
    begun = [index for index in record.facts.get("begun", ()) if index < len(waits)]
    return waits if len(begun) == len(waits) else np.delete(waits, begun)


def cells(records: Iterable[Record], scenario: str = "loader") -> list[LoaderCell]:
    """The launches of a scenario by case and machine; small batches and few threads first, and the
    loaders as `penstock.loaders` lists them."""
    places = {name: place for place, name in enumerate(CONTENDERS)}
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record.scenario == scenario:
            machine = record.environment.get("machine_key")
            found.setdefault((record.key, machine), []).append(record)
    all_cells = [LoaderCell(tuple(launches)) for launches in found.values()]
    return sorted(
        all_cells,
        key=lambda cell: (cell.batch, cell.threads, places.get(cell.case.get("loader", ""), -1)),
    )


def append_csv(records: Iterable[Record], path: Path) -> None:
    """Add a row for each case to a CSV of loader benchmarks."""
    report.append_rows([cell.row for cell in cells(records)], path, COLUMNS, NEEDS)


# --- the tables ---------------------------------------------------------------------------------


def sections(records: Iterable[Record]) -> list[Section]:
    """What was read, the seed's table, a line for each case, what they say; then the ladders."""
    records = list(records)
    found: list[Section] = []
    for group in _grouped(cells(records)):
        names = list(dict.fromkeys(cell.loader for cell in group))
        where, *cores = heading(group)
        waits = [_WAITS, *(_waits_line(cell) for cell in group)]
        told = [*troubles(group), *comparisons(group)]
        found += [
            Section(where, (), cores),
            Section("Seconds for a batch", _seed_table(group, names)),
            Section(
                "Speed, and what it costs; MB is 10^6 bytes",
                [_SPEED, *(_speed_line(cell) for cell in group)],
            ),
            Section("Waits for single batches, and whether they were the right ones", waits, told),
        ]
    return found + [ladder.section() for ladder in ladders(records)]


def _grouped(all_cells: Iterable[LoaderCell]) -> list[list[LoaderCell]]:
    groups: dict[tuple[str, ...], list[LoaderCell]] = {}
    for cell in all_cells:
        groups.setdefault(_apart(cell), []).append(cell)
    return list(groups.values())


def _apart(cell: LoaderCell) -> tuple[str, ...]:
    apart = [str(cell.case.get(name)) for name in CASE_APART]
    return (*apart, str(cell.environment("machine_key")))


def heading(group: Sequence[LoaderCell]) -> list[str]:
    """What was read, in what order, from where, on how many cores."""
    case = group[0].case
    words = [str(case["data"]), f"shuffle {case['shuffle']}", cache_label(group), *way(case)]
    return [", ".join(words), *cores_lines(group[0])]


def way(case: Mapping[str, Any]) -> list[str]:
    """How far the data is, of a case or of its row in a CSV.

    >>> way({"latency_ms": "20.0", "endpoint": None})
    ['every request 20 ms late']
    """
    words = []
    if latency := float(case.get("latency_ms") or 0):
        words.append(f"every request {latency:g} ms late")
    if case.get("endpoint"):
        words.append(f"from {case['endpoint']}")
    return words


def cores_lines(cell: Cell) -> list[str]:
    """What the process may use of the machine, where that is less than all of it.

    The seed's threads did nothing for it until it was seen that its scheduler had given it a few
    cores only.
    """
    cores = (cell.environment("machine") or {}).get("cores")
    limits = cell.environment("limits") or {}
    allowed = [limits.get("affinity"), limits.get("cgroup_cpus")]
    least = min((limit for limit in allowed if limit is not None), default=None)
    if cores is None or least is None or least >= cores:
        return []
    told = [f"affinity {allowed[0]}"] * (allowed[0] is not None)
    told += [f"cgroup {allowed[1]:g}"] * (allowed[1] is not None)
    return [f"Of {cores} cores this process may use {least:g} ({', '.join(told)})"]


def cache_label(group: Sequence[Cell]) -> str:
    """What was asked of the page cache and what was really there before the first batch.

    >>> cache_words("cold", 0.0)
    'cold (0 % resident)'
    """
    shares = [r.facts.get("resident") for cell in group for r in cell.records]
    known = [share for share in shares if share is not None]
    asked = str(group[0].case["cache"])
    worst = max(known, default=None) if asked == "cold" else min(known, default=None)
    again = _read_again(group)
    return cache_words(asked, worst) + (
        f", {100 * again:.0f} % read again from memory" * (again > _COLD_MOST)
    )


def _read_again(group: Sequence[Cell]) -> float:
    """Of a cold cache: the most of what later batches read that an earlier one had read."""
    return max((r.facts.get("again", 0.0) for cell in group for r in cell.records), default=0.0)


def cache_words(asked: str, resident: float | None) -> str:
    if resident is None:
        return f"cache {asked} (residency not known)"
    return f"{asked} ({100 * resident:.0f} % resident)"


def _seed_table(group: Sequence[LoaderCell], names: Sequence[str]) -> list[tuple[str, ...]]:
    """Threads x batch down, a column for each loader."""
    at = {(cell.batch, cell.threads, cell.loader): cell for cell in group}
    head = ("batch", "threads", *(_named(name) for name in names))
    lines = [head]
    for batch, threads in dict.fromkeys((cell.batch, cell.threads) for cell in group):
        found = [at.get((batch, threads, name)) for name in names]
        shown = ["-" if cell is None else _seconds_or_status(cell) for cell in found]
        lines.append((str(batch), str(threads), *shown))
    return lines


def _named(loader: str) -> str:
    return f"{loader} ({SEED_NAMES[loader]})" if loader in SEED_NAMES else loader


def _seconds_or_status(cell: LoaderCell) -> str:
    return _seconds(cell) if cell.seconds is not None else cell.status


def _seconds(cell: LoaderCell) -> str:
    """With a star where they are too few."""
    return _shown(cell.seconds) + " *" * bool(cell.read_ahead)


_SPEED = (
    "batch", "threads", "loader", "s/batch", "95 %", "MB/s decoded", "stored", "samples/s",
    "read x", "CPU s/GB", "memory", "launches", "status",
)  # fmt: skip


def _speed_line(cell: LoaderCell) -> tuple[str, ...]:
    time = cell.time
    spread = "-"
    if time is not None and time.low is not None and time.high is not None:
        spread = f"{significant(time.low)} - {significant(time.high)}"
    return (
        str(cell.batch),
        str(cell.threads),
        cell.loader,
        _seconds(cell),
        spread,
        _shown(scaled(cell.speed("bytes"), 1 / MB)),
        _shown(scaled(cell.stored_speed, 1 / MB)),
        _shown(cell.speed("samples")),
        _shown(cell.per_launch("read_amplification")),
        _shown(cell.per_launch("cpu_s_per_gb")),
        "-" if cell.host_peak is None else format_bytes(cell.host_peak),
        str(cell.launches),
        cell.status,
    )


_WAITS = (
    "batch", "threads", "loader", "first batch", "p50", "p95", "p99", "max", "batches",
    "duplicates", "missing", "wrong",
)  # fmt: skip


def _waits_line(cell: LoaderCell) -> tuple[str, ...]:
    counts = [cell.most(name) for name in ("duplicates", "missing", "wrong")]
    return (
        str(cell.batch),
        str(cell.threads),
        cell.loader,
        _time(cell.first_s),
        *(_time(cell.wait(q)) for q in (0.5, 0.95, 0.99, 1.0)),
        str(len(cell.waits)),
        *("-" if count is None else str(count) for count in counts),
    )


def _shown(value: float | None) -> str:
    return "-" if value is None else significant(value)


def _time(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


# --- the sentences ------------------------------------------------------------------------------


def troubles(group: Sequence[LoaderCell]) -> list[str]:
    """What a reader of the numbers must know: who failed and why, and a cache that was not as
    asked for."""
    lines, told = [], set()
    for cell in group:
        if cell.status != "ok" and (cell.loader, cell.error) not in told:
            told.add((cell.loader, cell.error))
            lines.append(f"{cell.loader} {FAILED[cell.status]}: {cell.error}")
    lines += [
        f"* {cell.loader}, batch {cell.batch}, {threads_in_words(cell.threads)}: "
        f"{100 * cell.read_ahead:.0f} % was read before it was waited for, so the waits are too "
        "short and are not compared; more --batches tell."
        for cell in group
        if cell.launches and cell.read_ahead
    ]
    asked, shares = group[0].case["cache"], [c.per_launch("resident") for c in group]
    known = [share for share in shares if share is not None]
    if asked == "cold" and known and max(known) > _COLD_MOST:
        lines.append(
            f"The cache was not cold: up to {100 * max(known):.0f} % of the data was in memory."
        )
    if (again := _read_again(group)) > _COLD_MOST:
        lines.append(
            f"Of what the batches after the first read, {100 * again:.0f} % an earlier one had "
            "read, for a chunk holds several samples: that came from memory, however cold the "
            "cache was."
        )
    if asked == "warm" and known and min(known) < WARM_LEAST:
        lines.append(
            f"The cache was not warm: as little as {100 * min(known):.0f} % of the data was in "
            "memory, for it is larger than what memory is free."
        )
    if asked in ("cold", "warm") and not known and not _is_remote(group[0].case):
        lines.append("Whether the cache was as asked for is not known here.")
    return lines


def _is_remote(case: Mapping[str, Any]) -> bool:
    return "://" in str(case["data"]) or bool(case.get("latency_ms"))


def comparisons(group: Sequence[LoaderCell]) -> list[str]:
    """Each other loader against the first, with the same threads and batch."""
    lines = []
    first = group[0].loader
    told = [cell for cell in group if cell.launches and not cell.read_ahead]
    for base in (cell for cell in told if cell.loader == first):
        where = f"Batch {base.batch}, {threads_in_words(base.threads)}"
        others = [
            cell
            for cell in told
            if cell is not base and (cell.batch, cell.threads) == (base.batch, base.threads)
        ]
        if others and base.launches == 1:
            lines.append(f"{where}: one launch each, not compared.")
            continue
        lines += [f"{where}: {_against(base, other)}." for other in others]
    return lines


def _against(base: LoaderCell, other: LoaderCell) -> str:
    ratio = report.ratio(base, other)
    launches = f"{ratio.n} launches each"
    if not ratio.excludes(1):
        low, high = _ends(ratio)
        return (
            f"{base.loader} and {other.loader} are not distinguishable [{low}-{high}, {launches}]"
        )
    verb = "faster" if ratio.value > 1 else "slower"
    if ratio.value < 1:
        ratio = report.inverse(ratio)
    low, high = _ends(ratio)
    return (
        f"{base.loader} is {ratio.value:.2f}x {verb} than {other.loader} [{low}-{high}, {launches}]"
    )


def _ends(interval: stats.Interval) -> tuple[str, str]:
    low, high = ("?" if end is None else f"{end:.2f}" for end in (interval.low, interval.high))
    return low, high


def threads_in_words(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"


# --- the ladder ---------------------------------------------------------------------------------


class Ladder:
    """The rungs of one data set, batch size and number of threads."""

    def __init__(self, rungs: Mapping[str, LoaderCell]) -> None:
        self.rungs = rungs
        self.measured = {name: cell for name, cell in rungs.items() if cell.launches}

    def kept(self, name: str, of: str) -> stats.Interval:
        """The speed of a rung as a share of that of another."""
        return report.ratio(self.measured[name], self.measured[of])

    @cached_property
    def refuted(self) -> dict[str, str]:
        """Rungs that were measured too slow, each with one above it that says so, by doing the same
        and more in less time: distinguishably less, or less than the step alone is said to cost."""
        seconds = {name: cell.seconds or 0.0 for name, cell in self.measured.items()}
        found: dict[str, str] = {}
        names = list(seconds)
        below = names[0] if names else ""
        for place, name in enumerate(names[1:], 1):
            for above in names[place + 1 :]:
                kept = self.kept(above, name)
                beats = kept.value > 1 and (kept.low is None or kept.low > 1)
                if beats or seconds[above] < seconds[name] - seconds[below]:
                    found[name] = above
                    break
            else:
                below = name
        return found

    @cached_property
    def costs(self) -> dict[str, float]:
        """Seconds that each rung adds to those under it that are not refuted."""
        told = {
            n: cell.seconds or 0.0 for n, cell in self.measured.items() if n not in self.refuted
        }
        names = list(told)
        costs = {name: told[name] for name in names[:1]}
        return costs | {b: told[b] - told[a] for a, b in pairwise(names)}

    @property
    def limiting(self) -> str | None:
        """The step with the greatest cost in seconds; None with fewer than two rungs."""
        if len(self.costs) < 2:
            return None
        return max(self.costs, key=lambda name: self.costs[name])

    def below(self, name: str) -> str | None:
        """The measured rung under this one."""
        names = list(self.measured)
        place = names.index(name)
        return names[place - 1] if place else None

    def sentence(self) -> str:
        """What limits, by how much, and how sure that is."""
        limit = self.limiting
        if limit is None:
            return "What limits cannot be said: fewer than two steps of the ladder were measured."
        top = list(self.measured)[-1]
        end, cost = self.measured[top], self.costs[limit]
        assert end.seconds is not None
        known = list(self.costs)
        below = known[known.index(limit) - 1] if limit != known[0] else None
        if below is None:
            kept = self.kept(top, limit)
            lowest = f"Step {_rung(limit)}, the lowest that was measured, costs most"
            if limit != "L0":  # it holds all that would be under it
                far = ", the network with it" * _is_remote(end.case)
                lowest = (
                    f"All up to step {_rung(limit)}, the lowest that was measured, costs most{far}"
                )
            return (
                f"{lowest}: {_time(cost)} a "
                f"batch; {_rung(top)} takes {_time(end.seconds)} and keeps "
                f"{_percents(kept)} of its speed ({_launches(kept)})."
            )
        between = [n for n in self.refuted if below < n < limit]
        with_them = f" with {' and '.join(map(_rung, between))}" if between else ""
        told = (
            f"Step {_rung(limit)}{with_them} costs most: {_time(cost)} of the "
            f"{_time(end.seconds)} that a batch takes at {_rung(top)}"
        )
        kept = self.kept(limit, below)
        if kept.low is not None and not kept.excludes(1):
            told += "; it is not distinguishable from the step below it"
        speed = f"{_percents(kept)} of the speed of {_rung(below)} ({_launches(kept)})"
        return f"{told}; it keeps {speed}."

    def section(self) -> Section:
        """Heading, table, and the sentence."""
        first = next(iter(self.rungs.values()))
        table: list[tuple[str, ...]] = [
            ("step", "", "s/batch", "MB/s decoded", "of the step below", "of L0", "launches")
        ]
        for name, cell in self.rungs.items():
            if not cell.launches:
                table.append((name, RUNGS[name], *["-"] * 4, cell.status))
                continue
            below = self.below(name)
            table.append(
                (
                    name,
                    RUNGS[name],
                    _shown(cell.seconds),
                    _shown(scaled(cell.speed("bytes"), 1 / MB)),
                    _percents(self.kept(name, below)) if below else "-",
                    _percents(self.kept(name, "L0")) if below and "L0" in self.measured else "-",
                    str(cell.launches),
                )
            )
        reasons = [
            f"{_rung(name)} took {_time(self.measured[name].seconds)} and {_rung(above)}, which "
            f"does the same and more, {_time(self.measured[above].seconds)}: what {name} costs is "
            "not known."
            for name, above in self.refuted.items()
        ]
        reasons += [
            f"{_rung(name)} is not applicable: {cell.error}"
            if cell.status == "unsupported"
            else f"{_rung(name)} {FAILED[cell.status]}: {cell.error}"
            for name, cell in self.rungs.items()
            if not cell.launches
        ]
        where = f"batch {first.batch}, {threads_in_words(first.threads)}"
        title = f"The ladder at {where}, {cache_label(list(self.rungs.values()))}"
        return Section(title, table, [self.sentence(), *reasons])


def ladders(records: Iterable[Record]) -> list[Ladder]:
    """One for each data set, batch size, number of threads and machine."""
    found: dict[tuple[str, ...], dict[str, LoaderCell]] = {}
    for cell in cells(records, "ladder"):
        key = (*_apart(cell), str(cell.batch), str(cell.threads))
        found.setdefault(key, {})[str(cell.case["rung"])] = cell
    return [Ladder(dict(sorted(rungs.items()))) for rungs in found.values()]


def alike(found: Iterable[Ladder]) -> list[list[Ladder]]:
    """Ladders that differ in batch size and threads alone, together."""
    groups: dict[tuple[str, ...], list[Ladder]] = {}
    for ladder in found:
        groups.setdefault(_apart(next(iter(ladder.rungs.values()))), []).append(ladder)
    return list(groups.values())


def _launches(interval: stats.Interval) -> str:
    return "one launch each, no interval" if interval.n == 1 else f"{interval.n} launches each"


def _rung(name: str) -> str:
    return f"{name} ({RUNGS[name]})"


def _percents(share: stats.Interval) -> str:
    value = f"{100 * share.value:.0f} %"
    if share.low is None or share.high is None:
        return value
    return f"{value} [{100 * share.low:.0f}-{100 * share.high:.0f}]"
