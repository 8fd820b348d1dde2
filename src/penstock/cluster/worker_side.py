"""Functions for a task on a worker: the address, the variables, and whether it is still wanted."""

from __future__ import annotations

import os
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
    # OpenMP's threads sleep while they wait, as in a job of one process; see `cli.quiet_openmp`.
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "3000",
    # Dask's threads would have separate heaps, in which a forward takes a quarter longer.
    **HEAP_VARIABLES,
    **{f"DASK_{name.replace('.', '__').upper()}": str(v) for name, v in WORKER_SETTINGS.items()},
}
"""Variables of workers that Penstock starts, set before their processes begin."""


def worker_address() -> str:
    """The address of the worker that runs the calling task."""
    from distributed import get_worker

    address: str = get_worker().address
    return address


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


def client_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """The client's values of the variables that Dask sets in workers.

    Args:
        variables: The client's environment before it started workers, because a nanny changes it.

    Returns:
        The variables that `variables_of_client` takes.
    """
    return {name: variables[name] for name in _of_workers() if name in variables}


def variables_of_client(client: Mapping[str, str]) -> dict[str, str]:
    """The environment of this worker, with the client's values of the variables that Dask set when
    it started the worker. For example, Dask's nanny gives a worker one OpenMP thread. A value that
    was not set by Dask stays.

    Args:
        client: What `client_variables` returned at the client.

    Returns:
        The variables for a process that measures.
    """
    of_workers = _of_workers()
    mine = {name: text for name, text in os.environ.items() if of_workers.get(name) != text}
    return {**client, **mine}


def _of_workers() -> dict[str, str]:
    import dask
    import distributed  # noqa: F401 - its settings come with it

    nanny = dask.config.get("distributed.nanny.pre-spawn-environ", {}) or {}
    variables = {name: str(value) for name, value in nanny.items() if value is not None}
    return {**variables, **WORKER_ENVIRONMENT}
