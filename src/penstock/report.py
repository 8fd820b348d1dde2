"""Reports: what a model benchmark measured, as cells, rows of a CSV, a table and sentences.

A `Cell` is all launches of one case. Cells that differ in tile and batch alone form a group, and
only within a group is anything compared: a model, a mode, a device, a machine and every other knob
are the same there.

Times are medians of the launches' medians; their intervals (95 %) are bootstrapped over launches,
because the launch is what was repeated. Rates are the work of a step over that median, so that a
line of a table is of one kind. Sentences say how many launches stand behind them, and where an
interval of a ratio covers 1 they say that the two are not distinguishable.

In the CSV, MB is 2**20 bytes, as in the seed's own writer, and the seed's times are means, and so
are all rates there; the times of ours beside them are medians, as their names say. Missing is an
empty field, never 0.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import safe, stats
from .boundary import pixels_of
from .errors import UsageError
from .files import replacing
from .record import FAILED, Record
from .units import format_bytes, format_count, format_seconds, significant

MB = 2**20

SEED_COLUMNS = tuple(
    "timestamp mode tile_size batch_size device model_params model_size_mb avg_time_ms std_time_ms "
    "throughput_samples_per_sec memory_allocated_mb memory_reserved_mb memory_peak_mb "
    "forward_time_ms backward_time_ms total_time_ms error".split()
)
"""First in every file. Forward, backward and total (the optimizer included) are of mode train."""

COLUMNS = SEED_COLUMNS + tuple(
    "model weights channels dtype amp compile channels_last tf32 checkpointing halo threads seed "
    "budget_mb status launches failed samples unsettled median_time_ms low_time_ms high_time_ms "
    "optimizer_time_ms pixels_per_sec useful_pixels_per_sec host_peak_mb host_counted_mb "
    "memory_driver_mb "
    "alloc_retries flops_per_step flops_per_sec structure machine_key commit key".split()
)

_TIMED = tuple(
    "avg_time_ms std_time_ms throughput_samples_per_sec forward_time_ms backward_time_ms "
    "total_time_ms samples unsettled median_time_ms low_time_ms high_time_ms optimizer_time_ms "
    "pixels_per_sec useful_pixels_per_sec flops_per_sec".split()
)
"""The columns that a launch of three steps says nothing of."""

APART = tuple(
    "model weights mode device dtype channels amp compile channels_last tf32 checkpointing halo "
    "threads seed budget_mb structure machine_key".split()
)
"""The columns that tell groups apart."""

VARIANTS = ("amp", "compile", "channels_last", "tf32", "checkpointing")

NOTABLE_DRIFT = 0.02
"""A smaller change within a launch is not worth a word."""

NOTABLE_TAIL = 0.1
"""Nor is a mean that is above its median by a smaller share."""

THROTTLES = {
    0x04: "its power cap",
    0x08: "a hardware slowdown",
    0x20: "heat",
    0x40: "heat",
    0x80: "a power brake",
}
"""Bits of NVML's reasons that slow a GPU down; to be idle, or set so by its user, is no trouble."""

Row = dict[str, str]
"""Fields of a CSV by their columns."""
Item = TypeVar("Item")

_DRAWS = 2000
_PAIRED = 4
"""Of more tiles than these, neighbours are compared and not all pairs."""


