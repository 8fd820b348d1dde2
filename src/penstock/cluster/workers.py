"""Dask workers: started on this machine, reached at an address, or submitted to SLURM."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import platform
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from ..base import DISTRIBUTION, UsageError, describe, environment_kept, require, usable_cores
from . import deaf
from .absence import Absence
from .slurm_workers import (
    LOST_S,
    WORKER_ENVIRONMENT,
    WORKER_SETTINGS,
    SlurmWorkers,
    WorkerJobs,
    slurm_workers,
)

CONNECT_S = 30.0
"""Seconds within which a scheduler must answer."""
ANSWER_S = 10.0
"""Seconds within which a worker must report its version of Penstock."""
WAIT_S = 0.5
"""Seconds between two checks for the first worker."""


@dataclass(frozen=True, slots=True)
class Workers:
    """A Dask client and its workers, with what a job needs to know of them."""

    client: Any
    """The ``distributed.Client``."""
    where: str
    """Name of the workers in messages."""
    absence: Absence = field(default_factory=Absence)
    slurm: SlurmWorkers | None = None
    """The SLURM jobs of the workers; None for other workers."""
    refill: Callable[[], None] = lambda: None
    """Function that restarts workers of this machine whose nannies have ended."""
    differences: dict[str, str] = field(default_factory=dict)
    """Reason why a worker cannot take our tasks, by address; "" if it can, or did not answer."""
    served: threading.Event = field(default_factory=threading.Event)
    """Set when a worker has done some work: if it leaves, another fitting one may come."""

    @property
    def expected(self) -> int:
        """Number of tasks that can run at the same time when all workers have come."""
        return max(1, self.slurm.jobs.count if self.slurm else 0, self.lanes())

    def attend(self, left_out: Collection[str] = ()) -> int:
        """Number of tasks that can run now. Replaces workers that are gone, if possible.

        Args:
            left_out: Addresses of workers that take no tasks.

        Raises:
            PenstockError: SLURM refused a job.
            Incomplete: No other worker is present, and the time to wait for one is over.
        """
        lanes = self.lanes(left_out)
        self.refill()
        standing = self.slurm.tend(lanes) if self.slurm else None
        where = f"{self.where} that may take part" if left_out else self.where
        self.absence.note(lanes, where, standing)
        return lanes

    def wait(self) -> None:
        """Wait for the first worker. Raises the same errors as `attend`."""
        while not self.attend():
            time.sleep(WAIT_S)

    def ask(
        self,
        function: Callable[..., Any],
        *args: Any,
        within_s: float,
        of: Iterable[str] | None = None,
    ) -> list[Any]:
        """Call a function on workers at once, beside their tasks.

        Args:
            function: The function, which workers can load. It is quick, or a coroutine function.
            args: Its arguments.
            within_s: Most seconds for an answer.
            of: Addresses of the workers that are asked; all by default.

        Returns:
            The answers. A worker that does not answer in time, raises an error or dies gives none.
        """

        async def answer(address: str) -> Any:
            asked = self.client.run(function, *args, workers=[address], on_error="return")
            return (await asyncio.wait_for(asked, within_s))[address]

        async def all_of(addresses: Iterable[str]) -> list[Any]:
            return await asyncio.gather(*map(answer, addresses), return_exceptions=True)

        try:
            asked = [*(self.hosts() if of is None else of)]
            answers = self.client.sync(all_of, asked, callback_timeout=2 * within_s)
        except Exception:  # the scheduler is gone
            return []
        return [each for each in answers if not isinstance(each, BaseException)]

    def hosts(self) -> dict[str, str]:
        """Host of each worker, by the worker's address."""
        return {address: facts["host"] for address, facts in self._facts().items()}

    def strangers(self) -> dict[str, str]:
        """Reasons why workers cannot take our tasks, by address.

        Raises `UsageError` if no worker can take them, and none ever could.
        """
        for address in self.hosts().keys() - self.differences.keys():
            self.differences[address] = self._difference(address)
        strange = {address: why for address, why in self.differences.items() if why}
        present = self.hosts().keys()
        if present and present <= strange.keys() and not self.served.is_set():
            address = min(present)
            raise UsageError(
                f"--cluster: no worker can take part. {address}: {strange[address]}; workers need "
                "this version of Penstock, on this version of Python"
            )
        return strange

    def _difference(self, address: str) -> str:
        """Say why a worker cannot take our tasks; "" if it can, or does not answer."""
        # Pickles and compiled modules of one version of Python may not load in another: the
        # worker would fail with errors of libraries.
        pythons = self.ask(platform.python_version, within_s=ANSWER_S, of=[address])
        if not pythons:
            return ""
        here = platform.python_version()
        if _minor(pythons[0]) != _minor(here):
            return f"it has Python {pythons[0]}, here it is {here}"
        # Dask may never report a task that a worker cannot load.
        question = version_question()
        answers, mine = self.ask(question, within_s=ANSWER_S, of=[address]), question()
        if answers in ([], [mine]):
            return ""
        return f"it has Penstock {answers[0]}, here it is {mine}"

    def peers(self) -> int:
        """Largest number of workers on one host."""
        most = max(Counter(self.hosts().values()).values(), default=1)
        # The preset knows of the workers that have not come yet.
        return max(most, min(self.slurm.jobs.count, self.slurm.jobs.per_node) if self.slurm else 1)

    def lanes(self, left_out: Collection[str] = ()) -> int:
        """Number of tasks that can run at the same time now, on workers that are not
        ``left_out``."""
        each = self._facts().items()
        return sum(self._lanes(facts) for address, facts in each if address not in left_out)

    @property
    def resources(self) -> dict[str, float]:
        """Dask resources of a task: a GPU if the workers have any, otherwise a thread."""
        return {"GPU": 1} if self._have_gpus() else {}

    def _have_gpus(self) -> bool:
        return any("GPU" in facts["resources"] for facts in self._facts().values())

    def _lanes(self, facts: Mapping[str, Any]) -> int:
        return int(facts["resources"].get("GPU", 0) if self._have_gpus() else facts["nthreads"])

    def _facts(self) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = self.client.scheduler_info(n_workers=-1)["workers"]
        return facts


