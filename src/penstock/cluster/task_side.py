"""The worker's side of a task: it reports its begin and its progress, and returns why it failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..base import PenstockError, StoreAway, UsageError, describe
from .leaving import leave_with_notice
from .worker_side import worker_address


class UnfitWorker(UsageError):
    """This worker may not take part in the job, but others may."""


class WorkerLeaves(PenstockError):
    """This worker leaves before its task is done. Another one does the task; it has not failed."""


@dataclass(frozen=True, slots=True)
class TaskFailure:
    """The result of a task that raised. It replaces the exception, which may not be picklable."""

    sentence: str
    final: bool
    """True if no other try can succeed."""
    exit_code: int
    away: bool = False
    """True if a store has failed for longer than a task retries."""
    unfit: str | None = None
    """Address of the worker, if it cannot run tasks of this job; None for any other failure."""
    ends_job: bool = False
    """True if all other tasks of the job would fail in the same way."""


def run_guarded(function: Callable[..., Any], order: Any, number: int) -> Any:
    """Run a task on a worker.

    Args:
        function: The task.
        order: The argument that every task gets.
        number: Its number.

    Returns:
        What the task returns, or a `TaskFailure`; None if the worker leaves before it is done.
    """
    from distributed import get_worker

    leave_with_notice(get_worker())
    try:
        return function(order, number)
    except WorkerLeaves:
        return None
    except Exception as error:
        final = isinstance(error, UsageError)
        code = error.exit_code if isinstance(error, PenstockError) else 1
        name = "" if isinstance(error, PenstockError) else f"{type(error).__name__}: "
        causes = (error, error.__cause__)
        away = any(isinstance(each, StoreAway) for each in causes)
        ends = any(isinstance(each, PenstockError) and each.ends_job for each in causes)
        unfit = worker_address() if isinstance(error, UnfitWorker) else None
        return TaskFailure(name + describe(error), final, code, away, unfit, ends)


def tell_begun(topic: str, number: int) -> None:
    """Report from a task that its work begins.

    Args:
        topic: The topic of the job.
        number: The number of the task.
    """
    _tell(topic, "begun", number, {})


def tell_progress(topic: str, number: int, *, safe: bool, **facts: Any) -> None:
    """Report the progress of a task, from inside the task.

    Args:
        topic: The topic of the job.
        number: The number of the task.
        safe: Whether some of the work was saved since the last report.
        facts: Other values for the client.
    """
    _tell(topic, "progress", number, {**facts, "safe": safe})


def _tell(topic: str, what: str, number: int, facts: dict[str, Any]) -> None:
    from distributed import get_worker

    word = {**facts, "what": what, "number": number, "worker": worker_address()}
    get_worker().log_event(topic, word)
