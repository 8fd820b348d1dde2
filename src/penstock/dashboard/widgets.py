"""What the panes of the page share: widgets that screen readers can read, and pieces of markup."""

from __future__ import annotations

from typing import Any

import panel as pn

from .markup import style


def either(name: str, no: str, yes: str, value: bool) -> Any:
    """A choice of two. Not a check box, because Bokeh's has no label for screen readers."""
    return pn.widgets.Select(name=name, options={no: False, yes: True}, value=value, width=180)


def given(widget: Any) -> Any:
    """The value of a widget in the form of a view's field."""
    value = widget.value
    return tuple(value) if isinstance(value, list) else "" if value is None else value


def markup_pane(text: str = "") -> Any:
    """A pane for markup. The caller has escaped it."""
    return pn.pane.HTML(text, stylesheets=[style()], sizing_mode="stretch_width")
