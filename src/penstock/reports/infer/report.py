"""A run of inference as a report."""

from __future__ import annotations

import time
from pathlib import Path

from ...base import RUN_FILE, plural
from ..content import Chapter, Report
from ..table import Section
from ..words import labels_line
from .job_files import InferenceRun
from .pictures import output_pictures, seam_pictures, stage_pictures, telemetry_pictures
from .sentences import (
    headlines,
    memory_lines,
    memory_table,
    settings_table,
    stage_table,
    trouble_lines,
    use_lines,
    worker_table,
)

_KEPT = (".json", ".jsonl", ".log")


def report_of_run(folder: Path) -> Report:
    """The report of an inference run.

    Args:
        folder: The folder, with run.json in it. The run may be under way, or have been killed.

    Returns:
        The report.

    Raises:
        UsageError: It is not the folder of such a run, or cannot be read.
    """
    run = InferenceRun.read(folder)
    kept = [path for path in sorted(folder.iterdir()) if path.suffix in _KEPT]
    return Report(run.name, headlines(run), about(run), [run_chapter(run)], kept)


def run_chapter(run: InferenceRun) -> Chapter:
    """The chapters of a run, without its verdict."""
    sections = []
    if run.stages:
        sections.append(Section("Stages", stage_table(run), use_lines(run)))
    sections.append(Section("Memory", memory_table(run), memory_lines(run)))
    if seams := run.plan.get("seams"):
        sections.append(Section("Seams", (), [f"{str(seams)[:1].upper()}{str(seams)[1:]}."]))
    sections.append(Section("Faults and values", (), trouble_lines(run)))
    if table := worker_table(run):
        sections.append(Section("Processes", table))
    sections.append(Section("Settings", settings_table(run)))
    pictures = [*output_pictures(run), *stage_pictures(run), *seam_pictures(run)]
    pictures += telemetry_pictures(run)
    return Chapter(f"Inference: {run.name}", sections, pictures)


def about(run: InferenceRun) -> list[str]:
    """Lines on the model, the volume and the machine, as far as the folder says."""
    fingerprint, maker = run.fingerprint, run.maker
    domain = fingerprint.get("domain") or [[], []]
    shape = " x ".join(str(b - a) for a, b in zip(*domain, strict=True))
    devices = ", ".join(map(str, fingerprint.get("devices") or ())) or "devices not known"
    model = next(iter(fingerprint.get("model") or ["a model that is not known"]))
    versions = [f"{name} {maker[name]}" for name in ("torch", "tensorstore") if maker.get(name)]
    gpus = [str(gpu) for gpu in maker.get("gpus") or ()]
    cores = [plural(run.cores, "core")] if run.cores else []
    began = time.strftime("%Y-%m-%d %H:%M", time.gmtime((run.folder / RUN_FILE).stat().st_mtime))
    processes = plural(run.processes, "process")
    return [
        *labels_line(run.content),
        f"{model} over {shape} (t c z y x) voxels, on {devices}, {processes}",
        ", ".join([f"begun {began} UTC", *cores, *gpus, *versions]),
    ]
