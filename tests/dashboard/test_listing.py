"""The list: what passes its filters, and in which order."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.dashboard.listing import Listing, in_words
from penstock.dashboard.view import View

from .kit import shown_run

DAY = 86_400.0
RUNS = [
    shown_run("a", name="Spiral one", workload="spiral", machine="raven", model="mlp",
              began=3 * DAY, seconds=5.0, tags={"node": "a100", "team": "x"}),
    shown_run("b", name="Spiral two", workload="spiral", machine="viper", began=2 * DAY,
              seconds=1.0, tags={"node": "h200"}, status="running"),
    shown_run("c", name="Detector", workload="detector", machine="raven", began=1 * DAY,
              tags={"node": "a100"}, kind="tracked"),
    shown_run("d", name="no time", kind="job log"),
]  # fmt: skip


def passing(**fields: Any) -> str:
    return "".join(run.key for run in Listing(RUNS).select(View(**fields)))


@pytest.mark.parametrize(
    ("fields", "keys"),
    [
        ({}, "abcd"),
        ({"find": "SPIRAL two"}, "b"),
        ({"find": "h200"}, "b"),
        ({"find": "/runs/c"}, "c"),
        ({"workload": ("spiral",)}, "ab"),
        ({"machine": ("raven",), "model": ("mlp",)}, "a"),
        ({"machine": ("raven", "viper")}, "abc"),
        ({"kind": ("job log", "tracked")}, "cd"),
        ({"status": ("running",)}, "b"),
        ({"tag": ("node=a100",)}, "ac"),
        ({"tag": ("node=a100", "node=h200")}, "abc"),
        ({"tag": ("node=a100", "team=x")}, "a"),
        ({"since": "1970-01-03"}, "ab"),
        ({"until": "1970-01-03"}, "bc"),
        ({"since": "1970-01-03", "until": "1970-01-03T23:00"}, "b"),
        ({"since": "yesterday"}, "abcd"),
        ({"order": "began", "up": True}, "cbad"),
        ({"order": "name", "up": True}, "cabd"),
        ({"order": "seconds"}, "abcd"),
        ({"order": "seconds", "up": True}, "bacd"),
        ({"order": "model"}, "abcd"),
    ],
)
def test_filters_and_orders(fields: dict[str, Any], keys: str) -> None:
    assert passing(**fields) == keys


def test_filters_offer_what_there_is() -> None:
    choices = Listing(RUNS).choices
    assert choices["tag"] == ["node=a100", "node=h200", "team=x"]
    assert choices["model"] == ["mlp"] and choices["status"] == ["complete", "running"]


def test_moments_are_in_words_wherever_the_clock_stood() -> None:
    assert in_words(0.0) == "1970-01-01 00:00:00"
    assert in_words(None) == "" == in_words(1e300)
