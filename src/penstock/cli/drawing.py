"""Figures beside a result, which a verb can do without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..base import MissingDependency, UsageError
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
