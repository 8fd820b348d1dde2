"""The CSVs that the page links to: the list, and the open tab."""

from __future__ import annotations

from typing import Any

from tornado.ioloop import IOLoop
from tornado.web import RequestHandler

from .catalogue import Catalogue
from .compare import runs_sheet, selected_of
from .sheet import csv_of
from .tabs import sheet_of
from .view import View, view_of

ROUTE = r"/(list|tab)\.csv"


def csv_of_view(catalogue: Catalogue, what: str, view: View) -> str:
    """What a view shows as CSV.

    Args:
        catalogue: The runs.
        what: ``list`` for all runs that pass the filters, ``tab`` for the tab that is open.
        view: The view.

    Returns:
        The text.
    """
    if what == "list":
        return csv_of(runs_sheet(catalogue.listing.select(view)))
    runs = [run for key in view.runs if (run := catalogue.by_key.get(key))]
    selected, _ = selected_of(runs, catalogue.details)
    return csv_of(sheet_of(view.tab, selected, view))


class Downloads(RequestHandler):
    """Handler of a request for a file. It only reads."""

    def initialize(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue

    async def get(self, what: str) -> None:
        view = view_of(self.request.query)
        arguments: tuple[Any, ...] = (self._catalogue, what, view)
        text = await IOLoop.current().run_in_executor(None, csv_of_view, *arguments)
        name = "runs" if what == "list" else view.tab
        self.set_header("Content-Type", "text/csv; charset=utf-8")
        self.set_header("Content-Disposition", f'attachment; filename="{name}.csv"')
        self.set_header("X-Content-Type-Options", "nosniff")
        self.write(text)
