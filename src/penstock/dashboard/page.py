"""The page of a user: the list and the tabs, the link to what they show, and live updates."""

from __future__ import annotations

from typing import Any

import panel as pn

from .catalogue import Catalogue
from .compare import selected_of
from .list_pane import ListPane
from .listed_run import ListedRun
from .markup import rendered
from .tab_pane import TabPane
from .view import View, query_of
from .widgets import markup_pane

TICK_MS = 1000
_MOST_NOTES = 5
_FILES = """\
<p>As CSV: <a href="list.csv{{ query }}" download>the list</a>,
<a href="tab.csv{{ query }}" download>the open tab</a></p>
"""
_HEAD = "<h1>Penstock: runs</h1>{% for line in notes %}<p>{{ line }}</p>{% endfor %}"


class Page:
    """The page of one user. Its widgets hold the choices; `view` returns them."""

    def __init__(self, catalogue: Catalogue, view: View) -> None:
        self._catalogue, self._version = catalogue, catalogue.version
        self._head, self._files = markup_pane(), markup_pane()
        self._stamps: list[object] = []
        self._tabs = TabPane(view, self._show)
        self._list = ListPane(catalogue, view, filtered=self._link, selected=self._show)
        self._lost = len(view.runs) - len(self._list.keys)
        self._say()
        self._show()

    @property
    def view(self) -> View:
        """All choices of the user."""
        return View(**self._list.chosen, **self._tabs.chosen)

    def tick(self) -> None:
        """Show what has changed on disk since the last call."""
        if self._version == self._catalogue.version:
            return
        self._version = self._catalogue.version
        self._list.offer()
        self._list.show()
        self._say()
        if self._stamps != [run.stamp for run in self._runs()]:
            self._show()

    def _runs(self) -> list[ListedRun]:
        """The selected runs that are still there."""
        return [run for key in self._list.keys if (run := self._catalogue.by_key.get(key))]

    def _say(self) -> None:
        notes = list(self._catalogue.notes)
        if self._lost:
            notes.insert(0, f"{self._lost} of the runs that the link names are not here.")
        self._head.object = rendered(_HEAD, notes=notes[:_MOST_NOTES])

    def _show(self) -> None:
        """Show the open tab for the selected runs."""
        runs = self._runs()
        selected, notes = selected_of(runs, self._catalogue.details)
        self._stamps = [run.stamp for run in runs]
        self._tabs.offer(selected)
        self._link()  # first, because a user who sees the tab may copy the link
        self._tabs.show(selected, notes, self.view)

    def _link(self) -> None:
        """Update the address of the page, and its links to files, to what it shows."""
        query = query_of(self.view)
        self._files.object = rendered(_FILES, query=query)
        if pn.state.location is not None:
            pn.state.location.search = query

    def layout(self) -> Any:
        """The whole page."""
        rows = self._list.rows(self._files)
        main = pn.Column(*rows, self._tabs.tabs, sizing_mode="stretch_width")
        return pn.Column(
            self._head,
            pn.Row(self._list.side(), main, sizing_mode="stretch_width"),
            sizing_mode="stretch_width",
        )
