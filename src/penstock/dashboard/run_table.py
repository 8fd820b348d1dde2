"""The table of runs: rows with a box to tick, as a table of HTML that a reader can be told of.

Tables of libraries put boxes to scroll in between a grid and its rows, where none may stand for
those who read with their ears.
"""

from __future__ import annotations

from pathlib import Path

import panel as pn
import param

from .markup import style


class RunTable(pn.custom.JSComponent):  # type: ignore[misc]
    """Rows of text, each after its key; ``chosen`` are the keys of those that are ticked.

    Keys and not places: rows may move on the server while a reader ticks one.
    """

    heads = param.List(item_type=str)
    rows = param.List(item_type=list)
    chosen = param.List(item_type=str)

    _esm = Path(__file__).with_suffix(".js")
    _stylesheets = (style(),)
