"""``penstock infer``: run a model over a volume larger than memory."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from ..base import (
    InferConfig,
    InstanceConfig,
    add_flags,
    format_seconds,
    from_flags,
    one_heap,
    signals_handled,
)
from ..models import check_model_name
from .instances import instances_of, run_instances
from .progress import Bar, drawn_bar, say

if TYPE_CHECKING:
    from ..inference import EndRequest, Plan, Progress

PLAIN_EVERY_SECONDS = 10.0
"""Seconds between two lines of progress if there is no terminal for a bar."""


EXAMPLES = r"""
penstock infer noisy.ome.zarr denoised.ome.zarr --model denoise-tiny
penstock infer --in-spec noisy.ome.zarr --out-spec denoised.ome.zarr \
    --model-type denoise-tiny --patch 48 64 64 --overlap 16
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="plan and stop")
    add_flags(parser, InferConfig, config_file=True)
    add_flags(parser, InstanceConfig)


def run(args: argparse.Namespace) -> int:
    one_heap()
    config = from_flags(InferConfig, args, args.config)
    check_model_name(config.model_type, "--model-type")
    if (steps := instances_of(args, config)) is not None:
        return run_instances(partial(run_config, dry=args.dry_run), *steps, dry=args.dry_run)
    return run_config(config, dry=args.dry_run)


def run_config(config: InferConfig, *, dry: bool) -> int:
    """Carry out a job, or ``dry`` plan it, and print what was done. Returns the exit code."""
    if config.cluster is not None:
        return _run_on_cluster(config)
    if dry:
        return show_plan(config)
    from ..inference import EndRequest, Job, run_job, run_step

    job = Job(config)
    print_plan(job.plan)
    request = EndRequest()
    with shown_progress() as progress, _asked_by_signals(request):
        if config.is_element:
            step = run_step(job, progress, request)
            summary, sentences = step.summary, [step.sentence]
        else:
            summary, sentences = run_job(job, progress, request), []
    print("\n".join([*(summary.lines() if summary else ()), *sentences]))
    return 0


@contextlib.contextmanager
def _asked_by_signals(request: EndRequest, *more: int) -> Iterator[None]:
    """Let the signals of a batch system, and those in ``more``, ask the job to end. A second
    SIGTERM, or a second signal of ``more``, ends it at once."""
    asked = itertools.count()

    def ask(number: int, frame: FrameType | None) -> None:
        if number in (signal.SIGTERM, *more) and next(asked):
            raise KeyboardInterrupt
        request.ask(signal.Signals(number).name)

    with signals_handled(dict.fromkeys((*_ASKING, *more), ask)):
        yield


_ASKING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Signals with which a batch system says that a job's time is up, or nearly up."""


def _run_on_cluster(config: InferConfig) -> int:
    """Run a job on workers. This process needs no torch."""
    from ..inference import EndRequest, run_on_cluster

    request = EndRequest()
    with shown_progress() as progress, _asked_by_signals(request, signal.SIGINT):
        summary = run_on_cluster(config, print_plan, progress, request, say)
    print("\n".join(summary.lines()))
    return 0


def show_plan(config: InferConfig) -> int:
    """Print the plan of a job. Raises `Refused` if the job does not fit."""
    from ..inference import Job

    plan = Job(config).plan
    print_plan(plan)
    plan.refuse()
    return 0


def print_plan(plan: Plan) -> None:
    for what, how_much in plan.lines():
        print(f"{what:<14} {how_much}")


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[Progress], None]]:
    """Show a bar with the time left on a terminal, or a line every 10 s elsewhere; both on
    stderr."""
    after = "patches, {task.fields[blocks]} blocks written, {task.fields[rate]}"
    with drawn_bar("inferring", after, blocks=0, rate="") as bar:
        yield _PlainLines() if bar is None else partial(_move, bar)


def _move(bar: Bar, progress: Progress) -> None:
    bar.update(
        total=progress.patches_planned,
        completed=progress.patches_done,
        blocks=progress.blocks_done,
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
        rate = f"{progress.mb_per_second:.1f} MB/s"
        if 0 < done < planned:
            rate += f", {format_seconds(progress.seconds / done * (planned - done))} left"
        line = (
            f"{done} of {planned} patches, {progress.blocks_done} of {progress.blocks_planned} "
            f"blocks written, {rate if done else 'no patch is computed yet'}"
        )
        with contextlib.suppress(OSError):  # for example about a full disk; the job goes on
            say(line)
