"""A report as a page: the tables, sentences and figures of a ledger, in a folder.

    FOLDER/report.md        what was measured, on what, and what it says
    FOLDER/model.csv ...    the numbers of the figures, as the benchmark wrote them
    FOLDER/model.png ...    the figures

All of it is computed from records, so a page can be made anew from its ledger, on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import (
    benchplots,
    loader_report,
    ours,
    queue_report,
    queueplots,
    report,
    suite_report,
    suiteplots,
)
from .errors import Refused, UsageError
from .files import check_folder
from .record import Record
from .report import Section
from .safe import markdown
from .units import format_bytes

PAGE = "report.md"


class _Kind(NamedTuple):
    """How records of some scenarios are shown."""

    title: str
    sections: Callable[[Iterable[Record]], list[Section]]
    plot: Callable[..., list[Path]]
    """Of a table that ``append_csv`` wrote, or where there is none of the records; and a prefix."""
    append_csv: Callable[[Iterable[Record], Path], None] | None = None


_KINDS = {
    "model": _Kind(
        "Memory and throughput of a model", report.sections, benchplots.plot_bench,
        report.append_csv,
    ),
    "loader": _Kind(
        "Loading of batches", loader_report.sections, queueplots.plot_loader,
        loader_report.append_csv,
    ),
    "ladder": _Kind(
        "What a batch has to pay for",
        lambda r: [ladder.section() for ladder in loader_report.ladders(r)],
        queueplots.plot_ladders,
    ),
    "queue": _Kind(
        "The queue between reading and computing", queue_report.sections, queueplots.plot_queue,
        queue_report.append_csv,
    ),
    "train": _Kind("Training", lambda r: suite_report.sections(r, ()), suiteplots.plot_suite),
}  # fmt: skip


def write(
    records: Sequence[Record], folder: Path, source: str, overwrite: bool, replace: bool = False
) -> list[Path]:
    """Write a page of the records, which came from ``source``; returns the files, the page first.

    Raises `UsageError` where there is nothing to show, `Refused` for a folder that has a page.
    """
    shown = {
        name: kind for name, kind in _KINDS.items() if any(r.scenario == name for r in records)
    }
    if "loader" in shown:  # whose sections hold the ladders
        shown.pop("ladder", None)
    if not shown:
        found = ", ".join(sorted({r.scenario for r in records})) or "no records"
        raise UsageError(f"{source} holds {found}; a report is of {', '.join(_KINDS)}")
    page = folder / PAGE
    if page.exists() and not overwrite:
        raise Refused(f"{page} exists; --overwrite replaces it and its figures")
    check_folder(folder, "--output")
    tables = [folder / f"{name}.csv" for name, kind in shown.items() if kind.append_csv]
    figures = [folder / f"{name}.png" for name in {*shown, "ladder"}]
    named = [page, *tables, *figures]
    ours.check(*(("--output", path) for path in named), replace=replace)
    parts, files = [f"# {markdown(source)}", "", *map(markdown, _of_machines(records))], [page]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_figures(page)
        for name, kind in shown.items():
            figures = _figures(name, kind, records, folder, replace)
            files += [*([folder / f"{name}.csv"] if kind.append_csv else []), *figures]
            parts += ["", f"## {kind.title}", ""]
            parts += [f"![{figure.stem}]({figure.name})" for figure in figures]
            parts += ["", report.in_markdown(kind.sections(records)).rstrip()]
        with ours.writing(page, replace=replace) as draft:
            draft.write_text("\n".join(parts) + "\n")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from error
    return files


def _remove_figures(page: Path) -> None:
    """Those that an old page shows: of other records there may be fewer, or of other names."""
    if page.exists():
        for name in re.findall(r"!\[(\w+)\]\(\1\.png\)", page.read_text(errors="replace")):
            figure = page.parent / f"{name}.png"
            if ours.is_ours(figure):
                figure.unlink(missing_ok=True)


def _figures(
    name: str, kind: _Kind, records: Sequence[Record], folder: Path, replace: bool
) -> list[Path]:
    """Those that can be drawn: where every launch failed there is none, and the table says so."""
    own: Any = records
    if kind.append_csv is not None:
        own = folder / f"{name}.csv"
        ours.begin(own)
        own.unlink(missing_ok=True)
        kind.append_csv(records, own)
        ours.end(own)
    measured = [r for r in records if r.scenario == name and r.ok]
    figures = kind.plot(own, folder / name, replace) if measured else []
    if name == "loader":
        figures += queueplots.plot_ladders(records, folder / "ladder", replace)
    return figures


def _of_machines(records: Sequence[Record]) -> list[str]:
    """One line for each machine and commit that launches ran on."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(_machine(record), []).append(record)
    return [f"- {len(own)} launches, {_days(own)}: {where}" for where, own in found.items()]


def _machine(record: Record) -> str:
    block: dict[str, Any] = record.environment
    machine, libraries = block.get("machine") or {}, block.get("libraries") or {}
    memory = machine.get("memory_bytes")
    words = [
        machine.get("processor"),
        f"{machine['cores']} cores" if machine.get("cores") else None,
        format_bytes(memory) if memory else None,
        *(gpu["name"] for gpu in block.get("gpus") or ()),
        machine.get("system"),
        *(f"{name} {libraries[name]}" for name in ("python", "torch") if libraries.get(name)),
    ]
    if commit := report.commit_of(block.get("git")):
        words.append(f"commit {commit}")
    return ", ".join(word for word in words if word)


def _days(records: Sequence[Record]) -> str:
    days = sorted({record.time[:10] for record in records})
    return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
