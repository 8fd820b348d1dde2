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
before_leaving: dict[str, Callable[[], object]] = {}
"""Functions that are called before this worker leaves, each in a thread of its own, by name."""


def _close_on_sigterm(server: Any, **how: Any) -> None:
    """Have a worker or a nanny close, as ``how`` says, when its process gets SIGTERM."""
    closing: set[asyncio.Task[Any]] = set()  # the loop itself holds no task

    def close() -> None:
        if not closing:
            closing.add(asyncio.ensure_future(server.close(**how)))

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, close)


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
    else:
        _close_on_sigterm(server, timeout=_NANNY_WAITS_S)


async def attend(worker: Any) -> None:
    """Let a worker end its item, and tell the scheduler, before it closes; close it on SIGTERM.

    Dask would count a worker that closes as one that died on its item.

    Args:
        worker: The ``distributed.Worker``.
    """
    from distributed import WorkerPlugin

    if _PLUGIN in worker.plugins:
        return

    class Leaving(WorkerPlugin):
        async def teardown(self, worker: Any) -> None:
            await asyncio.gather(*map(asyncio.to_thread, before_leaving.values()))
            # The items of a worker that is expected to leave are given to others, without blame.
            await worker.scheduler.unregister(
                address=worker.address, expected=True, close=False, stimulus_id=_PLUGIN
            )

    with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
        # Fails if Dask does not run in the main thread of its process. If only this process should
        # end, its nanny starts another one.
        _close_on_sigterm(worker, nanny=False, reason="SIGTERM")
    await worker.plugin_add(Leaving(), name=_PLUGIN)
