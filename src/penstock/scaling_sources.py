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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import ledger
from .errors import UsageError
from .scaling import Run, Status
from .scaling_logs import plain, read_log
from .scaling_tracked import comet_archive, comet_runs, mlflow_files, mlflow_sqlite
from .straggler import WAIT, rank_of

RESULTS = "training_results.json"
_COMPARED = (
    "epochs", "learning_rate", "optimizer", "weight_decay", "schedule", "precision", "model",
    "hidden_dims", "noise", "dropout", "channels_last", "compile", "max_steps",
)  # fmt: skip
"""Knobs of a training that must be equal among runs; batches and devices are what is studied."""

_CALLED = {"epochs": "number of epochs", "hidden_dims": "hidden layers"}

_STATUS: Mapping[str, Status] = {"complete": "complete", "stopped": "stopped"}


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs of all paths, each once, by devices and job.

    Raises `UsageError` for a path that holds none.
    """
    runs: list[Run] = []
    for path in paths:
        found = list(_read(path))
        if not found:
            raise UsageError(
                f"{path} holds no run: it is neither the output of a SLURM job, nor a folder with "
                f"{RESULTS}, a ledger of training, or an export of MLflow or Comet"
            )
        runs += found
    return sorted(_once(runs), key=lambda run: (run.devices, run.nodes or 0, run.job, run.restarts))


def _once(runs: Iterable[Run]) -> list[Run]:
    """Runs that are told of twice, once.

    A ledger, a tracker and a folder know the time to its last digit, which no two runs share. A log
    knows two digits: it is dropped where one of the others is of the same job and devices.
    """
    exact: dict[tuple[int, float], Run] = {}
    rest: list[Run] = []
    for run in runs:
        if run.seconds is None or abs(100 * run.seconds - round(100 * run.seconds)) < 1e-6:
            rest.append(run)
        else:
            key = run.devices, run.seconds
            exact[key] = max(exact.get(key, run), run, key=lambda known: len(known.ranks))
    jobs = {(run.job, run.restarts, run.devices) for run in exact.values()}
    return [*exact.values(), *(r for r in rest if (r.job, r.restarts, r.devices) not in jobs)]


def _read(path: Path) -> Iterator[Run]:
    try:
        if path.is_dir():
            yield from _read_folder(path)
            return
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if head.startswith(b"SQLite format 3\0"):
        yield from mlflow_sqlite(path)
    elif head.startswith(b"PK\x03\x04"):
        yield from comet_archive(path)
    elif path.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _ledger(path)
    elif start[:1] in (b"{", b"["):
        value = read_json(path)
        if isinstance(value, dict) and "world_size" in value:
            yield results_run(value, str(path), path.parent)
        else:
            yield from comet_runs(value, path)
    elif path.suffix == ".csv":
        yield from comet_runs(_rows(path), path)
    else:
        yield from read_log(path)


def _read_folder(folder: Path) -> Iterator[Run]:
    """Everything below a folder that is known for what it is by its name."""
    if (folder / RESULTS).is_file():
        yield results_run(read_json(folder / RESULTS), str(folder), folder)
        return
    if (folder / ledger.FILE).is_file():
        yield from _ledger(folder)
        return
    readers: tuple[tuple[str, Callable[[Path], Iterable[Run]]], ...] = (
        (f"**/{RESULTS}", lambda p: [results_run(read_json(p), str(p.parent), p.parent)]),
        (f"**/{ledger.FILE}", _ledger),
        ("**/*.db", _read),
        ("**/*.zip", _read),
        ("**/*.out", read_log),
    )
    for pattern, read in readers:
        for path in sorted(folder.glob(pattern)):
            # A run's own folder tells more than what trackers keep in it.
            if read is not _read or not any((p / RESULTS).is_file() for p in path.parents):
                yield from read(path)
    yield from mlflow_files(folder)


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
    settings = {
        _CALLED.get(name, name.replace("_", " ")): plain(asked[name])
        for name in _COMPARED
        if asked.get(name) is not None
    }
    for name in ("workload", "parameters", "device"):
        if told.get(name) is not None:
            settings[name] = plain(told[name])
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
        settings=settings,
    )


def _steps(folder: Path | None, rank: int) -> list[dict[str, str]]:
    path = folder / "steps" / f"rank{rank}.csv" if folder else None
    return _rows(path) if path and path.is_file() else []


def _medians(phases: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """What a rank did by itself and waited, from the medians of its phases."""
    known = {name: phase["median_s"] for name, phase in phases.items() if phase}
    if "step" not in known or WAIT not in known:
        return (), ()
    own = sum(value for name, value in known.items() if name not in ("step", WAIT))
    return (own,), (known[WAIT],)
