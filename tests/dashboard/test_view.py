"""Views and the links that restore them."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.dashboard.view import MOST_SELECTED, View, query_of, view_of

WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
VIEWS = st.builds(
    View,
    find=WORDS,
    kind=st.lists(WORDS, unique=True, max_size=3).map(tuple),
    tag=st.lists(WORDS, unique=True, max_size=3).map(tuple),
    order=st.sampled_from(["began", "name", "seconds"]),
    up=st.booleans(),
    page=st.integers(1, 10**6),
    runs=st.lists(WORDS, unique=True, max_size=3).map(tuple),
    tab=st.sampled_from(["curves", "pictures"]),
    x=st.sampled_from(["step", "epoch", "seconds"]),
    log=st.booleans(),
    metric=WORDS,
)


@given(VIEWS)
def test_a_link_restores_its_view(view: View) -> None:
    assert view_of(query_of(view)) == view


def test_what_all_begin_with_needs_no_words() -> None:
    assert query_of(View()) == "" and view_of("") == View() == view_of("?")


@pytest.mark.parametrize(
    ("query", "view"),
    [
        ("?tab=nonsense&order=__class__&x=1", View()),
        ("?page=-1&page=x&page=%D9%A3", View()),
        ("?up=yes&log=1&up=1", View(up=True, log=True)),
        ("?evil=1&__init__=2&find=a", View(find="a")),
        ("?runs=a&runs=a&runs=b", View(runs=("a", "b"))),
        (f"?find={'x' * 301}&metric=y", View(metric="y")),
        ("?" + "&".join(f"runs={n}" for n in range(1001)), View()),
    ],
)
def test_a_link_of_nonsense_is_a_view_all_the_same(query: str, view: View) -> None:
    assert view_of(query) == view


def test_a_link_selects_no_more_runs_than_are_compared() -> None:
    assert len(view_of("?" + "&".join(f"runs={n}" for n in range(900))).runs) == MOST_SELECTED


def test_every_field_of_a_view_is_in_its_link() -> None:
    texts = {"order": "name", "tab": "groups", "x": "epoch"}
    values = {
        field.name: texts.get(field.name, "v")
        if isinstance(field.default, str)
        else ("v",) if isinstance(field.default, tuple) else field.default + 1
        for field in dataclasses.fields(View)
    }  # fmt: skip
    assert view_of(query_of(View(**values))) == View(**values)