def version_question() -> Callable[[], str]:
    """Make a function that returns the version of Penstock on its machine, or why there is none."""
    module = __name__

    # Dask sends the code of an inner function. It sends a function of a module by name, and a
    # worker without that module only answers with an error of Dask.
    def version() -> str:
        try:
            importlib.import_module(module)
        except ImportError:
            return "not at all"
        try:
            return metadata.version(DISTRIBUTION)
        except metadata.PackageNotFoundError:
            return "that is not installed"

    return version


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


@contextlib.contextmanager
def connected(
    address: str,
    gpus: int = 0,
    count: int | None = None,
    logs: Path = Path("outputs"),
    absence: Absence | None = None,
    preload: str | None = None,
) -> Iterator[Workers]:
    """Connect to workers, or start them, until the context ends.

    Args:
        address: ``local`` or ``local:N`` for processes of this machine; the address of a scheduler,
            such as ``tcp://10.0.0.1:8786``; ``slurm`` or ``slurm:PRESET`` for jobs of SLURM.
        gpus: GPUs of this machine that local workers take, one each.
        count: Number of jobs of SLURM; None for the ranks of the preset.
        logs: Folder of the logs of those jobs.
        absence: Limits the time without any worker; None to wait for ever.
        preload: A module that workers of this machine load when they start.

    Returns:
        The workers.

    Raises:
        UsageError: The address is not valid, or no scheduler answers there.
        PenstockError: SLURM does not answer.
    """
    distributed = require("distributed", "cluster")
    absence = absence or Absence()
    if local := re.fullmatch(r"local(?::([1-9]\d*))?", address):
        processes = int(local[1]) if local[1] else gpus or usable_cores()
        local_ones = _local(distributed, processes, gpus, preload)
        # A nanny sets its worker's variables in this process, too, and leaves them there.
        with environment_kept(), local_ones as cluster, _client(distributed, cluster) as client:
            where, refill = f"{processes} process(es) of this machine", partial(_refill, cluster)
            yield Workers(client, where, absence, refill=refill)
    elif re.match(r"(tcp|tls|ucx|ws|wss)://", address):
        _check_scheduler(distributed, address)
        with _client(distributed, address) as client:
            yield Workers(client, address, absence)
    elif slurm := re.fullmatch(r"slurm(?::(.+))?", address):
        jobs = WorkerJobs.of(slurm[1], count, logs)
        with slurm_workers(jobs) as kept, _client(distributed, kept.cluster) as client:
            yield Workers(client, address, absence, kept)
    else:
        raise UsageError(
            f"--cluster {address} is none of local, local:N, slurm, slurm:PRESET and an address "
            "such as tcp://HOST:8786"
        )


