"""What selected runs share and where they differ: settings, metrics, groups, scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..base import NotComparable, UsageError, group_by, plural
from ..scaling import Study, studies
from .listed_run import ListedRun, RunDetails, told_apart
from .listing import in_words
from .sheet import Cell, Sheet

NOT_SET = "not set"
_FIRST_METRICS = (
    "seconds", "seconds_per_epoch", "best_val_loss", "best_val_acc", "samples_per_s",
    "voxels_per_s", "step.median_s",
)  # fmt: skip
"""Metrics that are offered first."""
_FACETS: dict[str, Callable[[ListedRun], str]] = {
    "name": lambda run: run.name,
    "kind": lambda run: run.kind,
    "workload": lambda run: run.workload,
    "model": lambda run: run.model,
    "machine": lambda run: run.machine,
}


class Selected(NamedTuple):
    """A run that is compared."""

    run: ListedRun
    name: str
    """A name that is unique among the selected runs."""
    details: RunDetails


def selected_of(
    runs: Sequence[ListedRun], details: Callable[[ListedRun], RunDetails]
) -> tuple[list[Selected], list[str]]:
    """Runs with their details, and a sentence on each that can no longer be read."""
    selected, notes = [], []
    for run, name in zip(runs, told_apart(runs), strict=True):
        try:
            selected.append(Selected(run, name, details(run)))
        except UsageError as error:
            notes.append(f"{name} is left out: {error}")
    return selected, notes


# --- settings and metrics -------------------------------------------------------------------------


def settings_sheet(selected: Sequence[Selected], everything: bool) -> Sheet:
    """The settings in which runs differ, or all of them.

    Args:
        selected: The runs.
        everything: Whether settings that are equal are shown, too.

    Returns:
        A row for each setting and a column for each run.
    """
    names = dict.fromkeys(name for each in selected for name in each.details.settings)
    rows: list[list[Cell]] = []
    for name in names:
        values: list[Cell] = [each.details.settings.get(name, NOT_SET) for each in selected]
        if everything or len(set(values)) > 1:
            rows.append([name, *values])
    equal = len(names) - len(rows)
    notes = [f"{plural(equal, 'more setting')} {'is' if equal == 1 else 'are'} equal."]
    return Sheet(
        "Settings" if everything else "Settings that differ",
        ["setting", *(each.name for each in selected)],
        rows,
        [] if everything else notes,
    )


def metrics_sheet(selected: Sequence[Selected]) -> Sheet:
    """The last values of all metrics, a row for each."""
    return Sheet(
        "Metrics",
        ["metric", *(each.name for each in selected)],
        [
            [name, *(each.details.metrics.get(name) for each in selected)]
            for name in metric_choices(selected)
        ],
        [f"{each.name}: {each.details.error}" for each in selected if each.details.error],
    )


def runs_sheet(runs: Sequence[ListedRun]) -> Sheet:
    """The rows of the list."""
    tags = list(dict.fromkeys(key for run in runs for key in run.tags))
    head = "key name kind status workload model machine began seconds result source".split()
    rows: list[list[Cell]] = [
        [
            *(run.key, run.name, run.kind, run.status, run.workload, run.model, run.machine),
            *(in_words(run.began), run.seconds, run.result, run.source),
            *(run.tags.get(key) for key in tags),
        ]
        for run in runs
    ]
    return Sheet("Runs", [*head, *(f"tag {key}" for key in tags)], rows)


def metric_choices(selected: Sequence[Selected]) -> list[str]:
    """The names of metrics, the most important first."""
    names = {name for each in selected for name in each.details.metrics}
    return [name for name in _FIRST_METRICS if name in names] + sorted(names - {*_FIRST_METRICS})


def knob_choices(selected: Sequence[Selected]) -> list[str]:
    """The names of settings: devices, then those that differ, then the others."""
    names = dict.fromkeys(name for each in selected for name in each.details.settings)
    differ = {
        name for name in names if len({each.details.settings.get(name) for each in selected}) > 1
    }
    return sorted(names, key=lambda name: (name not in differ, name != "devices"))


def group_choices(selected: Sequence[Selected]) -> list[str]:
    """What runs can be grouped by: tags, then facets, then settings that differ."""
    tags = dict.fromkeys(f"tag {key}" for each in selected for key in each.run.tags)
    names = [*tags, *_FACETS, *knob_choices(selected)]
    return [name for name in names if len({group_of(each, name) for each in selected}) > 1]


def group_of(each: Selected, group: str) -> str:
    """The group of a run by a tag, a facet or a setting."""
    if group.startswith("tag "):
        return each.run.tags.get(group.removeprefix("tag "), NOT_SET)
    if group in _FACETS:
        return _FACETS[group](each.run) or NOT_SET
    return each.details.settings.get(group, NOT_SET)


# --- a metric against a knob ----------------------------------------------------------------------


class RunPoint(NamedTuple):
    """A run as a point."""

    x: str
    """The value of the knob, as text."""
    y: float
    name: str
    group: str


def points_of(selected: Sequence[Selected], metric: str, knob: str, group: str) -> list[RunPoint]:
    """A metric of runs against a knob.

    Args:
        selected: The runs.
        metric: The name of the metric.
        knob: The name of the setting.
        group: What colours the points; empty for no groups.

    Returns:
        A point for each run that has the metric, by the value of the knob.
    """
    points = [
        RunPoint(
            each.details.settings.get(knob, NOT_SET),
            each.details.metrics[metric],
            each.name,
            group_of(each, group) if group else "",
        )
        for each in selected
        if metric in each.details.metrics
    ]
    return sorted(points, key=lambda point: (number_of(point.x) or 0.0, point.x))


def number_of(text: str) -> float | None:
    """A setting as a finite number; None if it is no number."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def points_sheet(points: Sequence[RunPoint], metric: str, knob: str, group: str) -> Sheet:
    """The points as a table.

    Args:
        points: The points.
        metric: The name of the metric.
        knob: The name of the setting.
        group: What colours the points; empty for no groups.

    Returns:
        A row for each point.
    """
    named = [group] if group else []
    rows: list[list[Cell]] = [
        [p.name, _cell_of(p.x), p.y, *([p.group] if group else [])] for p in points
    ]
    return Sheet(f"{metric} against {knob}", ["run", knob, metric, *named], rows)


