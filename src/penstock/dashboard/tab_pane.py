"""The tabs on a user's page, and the widgets that choose what each of them shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import panel as pn

from .compare import Selected, group_choices, knob_choices, metric_choices
from .curves import curve_choices, drawn_curves
from .markup import sentences
from .sheet import html_of
from .tabs import TITLES, TabContent, chosen_curves, content_of
from .view import Axis, Tab, View
from .widgets import either, given, markup_pane

_TABS: tuple[Tab, ...] = get_args(Tab)
_AXES = {"step": "step", "epoch": "epoch", "wall-clock": "seconds"}
_CONTROLS: Mapping[Tab, Sequence[str]] = {
    "curves": ("curves", "x", "log", "group"),
    "machine": ("curves", "group"),
    "settings": ("all",),
    "metric": ("metric", "knob", "group", "log"),
    "scaling": ("anyway",),
    "groups": ("metric", "group"),
    "pictures": (),
}
"""The widgets of each tab, by their names in a view."""


class TabPane:
    """The tabs of one user."""

    def __init__(self, view: View, changed: Callable[[], None]) -> None:
        """``changed`` is called when the user has changed a choice."""
        self._wanted, self._tell = view, changed
        self._busy = False
        self._content = TabContent()
        self._drawn: tuple[object, ...] = ()
        self._options = _options(view)
        places = (pn.Column(sizing_mode="stretch_width", name=TITLES[tab]) for tab in _TABS)
        self.tabs = pn.Tabs(*places, active=_TABS.index(view.tab), dynamic=True)
        for widget in self._options.values():
            widget.param.watch(self._changed, "value")
        self.tabs.param.watch(self._changed, "active")

    @property
    def tab(self) -> Tab:
        """The tab that is open."""
        return _TABS[self.tabs.active]

    @property
    def chosen(self) -> dict[str, Any]:
        """The fields of the view that the tabs set."""
        options = {name: given(widget) for name, widget in self._options.items()}
        return {**options, "tab": self.tab}

    def _changed(self, event: Any) -> None:
        if not self._busy:
            self._tell()

    def offer(self, selected: Sequence[Selected]) -> None:
        """Offer the metrics, settings and groups of the selected runs."""
        self._busy = True
        for name, choices in (
            ("metric", metric_choices(selected)),
            ("knob", knob_choices(selected)),
            ("group", ["", *group_choices(selected)]),
        ):
            widget = self._options[name]
            chosen = widget.value or getattr(self._wanted, name)
            widget.options = choices
            widget.value = chosen if chosen in choices else next(iter(choices), None)
        curves = self._options["curves"]
        chosen = list(curves.value) or list(self._wanted.curves)
        curves.options = choices = curve_choices(selected, self.tab == "machine")
        curves.value = [name for name in chosen if name in choices]
        self._busy = False

    def show(self, selected: Sequence[Selected], notes: Sequence[str], view: View) -> None:
        """Show the tab that is open.

        Args:
            selected: The runs that are compared.
            notes: Sentences on runs that cannot be read.
            view: The choices of the user.
        """
        if self._has_grown(selected, view):
            return
        self._content = content = content_of(self.tab, selected, view)
        controls = [self._options[name] for name in _CONTROLS[self.tab]]
        self.tabs[self.tabs.active].objects = [
            *([pn.FlexBox(*controls)] if controls else []),
            markup_pane(sentences([*notes, *content.notes]) + content.markup),
            *(pn.pane.Bokeh(figure, sizing_mode="stretch_width") for figure in content.figures),
            *(markup_pane(html_of(sheet)) for sheet in content.sheets),
        ]

    def _has_grown(self, selected: Sequence[Selected], view: View) -> bool:
        """Give the drawn lines their new points, so that a zoom stays. Returns False if more than
        that has changed."""
        key = (view.tab, view.x, view.log, view.group, view.runs, view.curves)
        same, self._drawn = self._drawn == key, key
        figures = self._content.curves
        names = chosen_curves(selected, view, view.tab == "machine")
        if not same or not figures or list(figures) != names:
            return False
        axis: Axis = "seconds" if view.tab == "machine" else view.x
        return all(
            figure.update(drawn_curves(selected, name, axis, view.group)[0])
            for name, figure in figures.items()
        )


def _options(view: View) -> dict[str, Any]:
    """The widgets of the tabs, by their names in a view."""
    return {
        "curves": pn.widgets.MultiSelect(name="Curves", options=[], value=[], size=6, width=220),
        "x": pn.widgets.Select(name="Along x", options=_AXES, value=view.x, width=120),
        "log": either("Values", "linear", "logarithmic", view.log),
        "metric": pn.widgets.Select(name="Metric", options=[], width=220),
        "knob": pn.widgets.Select(name="Setting", options=[], width=220),
        "group": pn.widgets.Select(name="Group by", options=[""], value="", width=220),
        "all": either("Settings", "those that differ", "all", view.all),
        "anyway": either("Runs", "of equal settings", "whatever their settings", view.anyway),
    }
