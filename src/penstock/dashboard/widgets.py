"""What the panes of the page share: widgets that can be read aloud, and pieces of markup."""

from __future__ import annotations

from typing import Any

import panel as pn

from .markup import style


def either(name: str, no: str, yes: str, value: bool) -> Any:
    """A choice of two. It is no box to tick: those of Bokeh have no label to read aloud."""
    return pn.widgets.Select(name=name, options={no: False, yes: True}, value=value, width=180)


def given(widget: Any) -> Any:
    """The value of a widget as a view has it."""
    value = widget.value
    return tuple(value) if isinstance(value, list) else "" if value is None else value


def markup_pane(text: str = "") -> Any:
    """A place for markup, which whoever makes it has escaped."""
    return pn.pane.HTML(text, stylesheets=[style()], sizing_mode="stretch_width")
