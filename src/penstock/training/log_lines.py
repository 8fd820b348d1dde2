"""The lines of a training's log that `penstock scaling` and grep know: the scaling seed's own.

A log may hold several lives of one job, each of which begins with the number of the job and ends,
if it was not cut short, with its times.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..base import TrainConfig
from ..cluster import Place, job_of

TRAIN_LOCK, TRAINS = "train.lock", "trains"
"""Held while a training runs in a folder, and what is said of who holds it."""


def first_lines(
    workload: str, config: TrainConfig, place: Place, environ: Mapping[str, str]
) -> list[str]:
    """What is known before the first step."""
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


def last_lines(results: Mapping[str, Any], out: Path) -> list[str]:
    """What `training_results.json` says of a run that is complete, over all its lives."""
    seconds, epochs = results["training_s"] + results["validation_s"], results["epochs"]
    lines = [f"Total training time: {seconds:.2f} seconds ({seconds / 60:.2f} minutes)"]
    if epochs:
        # What an epoch trained on, which of the seed's "Number of samples" is a part.
        lines += [
            f"Time per epoch: {seconds / epochs:.2f} seconds",
            f"Epochs done: {epochs}",
            f"Samples per epoch: {round(results['samples'] / epochs)}",
            f"Steps per epoch: {round(results['steps'] / epochs)}",
        ]
    if results["best"] is not None:
        lines.append(f"Best checkpoint: {out / 'checkpoints' / results['best']['file']}")
    history = results["history"]
    for name, words, pick in (("val_loss", "loss", min), ("val_acc", "accuracy", max)):
        if values := [row[name] for row in history if row.get(name) is not None]:
            lines.append(f"Best validation {words}: {pick(values):.4f}")
    return lines
