"""Progress on standard error: a bar on a terminal, lines otherwise."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple


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
    total: int, unit: str = "samples", doing: str = "generating"
) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, or print a line at each tenth otherwise.

    Args:
        total: Number of things to do.
        unit: The word for them.
        doing: The text left of the bar.

    Yields:
        A function that takes the number of things done so far.
    """
    said = 0

    def say_tenth(done: int) -> None:
        nonlocal said
        if (tenth := 10 * done // max(1, total)) > said:
            said = tenth
            say(f"{done} of {total} {unit}")

    with drawn_bar(doing, unit) as bar:
        yield say_tenth if bar is None else lambda done: bar.update(completed=done, total=total)


def say(line: str) -> None:
    """Print a line on standard error at once."""
    print(line, file=sys.stderr, flush=True)
