"""The worker's side of sharing: whether a worker may take items, and what becomes of one.

An error of the user comes back as a value, and so does a worker that may not take part, or that
leaves. Only a fault is raised, because Dask tries again what is raised.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from ..base import DISTRIBUTION, Incomplete, PenstockError, UsageError, describe
from .leaving import attend

PYTHON, PENSTOCK = "Python", "Penstock"
_CLOSE_AFTER_S = 1.0
"""Seconds until a worker that asked for it closes. The scheduler then knows how its item ended."""


class UnfitWorker(UsageError):
    """This worker may not take part in the job, but others may."""


class WorkerLeaves(PenstockError):
    """This worker leaves before its item is done. Another one does the item; it has not failed."""


@dataclass(frozen=True, slots=True)
class FailedItem:
    """An item that is given up, in the place of its value."""

    sentence: str
    exit_code: int = 1
    ends_job: bool = False
    """True if all other items would fail in the same way."""

    def error(self) -> PenstockError:
        """The failure as an exception of this process that has the same exit code."""
        kinds = {2: UsageError, 3: Incomplete}
        return kinds.get(self.exit_code, PenstockError)(self.sentence)


@dataclass(frozen=True, slots=True)
class Unfit:
    """The worker at this address may not take part; another one is to do the item."""

    address: str
    sentence: str


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """The worker leaves; another one is to do the item."""


class Fault(Exception):
    """An item that may succeed when it is tried again. Any process can load its pickle, which is
    not true of the error that it stands for."""

    def __init__(self, failure: FailedItem) -> None:
        super().__init__(failure)
        self.failure = failure


def guarded(token: str, function: Callable[[Any], Any], item: Any) -> Any:
    """Do an item on a worker.

    Args:
        token: The topic under which the worker reports a fault.
        function: Does the item.
        item: Its argument.

    Returns:
        What ``function`` returns, or an `Unfit`, a `WorkerLeft` or a `FailedItem`.

    Raises:
        Fault: The item failed, and may succeed when it is tried again.
    """
    from distributed import get_worker

    try:
        return function(item)
    except UnfitWorker as error:
        return Unfit(get_worker().address, describe(error))
    except WorkerLeaves:
        return WorkerLeft()
    except Exception as error:
        failure = _failure_of(error)
        if failure.ends_job or failure.exit_code == UsageError.exit_code:
            return failure
        get_worker().log_event(token, failure.sentence)
        raise Fault(failure) from None


def _failure_of(error: Exception) -> FailedItem:
    ours = isinstance(error, PenstockError)
    name = "" if ours else f"{type(error).__name__}: "
    causes = (error, error.__cause__)
    ends = any(isinstance(each, PenstockError) and each.ends_job for each in causes)
    return FailedItem(name + describe(error), getattr(error, "exit_code", 1) if ours else 1, ends)


def versions_of(libraries: Iterable[str]) -> dict[str, str]:
    """The versions of Python, of Penstock, and of distributions that are installed, by name."""
    versions = {PYTHON: platform.python_version()}
    for name in (PENSTOCK, *libraries):
        try:
            versions[name] = metadata.version(DISTRIBUTION if name == PENSTOCK else name)
        except metadata.PackageNotFoundError:
            continue
    return versions


async def admit(
    token: str, versions: Mapping[str, str], dask_worker: Any
) -> tuple[str, str] | None:
    """Let a worker take items, unless it has other versions than the client.

    Args:
        token: The name of the resource that an item takes. A worker gets one of it, so it does one
            item at a time, however many threads it has.
        versions: The client's versions by name.
        dask_worker: The ``distributed.Worker``.

    Returns:
        The name and the version of what differs, or None.
    """
    from distributed import Status

    mine = versions_of(versions.keys() - {PYTHON, PENSTOCK})
    for name, version in versions.items():
        theirs, parts = mine.get(name, version), 2 if name == PYTHON else None
        # What one version of Python pickles or compiles may not load in another.
        if theirs.split(".")[:parts] != version.split(".")[:parts]:
            return name, theirs
    await attend(dask_worker)
    await dask_worker.set_resources(**{token: 1})
    if dask_worker.status == Status.running:
        # Dask gives items that wait for a worker to one that joins or wakes, not to one that has
        # only got a resource.
        dask_worker.status = Status.paused
        dask_worker.status = Status.running
    return None


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
    from distributed import Status, get_worker

    worker = get_worker()

    def close() -> None:
        worker.status = Status.paused
        worker.loop.call_later(
            _CLOSE_AFTER_S, worker.close, nanny=worker.nanny is None, reason=reason
        )

    worker.loop.add_callback(close)
