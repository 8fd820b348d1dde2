"""The table of runs: rows with a check box, as an HTML table for screen readers.

Table widgets put scroll boxes between a grid and its rows, and screen readers then lose the rows.
"""

from __future__ import annotations

from pathlib import Path

import panel as pn
import param

from .markup import style


class RunTable(pn.custom.JSComponent):  # type: ignore[misc]
    """Rows of text, each after its key. ``chosen`` holds the keys of the ticked rows.

    It holds keys and not row numbers, because rows may move on the server while a user ticks one.
    """

    heads = param.List(item_type=str)
    rows = param.List(item_type=list)
    chosen = param.List(item_type=str)

    _esm = Path(__file__).with_suffix(".js")
    _stylesheets = (style(),)
