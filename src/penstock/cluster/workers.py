"""The workers of a job: started here or reached at the address of a scheduler; which of them take
items, which are left out and why, and how many died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ..base import (
    HEAP_VARIABLES,
    THREAD_VARIABLES,
    Incomplete,
    OnWorkers,
    PenstockError,
    UsageError,
    describe,
    environment_kept,
    format_bytes,
    format_seconds,
    plural,
    require,
    script_hidden,
    usable_cores,
)
from . import leaving
from .items import NEEDS, UnfitWorker, admit, dismiss, versions_of

ANSWER_S = 10.0
"""Seconds within which a worker must say whether it may take items."""

FIRST_S = 10.0
"""Seconds until it is said that there is no worker. Each further sentence comes after twice the
time."""


@dataclass(slots=True)
class Workers:
    """A Dask client and its workers, with what a job needs to know of them."""

    client: Any
    """The ``distributed.Client``."""
    where: str
    """Name of the workers in messages."""
    timeout_s: float = float("inf")
    """Longest time without a worker, or in which workers go and nothing is done."""
    say: Callable[[str], None] = lambda sentence: None
    versions: Mapping[str, str] = field(default_factory=dict)
    """The client's versions of what a worker must have, by name."""
    token: str = field(default_factory=lambda: f"penstock-{uuid.uuid4().hex[:12]}")
    """Name of the resource that an item takes."""
    fit: dict[str, str] = field(default_factory=dict)
    """The host of each worker that takes items now, by address."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Reasons why workers take no items, by address."""
    served: bool = False
    """True if an item is done: if all fitting workers leave, another one may come."""
    deaths: int = 0
    retried: int = 0
    """Numbers of workers that died, and of items that failed and were tried again."""
    gone: list[int | None] = field(default_factory=list)
    """Memory limits of the workers that left or died since an item was done, or some of one saved.
    One is replaced by the next."""
    _facts: Mapping[str, Any] = field(default_factory=dict)
    """Dask's facts of each worker, by address."""
    _since: float = field(default_factory=lambda: time.monotonic())
    _due: float = FIRST_S

    def look(self) -> bool:
        """Look which workers are there, and let newcomers take items. Returns whether any does.

        Raises:
            UsageError: No worker may take part, and none ever could.
            Incomplete: There was no worker, or no progress, for too long.
        """
        if self.none_fits():
            first = min(self._facts.keys() & self.left_out.keys())
            raise UsageError(f"--cluster: no worker can take part. {first}: {self.left_out[first]}")
        return self.wait(len(self.fit))

    def wait(self, present: int) -> bool:
        """Measure how long no worker has been there, or how long workers go without progress.

        A worker that dies again and again is there most of the time. So its coming ends no wait:
        only progress does. Nor does it help to leave in order, again and again: a nanny whose
        worker takes too much memory first sends SIGTERM.

        Args:
            present: The number of workers that take items now.

        Returns:
            Whether any does.

        Raises:
            Incomplete: The wait has lasted too long.
        """
        now = time.monotonic()
        if present and len(self.gone) < 2:
            self._since, self._due = now, FIRST_S
            return True
        waited = now - self._since
        if waited >= self.timeout_s:
            what = f"no worker of {self.where} was there"
            if len(self.gone) > 1:
                limit = f" (memory limit {format_bytes(self.gone[-1])})" if self.gone[-1] else ""
                gone = f"{len(self.gone)} workers of {self.where}{limit} left or died"
                what = f"{gone}, and there was no progress"
            raise Incomplete(
                f"{what} for {format_seconds(waited)} (--worker-timeout); if the run had begun, "
                "--resume continues it"
            )
        if not present and waited >= self._due:
            self._due = 2 * waited
            self.say(f"waiting for a worker of {self.where}, {format_seconds(waited)} so far")
        return present > 0

    def none_fits(self) -> bool:
        """Look which workers are there. Returns whether all are left out, and none ever served."""
        self._see()
        # A worker whose memory is nearly full is paused, and may stay so.
        here = {each for each, facts in self._facts.items() if facts["status"] == "running"}
        # A nanny may have started another one at the same address: it lacks the token.
        had = {each for each in here if self.token in self._facts[each]["resources"]}
        fit = had - self.left_out.keys()
        question = admit, self.token, self.versions
        newcomers = here - had - self.left_out.keys()
        for address, answer in self.ask_each(*question, within_s=ANSWER_S, of=newcomers).items():
            if answer is None:
                fit.add(address)
            elif isinstance(answer, UnfitWorker):
                self.left_out[address] = str(answer)
            elif not isinstance(answer, OSError | LookupError):  # it is not gone, nor too slow
                self.left_out[address] = f"it lacks this Penstock ({describe(answer)}){NEEDS}"
        self.fit = {each: self._facts[each]["host"] for each in fit}
        return bool(here) and here <= self.left_out.keys() and not self.served

    def _see(self) -> None:
        """See which workers are there, and note those that left or died since."""
        before = self._facts
        # A client whose scheduler is lost, and sought again, knows of none.
        self._facts = self.client.scheduler_info(n_workers=-1).get("workers", {})
        for address in before.keys() - self._facts.keys() - self.left_out.keys():
            self.gone.append(before[address]["memory_limit"])  # it may be why
            with contextlib.suppress(Exception):  # the scheduler may be gone
                words = [word for _, word in self.client.get_events(address)]
                self.deaths += any(not word.get("expected", True) for word in words)

    def leave_out(self, address: str, reason: str) -> bool:
        """Give a worker no more items.

        Args:
            address: Its address.
            reason: Why, in a sentence.

        Returns:
            True if all are left out, and none ever served.
        """
        self.left_out[address] = reason
        self.ask_each(dismiss, self.token, within_s=ANSWER_S, of=[address])
        return self.none_fits()

    def ask_each(
        self,
        function: Callable[..., Any],
        *args: Any,
        within_s: float,
        of: Iterable[str] | None = None,
    ) -> dict[str, Any]:
        """Call a function on workers at once, beside their items.

        Args:
            function: The function, which workers can load. It is quick, or a coroutine function.
            args: Its arguments.
            within_s: Most seconds for an answer.
            of: Addresses of the workers that are asked; by default, of those that take items.

        Returns:
            By address, the answer, or the exception of a worker that raised one, that is gone, or
            that did not answer in time. Empty if the scheduler is gone.
        """

        async def answer(address: str) -> Any:
            asked = self.client.run(function, *args, workers=[address], on_error="return")
            return (await asyncio.wait_for(asked, within_s))[address]

        async def all_of(addresses: Iterable[str]) -> list[Any]:
            return await asyncio.gather(*map(answer, addresses), return_exceptions=True)

        asked = [*(self.fit if of is None else of)]
        with contextlib.suppress(Exception):  # the scheduler is gone
            answers = self.client.sync(all_of, asked, callback_timeout=2 * within_s)
            return dict(zip(asked, answers, strict=True))
        return {}

    @property
    def resources(self) -> dict[str, float]:
        """What an item takes of a worker: all of it, and a GPU if any worker has some."""
        have_gpus = any("GPU" in facts["resources"] for facts in self._facts.values())
        return {self.token: 1, **({"GPU": 1} if have_gpus else {})}

    def peers(self) -> int:
        """Largest number of workers on one host."""
        return max(Counter(self.fit.values()).values(), default=1)

    def notes(self, kind: str) -> list[str]:
        """Sentences on the workers that matter for the results.

        Args:
            kind: What an item is, such as ``scene``.

        Returns:
            The sentences.
        """
        self._see()
        counts = {
            f"Workers: {plural(self.deaths, 'worker')} died on the way": self.deaths,
            f"{kind.capitalize()}s: {self.retried} failed and tried again": self.retried,
        }
        left_out = [f"Left out: {address}: {why}" for address, why in self.left_out.items()]
        return [note for note, count in counts.items() if count] + left_out


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
        workers[number] = {"cls": distributed.Nanny, "options": mine}
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
