"""A report in files: a page in a folder with figures and CSVs beside it, or a single file.

    FOLDER/report.md        what was measured, on which machines, with tables and sentences
    FOLDER/model.csv ...    the numbers of the figures, as the benchmark wrote them
    FOLDER/model.png ...    the figures

    report.html             all in one file
    report.md               and its figures beside it, report_model_rates_1.png ...
    report.json everything but the figures

Everything is computed from records, so a page can be made again from its ledger on any machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..base import (
    Refused,
    begin_output,
    check_folder,
    check_outputs,
    end_output,
    is_written_by_us,
    system_errors,
    write_output,
    writing_output,
)
from ..instruments import Record
from .cell import Cell
from .content import Report, json_page, markdown_page
from .figures import model
from .figures.canvas import save_figures
from .figures.loader import plot_ladders, plot_loader
from .figures.queue import plot_queue
from .figures.suite import plot_suite
from .html import html_page
from .ledger_report import kinds_of, report_of_records
from .loader.cell import LOADER_COLUMNS, loader_cells
from .model.cell import MODEL_COLUMNS, model_cells
from .queue.cell import QUEUE_COLUMNS, queue_cells
from .table import Columns, append_rows

PAGE = "report.md"
REPORT_SUFFIXES = (".html", ".htm", ".md", ".json")
"""The ends of names of reports that are single files. Anything else is a folder."""


class _Files(NamedTuple):
    """The files beside the page of one kind of benchmark."""

    plot: Callable[..., list[Path]]
    """Draws the CSV that `append_csv` wrote, or the records if there is none, to a prefix."""
    columns: Columns | None = None
    """The columns of the CSV; None if there is none."""
    cells: Callable[[Iterable[Record]], Sequence[Cell]] = lambda records: ()


_FILES = {
    "model": _Files(model.plot_bench, MODEL_COLUMNS, model_cells),
    "loader": _Files(plot_loader, LOADER_COLUMNS, loader_cells),
    "ladder": _Files(plot_ladders),
    "queue": _Files(
        plot_queue,
        QUEUE_COLUMNS,
        lambda records: [c for group in queue_cells(records) for c in group],
    ),
    "train": _Files(plot_suite),
}


def append_csv(scenario: str, records: Iterable[Record], path: Path, **changes: str) -> None:
    """Add a row for each case to the CSV of a kind of benchmark.

    Args:
        scenario: ``model``, ``loader`` or ``queue``.
        records: The launches of one or more benchmarks.
        path: The CSV. It is created if needed. A file with another header gets our columns, too,
            and keeps all rows.
        **changes: Values of columns that are the same in all rows.

    Raises:
        UsageError: ``path`` is another file, or cannot be written.
    """
    kind = _FILES[scenario]
    assert kind.columns is not None
    append_rows([{**cell.row, **changes} for cell in kind.cells(records)], path, kind.columns)


def write_report(
    report: Report, path: Path, overwrite: bool = False, replace: bool = False
) -> list[Path]:
    """Write a report to one file, by its suffix: ``.html``, ``.md`` or ``.json``.

    Args:
        report: What it says.
        path: The file, or a folder for report.md. Figures of Markdown lie beside it.
        overwrite: Replace an earlier report.
        replace: Replace files that Penstock did not write.

    Returns:
        The files that were written, the report first.

    Raises:
        UsageError: The file cannot be written.
        Refused: There is a report already, or a file is not to be replaced.
        MissingDependency: Jinja2 or matplotlib is not installed, and the file needs it.
    """
    in_folder = path.suffix not in REPORT_SUFFIXES
    page = path / PAGE if in_folder else path
    if in_folder:
        check_folder(path, "--output")
    check_report(page, overwrite, replace)
    if page.suffix == ".json":
        text = json.dumps(json_page(report), indent=1, ensure_ascii=False) + "\n"
        write_output("--output", page, text, replace=replace)
        return [page]
    if page.suffix != ".md":
        write_output("--output", page, html_page(report), replace=replace)
        return [page]
    prefix = "" if in_folder else f"{page.stem}_"
    names = [picture.name for chapter in report.chapters for picture in chapter.pictures]
    apart = len(set(names)) < len(names)  # such as those of two runs
    drawn = [
        {
            page.with_name(f"{prefix}{f'{number}_' * apart}{picture.name}.png"): picture.draw()
            for picture in chapter.pictures
        }
        for number, chapter in enumerate(report.chapters, 1)
    ]
    with system_errors(f"{page.parent} cannot be written"):
        page.parent.mkdir(parents=True, exist_ok=True)
        figures = [each for files in drawn for each in save_figures(files, replace)]
    text = markdown_page(report, [[file.name for file in files] for files in drawn])
    write_output("--output", page, text, replace=replace)
    return [page, *figures]


def check_report(path: Path, overwrite: bool, replace: bool, read: Iterable[Path] = ()) -> None:
    """Refuse a file that a report must not replace, before anything is read.

    Args:
        path: The file of the report.
        overwrite: Replace an earlier report.
        replace: Replace a file that Penstock did not write.
        read: Files that the report is made of.

    Raises:
        Refused: There is a report already.
        UsageError: It cannot be written, or is read.
    """
    if path.is_file() and path.stat().st_size and not (overwrite or replace):
        raise Refused(f"{path} exists; --overwrite replaces it")
    check_outputs(("--output", path), replace=replace, inputs=read)


def write_page(
    records: Sequence[Record],
    folder: Path,
    source: str,
    overwrite: bool,
    replace: bool = False,
    places: Sequence[Path] = (),
) -> list[Path]:
    """Write a page of records, with its figures and CSVs in a folder.

    Args:
        records: The launches of one or more ledgers.
        folder: The folder of the page; it is made if it is not there.
        source: The name of the ledgers, for the title.
        overwrite: Replace a page and its figures.
        replace: Replace files that Penstock did not write.
        places: The ledgers, which the page names.

    Returns:
        The files that were written, the page first.

    Raises:
        UsageError: No record can be shown, or the folder cannot be written.
        Refused: The folder has a page, or a file is not to be replaced.
    """
    shown = kinds_of(records, source)
    page = folder / PAGE
    if page.exists() and not overwrite:
        raise Refused(f"{page} exists; --overwrite replaces it and its figures")
    check_folder(folder, "--output")
    tables = [folder / f"{name}.csv" for name in shown if _FILES[name].columns]
    figures = [folder / f"{name}.png" for name in {*shown, "ladder"}]
    named = [page, *tables, *figures]
    check_outputs(*(("--output", path) for path in named), replace=replace)
    report, files = report_of_records(records, source, places), [page]
    with system_errors(f"{folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        _remove_figures(page)
        beside = []
        for name in shown:
            drawn = _figures(name, records, folder, replace)
            files += [*([folder / f"{name}.csv"] if _FILES[name].columns else []), *drawn]
            beside.append([figure.name for figure in drawn])
        with writing_output(page, replace=replace) as draft:
            draft.write_text(markdown_page(report, beside), encoding="utf-8")
    return files


def _remove_figures(page: Path) -> None:
    """Remove the figures of an old page, because the new page may have fewer."""
    if page.exists():
        for name in re.findall(r"!\[(\w+)\]\(\1\.png\)", page.read_text(errors="replace")):
            figure = page.parent / f"{name}.png"
            if is_written_by_us(figure):
                figure.unlink(missing_ok=True)


def _figures(name: str, records: Sequence[Record], folder: Path, replace: bool) -> list[Path]:
    """Draw the figures of one kind. There is none if every launch failed, as the table says."""
    drawn: Any = records
    kind = _FILES[name]
    if kind.columns is not None:
        drawn = folder / f"{name}.csv"
        begin_output(drawn)
        drawn.unlink(missing_ok=True)
        append_csv(name, records, drawn)
        end_output(drawn)
    measured = any(r.scenario == name and r.ok for r in records)
    figures = kind.plot(drawn, folder / name, replace) if measured else []
    if name == "loader":
        figures += plot_ladders(records, folder / "ladder", replace)
    return figures
