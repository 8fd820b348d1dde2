"""Code that the benchmarks share: checks of CSV and ledger, and launches with progress."""

from __future__ import annotations

import contextlib
import os
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..base import (
    UsageError,
    check_outputs,
    default_name,
    format_seconds,
    plural,
    run_labels,
)
from ..bench import BENCH_LIBRARIES, Launcher, LaunchesOnCluster, SweepStep, in_turn, run_sweep
from ..cluster import connect
from ..instruments import Ledger, Nvml, Record
from ..reports import check_csv
from .progress import drawn_bar, say

Name = Callable[[Mapping[str, Any]], str]
"""A function that names a case."""
Outcome = Callable[[Record], str]
"""A function that describes the result of a launch in a few words."""


def open_outputs(config: Any, scenario: str, of: str, inputs: Iterable[Path] = ()) -> Ledger:
    """Check the CSV and the ledger of a benchmark, and return the ledger. Nothing is created.

    Args:
        config: The knobs ``output``, ``ledger``, ``overwrite``, ``name`` and ``tag``.
        scenario: The kind of benchmark.
        of: What is measured; the run is named by both if ``--name`` is not given.
        inputs: Files and folders that are read.

    Returns:
        The ledger.

    Raises:
        UsageError: Rows or records cannot be added to these files.
    """
    if not config.output.name:
        raise UsageError(f"--output {config.output} cannot be written: it names no file")
    # Rows are added to a CSV.
    ledger = ledger_of(config, f"bench-{scenario}-{of}", inputs, replace=True)
    if not config.overwrite:
        try:
            check_csv(scenario, config.output)
        except UsageError as error:
            raise UsageError(f"--output: {error}; --overwrite replaces it") from error
    return ledger


def ledger_of(config: Any, what: str, inputs: Iterable[Path] = (), *, replace: bool) -> Ledger:
    """The ledger of ``--ledger``, or that beside ``--output``. Both are checked, nothing is
    created.

    Args:
        config: The knobs ``output``, ``ledger``, ``name`` and ``tag``.
        what: What is measured; see `labelled`.
        inputs: Files and folders that are read.
        replace: Whether a file that is no output of ours may be replaced.

    Returns:
        The ledger.

    Raises:
        UsageError: One of them cannot be written, or the ledger's path holds something else.
    """
    ledger = Ledger(config.ledger or config.output.with_suffix(".ledger"))
    check_outputs(("--output", config.output), replace=replace, inputs=[*inputs, ledger.path])
    check_outputs(("--ledger", ledger.path), replace=True, inputs=inputs)
    ledger.records()
    return labelled(ledger, config, what)


def labelled(ledger: Ledger, config: Any, what: str) -> Ledger:
    """Set the labels (name and tags) that a ledger gives to the records of a run.

    Args:
        ledger: The ledger.
        config: The knobs ``name``, ``tag`` and, if there is one, ``resume``.
        what: What is measured; the run gets this name if ``--name`` is not given.

    Returns:
        The ledger. With ``resume`` it keeps the labels of its last record; given labels win.
    """
    last = ledger.records()[-1:] if getattr(config, "resume", False) else []
    before = {"name": last[0].name, "tags": last[0].tags} if last else None
    ledger.labels = run_labels(config, default_name(what), before)
    return ledger


def make_way(scenario: str, path: Path, replace: bool) -> None:
    """Remove a file that is no CSV of such a benchmark, if the user allows it."""
    if replace:
        try:
            check_csv(scenario, path)
        except UsageError:
            path.unlink()


