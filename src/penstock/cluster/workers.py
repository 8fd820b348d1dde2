"""Workers of Dask: started here, reached at an address, or asked of SLURM."""

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
"""Seconds within which a worker must say which Penstock it has."""
WAIT_S = 0.5
"""Seconds between two looks for the first worker."""


@dataclass(frozen=True, slots=True)
class Workers:
    """A Dask client, and what the tasks of a job may ask of its workers."""

    client: Any
    """The ``distributed.Client``."""
    where: str
    """The workers, in words."""
    absence: Absence = field(default_factory=Absence)
    slurm: SlurmWorkers | None = None
    """The jobs of SLURM that the workers are, if they are."""
    refill: Callable[[], None] = lambda: None
    """Has workers of this machine started again that nobody else starts."""
    differences: dict[str, str] = field(default_factory=dict)
    """Why each worker that was asked cannot take our tasks; "" if it can, or did not answer."""
    served: threading.Event = field(default_factory=threading.Event)
    """Set once a worker has done some work: another that fits may come when it is gone."""

    @property
    def expected(self) -> int:
        """Number of tasks that will run at a time, when all workers have come."""
        return max(1, self.slurm.jobs.count if self.slurm else 0, self.lanes())

    def attend(self, left_out: Collection[str] = ()) -> int:
        """Number of tasks that can run now. Workers that are gone are replaced where that can be.

        Args:
            left_out: Addresses of workers that take no tasks.

        Raises:
            PenstockError: SLURM refused a job.
            Incomplete: There is no other worker, and the time to wait for one is over.
        """
        lanes = self.lanes(left_out)
        self.refill()
        standing = self.slurm.tend(lanes) if self.slurm else None
        where = f"{self.where} that may take part" if left_out else self.where
        self.absence.note(lanes, where, standing)
        return lanes

    def wait(self) -> None:
        """Wait for the first worker. Raises what `attend` does."""
        while not self.attend():
            time.sleep(WAIT_S)

    def ask(
        self,
        function: Callable[..., Any],
        *args: Any,
        within_s: float,
        of: Iterable[str] | None = None,
    ) -> list[Any]:
        """What workers answer at once, aside from their tasks.

        Args:
            function: What a worker can load; it is quick, or a coroutine function.
            args: What it is called with.
            within_s: How long an answer may take.
            of: The workers that are asked; all by default.

        Returns:
            The answers. A worker that is silent, raises an error or dies meanwhile gives none.
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
        """The host of each worker, by the worker's address."""
        return {address: facts["host"] for address, facts in self._facts().items()}

    def strangers(self) -> dict[str, str]:
        """The workers that cannot take our tasks, by address: each with the reason.

        Raises `UsageError` if there are no others, and never were.
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
        """Why a worker cannot take our tasks; "" if it can, or does not answer."""
        # What one Python has pickled another may not read, and what is compiled for one does not
        # load in another: the worker would fail with errors of libraries.
        pythons = self.ask(platform.python_version, within_s=ANSWER_S, of=[address])
        if not pythons:
            return ""
        here = platform.python_version()
        if _minor(pythons[0]) != _minor(here):
            return f"it has Python {pythons[0]}, here it is {here}"
        # Of a task that a worker cannot load, Dask may never say anything.
        question = version_question()
        answers, mine = self.ask(question, within_s=ANSWER_S, of=[address]), question()
        if answers in ([], [mine]):
            return ""
        return f"it has Penstock {answers[0]}, here it is {mine}"

    def peers(self) -> int:
        """The most workers on one host."""
        most = max(Counter(self.hosts().values()).values(), default=1)
        # Of those that are yet to come, the preset knows.
        return max(most, min(self.slurm.jobs.count, self.slurm.jobs.per_node) if self.slurm else 1)

    def lanes(self, left_out: Collection[str] = ()) -> int:
        """Number of tasks that can run at a time now, on workers that are not ``left_out``."""
        each = self._facts().items()
        return sum(self._lanes(facts) for address, facts in each if address not in left_out)

    @property
    def resources(self) -> dict[str, float]:
        """What a task takes: a GPU if the workers have any, else a thread."""
        return {"GPU": 1} if self._have_gpus() else {}

    def _have_gpus(self) -> bool:
        return any("GPU" in facts["resources"] for facts in self._facts().values())

    def _lanes(self, facts: Mapping[str, Any]) -> int:
        return int(facts["resources"].get("GPU", 0) if self._have_gpus() else facts["nthreads"])

    def _facts(self) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = self.client.scheduler_info(n_workers=-1)["workers"]
        return facts


def version_question() -> Callable[[], str]:
    """A function that returns the version of Penstock where it is called, or why there is none."""
    module = __name__

    # Dask sends the code of an inner function. One of a module it sends by name, which says nothing
    # to a worker without that module; and the worker's error comes back as words of Dask's own.
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
    """Workers to give tasks to, until the context ends.

    Args:
        address: ``local`` or ``local:N`` for processes of this machine; the address of a scheduler,
            such as ``tcp://10.0.0.1:8786``; ``slurm`` or ``slurm:PRESET`` for jobs of SLURM.
        gpus: GPUs of this machine that local workers take, one each.
        count: Number of jobs of SLURM; None for the ranks of the preset.
        logs: Folder of the logs of those jobs.
        absence: What is done while there is no worker; None to wait for ever.
        preload: A module that workers of this machine load as they start.

    Returns:
        The workers.

    Raises:
        UsageError: The address is none, or no scheduler answers there.
        PenstockError: SLURM does not answer.
    """
    distributed = require("distributed", "cluster")
    absence = absence or Absence()
    if local := re.fullmatch(r"local(?::([1-9]\d*))?", address):
        processes = int(local[1]) if local[1] else gpus or usable_cores()
        local_ones = _local(distributed, processes, gpus, preload)
        # A nanny leaves in this process the variables that it sets for its worker, for good.
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
    """A scheduler in this process and so many workers, each in a process of its own that is
    started again if it dies."""
    loopback = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    quiet = logging.CRITICAL  # deaths are counted and told by `tasks`
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
    """Start workers anew whose nannies have ended: one does so if its worker dies while it starts,
    and if that takes longer than a lost worker is waited for."""
    for name, nanny in [*cluster.workers.items()]:
        if nanny.status.name in ("closed", "failed"):
            cluster.workers.pop(name, None)
    cluster.scale(len(cluster.worker_spec))


def _check_scheduler(distributed: Any, address: str) -> None:
    """Ask a scheduler who it is: a client would wait for ever for one that says nothing.

    Raises `UsageError` if none answers.
    """

    async def ask() -> str:
        arguments = distributed.Security().get_connection_args("client")
        async with distributed.rpc(address, connection_args=arguments) as there:
            return str((await asyncio.wait_for(there.identity(), CONNECT_S))["type"])

    try:
        with ThreadPoolExecutor(1) as aside:  # the caller may have a loop of its own
            kind = aside.submit(asyncio.run, ask()).result()
    except TimeoutError as error:
        raise UsageError(
            f"--cluster {address}: no scheduler answers within {CONNECT_S:.0f} s"
        ) from error
    except Exception as error:  # whatever answers there may say anything
        raise UsageError(
            f"--cluster {address}: no scheduler answers there ({describe(error)})"
        ) from error
    if kind != "Scheduler":
        raise UsageError(f"--cluster {address} is the address of a {kind.lower()} of Dask; give "
                         "that of its scheduler")  # fmt: skip


@contextlib.contextmanager
def _client(distributed: Any, where: Any) -> Iterator[Any]:
    with warnings.catch_warnings():
        # Dask's table of versions says of another Python what `strangers` says in a sentence.
        warnings.filterwarnings("ignore", r"(?s)\s*Mismatched versions found.*\| python ")
        client = distributed.Client(where, timeout=CONNECT_S, set_as_default=False)
    with contextlib.closing(client):
        yield client
