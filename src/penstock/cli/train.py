"""``penstock train``: train a workload, with every step timed."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base import (
    TRAIN_DEFAULTS,
    TRAIN_KNOBS,
    TrainConfig,
    add_flags,
    build,
    check_belongs,
    end_with_parent,
    format_bytes,
    format_seconds,
    plural,
    read_yaml,
    significant,
)
from ..models import check_model_name
from ..training import check_workload, outcome_of_tracker
from .progress import drawn_bar, say

if TYPE_CHECKING:
    from ..training import TrainProgress

MOST_SCORES = 4
"""Most scores in a line of progress. training_results.json has all."""


EXAMPLES = r"""
penstock train spiral --epochs 5 --output-dir outputs   # two spirals: a machine's first steps
penstock train pairs --model denoise-tiny --in-spec noisy.ome.zarr \
    --target-spec clean.ome.zarr --tile-size 32 --output-dir denoiser   # an array to another
penstock train --train-chips-path chips/train --val-chips-path chips/val \
    --output-dir run                                    # the detector of the xView3 scenes
penstock train emulator --train-data-root data/ufs --val-data-root data/ufs   # a graph network
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "workload",
        nargs="?",
        default="detector",
        metavar="WORKLOAD",
        help=f"{', '.join(TRAIN_DEFAULTS)}, or package.module:Class (default: detector)",
    )
    add_flags(parser, TrainConfig, config_file=True)
    for spelling, knob in (("--max-epochs", "epochs"), ("--experiment-name", "name")):
        parser.add_argument(spelling, dest=knob, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    config = config_of(args)
    check_workload(args.workload)
    if args.workload == "pairs":
        check_model_name(config.model, "--model")
    end_with_parent(signal.SIGTERM)  # a rank saves at the end of its step
    from ..training import first_lines, last_lines, this_place, train_workload

    place = this_place(config)
    logged = not sys.stdout.isatty()
    if logged and place.rank == 0:
        print(*first_lines(args.workload, config, place, os.environ), sep="\n", flush=True)
    with shown_progress() as progress:
        results = train_workload(args.workload, config, progress=progress, say=say)
    if results["rank"] == 0:
        summary = summary_lines(results, config.output_dir)
        print(*summary, *(last_lines(results, config.output_dir) if logged else ()), sep="\n")
    return 0


def config_of(args: argparse.Namespace) -> TrainConfig:
    """The workload's defaults, the settings of a YAML file and the flags; the later ones win."""
    flags = {key: value for key, value in vars(args).items() if key in TrainConfig.model_fields}
    settings = read_yaml(args.config) if args.config else {}
    if args.workload in TRAIN_KNOBS:
        given = (str(key).replace("-", "_") for key in (*settings, *flags))
        check_belongs(given, TRAIN_KNOBS, args.workload)
    return build(TrainConfig, TRAIN_DEFAULTS.get(args.workload, {}), settings, flags)


def summary_lines(results: dict[str, Any], out: Path) -> list[str]:
    """Lines that summarise the results of a run."""
    ranks, best = results["ranks"], results["best"]
    devices = f"{results['world_size']} x {results['device']}"
    model = f"{plural(results['parameters'], 'parameter')}, {devices}"
    steps = (
        f"{plural(results['steps'], 'step')} of {plural(results['global_batch_size'], 'sample')}"
    )
    lines = [f"{results['workload']}: {model}, {steps}"]
    if results["samples_per_s"]:
        lines.append(
            f"{significant(results['samples_per_s'])} samples/s: "
            f"{plural(results['samples'], 'sample')} in {format_seconds(results['training_s'])}, "
            f"and {format_seconds(results['validation_s'])} of validation"
        )
    if repeated := results.get("repeated_samples"):
        lines.append(
            f"{plural(repeated, 'sample')} of each epoch repeated, so that all "
            f"{results['world_size']} ranks have equally many (validation counts each once)"
        )
    for rank in ranks:
        phases = dict(rank["phases"])
        step = phases.pop("step")
        if step is not None:
            shares = ", ".join(
                f"{name} {phase['total_s'] / step['total_s']:.0%}"
                for name, phase in phases.items()
                if phase is not None
            )
            lines.append(
                f"rank {rank['rank']}: {format_seconds(step['median_s'])} a step: {shares}"
            )
        peaks = [("host", rank["memory"]["host_peak"]), ("device", rank["memory"]["device_peak"])]
        held = ", ".join(f"{format_bytes(most)} of {kind}" for kind, most in peaks if most)
        lines.append(f"rank {rank['rank']}: at most {held} memory")
    if best is not None:
        lines.append(
            f"best {results['judge']} {best['score']:.4f} after epoch "
            f"{best['epoch'] + 1} of {results['epochs']}: {out / 'best_model.pth'}"
        )
    return [*lines, *(outcome_of_tracker(each, out) for each in results.get("trackers", ()))]


def epoch_line(now: TrainProgress) -> str:
    first = list(now.scores.items())[:MOST_SCORES]
    scores = ", ".join(f"{name} {value:.4f}" for name, value in first)
    epoch = f"epoch {now.epoch} of {now.epochs}"
    return f"{epoch}, step {now.step} of {now.steps}: loss {now.loss:.4f}; {scores}"


@contextlib.contextmanager
def shown_progress() -> Iterator[Callable[[TrainProgress], None]]:
    """Show a bar on a terminal, or a line for each validated epoch otherwise."""
    said: set[int] = set()
    after = "steps, loss {task.fields[loss]:.4f}"
    with drawn_bar("epoch {task.fields[epoch]}", after, epoch=0, loss=float("nan")) as bar:

        def move(now: TrainProgress) -> None:
            if bar is not None:
                bar.update(completed=now.step, total=now.steps, epoch=now.epoch, loss=now.loss)
            if now.validated and now.epoch not in said:
                said.add(now.epoch)
                (say if bar is None else bar.print)(epoch_line(now))

        yield move
