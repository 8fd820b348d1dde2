"""What workers are started with, and whether a task of one is still wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..base import HEAP_VARIABLES

WORKER_SETTINGS: Mapping[str, Any] = {
    # Each look takes the interpreter lock from the stages: together 4 % of a core.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
}
"""Settings of Dask in workers that Penstock starts. By default, Dask profiles each thread 100 times
a second, and checks 50 times a second whether its event loop is late."""
WORKER_ENVIRONMENT = {
    # Threads of OpenMP sleep while they wait, as in a job of one process: `cli.set_up_libraries`.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "3000",
    # Dask's threads would have separate heaps, in which a forward takes a quarter longer.
    **HEAP_VARIABLES,
    **{f"DASK_{name.replace('.', '__').upper()}": str(v) for name, v in WORKER_SETTINGS.items()},
}
"""Variables of workers that Penstock starts, set before their processes begin."""
OF_WORKERS = frozenset(
    "OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS MALLOC_TRIM_THRESHOLD_".split()
) | frozenset(WORKER_ENVIRONMENT)
"""Variables that Dask's nanny or Penstock sets in workers. A process that measures there takes the
client's instead: Dask's nanny gives a worker one OpenMP thread."""


def still_wanted() -> Callable[[], bool]:
    """Make a function that says whether the client still waits for the calling task.

    The client may have ended or given the task up, and Dask does not interrupt a running task.
    """
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()

    def wanted() -> bool:
        task = worker.state.tasks.get(key)
        return task is not None and task.state == "executing"

    return wanted
