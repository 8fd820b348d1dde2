"""The report of a model benchmark: rows of a CSV, a table and sentences.

Cells that differ only in tile and batch form a group. Cells are compared only within a group, where
the model, the mode, the device, the machine and every other knob are the same.

A time is the median of the launches' medians. Its interval (95 %) is bootstrapped over launches,
because launches were repeated. A rate is the work of a step over that median, so that all numbers
of a line are of one kind. A sentence gives the number of launches behind it. If the interval of a
ratio covers 1, the sentence says that the two are not distinguishable.

In the CSV, MB is 2**20 bytes, as in the seed's files. The seed's columns of times are means, and
all rates in the CSV are of means. Our columns of times are medians, as their names say. A missing
value is an empty field, never 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, pairwise

from ...base import format_bytes, format_count, format_seconds, group_by, plural
from ...instruments import FAILED, Interval, Record
from ..cell import cell_ratio, inverse, speed_up
from ..table import MB, Section, listed, or_dash, spread, times_bracket, without_empty
from .cell import MODEL_COLUMNS, ModelCell, model_cells

NOTABLE_TAIL = 0.1
"""A mean that exceeds its median by a smaller share is not mentioned."""

_PAIRED = 4
"""Most tiles of which all pairs are compared. With more tiles, only neighbours are compared."""


def labelled(cells: Iterable[ModelCell]) -> list[tuple[str, list[ModelCell]]]:
    """Groups of cells that differ only in tile and batch, each with a label."""
    groups, names = group_by(cells, lambda cell: cell.group), MODEL_COLUMNS.apart
    varying = {name for name, *values in zip(names, *groups, strict=True) if len(set(values)) > 1}
    return [
        (_label(dict(zip(names, fields, strict=True)), varying), alike)
        for fields, alike in groups.items()
    ]


def _label(fields: Mapping[str, str], varying: set[str]) -> str:
    named = [fields[name] for name in ("model", "mode", "device")]
    for name, value in fields.items():
        usual = value in ("", "False", "0", "float32")
        quiet = name in ("channels", "threads", "seed", "machine_key")
        if name not in ("model", "mode", "device") and not usual and (name in varying or not quiet):
            words = name.removesuffix("_key").removesuffix("_mb").replace("_", " ")
            value = format_bytes(float(value) * MB) if name == "budget_mb" else value
            named.append(words if value == "True" else f"{words} {value}")
    return ", ".join(filter(None, named))


def _compare(group: Sequence[ModelCell]) -> list[str]:
    """Say how tile and batch change time and throughput."""
    lines = [line for cell in group if (line := _troubles(cell))]
    measured = [cell for cell in group if cell.launches]
    if len(measured) > 1 and all(cell.launches == 1 for cell in measured):
        return [*lines, "One launch each: not compared."]
    by_batch = [cells for _, cells in sorted(group_by(measured, lambda c: c.batch).items())]
    for tiles in by_batch:
        for a, b in combinations(tiles, 2) if len(tiles) <= _PAIRED else pairwise(tiles):
            lines += _compare_tiles(a, b)
    for larger in by_batch[1:]:
        lines += _compare_batches(by_batch[0], larger)
    return lines


def _troubles(cell: ModelCell) -> str:
    """Warn of failures, an unsettled warm-up, or a full allocator."""
    launches, troubles = plural(len(cell.records), "launch"), []
    if cell.status != "ok":
        failed = sum(record.status == cell.status for record in cell.records)
        troubles.append(f"{FAILED[cell.status]} in {failed} of {launches}")
        if cell.status.startswith("oom") and cell.memory is not None:
            troubles[-1] += f" (last peak {format_bytes(cell.memory)})"
    if unsettled := sum(record.warmup.settled is False for record in cell.measured):
        troubles.append(f"was still unsteady after warm-up in {unsettled} of {launches}")
    if (mean := cell.mean()) and cell.time and mean > (1 + NOTABLE_TAIL) * cell.time.value:
        troubles.append(
            f"took {format_seconds(mean)} in the mean and {format_seconds(cell.time.value)} in the "
            "median: some steps were far longer"
        )
    if reasons := cell.throttled:
        troubles.append(f"had its clocks held down by {' and '.join(reasons)}")
    if retries := cell.peak("alloc_retries"):
        times = "once" if retries == 1 else f"{retries} times"
        troubles.append(f"was short of memory: the allocator gave its cache back {times}")
    return f"Batch {cell.batch}: {cell.tile} {' and '.join(troubles)}." if troubles else ""


def _compare_tiles(a: ModelCell, b: ModelCell) -> list[str]:
    start = f"Batch {a.batch}: {b.tile}"
    if min(a.launches, b.launches) < 2:
        return [f"{start} and {a.tile}: {_both(a, b)}, not compared."]
    time, launches = cell_ratio(a, b), _both(a, b)
    if time.excludes(1):
        slower = time if time.value > 1 else inverse(time)
        verb = "slower" if time.value > 1 else "faster"
        ends = times_bracket(slower, launches)
        first = f"is {slower.value:.2f}x {verb} per sample than {a.tile} {ends}"
    else:
        ends = times_bracket(time, launches)
        first = f"and {a.tile} are not distinguishable per sample {ends}"
    lines = [f"{start} {first}."]
    if pixels := speed_up(time, a, b, "useful_pixels"):
        kind = f"useful pixels (halo {a.case['halo']})" if a.case.get("halo") else "pixels"
        if pixels.excludes(1):
            more = "more" if pixels.value > 1 else "fewer"
            change = f"{_percent(pixels.value)} {more} {kind} per second than {a.tile}"
            lines.append(f"{start} processes {change} {_percents(pixels, launches)}.")
        else:
            ends = times_bracket(pixels, launches)
            lines.append(
                f"{start} and {a.tile} are not distinguishable in {kind} per second {ends}."
            )
    return lines


def _compare_batches(smallest: Sequence[ModelCell], larger: Sequence[ModelCell]) -> list[str]:
    """Compare a batch with the smallest one, over the tiles that were measured with both."""
    gains: dict[str, list[str]] = {}
    lines = []
    base, batch = smallest[0].batch, larger[0].batch
    for a, b in ((a, b) for b in larger for a in smallest if a.tile == b.tile):
        launches = _both(a, b)
        if min(a.launches, b.launches) < 2:
            lines.append(f"Batch {batch} and {base} ({b.tile}): {launches}, not compared.")
            continue
        samples = speed_up(cell_ratio(a, b), a, b, "samples")
        if samples is None:
            continue
        if samples.excludes(1):
            verb = "improves" if samples.value > 1 else "lowers"
            gain = f"{_percent(samples.value)} ({b.tile}) {_percents(samples, launches)}"
            gains.setdefault(verb, []).append(gain)
        else:
            lines.append(
                f"Batch {batch} and batch {base} are not distinguishable in throughput "
                f"({b.tile}) {times_bracket(samples, launches)}."
            )
    changes = [
        f"Batch {batch} {verb} throughput over batch {base} by {listed(each)}."
        for verb, each in gains.items()
    ]
    return changes + lines


def _both(a: ModelCell, b: ModelCell) -> str:
    if a.launches == b.launches:
        return "one launch each" if a.launches == 1 else f"{a.launches} launches each"
    return f"{b.launches} and {a.launches} launches"


def _percent(factor: float) -> str:
    """The distance of a factor from 1: ``46 %``, ``3.4 %``."""
    change = abs(factor - 1) * 100
    return f"{change:.0f} %" if change >= 9.95 else f"{change:.1f} %"


def _percents(factor: Interval, launches: str) -> str:
    assert factor.low is not None and factor.high is not None
    ends = sorted((abs(factor.low - 1), abs(factor.high - 1)))
    low, high = (_percent(1 + end).removesuffix(" %") for end in ends)
    return f"[{low}-{high} %, {launches}]"


def model_sections(records: Iterable[Record]) -> list[Section]:
    """A section for each group of cells: a table with a line for each, and sentences."""
    groups = labelled(model_cells(records))
    return [Section(label, _table(group), _compare(group)) for label, group in groups]


def _table(group: Sequence[ModelCell]) -> list[tuple[str, ...]]:
    """Header and lines."""
    device = "" if group[0].case["device"] == "cpu" else "device "
    head = ("tile", "batch", "step", "95 %", "samples/s", "px/s", "useful px/s")
    lines: list[tuple[str, ...]] = [(*head, f"{device or 'host '}peak", "launches", "status")]
    lines += [
        (
            cell.tile,
            str(cell.batch),
            or_dash(cell.time.value if cell.time else None, format_seconds),
            spread(cell.time, format_seconds),
            or_dash(cell.rate("samples")),
            or_dash(cell.rate("pixels"), format_count),
            or_dash(cell.rate("useful_pixels") if cell.case.get("halo") else None, format_count),
            or_dash(cell.memory, format_bytes),
            str(cell.launches),
            cell.status,
        )
        for cell in group
    ]
    return without_empty(lines)
