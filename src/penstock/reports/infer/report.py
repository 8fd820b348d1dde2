"""A run of inference or of labelling as a report."""

from __future__ import annotations

import csv
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from ...base import (
    RUN_FILE,
    SUMMARY_FILE,
    format_bytes,
    format_count,
    format_seconds,
    plural,
    read_json,
    significant,
)
from ...data import ChunkCount
from ...inference import AMBIGUOUS_FILE, Clipped, PlaneEnds, RunLook, is_label_run
from ...instruments import bottleneck, median_interval
from ..content import Chapter, Report
from ..table import Section, labels_line, listed, settings_table
from .job_files import InferenceRun, Telemetry
from .pictures import output_pictures, seam_pictures, stage_pictures, telemetry_pictures

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
    sections.append(Section("Settings", settings_table(run.settings)))
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


_ONE_RUN = "one run, no interval"
_FULL = 0.85
"""A share of the cores above which more of them would help."""
_STARVED = 0.7
"""A computing stage that had a core for a smaller share of its time had to wait for one."""
_CURES = {
    "read": "more --prep-workers of infer, or an input of larger chunks",
    "normalise": "more --prep-workers of infer",
    "write": "more --writer-workers of infer, or an output of a faster codec",
    "upload": "a faster link to the accelerator",
    "download": "a faster link to the accelerator",
    "stitch": "larger patches, or less --overlap of infer",
    "statistics": "--normalize none of infer, or percentiles of a level of the pyramid",
    "checksum": "more --writer-workers of infer",
    "note": "a faster disk for the run folder (infer --run-dir)",
}


def headlines(run: InferenceRun) -> list[str]:
    """The verdict on a run, the sentence on its bound first."""
    if not run.stages or not run.seconds:
        state = run.status.line()
        return [
            f"Not done: {state}.",
            "What limited it is not known: the times of stages are written at the end of a run.",
            *use_lines(run),
        ]
    return [f"{bound(run)} {gain(run)}".strip(), waited(run), *speed_lines(run), *memory_lines(run)]


def bound(run: InferenceRun) -> str:
    """What limited the run, from the times of its stages."""
    cpu_seconds = run.summary.get("cpu_seconds") or 0.0
    return bottleneck(run.stages, run.worked, cpu_seconds, run.cores or 1, run.processes)


def gain(run: InferenceRun) -> str:
    """How much faster the run could be at most without its limit, and what would remove it."""
    shares = {name: run.share(stage) for name, stage in run.stages.items() if stage.busy}
    if not shares:
        return ""
    used, cores = (run.summary.get("cpu_seconds") or 0.0) / run.worked, run.cores or 1
    if used >= _FULL * cores:
        most = (cores + 2) / cores
        return f"Two more cores would give at most {most:.1f}x ({_ONE_RUN})."
    (fullest, share), *others = sorted(shares.items(), key=lambda each: -each[1])
    if (had := processor_had(run, fullest)) is not None:
        return (
            f"But it had a processor for at most {had:.0%} of that time: others used the cores, or "
            f"a limit slowed it. With cores of its own it would be at most {1 / had:.1f}x as fast "
            f"({_ONE_RUN})."
        )
    then, next_share = others[0] if others else ("", 0.0)
    limits = [(2.0, "the stage would be twice as fast")]
    if next_share > 0:
        limits.append((share / next_share, f"then {then} would be the limit"))
    if used > 0 and not run.on_gpu:
        limits.append((cores / used, f"then {plural(cores, 'core')} would be full"))
    most, why = min(limits)
    if most < 1.05:
        return f"A faster stage would gain nothing: {why} ({_ONE_RUN})."
    return f"{_cure(run, fullest)} would give at most {most:.1f}x: {why} ({_ONE_RUN})."


def processor_had(run: InferenceRun, stage: str) -> float | None:
    """The largest share of a computing stage's time in which it can have had a processor. None if
    other processes cannot be the reason."""
    cpu, busy = run.summary.get("cpu_seconds"), run.stages[stage].busy
    if stage not in ("forward", "normalise", "stitch", "statistics") or run.on_gpu or not cpu:
        return None
    return cpu / busy if cpu < _STARVED * busy else None