# --- cells --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """All launches of one case on one machine."""

    records: tuple[Record, ...]

    @property
    def case(self) -> Mapping[str, Any]:
        return self.records[0].case

    @property
    def tile(self) -> str:
        return str(self.case["tile"])

    @property
    def batch(self) -> int:
        return int(self.case["batch"])

    @property
    def name(self) -> str:
        """Its tile, its batch and what is switched on."""
        switched = [name.replace("_", " ") for name in VARIANTS if self.case.get(name)]
        if halo := self.case.get("halo"):
            switched.append(f"halo {halo}")
        return ", ".join([self.tile, f"batch {self.batch}", *switched])

    @property
    def status(self) -> str:
        """``ok`` where every launch was; else the failure that most of them met."""
        failures = Counter(record.status for record in self.records if not record.ok)
        return failures.most_common(1)[0][0] if failures else "ok"

    @cached_property
    def measured(self) -> tuple[Record, ...]:
        """The launches that were ok."""
        return tuple(record for record in self.records if record.ok)

    @property
    def launches(self) -> int:
        return len(self.measured)

    @cached_property
    def times(self) -> list[NDArray[np.float64]]:
        """Seconds of each sample of a step, by launch."""
        return [np.asarray(record.samples_s["step"]) for record in self.measured]

    @cached_property
    def time(self) -> stats.Interval | None:
        """Median seconds of a step. With one launch, the interval is of that launch alone."""
        if not self.times:
            return None
        if len(self.times) == 1:
            return stats.median_interval(self.times[0])
        return _bootstrap([np.ones(1), np.ones(1)], self.times)

    @cached_property
    def drifts(self) -> list[float]:
        """How much the time of a step rose within a launch, of those where it surely did."""
        trends = [stats.drift(times) for times in self.times]
        return [t.value for t in trends if t.excludes(0) and abs(t.value) >= NOTABLE_DRIFT]

    @property
    def throttled(self) -> list[str]:
        """Why the GPU's clocks were held down at any reading."""
        bits = 0
        for record in self.measured:
            for reading in record.clocks:
                bits |= reading.get("throttle_reasons") or 0
        return list(dict.fromkeys(why for bit, why in THROTTLES.items() if bits & bit))

    def mean(self, phase: str = "step") -> float | None:
        """Total seconds over total steps."""
        seconds, steps = 0.0, 0
        for record in self.measured:
            samples = record.samples_s.get(phase, ())
            seconds += sum(samples) * record.steps_per_sample
            steps += len(samples) * record.steps_per_sample
        return seconds / steps if steps else None

    @property
    def std(self) -> float | None:
        """Of all samples of all launches."""
        samples = np.concatenate(self.times) if self.times else np.empty(0)
        return float(samples.std()) if len(samples) > 1 else None

    def work(self, quantity: str) -> float | None:
        """Of one step; the same in every launch of a case."""
        return self.measured[0].work.get(quantity) if self.measured else None

    def rate(self, quantity: str) -> float | None:
        """Work of a step over its median time, in units a second."""
        work = self.work(quantity)
        return work / self.time.value if work is not None and self.time else None

    def mean_rate(self, quantity: str) -> float | None:
        """Total work over total time, in units a second."""
        work, seconds = self.work(quantity), self.mean()
        return work / seconds if work is not None and seconds else None

    def peak(self, *names: str) -> int | None:
        """The most that any launch, a failed one too, read of these fields of its memory."""
        read = [getattr(record.memory, name) for record in self.records for name in names]
        return max((value for value in read if value is not None), default=None)

    @property
    def memory(self) -> int | None:
        """The peak that decides whether a case fits: what the driver counted, or the allocator
        where the driver is silent; on a CPU the host's, and under a budget what that counts."""
        if self.case["device"] == "cpu":
            counted = self.peak("host_counted") if self.case.get("budget") else None
            return self.host_peak if counted is None else counted
        for name in ("device_driver", "device_reserved", "device_peak"):
            if (peak := self.peak(name)) is not None:
                return peak
        return None

    @property
    def host_peak(self) -> int | None:
        return self.peak("host_peak", "host_peak_kernel")

    def fact(self, name: str) -> Any:
        return next((r.facts[name] for r in self.records if name in r.facts), None)

    def environment(self, name: str) -> Any:
        return self.records[-1].environment.get(name)

    @cached_property
    def row(self) -> Row:
        """The cell as a row of the CSV."""
        case, training = self.case, self.case["mode"] == "train"
        time = self.time or stats.Interval(np.nan, None, None, 0)
        failure = next((r.error for r in self.records if r.error is not None), None)
        error = (
            "" if self.status == "ok" else f"{self.status}: {failure.message if failure else ''}"
        )
        values = {
            **{name: case.get(name) for name in COLUMNS},
            "timestamp": max(record.time for record in self.records),
            "tile_size": self.tile,
            "batch_size": self.batch,
            "model_params": self.fact("parameters"),
            "model_size_mb": scaled(self.fact("model_bytes"), 1 / MB),
            "avg_time_ms": scaled(self.mean(), 1e3),
            "std_time_ms": scaled(self.std, 1e3),
            "throughput_samples_per_sec": self.mean_rate("samples"),
            "memory_allocated_mb": scaled(self.peak("device_allocated"), 1 / MB),
            "memory_reserved_mb": scaled(self.peak("device_reserved"), 1 / MB),
            "memory_peak_mb": scaled(self.peak("device_peak"), 1 / MB),
            "forward_time_ms": scaled(self.mean("forward"), 1e3),
            "backward_time_ms": scaled(self.mean("backward"), 1e3),
            "optimizer_time_ms": scaled(self.mean("optimizer"), 1e3),
            "total_time_ms": scaled(self.mean(), 1e3) if training else None,
            "error": "OOM" if self.status.startswith("oom") else " ".join(error.split()),
            "budget_mb": scaled(case.get("budget"), 1 / MB),
            "status": self.status,
            "launches": self.launches,
            "failed": len(self.records) - self.launches,
            "samples": sum(map(len, self.times)),
            "unsettled": sum(record.warmup.settled is False for record in self.measured),
            "median_time_ms": scaled(time.value, 1e3),
            "low_time_ms": scaled(time.low, 1e3),
            "high_time_ms": scaled(time.high, 1e3),
            "pixels_per_sec": self.mean_rate("pixels"),
            "useful_pixels_per_sec": self.mean_rate("useful_pixels"),
            "host_peak_mb": scaled(self.host_peak, 1 / MB),
            "host_counted_mb": scaled(self.peak("host_counted"), 1 / MB),
            "memory_driver_mb": scaled(self.peak("device_driver"), 1 / MB),
            "alloc_retries": self.peak("alloc_retries"),
            "flops_per_step": self.work("flops"),
            "flops_per_sec": self.mean_rate("flops"),
            "structure": self.fact("structure"),
            "machine_key": self.environment("machine_key"),
            "commit": commit_of(self.environment("git")),
            "key": self.records[0].key,
        }
        return {name: field(values[name]) for name in COLUMNS}


