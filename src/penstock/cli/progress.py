"""What a command says on standard error while it works."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ..base import format_seconds
from ..instruments import Record

if TYPE_CHECKING:
    from ..bench import SweepStep


def tried(record: Record) -> str:
    """How a launch ended."""
    if record.ok or not record.error:
        return record.status
    return f"{record.status} ({record.error.message})"


def outcome(record: Record) -> str:
    """A launch in a few words."""
    if not record.ok:
        return tried(record)
    step = format_seconds(statistics.median(record.samples_s["step"]))
    unstable = ", never steady" if record.warmup.settled is False else ""
    return f"{step} a step, {len(record.samples_s['step'])} samples ({record.stop}{unstable})"


@contextlib.contextmanager
def shown_progress(
    name: Callable[[Mapping[str, Any]], str], said: Callable[[Record], str] = outcome
) -> Iterator[Callable[[SweepStep], None]]:
    """A bar on a terminal, a line for each launch elsewhere; both on stderr.

    ``name`` has words for a case and ``said`` for a launch that is over.
    """

    def line(step: SweepStep) -> str:
        end = f"skipped, {step.skipped}" if step.record is None else said(step.record)
        return f"{name(step.case)}, launch {step.launch}: {end}"

    def plain(step: SweepStep) -> None:
        if step.record is not None or step.skipped:
            say(f"{step.number} of {step.total}: {line(step)}")

    if not sys.stderr.isatty():
        yield plain
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("launches"),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("measuring", total=None)

        def update(step: SweepStep) -> None:
            bar.update(task, total=step.total, completed=step.number, description=name(step.case))
            if (step.record is not None and not step.record.ok) or step.skipped:
                bar.console.print(line(step), highlight=False, markup=False)

        yield update


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
