"""The list on a user's page: filters, a page of rows, and the check boxes that select runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import panel as pn

from .catalogue import Catalogue
from .listed_run import ListedRun
from .listing import FACETS, PAGE, Listing, in_words, tags_in_words
from .markup import sentences
from .run_table import RunTable
from .view import MOST_SELECTED, Order, View
from .widgets import either, given, markup_pane

_COLUMNS = ("name", "kind", "status", "workload", "model", "machine", "began", "result", "tags")


class ListPane:
    """The list of one user."""

    def __init__(
        self,
        catalogue: Catalogue,
        view: View,
        filtered: Callable[[], None],
        selected: Callable[[], None],
    ) -> None:
        """``filtered`` and ``selected`` are called after the user has filtered or selected."""
        self._catalogue, self._tell_filtered, self._tell_selected = catalogue, filtered, selected
        self.keys = [key for key in view.runs if key in catalogue.by_key]
        """The keys of the selected runs."""
        self._page = view.page
        self._busy = False
        self._filters = _filters(catalogue.listing, view)
        self._table = RunTable(sizing_mode="stretch_width")
        self._count = markup_pane()
        self._before, self._after, self._clear = (
            pn.widgets.Button(name=name, width=110)
            for name in ("Previous page", "Next page", "Clear selection")
        )
        for widget in self._filters.values():
            widget.param.watch(lambda event: self._turn(1 - self._page), "value")
        self._table.param.watch(self._tick, "chosen")
        self._before.on_click(lambda event: self._turn(-1))
        self._after.on_click(lambda event: self._turn(1))
        self._clear.on_click(lambda event: self._unselect())
        self.show()

    @property
    def chosen(self) -> dict[str, Any]:
        """The fields of the view that the list sets."""
        filters = {name: given(widget) for name, widget in self._filters.items()}
        return {**filters, "page": self._page, "runs": tuple(self.keys)}

    def _turn(self, by: int) -> None:
        """Show another page of the list; the first one if its filters have changed."""
        if not self._busy:
            self._page += by
            self.show()
            self._tell_filtered()

    def _unselect(self) -> None:
        self.keys = []
        self.show()
        self._tell_selected()

    def _tick(self, event: Any) -> None:
        """Rows of this page were selected or deselected; those of other pages stay as they are."""
        if self._busy:
            return
        ticked = [key for key in event.new if key in self._catalogue.by_key]
        kept = [key for key in self.keys if key not in event.old or key in ticked]
        self.keys = [*kept, *(key for key in ticked if key not in kept)][:MOST_SELECTED]
        self._tell_selected()

    def offer(self) -> None:
        """Offer the filter values that the runs have now."""
        self._busy = True
        for name, values in self._catalogue.listing.choices.items():
            widget = self._filters[name]
            widget.options = list(dict.fromkeys([*widget.value, *values]))
        self._busy = False

    def show(self) -> None:
        """Show the page of the list that the filters ask for."""
        listing = self._catalogue.listing
        matching = listing.select(View(**self.chosen))
        pages = max(1, -(-len(matching) // PAGE))
        self._page = min(max(1, self._page), pages)
        first = (self._page - 1) * PAGE
        listed = matching[first : first + PAGE]
        heads, rows = _table(listed)
        ticked = [run.key for run in listed if run.key in self.keys]
        self._busy = True
        self._table.param.update(heads=heads, rows=rows)
        self._table.chosen = ticked
        self._busy = False
        last = first + len(listed)
        words = f"Runs {min(first + 1, last):,} to {last:,} of {len(matching):,}"
        if len(matching) < len(listing.runs):
            words += f" (of {len(listing.runs):,})"
        self._count.object = sentences([words])
        self._filters["tag"].visible = bool(self._filters["tag"].options)
        self._before.disabled, self._after.disabled = self._page == 1, self._page == pages

    def side(self) -> Any:
        """The filters."""
        return pn.Column(*self._filters.values(), width=220)

    def rows(self, *more: Any) -> list[Any]:
        """The rows, and the buttons below them with ``more`` beside them."""
        buttons = (self._before, self._after, self._clear, *more, self._count)
        return [self._table, pn.FlexBox(*buttons)]


def _table(runs: Sequence[ListedRun]) -> tuple[list[str], list[list[str]]]:
    """The heads of a page of the list, and its rows, each after its key. Without tags, the column
    of tags is left out."""
    rows = [
        [
            *(run.key, run.name, run.kind, run.status, run.workload, run.model, run.machine),
            *(in_words(run.began), run.result, ", ".join(tags_in_words(run))),
        ]
        for run in runs
    ]
    count = len(_COLUMNS) - (not any(row[-1] for row in rows))
    return list(_COLUMNS[:count]), [row[: 1 + count] for row in rows]


def _filters(listing: Listing, view: View) -> dict[str, Any]:
    """The widgets of the filters, by their names in a view."""
    widgets: dict[str, Any] = {"find": pn.widgets.TextInput(name="Find", value=view.find)}
    for name in (*FACETS, "tag"):
        choices = listing.choices[name]
        value = [each for each in getattr(view, name) if each in choices]
        size = max(2, min(5, len(choices)))
        title = name.capitalize()
        widgets[name] = pn.widgets.MultiSelect(name=title, options=choices, value=value, size=size)
    for name, title in (("since", "Begun since (YYYY-MM-DD)"), ("until", "Begun until")):
        widgets[name] = pn.widgets.TextInput(name=title, value=getattr(view, name))
    orders = {"time": "began", "result": "seconds"}
    orders |= {name: name for name in get_args(Order) if name not in orders.values()}
    widgets["order"] = pn.widgets.Select(name="Order by", options=orders, value=view.order)
    widgets["up"] = either("First", "the last or greatest", "the first or least", view.up)
    for widget in widgets.values():
        widget.width = 200
    return widgets
