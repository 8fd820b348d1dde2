"""Reads runs from files and folders, and recognises each file by its content.

    output of a SLURM job        `slurm_log`
    training_results.json        a run's folder, or any number of them below a folder
    records.jsonl                a ledger: its launches of scenario ``train``
    MLflow                       a store of files (``mlruns``) or a database of SQLite
    Comet                        metrics as JSON or CSV, or the archive of an offline experiment
    W&B                          files of offline runs

Runs that several files hold are taken once. With several paths, or below a folder, a file that
cannot be read or has no run is skipped with a sentence; a single path is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from ...base import RESULTS, UsageError, read_json, system_errors
from ...instruments import LEDGER_FILE
from ..runs import TrainingRun
from .comet import CometArchive, comet_archive, comet_experiment, comet_runs, experiments_of
from .mlflow import mlflow_database, mlflow_files
from .once import contradiction, each_once
from .ours import results_run, rows_of, runs_of_ledger
from .slurm_log import read_log
from .tracked import Say, TrackedRun, training_runs
from .wandb import SUFFIX, wandb_runs

Contents = TrainingRun | CometArchive
"""The content of a file. Each part of a resumed experiment is an archive."""
KeptRun = TrainingRun | TrackedRun | CometArchive
"""A run as its source keeps it: that of a tracker has all metrics."""
_Item = TypeVar("_Item")
_Held = TypeVar("_Held")


def read_runs(paths: Sequence[Path], say: Say = lambda sentence: None) -> list[TrainingRun]:
    """The runs of all paths, each once.

    Args:
        paths: Files and folders.
        say: Called with a sentence on each file that is skipped, on runs that are read twice, and
            on times that contradict each other.

    Returns:
        The runs, by devices, nodes, job and attempt.

    Raises:
        UsageError: A path does not exist, or none has a run.
    """
    for path in paths:
        if not os.path.lexists(path):  # a shell's pattern also gives links to nothing
            raise UsageError(f"{path} cannot be read: No such file or directory")
    refused: list[UsageError] = []
    contents = list(_each(dict.fromkeys(paths), partial(_read_path, say=say), refused.append))
    runs = [run for run in contents if isinstance(run, TrainingRun)]
    parts = experiments_of(part for part in contents if isinstance(part, CometArchive))
    runs += _each(
        parts,
        lambda parts: training_runs([comet_experiment(parts)], parts[0].path, say),
        refused.append,
    )
    if not runs:
        raise refused[0] if refused else _holds_none(paths[0])
    for why in refused:
        say(f"{why}; it is passed over")
    kept, twice = each_once(runs)
    if twice:
        more = f" and {len(twice) - 3} more" if len(twice) > 3 else ""
        counts = f"{len(runs)} runs are read, and {len(kept)} count{'s' * (len(kept) == 1)}"
        say(f"{counts}: {', '.join(twice[:3])}{more}")
    for sentence in filter(None, map(contradiction, kept)):
        say(sentence)
    return sorted(kept, key=lambda run: (run.devices, run.nodes or 0, run.job, run.restarts))


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
        f"{RESULTS}, a ledger of training, or what MLflow, Comet or W&B kept"
    )


def _read_path(path: Path, say: Say) -> list[Contents]:
    """The content of a path, at least one run or archive."""
    with system_errors(f"{path} cannot be read"):
        if path.exists() and not path.is_dir() and not path.is_file():
            # Opening a pipe would wait for ever.
            raise UsageError(f"{path} is neither a file nor a folder")
        contents = list((_read_folder if path.is_dir() else _read_file)(path, say))
    if not contents:
        raise _holds_none(path)
    return contents


def _read_file(path: Path, say: Say) -> Iterator[Contents]:
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
    if path.suffix == SUFFIX:
        return wandb_runs([path])
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return runs_of_ledger(path)
    if path.suffix == ".csv":
        return comet_runs(rows_of(path), path)
    if path.suffix == ".json":
        return _runs_of_json(path)
    runs = read_log(path)  # a log may begin with "[rank: 0]", as JSON does
    if runs or not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        return runs
    return _each([path], _runs_of_json, lambda error: None)


def _runs_of_json(path: Path) -> Iterable[KeptRun]:
    value = read_json(path)
    if isinstance(value, dict) and "world_size" in value:
        return [results_run(value, str(path), path.parent)]
    return comet_runs(value, path)


def _read_folder(folder: Path, say: Say) -> Iterator[Contents]:
    """The content of a run's folder, a ledger, or all files below a folder with a known name."""
    if (folder / RESULTS).is_file():
        yield from _results_of(folder / RESULTS)
        return
    if (folder / LEDGER_FILE).is_file():
        yield from runs_of_ledger(folder)
        return
    readers: tuple[tuple[Iterable[Path], Callable[[Path], Iterable[Contents]]], ...] = (
        (_files(folder, f"**/{RESULTS}"), _results_of),
        (_files(folder, f"**/{LEDGER_FILE}"), runs_of_ledger),
        (_of_trackers(folder, "**/*.db"), lambda p: training_runs(mlflow_database(p), p, say)),
        (_files(folder, "**/*.out", "**/*.out.gz"), read_log),
        # Anybody's log may hold a traceback without a training.
        (
            _files(folder, "**/*.log", "**/*.log.gz"),
            lambda p: [run for run in read_log(p) if run.seconds or run.epochs or run.batch],
        ),
        ([folder], lambda p: training_runs(mlflow_files(p), p, say)),
        (_of_trackers(folder, "**/*.zip"), comet_archive),
        (
            [folder],
            lambda p: training_runs(wandb_runs(_of_trackers(p, f"**/*{SUFFIX}")), p, say),
        ),
    )
    for paths, read in readers:
        # The user did not name these files, so they may be something else.
        yield from _each(paths, read, lambda error: say(f"{error}; it is passed over"))


def _results_of(path: Path) -> list[TrainingRun]:
    return [results_run(read_json(path), str(path.parent), path.parent)]


def _files(folder: Path, *patterns: str) -> list[Path]:
    """Files, and links to nothing, which get a sentence; no pipes and no folders."""
    paths = sorted(path for pattern in patterns for path in folder.glob(pattern))
    return [path for path in paths if path.is_file() or not path.exists()]


def _of_trackers(folder: Path, pattern: str) -> list[Path]:
    """Files outside of the folders of runs: a run's own results tell more than its tracker."""
    files = _files(folder, pattern)
    return [path for path in files if not any((p / RESULTS).is_file() for p in path.parents)]
