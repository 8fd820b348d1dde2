"""Connects to Dask workers: starts them here, or reaches them at the address of a scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import resource_tracker
from typing import Any

from ..base import (
    HEAP_VARIABLES,
    THREAD_VARIABLES,
    OnWorkers,
    PenstockError,
    UsageError,
    describe,
    environment_kept,
    require,
    script_hidden,
    usable_cores,
)
from . import leaving
from .items import versions_of
from .workers import Workers

CONNECT_S = 30.0
"""Seconds within which a scheduler must answer."""
DEATHS = 3
"""Deaths of workers of this machine on one item after which it is given up. At a scheduler of the
user's own, its setting ``distributed.scheduler.allowed-failures`` says so."""


WORKER_SETTINGS: Mapping[str, Any] = {
    # Each look takes the interpreter lock from the stages: together 4 % of a core.
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
}
"""Settings of Dask in workers that Penstock starts. By default, Dask profiles each thread 100 times
a second, and checks 50 times a second whether its event loop is late."""
WORKER_ENVIRONMENT = {
    **THREAD_VARIABLES,
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


@contextlib.contextmanager
def connect(
    knobs: OnWorkers,
    say: Callable[[str], None] = lambda sentence: None,
    *,
    libraries: Sequence[str] = (),
    gpus: int = 0,
    preload: str | None = None,
) -> Iterator[Workers]:
    """Connect to the workers that ``--cluster`` names, or start them, until the context ends.

    Args:
        knobs: The workers, and how long to wait for one.
        say: Called once a minute with a sentence while there is no worker.
        libraries: Distributions whose versions decide what an item gives. Workers with others are
            left out.
        gpus: GPUs of this machine that local workers take, one each.
        preload: A module that workers of this machine load when they start.

    Yields:
        The workers, which `share` gives items to.

    Raises:
        UsageError: The address is not valid, or no scheduler answers there.
    """
    distributed, address = require("distributed", "cluster"), str(knobs.cluster)
    with contextlib.ExitStack() as stack:
        place, where = address, address
        if local := re.fullmatch(r"local(?::([1-9]\d*))?", address):
            processes = int(local[1]) if local[1] else gpus or usable_cores()
            where = f"{processes} process(es) of this machine"
            # A nanny sets its worker's variables in this process, too, and leaves them there.
            stack.enter_context(environment_kept())
            place = stack.enter_context(_local(distributed, processes, gpus, preload))
        elif re.match(r"(tcp|tls|ucx|ws|wss)://", address):
            _check_scheduler(distributed, address)
        else:
            raise UsageError(
                f"--cluster {address} is none of local, local:N and an address such as "
                "tcp://HOST:8786"
            )
        with warnings.catch_warnings():
            # Dask warns of another Python with a table; `Workers.look` says it in a sentence.
            warnings.filterwarnings("ignore", r"(?s)\s*Mismatched versions found.*\| python ")
            client = distributed.Client(place, timeout=CONNECT_S, set_as_default=False)
        stack.enter_context(contextlib.closing(client))
        yield Workers(client, where, knobs.worker_timeout, say, versions_of(libraries))


@contextlib.contextmanager
def _local(distributed: Any, count: int, gpus: int, preload: str | None) -> Iterator[Any]:
    """A scheduler in this process and ``count`` workers, each in its own process. If a worker dies,
    it is restarted."""
    loopback = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    quiet = logging.CRITICAL  # `Workers` counts deaths
    # No limit of Dask's on memory: the plan of a job keeps within the machine's.
    options: dict[str, Any] = {
        **loopback,
        "nthreads": 1,
        "memory_limit": 0,
        "silence_logs": quiet,
        "preload": [leaving.__name__, *([preload] if preload else [])],
    }
    workers = {}
    for number in range(count):
        gpu = {"CUDA_VISIBLE_DEVICES": str(number % max(1, gpus))}
        mine = {**options, "resources": {"GPU": 1}, "env": gpu} if gpus else options
        workers[number] = {"cls": partial(_nanny, distributed), "options": mine}
    scheduler = {
        "cls": distributed.Scheduler,
        "options": {**loopback, "dashboard": False, "port": 0},
    }
    dask = require("dask", "cluster")
    variables = {
        f"distributed.nanny.pre-spawn-environ.{name}": text
        for name, text in WORKER_ENVIRONMENT.items()
    }
    lost = {
        # After this, a lost worker is replaced; before, its nanny may restart it.
        "distributed.deploy.lost-worker-timeout": "60s",
        "distributed.scheduler.allowed-failures": DEATHS - 1,
    }
    with dask.config.set({**lost, **variables, **WORKER_SETTINGS}):
        try:
            with script_hidden():
                cluster = distributed.SpecCluster(
                    workers=workers, scheduler=scheduler, silence_logs=quiet
                )
        except (OSError, RuntimeError) as error:  # of a nanny, which does not tell why
            raise PenstockError(
                f"--cluster: no worker process could be started ({describe(error)}); /dev/shm or "
                "the folder for temporary files may be full"
            ) from error
        with contextlib.closing(cluster):
            yield cluster


def _nanny(distributed: Any, *address: Any, **options: Any) -> Any:
    """A nanny whose worker no Ctrl-C of a shared terminal reaches, from its first import on: this
    process answers it. Called in the thread of Dask's loop, from which the worker has its mask."""
    if hasattr(signal, "pthread_sigmask"):
        # Its first start would unblock the signal again. What an interrupted start leaves it
        # removes, and need not say so.
        sys.warnoptions.append("ignore:resource_tracker")
        resource_tracker.ensure_running()
        sys.warnoptions.pop()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    return distributed.Nanny(*address, **options)


def _check_scheduler(distributed: Any, address: str) -> None:
    """Ask a scheduler to identify itself, because a client would wait for ever for a silent one.

    Raises `UsageError` if no scheduler answers.
    """

    async def ask() -> None:
        arguments = distributed.Security().get_connection_args("client")
        async with distributed.rpc(address, connection_args=arguments) as there:
            about = await asyncio.wait_for(there.identity(), CONNECT_S)
            if about["type"] != "Scheduler":
                raise UsageError(f"it is the address of a {about['type'].lower()}")

    try:
        with ThreadPoolExecutor(1) as aside:  # the caller may have its own event loop
            aside.submit(asyncio.run, ask()).result()
    except Exception as error:  # another server may answer anything
        why = describe(error) or f"within {CONNECT_S:.0f} s"
        raise UsageError(f"--cluster {address}: no scheduler answers there ({why})") from error
