"""Tables as CSV and as HTML: text is text, numbers have all digits."""

from __future__ import annotations

import csv
import io

from penstock.dashboard.sheet import MOST_ROWS, Sheet, csv_of, html_of

from ..reports.pages import Page
from .kit import HOSTILE


def test_numbers_come_back_to_the_digit_and_formulas_are_text() -> None:
    sheet = Sheet("t", ["=name", "x"], [["=1+1", 0.1 + 0.2], ["-3", 7.0], ["@a", None],
                                        ["+b\nc", float("nan")]])  # fmt: skip
    rows = list(csv.reader(io.StringIO(csv_of(sheet))))
    assert rows == [
        ["'=name", "x"], ["'=1+1", "0.30000000000000004"], ["-3", "7"], ["'@a", ""], ["'+b\nc", ""],
    ]  # fmt: skip


def test_a_table_shows_hostile_text_as_text() -> None:
    page = Page(html_of(Sheet(HOSTILE, [HOSTILE, "n"], [[HOSTILE, 2.0]], [HOSTILE])))
    tags = {tag for tag, _ in page.elements}
    assert tags <= {"table", "caption", "thead", "tr", "th", "tbody", "td", "p"}
    assert page.asked() == [] and page.text.count("<script>alert(1)</script>") == 4


def test_a_long_table_says_what_it_leaves_out() -> None:
    page = Page(html_of(Sheet("t", ["a"], [["x"]] * (MOST_ROWS + 3))))
    assert "3 more rows are in the CSV." in page.text
    assert len([tag for tag, _ in page.elements if tag == "tr"]) == MOST_ROWS + 1


def test_numbers_and_what_is_not_known_in_words() -> None:
    text = Page(html_of(Sheet("t", ["a"], [[12345.678], [4.0], [None], ["-"]]))).text
    assert "12,346" in text or "12346" in text
    assert " 4 " in text
