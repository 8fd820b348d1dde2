"""A ledger as a report: one chapter for each kind of benchmark that it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..base import UsageError, format_seconds, group_by, plural, well_formed
from ..instruments import LEDGER_FILE, Record
from .cell import Cell
from .charts.chart import Figure
from .charts.model_chart import draw_bench
from .charts.paper import save_under
from .content import Chapter, Picture, Report
from .loader.cell import loader_cells
from .loader.report import draw_ladders, draw_loader, loader_headlines, loader_sections
from .loader.rungs import ladders_of
from .model.cell import model_cells
from .model.report import labelled, model_sections
from .queue.cell import queue_cells
from .queue.report import draw_queue, queue_headlines, queue_sections
from .run_settings import cases_of_sides, settings_of_launch
from .suite.cell import runs_together
from .suite.report import draw_suite, suite_headlines, suite_sections
from .table import (
    Section,
    bracket,
    hosts_of,
    listed,
    machine_words,
    nothing_measured,
    or_dash,
    spread,
)
from .tune.model_advice import recommend

TIMED = ("preprocess", "predict")
"""Scenarios whose launches have a time, and no tables of their own."""


def model_pictures(records: Iterable[Record]) -> list[Picture]:
    """Memory, throughput, times and the frontier, for each group of cells."""
    groups = labelled(model_cells(records))
    return _pictures("model", [partial(draw_bench, *group, "records") for group in groups])


def loader_pictures(records: Iterable[Record]) -> list[Picture]:
    """The time of a batch by threads, for each group of loaders; and what a batch costs at each
    rung, for each group of the ladders below them."""
    records = list(records)
    cells = [cell for cell in loader_cells(records) if cell.launches]
    groups = group_by(cells, lambda cell: cell.group).values()
    ladders = [ladder for ladder in ladders_of(records) if ladder.measured]
    alike = group_by(ladders, lambda each: next(iter(each.rungs.values())).group).values()
    return [
        *_pictures("loader", [partial(draw_loader, group, "records") for group in groups]),
        *_pictures("ladder", [partial(draw_ladders, group) for group in alike]),
    ]


def queue_pictures(records: Iterable[Record]) -> list[Picture]:
    """The depth of the queue over time, measured and simulated, and seconds per iteration."""
    groups = ([cell for cell in group if cell.launches] for group in queue_cells(records))
    return _pictures("queue", [partial(draw_queue, g, "records") for g in groups if g])


def suite_pictures(records: Iterable[Record]) -> list[Picture]:
    """Throughput, peak memory and waiting over the batch size, for each preset."""
    presets = runs_together(records).values()
    measured = [runs for runs in presets if any(run.measured for run in runs)]
    return _pictures("train", [partial(draw_suite, runs) for runs in measured])


_CAPTIONS = {
    "model": "Memory, throughput and time by tile and batch; whiskers are 95 % intervals, crosses "
    "failed; the dashed line joins the cases that none beats in memory and throughput.",
    "loader": "Time of a batch; lines and whiskers are 95 % intervals over launches.",
    "ladder": "Cost of a batch, step by step: each step does what the one before does, and more.",
    "queue": "Depth of the queue at the end of each iteration, measured (solid) and simulated "
    "(dotted), and the time of an iteration.",
    "train": "Throughput, peak memory and waiting for data over the batch size; crosses failed.",
}


def _pictures(name: str, draws: Sequence[Callable[[], Figure]]) -> list[Picture]:
    """The pictures of one kind, numbered if there are several."""
    names = [f"{name}_{n}" for n in range(1, len(draws) + 1)] if len(draws) > 1 else [name]
    return [Picture(n, _CAPTIONS[name], draw) for n, draw in zip(names, draws, strict=False)]


def timed_cells(records: Iterable[Record]) -> list[tuple[str, Cell]]:
    """The cases of timed launches, each with a label: what was run, and the settings that vary.

    Args:
        records: Launches of any scenario.

    Returns:
        The cases, in the order of their first launches.
    """
    (launches,) = cases_of_sides([record for record in records if record.scenario in TIMED])
    cells = [cell for name in TIMED for cell in Cell.of_records(launches, name)]
    return [(_label(cell.records), cell) for cell in cells]


def _label(records: Sequence[Record]) -> str:
    case = settings_of_launch(records[0]) | dict(records[0].case)
    words = [records[0].scenario]
    words += [f"{name}={case[name]}" for name in records[0].case if name in case]
    return " ".join(words)


def timed_headlines(records: Iterable[Record]) -> list[str]:
    """The time of each case, with its launches."""
    return [
        f"{label}: {format_seconds(cell.time.value)} "
        f"{bracket(cell.time, plural(cell.launches, 'launch'))}."
        if cell.time is not None
        else f"{label}: {cell.status}: {cell.error}."
        for label, cell in timed_cells(records)
    ]


def timed_sections(records: Iterable[Record]) -> list[Section]:
    """A table of the cases."""
    lines = [
        (
            label,
            or_dash(cell.time.value if cell.time else None, format_seconds),
            spread(cell.time, format_seconds),
            str(cell.launches),
            cell.status,
        )
        for label, cell in timed_cells(records)
    ]
    return [Section("Times", [("case", "time", "95 %", "launches", "status"), *lines])]


class Kind(NamedTuple):
    """The chapter of a report that shows the records of some scenarios."""

    title: str
    scenarios: Sequence[str]
    headlines: Callable[[Iterable[Record]], list[str]]
    sections: Callable[[Iterable[Record]], list[Section]]
    pictures: Callable[[Iterable[Record]], list[Picture]]


KINDS = (
    Kind(
        "Memory and throughput of a model",
        ("model",),
        lambda records: recommend(records).lines,
        model_sections,
        model_pictures,
    ),
    Kind(
        "Loading of batches",
        ("loader", "ladder"),
        loader_headlines,
        loader_sections,
        loader_pictures,
    ),
    Kind(
        "The queue between reading and computing",
        ("queue",),
        queue_headlines,
        queue_sections,
        queue_pictures,
    ),
    Kind("Training", ("train",), suite_headlines, suite_sections, suite_pictures),
    Kind("Times", TIMED, timed_headlines, timed_sections, lambda records: []),
)


def plot_records(
    scenario: str, records: Iterable[Record], out_prefix: Path, replace: bool = False
) -> list[Path]:
    """Draw a kind of benchmark to ``<out_prefix>.png``, or numbered if it has several figures.

    Args:
        scenario: The kind.
        records: Its launches.
        out_prefix: The path of the figures without the suffix ``.png``.
        replace: Replace figures that Penstock did not write.

    Returns:
        The files that were written; none if nothing was measured.

    Raises:
        Refused: A file is not to be replaced.
        MissingDependency: matplotlib is not installed.
    """
    (kind,) = (kind for kind in KINDS if scenario in kind.scenarios)
    pictures = kind.pictures(records)
    figures = {picture.name.partition("_")[2]: picture.draw() for picture in pictures}
    return save_under(out_prefix, figures, replace)


def report_of_records(
    records: Sequence[Record], source: str, places: Sequence[Path] = ()
) -> Report:
    """The report of records.

    Args:
        records: The launches of one or more ledgers.
        source: The name of the ledgers, for the title.
        places: The ledgers, which the report names.

    Returns:
        The report, with a chapter for each kind of benchmark.

    Raises:
        UsageError: No record can be shown, or one was damaged.
    """
    chapters, verdict = [], []
    with well_formed(f"{source} holds a record that is not as Penstock wrote it"):
        for kind in KINDS:
            shown = [record for record in records if record.scenario in kind.scenarios]
            if not shown:
                continue
            measured = any(record.ok for record in shown)
            verdict += kind.headlines(shown) if measured else [nothing_measured(shown)]
            chapters.append(Chapter(kind.title, kind.sections(shown), kind.pictures(shown)))
        machines = of_machines(records)
    if not chapters:
        scenarios = ", ".join(sorted({record.scenario for record in records})) or "no records"
        scenarios_shown = ", ".join(name for kind in KINDS for name in kind.scenarios)
        raise UsageError(f"{source} holds {scenarios}; a report needs {scenarios_shown}")
    return Report(
        source,
        verdict or ["Nothing here supports a verdict."],
        machines,
        chapters,
        [place / LEDGER_FILE if place.is_dir() else place for place in places],
    )


def of_machines(records: Sequence[Record]) -> list[str]:
    """A line for each machine and commit of the launches, with its hosts if they are known: those
    of launches on a cluster, which are of one kind."""
    lines = []
    for where, launches in group_by(records, _machine).items():
        counts = [f"{number} on {host}" for host, number in sorted(hosts_of(launches).items())]
        hosts = f"; launches by host: {listed(counts)}" if counts else ""
        lines.append(f"{plural(len(launches), 'launch')}, {_days(launches)}: {where}{hosts}")
    return lines


def _machine(record: Record) -> str:
    block = record.environment
    gpus = (gpu["name"] for gpu in block.get("gpus") or ())
    return machine_words(block, *gpus, (block.get("machine") or {}).get("system"))


def _days(records: Sequence[Record]) -> str:
    days = sorted({record.time[:10] for record in records})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
