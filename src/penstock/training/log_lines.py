"""The lines of a training's log that `penstock scaling` and grep read, as in the scaling seed.

A job that was requeued has the lines of each start in one log. Each start begins with the number of
the job and ends with its times, unless it was cut short.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base import BEST, TrainConfig, plural
from ..cluster import Place, job_of

TRAIN_LOCK, TRAINS = "train.lock", "trains"
"""The file that is locked while a training runs in a folder, and the verb for its owner."""


def first_lines(
    workload: str, config: TrainConfig, place: Place, environ: Mapping[str, str]
) -> list[str]:
    """The lines before the first step.

    Args:
        workload: Its name.
        config: The settings of the training.
        place: The rank of this process, and how many there are.
        environ: Variables of the environment, for those of SLURM.

    Returns:
        The lines, without ends.
    """
    lines = []
    if "SLURM_JOB_ID" in environ:
        lines += [
            f"Job ID: {job_of(environ)}",
            f"Job Name: {environ.get('SLURM_JOB_NAME', '')}",
            f"Node(s): {environ.get('SLURM_JOB_NODELIST', '')}",
            f"Restarts: {environ.get('SLURM_RESTART_COUNT', '0')}",
        ]
    accumulated = config.grad_accum_steps
    product = "batch_size x num_gpus" + (f" x {accumulated} accumulated" * (accumulated > 1))
    lines += [
        f"Number of nodes: {place.nodes}",
        f"Number of tasks: {place.world_size}",
        f"Workload: {workload}",
        f"Max epochs: {config.epochs}",
        f"Batch size (per GPU): {config.batch_size}",
        f"Effective batch size ({product}): {config.batch_size * place.world_size * accumulated}",
        f"Learning rate: {config.learning_rate}",
    ]
    if config.max_steps is not None:
        lines.append(f"Max steps: {config.max_steps}")
    if workload == "spiral":
        lines += [
            f"Hidden dimensions: {list(config.hidden_dims)}",
            f"Number of samples: {config.num_samples}",
        ]
    return [*lines, f"Output directory: {config.output_dir}"]


def begun_epoch(results: Mapping[str, Any]) -> str:
    """The steps of an epoch that --max-steps ended, such as ``5 of 110 steps``. It counts as one of
    the epochs. Empty if all of them are whole, or nothing is known of it."""
    whole = results.get("steps_per_epoch", 0)
    lacks = results["epochs"] * whole - results["steps"]
    return f"{whole - lacks} of {plural(whole, 'step')}" if lacks > 0 else ""


def last_lines(results: Mapping[str, Any], out: Path) -> list[str]:
    """The lines after the last step of a run, with the totals over all its starts.

    Args:
        results: The document `training_results.json`.
        out: The folder of the run.

    Returns:
        The lines, without ends.
    """
    seconds, epochs = results["training_s"] + results["validation_s"], results["epochs"]
    lines = [f"Total training time: {seconds:.2f} seconds ({seconds / 60:.2f} minutes)"]
    if epochs:
        # The samples that an epoch trains on: a part of the seed's "Number of samples".
        lines += [
            f"Time per epoch: {seconds / epochs:.2f} seconds",
            f"Epochs done: {epochs}",
            f"Samples per epoch: {round(results['samples'] / epochs)}",
            f"Steps per epoch: {round(results['steps'] / epochs)}",
        ]
        if begun := begun_epoch(results):
            lines.append(f"Last epoch: {begun}, counted as one")
    if results["best"] is not None:
        lines.append(f"Best checkpoint: {out / BEST}")
    history = results["history"]
    for name, words, pick in (("val_loss", "loss", min), ("val_acc", "accuracy", max)):
        if values := [row[name] for row in history if row.get(name) is not None]:
            lines.append(f"Best validation {words}: {pick(values):.4f}")
    return lines
