"""A scaling study as a table and sentences, as CSV, and as a report with its figures.

Every sentence is computed and gives the number of runs and the interval behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from ..base import (
    NotComparable,
    csv_text,
    format_seconds,
    plural,
    significant,
    to_cell,
)
from ..instruments import Interval
from ..reports import Chapter, Picture, Report, Section, csv_field, or_dash, without_empty
from .advice import advice, exposed, interval_text, quality, rank_lines
from .estimates import Amdahl, Usl, why_none
from .runs import TrainingRun
from .sources.read import read_runs
from .speedup_figures import figures_of
from .study import ScalingPoint, Study, differences, in_no_study, studies
from .tables import counted, diverged, fixed, label, notes, run_mark, summary_rows

COLUMNS = tuple(
    "kind devices nodes runs seconds speedup speedup_low speedup_high efficiency efficiency_low "
    "efficiency_high karp_flatt karp_flatt_low karp_flatt_high samples_per_s seconds_per_epoch "
    "exposed_communication val_loss val_acc status".split()
)
RUN_COLUMNS = tuple(
    "source job name status restarts devices nodes device seconds epochs planned_epochs "
    "seconds_per_epoch samples batch global_batch steps val_loss val_acc diverged".split()
)

_KINDS = {
    "strong": "Strong scaling",
    "weak": "Weak scaling",
    "hybrid": "Hybrid scaling",
    "undetermined": "Scaling of an undetermined kind",
}


def scaling_sections(study: Study) -> list[Section]:
    """The table and the sentences of a study.

    Args:
        study: The study.

    Returns:
        One section, headed by the kind of scaling.
    """
    sentences = chain(
        _kind_lines(study),
        _law_lines(study),
        advice(study),
        quality(study),
        rank_lines(study),
    )
    return [Section(_KINDS[study.kind], _table(study), list(sentences))]


def _table(study: Study) -> list[tuple[str, ...]]:
    head = (
        *("configuration", "runs", "time", "speed-up", "95 %", "efficiency", "95 %", "samples/s"),
        *("Karp-Flatt", "exposed sum"),
    )
    rows = (
        (
            label(point.at.first),
            str(len(point.at.runs)),
            format_seconds(point.at.seconds),
            f"{point.speedup.value:.4f}",
            interval_text(point.speedup, 1, 3),
            f"{100 * point.efficiency.value:.2f} %",
            interval_text(point.efficiency, 100, 1),
            or_dash(point.throughput, significant),
            "-" if point.karp_flatt is None else f"{point.karp_flatt.value:.6f}",
            or_dash(exposed(point.at), lambda share: f"{share:.1%}"),
        )
        for point in study.points
    )
    return without_empty([head, *rows])


def _kind_lines(study: Study) -> Iterator[str]:
    """Sentences on what grows with the devices, on settings that differ, and on the baseline."""
    yield _what_grows(study)
    runs = [run for point in study.points for run in point.at.runs]
    yield from (f"These runs differ: {difference}." for difference in differences(runs))
    if study.base.devices > 1:
        yield (
            f"There is no complete run of 1 device: all is normalised to {study.base.devices}, "
            "the fewest there are."
        )


_GROWS = {
    "strong": (
        "The {samples} samples of an epoch and the global batch of {first.global_batch} stay; a "
        "device's batch falls from {first.batch} to {last.batch}."
    ),
    "weak": (
        "A device's batch of {first.batch} stays and the samples of an epoch grow from {samples} "
        "to {more}; speed-up is of samples a second."
    ),
    "hybrid": (
        "The {samples} samples of an epoch and a device's batch of {first.batch} stay; the global "
        "batch grows from {first.global_batch} to {last.global_batch}, so an epoch has fewer steps "
        "and the training is another."
    ),
}
"""The sentence that says what stays and what grows, by the kind of scaling."""


def _what_grows(study: Study) -> str:
    first, last = study.base.first, study.points[-1].at.first
    if study.kind in _GROWS:
        samples, more = f"{first.work or 0:,}", f"{last.work or 0:,}"
        return _GROWS[study.kind].format(first=first, last=last, samples=samples, more=more)
    if len(study.points) == 1:
        return f"All runs are of {label(first)}: there is nothing to compare them with."
    if all(run.shape_known for point in study.points for run in point.at.runs):
        return (
            "The work differs in more than the devices, and runs are compared anyway: "
            f"{_shape(first)}, and {_shape(last)}. Speed-up is of time alone, whatever the work."
        )
    return (
        "The logs lack batch or samples of some runs, so weak and strong scaling cannot be told "
        "apart; the work is taken to be the same."
    )


def _shape(run: TrainingRun) -> str:
    return (
        f"{plural(run.work or 0, 'sample')} an epoch, {run.batch} a batch and device "
        f"({run.global_batch} in all) on {counted(run)}"
    )


def _law_lines(study: Study) -> Iterator[str]:
    if isinstance(study.amdahl, Amdahl):
        serial, most = study.amdahl.serial, significant(study.amdahl.most)
        yield (
            f"Amdahl: a serial share of {serial.value:.6f}{_in_brackets(serial)}, so at most "
            f"{most}x on any number of devices, if nothing but that share holds them up."
            if serial.value > 0
            else f"Amdahl: no serial share{_in_brackets(serial)}."
        )
    else:
        yield f"{study.amdahl}."
    if isinstance(study.usl, Usl):
        law = study.usl
        yield (
            f"USL: sigma {law.sigma.value:.6f}{_in_brackets(law.sigma)}, kappa "
            f"{law.kappa.value:.6f}{_in_brackets(law.kappa)}: {_turn(study, law.peak)}."
        )
    else:
        yield f"{study.usl[:1].upper()}{study.usl[1:]}."


def _turn(study: Study, peak: Interval | None) -> str:
    if peak is None:
        return "nothing shows a number of devices that is too many"
    ends = interval_text(peak, 1, 0).replace("inf", "no end")
    ended = peak.high is not None and math.isfinite(peak.high)
    fastest = "fastest" if ended else "its curve is highest"
    fastest += f" on {plural(round(peak.value), 'device')}"
    fastest += f" [{ends}]" * (ends != "-")
    most = max(point.at.devices for point in study.points)
    return fastest if peak.value <= most else f"{fastest}, more than the {most} that were measured"


def _in_brackets(interval: Interval) -> str:
    if interval.low is None or interval.high is None:
        return f" [{why_none(interval)}]"
    return f" [{interval.low:.6f}-{interval.high:.6f}, {interval.n} runs of each size]"


def metrics_table(runs: Sequence[TrainingRun]) -> Section:
    """A table of total training time, best validation loss and GPU-Util, a row for each run."""
    lines: list[tuple[str, ...]] = [
        ("file", "job", "Total training time", "Best validation loss", "GPU-Util")
    ]
    for run in runs:
        used = run.utilisation
        readings = plural(len(used), "reading")
        mean = f"{sum(used) / len(used):.0f} % ({readings})" if used else "not logged"
        time = "not logged"
        if run.seconds is not None:
            star = "" if run.complete else "*"
            time = f"{run.seconds:.2f} seconds ({run.seconds / 60:.2f} minutes){star}"
        source = run.source.replace("\n", " ")  # a line of the table is a line
        loss = "nan" if run.diverged else fixed(run.val_loss, 4)
        lines.append((source, run.job, time, loss, mean))
    notes = [note[2:] for run in runs if (note := run_mark(run))]
    return Section("Metrics", lines, [*notes, *diverged(runs)])


def points_to_csv(studies: Iterable[Study], runs: Iterable[TrainingRun]) -> str:
    """The studies as CSV, with the columns of `COLUMNS`.

    Args:
        studies: The studies; each configuration is a row.
        runs: All runs; each that is in no study is a row, of the kind "not compared".

    Returns:
        The text of the CSV.
    """
    compared, runs = list(studies), list(runs)
    rows = [_point_row(study, point) for study in compared for point in study.points]
    alone = in_no_study(runs, compared)
    left = [run for run in runs if not run.complete or run in alone]
    return _csv(COLUMNS, rows + [_left_row(run) for run in left])


def _left_row(run: TrainingRun) -> dict[str, Any]:
    return {
        "kind": "not compared",
        "devices": run.devices,
        "nodes": run.nodes,
        "runs": 1,
        "seconds": run.seconds,
        "seconds_per_epoch": run.per_epoch,
        "val_loss": run.val_loss,
        "val_acc": run.val_acc,
        "status": "partial" if run.status == "complete" and not run.complete else run.status,
    }


def _point_row(study: Study, point: ScalingPoint) -> dict[str, Any]:
    at, share = point.at, point.karp_flatt
    return {
        "kind": study.kind,
        "devices": at.devices,
        "nodes": at.nodes,
        "runs": len(at.runs),
        "seconds": at.seconds,
        "speedup": point.speedup.value,
        "speedup_low": point.speedup.low,
        "speedup_high": point.speedup.high,
        "efficiency": point.efficiency.value,
        "efficiency_low": point.efficiency.low,
        "efficiency_high": point.efficiency.high,
        "karp_flatt": share and share.value,
        "karp_flatt_low": share and share.low,
        "karp_flatt_high": share and share.high,
        "samples_per_s": point.throughput,
        "seconds_per_epoch": at.mean(lambda run: run.per_epoch),
        "exposed_communication": exposed(at),
        "val_loss": at.mean(lambda run: run.scored(run.val_loss)),
        "val_acc": at.mean(lambda run: run.scored(run.val_acc)),
        "status": "complete",
    }


def runs_to_csv(runs: Iterable[TrainingRun]) -> str:
    """All runs as CSV, with the columns of `RUN_COLUMNS`, also those that are not complete."""
    return _csv(
        RUN_COLUMNS,
        (
            {name: getattr(run, name, None) for name in RUN_COLUMNS}
            | {"seconds_per_epoch": run.per_epoch}
            for run in runs
        ),
    )


def _csv(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    cells = ({name: to_cell(csv_field(value)) for name, value in row.items()} for row in rows)
    return csv_text(columns, cells)


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
        why = why or f"it takes two sizes, not {plural(len(runs), 'run')} of {sizes}"
        return Report(title, [f"No scaling study: {why}."], [plural(len(runs), "run")], [listed])
    chapters = [_chapter(study, len(several) > 1) for study in several]
    verdict = [line for study in several for line in _verdict(study)]
    complete = sum(run.complete for run in runs)
    facts = [f"{plural(len(runs), 'run')}, {complete} of them complete"]
    return Report(title, verdict, facts, [*chapters, listed])


def _verdict(study: Study) -> list[str]:
    """Sentences: on the configuration with the most devices, on the others, and on slow ranks."""
    last = max(study.points, key=lambda point: point.at.devices)
    ends = interval_text(last.speedup, 1, 2)
    count = plural(len(last.at.runs), "run")
    spread = f"[{ends}, {count}]" if ends != "-" else f"[{count}, no interval]"
    shared = exposed(last.at)
    base = label(study.base.first).replace("Single process", "a single process")
    line = (
        f"{label(last.at.first)} gave {last.speedup.value:.2f}x the speed of "
        f"{base} {spread}, {100 * last.efficiency.value:.0f} % of linear"
    )
    if shared is not None:
        line += f"; ranks waited for each other for {shared:.0%} of their steps"
    return [f"{line}.", *advice(study), *rank_lines(study)]


def _chapter(study: Study, several: bool) -> Chapter:
    suffix = f"_{study.kind}" * several
    figures = figures_of(study)
    pictures = [
        Picture(f"{name}{suffix}", _CAPTIONS[name], partial(figures.__getitem__, name))
        for name in figures
    ]
    return Chapter(f"Scaling, {study.kind}", scaling_sections(study), pictures)
