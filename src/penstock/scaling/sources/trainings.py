"""Runs of Penstock's own trainings, from their folders and from ledgers."""

from __future__ import annotations

import contextlib
import csv
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base import ARGS, STEPS, UsageError, as_usage_error, read_json, well_formed
from ...instruments import PHASES, read_ledger
from ...training import read_machine_metrics
from ..runs import WAIT, Rank, Status, TrainingRun, plain, settings_of

_STATUS: Mapping[str, Status] = {"complete": "complete", "stopped": "stopped"}
_GPU_BUSY = re.compile(r"system/gpu(\d+)_util_percent")


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV, whose fields are parted by commas, semicolons or tabs."""
    with (
        as_usage_error(f"{path} is not a CSV", OSError, csv.Error),
        path.open(newline="", encoding="utf-8-sig", errors="replace") as file,
    ):
        mark = max(",;\t", key=file.readline().count)
        file.seek(0)
        table = csv.DictReader(file, delimiter=mark, skipinitialspace=True)
        rows, columns = list(table), Counter(table.fieldnames)
    if twice := [name for name, count in columns.items() if count > 1 and name]:
        raise UsageError(f"{path} has two columns of the name {twice[0]}")
    return rows


def runs_of_ledger(path: Path) -> Iterator[TrainingRun]:
    for record in (record for record in read_ledger(path) if record.scenario == "train"):
        # A case has the planned epochs, and its results have those done.
        results = {"world_size": 1, **record.case, "epochs": None}
        results |= record.facts.get("training") or {}
        run = results_run(results, f"{path} {record.id}", None)
        used = (record.facts.get("utilisation") or {}).get("gpu_percent")
        status = run.status if record.ok else "crashed"
        yield replace(run, status=status, utilisation=() if used is None else (used,))


def results_run(results: Any, source: str, folder: Path | None) -> TrainingRun:
    """The run of a `training_results.json`, with the steps of its ranks from its folder.

    Args:
        results: Content of the file.
        source: The place that the run names as its source.
        folder: The folder of the training; None if it is not available.

    Returns:
        The run.

    Raises:
        UsageError: The content is not that of `training_results.json`.
    """
    with well_formed(f"{source} is not what a training left"):
        return _results_run(results, source, folder)


def _results_run(results: Mapping[str, Any], source: str, folder: Path | None) -> TrainingRun:
    job = results.get("launch") or {}
    asked = read_json(folder / ARGS) if folder and (folder / ARGS).is_file() else results
    ranks = []
    for rank in results.get("ranks") or ():
        totals = {name: phase["total_s"] for name, phase in rank["phases"].items() if phase}
        local = own_work(_steps(folder, rank["rank"]))
        ranks.append(Rank(int(rank["rank"]), totals, local, host=rank.get("host")))
    epochs = results.get("epochs") or 0
    seconds = (results.get("training_s") or 0.0) + (results.get("validation_s") or 0.0)
    scores = [*(results.get("history") or ()), results.get("final") or {}]
    losses = [row["val_loss"] for row in scores if row.get("val_loss") is not None]
    # JSON has no NaN, so a loss that is null was not finite.
    diverged = any("val_loss" in row and row["val_loss"] is None for row in scores)
    diverged |= not all(map(math.isfinite, losses))
    right = [row["val_acc"] for row in scores if row.get("val_acc") is not None]
    named = {name: results.get(name) for name in ("workload", "parameters")}
    settings = settings_of({**asked, **named})
    if results.get("device") is not None:
        settings["device"] = plain(results["device"])
    return TrainingRun(
        source=source,
        job=str(job.get("job_id") or (folder.name if folder else source.rpartition(" ")[2])),
        name=str(results.get("name") or job.get("job_name") or results.get("workload") or "train"),
        devices=int(results["world_size"]),
        nodes=job.get("nodes") or len({rank.host for rank in ranks if rank.host}) or None,
        seconds=seconds if epochs else None,
        epochs=epochs or None,
        planned_epochs=None if asked is results or asked.get("max_steps") else asked.get("epochs"),
        samples=round(results["samples"] / epochs) if epochs and results.get("samples") else None,
        batch=results.get("batch_size"),
        global_batch=results.get("global_batch_size"),
        steps=round(results["steps"] / epochs) if epochs and results.get("steps") else None,
        val_loss=min(filter(math.isfinite, losses), default=None),
        val_acc=max(right, default=None),
        diverged=diverged,
        status=_STATUS.get(results.get("status", ""), "unfinished"),
        restarts=job.get("restarts") or 0,
        device=results.get("device"),
        tags=results.get("tags") or {},
        ranks=tuple(ranks),
        utilisation=_busy(folder, int(results["world_size"]), job.get("nodes") or 1),
        gradient_bytes=results.get("gradient_bytes"),
        settings=settings,
    )


def _steps(folder: Path | None, rank: int) -> list[dict[str, str]]:
    path = folder / STEPS / f"rank{rank}.csv" if folder else None
    return rows_of(path) if path and path.is_file() else []


def _busy(folder: Path | None, devices: int, nodes: int) -> tuple[float, ...]:
    """Readings of GPU-Util on the first rank's node, from the metrics of a tracked run.

    Empty if the node has more GPUs than the run used, because metrics do not say which it used.
    """
    readings = [
        (gpu[1], value)
        for _, _, metrics in (read_machine_metrics(folder) if folder else ())
        for name, value in metrics.items()
        if (gpu := _GPU_BUSY.fullmatch(name)) and isinstance(value, int | float)
    ]
    all_its_own = len({gpu for gpu, _ in readings}) <= -(-devices // nodes)
    return tuple(float(value) for _, value in readings) if all_its_own else ()


def own_work(rows: Iterable[Mapping[str, str]]) -> tuple[float, ...]:
    """A rank's own work in each step, from the rows of its CSV of steps: all but the wait for the
    sum over ranks. Rows that were cut short or hold no number are skipped."""
    steps = []
    for row in rows:
        with contextlib.suppress(ValueError):
            work = [float(row[f"{phase}_s"]) for phase in PHASES
                    if phase != WAIT and row.get(f"{phase}_s")]  # fmt: skip
            steps += [sum(work)] if work else []
    return tuple(steps)
