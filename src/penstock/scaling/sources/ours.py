"""Runs as Penstock's own trainings and ledgers hold them."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base import ARGS, STEPS, UsageError, read_json
from ...instruments import read_ledger
from ...training import EVENTS, read_events
from ..runs import Status, TrainingRun
from ..straggler import WAIT, rank_of
from .settings import plain, settings_of

_STATUS: Mapping[str, Status] = {"complete": "complete", "stopped": "stopped"}
_GPU_BUSY = re.compile(r"system/gpu(\d+)_util_percent")


def rows_of(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
            return list(csv.DictReader(file))
    except (OSError, csv.Error) as error:
        raise UsageError(f"{path} is not a CSV: {error}") from error


def runs_of_ledger(path: Path) -> Iterator[TrainingRun]:
    for record in read_ledger(path):
        if record.scenario != "train":
            continue
        # The epochs of a case were asked for; those of its results were done.
        told = {"world_size": 1, **record.case, "epochs": None}
        told |= record.facts.get("training") or {}
        run = results_run(told, f"{path} {record.id}", None)
        used = (record.facts.get("utilisation") or {}).get("gpu_percent")
        status = run.status if record.ok else "crashed"
        yield replace(run, status=status, utilisation=() if used is None else (used,))


def results_run(told: Any, source: str, folder: Path | None) -> TrainingRun:
    """A run as `training_results.json` tells it, with the steps of its ranks beside it."""
    try:
        return _results_run(told, source, folder)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{source} is not what a training left: {error!r}") from error


def _results_run(told: Mapping[str, Any], source: str, folder: Path | None) -> TrainingRun:
    launch = told.get("launch") or {}
    asked = read_json(folder / ARGS) if folder and (folder / ARGS).is_file() else told
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
    # JSON has no NaN: a loss that is there and null was not finite.
    diverged = any("val_loss" in row and row["val_loss"] is None for row in scores)
    diverged |= not all(map(math.isfinite, losses))
    right = [row["val_acc"] for row in scores if row.get("val_acc") is not None]
    known = {name: told.get(name) for name in ("workload", "parameters")}
    settings = settings_of({**asked, **known})
    if told.get("device") is not None:
        settings["device"] = plain(told["device"])
    return TrainingRun(
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
        val_loss=min(filter(math.isfinite, losses), default=None),
        val_acc=max(right, default=None),
        diverged=diverged,
        status=_STATUS.get(told.get("status", ""), "unfinished"),
        restarts=launch.get("restarts") or 0,
        device=told.get("device"),
        ranks=tuple(ranks),
        utilisation=_busy(folder, int(told["world_size"]), launch.get("nodes") or 1),
        gradient_bytes=told.get("gradient_bytes"),
        settings=settings,
    )


def _steps(folder: Path | None, rank: int) -> list[dict[str, str]]:
    path = folder / STEPS / f"rank{rank}.csv" if folder else None
    return rows_of(path) if path and path.is_file() else []


def _busy(folder: Path | None, devices: int, nodes: int) -> tuple[float, ...]:
    """Readings of the GPUs of the first rank's node, as a run that was tracked tells them.

    None where it saw more of them than it used: nobody tells which of them were its own.
    """
    path = folder / EVENTS if folder else None
    if path is None or not path.is_file():
        return ()
    readings = [
        (found[1], value)
        for _, event in read_events(path)
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
