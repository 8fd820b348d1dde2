"""Reads runs from files and folders, and recognises each file by its content.

    output of a SLURM job        `slurm_log`
    training_results.json        a run's folder, or any number of them below a folder
    records.jsonl                a ledger: its launches of scenario ``train``
    MLflow                       a database of SQLite
    Comet                        metrics as JSON or CSV, or the archive of an offline experiment
    CSV                          a row for each run; see `tracker_files`

Runs that several files hold are taken once. With several paths, or below a folder, a file that
cannot be read or has no run is skipped with a sentence; a single path is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from ...base import RESULTS, UsageError, natural, plural, read_json, system_errors
from ...instruments import LEDGER_FILE
from ...reports import LOG_SUFFIXES, TRACKER_SUFFIXES, places_at
from ..runs import TrainingRun
from .slurm_log import read_log
from .tracked import Say, TrackedRun, first_three, training_runs
from .tracker_files import comet_archive, comet_runs, mlflow_database, table_runs
from .trainings import results_run, rows_of, runs_of_ledger

KeptRun = TrainingRun | TrackedRun
"""A run as its source keeps it: that of a tracker has all metrics."""
_Item = TypeVar("_Item")
_Held = TypeVar("_Held")


def read_runs(
    paths: Sequence[Path],
    say: Say = lambda sentence: None,
    others: Sequence[TrainingRun] = (),
) -> list[TrainingRun]:
    """The runs of all paths, each once.

    Args:
        paths: Files and folders.
        say: Called with a sentence on each file that is skipped, on runs that are read twice, and
            on times that contradict each other.
        others: Runs that were read before.

    Returns:
        The runs, by devices, nodes, job and attempt.

    Raises:
        UsageError: A path does not exist, or none has a run.
    """
    for path in paths:
        if not os.path.lexists(path):  # a shell's pattern also gives links to nothing
            raise UsageError(f"{path} cannot be read: No such file or directory")
    refused: list[UsageError] = []
    runs = [*_each(dict.fromkeys(paths), partial(_read_path, say=say), refused.append), *others]
    if not runs:
        raise refused[0] if refused else _holds_none(paths[0])
    for why in refused:
        say(f"{why}; it is passed over")
    kept, twice = each_once(runs)
    if twice:
        counts = (
            f"{plural(len(runs), 'run')} are read, and {len(kept)} count{'s' * (len(kept) == 1)}"
        )
        say(f"{counts}: {first_three(twice)}")
    for sentence in filter(None, map(contradiction, kept)):
        say(sentence)
    return sorted(
        kept, key=lambda run: (run.devices, run.nodes or 0, natural(run.job), run.restarts)
    )


def kept_below(folder: Path, say: Say) -> list[TrainingRun]:
    """The runs that logs of jobs and stores of trackers tell of, in a folder and below it.

    What lies in the folder of a run, a training or a ledger is left to it.

    Args:
        folder: The folder.
        say: Takes a sentence on each file that is passed over.

    Returns:
        The runs, in no order.

    Raises:
        UsageError: There are far too many folders.
    """
    files = [place.path for place in places_at(folder) if place.kind == "kept"]
    return list(_passing(files, say))


def _each(
    items: Iterable[_Item],
    read: Callable[[_Item], Iterable[_Held]],
    refuse: Callable[[UsageError], None],
) -> Iterator[_Held]:
    """The content of each item; ``refuse`` is called with the error of one that cannot be read."""
    for item in items:
        try:
            yield from list(read(item))
        except UsageError as error:
            refuse(error)


def _holds_none(path: Path) -> UsageError:
    return UsageError(
        f"{path} holds no run: it is neither the output of a SLURM job, nor a folder with "
        f"{RESULTS}, a ledger of training, a table of runs, or what MLflow or Comet kept; for any "
        "other trainer give a CSV with the columns devices, seconds"
    )


def _read_path(path: Path, say: Say) -> list[TrainingRun]:
    """The runs of a path, at least one."""
    with system_errors(f"{path} cannot be read"):
        if path.exists() and not path.is_dir() and not path.is_file():
            # Opening a pipe would wait for ever.
            raise UsageError(f"{path} is neither a file nor a folder")
        contents = list((_read_folder if path.is_dir() else _read_file)(path, say))
    if not contents:
        raise _holds_none(path)
    return contents


def _read_file(path: Path, say: Say) -> Iterator[TrainingRun]:
    """The content of a file; what trackers kept as trainings."""
    tracked: list[TrackedRun] = []
    for run in runs_of_file(path):
        if isinstance(run, TrackedRun):
            tracked.append(run)
        else:
            yield run
    yield from training_runs(tracked, path, say)


def runs_of_file(path: Path) -> Iterable[KeptRun]:
    """The runs of a file, known by its first bytes, its name, or else its lines.

    Raises:
        UsageError: The file cannot be read.
    """
    with system_errors(f"{path} cannot be read"), path.open("rb") as file:
        head = file.read(4096)
    if head.startswith(b"SQLite format 3\0"):
        return mlflow_database(path)
    if head.startswith(b"PK\x03\x04") or path.suffix == ".zip":
        return comet_archive(path)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return runs_of_ledger(path)
    if path.suffix in (".csv", ".tsv"):
        rows = rows_of(path)
        return list(comet_runs(rows, path)) or table_runs(rows, path)
    if path.suffix == ".json":
        return _runs_of_json(path)
    runs = read_log(path)  # a log may begin with "[rank: 0]", as JSON does
    if runs or not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        return runs
    return _each([path], _runs_of_json, lambda error: None)


def _runs_of_json(path: Path) -> Iterable[KeptRun]:
    value = read_json(path)
    if isinstance(value, dict) and "world_size" in value:
        source = path.parent if path.name == RESULTS else path
        return [results_run(value, str(source), path.parent)]
    return comet_runs(value, path)


def _read_folder(folder: Path, say: Say) -> Iterator[TrainingRun]:
    """The content of a run's folder, a ledger, or all files below a folder with a known name."""
    for name in (RESULTS, LEDGER_FILE):
        if (folder / name).is_file():
            yield from _read_file(folder / name, say)
            return
    ours = [path for name in (RESULTS, LEDGER_FILE) for path in _files(folder, f"**/{name}")]
    logs = _files(folder, *(f"**/*{suffix}" for suffix in LOG_SUFFIXES))
    # A run's own results tell more than its tracker.
    tracked = [
        path
        for path in _files(folder, *(f"**/*{suffix}" for suffix in TRACKER_SUFFIXES))
        if not any((above / RESULTS).is_file() for above in path.parents)
    ]
    yield from _passing([*ours, *tracked, *logs], say)