def cells(records: Iterable[Record]) -> list[Cell]:
    """The launches of scenario ``model``, by case and machine; small tiles and batches first."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if record.scenario == "model":
            machine = record.environment.get("machine_key")
            found.setdefault((record.key, machine), []).append(record)
    all_cells = [Cell(tuple(launches)) for launches in found.values()]
    return sorted(all_cells, key=lambda cell: (pixels_of(cell.tile), cell.tile, cell.batch))


def grouped(
    items: Iterable[Item], row_of: Callable[[Item], Mapping[str, str]]
) -> list[tuple[str, list[Item]]]:
    """Items, cells or rows, that differ in tile and batch alone, under a label of each group."""
    groups: dict[tuple[str, ...], list[Item]] = {}
    for item in items:
        row = row_of(item)
        groups.setdefault(tuple(row.get(name, "") for name in APART), []).append(item)
    varying = {name for name, *values in zip(APART, *groups, strict=True) if len(set(values)) > 1}
    return [
        (_label(dict(zip(APART, key, strict=True)), varying), own) for key, own in groups.items()
    ]


def _label(fields: Mapping[str, str], varying: set[str]) -> str:
    named = [fields[name] for name in ("model", "mode", "device")]
    for name, value in fields.items():
        usual = value in ("", "False", "0", "float32")
        quiet = name in ("channels", "threads", "seed", "structure", "machine_key")
        if name not in ("model", "mode", "device") and not usual and (name in varying or not quiet):
            words = name.removesuffix("_key").removesuffix("_mb").replace("_", " ")
            value = format_bytes(float(value) * MB) if name == "budget_mb" else value
            named.append(words if value == "True" else f"{words} {value}")
    return ", ".join(filter(None, named))


def commit_of(git: Mapping[str, Any] | None) -> str | None:
    return f"{git['commit']}{'+dirty' * git['dirty']}" if git and git.get("commit") else None


def scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def field(value: Any) -> str:
    if value is None or (isinstance(value, float) and not np.isfinite(value)):
        return ""
    return f"{value:.9g}" if isinstance(value, float) else str(value)


# --- the CSV ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A benchmark's CSV as it was read."""

    header: tuple[str, ...]
    rows: list[Row]
    torn: bool
    """The last line lacks its end: it was cut off while it was written, and is not in ``rows``."""
    ended: bool
    """The last line has its newline."""


