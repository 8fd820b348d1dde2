"""``penstock infer``: run a model over a volume larger than memory.

With ``--instances`` the scores of a model go to a scratch, from which objects are labelled:

    IN ──▶ infer ──▶ OUT.scores.zarr ──▶ label ──▶ OUT, table

In steps of an array, ``--prepare`` begins both runs, and scores are the first round of all.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from ..base import (
    BATCH_SIGNALS,
    DecodedConfig,
    InferConfig,
    InstanceConfig,
    LabelConfig,
    UsageError,
    add_flags,
    as_settings,
    build,
    check_outputs,
    format_seconds,
    from_flags,
    importing,
    one_heap,
    plural,
    signals_handled,
)
from ..inference import EndRequest, Plan, Progress
from ..models import check_model_name
from .progress import drawn_bar, say

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
    add_flags(parser, InstanceConfig, group="objects")


def run(args: argparse.Namespace) -> int:
    one_heap()
    config = from_flags(InferConfig, args, args.config)
    check_model_name(config.model_type, "--model-type")
    if (steps := _instances_of(args, config)) is not None:
        return _run_instances(*steps, dry=args.dry_run)
    return run_config(config, dry=args.dry_run)


def run_config(config: InferConfig, *, dry: bool) -> int:
    """Carry out a job, or ``dry`` plan it, and print what was done. Returns the exit code."""
    if config.cluster is not None:
        return _run_on_cluster(config)
    if dry:
        show_plan(config)
        return 0
    with importing("torch"):
        from ..inference import Job, run_job, run_step

    job = Job(config)
    print_plan(job.plan)
    request = EndRequest()
    with shown_progress() as progress, _asked_by_signals(request):
        if config.is_element:
            sentence, summary = run_step(job, progress, request)
        else:
            sentence, summary = "", run_job(job, progress, request)
    lines = summary.lines() if summary else ()
    print(*filter(None, (*lines, sentence)), sep="\n")
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

    with signals_handled(dict.fromkeys((*BATCH_SIGNALS, *more), ask)):
        yield


def _run_on_cluster(config: InferConfig) -> int:
    """Run a job on workers. This process needs no torch."""
    from ..inference import run_on_cluster

    request = EndRequest()
    with shown_progress() as progress, _asked_by_signals(request, signal.SIGINT):
        summary = run_on_cluster(config, print_plan, progress, request, say)
    print("\n".join(summary.lines()))
    return 0


def show_plan(config: InferConfig) -> Plan:
    """Print the plan of a job. Raises `Refused` if the job does not fit."""
    with importing("torch"):
        from ..inference import Job

    plan = Job(config).plan
    print_plan(plan)
    plan.refuse()
    return plan


def print_plan(plan: Plan) -> None:
    for what, how_much in plan.lines():
        print(f"{what:<14} {how_much}")


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[Progress], None]]:
    """Show a bar with the time left on a terminal, or a line every 10 s elsewhere; both on
    stderr."""
    after = "patches, {task.fields[blocks]} blocks written, {task.fields[rate]}"
    with drawn_bar("inferring", after, blocks=0, rate="") as bar:
        due = PLAIN_EVERY_SECONDS

        def show(progress: Progress) -> None:
            nonlocal due
            done, planned = progress.patches_done, progress.patches_planned
            blocks, rate = progress.blocks_done, f"{progress.mb_per_second:.1f} MB/s"
            if bar is not None:
                bar.update(total=planned, completed=done, blocks=blocks, rate=rate)
            elif progress.seconds >= due:
                due = progress.seconds + PLAIN_EVERY_SECONDS
                if 0 < done < planned:
                    rate += f", {format_seconds(progress.seconds / done * (planned - done))} left"
                # A line that cannot be written, for example to a full disk, ends no job.
                with contextlib.suppress(OSError):
                    say(
                        f"{done:,} of {plural(planned, 'patch')}, {blocks:,} of "
                        f"{plural(progress.blocks_planned, 'block')} written, "
                        f"{rate if done else 'no patch is computed yet'}"
                    )

        yield show


_OF_BOTH = ("chunks", "shards", "levels", "take_over", "cluster", "worker_timeout", "max_memory")
"""Settings of both, where they are given."""
_OF_ONE_START = ("overwrite", "resume", "prepare", "part", "finish")


def _instances_of(
    args: argparse.Namespace, config: InferConfig
) -> tuple[InferConfig, LabelConfig] | None:
    """What ``infer --instances`` does first, and then: the job that writes scores, and the
    labelling of these; None without ``--instances``."""
    objects = from_flags(InstanceConfig, args)
    if objects.instances is None:
        if objects.model_fields_set:
            flag = min(objects.model_fields_set).replace("_", "-")
            raise UsageError(f"--{flag} has no effect without --instances")
        return None
    from ..inference import check_instances

    if objects.instances == "components" and objects.threshold is None:
        raise UsageError("--instances components needs --threshold X: an object is what is above")
    if len(config.out_spec) != 1 or "://" in (place := str(config.out_spec[0])):
        raise UsageError("--instances writes one output, an OME-Zarr on this machine")
    check_outputs(("--table", objects.table), replace=config.overwrite or config.resumes)
    scratch = f"{place}.scores.zarr"
    if Path(scratch).exists() and not (config.overwrite or config.resumes):
        raise UsageError(
            f"--out-spec {scratch}: holds the scores of an earlier start; --resume goes on with "
            "them, --overwrite begins anew, and penstock label takes them with another decoder"
        )
    asked = {key: value for key, value in as_settings(objects).items() if key != "instances"}
    output = {name: getattr(config, name) for name in _OF_BOTH if name in config.model_fields_set}
    once = {name: getattr(config, name) for name in _OF_ONE_START}
    if config.prepare:
        once["workers"] = config.workers
    label = build(
        LabelConfig, asked, output, once,
        # What is NaN in the scores was not finite in the input.
        {"in_spec": scratch, "out_spec": place, "decoder": objects.instances,
         "nan_background": True},
    )  # fmt: skip
    if not config.joins:
        check_instances(config, label)
    scores: dict[str, Any] = {"out_spec": (scratch,), "levels": "none", "shards": None}
    scores["run_dir"] = config.run_dir or Path(f"{place}.scores.penstock")
    kept = {**dict(config), **scores}
    return DecodedConfig.model_construct(config.model_fields_set | scores.keys(), **kept), label


def _run_instances(scores: InferConfig, label: LabelConfig, *, dry: bool) -> int:
    """Infer scores, label them, and remove them; or do a step of that. Returns the exit code."""
    from ..inference import lacking_of_instances, remove_scratch
    from .label import run_labelling

    lacking = lacking_of_instances(scores, label)
    if "scores" in lacking:
        run_config(scores, dry=dry)
    if dry:
        return 0
    if "objects" in lacking:
        run_labelling(label)
    elif not lacking:
        print("Complete: all objects are written")
    elif scores.finish:
        print("All blocks are inferred; next --part i/n for each i, then --finish")
    remove_scratch(label)
    return 0
