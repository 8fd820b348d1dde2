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

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import TypeVar

from ..base import format_bytes, format_count, format_seconds, significant
from ..instruments import FAILED, Interval, Record
from .cell import COLUMNS, Cell, cell_ratio, inverse, model_cells, speed_up
from .table import MB, Section, append_rows, without_empty

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


NOTABLE_TAIL = 0.1
"""Nor is a mean that is above its median by a smaller share."""


Item = TypeVar("Item")


_PAIRED = 4
"""Of more tiles than these, neighbours are compared and not all pairs."""


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


def append_model_csv(records: Iterable[Record], path: Path, when: str | None = None) -> None:
    """Add a row for each case; ``when`` is its timestamp (default: of its last launch)."""
    rows = [cell.row | ({"timestamp": when} if when else {}) for cell in model_cells(records)]
    append_rows(rows, path, COLUMNS, needs=("tile_size", "batch_size"))


def append_limits(records: Iterable[Record], path: Path) -> None:
    """Add a row for each launch that only tried whether its case fits: its memory and no times."""
    rows = [cell.row | dict.fromkeys(_TIMED, "") for cell in model_cells(records)]
    append_rows(rows, path, COLUMNS, needs=("tile_size", "batch_size"))


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
    time = cell_ratio(a, b)
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
        samples = speed_up(cell_ratio(a, b), a, b, "samples")
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


def _launches(count: int) -> str:
    return f"{count} launch{'es' * (count != 1)}"


def _both(a: Cell, b: Cell) -> str:
    if a.launches == b.launches:
        return "one launch each" if a.launches == 1 else f"{a.launches} launches each"
    return f"{b.launches} and {a.launches} launches"


def _spread(ratio: Interval, launches: str) -> str:
    return f"[{ratio.low:.2f}-{ratio.high:.2f}, {launches}]"


def _percent(factor: float) -> str:
    """How far a factor is from 1: ``46 %``, ``3.4 %``."""
    change = abs(factor - 1) * 100
    return f"{change:.0f} %" if change >= 9.95 else f"{change:.1f} %"


def _percents(factor: Interval, launches: str) -> str:
    assert factor.low is not None and factor.high is not None
    ends = sorted((abs(factor.low - 1), abs(factor.high - 1)))
    low, high = (_percent(1 + end).removesuffix(" %") for end in ends)
    return f"[{low}-{high} %, {launches}]"


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def model_sections(records: Iterable[Record]) -> list[Section]:
    """Under each group's label its cells, a line each, and what they say."""
    groups = grouped(model_cells(records), lambda cell: cell.row)
    return [Section(label, _table(group), _compare(group)) for label, group in groups]


def roof_line(records: Iterable[Record], roof: Callable[[str, str, str], float | None]) -> str:
    """How near the best case came to the arithmetic that its machine was measured to do.

    ``roof`` gives floating-point operations a second for a machine's key, a device and a dtype,
    None where they were never measured; `limits.measured_roof` is one. A share is not cut at
    100 %: a roof measured beside other work is too low, and then this shows it. Empty where no
    operations were counted.
    """
    counted = [cell for cell in model_cells(records) if cell.rate("flops")]
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
