"""``penstock infer``: run a model over a volume larger than memory."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from ..base import InferConfig, add_flags, format_seconds, from_flags
from ..models import check_model_name
from .progress import Bar, drawn_bar, say

if TYPE_CHECKING:
    from ..inference import Plan, Progress

PLAIN_EVERY_SECONDS = 10.0
"""Seconds between two lines of progress, where there is no terminal to draw a bar on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="plan and stop")
    add_flags(parser, InferConfig, config_file=True)


def run(args: argparse.Namespace) -> int:
    one_heap()
    config = from_flags(InferConfig, args, args.config)
    check_model_name(config.model_type, "--model-type")
    from ..inference import Job, run_job

    job = Job(config)
    print_plan(job.plan)
    if args.dry_run:
        job.plan.refuse()
        return 0
    with shown_progress() as progress:
        summary = run_job(job, progress)
    print("\n".join(summary.lines()))
    return 0


def one_heap() -> None:
    """Let all threads share one heap that keeps its memory, where the C library is glibc.

    It must be called before a library allocates. By default each thread has a heap, and what
    earlier chunks used stays in each: a job with global percentiles held a quarter more than its
    plan. And a heap that gives back the memory of one forward takes it again for the next, page by
    page: 16,000 faults, a third of a UNet's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        for option, value in _HEAP.items():
            mallopt(option, value)


_HEAP = {-8: 1, -1: 2**31 - 1, -3: 2**25}
"""M_ARENA_MAX, M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h, the last at its limit."""


def print_plan(plan: Plan) -> None:
    for what, how_much in plan.lines():
        print(f"{what:<14} {how_much}")


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[Progress], None]]:
    """A bar with the time left on a terminal, a line now and then elsewhere; both on stderr."""
    after = "patches, {task.fields[units]} blocks written, {task.fields[rate]}"
    with drawn_bar("inferring", after, units=0, rate="") as bar:
        yield _PlainLines() if bar is None else partial(_move, bar)


def _move(bar: Bar, progress: Progress) -> None:
    bar.update(
        total=progress.patches_planned,
        completed=progress.patches_done,
        units=progress.units_done,
        rate=f"{progress.mb_per_second:.1f} MB/s",
    )


class _PlainLines:
    def __init__(self) -> None:
        self.due = PLAIN_EVERY_SECONDS

    def __call__(self, progress: Progress) -> None:
        if progress.seconds < self.due:
            return
        self.due = progress.seconds + PLAIN_EVERY_SECONDS
        done, planned = progress.patches_done, progress.patches_planned
        left = format_seconds(progress.seconds / done * (planned - done)) if done else "unknown"
        line = (
            f"{done} of {planned} patches, {progress.units_done} of {progress.units_planned} "
            f"blocks written, {progress.mb_per_second:.1f} MB/s, {left} left"
        )
        with contextlib.suppress(OSError):  # of a full disk, for example; the job goes on
            say(line)
