"""A scaling study as a report: speed-up, efficiency, fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ..base import NotComparable, plural
from ..reports import Chapter, Picture, Report, Section
from .advice import advice, exposed, interval_text, rank_lines
from .runs import TrainingRun
from .sources.read import read_runs
from .speedup_figures import figures_of
from .study import Study, studies
from .study_text import scaling_sections
from .tables import label, notes, summary_rows

_CAPTIONS = {
    "speedup": "Speed-up over the baseline: measured, ideal, and by the fitted laws.",
    "efficiency": "Parallel efficiency; values above the line count as good across nodes.",
    "epoch": "Time of an epoch by phase, means over runs and ranks.",
    "utilisation": "GPU utilisation of each configuration.",
}


def report_of_scaling(
    paths: Sequence[Path],
    title: str,
    say: Callable[[str], None],
    others: Sequence[TrainingRun] = (),
) -> Report:
    """The report of runs on several numbers of devices.

    Args:
        paths: Folders of runs, logs, ledgers or exports of trackers, or folders of these.
        title: The title of the report.
        say: Called with a sentence on each file that is left out.
        others: Runs that were read before.

    Returns:
        The report, with a chapter for each kind of scaling. If runs cannot be compared, or all have
        one size, the report says so.

    Raises:
        UsageError: A path cannot be read, or holds no run.
    """
    runs = read_runs(list(paths), say, others)
    try:
        return report_of_studies(runs, studies(runs, False), title)
    except NotComparable as error:
        return report_of_studies(runs, [], title, str(error))


def report_of_studies(
    runs: Sequence[TrainingRun], compared: Sequence[Study], title: str, why: str = ""
) -> Report:
    """The report of the studies among runs.

    Args:
        runs: All runs.
        compared: The studies among them.
        title: The title of the report.
        why: Why there is no study; empty for the number of sizes.

    Returns:
        The report, with a chapter for each study of several sizes, and one of all runs.
    """
    listed = Chapter("Runs", [Section("Runs", summary_rows(runs), notes(runs, compared))])
    several = [study for study in compared if len(study.points) > 1]
    if not several:
        sizes = plural(len({run.devices for run in runs if run.complete}), "size")
        why = why or f"it takes two sizes, and there is {plural(len(runs), 'run')} of {sizes}"
        return Report(title, [f"No scaling study: {why}."], [plural(len(runs), "run")], [listed])
    chapters = [_chapter(study, len(several) > 1) for study in several]
    verdict = [line for study in several for line in _verdict(study)]
    return Report(title, verdict, [_of_runs(runs)], [*chapters, listed])


def _verdict(study: Study) -> list[str]:
    """Sentences: on the configuration with the most devices, on the others, and on slow ranks."""
    last = max(study.points, key=lambda point: point.at.devices)
    ends = interval_text(last.speedup, 1, 2)
    count = plural(len(last.at.runs), "run")
    spread = f"[{ends}, {count}]" if ends != "-" else f"[{count}, no interval]"
    lines = list(advice(study))
    shared = exposed(last.at)
    base = label(study.base.first).replace("Single process", "a single process")
    line = (
        f"{label(last.at.first)} gave {last.speedup.value:.2f}x the speed of "
        f"{base} {spread}, {100 * last.efficiency.value:.0f} % of linear"
    )
    if shared is not None:
        line += f"; ranks waited for each other for {shared:.0%} of their steps"
    return [f"{line}.", *lines, *rank_lines(study)]


def _chapter(study: Study, several: bool) -> Chapter:
    suffix = f"_{study.kind}" * several
    figures = figures_of(study)
    pictures = [
        Picture(f"{name}{suffix}", _CAPTIONS[name], partial(figures.__getitem__, name))
        for name in figures
    ]
    return Chapter(f"Scaling, {study.kind}", scaling_sections(study), pictures)


def _of_runs(runs: Sequence[TrainingRun]) -> str:
    complete = sum(run.complete for run in runs)
    return f"{plural(len(runs), 'run')}, {complete} of them complete"
