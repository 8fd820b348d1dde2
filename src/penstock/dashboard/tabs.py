"""What each tab shows of the selected runs: figures and tables, for a page or for files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..scaling import scaling_sections
from .compare import (
    Selected,
    groups_sheet,
    metric_choices,
    metrics_sheet,
    points_of,
    points_sheet,
    scaling_of,
    scaling_sheet,
    settings_sheet,
)
from .curves import curve_choices, curves_sheet, drawn_curves
from .figures import CurveFigure, curve_figure, point_figure, scaling_figures
from .pictures import pictures_of, side_by_side
from .sheet import Sheet
from .view import Tab, View

TITLES: Mapping[Tab, str] = {
    "curves": "Curves",
    "machine": "System metrics",
    "settings": "Settings and metrics",
    "metric": "Metric against setting",
    "scaling": "Scaling",
    "groups": "Groups",
    "pictures": "Pictures",
}
FIRST_CURVES = 4
"""Number of curves that are drawn if the user chose none."""
FIRST_OF_MACHINE = 6
_MOST_CURVES = 24
_NO_METRIC = "No selected run has this metric yet."


class TabContent(NamedTuple):
    """What a tab shows."""

    figures: Sequence[Any] = ()
    """Figures of Bokeh."""
    sheets: Sequence[Sheet] = ()
    """Tables. The first one is the CSV of the tab."""
    notes: Sequence[str] = ()
    markup: str = ""
    curves: Mapping[str, CurveFigure] = {}
    """The figures whose lines may grow, by the name of their metric."""


def content_of(tab: Tab, selected: Sequence[Selected], view: View) -> TabContent:
    """What a tab shows.

    Args:
        tab: The tab.
        selected: The runs that are compared.
        view: What the reader has chosen.

    Returns:
        The content; a sentence if nothing is selected.
    """
    if not selected:
        return TabContent(notes=["Select runs in the list to compare them."])
    return _TABS[tab](selected, view)


def chosen_curves(selected: Sequence[Selected], view: View, of_machine: bool) -> list[str]:
    """The names of the curves to draw: the chosen ones, or else the most important ones."""
    choices = curve_choices(selected, of_machine)
    chosen = [name for name in view.curves if name in choices][:_MOST_CURVES]
    return chosen or choices[: FIRST_OF_MACHINE if of_machine else FIRST_CURVES]


def _curves(selected: Sequence[Selected], view: View) -> TabContent:
    return _laid_over(selected, view, of_machine=False)


def _machine(selected: Sequence[Selected], view: View) -> TabContent:
    return _laid_over(selected, view, of_machine=True)


def _laid_over(selected: Sequence[Selected], view: View, of_machine: bool) -> TabContent:
    names = chosen_curves(selected, view, of_machine)
    axis = "seconds" if of_machine else view.x
    figures, notes = {}, []
    for name in names:
        drawn, left = drawn_curves(selected, name, axis, view.group)
        notes += left
        if drawn:
            figures[name] = curve_figure(name, drawn, axis, view.log and not of_machine)
    if not names:
        what = "metrics of their machines" if of_machine else "curves"
        notes.append(f"The selected runs have no {what}.")
    return TabContent(
        [each.figure for each in figures.values()],
        [],
        list(dict.fromkeys(notes)),
        curves=figures,
    )


def _settings(selected: Sequence[Selected], view: View) -> TabContent:
    sheets = [settings_sheet(selected, view.all), metrics_sheet(selected)]
    return TabContent(sheets=sheets)


def _metric(selected: Sequence[Selected], view: View) -> TabContent:
    metric, knob = _metric_of(selected, view), view.knob or "devices"
    points = points_of(selected, metric, knob, view.group)
    if not points:
        return TabContent(notes=[_NO_METRIC])
    figure = point_figure(points, metric, knob, view.log)
    return TabContent([figure], [points_sheet(points, metric, knob, view.group)])


def _scaling(selected: Sequence[Selected], view: View) -> TabContent:
    studied, why = scaling_of(selected, view.anyway)
    if not studied:
        return TabContent(notes=[why])
    lines = [line for s in studied for part in scaling_sections(s) for line in part.sentences]
    return TabContent(scaling_figures(studied), [scaling_sheet(studied)], lines)


def _groups(selected: Sequence[Selected], view: View) -> TabContent:
    metric = _metric_of(selected, view)
    if not metric:
        return TabContent(notes=[_NO_METRIC])
    return TabContent(sheets=[groups_sheet(selected, metric, view.group)])


def _metric_of(selected: Sequence[Selected], view: View) -> str:
    """The chosen metric, or else the most important one; empty if there is none."""
    return view.metric or next(iter(metric_choices(selected)), "")


def _pictures(selected: Sequence[Selected], view: View) -> TabContent:
    pictures = pictures_of(selected)
    notes = [] if pictures else ["The folders of the selected runs hold no pictures."]
    return TabContent(notes=notes, markup=side_by_side(pictures))


_TABS: Mapping[Tab, Callable[[Sequence[Selected], View], TabContent]] = {
    "curves": _curves,
    "machine": _machine,
    "settings": _settings,
    "metric": _metric,
    "scaling": _scaling,
    "groups": _groups,
    "pictures": _pictures,
}


def sheet_of(
    tab: Tab, selected: Sequence[Selected], view: View, content: TabContent | None = None
) -> Sheet:
    """The table of a tab, for its CSV.

    Args:
        tab: The tab.
        selected: The runs that are compared.
        view: What the reader has chosen.
        content: What the tab shows, if that is computed already.

    Returns:
        All that the tab shows. Curves have all their points.
    """
    if tab in ("curves", "machine"):
        names = chosen_curves(selected, view, tab == "machine")
        return curves_sheet(selected, names)
    if tab == "pictures":  # they take a third of a second each to draw, and give no table
        return Sheet(TITLES[tab], [], [])
    sheets = (content or content_of(tab, selected, view)).sheets
    if tab == "settings" and sheets:
        settings, metrics = sheets
        rows = [*settings.rows, *metrics.rows]
        return Sheet("Settings and metrics", ["name", *settings.head[1:]], rows)
    return sheets[0] if sheets else Sheet(TITLES[tab], [], [])
