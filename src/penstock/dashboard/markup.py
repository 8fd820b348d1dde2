"""Pieces of the page that are not widgets. All values in them are escaped."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from ..base import require

_SENTENCES = "{% for line in lines %}<p>{{ line }}</p>{% endfor %}"


@cache
def style() -> str:
    """The style sheet of tables, sentences and pictures."""
    return files(__package__).joinpath("style.css").read_text()


def rendered(template: str, **values: Any) -> str:
    """Fill a template. The values are escaped."""
    jinja2 = require("jinja2", "dashboard")
    return str(jinja2.Environment(autoescape=True).from_string(template).render(**values))


def sentences(lines: Sequence[str]) -> str:
    """Sentences as paragraphs."""
    return rendered(_SENTENCES, lines=lines)
