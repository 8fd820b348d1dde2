"""Drops runs that several files hold, and finds runs whose times contradict each other.

Ledgers, trackers and folders keep a time to its last digit, which no two runs share. A log has two
digits after the point: it is dropped if another source has a run of the same job and devices, with
the same attempt or time. If two logs have the same job and time, one is a copy, or the job was
requeued with nothing left to do and printed its times again. GPU-Util readings are kept from
either.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ..runs import TrainingRun


def each_once(runs: Iterable[TrainingRun]) -> tuple[list[TrainingRun], list[str]]:
    """Each run once, and a phrase for each run that was read twice."""
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
        f"{run.source}: {run.seconds:.2f} s in all are not {run.epochs} epochs of "
        f"{run.epoch_seconds:.2f} s; one of the two is wrong, and then so is the speed-up"
    )
