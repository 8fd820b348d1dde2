"""Figures show what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.scaling.figures import draw_efficiency, draw_epoch, draw_speedup, draw_utilisation

from .kit import (
    only,
    phased,
    run,
)


def test_figures_show_what_was_measured() -> None:
    base = phased(1, 210, forward=40, backward=60)
    two = replace(
        phased(2, 140, forward=20, backward=30, communication=10), utilisation=(40.0, 60.0)
    )
    study = only([base, two])
    speed, bars, epoch, used = (
        draw(study) for draw in (draw_speedup, draw_efficiency, draw_epoch, draw_utilisation)
    )
    assert speed is not None and epoch is not None and used is not None
    lines = {line.get_label(): line for line in speed.axes[0].lines}
    assert list(lines["measured"].get_ydata()) == [1.0, 1.5]
    assert list(lines["ideal"].get_ydata())[-1] == pytest.approx(2.0)
    assert [bar.get_height() for bar in bars.axes[0].patches] == pytest.approx([100.0, 75.0])
    assert [list(line.get_ydata()) for line in bars.axes[0].lines] == [[75.0, 75.0]]
    tops: dict[int, float] = {}
    for bar in epoch.axes[0].patches:
        place = round(bar.get_x() + bar.get_width() / 2)
        tops[place] = max(tops.get(place, 0), bar.get_y() + bar.get_height())
    assert tops == pytest.approx({0: 210 / 50, 1: 140 / 50})  # of 50 epochs, the rest on top
    names = [text.get_text() for text in epoch.axes[0].get_legend().get_texts()]
    assert names == [
        "forward", "backward", "communication",
        "validation, checkpoints\nbefore it, between steps",
    ]  # fmt: skip
    assert [bar.get_height() for bar in used.axes[0].patches] == [50.0]


def test_several_numbers_of_nodes_are_told_apart() -> None:
    study = only([run(1, 40), run(4, 10), run(4, 16, nodes=2), run(4, 20, nodes=4)])
    figure = draw_speedup(study)
    assert figure is not None
    _, line, points = figure.axes[0].lines
    assert list(line.get_xdata()) == [1, 4] and list(line.get_ydata()) == [1.0, 4.0]
    assert list(points.get_ydata()) == [1.0, 4.0, 2.5, 2.0]
    assert [text.get_text() for text in figure.axes[0].texts] == [
        "4.00x, 1 node", "2.50x, 2 nodes", "2.00x, 4 nodes",
    ]  # fmt: skip


def test_no_utilisation_is_told_from_none_that_was_logged() -> None:
    study = only([run(1, 40, utilisation=(0.0, 0.0)), run(4, 10)])
    figure = draw_utilisation(study)
    assert figure is not None
    assert [t.get_text() for t in figure.axes[0].texts] == ["0 %, n = 2", "not logged"]
    assert any("in the order in which they were logged" in t.get_text() for t in figure.texts)


def test_what_there_is_nothing_of_is_not_drawn() -> None:
    study = only([run(2, 10), run(2, 11, job="b")])
    assert draw_speedup(study) is None
    assert draw_utilisation(study) is None
    assert draw_epoch(only([run(1, 10, epochs=None, planned_epochs=None)])) is None