def read_csv(path: Path, needs: Iterable[str] = ("tile_size", "batch_size")) -> Table:
    """A benchmark's CSV, of this version, an earlier one, or the seed's own writer.

    Raises `UsageError` for anything else, which is what lacks a column that it ``needs``, and for
    a line that does not fit its header.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        lines = [line for line in csv.reader(io.StringIO(text, newline="")) if line]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is not a CSV: {error}") from error
    header = lines[0] if lines else []
    if not set(needs) <= set(header) or len(set(header)) < len(header):
        begin = text[:60].partition("\n")[0].strip()
        raise UsageError(f"{path} is not the CSV of a benchmark: it begins with {begin!r}")
    ended = text.endswith("\n")
    torn = not ended and len(lines) > 1 and len(lines[-1]) < len(header)
    rows = []
    for number, line in enumerate(lines[1 : -1 if torn else None], 2):
        if len(line) != len(header):
            raise UsageError(
                f"{path}, line {number}: {len(line)} fields under a header of {len(header)}; "
                "mend or move the file"
            )
        rows.append(dict(zip(header, line, strict=True)))
    return Table(tuple(header), rows, torn, ended)


def append_csv(records: Iterable[Record], path: Path, when: str | None = None) -> None:
    """Add a row for each case; ``when`` is its timestamp (default: of its last launch)."""
    rows = [cell.row | ({"timestamp": when} if when else {}) for cell in cells(records)]
    append_rows(rows, path, COLUMNS, needs=("tile_size", "batch_size"))


def append_limits(records: Iterable[Record], path: Path) -> None:
    """Add a row for each launch that only tried whether its case fits: its memory and no times."""
    rows = [cell.row | dict.fromkeys(_TIMED, "") for cell in cells(records)]
    append_rows(rows, path, COLUMNS, needs=("tile_size", "batch_size"))


def append_rows(
    rows: Sequence[Row], path: Path, columns: tuple[str, ...], needs: Iterable[str]
) -> None:
    """Add rows to a benchmark's CSV, which has the columns that it ``needs`` or is not one.

    Under our header rows are appended in one write. A file with another header, the seed's or an
    earlier version's, is rewritten beside itself and renamed over: our columns first, then its
    own, no row lost. Raises `UsageError`, and touches nothing, where ``path`` is something else.
    """
    rows = [{name: safe.cell(value) for name, value in row.items()} for row in rows]
    path = path.resolve()  # of a link, the file behind it is replaced
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        old = read_csv(path, needs) if path.exists() and path.stat().st_size else None
        if old is None:
            _replace(path, columns, rows)
        elif old.torn or not set(columns) <= set(old.header):
            more = tuple(name for name in old.header if name not in columns)
            _replace(path, columns + more, [*old.rows, *rows])
        else:
            with path.open("ab", buffering=0) as file:
                file.write(("" if old.ended else "\n").encode() + _lines(old.header, rows))
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def _lines(header: Sequence[str], rows: Iterable[Row], head: bool = False) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, header, restval="", lineterminator="\n")
    if head:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _replace(path: Path, header: Sequence[str], rows: Iterable[Row]) -> None:
    with replacing(path) as draft:
        draft.write_bytes(_lines(header, rows, head=True))


# --- sentences ----------------------------------------------------------------------------------


def ratio(a: Cell, b: Cell) -> stats.Interval:
    """The median time of a step of ``b`` over that of ``a``, both measured."""
    return _bootstrap(a.times, b.times)


def speed_up(time: stats.Interval, a: Cell, b: Cell, quantity: str) -> stats.Interval | None:
    """Units a second of ``b`` over those of ``a``, from the ratio of their times; None where
    nobody counted them."""
    before, after = a.work(quantity), b.work(quantity)
    return inverse(time, after / before) if before and after else None


def _compare(group: Sequence[Cell]) -> list[str]:
    """What tile and batch do to time and throughput."""
    lines = [line for cell in group if (line := _troubles(cell))]
    measured = [cell for cell in group if cell.launches]
    if len(measured) > 1 and all(cell.launches == 1 for cell in measured):
        return [*lines, "One launch each: not compared."]
    by_batch = {cell.batch: [c for c in measured if c.batch == cell.batch] for cell in measured}
    for batch in sorted(by_batch):
        tiles = by_batch[batch]
        for a, b in combinations(tiles, 2) if len(tiles) <= _PAIRED else pairwise(tiles):
            lines += _compare_tiles(a, b)
    for batch in sorted(by_batch)[1:]:
        lines += _compare_batches(min(by_batch), batch, measured)
    return lines


def _troubles(cell: Cell) -> str:
    """What a reader of the numbers must know: failures, an unsettled warm-up, a full allocator."""
    total, troubles = len(cell.records), []
    if cell.status != "ok":
        failed = sum(record.status == cell.status for record in cell.records)
        troubles.append(f"{FAILED[cell.status]} in {failed} of {_launches(total)}")
        if cell.status.startswith("oom") and cell.memory is not None:
            troubles[-1] += f" (last peak {format_bytes(cell.memory)})"
    if unsettled := sum(record.warmup.settled is False for record in cell.measured):
        troubles.append(f"was still unsteady after warm-up in {unsettled} of {_launches(total)}")
    if drifts := cell.drifts:
        most = max(drifts, key=abs)
        of = f"of its median in {len(drifts)} of {_launches(total)}"
        troubles.append(f"drifted by up to {most:+.1%} {of}")
    if (mean := cell.mean()) and cell.time and mean > (1 + NOTABLE_TAIL) * cell.time.value:
        troubles.append(
            f"took {format_seconds(mean)} in the mean and {format_seconds(cell.time.value)} in the "
            "median: some steps were far longer"
        )
    if reasons := cell.throttled:
        troubles.append(f"had its clocks held down by {' and '.join(reasons)}")
    if retries := cell.peak("alloc_retries"):
        times = "once" if retries == 1 else f"{retries} times"
        troubles.append(f"is on the cliff: the allocator gave its cache back {times} to go on")
    return f"Batch {cell.batch}: {cell.tile} {' and '.join(troubles)}." if troubles else ""


def _compare_tiles(a: Cell, b: Cell) -> list[str]:
    start = f"Batch {a.batch}: {b.tile}"
    if min(a.launches, b.launches) < 2:
        return [f"{start} and {a.tile}: {_both(a, b)}, not compared."]
    time = ratio(a, b)
    if time.excludes(1):
        slower = time if time.value > 1 else inverse(time)
        verb = "slower" if time.value > 1 else "faster"
        first = (
            f"is {slower.value:.2f}x {verb} per sample than {a.tile} {_spread(slower, _both(a, b))}"
        )
    else:
        first = f"and {a.tile} are not distinguishable per sample {_spread(time, _both(a, b))}"
    lines = [f"{start} {first}."]
    if pixels := speed_up(time, a, b, "useful_pixels"):
        kind = f"useful pixels (halo {a.case['halo']})" if a.case.get("halo") else "pixels"
        if pixels.excludes(1):
            more = "more" if pixels.value > 1 else "fewer"
            change = f"{_percent(pixels.value)} {more} {kind} per second than {a.tile}"
            lines.append(f"{start} processes {change} {_percents(pixels, _both(a, b))}.")
        else:
            spread = _spread(pixels, _both(a, b))
            lines.append(
                f"{start} and {a.tile} are not distinguishable in {kind} per second {spread}."
            )
    return lines


def _compare_batches(base: int, batch: int, measured: Sequence[Cell]) -> list[str]:
    """Batch against the smallest batch, over the tiles that were measured with both."""
    clauses: dict[str, list[str]] = {}
    lines = []
    for b in (cell for cell in measured if cell.batch == batch):
        a = next((c for c in measured if (c.tile, c.batch) == (b.tile, base)), None)
        if a is None:
            continue
        if min(a.launches, b.launches) < 2:
            lines.append(f"Batch {batch} and {base} ({b.tile}): {_both(a, b)}, not compared.")
            continue
        samples = speed_up(ratio(a, b), a, b, "samples")
        if samples is None:
            continue
        if samples.excludes(1):
            verb = "improves" if samples.value > 1 else "lowers"
            spread = _percents(samples, _both(a, b))
            clauses.setdefault(verb, []).append(f"{_percent(samples.value)} ({b.tile}) {spread}")
        else:
            spread = _spread(samples, _both(a, b))
            lines.append(
                f"Batch {batch} and batch {base} are not distinguishable in throughput "
                f"({b.tile}) {spread}."
            )
    told = [
        f"Batch {batch} {verb} throughput over batch {base} by {_listed(found)}."
        for verb, found in clauses.items()
    ]
    return told + lines


def _bootstrap(
    a: Sequence[NDArray[np.float64]], b: Sequence[NDArray[np.float64]]
) -> stats.Interval:
    # The same seed always: a report drawn twice from the same records is the same to the digit.
    return stats.hierarchical_bootstrap_ratio(a, b, _DRAWS, np.random.default_rng(0))


def inverse(ratio: stats.Interval, work: float = 1.0) -> stats.Interval:
    """The ratio of rates that a ratio of times means, for so many times the work."""
    low, high = (None if end is None else work / end for end in (ratio.high, ratio.low))
    return stats.Interval(work / ratio.value, low, high, ratio.n)


def _launches(count: int) -> str:
    return f"{count} launch{'es' * (count != 1)}"


def _both(a: Cell, b: Cell) -> str:
    if a.launches == b.launches:
        return "one launch each" if a.launches == 1 else f"{a.launches} launches each"
    return f"{b.launches} and {a.launches} launches"


def _spread(ratio: stats.Interval, launches: str) -> str:
    return f"[{ratio.low:.2f}-{ratio.high:.2f}, {launches}]"


def _percent(factor: float) -> str:
    """How far a factor is from 1: ``46 %``, ``3.4 %``."""
    change = abs(factor - 1) * 100
    return f"{change:.0f} %" if change >= 9.95 else f"{change:.1f} %"


def _percents(factor: stats.Interval, launches: str) -> str:
    assert factor.low is not None and factor.high is not None
    ends = sorted((abs(factor.low - 1), abs(factor.high - 1)))
    low, high = (_percent(1 + end).removesuffix(" %") for end in ends)
    return f"[{low}-{high} %, {launches}]"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


# --- tables -------------------------------------------------------------------------------------


class Section(NamedTuple):
    """A piece of a report: what it is of, a table whose first line is its header, sentences."""

    title: str
    table: Sequence[Sequence[str]] = ()
    told: Sequence[str] = ()


def without_empty(table: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Less the columns that nobody has a value for: under their heads are dashes alone."""
    kept = [c for c in zip(*table, strict=True) if any(text != "-" for text in c[1:])]
    return list(zip(*kept, strict=True))


