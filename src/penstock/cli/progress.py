"""What verbs show beside their results: progress on standard error, as a bar on a terminal and as
lines otherwise; and figures, which a verb can do without."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ..base import MissingDependency, UsageError, noun, plural, require, writing_output


class Bar(NamedTuple):
    """A bar that is drawn on a terminal."""

    update: Callable[..., None]
    """Function that takes ``completed``, ``total`` and the fields of the bar's texts."""
    print: Callable[..., None]
    """Function that prints a line above the bar."""


@contextlib.contextmanager
def drawn_bar(before: str, after: str, **fields: Any) -> Iterator[Bar | None]:
    """Show a bar with its count and the time left, on standard error.

    Args:
        before: The text left of the bar. ``{task.fields[NAME]}`` in it shows a field.
        after: The text right of its count.
        fields: The first values of the fields.

    Yields:
        The bar, or None if standard error is no terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn(before),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn(after),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("", total=None, **fields)
        yield Bar(partial(bars.update, task), bars.console.print)


@contextlib.contextmanager
def counted_progress(
    total: int, unit: str = "sample", doing: str = "generating"
) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, or print a line at each tenth otherwise.

    Args:
        total: Number of things to do.
        unit: The word for one of them.
        doing: The text left of the bar.

    Yields:
        A function that takes the number of things done so far.
    """
    said = 0

    def say_tenth(done: int) -> None:
        nonlocal said
        if (tenth := 10 * done // max(1, total)) > said:
            said = tenth
            say(f"{done:,} of {plural(total, unit)}")

    with drawn_bar(doing, noun(total, unit)) as bar:
        yield say_tenth if bar is None else lambda done: bar.update(completed=done, total=total)


def say(line: str) -> None:
    """Print a line on standard error at once."""
    print(line, file=sys.stderr, flush=True)


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
