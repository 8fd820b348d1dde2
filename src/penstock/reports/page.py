"""A report in files: a page in a folder with figures and CSVs beside it, or a single file.

    FOLDER/report.md        what was measured, on which machines, with tables and sentences
    FOLDER/model.csv ...    the numbers of the figures, as the benchmark wrote them
    FOLDER/model_1.png ...  the figures

    report.html             all in one file
    report.md               and its figures beside it, report_model_1.png ...
    report.json everything but the figures

Everything is computed from records, so a page can be made again from its ledger on any machine. An
HTML page is a template (``pages/``) that escapes all values. Its script draws the figures, and
compares the runs that the page holds. Its content security policy allows that script, by its hash,
and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from .. import __version__
from ..base import (
    Refused,
    begin_output,
    check_folder,
    check_outputs,
    end_output,
    require,
    system_errors,
    write_output,
)
from ..instruments import Record
from .cell import Cell
from .charts.chart import document_of, words_of
from .charts.paper import save_figures
from .content import Chapter, Picture, Report, clipped, json_page, markdown_page, sentence, shown
from .loader.cell import LOADER_COLUMNS, loader_cells
from .model.cell import MODEL_COLUMNS, model_cells
from .queue.cell import QUEUE_COLUMNS, queue_cells
from .table import Columns, append_rows, read_csv

MOST_FIGURES = 40
"""The most figures on a page. A chapter whose figures are left out says how many there are."""

_SCRIPTS = ("charts.js", "runs.js", "tables.js")


def html_page(report: Report, runs: Mapping[str, Any] | None = None) -> str:
    """A report as a page.

    Args:
        report: What it says.
        runs: The runs that a reader may pick and compare (`page_data`); None for none.

    Returns:
        The text of the file.

    Raises:
        MissingDependency: Jinja2 is not installed.
    """
    jinja2, markup = require("jinja2", "plot"), require("markupsafe", "plot").Markup
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_part),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"shown": shown, "sentence": sentence}
    script = "".join(map(_part, _SCRIPTS))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("page.html.jinja").render(
        report=report,
        chapters=_chapters(report.chapters, markup),
        version=__version__,
        runs=runs,
        runs_data=markup(_in_script(runs)) if runs else "",
        style=markup(_part("page.css")),
        script=markup(script),
        script_hash=markup(f"sha256-{digest}"),
    )


def _part(name: str) -> str:
    return (files(__package__) / "pages" / name).read_text(encoding="utf-8")


def _in_script(value: Any) -> str:
    """JSON for a block of data in a page: no text of it ends the block."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")


def _chapters(chapters: Sequence[Chapter], markup: Any) -> list[dict[str, Any]]:
    """The chapters with their figures drawn, as many as a page holds."""
    drawn, pages = 0, []
    for chapter in chapters:
        pictures = chapter.pictures[: max(0, MOST_FIGURES - drawn)]
        figures = [_figure(n, picture, markup) for n, picture in enumerate(pictures, drawn + 1)]
        drawn += len(figures)
        lead = list(chapter.lead)
        if left_out := len(chapter.pictures) - len(figures):
            lead.append(
                f"{left_out} of {len(chapter.pictures)} figures are left out: a page holds "
                f"{MOST_FIGURES}; the tables have all of their numbers."
            )
        pages.append(
            {
                "title": chapter.title,
                "lead": lead,
                "figures": figures,
                "sections": list(map(clipped, chapter.sections)),
            }
        )
    return pages


def _figure(number: int, picture: Picture, markup: Any) -> dict[str, Any]:
    figure = picture.draw()
    return {
        "number": number,
        "caption": picture.caption,
        "alt": words_of(figure),
        "data": markup(_in_script(document_of(figure))),
        "wide": figure.across > 1,
    }


PAGE = "report.md"
PAGE_SUFFIXES = (".html", ".htm")
REPORT_SUFFIXES = (*PAGE_SUFFIXES, ".md", ".json")
"""The ends of names of reports that are single files. Anything else is a folder."""


_TABLES: dict[str, tuple[Columns, Callable[[Iterable[Record]], Sequence[Cell]]]] = {
    "model": (MODEL_COLUMNS, model_cells),
    "loader": (LOADER_COLUMNS, loader_cells),
    "queue": (QUEUE_COLUMNS, lambda records: [c for group in queue_cells(records) for c in group]),
}
"""The columns of the CSV of each kind of benchmark that has one, and its rows."""


def check_csv(scenario: str, path: Path) -> None:
    """Check that a file is a CSV of a kind of benchmark, or is not there. New rows are appended to
    a CSV. Its old rows stay, so users may edit them.

    Args:
        scenario: ``model``, ``loader`` or ``queue``.
        path: The file.

    Raises:
        UsageError: It is another file.
    """
    if path.is_file() and path.stat().st_size:
        read_csv(path, _TABLES[scenario][0].place)


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
    columns, cells = _TABLES[scenario]
    append_rows([{**cell.row, **changes} for cell in cells(records)], path, columns)


def write_report(
    report: Report,
    path: Path,
    overwrite: bool = False,
    runs: Mapping[str, Any] | None = None,
    records: Sequence[Record] = (),
) -> list[Path]:
    """Write a report to a file, by its suffix (``.html``, ``.md`` or ``.json``), or to a folder.

    Args:
        report: What it says.
        path: The file, or a folder for report.md. Figures of Markdown lie beside it.
        overwrite: Replace an earlier report, and files that Penstock did not write.
        runs: The runs that a reader of ``.html`` may compare (`page_data`); None for none.
        records: Launches whose CSVs are to lie in the folder.

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
    check_report(page, overwrite)
    measured = {record.scenario for record in records} if in_folder else set()
    tables = {name: page.with_name(f"{name}.csv") for name in _TABLES if name in measured}
    check_outputs(*(("--output", table) for table in tables.values()), replace=overwrite)
    if page.suffix != ".md":
        text = json_page(report) if page.suffix == ".json" else html_page(report, runs)
        write_output("--output", page, text, replace=overwrite)
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
        _write_tables(tables, records)
        figures = [each for files in drawn for each in save_figures(files, overwrite)]
    text = markdown_page(report, [[file.name for file in files] for files in drawn])
    write_output("--output", page, text, replace=overwrite)
    return [page, *tables.values(), *figures]


def _write_tables(tables: Mapping[str, Path], records: Sequence[Record]) -> None:
    for name, table in tables.items():
        table.unlink(missing_ok=True)
        begin_output(table)
        append_csv(name, records, table)
        end_output(table)


def check_report(path: Path, overwrite: bool, read: Iterable[Path] = ()) -> None:
    """Refuse a file that a report must not replace, before anything is read.

    Args:
        path: The file of the report.
        overwrite: Replace an earlier report, or a file that Penstock did not write.
        read: Files that the report is made of.

    Raises:
        Refused: There is a report already.
        UsageError: It cannot be written, or is read.
    """
    if path.is_file() and path.stat().st_size and not overwrite:
        raise Refused(f"{path} exists; --overwrite replaces it")
    check_outputs(("--output", path), replace=overwrite, inputs=read)
