"""Figures show what was measured."""

from dataclasses import replace

import pytest

from penstock.scaling.speedup_figures import (
    draw_efficiency,
    draw_epoch,
    draw_speedup,
    draw_utilisation,
)

from ..reports.drawn import known, series_of, texts_of, y_of
from .kit import only, phased, run


def test_figures_show_what_was_measured() -> None:
    base = phased(1, 210, forward=40, backward=60)
    two = replace(
        phased(2, 140, forward=20, backward=30, communication=10), utilisation=(40.0, 60.0)
    )
    study = only([base, two])
    speed, bars, epoch, used = (
        draw(study) for draw in (draw_speedup, draw_efficiency, draw_epoch, draw_utilisation)
    )
    assert y_of(speed, "measured") == [1.0, 1.5]
    assert y_of(speed, "ideal")[-1] == pytest.approx(2.0)
    assert y_of(bars, "good") == pytest.approx([100.0]) and y_of(bars, "below") == [75.0]
    assert bars.panels[0].limits[0][0] == 75.0
    phases = epoch.panels[0].series
    assert [each.label for each in phases] == [
        "forward", "backward", "communication",
        "validation, checkpoints before it, between steps",
    ]  # fmt: skip
    tops = known(phases[-1].y)  # of 50 epochs, the rest on top
    assert tops == pytest.approx([210 / 50, 140 / 50])
    assert y_of(used, "mean") == [50.0] and y_of(used, "readings") == [40.0, 60.0]


def test_of_several_numbers_of_nodes_the_line_takes_the_fastest() -> None:
    study = only([run(1, 40), run(4, 10), run(4, 16, nodes=2), run(4, 20, nodes=4)])
    figure = draw_speedup(study)
    line = series_of(figure, "")
    assert list(line.x) == [1, 4] and list(line.y) == [1.0, 4.0]
    assert y_of(figure, "measured") == [1.0, 4.0, 2.5, 2.0]
    assert texts_of(figure.panels[0]) == ["4.00x", "2.50x", "2.00x"]


def test_no_utilisation_is_told_from_none_that_was_logged() -> None:
    figure = draw_utilisation(only([run(1, 40, utilisation=(0.0, 0.0)), run(4, 10)]))
    assert texts_of(figure.panels[0]) == ["0 %, n = 2"]
    assert "in the order in which they were logged" in figure.note
    week = tuple(float(n % 101) for n in range(100_000))
    figure = draw_utilisation(only([run(1, 40, utilisation=week), run(4, 10)]))
    assert len(series_of(figure, "readings").y) == 1000, "a browser would not draw them all"
    assert figure.note.endswith("logged: the least and the greatest of each few")
    assert texts_of(figure.panels[0]) == ["50 %, n = 100000"]


def test_what_there_is_nothing_of_is_not_drawn() -> None:
    study = only([run(2, 10), run(2, 11, job="b")])
    assert draw_speedup(study) is None
    assert draw_utilisation(study) is None
    assert draw_epoch(only([run(1, 10, epochs=None, planned_epochs=None)])) is None
