"""A report as a page: the tables, sentences and figures of a ledger in a folder.

    FOLDER/report.md        what was measured, on which machines, with tables and sentences
    FOLDER/model.csv ...    the numbers of the figures, as the benchmark wrote them
    FOLDER/model.png ...    the figures

Everything is computed from records, so a page can be made again from its ledger on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..base import (
    Refused,
    UsageError,
    begin_output,
    check_folder,
    check_outputs,
    end_output,
    for_markdown,
    group_by,
    is_written_by_us,
    system_errors,
    writing_output,
)
from ..instruments import Record
from .figures import model
from .figures.loader import plot_ladders, plot_loader
from .figures.queue import plot_queue
from .figures.suite import plot_suite
from .loader.ladder import ladder_sections
from .loader.report import append_loader_csv, loader_sections
from .model.report import append_model_csv, model_sections
from .queue.report import append_queue_csv, queue_sections
from .suite.report import suite_sections
from .table import Section, in_markdown
from .words import hosts_of, listed, machine_words

PAGE = "report.md"


class _Kind(NamedTuple):
    """The parts of a page that show the records of one scenario."""

    title: str
    sections: Callable[[Iterable[Record]], list[Section]]
    plot: Callable[..., list[Path]]
    """Draws the CSV that ``append_csv`` wrote, or the records if there is none, to a prefix."""
    append_csv: Callable[[Iterable[Record], Path], None] | None = None


_KINDS = {
    "model": _Kind(
        "Memory and throughput of a model", model_sections, model.plot_bench,
        append_model_csv,
    ),
    "loader": _Kind(
        "Loading of batches", loader_sections, plot_loader,
        append_loader_csv,
    ),
    "ladder": _Kind(
        "What a batch has to pay for",
        ladder_sections,
        plot_ladders,
    ),
    "queue": _Kind(
        "The queue between reading and computing", queue_sections, plot_queue,
        append_queue_csv,
    ),
    "train": _Kind("Training", lambda r: suite_sections(r, ()), plot_suite),
}  # fmt: skip


def write_page(
    records: Sequence[Record], folder: Path, source: str, overwrite: bool, replace: bool = False
) -> list[Path]:
    """Write a page of records.

    Args:
        records: The launches of one or more ledgers.
        folder: The folder of the page; it is made if it is not there.
        source: The name of the ledgers, for the title.
        overwrite: Replace a page and its figures.
        replace: Replace files that Penstock did not write.

    Returns:
        The files that were written, the page first.

    Raises:
        UsageError: No record can be shown, or the folder cannot be written.
        Refused: The folder has a page, or a file is not to be replaced.
    """
    shown = {
        name: kind for name, kind in _KINDS.items() if any(r.scenario == name for r in records)
    }
    if "loader" in shown:  # whose sections hold the ladders
        shown.pop("ladder", None)
    if not shown:
        scenarios = ", ".join(sorted({r.scenario for r in records})) or "no records"
        raise UsageError(f"{source} holds {scenarios}; a report is of {', '.join(_KINDS)}")
    page = folder / PAGE
    if page.exists() and not overwrite:
        raise Refused(f"{page} exists; --overwrite replaces it and its figures")
    check_folder(folder, "--output")
    tables = [folder / f"{name}.csv" for name, kind in shown.items() if kind.append_csv]
    figures = [folder / f"{name}.png" for name in {*shown, "ladder"}]
    named = [page, *tables, *figures]
    check_outputs(*(("--output", path) for path in named), replace=replace)
    parts, files = (
        [f"# {for_markdown(source)}", "", *map(for_markdown, _of_machines(records))],
        [page],
    )
    with system_errors(f"{folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_figures(page)
        for name, kind in shown.items():
            figures = _figures(name, kind, records, folder, replace)
            files += [*([folder / f"{name}.csv"] if kind.append_csv else []), *figures]
            parts += ["", f"## {kind.title}", ""]
            parts += [f"![{figure.stem}]({figure.name})" for figure in figures]
            parts += ["", in_markdown(kind.sections(records)).rstrip()]
        with writing_output(page, replace=replace) as draft:
            draft.write_text("\n".join(parts) + "\n")
    return files


def _remove_figures(page: Path) -> None:
    """Remove the figures of an old page. The new one may have fewer, or others."""
    if page.exists():
        for name in re.findall(r"!\[(\w+)\]\(\1\.png\)", page.read_text(errors="replace")):
            figure = page.parent / f"{name}.png"
            if is_written_by_us(figure):
                figure.unlink(missing_ok=True)


def _figures(
    name: str, kind: _Kind, records: Sequence[Record], folder: Path, replace: bool
) -> list[Path]:
    """Draw the figures of one kind. There is none if every launch failed, as the table says."""
    drawn: Any = records
    if kind.append_csv is not None:
        drawn = folder / f"{name}.csv"
        begin_output(drawn)
        drawn.unlink(missing_ok=True)
        kind.append_csv(records, drawn)
        end_output(drawn)
    measured = any(r.scenario == name and r.ok for r in records)
    figures = kind.plot(drawn, folder / name, replace) if measured else []
    if name == "loader":
        figures += plot_ladders(records, folder / "ladder", replace)
    return figures


def _of_machines(records: Sequence[Record]) -> list[str]:
    """A line for each machine and commit of the launches, with its hosts where they are known."""
    machines = group_by(records, _machine).items()
    return [
        f"- {len(launches)} launches, {_days(launches)}: {where}{_hosts(launches)}"
        for where, launches in machines
    ]


def _hosts(records: Sequence[Record]) -> str:
    """The hosts of launches on a cluster, which are of one kind."""
    hosts = hosts_of(records)
    counts = [f"{number} on {host}" for host, number in sorted(hosts.items())]
    return f"; launches by host: {listed(counts)}" if counts else ""


def _machine(record: Record) -> str:
    block = record.environment
    gpus = (gpu["name"] for gpu in block.get("gpus") or ())
    return machine_words(block, *gpus, (block.get("machine") or {}).get("system"))


def _days(records: Sequence[Record]) -> str:
    days = sorted({record.time[:10] for record in records})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
