"""What a suite measured: a row for each run, a table, sentences, and the files of its report.

A run is one batch size with one number of workers; several launches of it are one row. Its

    throughput    samples that the training counted / seconds of its epochs, validation apart
    time          seconds of the whole run: epochs, validations, checkpoints
    memory        the most that the process of any rank held on its GPU; of the host, the process
                  tree with the workers that load data
    shares        what of the epochs' seconds went into waiting for data, computing and so on

A value is the median over launches; the interval of a throughput (95 %) is bootstrapped over
launches, and there is none of a single one. Missing is null, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..base import (
    for_markdown,
    format_bytes,
    format_seconds,
    significant,
    write_json,
    writing_output,
)
from ..bench import SUITE_REPORT, launch_folder, peak_of_ranks, phases_of
from ..instruments import FAILED, Interval, Record, commit_of, hierarchical_bootstrap_ratio
from .cell import Cell
from .table import Section, in_markdown, without_empty

FORMAT, VERSION = "penstock-suite", 1
LIMITS = {
    "data": ("data_wait",),
    "transfer": ("transfer",),
    "compute": ("forward", "backward", "optimizer"),
    "communication": ("communication",),
}
"""What can hold a training back, by the phases that it takes."""
_DRAWS = 2000

Values = dict[str, Any]


class Run(Cell):
    """All launches of one case."""

    @property
    def batch(self) -> int:
        return int(self.case["batch_size"])

    @property
    def workers(self) -> int:
        return int(self.case["num_workers"])

    @property
    def name(self) -> str:
        return f"batch {self.batch}, {self.workers} worker{'s' * (self.workers != 1)}"

    @cached_property
    def trainings(self) -> list[Mapping[str, Any]]:
        """What each launch that was ok said of its training."""
        return [record.facts["training"] for record in self.measured]

    @property
    def rates(self) -> list[float]:
        return [training["samples_per_s"] for training in self.trainings]

    @cached_property
    def throughput(self) -> Interval | None:
        """Samples a second."""
        if not self.rates:
            return None
        launches = [np.array([rate]) for rate in self.rates]
        return _ratio([np.ones(1)] * len(launches), launches)

    @property
    def rates_median(self) -> float:
        """0 where nothing was measured."""
        return self.throughput.value if self.throughput else 0.0

    def median(self, value: Callable[[Mapping[str, Any]], float | None]) -> float | None:
        """Of what each training says, as far as it says anything."""
        return _median(value(training) for training in self.trainings)

    def shares_of(self, limit: str) -> list[float]:
        """Of the seconds of each training's epochs. Where a GPU computes while its host waits for
        data, both count, and the shares may add up to more than 1."""
        shares = []
        for training in self.trainings:
            phases = phases_of(training)
            own = [phases[name] for name in LIMITS[limit] if name in phases]
            shares += [sum(own) / training["training_s"]] * bool(own)
        return shares

    @property
    def shares(self) -> dict[str, float | None]:
        return {limit: _median(self.shares_of(limit)) for limit in LIMITS}

    @property
    def limited_by(self) -> str | None:
        known = {limit: share for limit, share in self.shares.items() if share is not None}
        return max(known, key=lambda limit: known[limit]) if known else None

    def score(self, name: str) -> float | None:
        """After the last epoch."""
        return self.median(lambda training: (training["final"] or {}).get(name))

    def used(self, of: str) -> float | None:
        """Percent of a core, or of a GPU."""
        return _median(record.facts["utilisation"][of] for record in self.measured)

    @property
    def values(self) -> Values:
        """The row, in plain values."""
        memory, gpu = self.case["profile_memory"], self.case["profile_gpu"]
        rate = self.throughput
        error = next((r.error for r in self.records if r.error is not None), None)
        return {
            "preset": self.case["preset"],
            "batch_size": self.batch,
            "num_workers": self.workers,
            "world_size": self.case["world_size"],
            "status": self.status,
            "error": error and error.message,
            "launches": self.launches,
            "failed": len(self.records) - self.launches,
            "samples": self.work("samples"),
            "training_time_s": _median(record.samples_s["step"][0] for record in self.measured),
            "validation_time_s": self.median(lambda training: training["validation_s"]),
            "epoch_times_s": [training["epoch_times_s"] for training in self.trainings],
            "throughput_samples_per_s": rate and rate.value,
            "throughput_low": rate and rate.low,
            "throughput_high": rate and rate.high,
            "gpu_memory_peak_bytes": self._peak("device_peak") if memory else None,
            "gpu_memory_reserved_bytes": self._peak("device_reserved") if memory else None,
            "host_memory_peak_bytes": self.host_peak if memory else None,
            "gpu_utilization_percent": self.used("gpu_percent") if gpu else None,
            "cpu_utilization_percent": self.used("cpu_percent"),
            "map": self.score("val_AP"),
            "map50": self.score("val_AP50"),
            "loc_fscore": self.score("val_loc_fscore"),
            "shares": self.shares,
            "limited_by": self.limited_by,
            "folders": [launch_folder(record.case, record.launch) for record in self.records],
        }

    def _peak(self, name: str) -> int | None:
        peaks = [peak_of_ranks(training, name) for training in self.trainings]
        return max((peak for peak in peaks if peak is not None), default=None)


def runs(records: Iterable[Record]) -> list[Run]:
    """By preset, batch size and number of workers."""
    found: dict[str, list[Record]] = {}
    for record in records:
        if record.scenario == "train":
            found.setdefault(record.key, []).append(record)
    made = [Run(tuple(launches)) for launches in found.values()]
    return sorted(made, key=lambda run: (run.case["preset"], run.batch, run.workers))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def _ratio(a: Sequence[Any], b: Sequence[Any]) -> Interval:
    # The same seed always, so that a report of the same records is the same to the digit.
    return hierarchical_bootstrap_ratio(a, b, _DRAWS, np.random.default_rng(0))


def suite_sections(records: Iterable[Record], notes: Sequence[str]) -> list[Section]:
    """For each preset what was run, its table, and what it says; ``notes`` come first."""
    by_preset: dict[str, list[Run]] = {}
    for run in runs(records):
        by_preset.setdefault(run.case["preset"], []).append(run)
    return [
        Section(heading(own), table(own), [*(n for n in notes if name in n), *sentences(own)])
        for name, own in by_preset.items()
    ]


def heading(own: Sequence[Run]) -> str:
    case = own[0].case
    training = next((t for run in own for t in run.trainings), None)
    what = f"{case['preset']}: {case['workload']}"
    if case["workload"] == "detector":
        what += f" on {case['backbone']}"
    switched = [word for word in ("amp", "compile", "channels_last") if case[word]]
    if training is not None:
        what += f", {training['parameters']:,} parameters, "
        what += f"{training['world_size']} × {training['device']}"
    samples = own[0].fact("train_samples")
    of = f" of {samples} samples" if samples else ""
    epochs = f"{case['epochs']} epoch{'s' * (case['epochs'] != 1)}{of}"
    return ", ".join([what, *(word.replace("_", " ") for word in switched), epochs])


HEAD = (
    "batch", "workers", "time", "samples/s", "95 %", "GPU peak", "host peak", "GPU", "CPU",
    "mAP", "loc. F1", "first epoch", "later", "waits", "limited by", "launches", "status",
)  # fmt: skip


def table(own: Sequence[Run]) -> list[tuple[str, ...]]:
    """Header and lines."""
    return without_empty([HEAD, *(_line(run.values) for run in own)])


def _line(row: Values) -> tuple[str, ...]:
    def shown(name: str, form: Callable[[float], str]) -> str:
        return "-" if row[name] is None else form(row[name])

    low, high = row["throughput_low"], row["throughput_high"]
    first, later = _epochs(row["epoch_times_s"])
    waits = row["shares"]["data"]
    return (
        str(row["batch_size"]),
        str(row["num_workers"]),
        shown("training_time_s", format_seconds),
        shown("throughput_samples_per_s", significant),
        "-" if low is None else f"{significant(low)} - {significant(high)}",
        shown("gpu_memory_peak_bytes", format_bytes),
        shown("host_memory_peak_bytes", format_bytes),
        shown("gpu_utilization_percent", "{:.0f} %".format),
        shown("cpu_utilization_percent", "{:.0f} %".format),
        shown("map", "{:.3f}".format),
        shown("loc_fscore", "{:.3f}".format),
        first,
        later,
        "-" if waits is None else f"{waits:.0%}",
        row["limited_by"] or "-",
        str(row["launches"]),
        str(row["status"]),
    )


def _epochs(launches: Sequence[Sequence[float]]) -> tuple[str, str]:
    """Seconds of the first epoch, which warms up, and of the others; medians."""
    first = _median(epochs[0] for epochs in launches if epochs)
    later = _median(seconds for epochs in launches for seconds in epochs[1:])
    return tuple("-" if s is None else format_seconds(s) for s in (first, later))  # type: ignore[return-value]


def sentences(own: Sequence[Run]) -> list[str]:
    """What the runs of a preset say, each with how many stand behind it and an interval."""
    lines = [_failure(run) for run in own if run.status != "ok"]
    measured = [run for run in own if run.throughput is not None]
    if not measured:
        return lines
    lines += [_of_best(measured), _of_limits(measured), *_of_memory(measured)]
    busy = [
        r.environment.get("load", {}).get("busy_processes") for m in measured for r in m.measured
    ]
    if shared := sum(count is not None and count > 0 for count in busy):
        lines.append(
            f"Other processes kept cores busy as {shared} of {_launches(len(busy))} began: these "
            "are times of a shared machine."
        )
    if plain := {run.fact("torchvision_operators") for run in measured} - {None, "compiled"}:
        lines.append(
            f"torchvision's compiled operators do not load here: nms and roi_align ran in "
            f"{plain.pop()}, which is slower."
        )
    return lines


def _failure(run: Run) -> str:
    failed = sum(record.status == run.status for record in run.records)
    error = next(r.error for r in run.records if r.status == run.status)
    what = f"{run.name} {FAILED[run.status]} in {failed} of {_launches(len(run.records))}"
    return f"{what[:1].upper()}{what[1:]}: {error.message if error else 'it did not say why'}."


def _of_best(measured: Sequence[Run]) -> str:
    ranked = sorted(measured, key=lambda run: -run.rates_median)
    best, *others = ranked
    line = f"Most samples a second: {best.name}, {_spread(best)}"
    if not others:
        return line + "."
    second = others[0]
    if min(best.launches, second.launches) < 2:
        return line + f"; next is {second.name}, {_spread(second)}, not compared."
    ratio = _ratio([np.array([r]) for r in second.rates], [np.array([r]) for r in best.rates])
    if not ratio.excludes(1):
        return line + f"; not distinguishable from {second.name}, {_spread(second)}."
    assert ratio.low is not None and ratio.high is not None
    return line + (
        f", {ratio.value:.2f}x as many as {second.name} "
        f"[{ratio.low:.2f}-{ratio.high:.2f}, {_launches(ratio.n)} each]."
    )


def _of_limits(measured: Sequence[Run]) -> str:
    """Which of the phases most runs spend their time in, and where they wait most for data."""
    by_limit: dict[str, list[Run]] = {}
    for run in measured:
        by_limit.setdefault(run.limited_by or "nothing known", []).append(run)
    counts = ", ".join(
        f"{limit} limits {len(own)} of {len(measured)} runs"
        for limit, own in sorted(by_limit.items(), key=lambda item: -len(item[1]))
    )
    most = max(measured, key=lambda run: run.shares["data"] or 0.0)
    shares = most.shares_of("data")
    spread = f"{min(shares):.0%} - {max(shares):.0%}, " if len(shares) > 1 else ""
    return (
        f"{counts[:1].upper()}{counts[1:]}; {most.name} waits longest for data, "
        f"{most.shares['data']:.0%} of its epochs [{spread}{_launches(len(shares))}]."
    )


def _of_memory(measured: Sequence[Run]) -> list[str]:
    """How memory grows from the smallest batch to the largest."""
    lines = []
    for place, name in (("GPU", "gpu_memory_peak_bytes"), ("host", "host_memory_peak_bytes")):
        known = [(run, peak) for run in measured if (peak := run.values[name]) is not None]
        batches = {run.batch for run, _ in known}
        if len(batches) < 2:
            continue
        ends = [max(p for run, p in known if run.batch == b) for b in (min(batches), max(batches))]
        launches = sum(run.launches for run, _ in known)
        lines.append(
            f"Peak {place} memory: {format_bytes(ends[0])} at batch {min(batches)}, "
            f"{format_bytes(ends[1])} at batch {max(batches)} [most of {_launches(launches)}]."
        )
    return lines


def _spread(run: Run) -> str:
    assert run.throughput is not None
    rate = run.throughput
    told = _launches(run.launches)
    if rate.low is not None and rate.high is not None:
        told = f"{significant(rate.low)} - {significant(rate.high)}, {told}"
    return f"{significant(rate.value)} [{told}]"


def _launches(count: int) -> str:
    return f"{count} launch{'es' * (count != 1)}"


def write_suite_report(
    out: Path,
    records: Sequence[Record],
    presets: Sequence[Mapping[str, Any]],
    system: Mapping[str, Any],
    notes: Sequence[str],
    figures: Sequence[Path],
    replace: bool = False,
) -> list[Path]:
    """``benchmark_report.json`` and ``.md``, computed from the records."""
    told = suite_sections(records, notes)
    measured = [run for run in runs(records) if run.throughput is not None]
    best = max(measured, key=lambda run: run.rates_median, default=None)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "presets": list(presets),
        "notes": list(notes),
        "system": dict(system),
        "runs": [run.values for run in runs(records)],
        "best": best and best.values,
        "sentences": [line for section in told for line in section.told],
    }
    page = [
        "# Benchmark report",
        "",
        f"- {for_markdown(machine_line(system))}",
        *(f"- {for_markdown(note)}." for note in notes),
    ]
    page += ["", *(f"![{figure.stem}]({figure.name})" for figure in figures)]
    page += ["", in_markdown(told), _METHOD]
    files = out / f"{SUITE_REPORT}.json", out / f"{SUITE_REPORT}.md"
    with writing_output(files[0], replace=replace) as draft:
        write_json(draft, document)
    with writing_output(files[1], replace=replace) as draft:
        draft.write_text("\n".join(page), encoding="utf-8")
    return list(files)


def machine_line(system: Mapping[str, Any]) -> str:
    """On what it ran, in a line."""
    machine, libraries = system["machine"], system["libraries"]
    words = [
        machine["processor"],
        f"{machine['cores']} cores",
        format_bytes(machine["memory_bytes"]),
        *(system["devices"] or ["no GPU"]),
        *(f"{name} {libraries[name]}" for name in ("python", "torch") if libraries.get(name)),
    ]
    if commit := commit_of(system.get("git")):
        words.append(f"commit {commit}")
    return ", ".join(word for word in words if word)


_METHOD = """\
Each run is a training in a fresh process. Time is of the whole run; samples/s are the samples that
it counted over the seconds of its epochs, validation apart. GPU peak is what the training process
itself held in tensors; host peak is of its process tree, with the workers that load data. GPU and
CPU are means over the run; 100 % of CPU is one core. Waits is the share of the epochs' seconds in
which a step waits for its batch. What limits is the largest share of these: data, transfer, compute
(forward, backward, optimizer), communication.
"""
