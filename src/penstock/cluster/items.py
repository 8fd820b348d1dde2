"""The worker's side of sharing: whether a worker may take items, and what becomes of one.

Whatever becomes of an item comes back as a value, because Dask could not load every error in
another process. The client decides whether the item is given out again.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..base import (
    DISTRIBUTION,
    Deferred,
    Incomplete,
    PenstockError,
    UsageError,
    describe,
    installed_version,
)

distributed = Deferred("distributed", "cluster")

PYTHON, PENSTOCK = "Python", "Penstock"
NEEDS = "; workers need this version of Penstock, on this version of Python"
_CLOSE_AFTER_S = 1.0
"""Seconds until a worker that asked for it closes. The scheduler then knows how its item ended."""


class UnfitWorker(UsageError):
    """This worker may not take part in the job, but others may."""


class WorkerLeaves(PenstockError):
    """This worker leaves before its item is done. Another one does the item; it has not failed."""


@dataclass(frozen=True, slots=True)
class FailedItem:
    """An item that failed, or that another worker is to do, in the place of its value."""

    sentence: str
    exit_code: int = 1
    may_pass: bool = False
    """True for a fault: the item may succeed when it is tried again."""
    left_by: str | None = None
    """Address of the worker that did not do the item; another one is to do it. The sentence
    then says why the worker may not take part at all, and is empty if it only leaves."""

    def error(self) -> PenstockError:
        """The failure as an exception of this process that has the same exit code."""
        return {2: UsageError, 3: Incomplete}.get(self.exit_code, PenstockError)(self.sentence)


def guarded(function: Callable[[Any], Any], item: Any) -> Any:
    """Do an item on a worker.

    Args:
        function: Does the item.
        item: Its argument.

    Returns:
        What ``function`` returns, or a `FailedItem`.
    """
    try:
        return function(item)
    except (UnfitWorker, WorkerLeaves) as error:
        unfit = describe(error) if isinstance(error, UnfitWorker) else ""
        return FailedItem(unfit, left_by=distributed.get_worker().address)
    except Exception as error:
        ours = isinstance(error, PenstockError)
        sentence = f"{'' if ours else f'{type(error).__name__}: '}{describe(error)}"
        code = getattr(error, "exit_code", 1) if ours else 1
        ends = any(getattr(each, "ends_job", False) for each in (error, error.__cause__))
        return FailedItem(sentence, code, may_pass=not ends and code != UsageError.exit_code)


def versions_of(libraries: Iterable[str]) -> dict[str, str]:
    """The versions of Python, of Penstock, and of distributions that are installed, by name."""
    versions = {
        PYTHON: platform.python_version(),
        PENSTOCK: installed_version(DISTRIBUTION),
        **{name: installed_version(name) for name in libraries},
    }
    return {name: version for name, version in versions.items() if version is not None}


async def admit(token: str, versions: Mapping[str, str], dask_worker: Any) -> None:
    """Let a worker take items, unless it has other versions than the client.

    Args:
        token: The name of the resource that an item takes. A worker gets one of it, so it does one
            item at a time, however many threads it has.
        versions: The client's versions by name.
        dask_worker: The ``distributed.Worker``.

    Raises:
        UnfitWorker: A version differs.
    """
    from .leaving import attend  # it loads asyncio

    mine = versions_of(versions.keys() - {PYTHON, PENSTOCK})
    for name, version in versions.items():
        theirs, parts = mine.get(name, version), 2 if name == PYTHON else None
        # What one version of Python pickles or compiles may not load in another.
        if theirs.split(".")[:parts] != version.split(".")[:parts]:
            cure = NEEDS if name in (PYTHON, PENSTOCK) else ""
            raise UnfitWorker(f"it has {name} {theirs}, here it is {version}{cure}")
    await attend(dask_worker)
    await dask_worker.set_resources(**{token: 1})
    if dask_worker.status == distributed.Status.running:
        # Dask gives items that wait for a worker to one that joins or wakes, not to one that has
        # only got a resource.
        dask_worker.status = distributed.Status.paused
        dask_worker.status = distributed.Status.running


async def dismiss(token: str, dask_worker: Any) -> None:
    """Give a worker no more items.

    Args:
        token: What `admit` got.
        dask_worker: The ``distributed.Worker``.
    """
    await dask_worker.set_resources(**{token: 0})


def close_after_item(reason: str) -> None:
    """Close the worker of the calling item soon after the item has failed. Its nanny, or SLURM,
    starts another one. Until then it does no other item.

    Args:
        reason: Why, for the worker's log.
    """
    worker = distributed.get_worker()
    # An item runs in a thread of the worker, whose state only its loop may change.
    worker.loop.add_callback(setattr, worker, "status", distributed.Status.paused)
    close = partial(worker.close, nanny=False, reason=reason)
    worker.loop.add_callback(worker.loop.call_later, _CLOSE_AFTER_S, close)


def still_wanted() -> Callable[[], bool]:
    """Make a function that says whether the client still waits for the calling task.

    The client may have ended or given the task up, and Dask does not interrupt a running task.
    """
    worker = distributed.get_worker()
    key = worker.get_current_task()
    return lambda: getattr(worker.state.tasks.get(key), "state", "") == "executing"
