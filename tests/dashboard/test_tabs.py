"""The content of each tab, whatever the selected runs lack."""

from __future__ import annotations

from typing import get_args

import pytest

from penstock.dashboard.compare import Selected, selected_of
from penstock.dashboard.listed_run import RunDetails, curve_of
from penstock.dashboard.view import Tab, View

from .kit import HOSTILE, with_details

pytestmark = pytest.mark.slow  # Bokeh takes a second to import
TABS = get_args(Tab)
FULL = RunDetails(
    {"devices": HOSTILE, "lr": "0.1"}, {HOSTILE: 1.0}, {HOSTILE: curve_of([1.0], steps=[1])}
)


def of(*details: RunDetails) -> list[Selected]:
    runs = [with_details(f"k{n}", each, name=HOSTILE) for n, each in enumerate(details)]
    return selected_of(runs, lambda run: run.read())[0]


@pytest.mark.parametrize("tab", TABS)
@pytest.mark.parametrize("details", [[], [RunDetails()], [RunDetails(), FULL], [FULL, FULL]])
def test_every_tab_has_something_to_say(tab: Tab, details: list[RunDetails]) -> None:
    from penstock.dashboard.sheet import csv_of
    from penstock.dashboard.tabs import content_of, sheet_of

    for view in (View(tab=tab), View(tab=tab, metric="gone", knob="gone", group="tag gone")):
        content = content_of(tab, of(*details), view)
        assert content.notes or content.sheets or content.figures or content.markup
        assert csv_of(sheet_of(tab, of(*details), view))


def test_no_text_of_a_figure_is_mathematics() -> None:
    from penstock.dashboard.figures import harmless

    for text in ("$$x$$", r"\(x\)", r"\[x\]", "$$$$"):
        assert not any(sign in harmless(text) for sign in ("$$", r"\(", r"\[", r"\)", r"\]"))
    assert harmless("a $5 b") == "a $5 b" and len(harmless("x" * 999)) == 60
