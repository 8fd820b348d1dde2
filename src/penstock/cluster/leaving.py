"""A Dask worker that leaves with notice: after SIGTERM (SLURM needs its node, or its time is up),
or if the scheduler needs fewer workers, or if its nanny ends.

Such a worker first ends its item, and does not count as dead. This module is also a preload of
Dask's worker (``--preload``) and of its nanny (``--preload-nanny``), which without it kills its
worker 8 s after SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable
from typing import Any

_PLUGIN = "penstock-leaving"
_NANNY_WAITS_S = 86400.0
"""Seconds that a nanny waits for its worker. Long, because the worker limits its own time."""
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
    """Prepare a process of Dask that loads this module as a preload. Dask calls this.

    A nanny gives its worker all the time that the worker wants after SIGTERM. A worker ignores
    Ctrl-C: in a shared terminal, the client answers it.

    Args:
        server: The ``distributed.Worker`` or ``distributed.Nanny``.
    """
    if hasattr(server, "plugin_add") and hasattr(server, "state"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Dask turns its logs on again before a worker that has left sees its connection end.
        logging.getLogger("distributed.core").setLevel(logging.CRITICAL)
        return
    closing: set[asyncio.Task[Any]] = set()  # the loop itself holds no task

    def close() -> None:
        if not closing:
            closing.add(asyncio.ensure_future(server.close(timeout=_NANNY_WAITS_S)))

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, close)


async def attend(worker: Any) -> None:
    """Let a worker end its item, and tell the scheduler, before it closes; close it on SIGTERM.

    Dask would count a worker that closes as one that died on its item.

    Args:
        worker: The ``distributed.Worker``.
    """
    from distributed import WorkerPlugin

    if _PLUGIN in worker.plugins:
        return
    closing: set[asyncio.Task[Any]] = set()

    class Leaving(WorkerPlugin):
        def setup(self, worker: Any) -> None:
            def close() -> None:
                # If only this process should end, its nanny starts another one.
                closing.add(asyncio.ensure_future(worker.close(nanny=False, reason="SIGTERM")))

            with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
                # Fails if Dask does not run in the main thread of its process.
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, close)

        async def teardown(self, worker: Any) -> None:
            await asyncio.gather(*(asyncio.to_thread(end) for end in _ENDS.values()))
            # The items of a worker that is expected to leave are given to others, without blame.
            await worker.scheduler.unregister(
                address=worker.address, expected=True, close=False, stimulus_id=_PLUGIN
            )

    await worker.plugin_add(Leaving(), name=_PLUGIN)
