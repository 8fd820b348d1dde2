"""Figures beside a result, which a verb can do without."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..base import MissingDependency, UsageError, require, writing_output
from .progress import say


def figures_of(draw: Callable[[], list[Path]]) -> list[Path]:
    """Draw figures. If matplotlib is not installed, print that and go on.

    Args:
        draw: Function that draws the figures and returns their files.

    Returns:
        The files of the figures; empty if they could not be drawn.

    Raises:
        UsageError: They cannot be written.
    """
    try:
        return draw()
    except MissingDependency as error:
        say(f"No figure: {error}")
        return []
    except OSError as error:
        raise UsageError(f"the figures cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def picture(
    file: Path, size: tuple[float, float], rows: int = 1, columns: int = 1, *, replace: bool,
    **grid: Any,
) -> Iterator[Any]:  # fmt: skip
    """Draw panels without axes, and write them as a PNG in the end.

    Args:
        file: The PNG to write.
        size: Its width and height in inches.
        rows: Rows of panels.
        columns: Columns of panels.
        replace: Whether a file that is not ours may be replaced.
        grid: Further arguments of matplotlib's ``subplots``.

    Yields:
        The panels, an array of rows and columns.
    """
    figure = require("matplotlib.figure", "plot").Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, **grid)
    for panel in panels.flat:
        panel.set_axis_off()
    yield panels
    with writing_output(file, replace=replace) as draft:
        figure.savefig(draft, format="png", dpi=120)
