"""A training as a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ...base import ARGS, RESULTS, STEPS, format_bytes, format_seconds, plural, significant
from ...instruments import median_interval
from ...training import begun_epoch
from ..content import Chapter, Report
from ..suite.cell import LIMITS
from ..table import Section, bracket, labels_line, settings_table
from .fit_files import Steps, TrainingFolder
from .pictures import training_pictures


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
        Section("Settings", settings_table(run.settings)),
    ]
    kept = [section for section in sections if section.table or section.sentences]
    chapter = Chapter(f"Training: {name}", kept, training_pictures(run))
    files = [folder / ARGS, folder / RESULTS, *sorted((folder / STEPS).glob("rank*.csv"))]
    return Report(name, headlines(run), _about(run), [chapter], files)


def _about(run: TrainingFolder) -> list[str]:
    results = run.results
    words = [run.workload]
    if (count := results.get("parameters")) is not None:
        words.append(plural(count, "parameter"))
    if results.get("device"):
        words.append(f"{results.get('world_size', 1)} x {results['device']}")
    if results.get("global_batch_size"):
        words.append(f"batches of {results['global_batch_size']} in all")
    versions = [f"{name} {run.args[name]}" for name in ("penstock", "torch") if run.args.get(name)]
    return [*labels_line(run.args), ", ".join([*words, *versions])]


_CURES = {
    "data": ("waiting for data", "train with more --num-workers, or chips that are read faster"),
    "transfer": ("transfer", "train with a larger --batch-size"),
    "compute": ("computing", "train with --amp, or on a faster device"),
    "communication": ("communication", "train with a larger --batch-size on each device"),
}
"""Each of `LIMITS` in words, and what helps against it."""


def headlines(run: TrainingFolder) -> list[str]:
    """The verdict on a training, the sentence on its bound first."""
    lines = [bound(run), *speed_lines(run), *score_lines(run)]
    return [*lines, *memory_lines(run), *rank_lines(run)]


def bound(run: TrainingFolder) -> str:
    """The kind of phase that took most of the steps' time, and the speed without it."""
    phases = run.phases
    step = sum(phases.values())
    if not step:
        return "What limited it is not known: no phase of a step was timed."
    shares = {
        name: sum(phases.get(phase, 0.0) for phase in parts) / step
        for name, parts in LIMITS.items()
    }
    limit = max(shares, key=lambda name: shares[name])
    share, (words, cure) = shares[limit], _CURES[limit]
    each = _by_epoch(run.steps, LIMITS[limit])
    ends = f"{min(each):.0%}-{max(each):.0%}, " if len(each) > 1 else ""
    epochs = f"[{ends}{plural(max(len(each), 1), 'epoch')} of one run]"
    line = f"Bound by {words}: {share:.0%} of the time of steps {epochs}"
    waits = shares["data"]
    if limit == "compute":
        more = (
            f"; data was waited for {waits:.0%} of it, so that a faster reader would give at most"
        )
        return f"{line}{more} {1 / (1 - waits):.2f}x."
    if share < 1:
        line += f"; without it steps would be at most {1 / (1 - share):.1f}x as fast"
    return f"{line}: {cure}."


def _by_epoch(steps: Sequence[Steps], phases: Sequence[str]) -> list[float]:
    """The share of some phases in each epoch, the mean over ranks."""
    ranks = []
    for each in steps:
        parts = [shares for phase in phases if (shares := each.shares(phase))]
        if parts and len({len(part) for part in parts}) == 1:
            ranks.append([sum(shares) for shares in zip(*parts, strict=True)])
    if not ranks or len({len(rank) for rank in ranks}) > 1:
        return []
    return [float(np.mean(shares)) for shares in zip(*ranks, strict=True)]


def speed_lines(run: TrainingFolder) -> list[str]:
    """How far the training came, and how fast."""
    results = run.results
    rate, epochs = results.get("samples_per_s"), results.get("epoch_times_s") or []
    if not rate or not epochs:
        return ["Its speed is not known: no epoch has ended."]
    took = median_interval(epochs)
    asked = 0 if run.args.get("max_steps") else run.args.get("epochs")
    done = f"{len(epochs)} of {plural(asked, 'epoch')}" if asked else plural(len(epochs), "epoch")
    if begun := begun_epoch(results):
        done += f", the last with {begun}"
    status = str(results.get("status", "unfinished"))
    device = f"{results.get('world_size', 1)} x {results.get('device', 'a device')}"
    speed = f"{significant(rate)} samples a second on {device}"
    epoch = f"{format_seconds(took.value)} {bracket(took, plural(took.n, 'epoch'))}"
    return [(f"It is {status} after {done}: {speed}; an epoch took {epoch} in the median.")]