def _passing(paths: Iterable[Path], say: Say) -> Iterator[TrainingRun]:
    """The content of files that the user did not name, so that they may be something else."""

    bare = list[str]()

    def read(path: Path) -> list[TrainingRun]:
        runs = list(_read_file(path, say))
        # Anybody's log may hold a traceback without a training.
        anybodys = path.name.endswith(LOG_SUFFIXES[2:])
        runs = [run for run in runs if not anybodys or run.seconds or run.epochs or run.batch]
        if not runs and path.name.endswith(LOG_SUFFIXES):
            bare.append(str(path))
        return runs

    yield from _each(paths, read, lambda error: say(f"{error}; it is passed over"))
    if bare:
        say(f"{plural(len(bare), 'log')} without a run passed over: {first_three(bare)}")


def _files(folder: Path, *patterns: str) -> list[Path]:
    """Files, and links to nothing, which get a sentence; no pipes and no folders."""
    paths = sorted(path for pattern in patterns for path in folder.glob(pattern))
    return [path for path in paths if path.is_file() or not path.exists()]


def each_once(runs: Iterable[TrainingRun]) -> tuple[list[TrainingRun], list[str]]:
    """Each run once, and a phrase for each run that was read twice.

    Ledgers, trackers and folders keep a time to its last digit, which no two runs share. A log has
    two digits after the point: it is dropped if another source has a run of the same job and
    devices, with the same attempt or time. If two logs have the same job and time, one is a copy,
    or the job was requeued with nothing left to do and printed its times again. GPU-Util readings
    are kept from either.
    """
    exact: dict[str, TrainingRun] = {}
    logged: dict[str, TrainingRun] = {}
    twice: list[str] = []

    def same(run: TrainingRun, other: TrainingRun) -> TrainingRun:
        twice.append(
            f"{run.source} has job {run.job} twice"
            if run.source == other.source
            else f"{other.source} has the run of {run.source}"
        )
        return replace(run, utilisation=run.utilisation or other.utilisation)

    for run in runs:
        if run.seconds is None or abs(100 * run.seconds - round(100 * run.seconds)) < 1e-6:
            attempt = None if run.complete else (run.restarts, run.epochs, run.status)
            before, key = logged, str((run.job, run.devices, run.seconds, attempt))
        else:
            before, key = exact, str((run.devices, run.seconds))
        other = before.get(key)
        if other is None:
            before[key] = run
        else:
            before[key] = same(*(run, other) if len(run.ranks) > len(other.ranks) else (other, run))
    logs: list[TrainingRun] = []
    for log in logged.values():
        key_of_same = next((key for key, run in exact.items() if _is_log_of(run, log)), None)
        if key_of_same is None:
            logs.append(log)
        else:
            exact[key_of_same] = same(exact[key_of_same], log)
    return [*exact.values(), *logs], twice


def _is_log_of(run: TrainingRun, log: TrainingRun) -> bool:
    """Whether a log is of a run whose time is known more exactly."""
    if (log.job, log.devices) != (run.job, run.devices):
        return False
    alike = log.seconds and run.seconds and abs(log.seconds - run.seconds) < 0.006
    return bool(alike or log.restarts == run.restarts)


def contradiction(run: TrainingRun) -> str | None:
    """A sentence if the training time is not that of its epochs, else None.

    The cause may be ranks that printed at the same time, or a resumed run that does not say so.
    """
    if not (run.complete and run.seconds and run.epochs and run.epoch_seconds):
        return None
    whole = run.epochs * run.epoch_seconds
    if abs(run.seconds - whole) <= 0.006 * run.epochs + 0.02 * run.seconds:
        return None
    return (
        f"{run.source}: {run.seconds:.2f} s in all are not {plural(run.epochs, 'epoch')} of "
        f"{run.epoch_seconds:.2f} s; one of the two is wrong, and then so is the speed-up"
    )
