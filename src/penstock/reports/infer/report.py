"""A run of inference as a report."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from ...base import RUN_FILE, format_bytes, format_count, plural
from ...bench import known_roof
from ..content import LIMITS, Chapter, Raw, Report
from ..mfu import UNKNOWN
from ..table import Section
from ..words import labels_line
from .job_files import InferenceRun
from .pictures import output_pictures, stage_pictures, telemetry_pictures
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
    return Report(run.name, headlines(run), about(run), [run_chapter(run)], [*_raw(run.folder)])


def run_chapter(run: InferenceRun) -> Chapter:
    """The chapters of a run, without its verdict."""
    sections = []
    if run.stages:
        sections.append(Section("Stages", stage_table(run), use_lines(run)))
        sections.append(Section(LIMITS, (), limit_lines(run)))
    sections.append(Section("Memory", memory_table(run), memory_lines(run)))
    sections.append(Section("Faults and values", (), trouble_lines(run)))
    if table := worker_table(run):
        sections.append(Section("Processes", table))
    sections.append(Section("Settings", settings_table(run)))
    pictures = [*output_pictures(run), *stage_pictures(run), *telemetry_pictures(run)]
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


def _raw(folder: Path) -> list[Raw]:
    """The files of the run's folder."""
    return [
        Raw(path.name, str(path), format_bytes(path.stat().st_size))
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in (".json", ".jsonl", ".log")
    ]


def limit_lines(run: InferenceRun) -> list[str]:
    """Say what share of its machine's limits a run reached.

    Args:
        run: The run. Its limits are looked for in the user's cache, by the key of its machine.

    Returns:
        A sentence for each limit that is known, or one that says that none is.
    """
    keys = {key for each in run.telemetry if (key := each.header.get("machine_key"))}
    if len(keys) > 1:
        return ["Several machines shared the run, so it is not compared with the limits of one."]
    lines = [line for key in keys for line in _arithmetic(run, key)]
    return lines or [UNKNOWN]


def _arithmetic(run: InferenceRun, key: str) -> Iterator[str]:
    """The rate of the forwards, compared with that of large matrix products."""
    flops, stage, summary = run.plan.get("patch_flops"), run.stages.get("forward"), run.summary
    if not (flops and stage and stage.busy and summary and run.processes == 1):
        return
    if summary["blocks_written"] != summary["blocks_planned"]:
        return  # how many patches this process computed is not known
    device, dtype = ("cuda:0" if run.on_gpu else "cpu"), _dtype(run)
    rate = flops * run.plan["num_patches"] * stage.threads / stage.busy
    line = f"While it worked the network computed {format_count(rate)}flop/s"
    roof = known_roof(key, device, dtype)
    if roof is not None:
        lanes = len(run.plan.get("devices") or ()) if run.on_gpu else 1
        line += (
            f", {rate / (roof * lanes):.0%} of the {format_count(roof * lanes)}flop/s that matrix "
            f"products of {dtype} reach here"
        )
    yield f"{line} (products, convolutions and attention are counted)."


def _dtype(run: InferenceRun) -> str:
    """The dtype of its products, as doctor names it."""
    amp, tf32, *_ = run.fingerprint.get("arithmetic") or ("None", False)
    if amp != "None":
        return str(amp).removeprefix("torch.")
    return "tf32" if tf32 and run.on_gpu else "float32"
