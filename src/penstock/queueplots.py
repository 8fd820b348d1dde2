"""The figures of a queue benchmark and of a loader benchmark, drawn from their CSVs.

    queue    depth of the queue at the end of each iteration, a panel for each number of workers,
             measured and simulated; below, seconds per iteration: measured, model and the seed's
    loader   seconds for a batch by threads, a line for each loader, a panel for each batch size

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
from .plots import STYLE, heading, tidy
from .report import Row, read_csv
from .units import format_seconds, significant

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_QUEUE_APART = ("data", "shuffle", "seed", "batch_size", "compute", "iterations", "machine_key")
_LOADER_APART = (*loader_report.CASE_APART, "machine_key")
_TEXT: dict[str, Any] = {"fontsize": STYLE["text"], "color": STYLE["ink"]}
_TITLE: dict[str, Any] = {**_TEXT, "loc": "left", "fontweight": "bold"}
_LEGEND: dict[str, Any] = {
    "frameon": False, "fontsize": STYLE["small"], "labelcolor": STYLE["ink"],
}  # fmt: skip


def plot_queue(path: Path, out_prefix: str | Path) -> list[Path]:
    """Draw the CSV of ``penstock bench queue`` to ``<out_prefix>.png``, or to one numbered file
    for each group of cases; returns what was written."""
    rows = _latest(path, queue_report.NEEDS, ("workers", "queue"), _QUEUE_APART)
    return _save(path, rows, _QUEUE_APART, draw_queue, out_prefix)


def plot_loader(path: Path, out_prefix: str | Path) -> list[Path]:
    """Draw the CSV of ``penstock bench loader``, likewise."""
    named = ("loader", "threads", "batch_size")
    rows = _latest(path, loader_report.NEEDS, named, _LOADER_APART)
    return _save(path, rows, _LOADER_APART, draw_loader, out_prefix)


def _latest(
    path: Path, needs: Iterable[str], names: Sequence[str], apart: Sequence[str]
) -> list[Row]:
    """The last row of each case that was measured."""
    rows = sorted(read_csv(path, needs).rows, key=lambda row: row.get("timestamp", ""))
    cases = {tuple(row.get(name, "") for name in (*names, *apart)): row for row in rows}
    measured = [row for row in cases.values() if row.get("status", "ok") == "ok"]
    if not measured:
        raise UsageError(f"{path} holds no row to plot")
    return measured


def _save(
    path: Path,
    rows: Sequence[Row],
    apart: Sequence[str],
    draw: Callable[[Sequence[Row], str], Figure],
    out_prefix: str | Path,
) -> list[Path]:
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name, "") for name in apart), []).append(row)
    prefix = Path(out_prefix)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, group in enumerate(groups.values(), 1):
        try:
            figure = draw(group, path.name)
        except ValueError as error:
            raise UsageError(f"{path} holds what is no number: {error}") from error
        ending = f"_{number}" if len(groups) > 1 else ""
        paths.append(prefix.with_name(f"{prefix.name}{ending}.png"))
        figure.savefig(paths[-1], dpi=STYLE["dpi"])
    return paths


def _figure(width: float, height: float) -> Figure:
    engine = require("matplotlib.layout_engine", "plot").ConstrainedLayoutEngine(
        rect=(0, 0, 1, 1 - 0.66 / height), w_pad=0.1, h_pad=0.1
    )
    figure: Figure = require("matplotlib.figure", "plot").Figure(
        figsize=(width, height), layout=engine, facecolor="white"
    )
    return figure


# --- the queue ----------------------------------------------------------------------------------


def draw_queue(rows: Sequence[Row], source: str) -> Figure:
    """Depth over time above, seconds per iteration below."""
    queued = [row for row in rows if int(row["workers"]) > 0]
    workers = sorted({int(row["workers"]) for row in queued})
    figure = _figure(max(8.0, 3.2 * len(workers)), 7.6)
    compute = format_seconds(float(rows[0]["compute_s"]))
    heading(
        figure,
        f"A queue beside steps of {compute} ({rows[0]['compute']})",
        f"{rows[0]['data']}, batches of {rows[0]['batch_size']}, {rows[0]['iterations']} "
        f"iterations from a full queue; {len(rows)} cases of {source}",
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


def _draw_depth(axis: Axes, workers: int, rows: Sequence[Row], sizes: Sequence[int]) -> None:
    tidy(axis)
    axis.set_title(f"{workers} worker{'s' * (workers != 1)}", **_TITLE)
    for row in sorted(rows, key=lambda row: int(row["queue"])):
        size = int(row["queue"])
        colour = STYLE["colours"][sizes.index(size) % len(STYLE["colours"])]
        depth = _numbers(row["depth"])
        axis.step(range(len(depth)), depth, where="mid", color=colour, label=f"queue {size}")
        simulated = _numbers(row.get("simulated_depth", ""))
        axis.step(
            range(len(simulated)), simulated, where="mid", color=colour, ls=":", linewidth=1.1
        )
    axis.set_ylim(bottom=-0.1)
    axis.set_xlabel("Iteration", **_TEXT)
    axis.set_ylabel("Batches in the queue at its end", **_TEXT)
    axis.locator_params(axis="y", integer=True)
    axis.legend(**_LEGEND, title="dotted: simulated", title_fontsize=STYLE["small"])


def _draw_seconds(axis: Axes, rows: Sequence[Row]) -> None:
    tidy(axis)
    axis.set_title("Seconds per iteration, those from the full queue too", **_TITLE)
    ordered = sorted(rows, key=lambda row: (int(row["workers"]), int(row["queue"])))
    x = np.arange(len(ordered))
    measured, low, high = (
        _column(ordered, name) for name in ("seconds_per_iteration", "low_seconds", "high_seconds")
    )
    axis.bar(x, measured, width=0.55, color=STYLE["grid"], label="measured")
    axis.vlines(x, low, high, color=STYLE["ink"], linewidth=1.2)
    for name, label, marker, colour in (
        ("model_seconds", "model", "_", STYLE["colours"][0]),
        ("simulated_seconds", "simulated", "x", STYLE["colours"][1]),
    ):
        axis.plot(x, _column(ordered, name), marker, color=colour, markersize=9, label=label)
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
    axis.set_xlabel("Workers, queue", **_TEXT)
    axis.set_ylabel("Seconds", **_TEXT)
    axis.legend(**_LEGEND, ncols=3, loc="upper right")


# --- the loaders --------------------------------------------------------------------------------


def draw_loader(rows: Sequence[Row], source: str) -> Figure:
    """Seconds for a batch by threads."""
    batches = sorted({int(row["batch_size"]) for row in rows})
    loaders = list(dict.fromkeys(row["loader"] for row in rows))
    figure = _figure(max(6.0, 4.6 * len(batches)), 4.6)
    heading(figure, "Seconds for a batch", f"{rows[0]['data']}; {len(rows)} cases of {source}")
    axes = np.atleast_1d(figure.subplots(1, len(batches)))
    for axis, batch in zip(axes, batches, strict=True):
        tidy(axis)
        axis.set_title(f"Batches of {batch}", **_TITLE)
        for loader in loaders:
            own = [r for r in rows if r["loader"] == loader and int(r["batch_size"]) == batch]
            own.sort(key=lambda row: int(row["threads"]))
            if not own:
                continue
            place = loaders.index(loader)
            colour = STYLE["colours"][place % len(STYLE["colours"])]
            dashes = ("-", "--", ":")[place // len(STYLE["colours"]) % 3]
            x, seconds = _column(own, "threads"), _column(own, "seconds_per_batch")
            axis.plot(x, seconds, dashes, marker="o", markersize=4, color=colour, label=loader)
            axis.vlines(x, _column(own, "low_seconds"), _column(own, "high_seconds"), color=colour)
        axis.set_ylim(bottom=0)
        axis.set_xticks(sorted({int(row["threads"]) for row in rows}))
        axis.set_xlabel("Threads", **_TEXT)
        axis.set_ylabel("Seconds", **_TEXT)
    axes[-1].legend(**_LEGEND)
    return figure


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split()]


def _column(rows: Sequence[Row], name: str) -> Any:
    return np.array([float(row.get(name) or "nan") for row in rows])