@contextlib.contextmanager
def launcher_of(
    config: Any, inputs: Iterable[str | Path], ledger: Ledger, device: str = "cpu"
) -> Iterator[Launcher]:
    """Yield what runs the launches of a benchmark: this process, or the workers of ``--cluster``.

    At the end it prints notes on the workers that matter for the results.

    Args:
        config: The knobs of `OnWorkers`, and ``resume``.
        inputs: What every launch reads.
        ledger: The ledger of the benchmark. If it is resumed, only workers like those that wrote
            it are used.
        device: The device of the cases.

    Yields:
        The launcher.

    Raises:
        UsageError: The device is one of several, or the workers cannot be reached.
        Incomplete: No worker came.
    """
    if config.cluster is None:
        yield in_turn
        return
    if re.fullmatch(r"cuda:0*[1-9]\d*", device):
        raise UsageError(
            f"--device {device} does not go with --cluster, whose workers have a GPU each: give "
            "--device cuda"
        )
    gpus = len(Nvml()()) if device.startswith(("auto", "cuda")) else 0
    if config.cluster == "local":  # a host runs one case at a time
        config = config.model_copy(update={"cluster": "local:1"})
    variables = dict(os.environ)
    with connect(config, say, libraries=BENCH_LIBRARIES, gpus=gpus) as workers:
        launcher = LaunchesOnCluster(workers, inputs, variables)
        launcher.like(ledger.records() if config.resume else ())
        yield launcher
        for note in launcher.notes():
            print(note, flush=True)


def sweep(
    scenario: str,
    cases: Sequence[Mapping[str, Any]],
    config: Any,
    ledger: Ledger,
    *,
    rules: Mapping[str, Any],
    name: Name,
    outcome: Outcome,
    launches: int,
    **how: Any,
) -> list[Record]:
    """Run the launches of a benchmark and show each when it ends.

    Args:
        scenario: The scenario of all cases.
        cases: The cases.
        config: The knobs ``timeout``, ``seed`` and, if there is one, ``resume``.
        ledger: The ledger of the records.
        rules: Rules for warm-up and samples; see `bench.measure.Rules`.
        name: Names a case.
        outcome: Describes the result of a launch.
        launches: Launches of each case.
        how: Other arguments of `run_sweep`.

    Returns:
        The records of all cases, including those of earlier launches that a resume keeps.
    """
    with shown_launches(name, outcome) as progress:
        return run_sweep(
            scenario,
            cases,
            launches,
            ledger,
            rules=rules,
            timeout_s=config.timeout,
            seed=config.seed,
            resume=getattr(config, "resume", False),
            progress=progress,
            **{"memory_limit": None, **how},
        )


@contextlib.contextmanager
def shown_launches(name: Name, outcome: Outcome) -> Iterator[Callable[[SweepStep], None]]:
    """Show a bar on a terminal, or a line for each launch otherwise; both on standard error."""

    def line(step: SweepStep) -> str:
        end = f"skipped, {step.skipped}" if step.record is None else ended(step.record, outcome)
        return f"{name(step.case)}, launch {step.launch}: {end}"

    def plain(step: SweepStep) -> None:
        if step.record is not None or step.skipped:
            say(f"{step.number} of {step.total}: {line(step)}")

    with drawn_bar("{task.fields[case]}", "launches", case="measuring") as bar:
        if bar is None:
            yield plain
            return

        def update(step: SweepStep) -> None:
            bar.update(total=step.total, completed=step.number, case=name(step.case))
            if (step.record is not None and not step.record.ok) or step.skipped:
                bar.print(line(step), highlight=False, markup=False)

        yield update


def ended(record: Record, outcome: Outcome = lambda record: record.status) -> str:
    """The outcome of a launch, or its failure."""
    if record.ok:
        return outcome(record)
    return record.status + (f" ({record.error.message})" if record.error else "")


def step_outcome(record: Record) -> str:
    """The median step time of a launch, its number of samples, and why sampling stopped."""
    step = format_seconds(statistics.median(record.samples_s["step"]))
    unstable = ", never steady" if record.warmup.settled is False else ""
    return (
        f"{step} a step, {plural(len(record.samples_s['step']), 'sample')} "
        f"({record.stop}{unstable})"
    )


def launches_each(count: int) -> str:
    return f"{plural(count, 'launch')} of each"


def print_written(paths: Iterable[Path]) -> None:
    print("", *(f"Written: {path}" for path in paths), sep="\n")
