"""A report as one HTML file that loads no other file.

The page is a template (``pages/``) that escapes all values. Figures are drawn as SVG within it. Its
content security policy allows its own script, by its hash, and nothing else.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from .. import __version__
from ..base import require, scrub
from .content import Chapter, Raw, Report, clipped, sentence, shown
from .figures.vector import inline_svg
from .table import Section

MOST_FIGURES = 40
"""The most figures on a page. A chapter whose figures are left out says how many there are."""

MOST_RECORDS = 2**20
"""Most bytes of records inside a page."""
_WIDE = 9.5
"""Inches of a figure that takes the whole width of a page."""

_UNITS = {
    "": 1.0, "%": 1.0, "x": 1.0,
    "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0,
    "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40, "PiB": 2.0**50,
    "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
}  # fmt: skip
_NUMBER = re.compile(r"([+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)\s*([A-Za-zµ%]*)\s*")


class _PageFigure(NamedTuple):
    caption: str
    svg: Any
    wide: bool


class _PageTable(NamedTuple):
    title: str
    sentences: Sequence[str]
    head: Sequence[tuple[str, bool]]
    """The names of columns, and whether each holds words."""
    rows: Sequence[Sequence[tuple[str, float | None, bool]]]
    """Text of each cell, the number by which it is sorted, and whether its column holds words."""


class _Shown(NamedTuple):
    title: str
    lead: Sequence[str]
    figures: Sequence[_PageFigure]
    sections: Sequence[_PageTable]


def html_page(report: Report) -> str:
    """A report as a page.

    Args:
        report: What it says.

    Returns:
        The text of the file.

    Raises:
        MissingDependency: Jinja2 or matplotlib is not installed.
    """
    jinja2, markup = require("jinja2", "plot"), require("markupsafe", "plot").Markup
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_part),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"shown": shown, "sentence": sentence}
    script = _part("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template("report.html.jinja").render(
        report=report,
        chapters=_chapters(report.chapters, markup),
        records=_records(report),
        version=__version__,
        style=markup(_part("report.css")),
        script=markup(script),
        script_hash=markup(f"sha256-{digest}"),
    )


def _part(name: str) -> str:
    return (files(__package__) / "pages" / name).read_text(encoding="utf-8")


def _chapters(chapters: Sequence[Chapter], markup: Any) -> list[_Shown]:
    """The chapters with their figures drawn, as many as a page holds."""
    drawn, pages = 0, []
    for chapter in chapters:
        pictures = chapter.pictures[: max(0, MOST_FIGURES - drawn)]
        figures = []
        for picture in pictures:
            drawn += 1
            caption, alt = shown(picture.caption), sentence(picture.alt)
            figure = picture.draw()
            wide = figure.get_size_inches()[0] > _WIDE
            svg = inline_svg(figure, drawn, caption, alt)
            figures.append(_PageFigure(picture.caption, markup(svg), wide))
        lead = list(chapter.lead)
        if left_out := len(chapter.pictures) - len(pictures):
            lead.append(
                f"{left_out} of {len(chapter.pictures)} figures are left out: a page holds "
                f"{MOST_FIGURES}; the tables have all of their numbers."
            )
        pages.append(_Shown(chapter.title, lead, figures, list(map(_table, chapter.sections))))
    return pages


def _table(section: Section) -> _PageTable:
    title, table, sentences = clipped(section)
    rows = [[(text, order_of(text)) for text in line] for line in table[1:]]
    words = [all(order is None for _, order in column) for column in zip(*rows, strict=True)]
    head = list(zip(table[0], words, strict=True)) if rows else []
    cells = [[(*cell, word) for cell, word in zip(row, words, strict=True)] for row in rows]
    return _PageTable(title, sentences, head, cells)


def _records(report: Report) -> list[tuple[Raw, str, str]]:
    """The files of records, each with a name and a link. Small files are part of the page, so that
    a report that is sent by mail still holds its numbers.
    """
    room, records = MOST_RECORDS, []
    for raw in report.raw:
        link = _kept(Path(raw.place), room)
        room -= len(link)
        records.append((raw, f"{Path(raw.place).name}.gz", link))
    return records


def _kept(path: Path, room: int) -> str:
    """A file as a data URL, which holds all of it; empty if there is no room."""
    try:
        if path.stat().st_size > 16 * room:
            return ""
        text = scrub(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):  # a foreign name may be no path
        return ""
    packed = gzip.compress(text.encode(), mtime=0)  # the same page from the same records
    link = f"data:application/gzip;base64,{base64.b64encode(packed).decode()}"
    return link if len(link) <= room else ""


def order_of(text: str) -> float | None:
    """The number by which a cell is sorted: its first quantity, in the base of its unit.

    >>> order_of("1 min 34 s"), order_of("646 MiB"), order_of("1.2 - 1.4"), order_of("ok")
    (94.0, 677380096.0, 1.2, None)
    """
    place, total = 0, None
    while (match := _NUMBER.match(text, place)) and match[2] in _UNITS:
        total = (total or 0.0) + float(match[1].replace(",", "")) * _UNITS[match[2]]
        place = match.end()
        if match[2] not in ("min", "h", "d"):  # such as 1 min 34 s
            break
    return total
