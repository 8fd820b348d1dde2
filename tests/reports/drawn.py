"""What a figure holds, for tests: its series by their labels."""

from typing import Any

import numpy as np

from penstock.reports.charts.chart import Figure, Panel, Series


def series_of(drawn: Figure | Panel, label: str, panel: int = 0) -> Series:
    """The series with this label, up to a mean that follows it."""
    shown = drawn.panels[panel] if isinstance(drawn, Figure) else drawn
    (series,) = (each for each in shown.series if each.label.partition(", mean")[0] == label)
    return series


def known(values: Any) -> list[float | None]:
    array = np.array([np.nan if value is None else value for value in values], np.float64)
    return [None if np.isnan(value) else float(value) for value in array]


def y_of(drawn: Figure | Panel, label: str, panel: int = 0) -> list[float | None]:
    return known(series_of(drawn, label, panel).y)


def texts_of(panel: Panel) -> list[str]:
    """The texts at the values of a panel."""
    return [text for each in panel.series for text in each.texts if text]
