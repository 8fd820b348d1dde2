"""A preload of Dask's worker: SIGTERM, by which SLURM says that a job's time is up or its node is
wanted, makes the worker leave with notice. What leaves with notice is no death."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

LEAVING = "penstock-leaving"
"""The topic of workers that leave with notice."""


def dask_setup(worker: Any) -> None:
    """Receive SIGTERM for a worker. Dask calls this in the worker's process.

    Args:
        worker: The ``distributed.Worker``.
    """
    leaving: set[asyncio.Task[None]] = set()

    def leave() -> None:
        worker.log_event(LEAVING, {"worker": worker.address})
        leaving.add(asyncio.ensure_future(worker.close_gracefully(reason="SIGTERM")))

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, leave)
