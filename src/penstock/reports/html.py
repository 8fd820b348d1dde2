"""A report as one HTML file that loads no other file.

The page is a template (``pages/``) that escapes all values. Its script draws the figures, and
compares the runs that the page holds. Its content security policy allows that script, by its hash,
and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from .. import __version__
from ..base import require
from .charts.chart import document_of, words_of
from .content import Chapter, Picture, Report, clipped, sentence, shown

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
