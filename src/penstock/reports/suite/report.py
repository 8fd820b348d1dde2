"""The report of a suite: a row for each run, a table, sentences, and its files.

A run is one batch size with one number of workers. All its launches are one row. Its

    throughput    samples that the training counted / seconds of its epochs, validation apart
    time          seconds of the whole run: epochs, validations, checkpoints
    memory        the most that the process of any rank held on its GPU; of the host, the process
                  tree with the workers that load data
    shares        the shares of the epochs' seconds of waiting for data, computing and so on

A value is the median over launches. The interval of a throughput (95 %) is bootstrapped over
launches; a single launch has none. A missing value is null, never 0.

The figure of a preset has throughput, peak memory and waiting for data over the batch size, with a
line for each number of workers. A run that failed is a cross on the axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...base import (
    format_bytes,
    format_seconds,
    json_text,
    plural,
    significant,
    write_output,
)
from ...bench import SUITE_REPORT
from ...instruments import FAILED, Record
from ..cell import bootstrap_ratio
from ..charts.chart import Axis, Figure, Panel, Series
from ..content import Chapter, Report, markdown_page
from ..table import (
    Section,
    bracket,
    machine_words,
    nothing_measured,
    of_launches,
    or_dash,
    scaled,
    spread,
    times_bracket,
    without_empty,
)
from .cell import SuiteCell, runs_together, suite_cells

FORMAT, VERSION = "penstock-suite", 1


def suite_sections(records: Iterable[Record], notes: Sequence[str] = ()) -> list[Section]:
    """A section for each preset on each machine: what was run, a table and sentences.

    Args:
        records: The launches of a suite.
        notes: Sentences that come first in the section of the preset that they name.

    Returns:
        The sections, in the order of the presets.
    """
    sections = []
    for name, runs in runs_together(records).items():
        preset = str(runs[0].case["preset"])
        title = heading(runs) + name.removeprefix(preset)
        of_preset = [note for note in notes if preset in note]
        sections.append(Section(title, table(runs), [*of_preset, *sentences(runs)]))
    return sections


def heading(runs: Sequence[SuiteCell]) -> str:
    case = runs[0].case
    training = next((t for run in runs for t in run.trainings), None)
    what = f"{case['preset']}: {case['workload']}"
    if case["workload"] == "detector":
        what += f" on {case['backbone']}"
    switched = [word for word in ("amp", "compile", "channels_last") if case[word]]
    if training is not None:
        what += f", {plural(training['parameters'], 'parameter')}, "
        what += f"{training['world_size']} × {training['device']}"
    samples = next((n for run in runs if (n := run.fact("train_samples"))), None)
    of = f" of {plural(samples, 'sample')}" if samples else ""
    epochs = f"{plural(case['epochs'], 'epoch')}{of}"
    return ", ".join([what, *(word.replace("_", " ") for word in switched), epochs])


def table(runs: Sequence[SuiteCell]) -> list[tuple[str, ...]]:
    """Header and lines."""
    head = "batch", "workers", "time", "samples/s", "95 %", "GPU peak", "host peak", "GPU", "CPU"
    more = "mAP", "loc. F1", "waits", "limited by", "launches", "status"
    return without_empty([(*head, *more), *map(_line, runs)])


def _line(run: SuiteCell) -> tuple[str, ...]:
    row = run.values()
    return (
        str(row["batch_size"]),
        str(row["num_workers"]),
        or_dash(row["training_time_s"], format_seconds),
        or_dash(row["throughput_samples_per_s"]),
        spread(run.throughput),
        or_dash(row["gpu_memory_peak_bytes"], format_bytes),
        or_dash(row["host_memory_peak_bytes"], format_bytes),
        or_dash(row["gpu_utilization_percent"], "{:.0f} %".format),
        or_dash(row["cpu_utilization_percent"], "{:.0f} %".format),
        or_dash(row["map"], "{:.3f}".format),
        or_dash(row["loc_fscore"], "{:.3f}".format),
        or_dash(row["shares"]["data"], "{:.0%}".format),
        row["limited_by"] or "-",
        str(row["launches"]),
        str(row["status"]),
    )


def sentences(runs: Sequence[SuiteCell]) -> list[str]:
    """Sentences on the runs of a preset, each with a count and an interval."""
    return [_failure(run) for run in runs if run.status != "ok"] + verdict(runs)


def suite_headlines(records: Iterable[Record]) -> list[str]:
    """What limits the runs of each preset, and the run with the most samples a second."""
    return [line for runs in runs_together(records).values() for line in verdict(runs)]


def verdict(runs: Sequence[SuiteCell]) -> list[str]:
    """What limits the runs of a preset, and which is the fastest; empty if none was measured."""
    measured = [run for run in runs if run.throughput is not None]
    return [_of_limits(measured), _of_best(measured)] if measured else []


def _failure(run: SuiteCell) -> str:
    failed = sum(record.status == run.status for record in run.records)
    error = next(r.error for r in run.records if r.status == run.status)
    what = f"{run.name} {FAILED[run.status]} in {failed} of {plural(len(run.records), 'launch')}"
    return f"{what[:1].upper()}{what[1:]}: {error.message if error else 'without a message'}."


def _of_best(measured: Sequence[SuiteCell]) -> str:
    best, *others = sorted(measured, key=_rate, reverse=True)
    line = f"Most samples a second: {best.name}, {_spread(best)}"
    if not others:
        return line + "."
    second = others[0]
    if min(best.launches, second.launches) < 2:
        return line + f"; next is {second.name}, {_spread(second)}, not compared."
    ratio = bootstrap_ratio([[rate] for rate in second.rates], [[rate] for rate in best.rates])
    if not ratio.excludes(1):
        return line + f"; not distinguishable from {second.name}, {_spread(second)}."
    ends = times_bracket(ratio, f"{plural(ratio.n, 'launch')} each")
    return f"{line}, {ratio.value:.2f}x as many as {second.name} {ends}."


def _of_limits(measured: Sequence[SuiteCell]) -> str:
    """Say which limit most runs have, and which run waits longest for data."""
    limits = Counter(run.limited_by or "nothing known" for run in measured)
    counts = ", ".join(
        f"{limit} limits {number} of {plural(len(measured), 'run')}"
        for limit, number in limits.most_common()
    )
    most = max(measured, key=lambda run: run.shares["data"] or 0.0)
    spread = of_launches(most.shares_of("data"), "{:.0%}".format)
    return (
        f"{counts[:1].upper()}{counts[1:]}; {most.name} waits longest for data, "
        f"{most.shares['data']:.0%} of its epochs [{spread}]."
    )


def _rate(run: SuiteCell) -> float:
    return run.throughput.value if run.throughput else 0.0


def _spread(run: SuiteCell) -> str:
    assert run.throughput is not None
    ends = bracket(run.throughput, plural(run.launches, "launch"), significant)
    return f"{significant(run.throughput.value)} {ends}"


def write_suite_report(
    out: Path,
    records: Sequence[Record],
    presets: Sequence[Mapping[str, Any]],
    system: Mapping[str, Any],
    notes: Sequence[str],
    figures: Sequence[Path],
    replace: bool = False,
) -> list[Path]:
    """Write ``benchmark_report.json`` and ``benchmark_report.md``, computed from the records.

    Args:
        out: The folder of both files.
        records: The launches of a suite.
        presets: The presets as they were asked for, for the JSON file.
        system: The machine: ``machine``, ``libraries``, ``devices`` and ``git``.
        notes: Sentences on presets that were changed before they ran.
        figures: The figures that the page shows; they lie in ``out``.
        replace: Replace files that Penstock did not write.

    Returns:
        Both files, the JSON file first.

    Raises:
        Refused: A file is not to be replaced.
    """
    sections, runs = suite_sections(records, notes), suite_cells(records)
    measured = [run for run in runs if run.throughput is not None]
    best = max(measured, key=_rate, default=None)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "presets": list(presets),
        "notes": list(notes),
        "system": dict(system),
        "runs": [run.values() for run in runs],
        "best": best and best.values(),
        "sentences": [line for section in sections for line in section.sentences],
    }
    about = [machine_words(system, *(system["devices"] or ["no GPU"])), *(f"{n}." for n in notes)]
    chapter = Chapter("Runs", [*sections, Section("How it was measured", (), [_METHOD])])
    verdict_of_all = suite_headlines(records) or [nothing_measured(records)]
    report = Report("Benchmark report", verdict_of_all, about, [chapter])
    page = markdown_page(report, [[figure.name for figure in figures]])
    files = out / f"{SUITE_REPORT}.json", out / f"{SUITE_REPORT}.md"
    for file, text in zip(files, (json_text(document), page), strict=True):
        write_output("--output-dir", file, text, replace=replace)
    return list(files)


_METHOD = (
    "Each run is a training in a fresh process. Time is of the whole run; samples/s are the "
    "samples that it counted over the seconds of its epochs, validation apart. GPU peak is what "
    "the training process itself held in tensors; host peak is of its process tree, with the "
    "workers that load data. GPU and CPU are means over the run; 100 % of CPU is one core. Waits "
    "is the share of the epochs' seconds in which a step waits for its batch. What limits is the "
    "largest share of these: data, transfer, compute (forward, backward, optimizer), communication."
)


def draw_suite(runs: Sequence[SuiteCell]) -> Figure:
    """The runs of one preset."""
    launches = sum(run.launches for run in runs)
    rows = [run.values() for run in runs]
    memory, place = "gpu_memory_peak_bytes", "GPU"
    if all(row[memory] is None for row in rows):
        memory, place = "host_memory_peak_bytes", "Host"
    rates = [row["throughput_samples_per_s"] for row in rows]
    panels = [_panel(runs, Axis("Throughput", "samples/s"), rates, True)]
    if any(row[memory] is not None for row in rows):
        peaks = [row[memory] for row in rows]
        panels.append(_panel(runs, Axis(f"{place} memory at most", "B"), peaks))
    waits = [scaled(row["shares"]["data"], 100) for row in rows]
    panels.append(_panel(runs, Axis("Waiting for data, of the epochs", "%"), waits))
    note = f"{plural(len(runs), 'run')}, {plural(launches, 'launch')}; crosses are failures"
    return Figure(heading(runs), note, panels, 3)


def _panel(
    runs: Sequence[SuiteCell], axis: Axis, values: Sequence[float | None], intervals: bool = False
) -> Panel:
    series = []
    batches = sorted({run.batch for run in runs})
    for place, workers in enumerate(sorted({run.workers for run in runs})):
        line = [(run, v) for run, v in zip(runs, values, strict=True) if run.workers == workers]
        x, y = [float(batches.index(run.batch)) for run, _ in line], [v for _, v in line]
        rates = [run.throughput if intervals else None for run, _ in line]
        low, high = ([getattr(rate, end, None) for rate in rates] for end in ("low", "high"))
        series.append(Series(plural(workers, "worker"), x, y, "dots", place, low=low, high=high))
        failed = [float(batches.index(run.batch)) for run, _ in line if not run.measured]
        if failed:
            zeros = [0.0] * len(failed)
            series.append(Series("", failed, zeros, "points", place, marker="x", silent=True))
    return Panel(
        axis.name, Axis("Batch on each device", ticks=list(map(str, batches))), axis, series
    )