def score_lines(run: TrainingFolder) -> list[str]:
    """The best score, and whether more epochs may give a better one."""
    best, judge = run.results.get("best") or {}, run.results.get("judge")
    score, epoch = best.get("score"), best.get("epoch")
    if score is None or epoch is None or not judge:
        return ["Nothing is known of its scores: no validation has ended."]
    history = run.history
    line = f"Best {judge}: {score:.4g} after epoch {epoch + 1} of {len(history)}"
    if history and epoch == history[-1].get("epoch") and len(history) > 1:
        line += "; it was the last, so that more epochs may score better"
    lines = [f"{line}. One run has no interval: another seed may differ."]
    if any(row.get("val_loss", 0.0) is None for row in history):
        lines.append("It diverged: a validation loss was not finite.")
    return lines


def memory_lines(run: TrainingFolder) -> list[str]:
    """The peaks of memory."""
    ranks = plural(len(run.results.get("ranks") or ()), "rank")
    return [
        f"Peak memory of {where}: {format_bytes(run.peaks[name])} [most of {ranks}]."
        for name, where in (("device_peak", "the device"), ("host_peak", "the host"))
        if name in run.peaks
    ]


def rank_lines(run: TrainingFolder) -> list[str]:
    """Say how long the ranks of a training wait for each other, and for which; none for one rank.

    The sum over ranks (all-reduce) ends for all at once. The rank that waits least came last: its
    wait is network time, and what the others wait beyond it is idle time.
    """
    if len(run.steps) < 2:
        return []
    count = min(len(each.loss) for each in run.steps)
    steps, waits = (
        np.array([each.seconds[name][-count:] for each in run.steps])
        for name in ("step", "communication")
    )
    timed = np.isfinite(waits).all(axis=0) & np.isfinite(steps).all(axis=0)
    if not timed.any():
        return ["How long ranks waited for each other is not known: no sum over ranks was timed."]
    steps, waits = steps[:, timed], waits[:, timed]
    network, last = waits.min(axis=0), waits.argmin(axis=0)
    idle = (waits - network).mean(axis=0)
    whole = float(steps.mean())
    of = plural(steps.shape[1], "step")
    ends = [(name, median_interval(s)) for name, s in (("network", network), ("idle", idle))]
    words = {n: f"{format_seconds(i.value)} {bracket(i, of)}" for n, i in ends}
    shares = {name: float(s.mean()) / whole for name, s in (("network", network), ("idle", idle))}
    critical, times = Counter(last.tolist()).most_common(1)[0]
    rank, ranks = run.steps[critical].rank, len(run.steps)
    fair = f"{1 / ranks:.0%} would be chance"
    return [
        (
            f"Of a step, {shares['network']:.0%} is the sum over ranks that no computing hides, "
            f"{words['network']}, and {shares['idle']:.0%} waiting for the last of {ranks} ranks, "
            f"{words['idle']}."
        ),
        f"Rank {rank} is the last in {times / len(last):.0%} of {of}; {fair}.",
    ]


def epoch_table(run: TrainingFolder) -> list[tuple[str, ...]]:
    """A line for each epoch."""
    rows = run.history
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not rows:
        return []
    return [tuple(names), *(tuple(_cell(name, row.get(name)) for name in names) for row in rows)]


def _cell(name: str, value: object) -> str:
    if value is None:
        return "-"
    if name == "epoch" and isinstance(value, int):
        return str(value + 1)
    if isinstance(value, float):
        return format_seconds(value) if name in ("train_s", "val_s") else f"{value:.4g}"
    return str(value)


def phase_table(run: TrainingFolder) -> list[tuple[str, ...]]:
    """A line for each phase: its seconds, the mean over ranks, and its share."""
    phases = run.phases
    whole = sum(phases.values())
    lines = [
        (name.replace("_", " "), format_seconds(seconds), f"{seconds / whole:.1%}")
        for name, seconds in phases.items()
        if whole
    ]
    return [("phase", "total", "share"), *lines] if lines else []
