"""The list of a reader, while runs come and go on the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.dashboard.listed_run import ListedRun
from penstock.dashboard.view import View

from .kit import catalogue_of, training
from .test_catalogue import searched


# Panel 1.7, our lowest, has no other word for it.
@pytest.mark.filterwarnings("ignore:Widget.name:PendingDeprecationWarning")
def test_a_tick_stays_with_its_run_while_rows_move(tmp_path: Path) -> None:
    from penstock.dashboard.list_pane import ListPane  # whoever only collects tests waits 0.7 s

    for name in ("b", "c"):
        training(tmp_path / name)
    catalogue = catalogue_of(tmp_path)
    calls: list[str] = []
    pane = ListPane(
        catalogue,
        View(order="name", up=True),
        filtered=lambda: calls.append("filtered"),
        selected=lambda: calls.append("selected"),
    )
    by_name: dict[str, ListedRun] = {run.name: run for run in catalogue.listing.runs}
    assert [row[1] for row in pane._table.rows] == ["b", "c"]
    training(tmp_path / "a")  # before the row that a reader is about to tick
    searched(catalogue)
    pane.show()
    assert [row[1] for row in pane._table.rows] == ["a", "b", "c"]
    pane._table.chosen = [by_name["b"].key]
    assert pane.keys == [by_name["b"].key] and calls == ["selected"]
    pane._table.chosen = [by_name["b"].key, "no such run"]
    assert pane.keys == [by_name["b"].key]
    pane._table.chosen = []
    assert pane.keys == []