def in_text(sections: Iterable[Section]) -> list[str]:
    """For a terminal."""
    lines: list[str] = []
    for title, table, told in sections:
        lines += [title, ""]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for line in table:
            fields = [text.rjust(width) for text, width in zip(line, widths, strict=True)]
            lines.append("  " + "  ".join(fields).rstrip())
        lines += [""] * bool(table) + [f"- {line}" for line in told] + [""] * bool(told)
    return lines[:-1]


def in_markdown(sections: Iterable[Section]) -> str:
    """For a page."""
    blocks = []
    for title, table, told in sections:
        blocks.append(f"**{safe.markdown(title)}**")
        if table:
            head, *body = (f"| {' | '.join(map(safe.markdown, line))} |" for line in table)
            blocks.append("\n".join([head, "|" + "---:|" * len(table[0]), *body]))
        if told:
            blocks.append("\n".join(f"- {safe.markdown(line)}" for line in told))
    return "\n\n".join(blocks) + "\n"


def sections(records: Iterable[Record]) -> list[Section]:
    """Under each group's label its cells, a line each, and what they say."""
    groups = grouped(cells(records), lambda cell: cell.row)
    return [Section(label, _table(group), _compare(group)) for label, group in groups]


def roof_line(records: Iterable[Record], roof: Callable[[str, str, str], float | None]) -> str:
    """How near the best case came to the arithmetic that its machine was measured to do.

    ``roof`` gives floating-point operations a second for a machine's key, a device and a dtype,
    None where they were never measured; `limits.measured_roof` is one. A share is not cut at
    100 %: a roof measured beside other work is too low, and then this shows it. Empty where no
    operations were counted.
    """
    counted = [cell for cell in cells(records) if cell.rate("flops")]
    if not counted:
        return ""
    best = max(counted, key=lambda cell: cell.rate("flops") or 0.0)
    rate, device = best.rate("flops") or 0.0, best.case["device"]
    half = "float16" if device.startswith("cuda") else "bfloat16"
    dtype = half if best.case["amp"] else best.case["dtype"]
    if dtype == "float32" and device.startswith("cuda") and best.case.get("tf32"):
        dtype = "tf32"  # a roof of its own
    start = f"Most arithmetic: {format_count(rate)}FLOP/s ({best.name})"
    most = roof(best.environment("machine_key") or "", device, dtype)
    if most is None:
        return f"{start}; `penstock doctor` measures what this machine can do at most."
    return (
        f"{start}, {rate / most:.0%} of the {format_count(most)}FLOP/s in {dtype} that "
        "`penstock doctor` measured here."
    )


def _table(group: Sequence[Cell]) -> list[tuple[str, ...]]:
    """Header and lines."""
    device = "" if group[0].case["device"] == "cpu" else "device "
    head = ("tile", "batch", "step", "95 %", "samples/s", "px/s", "useful px/s", "FLOP/s")
    lines: list[tuple[str, ...]] = [(*head, f"{device or 'host '}peak", "launches", "status")]
    return without_empty([*lines, *map(_table_line, group)])


def _table_line(cell: Cell) -> tuple[str, ...]:
    def shown(value: float | None, form: Callable[[float], str]) -> str:
        return "-" if value is None else form(value)

    time = cell.time
    spread = "-"
    if time is not None and time.low is not None and time.high is not None:
        spread = f"{format_seconds(time.low)} - {format_seconds(time.high)}"
    return (
        cell.tile,
        str(cell.batch),
        shown(time.value if time else None, format_seconds),
        spread,
        shown(cell.rate("samples"), significant),
        shown(cell.rate("pixels"), format_count),
        shown(cell.rate("useful_pixels") if cell.case.get("halo") else None, format_count),
        shown(cell.rate("flops"), format_count),
        shown(cell.memory, format_bytes),
        str(cell.launches),
        cell.status,
    )