def _cure(run: InferenceRun, stage: str) -> str:
    if stage == "forward":
        what = "A second device" if run.on_gpu else "A processor with twice the arithmetic"
        return f"{what} or a smaller --overlap of infer"
    words = _CURES.get(stage, f"More threads for {stage}")
    return words[:1].upper() + words[1:]


def waited(run: InferenceRun) -> str:
    """How much of the time the network did not run."""
    stage = run.stages.get("forward")
    if stage is None or not stage.threads:
        return "How long the network waited is not known: no forward was timed."
    share, device = max(0.0, 1 - run.share(stage)), "accelerator" if run.on_gpu else "network"
    lanes = f"{plural(stage.threads, 'lane')}, {plural(stage.count, 'batch')}"
    return f"The {device} waited {share:.0%} of the time [{lanes}]."


def speed_lines(run: InferenceRun) -> list[str]:
    """The work of the run, its speed, and how often voxels were computed and read."""
    summary, seconds = run.summary, run.summary["seconds"]
    written, planned = summary["blocks_written"], summary["blocks_planned"]
    line = (
        f"It wrote {written:,} of {plural(planned, 'block')} in {format_seconds(seconds)}: "
        f"{significant(summary['voxels'] / seconds / 1e6)} Mvox/s, "
        f"{significant(summary['input_bytes'] / seconds / 1e6)} MB/s of input ({_ONE_RUN})."
    )
    lines = [line]
    if (times := run.plan.get("patch_amplification")) is not None:
        reads = run.plan.get("read_amplification")
        read = f" and read {significant(reads)} bytes for each of the input" if reads else ""
        lines.append(
            f"By its plan it computed {significant(times)} voxels for each that it wrote{read}."
        )
    return lines


def memory_lines(run: InferenceRun) -> list[str]:
    """The peak of memory against the ceiling of the plan."""
    peak, planned = run.summary.get("peak_rss"), run.summary.get("planned_peak")
    if peak is None:
        return ["The peak of memory is not known: it was not sampled."]
    readings = sum(len(each.readings("rss_bytes")) for each in run.telemetry)
    of = f" [{plural(readings, 'reading')}]" if readings else ""
    if not planned:
        return [f"Peak memory: {format_bytes(peak)}{of}."]
    verb = "within" if peak <= planned else "ABOVE"
    share = f"{peak / planned:.0%} of it{of}"
    return [
        f"Peak memory {format_bytes(peak)} is {verb} the plan's {format_bytes(planned)}, {share}."
    ]


def use_lines(run: InferenceRun) -> list[str]:
    """How much of processor, disk and GPU the run used, each a median of its readings."""
    lines, cores = [], f"of {plural(run.cores, 'core')}" if run.cores else "cores"
    for each in run.telemetry:
        who = f"{each.name}: " if each.name else ""
        parts = []
        if cpu := _middle([percent / 100 for percent in each.readings("cpu_percent")]):
            parts.append(f"{cpu} {cores} busy")
        for key, what in (("read_bytes_per_s", "read from"), ("write_bytes_per_s", "written to")):
            if (rate := median(each.readings(key) or [0.0])) > 0:
                parts.append(f"{format_bytes(rate)}/s {what} a disk")
        parts += _gpu_parts(each)
        if parts:
            rows = plural(len(each.rows), "reading")
            lines.append(f"{who}In the median of {rows}: {listed(parts)}.")
    return lines or ["How much of the machine it used is not known: no reading was kept."]


def _gpu_parts(each: Telemetry) -> list[str]:
    gpus: dict[str, list[float]] = {}
    for row in each.rows:
        for gpu in row.get("gpus") or ():
            if gpu.get("util_percent") is not None:
                gpus.setdefault(f"GPU {gpu.get('index')}", []).append(gpu["util_percent"])
    return [f"{name} {_middle(values)} % busy" for name, values in gpus.items()]


def _middle(values: Sequence[float]) -> str:
    """The median and its interval; empty without a value."""
    if not values:
        return ""
    interval = median_interval(values)
    ends = "" if interval.low is None else f" [{interval.low:.2g}-{interval.high:.2g}]"
    return f"{interval.value:.2g}{ends}"


