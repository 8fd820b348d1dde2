"""A training as a report."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...base import ARGS, RESULTS, STEPS
from ..content import Chapter, Report
from ..table import Section
from ..words import labels_line
from .detections import detection_pictures
from .fit_files import TrainingFolder
from .pictures import training_pictures
from .sentences import epoch_table, headlines, phase_table


def report_of_training(folder: Path) -> Report:
    """The report of a training.

    Args:
        folder: The folder, with args.json or training_results.json in it. The training may be
            under way, or have been stopped.

    Returns:
        The report.

    Raises:
        UsageError: It is not the folder of a training, or cannot be read.
    """
    run = TrainingFolder.read(folder)
    name = folder.resolve().name
    sections = [
        Section("Epochs", epoch_table(run)),
        Section("Phases of a step", phase_table(run)),
        Section("Settings", _settings(run.args)),
    ]
    kept = [section for section in sections if section.table or section.sentences]
    chapter = Chapter(
        f"Training: {name}", kept, [*training_pictures(run), *detection_pictures(folder)]
    )
    files = [folder / ARGS, folder / RESULTS, *sorted((folder / STEPS).glob("rank*.csv"))]
    return Report(name, headlines(run), _about(run), [chapter], files)


def _about(run: TrainingFolder) -> list[str]:
    results = run.results
    words = [run.workload]
    if (count := results.get("parameters")) is not None:
        words.append(f"{count:,} parameters")
    if results.get("device"):
        words.append(f"{results.get('world_size', 1)} x {results['device']}")
    if results.get("global_batch_size"):
        words.append(f"batches of {results['global_batch_size']} in all")
    versions = [f"{name} {run.args[name]}" for name in ("penstock", "torch") if run.args.get(name)]
    return [*labels_line(run.args), ", ".join([*words, *versions])]


def _settings(args: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The settings that are not None, False or empty."""
    lines = [
        (name.replace("_", "-"), str(value))
        for name, value in args.items()
        if value not in (None, False, "", []) and name not in ("name", "tags")
    ]
    return [("setting", "value"), *lines] if lines else []
