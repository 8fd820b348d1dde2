"""A Dask worker that leaves with notice: after SIGTERM (SLURM needs its node, or its time is up),
or if the scheduler needs fewer workers, or if its nanny ends.

Such a worker first finishes its work, and does not count as dead. A task can also make its worker
leave. This module is also a preload of Dask's worker (``--preload``) and of its nanny
(``--preload-nanny``), which without it kills its worker 8 s after SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable
from typing import Any

LEAVING = "penstock-leaving"
"""Dask topic on which workers say that they leave."""
_PLUGIN = "penstock-leaving"
_NANNY_WAITS_S = 86400.0
"""Seconds that a nanny waits for its worker. Long, because the worker limits its own time."""
_FETCHED_WITHIN_S = 30.0
"""Seconds within which the client fetches the result of a task that is done."""
_LOOK_S = 0.1
_ENDS: dict[str, Callable[[], None]] = {}
"""Functions to call before this worker leaves, by name."""


def before_leaving(name: str, end: Callable[[], None] | None) -> None:
    """Register a function to call before this worker leaves.

    Args:
        name: The name under which it can be replaced or removed.
        end: The function, called in a thread of its own; None removes it.
    """
    if end is None:
        _ENDS.pop(name, None)
    else:
        _ENDS[name] = end


def dask_setup(server: Any) -> None:
    """Receive SIGTERM. Dask calls this in the process of a worker, or of its nanny.

    Args:
        server: The ``distributed.Worker`` or ``distributed.Nanny``.
    """
    if hasattr(server, "plugin_add") and hasattr(server, "state"):
        _attend(server)
        return

    leaving: set[asyncio.Task[Any]] = set()

    def close() -> None:
        if not leaving:
            leaving.add(asyncio.ensure_future(server.close(timeout=_NANNY_WAITS_S)))

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, close)


def leave_with_notice(worker: Any) -> None:
    """Make a worker leave with notice. Any thread of its process may call this, more than once.

    Args:
        worker: The ``distributed.Worker``.
    """
    if _PLUGIN not in worker.plugins:
        worker.loop.add_callback(_attend, worker)


def _attend(worker: Any) -> None:
    """Handle SIGTERM, and notice when the worker is closed. Runs in the worker's event loop."""
    from distributed import WorkerPlugin

    if _PLUGIN in worker.plugins:
        return

    class Leaving(WorkerPlugin):
        async def teardown(self, worker: Any) -> None:
            await _end(worker)

    leaving: set[asyncio.Task[None]] = set()

    def hear() -> None:
        if not leaving:
            leaving.add(asyncio.ensure_future(_leave(worker, "SIGTERM")))

    worker.plugins[_PLUGIN] = Leaving()
    with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):  # not the main thread
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, hear)


def leave_after_task() -> None:
    """Make the worker that runs this task leave when the task's result has been fetched. Until then
    it gets no other task.

    Its nanny, or SLURM, starts another one.
    """
    from distributed import get_worker

    worker = get_worker()
    worker.loop.add_callback(_leave_after, worker, worker.get_current_task())


async def _leave_after(worker: Any, key: str) -> None:
    _pause(worker)
    # A result that nobody has fetched would be lost with the worker, and its task would run again,
    # for ever.
    end = time.monotonic() + _FETCHED_WITHIN_S
    while key in worker.state.tasks and time.monotonic() < end:
        await asyncio.sleep(_LOOK_S)
    await _leave(worker, "its task asked for it")


async def _leave(worker: Any, reason: str) -> None:
    _pause(worker)
    await _end(worker)  # before the scheduler gives its tasks to others
    # If only this process should end, its nanny starts another one.
    await worker.close_gracefully(reason=reason, restart=worker.nanny is not None)


def _pause(worker: Any) -> None:
    """Make the scheduler give a worker no more tasks."""
    from distributed import Status

    worker.status = Status.paused


async def _end(worker: Any) -> None:
    worker.log_event(LEAVING, {"worker": worker.address})
    await asyncio.gather(*(asyncio.to_thread(end) for end in _ENDS.values()))
