"""The seed's tables of scaling in their exact layout, and the names of runs in them.

BENCHMARK RESULTS SUMMARY   `summary_table`   a line for each run; incomplete runs are marked
SPEEDUP ANALYSIS            `speedup_table`   a paragraph for each configuration
Training Results on ...     `results_table`   a block to paste
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..base import plural
from .runs import TrainingRun
from .study import Study, in_no_study

WIDE, NARROW = 100, 80

_BECAME = {
    "crashed": "crashed",
    "out_of_memory": "ran out of memory",
    "cancelled": "was cancelled",
    "preempted": "was preempted",
    "timeout": "ran out of its time",
    "stopped": "was stopped by a signal",
    "unfinished": "is not known to have finished",
    "unknown": "does not say how many epochs it did",
    "complete": "is complete",
}


def counted(run: TrainingRun) -> str:
    """``1 GPU``, ``4 GPUs``, ``2 processes``; ``2 devices`` if the kind is not known."""
    return plural(run.devices, run.unit)


def units(runs: Sequence[TrainingRun]) -> str:
    """``GPUs`` or ``processes``; ``devices`` if runs differ or the kind is not known."""
    names = {run.unit for run in runs}
    name = names.pop() if len(names) == 1 else "device"
    return plural(2, name).removeprefix("2 ")


def on_nodes(run: TrainingRun) -> str:
    return plural(run.nodes, "node") if run.nodes else ""


def label(run: TrainingRun) -> str:
    """``Single GPU``, ``8 GPUs (2 nodes)``."""
    if run.devices == 1:
        return f"Single {run.unit}"
    return f"{counted(run)} ({on_nodes(run)})" if run.nodes else counted(run)


def heading(run: TrainingRun) -> str:
    """``Single GPU``, ``Multi-GPU (4 GPUs, 1 node)``, ``Multi-Node (8 GPUs, 2 nodes)``."""
    if run.devices == 1:
        return label(run)
    several = f"Multi-{run.unit[:1].upper()}{run.unit[1:]}"
    kind = "Multi-Node" if (run.nodes or 1) > 1 else several
    return f"{kind} ({', '.join(filter(None, [counted(run), on_nodes(run)]))})"


def summary_table(runs: Sequence[TrainingRun], studies: Sequence[Study] = ()) -> list[str]:
    """The seed's summary.

    Args:
        runs: All runs.
        studies: The studies among them.

    Returns:
        A line for each run; a star marks one that is not complete. Then `notes`.
    """
    head, *lines = _aligned(summary_rows(runs), (10, 30, 6, 6, 10, 14, 9, 7))
    title = ["BENCHMARK RESULTS SUMMARY", "=" * WIDE, head, "-" * WIDE]
    return [*title, *lines, "=" * WIDE, *notes(runs, studies)]


def notes(runs: Sequence[TrainingRun], studies: Sequence[Study]) -> list[str]:
    """Sentences on runs.

    Args:
        runs: All runs.
        studies: The studies among them.

    Returns:
        A sentence for each run that is not compared, with the reason, and for each that diverged.
    """
    alone = (
        f"{run.job} ({run.source}): its batch or its samples are not known, and those of other "
        f"runs on {counted(run)} are; it is in no study."
        for run in in_no_study(runs, studies)
    )
    return [*filter(None, map(run_mark, runs)), *alone, *diverged(runs)]


def summary_rows(runs: Sequence[TrainingRun]) -> list[tuple[str, ...]]:
    """The cells of `summary_table`, its head first."""
    devices = {"processes": "Procs", "devices": "Count"}.get(units(runs), "GPUs")
    head = ("Job ID", "Configuration", devices, "Nodes", "Time (s)", "Time/Epoch (s)")
    return [(*head, "Val Loss", "Val Acc"), *map(_summary_row, runs)]


def _summary_row(run: TrainingRun) -> tuple[str, ...]:
    return (
        run.job,
        label(run),
        str(run.devices),
        str(run.nodes or "-"),
        fixed(run.seconds, 2) + "*" * (not run.complete),
        fixed(run.per_epoch, 2),
        "nan" if run.diverged else fixed(run.val_loss, 4),
        fixed(run.val_acc, 4),
    )


def _aligned(rows: Sequence[Sequence[str]], least: Sequence[int]) -> list[str]:
    """The rows as lines, their columns as wide as the seed's or as the longest cell."""
    widths = [
        max(width, *map(len, column))
        for width, column in zip(least, zip(*rows, strict=True), strict=True)
    ]
    return [
        " ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def fixed(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def run_mark(run: TrainingRun) -> str:
    """A line that says why a run is not compared; empty for a complete run."""
    if run.complete:
        return ""
    done, planned = run.epochs or 0, run.planned_epochs
    of = f"{done} of {plural(planned, 'epoch')}" if planned else plural(done, "epoch")
    epochs = f" after {of}" if done else ""
    if run.status == "unknown":
        return f"* {run.job}: {_BECAME[run.status]}; not compared."
    if run.status == "complete" and run.seconds is None:
        return f"* {run.job}: finished, but its training time is not known; not compared."
    if run.status == "complete":
        return f"* {run.job}: its time is of {of}; not compared."
    attempt = f", attempt {run.restarts + 1}" if run.restarts else ""
    return f"* {run.job}{attempt}: {_BECAME[run.status]}{epochs}; not compared."


def diverged(runs: Sequence[TrainingRun]) -> Iterator[str]:
    """A sentence for each run whose loss was not finite."""
    for run in runs:
        if run.diverged:
            compared = " Its time is compared." if run.complete else ""
            yield (
                f"Job {run.job} diverged ({run.source}): one of its losses is not a number, so "
                f"its scores are not compared.{compared}"
            )


def speedup_table(study: Study) -> list[str]:
    """Average time, speed-up and parallel efficiency of each configuration."""
    base = study.base
    baseline = f"Baseline ({heading(base.first)}): {base.seconds:.2f} seconds"
    lines = ["SPEEDUP ANALYSIS", "=" * NARROW, baseline]
    for point in study.points:
        lines += [
            "",
            f"{heading(point.at.first)}:",
            f"  Average time: {point.at.seconds:.2f} seconds",
            f"  Speedup: {point.speedup.value:.2f}x",
            f"  Parallel efficiency: {100 * point.efficiency.value:.1f}%",
        ]
    return [*lines, "=" * NARROW]


def results_table(study: Study, machine: str) -> list[str]:
    """The seed's block for documentation: data, model, and a line for each configuration.

    Args:
        study: The study.
        machine: The name of the machine, for the title.

    Returns:
        The lines of the block.
    """
    run, title = study.base.first, f"Training Results on {machine}"
    facts = [
        ("Dataset", _data_set(study)),
        ("Model", _model(run)),
        ("Epochs", run.epochs),
        ("Base batch size", run.batch and f"{run.batch} per {run.unit}"),
    ]
    lines = [title, "=" * (len(title) + 2)]
    lines += [f"{name}: {value}" for name, value in facts if value]
    longest = max(point.at.seconds for point in study.points)
    size, unit = (60.0, "min") if longest >= 60 else (1.0, "s")
    names = [f"{counted(run)} (baseline)", *(label(point.at.first) for point in study.points[1:])]
    rows = [
        ("Configuration", "Time", "Speedup", "Efficiency"),
        *(
            (
                name,
                f"{point.at.seconds / size:.1f} {unit}",
                f"{point.speedup.value:.1f}×",
                f"{100 * point.efficiency.value:.0f}%",
            )
            for name, point in zip(names, study.points, strict=True)
        ),
    ]
    first_column = max(19, *(len(row[0]) + 1 for row in rows))
    head, *body = _aligned(rows, (first_column, 9, 9, 10))
    lines += ["", head, "-" * max(first_column + 31, *map(len, body)), *body]
    means = (point.at.mean(lambda run: run.scored(run.val_acc)) for point in study.points)
    accuracies = sorted(100 * mean for mean in means if mean is not None)
    if len(accuracies) < len(study.points):
        return lines
    worst, best = f"{accuracies[0]:.0f}%", f"{accuracies[-1]:.0f}%"
    if worst == best:
        return [*lines, "", f"All configurations achieved ~{best} validation accuracy."]
    return [*lines, "", f"Validation accuracy is from {worst} to {best}."]


def _data_set(study: Study) -> str | None:
    run = study.base.first
    kind = run.settings.get("workload", "").removesuffix("_mlp")
    kind = "spiral pattern" if kind == "spiral" else kind
    if not run.work:
        return None
    count = f"{run.work:,}"
    if study.kind in ("weak", "undetermined"):  # in other kinds only a last batch may differ
        works = [each.work for point in study.points for each in point.at.runs if each.work]
        if min(works) < max(works):
            count = f"{min(works):,} to {max(works):,}"
    return f"{count} {kind} samples".replace("  ", " ")


def _model(run: TrainingRun) -> str | None:
    if layers := run.settings.get("hidden layers"):
        return f"MLP {layers}"
    count = run.settings.get("parameters")
    model = run.settings.get("model") or run.settings.get("workload")
    return f"{model}, {float(count):,.0f} parameters" if model and count else model