@contextlib.contextmanager
def _local(distributed: Any, count: int, gpus: int, preload: str | None) -> Iterator[Any]:
    """A scheduler in this process and ``count`` workers, each in its own process. If a worker dies,
    it is restarted."""
    loopback = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    quiet = logging.CRITICAL  # `tasks` counts and reports deaths
    options: dict[str, Any] = {**loopback, "nthreads": 1, "memory_limit": 0, "silence_logs": quiet}
    options["preload"] = [deaf.__name__, *([preload] if preload else [])]
    workers = {}
    for number in range(count):
        mine = {"CUDA_VISIBLE_DEVICES": str(number % gpus)} if gpus else {}
        resources = {"resources": {"GPU": 1}} if gpus else {}
        workers[number] = {
            "cls": distributed.Nanny,
            "options": {**options, **resources, "env": mine},
        }
    scheduler = {
        "cls": distributed.Scheduler,
        "options": {**loopback, "dashboard": False, "port": 0},
    }
    dask = require("dask", "cluster")
    nanny = "distributed.nanny.pre-spawn-environ"
    variables = {f"{nanny}.{name}": text for name, text in WORKER_ENVIRONMENT.items()}
    lost = {"distributed.deploy.lost-worker-timeout": f"{LOST_S}s"}
    with dask.config.set({**lost, **variables, **WORKER_SETTINGS}):
        cluster = distributed.SpecCluster(workers=workers, scheduler=scheduler, silence_logs=quiet)
        with contextlib.closing(cluster):
            yield cluster


def _refill(cluster: Any) -> None:
    """Start new workers for nannies that have ended. A nanny ends if its worker dies while it
    starts, and the restart takes longer than a lost worker is waited for."""
    for name, nanny in [*cluster.workers.items()]:
        if nanny.status.name in ("closed", "failed"):
            cluster.workers.pop(name, None)
    cluster.scale(len(cluster.worker_spec))


def _check_scheduler(distributed: Any, address: str) -> None:
    """Ask a scheduler to identify itself, because a client would wait for ever for a silent one.

    Raises `UsageError` if no scheduler answers.
    """

    async def ask() -> str:
        arguments = distributed.Security().get_connection_args("client")
        async with distributed.rpc(address, connection_args=arguments) as there:
            return str((await asyncio.wait_for(there.identity(), CONNECT_S))["type"])

    try:
        with ThreadPoolExecutor(1) as aside:  # the caller may have its own event loop
            kind = aside.submit(asyncio.run, ask()).result()
    except TimeoutError as error:
        raise UsageError(
            f"--cluster {address}: no scheduler answers within {CONNECT_S:.0f} s"
        ) from error
    except Exception as error:  # another server may answer anything
        raise UsageError(
            f"--cluster {address}: no scheduler answers there ({describe(error)})"
        ) from error
    if kind != "Scheduler":
        raise UsageError(f"--cluster {address} is the address of a {kind.lower()} of Dask; give "
                         "that of its scheduler")  # fmt: skip


@contextlib.contextmanager
def _client(distributed: Any, where: Any) -> Iterator[Any]:
    with warnings.catch_warnings():
        # Dask warns of another Python with a table; `strangers` says it in a sentence.
        warnings.filterwarnings("ignore", r"(?s)\s*Mismatched versions found.*\| python ")
        client = distributed.Client(where, timeout=CONNECT_S, set_as_default=False)
    with contextlib.closing(client):
        yield client
