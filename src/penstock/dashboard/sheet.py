"""A table of the dashboard, as CSV and as HTML."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..base import significant, to_cell
from .markup import rendered

Cell = str | float | None
_TABLE = """\
<table><caption>{{ sheet.title }}</caption>
<thead><tr>{% for name in sheet.head %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in rows %}
<tr>{% for cell, text in row %}{% if loop.first %}<th scope="row">{{ text }}</th>
{% elif cell is number %}<td class="number">{{ text }}</td>{% else %}<td>{{ text }}</td>{% endif %}
{% endfor %}</tr>{% endfor %}
</tbody></table>
{% if left %}<p>{{ left }} more rows are in the CSV.</p>{% endif %}
{% for note in sheet.notes %}<p>{{ note }}</p>{% endfor %}
"""
MOST_ROWS = 500
"""Rows of a table on a page. A CSV has all."""


class Sheet(NamedTuple):
    """A table with a name for each column. An unknown value is None."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    """Sentences below the table."""


def csv_of(sheet: Sheet) -> str:
    """A table as CSV. No cell is a formula in a spreadsheet, and numbers have all digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(to_cell, sheet.head))
    writer.writerows(map(_cell, row) for row in sheet.rows)
    return text.getvalue()


def _cell(cell: Cell) -> Any:
    if isinstance(cell, float):
        return "" if np.isnan(cell) else int(cell) if cell.is_integer() else cell
    return to_cell(cell)


def html_of(sheet: Sheet) -> str:
    """A table as HTML. All values are escaped."""
    shown = [[(cell, _text(cell)) for cell in row] for row in sheet.rows[:MOST_ROWS]]
    left = max(0, len(sheet.rows) - MOST_ROWS)
    return rendered(_TABLE, sheet=sheet, rows=shown, left=left)


def _text(cell: Cell) -> str:
    if cell is None or (isinstance(cell, float) and np.isnan(cell)):
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if cell.is_integer() and abs(cell) < 1e15 else significant(cell, 5)
    return cell
