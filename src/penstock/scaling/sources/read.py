"""Where runs are read from: what a file or a folder is, by what it holds.

    output of a SLURM job        `scaling_logs`
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
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TypeVar

from ...base import RESULTS, UsageError, read_json
from ...instruments import LEDGER_FILE
from ..runs import TrainingRun
from .comet import Archive, comet_archive, comet_experiments, comet_runs
from .mlflow import mlflow_files, mlflow_sqlite
from .ours import results_run, rows_of, runs_of_ledger
from .slurm_log import read_log
from .tracked import Say

_Found = TypeVar("_Found")


def read_runs(paths: Sequence[Path], say: Say = lambda sentence: None) -> list[TrainingRun]:
    """The runs of all paths, each once, by devices and job.

    ``say`` is told what is passed over, what counts once, and which times contradict each other.
    Raises `UsageError` where no path holds a run, and for one that is not there.
    """
    for path in paths:
        if not os.path.lexists(path):  # a link to nothing may come of a shell's pattern
            raise UsageError(f"{path} cannot be read: No such file or directory")
    runs: list[TrainingRun] = []
    parts: list[Archive] = []
    why_not: list[UsageError] = []
    for path in dict.fromkeys(paths):
        before = len(runs) + len(parts)
        try:
            # The parts of an experiment that went on are archives of their own.
            if path.suffix == ".zip" and path.is_file():
                parts += comet_archive(path)
            else:
                runs += list(_read(path, say))
            if len(runs) + len(parts) == before:
                raise _holds_none(path)
        except UsageError as error:
            why_not.append(error)
    runs += comet_experiments(parts, say)
    if not runs:
        raise why_not[0] if why_not else _holds_none(paths[0])
    for why in why_not:
        say(f"{why}; it is passed over")
    kept, twice = _once(runs)
    if twice:
        more = f" and {len(twice) - 3} more" if len(twice) > 3 else ""
        told = f"{len(runs)} runs are read, and {len(kept)} count{'s' * (len(kept) == 1)}"
        say(f"{told}: {', '.join(twice[:3])}{more}")
    for run in kept:
        if contradiction := _contradiction(run):
            say(contradiction)
    return sorted(kept, key=lambda run: (run.devices, run.nodes or 0, run.job, run.restarts))


def _holds_none(path: Path) -> UsageError:
    return UsageError(
        f"{path} holds no run: it is neither the output of a SLURM job, nor a folder with "
        f"{RESULTS}, a ledger of training, or an export of MLflow or Comet"
    )


def _once(runs: Iterable[TrainingRun]) -> tuple[list[TrainingRun], list[str]]:
    """Runs that are told of twice, once, and which these were.

    A ledger, a tracker and a folder know the time to its last digit, which no two runs share. A log
    knows two digits: it is dropped where one of the others is of the same job and devices, and of
    the same attempt or time. Of two logs of a job and of one time, one is a copy, or its job came
    back with nothing left to do and told its times again. How busy the GPUs were is kept, whoever
    knew it.
    """
    exact: dict[str, TrainingRun] = {}
    rest: dict[str, TrainingRun] = {}
    twice: list[str] = []

    def same(run: TrainingRun, other: TrainingRun) -> TrainingRun:
        if run.source == other.source:
            twice.append(f"{run.source} tells of job {run.job} twice")
        else:
            twice.append(f"{other.source} is of the run in {run.source}")
        return replace(run, utilisation=run.utilisation or other.utilisation)

    for run in runs:
        if run.seconds is None or abs(100 * run.seconds - round(100 * run.seconds)) < 1e-6:
            attempt = None if run.complete else (run.restarts, run.epochs, run.status)
            known, key = rest, str((run.job, run.devices, run.seconds, attempt))
        else:
            known, key = exact, str((run.devices, run.seconds))
        other = known.get(key)
        if other is None:
            known[key] = run
        else:
            known[key] = same(*(run, other) if len(run.ranks) > len(other.ranks) else (other, run))
    logs: list[TrainingRun] = []
    for log in rest.values():
        own = [key for key, run in exact.items() if _logged(run, log)]
        for key in own[:1]:
            exact[key] = same(exact[key], log)
        logs += () if own else (log,)
    return [*exact.values(), *logs], twice


def _logged(run: TrainingRun, log: TrainingRun) -> bool:
    """Whether a log is of a run that something else knows more exactly."""
    alike = log.seconds and run.seconds and abs(log.seconds - run.seconds) < 0.006
    own = (log.job, log.devices) == (run.job, run.devices)
    return own and bool(alike or log.restarts == run.restarts)


def _contradiction(run: TrainingRun) -> str | None:
    """Of a time and what an epoch took: words that several ranks wrote at once, or a resumed run
    that does not say so."""
    if not (run.complete and run.seconds and run.epochs and run.epoch_seconds):
        return None
    whole = run.epochs * run.epoch_seconds
    if abs(run.seconds - whole) <= 0.006 * run.epochs + 0.02 * run.seconds:
        return None
    return (
        f"{run.source}: {run.seconds:.2f} s in all are not {run.epochs} epochs of "
        f"{run.epoch_seconds:.2f} s; one of the two is wrong, and then so is the speed-up"
    )


def _read(path: Path, say: Say) -> Iterator[TrainingRun]:
    try:
        if path.is_dir():
            yield from _read_folder(path, say)
            return
        if path.exists() and not path.is_file():  # a pipe would keep whoever opens it
            raise UsageError(f"{path} is neither a file nor a folder")
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if head.startswith(b"SQLite format 3\0"):
        yield from mlflow_sqlite(path, say)
    elif head.startswith(b"PK\x03\x04"):
        yield from comet_experiments(comet_archive(path), say)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from runs_of_ledger(path)
    elif path.suffix == ".csv":
        yield from comet_runs(rows_of(path), path, say)
    elif path.suffix == ".json":
        yield from _read_json(path, say)
    elif runs := read_log(path):  # which may begin with "[rank: 0]", as JSON does
        yield from runs
    elif head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        yield from _or_pass(path, lambda path: _read_json(path, say), lambda sentence: None)


def _read_json(path: Path, say: Say) -> Iterator[TrainingRun]:
    value = read_json(path)
    if isinstance(value, dict) and "world_size" in value:
        yield results_run(value, str(path), path.parent)
    else:
        yield from comet_runs(value, path, say)


def _read_folder(folder: Path, say: Say) -> Iterator[TrainingRun]:
    """Everything below a folder that is known for what it is by its name."""
    if (folder / RESULTS).is_file():
        yield results_run(read_json(folder / RESULTS), str(folder), folder)
        return
    if (folder / LEDGER_FILE).is_file():
        yield from runs_of_ledger(folder)
        return
    readers: tuple[tuple[Iterable[Path], Callable[[Path], Iterable[TrainingRun]]], ...] = (
        (_files(folder, f"**/{RESULTS}"), _results_of),
        (_files(folder, f"**/{LEDGER_FILE}"), runs_of_ledger),
        (_of_trackers(folder, "**/*.db"), lambda path: mlflow_sqlite(path, say)),
        (_files(folder, "**/*.out"), read_log),
        (_files(folder, "**/*.log"), _training_log),
        ([folder], lambda path: mlflow_files(path, say)),
    )
    for paths, read in readers:
        for path in paths:
            yield from _or_pass(path, read, say)
    parts = (_or_pass(path, comet_archive, say) for path in _of_trackers(folder, "**/*.zip"))
    yield from comet_experiments(chain.from_iterable(parts), say)


def _results_of(path: Path) -> list[TrainingRun]:
    return [results_run(read_json(path), str(path.parent), path.parent)]


def _training_log(path: Path) -> list[TrainingRun]:
    """Of a file that may be anybody's log, and so may hold a traceback without a training."""
    return [run for run in read_log(path) if run.seconds or run.epochs or run.batch]


def _files(folder: Path, pattern: str) -> list[Path]:
    """Also links to nothing, of which something is said; but no pipes, and no folders."""
    return [path for path in sorted(folder.glob(pattern)) if path.is_file() or not path.exists()]


def _of_trackers(folder: Path, pattern: str) -> list[Path]:
    """Files outside of the folders of runs, which tell more than what trackers keep in them."""
    found = _files(folder, pattern)
    return [path for path in found if not any((p / RESULTS).is_file() for p in path.parents)]


def _or_pass(path: Path, read: Callable[[Path], Iterable[_Found]], say: Say) -> list[_Found]:
    """What a file holds, or nothing where it is of something else: nobody asked for it by name."""
    try:
        return list(read(path))
    except UsageError as error:
        say(f"{error}; it is passed over")
        return []