def trouble_lines(run: InferenceRun) -> list[str]:
    """Warnings: values that were filled in or clipped, faults that were tried again, smaller
    batches."""
    summary = run.summary
    clipped = [Clipped(**head) for head in summary.get("clipped") or ()]
    lines = [head.line() for head in clipped if head.clipped]
    if (chunks := summary.get("chunks")) and chunks["absent"]:
        lines.append(ChunkCount(**chunks).line())
    if summary.get("retries"):
        lines.append(
            f"Reads and writes failed {plural(summary['retries'], 'time')} and were tried again, "
            f"{format_seconds(summary.get('retry_seconds') or 0.0)} in all."
        )
    lines += [str(note) for note in summary.get("notes") or ()]
    return lines or ["No fault, no clipped value and no missing chunk was counted."]


def stage_table(run: InferenceRun) -> list[tuple[str, ...]]:
    """A line for each stage: threads, work, waiting, and the share of the time."""
    lines = [
        (
            name,
            str(stage.threads),
            f"{stage.count:,}",
            format_seconds(stage.busy),
            format_seconds(stage.waited),
            f"{run.share(stage):.1%}",
            format_seconds(stage.busy / stage.count) if stage.count else "-",
        )
        for name, stage in run.stages.items()
    ]
    return [("stage", "threads", "pieces", "busy", "waited", "busy share", "a piece"), *lines]


def memory_table(run: InferenceRun) -> list[tuple[str, ...]]:
    """The parts of the plan's ceiling; empty if the run has no plan."""
    parts = run.plan.get("memory") or {}
    if not parts:
        return []
    total = sum(parts.values())
    lines = [(part, format_bytes(size), f"{size / total:.0%}") for part, size in parts.items()]
    return [("part of the plan", "bytes", "share"), *lines, ("total", format_bytes(total), "100%")]


def worker_table(run: InferenceRun) -> list[tuple[str, ...]]:
    """A line for each of several processes; empty for a run of one."""
    workers = run.summary.get("workers") or []
    lines = [
        (
            str(worker["name"]),
            format_seconds(worker["seconds"]),
            format_count(worker["voxels"]),
            significant(worker["voxels"] / worker["seconds"] / 1e6) if worker["seconds"] else "-",
        )
        for worker in workers
    ]
    return [("process", "worked", "voxels", "Mvox/s"), *lines] if lines else []


_ROWS = 20
"""The most objects that are listed."""


def is_labelling(folder: Path) -> bool:
    """Whether it is the folder of a run of ``penstock label``."""
    content: Any = read_json(folder / RUN_FILE)
    return isinstance(content, dict) and is_label_run(content)


def report_of_labels(folder: Path) -> Report:
    """The report of a labelling.

    Args:
        folder: The folder, with run.json in it.

    Returns:
        The report.

    Raises:
        UsageError: It cannot be read.
    """
    settings = read_json(folder / RUN_FILE)["settings"]
    sections = [Section("Settings", settings_table(settings))]
    name, summary = folder.name.removesuffix(".penstock"), folder / SUMMARY_FILE
    if not summary.is_file():
        state = RunLook(folder).status().line()
        return Report(name, [f"Not done: {state}."], (), [Chapter(f"Objects: {name}", sections)])
    done: dict[str, Any] = read_json(summary)
    verdict = [f"{plural(done['objects'], 'object')}, and {done['left_out']:,} left out."]
    if done["ends"]:
        verdict.append(f"{PlaneEnds(**done['ends']).sentence()}.")
    if done["joined"] is not None:
        verdict.append(
            f"Several blocks see {done['joined']:,}, the halo cuts {done['cut']:,}, and "
            f"{done['ambiguous']:,} are ambiguous."
        )
    if (listed := folder / AMBIGUOUS_FILE).is_file():
        with listed.open(encoding="utf-8", newline="") as file:
            rows = [*islice(csv.reader(file), _ROWS + 1)]
        more = f"The largest; all are in {listed}, and the picture {listed.with_suffix('.png')}."
        sections.insert(0, Section("Ambiguous objects", rows, [more]))
    about = [f"{done['taken']}, with {done['connectivity']} neighbours"]
    return Report(name, verdict, about, [Chapter(f"Objects: {name}", sections)])
