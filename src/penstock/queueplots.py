"""The figures of a queue benchmark and of a loader benchmark, drawn from their CSVs.

    queue    depth of the queue at the end of each iteration, a panel for each number of workers,
             measured and simulated; below, seconds per iteration: measured, model and the seed's;
             of readings alone, seconds from one batch to the next by workers
    loader   seconds for a batch by threads, a line for each loader, a panel for each batch size;
             with one number of threads, a bar for each
    ladder   what the batch pays at each rung, drawn from records: no CSV holds the rungs; a panel
             for each batch size and number of threads, all on one scale

Cases that differ in anything else never share a figure. Of several rows of one case the latest is
drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import loader_report, queue_report
from .errors import UsageError, require
from .loader_report import Ladder
from .plots import LEGEND, STYLE, TEXT, TITLE, blank, heading, save, tidy
from .record import Record
from .report import Row, read_csv
from .units import format_seconds, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_QUEUE_APART = (*queue_report.APART, "batch_size", "machine_key")
_LOADER_APART = (*loader_report.CASE_APART, "machine_key")
_SECONDS = ("seconds_per_batch", "low_seconds", "high_seconds")
_BAR = "#c4c4c4"


def plot_queue(path: Path, out_prefix: str | Path, replace: bool = False) -> list[Path]:
    """Draw the CSV of ``penstock bench queue`` to ``<out_prefix>.png``, or to one numbered file
    for each group of cases; returns what was written."""
    rows = _latest(path, queue_report.NEEDS, ("workers", "queue", *_QUEUE_APART))
    return _save(path, rows, _QUEUE_APART, draw_queue, out_prefix, replace)


def plot_loader(path: Path, out_prefix: str | Path, replace: bool = False) -> list[Path]:
    """Draw the CSV of ``penstock bench loader``, likewise."""
    rows = _latest(path, loader_report.NEEDS, ("loader", "threads", "batch_size", *_LOADER_APART))
    return _save(path, rows, _LOADER_APART, draw_loader, out_prefix, replace)


def _latest(path: Path, needs: Iterable[str], names: Sequence[str]) -> list[Row]:
    """The last row of each case that was measured, though some of its launches may have failed."""
    rows = sorted(read_csv(path, needs).rows, key=lambda row: row.get("timestamp", ""))
    cases = {tuple(row.get(name, "") for name in names): row for row in rows}
    measured = [row for row in cases.values() if row.get("launches", "1") != "0"]
    if not measured:
        raise UsageError(f"{path} holds no row to plot")
    return measured


def _save(
    path: Path,
    rows: Sequence[Row],
    apart: Sequence[str],
    draw: Callable[[Sequence[Row], str], Figure],
    out_prefix: str | Path,
    replace: bool,
) -> list[Path]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name, "") for name in apart), []).append(row)
    prefix, figures = Path(out_prefix), {}
    for number, group in enumerate(groups.values(), 1):
        try:
            figure = draw(group, path.name)
        except ValueError as error:
            raise UsageError(f"{path} holds what is no number: {error}") from error
        figures[_numbered(prefix, number, len(groups))] = figure
    return save(figures, replace)


def _numbered(prefix: Path, number: int, of: int) -> Path:
    return prefix.with_name(f"{prefix.name}{f'_{number}' if of > 1 else ''}.png")


def _cases(rows: Sequence[Row]) -> str:
    return f"{len(rows)} case{'s' * (len(rows) != 1)}"


# --- the queue ----------------------------------------------------------------------------------


def draw_queue(rows: Sequence[Row], source: str) -> Figure:
    """Depth over time above, seconds per iteration below; of readings alone their seconds."""
    if rows[0]["compute"] == "none":
        return _draw_readings(rows, source)
    queued = [row for row in rows if int(row["workers"]) > 0]
    workers = sorted({int(row["workers"]) for row in queued})
    figure = blank(max(8.0, 3.2 * len(workers)), 7.6)
    compute = format_seconds(float(rows[0]["compute_s"]))
    heading(
        figure,
        f"A queue beside steps of {compute} ({rows[0]['compute']})",
        f"{rows[0]['data']}, batches of {rows[0]['batch_size']}, {rows[0]['iterations']} "
        f"iterations from a full queue; {_cases(rows)} of {source}",
    )
    grid = figure.add_gridspec(2, max(1, len(workers)))
    first: Axes | None = None
    sizes = sorted({int(row["queue"]) for row in queued})
    for column, number in enumerate(workers):
        axis = figure.add_subplot(grid[0, column], sharey=first)
        first = first or axis
        own = [row for row in queued if int(row["workers"]) == number]
        _draw_depth(axis, number, own, sizes)
    _draw_seconds(figure.add_subplot(grid[1, :]), rows)
    return figure


def _draw_readings(rows: Sequence[Row], source: str) -> Figure:
    figure = blank(6.0, 4.2)
    about = f"{rows[0]['data']}, batches of {rows[0]['batch_size']}; {_cases(rows)} of {source}"
    heading(figure, "Batches read while nobody computes", about)
    axis = figure.subplots()
    tidy(axis)
    ordered = sorted(rows, key=lambda row: (int(row["workers"]), int(row["queue"])))
    places, seconds = np.arange(len(ordered)), _column(ordered, "read_s")
    axis.bar(places, seconds, width=0.55, color=STYLE["colours"][0])
    for place, value in zip(places, seconds, strict=True):
        if np.isfinite(value):
            axis.annotate(
                significant(value), (place, value), (0, 3), textcoords="offset points",
                ha="center", fontsize=STYLE["small"], color=STYLE["ink"],
            )  # fmt: skip
    axis.set_xticks(places, [row["workers"] for row in ordered])
    axis.grid(visible=False, axis="x")
    axis.set_xlabel("Workers", **TEXT)
    axis.set_ylabel("Seconds for a batch", **TEXT)
    return figure


def _draw_depth(axis: Axes, workers: int, rows: Sequence[Row], sizes: Sequence[int]) -> None:
    tidy(axis)
    axis.set_title(f"{workers} worker{'s' * (workers != 1)}", **TITLE)
    for row in sorted(rows, key=lambda row: int(row["queue"])):
        size = int(row["queue"])
        colour = STYLE["colours"][sizes.index(size) % len(STYLE["colours"])]
        depth = _numbers(row["depth"])
        axis.step(range(len(depth)), depth, where="mid", color=colour, label=f"queue {size}")
        simulated = _numbers(row.get("simulated_depth", ""))
        axis.step(
            range(len(simulated)), simulated, where="mid", color=colour, ls=":", linewidth=1.1
        )
    axis.set_ylim(bottom=-0.1, top=max(1.1, axis.get_ylim()[1]))
    axis.set_xlabel("Iteration", **TEXT)
    axis.set_ylabel("Batches in the queue at its end", **TEXT)
    axis.locator_params(integer=True, min_n_ticks=1)  # half a batch and half a step are none
    axis.legend(**LEGEND, title="dotted: simulated", title_fontsize=STYLE["small"])


def _draw_seconds(axis: Axes, rows: Sequence[Row]) -> None:
    tidy(axis)
    axis.set_title("Seconds per iteration, from a full queue on", **TITLE)
    ordered = sorted(rows, key=lambda row: (int(row["workers"]), int(row["queue"])))
    x = np.arange(len(ordered))
    measured, low, high = (
        _column(ordered, name) for name in ("seconds_per_iteration", "low_seconds", "high_seconds")
    )
    axis.bar(x, measured, width=0.55, color=_BAR, label="measured")
    axis.vlines(x, low, high, color=STYLE["ink"], linewidth=1.2)
    for name, label, marker, colour, size in (  # the first is wider than what may lie on it
        ("model_seconds", "seed's formula", "_", STYLE["colours"][0], 20),
        ("simulated_seconds", "simulated", "x", STYLE["colours"][1], 7),
    ):
        values = _column(ordered, name)
        axis.plot(x, values, marker, color=colour, markersize=size, mew=1.6, label=label)
    for place, row in zip(x, ordered, strict=True):
        if row.get("seed_seconds"):
            note = f"seed {significant(float(row['seed_seconds']), 2)}"
            axis.annotate(
                note, (place, 0), (0, 3), textcoords="offset points", ha="center",
                fontsize=STYLE["small"] - 1, color=STYLE["faint"],
            )  # fmt: skip
    names = [f"{r['workers']}, {r['queue']}" if int(r["workers"]) else "0" for r in ordered]
    axis.set_xticks(x, names)
    axis.grid(visible=False, axis="x")
    axis.set_xlabel("Workers, queue", **TEXT)
    axis.set_ylabel("Seconds", **TEXT)
    # Beside the title: over the bars it would hide them.
    axis.legend(
        **LEGEND, ncols=3, loc="lower right", bbox_to_anchor=(1, 0.98), markerscale=0.8,
        columnspacing=1.2,
    )  # fmt: skip


# --- the loaders --------------------------------------------------------------------------------


def draw_loader(rows: Sequence[Row], source: str) -> Figure:
    """Seconds for a batch by threads, or by loader where there is one number of threads."""
    batches = sorted({int(row["batch_size"]) for row in rows})
    fastest_first = sorted(rows, key=lambda row: float(row["seconds_per_batch"] or "inf"))
    loaders = list(dict.fromkeys(row["loader"] for row in fastest_first))
    threads = sorted({int(row["threads"]) for row in rows})
    beside = 2.0 * (len(threads) > 1)  # inches, for the names of the lines
    figure = blank(max(6.0, 4.6 * len(batches)) + beside, 4.6)
    words = [rows[0]["data"], *loader_report.way(rows[0])]
    words += [loader_report.threads_in_words(count) for count in threads if len(threads) == 1]
    words += ["* part of it was read before"] * any(map(_read_ahead, rows))
    heading(figure, "Seconds for a batch", f"{', '.join(words)}; {_cases(rows)} of {source}")
    axes = np.atleast_1d(figure.subplots(1, len(batches)))
    for axis, batch in zip(axes, batches, strict=True):
        tidy(axis)
        axis.set_title(f"Batches of {batch}", **TITLE)
        own = [row for row in rows if int(row["batch_size"]) == batch]
        if len(threads) == 1:
            _draw_bars(axis, own, loaders)
        else:
            _draw_lines(axis, own, loaders, threads)
    if len(threads) > 1:
        # Beside the panels, of which each may lack a loader: over the lines it would hide them.
        named = {label: line for axis in axes for line, label in _labelled(axis)}
        shown = [name for name in loaders if name in named]
        lines = [named[name] for name in shown]
        axes[-1].legend(lines, shown, **LEGEND, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def _read_ahead(row: Row) -> bool:
    return float(row.get("fresh") or 1) < loader_report.FRESH_LEAST


def _labelled(axis: Axes) -> Iterable[tuple[Any, str]]:
    return zip(*axis.get_legend_handles_labels(), strict=True)


def _draw_lines(
    axis: Axes, rows: Sequence[Row], loaders: Sequence[str], threads: Sequence[int]
) -> None:
    ticker = require("matplotlib.ticker", "plot")
    for place, loader in enumerate(loaders):
        own = [row for row in rows if row["loader"] == loader]
        own.sort(key=lambda row: int(row["threads"]))
        if not own:
            continue
        colour = STYLE["colours"][place % len(STYLE["colours"])]
        dashes = ("-", "--", ":")[place // len(STYLE["colours"]) % 3]
        x, seconds = _column(own, "threads"), _column(own, "seconds_per_batch")
        axis.plot(x, seconds, dashes, marker="o", markersize=4, color=colour, label=loader)
        axis.vlines(x, _column(own, "low_seconds"), _column(own, "high_seconds"), color=colour)
    # Loaders are apart by factors; from zero the fast ones would lie on each other.
    axis.set_yscale("log")
    seconds = np.concatenate([_column(rows, name) for name in _SECONDS])
    least, most = np.nanmin(seconds), np.nanmax(seconds)
    axis.set_ylim(least / 1.5, 1.5 * most)  # so that a tick is in it, however near they are
    digits = (1, 2, 5) if most > 4 * least else range(1, 10)
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=digits))
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(ticker.NullFormatter())
    axis.set_xticks(threads)
    axis.set_xlabel("Threads", **TEXT)
    axis.set_ylabel("Seconds", **TEXT)


def _draw_bars(axis: Axes, rows: Sequence[Row], loaders: Sequence[str]) -> None:
    places = [loaders.index(row["loader"]) for row in rows]
    seconds = _column(rows, "seconds_per_batch")
    colours = [STYLE["colours"][0 if row["loader"].startswith("penstock") else 1] for row in rows]
    axis.barh(places, seconds, height=0.6, color=colours)
    low, high = _column(rows, "low_seconds"), _column(rows, "high_seconds")
    axis.hlines(places, low, high, color=STYLE["ink"], linewidth=1.2)
    for place, row, value, end in zip(places, rows, seconds, np.fmax(seconds, high), strict=True):
        text = significant(value) + " *" * _read_ahead(row)
        axis.annotate(
            text, (end, place), (4, 0), textcoords="offset points", va="center",
            fontsize=STYLE["small"], color=STYLE["ink"],
        )  # fmt: skip
    axis.set_yticks(range(len(loaders)), loaders)
    axis.set_ylim(len(loaders) - 0.5, -0.5)
    axis.set_xlim(0, 1.15 * np.nanmax(np.fmax(seconds, high)))
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("Seconds", **TEXT)


# --- the ladder ---------------------------------------------------------------------------------


def plot_ladders(
    records: Iterable[Record], out_prefix: str | Path, replace: bool = False
) -> list[Path]:
    """Draw the ladder of every batch size and number of threads to ``<out_prefix>.png``, or to one
    numbered file for each data set, cache, ... that they climb."""
    ladders = [ladder for ladder in loader_report.ladders(records) if ladder.measured]
    groups = loader_report.alike(ladders)
    prefix = Path(out_prefix)
    figures = {
        _numbered(prefix, number, len(groups)): draw_ladders(group)
        for number, group in enumerate(groups, 1)
    }
    return save(figures, replace)


def draw_ladders(ladders: Sequence[Ladder]) -> Figure:
    """What the batch costs at each rung, beyond the one below it; the dearest is marked."""
    figure = blank(max(6.0, 4.6 * len(ladders)), 4.2)
    case = next(iter(ladders[0].rungs.values())).case
    where = ", ".join([f"{case['data']}, cache {case['cache']}", *loader_report.way(case)])
    heading(figure, "What a batch has to pay for", where)
    axes = np.atleast_1d(figure.subplots(1, len(ladders), sharex=True))
    for axis, ladder in zip(axes, ladders, strict=True):
        _draw_ladder(axis, ladder)
    longest = max(cell.seconds or 0.0 for ladder in ladders for cell in ladder.measured.values())
    axes[0].set_xlim(0, 1.45 * longest)  # of all: they share it
    return figure


def _draw_ladder(axis: Axes, ladder: Ladder) -> None:
    tidy(axis)
    names = list(ladder.measured)
    case = ladder.measured[names[0]].case
    threads = loader_report.threads_in_words(int(case["threads"]))
    axis.set_title(f"Batches of {case['batch']}, {threads}", **TITLE)
    ends = np.array([ladder.measured[name].seconds for name in names])
    starts = np.array([0.0, *ends[:-1]])
    colours = [STYLE["colours"][1 if name == ladder.limiting else 0] for name in names]
    places = np.arange(len(names))
    bars = axis.barh(places, ends - starts, left=starts, color=colours, height=0.6)
    for bar, cost in zip(bars, ends - starts, strict=True):
        if cost < 0:  # a step that was measured to cost less than nothing
            bar.set_alpha(0.3)
    axis.vlines(ends[:-1], places[:-1], places[1:], color=STYLE["faint"], linewidth=0.8)
    for place, name in enumerate(names):
        speed = ladder.measured[name].speed("bytes")
        note = f"{format_seconds(ends[place])}, {significant((speed or 0) / 1e6)} MB/s"
        axis.annotate(
            note, (max(ends[place], starts[place]), place), (4, 0), textcoords="offset points",
            va="center", fontsize=STYLE["small"], color=STYLE["ink"],
        )  # fmt: skip
    labels = [f"{name} {loader_report.RUNGS[name]}" for name in names]
    if names[0] != "L0":  # it holds what is under it, too
        labels[0] = f"up to {labels[0]}"
    axis.set_yticks(places, labels)
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.grid(visible=False, axis="y")
    axis.set_xlabel("Seconds", **TEXT)


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]


def _column(rows: Sequence[Row], name: str) -> Any:
    return np.array([float(row.get(name) or "nan") for row in rows])
