"""Where runs are read from: what a file or a folder is, by what it holds.

    output of a SLURM job        `scaling_logs`
    training_results.json        a run's folder, or any number of them below a folder
    records.jsonl                a ledger: its launches of scenario ``train``
    MLflow                       a store of files (``mlruns``) or a database of SQLite
    Comet                        metrics as JSON or CSV, or the archive of an offline experiment

What is found below a folder is taken together, each run once.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from . import events, ledger
from .errors import UsageError
from .scaling import Run, Status
from .scaling_logs import plain, read_log, settings_of
from .scaling_tracked import (
    Say,
    comet_archive,
    comet_experiments,
    comet_runs,
    mlflow_files,
    mlflow_sqlite,
)
from .straggler import WAIT, rank_of

RESULTS = "training_results.json"
_STATUS: Mapping[str, Status] = {"complete": "complete", "stopped": "stopped"}
_GPU_BUSY = re.compile(r"system/gpu(\d+)_util_percent")
_Found = TypeVar("_Found")


def read_runs(paths: Sequence[Path], say: Say = lambda sentence: None) -> list[Run]:
    """The runs of all paths, each once, by devices and job.

    ``say`` is told what is passed over. Raises `UsageError` for a path that holds no run.
    """
    # The parts of an experiment that went on are archives of their own.
    archives = [path for path in paths if path.suffix == ".zip" and path.is_file()]
    runs = list(_read_archives(archives, say))
    if archives and not runs:
        raise _holds_none(archives[0])
    for path in paths:
        if path not in archives:
            found = list(_read(path, say))
            if not found:
                raise _holds_none(path)
            runs += found
    return sorted(_once(runs), key=lambda run: (run.devices, run.nodes or 0, run.job, run.restarts))


def _holds_none(path: Path) -> UsageError:
    return UsageError(
        f"{path} holds no run: it is neither the output of a SLURM job, nor a folder with "
        f"{RESULTS}, a ledger of training, or an export of MLflow or Comet"
    )


def _once(runs: Iterable[Run]) -> list[Run]:
    """Runs that are told of twice, once.

    A ledger, a tracker and a folder know the time to its last digit, which no two runs share. A log
    knows two digits: it is dropped where one of the others is of the same job and devices. How busy
    the GPUs were is kept, whoever knew it.
    """
    exact: dict[tuple[int, float], Run] = {}
    rest: dict[tuple[str, int, int], list[Run]] = {}
    for run in runs:
        if run.seconds is None or abs(100 * run.seconds - round(100 * run.seconds)) < 1e-6:
            rest.setdefault((run.job, run.restarts, run.devices), []).append(run)
        else:
            known = exact.setdefault((run.devices, run.seconds), run)
            fuller, other = (run, known) if len(run.ranks) > len(known.ranks) else (known, run)
            exact[run.devices, run.seconds] = _busier(fuller, other)
    for key, run in exact.items():
        for log in rest.get((run.job, run.restarts, run.devices), ()):
            exact[key] = _busier(exact[key], log)
    for run in exact.values():
        rest.pop((run.job, run.restarts, run.devices), None)
    return [*exact.values(), *(run for own in rest.values() for run in own)]


def _busier(run: Run, other: Run) -> Run:
    return replace(run, utilisation=run.utilisation or other.utilisation)


def _read(path: Path, say: Say) -> Iterator[Run]:
    try:
        if path.is_dir():
            yield from _read_folder(path, say)
            return
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    if head.startswith(b"SQLite format 3\0"):
        yield from mlflow_sqlite(path, say)
    elif head.startswith(b"PK\x03\x04"):
        yield from _read_archives([path], say)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _ledger(path)
    elif path.suffix == ".csv":
        yield from comet_runs(_rows(path), path, say)
    elif path.suffix == ".json":
        yield from _read_json(path, say)
    elif runs := read_log(path):  # which may begin with "[rank: 0]", as JSON does
        yield from runs
    elif head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith((b"{", b"[")):
        yield from _or_pass(path, lambda path: _read_json(path, say), lambda sentence: None)


def _read_json(path: Path, say: Say) -> Iterator[Run]:
    value = read_json(path)
    if isinstance(value, dict) and "world_size" in value:
        yield results_run(value, str(path), path.parent)
    else:
        yield from comet_runs(value, path, say)


def _read_archives(paths: Iterable[Path], say: Say) -> Iterator[Run]:
    return comet_experiments((part for path in paths for part in comet_archive(path)), say)


def _read_folder(folder: Path, say: Say) -> Iterator[Run]:
    """Everything below a folder that is known for what it is by its name."""
    if (folder / RESULTS).is_file():
        yield results_run(read_json(folder / RESULTS), str(folder), folder)
        return
    if (folder / ledger.FILE).is_file():
        yield from _ledger(folder)
        return
    for path in sorted(folder.glob(f"**/{RESULTS}")):
        yield results_run(read_json(path), str(path.parent), path.parent)
    for path in sorted(folder.glob(f"**/{ledger.FILE}")):
        yield from _ledger(path)
    for path in _of_trackers(folder, "**/*.db"):
        yield from _or_pass(path, lambda path: mlflow_sqlite(path, say), say)
    parts = [
        part
        for path in _of_trackers(folder, "**/*.zip")
        for part in _or_pass(path, comet_archive, say)
    ]
    yield from comet_experiments(parts, say)
    for path in sorted(folder.glob("**/*.out")):
        yield from read_log(path)
    yield from mlflow_files(folder, say)


def _of_trackers(folder: Path, pattern: str) -> list[Path]:
    """Files outside of the folders of runs, which tell more than what trackers keep in them."""
    found = sorted(folder.glob(pattern))
    return [path for path in found if not any((p / RESULTS).is_file() for p in path.parents)]


def _or_pass(path: Path, read: Callable[[Path], Iterable[_Found]], say: Say) -> list[_Found]:
    """What a file holds, or nothing where it is of something else: nobody asked for it by name."""
    try:
        return list(read(path))
    except UsageError as error:
        say(f"{error}; it is passed over")
        return []


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error}") from error


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            return list(csv.DictReader(file))
    except (OSError, csv.Error) as error:
        raise UsageError(f"{path} is not a CSV: {error}") from error


# --- ours ---------------------------------------------------------------------------------------


def _ledger(path: Path) -> Iterator[Run]:
    for record in ledger.read(path):
        if record.scenario != "train":
            continue
        # The epochs of a case were asked for; those of its results were done.
        told = {"world_size": 1, **record.case, "epochs": None}
        told |= record.facts.get("training") or {}
        run = results_run(told, f"{path} {record.id}", None)
        used = (record.facts.get("utilisation") or {}).get("gpu_percent")
        status = run.status if record.ok else "crashed"
        yield replace(run, status=status, utilisation=() if used is None else (used,))


def results_run(told: Any, source: str, folder: Path | None) -> Run:
    """A run as `training_results.json` tells it, with the steps of its ranks beside it."""
    try:
        return _results_run(told, source, folder)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{source} is not what a training left: {error!r}") from error


def _results_run(told: Mapping[str, Any], source: str, folder: Path | None) -> Run:
    launch = told.get("launch") or {}
    asked = read_json(folder / "args.json") if folder and (folder / "args.json").is_file() else told
    ranks = []
    for rank in told.get("ranks") or ():
        totals = {name: phase["total_s"] for name, phase in rank["phases"].items() if phase}
        made = rank_of(int(rank["rank"]), totals, _steps(folder, rank["rank"]))
        if not made.local:
            local, waits = _medians(rank["phases"])
            made = replace(made, local=local, waits=waits)
        ranks.append(replace(made, host=rank.get("host")))
    hosts = {rank.host for rank in ranks if rank.host}
    epochs = told.get("epochs") or 0
    seconds = (told.get("training_s") or 0.0) + (told.get("validation_s") or 0.0)
    scores = [*(told.get("history") or ()), told.get("final") or {}]
    losses = [row["val_loss"] for row in scores if row.get("val_loss") is not None]
    right = [row["val_acc"] for row in scores if row.get("val_acc") is not None]
    known = {name: told.get(name) for name in ("workload", "parameters")}
    settings = settings_of({**asked, **known})
    if told.get("device") is not None:
        settings["device"] = plain(told["device"])
    return Run(
        source=source,
        job=str(launch.get("job_id") or (folder.name if folder else source.rpartition(" ")[2])),
        name=str(launch.get("job_name") or told.get("workload") or "train"),
        devices=int(told["world_size"]),
        nodes=launch.get("nodes") or len(hosts) or None,
        seconds=seconds if epochs else None,
        epochs=epochs or None,
        planned_epochs=None if asked is told or asked.get("max_steps") else asked.get("epochs"),
        samples=round(told["samples"] / epochs) if epochs and told.get("samples") else None,
        batch=told.get("batch_size"),
        global_batch=told.get("global_batch_size"),
        steps=round(told["steps"] / epochs) if epochs and told.get("steps") else None,
        val_loss=min(losses, default=None),
        val_acc=max(right, default=None),
        status=_STATUS.get(told.get("status", ""), "unfinished"),
        restarts=launch.get("restarts") or 0,
        device=told.get("device"),
        ranks=tuple(ranks),
        utilisation=_busy(folder, int(told["world_size"]), launch.get("nodes") or 1),
        settings=settings,
    )


def _steps(folder: Path | None, rank: int) -> list[dict[str, str]]:
    path = folder / "steps" / f"rank{rank}.csv" if folder else None
    return _rows(path) if path and path.is_file() else []


def _busy(folder: Path | None, devices: int, nodes: int) -> tuple[float, ...]:
    """Readings of the GPUs of the first rank's node, as a run that was tracked tells them.

    None where it saw more of them than it used: nobody tells which of them were its own.
    """
    path = folder / events.EVENTS if folder else None
    if path is None or not path.is_file():
        return ()
    readings = [
        (found[1], value)
        for _, event in events.read(path)
        if event["event"] == "system"
        for name, value in event.get("metrics", {}).items()
        if (found := _GPU_BUSY.fullmatch(name)) and isinstance(value, int | float)
    ]
    own = len({gpu for gpu, _ in readings}) <= -(-devices // nodes)
    return tuple(float(value) for _, value in readings) if own else ()


def _medians(phases: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What a rank did by itself and waited, from the medians of its phases."""
    known = {name: phase["median_s"] for name, phase in phases.items() if phase}
    if "step" not in known or WAIT not in known:
        return (), ()
    own = sum(value for name, value in known.items() if name not in ("step", WAIT))
    return (own,), (known[WAIT],)
