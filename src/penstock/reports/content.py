"""The content of a report, before it is a page: sentences, figures, tables, and where records lie.

The same content becomes HTML, Markdown and JSON (`html_page`, `markdown_page`, `json_page`), so
that they never differ. Texts are plain; each renderer escapes them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base import for_markdown, for_terminal, format_bytes, scrub, well_formed
from .charts.chart import Figure, words_of
from .table import Section, in_markdown

LONGEST = 400
"""Most characters that a report shows of a foreign text, such as a name or a message."""


@dataclass(frozen=True)
class Picture:
    """A figure of a report."""

    name: str
    """The name of its file, without a suffix, for pages that keep figures in files."""
    caption: str
    how: Callable[[], Figure]

    def draw(self) -> Figure:
        """The figure, made when it is asked for. Raises `UsageError` if its records are damaged."""
        with well_formed(f"the figure {self.name} cannot be drawn, as its records are damaged"):
            return self.how()


@dataclass(frozen=True)
class Chapter:
    """The chapter of a report on one kind of measurement."""

    title: str
    sections: Sequence[Section] = ()
    pictures: Sequence[Picture] = ()
    lead: Sequence[str] = ()
    """Sentences that come before the figures."""


@dataclass(frozen=True)
class Report:
    """The content of a report."""

    title: str
    verdict: Sequence[str]
    """The verdict: sentences, the most important first; never empty."""
    about: Sequence[str] = ()
    """Lines on what was measured, on which machines, and when."""
    chapters: Sequence[Chapter] = ()
    files: Sequence[Path] = ()
    """The records from which it was computed."""

    def places(self) -> list[str]:
        """The files with their sizes, as texts that are safe."""
        there = (path for path in self.files if path.is_file())
        return [f"{shown(str(p))} ({format_bytes(p.stat().st_size)})" for p in there]


def shown(text: str, most: int = LONGEST) -> str:
    r"""Make foreign text safe for a report: no control characters, no secrets, cut to a length.

    Args:
        text: The text.
        most: Most characters that are kept.

    Returns:
        The safe text. If it was cut, it ends with the original length.

    >>> shown("a\x1b[2Jb"), shown("x" * 1000, 8)
    ('a\\x1b[2Jb', 'xxxxxxxx … (1,000 characters)')
    """
    if len(text) > most:
        return f"{scrub(for_terminal(text[: 2 * most]))[:most]} … ({len(text):,} characters)"
    return scrub(for_terminal(text))


def sentence(text: str) -> str:
    """`shown` for a sentence, which may hold several names."""
    return shown(text, 4 * LONGEST)


def markdown_page(report: Report, figures: Sequence[Sequence[str]]) -> str:
    """A report in Markdown.

    Args:
        report: What it says.
        figures: The names of the files of figures, for each chapter.

    Returns:
        The page.
    """
    parts = [f"# {for_markdown(shown(report.title))}", ""]
    parts += [f"**{for_markdown(sentence(report.verdict[0]))}**", ""] * bool(report.verdict)
    parts += [f"- {for_markdown(sentence(line))}" for line in report.verdict[1:]]
    parts += [""] * (len(report.verdict) > 1)
    parts += [f"- {for_markdown(sentence(line))}" for line in report.about]
    for chapter, files in zip(report.chapters, figures, strict=True):
        parts += ["", f"## {for_markdown(shown(chapter.title))}", ""]
        parts += [f"- {for_markdown(sentence(line))}" for line in chapter.lead]
        parts += [""] * bool(chapter.lead)
        parts += [f"![{name.rpartition('.')[0]}]({name})" for name in files]
        parts += ["", in_markdown(map(clipped, chapter.sections)).rstrip()]
    if places := report.places():
        parts += ["", "## Records", "", *(for_markdown(f"- {place}") for place in places)]
    return "\n".join(parts) + "\n"


def clipped(section: Section) -> Section:
    """A section whose texts are `shown`."""
    return Section(
        shown(section.title, 2 * LONGEST),
        [tuple(map(shown, line)) for line in section.table],
        list(map(sentence, section.sentences)),
    )


def json_page(report: Report) -> str:
    """A report as a document: what `markdown_page` and the HTML say, without drawings."""
    document = {
        "format": "penstock-report",
        "version": 1,
        "title": shown(report.title),
        "verdict": list(map(sentence, report.verdict)),
        "about": list(map(sentence, report.about)),
        "chapters": [
            {
                "title": shown(chapter.title),
                "lead": list(map(sentence, chapter.lead)),
                "figures": [
                    {
                        "name": each.name,
                        "caption": shown(each.caption),
                        "alt": sentence(words_of(each.draw())),
                    }
                    for each in chapter.pictures
                ],
                "sections": [each._asdict() for each in map(clipped, chapter.sections)],
            }
            for chapter in report.chapters
        ],
        "records": report.places(),
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