def _cell_of(text: str) -> Cell:
    number = number_of(text)
    return text if number is None else number


def groups_sheet(selected: Sequence[Selected], metric: str, group: str) -> Sheet:
    """A metric of groups of runs.

    Args:
        selected: The runs.
        metric: The name of the metric.
        group: What runs are grouped by; empty for nothing.

    Returns:
        A row for each group, with the number of its runs and their median, least and greatest
        value.
    """
    rows: list[list[Cell]] = []
    for name, runs in group_by(selected, lambda e: group_of(e, group) if group else "all").items():
        values = [v for e in runs if (v := e.details.metrics.get(metric)) is not None]
        middle: list[Cell] = [None] * 3
        if values:
            middle = [float(np.median(values)), min(values), max(values)]
        rows.append([name, float(len(values)), *middle, ", ".join(e.name for e in runs)])
    head = [group or "group", "runs", f"median {metric}", "least", "greatest", "names"]
    return Sheet(f"{metric} by {group or 'group'}", head, rows)


# --- scaling --------------------------------------------------------------------------------------


def scaling_of(selected: Sequence[Selected], anyway: bool) -> tuple[list[Study], str]:
    """The scaling studies of the selected trainings.

    Args:
        selected: The runs.
        anyway: Whether runs whose settings differ are compared.

    Returns:
        The studies of several sizes, and a sentence if there is none.
    """
    runs = [each.details.training for each in selected if each.details.training is not None]
    whole = [run for run in runs if run.complete]
    try:
        compared = [study for study in studies(whole, None, anyway) if len(study.points) > 1]
    except NotComparable as error:
        why = str(error).removesuffix(", or --anyway")
        return [], f"No scaling study: {why}."
    if compared:
        return compared, ""
    sizes = len({run.devices for run in whole})
    return [], (
        f"No scaling study: {plural(len(whole), 'complete training')} of "
        f"{plural(sizes, 'number')} of devices, and it takes 2."
    )


def scaling_sheet(studied: Sequence[Study]) -> Sheet:
    """Speed-up and efficiency with their intervals, a row for each number of devices."""
    head = (
        "kind devices nodes runs seconds speedup speedup_low speedup_high efficiency "
        "efficiency_low efficiency_high"
    ).split()
    rows: list[list[Cell]] = []
    for study in studied:
        for point in study.points:
            ends = [
                end
                for interval in (point.speedup, point.efficiency)
                for end in (interval.value, interval.low, interval.high)
            ]
            counts = (point.at.devices, point.at.nodes, len(point.at.runs))
            numbers = [None if n is None else float(n) for n in counts]
            rows.append([study.kind, *numbers, point.at.seconds, *ends])
    return Sheet("Speed-up and efficiency", head, rows)
