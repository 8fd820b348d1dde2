"""Where runs are read from: what a file or a folder is, by what it holds.

    output of a SLURM job        `slurm_log`
    training_results.json        a run's folder, or any number of them below a folder
    records.jsonl                a ledger: its launches of scenario ``train``
    MLflow                       a store of files (``mlruns``) or a database of SQLite
    Comet                        metrics as JSON or CSV, or the archive of an offline experiment

What is found below a folder is taken together, each run once. Of several paths, and below a folder,
what cannot be read or holds no run is passed over with a word; a path alone is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from ...base import RESULTS, UsageError, read_json
from ...instruments import LEDGER_FILE
from ..runs import TrainingRun
from .comet import CometArchive, comet_archive, comet_experiment, comet_runs, experiments_of
from .mlflow import mlflow_database, mlflow_files
from .once import contradiction, each_once
from .ours import results_run, rows_of, runs_of_ledger
from .slurm_log import read_log
from .tracked import Say, training_runs

Contents = TrainingRun | CometArchive
"""What a file holds. The parts of an experiment that went on are archives of their own."""
_Item = TypeVar("_Item")
_Held = TypeVar("_Held")


def read_runs(paths: Sequence[Path], say: Say = lambda sentence: None) -> list[TrainingRun]:
    """The runs of all paths, each once, by devices and job.

    ``say`` is told what is passed over, what counts once, and which times contradict each other.
    Raises `UsageError` where no path holds a run, and for one that is not there.
    """
    for path in paths:
        if not os.path.lexists(path):  # a link to nothing may come of a shell's pattern
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
    """What each item holds; ``refuse`` takes the error of one that cannot be read."""
    for item in items:
        try:
            yield from list(read(item))
        except UsageError as error:
            refuse(error)


def _holds_none(path: Path) -> UsageError:
    return UsageError(
        f"{path} holds no run: it is neither the output of a SLURM job, nor a folder with "
        f"{RESULTS}, a ledger of training, or an export of MLflow or Comet"
    )


def _read_path(path: Path, say: Say) -> list[Contents]:
    """All that a path holds, which is something."""
    try:
        if path.exists() and not path.is_dir() and not path.is_file():
            # A pipe would keep whoever opens it.
            raise UsageError(f"{path} is neither a file nor a folder")
        contents = list((_read_folder if path.is_dir() else _read_file)(path, say))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if not contents:
        raise _holds_none(path)
    return contents


def _read_file(path: Path, say: Say) -> Iterable[Contents]:
    """What a file holds, by its first bytes, its name, or else its lines."""
    with path.open("rb") as file:
        head = file.read(4096)
    if head.startswith(b"SQLite format 3\0"):
        return training_runs(mlflow_database(path), path, say)
    if head.startswith(b"PK\x03\x04") or path.suffix == ".zip":
        return comet_archive(path)
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return runs_of_ledger(path)
    if path.suffix == ".csv":
        return training_runs(comet_runs(rows_of(path), path), path, say)
    if path.suffix == ".json":
        return _read_json(path, say)
    runs = read_log(path)  # which may begin with "[rank: 0]", as JSON does
    if runs or not head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        return runs
    return _each([path], partial(_read_json, say=say), lambda error: None)


def _read_json(path: Path, say: Say) -> Iterable[TrainingRun]:
    value = read_json(path)
    if isinstance(value, dict) and "world_size" in value:
        return [results_run(value, str(path), path.parent)]
    return training_runs(comet_runs(value, path), path, say)


def _read_folder(folder: Path, say: Say) -> Iterator[Contents]:
    """Everything below a folder that is known for what it is by its name."""
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
        (_files(folder, "**/*.out"), read_log),
        # Anybody's log may hold a traceback without a training.
        (
            _files(folder, "**/*.log"),
            lambda p: [run for run in read_log(p) if run.seconds or run.epochs or run.batch],
        ),
        ([folder], lambda p: training_runs(mlflow_files(p), p, say)),
        (_of_trackers(folder, "**/*.zip"), comet_archive),
    )
    for paths, read in readers:
        # Nobody asked by name for what lies below a folder: it may be of something else.
        yield from _each(paths, read, lambda error: say(f"{error}; it is passed over"))


def _results_of(path: Path) -> list[TrainingRun]:
    return [results_run(read_json(path), str(path.parent), path.parent)]


def _files(folder: Path, pattern: str) -> list[Path]:
    """Also links to nothing, of which something is said; but no pipes, and no folders."""
    return [path for path in sorted(folder.glob(pattern)) if path.is_file() or not path.exists()]


def _of_trackers(folder: Path, pattern: str) -> list[Path]:
    """Files outside of the folders of runs, which tell more than what trackers keep in them."""
    files = _files(folder, pattern)
    return [path for path in files if not any((p / RESULTS).is_file() for p in path.parents)]
