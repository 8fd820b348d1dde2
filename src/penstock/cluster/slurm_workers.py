"""Dask workers as SLURM jobs, one job for each worker: submitted, replaced, cancelled at the end.

dask-jobqueue keeps their number; the scripts are those of ``penstock slurm submit``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..base import (
    HEAP_VARIABLES,
    Incomplete,
    PenstockError,
    SlurmConfig,
    UsageError,
    build,
    require,
)
from .batch_script import log_of, slurm_script, with_job_number, with_ranks
from .presets import slurm_preset
from .slurm_jobs import ask_slurm, complaint_of, make_places
from .slurm_states import job_states
from .slurm_steps import Command

DEATH_TIMEOUT_S = 300
"""Seconds after which a worker without a scheduler ends."""
LOST_S = 60
"""Seconds after which the job of a lost worker is cancelled and a new one submitted. Before that,
its nanny may restart it."""
TEND_S = 20.0
"""Seconds between two checks of the jobs."""
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
_COUNTED = {"nodes", "ntasks_per_node", "gpus_per_node"}
"""Settings of a preset that give its number of workers."""


@dataclass(frozen=True, slots=True)
class WorkerJobs:
    """The resources of the SLURM jobs that are workers."""

    config: SlurmConfig
    """Settings of one worker's job."""
    count: int
    per_node: int
    """Workers on each node, according to the preset."""

    @classmethod
    def of(cls, preset: str | None, workers: int | None, logs: Path) -> WorkerJobs:
        """The jobs of a number of workers.

        Args:
            preset: The name or file of a preset, None for SLURM's own defaults.
            workers: Number of workers; None for the ranks of the preset.
            logs: Folder of their logs if the preset names none.

        Returns:
            The jobs.

        Raises:
            UsageError: There is no such preset, it does not fit, or no number is given.
        """
        asked = build(SlurmConfig, {"folder": str(logs)}, slurm_preset(preset))
        named = f"--cluster slurm{f':{preset}' if preset else ''}"
        if workers is None and not asked.model_fields_set & _COUNTED:
            raise UsageError(f"{named} needs --workers N, the number of jobs of one worker each")
        if asked.array is not None:
            raise UsageError(f"{named}: a preset with an array is not a preset of workers")
        if asked.exclusive and asked.tasks > 1:
            raise UsageError(
                f"{named}: exclusive gives each worker a node of its own, which has room for "
                f"{asked.tasks}; leave it out of the preset"
            )
        one = with_ranks(asked, 1)
        variables = {text.partition("=")[0] for text in one.env}
        quiet = {k: v for k, v in WORKER_ENVIRONMENT.items() if k not in variables}
        env = [f"{name}={text}" for name, text in quiet.items()]
        # A lost job is replaced by a new one. If requeued, it would wait beside its replacement.
        changes = {"job_name": f"{asked.job_name}-worker", "requeue": False}
        config = one.model_copy(update={**changes, "env": (*env, *one.env)})
        return cls(config, workers or asked.nodes * asked.tasks, asked.tasks)

    def script(self, scheduler: str, name: str) -> str:
        """The script of a job.

        Args:
            scheduler: The address of the scheduler.
            name: The name of the worker.

        Returns:
            The text for sbatch.
        """
        words = [
            "python" if self.config.venv is not None else sys.executable,
            "-m", "distributed.cli.dask_worker", scheduler, "--name", name, "--nthreads", "1",
            "--memory-limit", "0", "--no-dashboard", "--death-timeout", str(DEATH_TIMEOUT_S),
            "--preload", "penstock.cluster.leaving",
            "--preload-nanny", "penstock.cluster.leaving",
        ]  # fmt: skip
        if self.config.gpus:
            words += ["--resources", "GPU=1"]
        return slurm_script(self.config, Command(tuple(words), "program"), sys.executable)


@dataclass(slots=True)
class SlurmWorkers:
    """The jobs of a cluster's workers, and their states."""

    jobs: WorkerJobs
    cluster: Any = None
    """The ``SLURMCluster``."""
    submitted: list[str] = field(default_factory=list)
    """Numbers of all jobs so far."""
    refused: list[PenstockError] = field(default_factory=list)
    tended: float = field(default_factory=time.monotonic)
    seen: float = float("-inf")
    """Monotonic time at which a worker was last present."""

    def tend(self, lanes: int) -> str | None:
        """Every `TEND_S` seconds, replace the jobs of workers that are gone.

        Args:
            lanes: Number of workers that are present.

        Returns:
            The states of the jobs as text, if they were checked and no worker is present.

        Raises:
            PenstockError: SLURM refused a job.
            Incomplete: All jobs have ended.
        """
        if self.refused:
            raise self.refused[0]
        now = time.monotonic()
        self.seen = now if lanes else self.seen
        if now - self.tended < TEND_S:
            return None
        self.tended = now
        self.cluster.scale(self.jobs.count)
        return None if lanes else self._standing()

    def _standing(self) -> str | None:
        """The states of the newest jobs as text. Raises `Incomplete` if all ended before a worker
        came."""
        newest = self.submitted[-self.jobs.count :]
        states = [state for rows in job_states(newest).values() for state in rows]
        # Jobs of workers that were present will be replaced, but not at once.
        replaced = time.monotonic() - self.seen > LOST_S + 2 * TEND_S
        if replaced and states and all(state.ended for state in states):
            log = with_job_number(log_of(self.jobs.config), states[-1].id)
            raise Incomplete(
                f"no worker is left: all jobs of SLURM have ended (job {states[-1].id}: "
                f"{states[-1].words(None)}; its log is {log}); run again with --resume"
            )
        words = dict.fromkeys(state.words(None) for state in states if not state.ended)
        return f"SLURM jobs {newest[0]} to {newest[-1]}: {', '.join(words)}" if words else None


@contextlib.contextmanager
def slurm_workers(jobs: WorkerJobs) -> Iterator[SlurmWorkers]:
    """Run a scheduler in this process, and workers that come when SLURM starts their jobs.

    All jobs are cancelled when the context ends.

    Args:
        jobs: The jobs.

    Returns:
        The object that keeps the jobs, and has the cluster.

    Raises:
        UsageError: SLURM is not installed here.
        PenstockError: SLURM does not answer.
    """
    jobqueue, dask = _jobqueue(), require("dask", "cluster")
    host = own_address()
    make_places(jobs.config)
    kept = SlurmWorkers(jobs)
    interface = dask.config.get("jobqueue.slurm.interface", None)
    with dask.config.set({"distributed.deploy.lost-worker-timeout": f"{LOST_S}s"}):
        kept.cluster = jobqueue.SLURMCluster(
            job_cls=_job_class(jobqueue, kept), name="penstock", cores=1, processes=1,
            memory="1GB",  # required, but unused: the script is ours
            scheduler_options={
                **({"interface": interface} if interface else {"host": host}),
                "port": 0, "dashboard": False, "dashboard_address": ":0",
            },
            silence_logs=logging.CRITICAL,
        )  # fmt: skip
        try:
            kept.cluster.scale(jobs.count)
            yield kept
        finally:
            _end(kept)


def _jobqueue() -> Any:
    """Import dask-jobqueue. Its import sets a handler for Ctrl-C, which is undone here."""
    before = signal.getsignal(signal.SIGINT)
    try:
        return require("dask_jobqueue", "cluster")
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def _end(kept: SlurmWorkers) -> None:
    """Close the cluster, and cancel the jobs even if that fails."""
    try:
        kept.cluster.close()
    finally:
        if kept.submitted:
            ask_slurm(["scancel", *kept.submitted])


def _job_class(jobqueue: Any, kept: SlurmWorkers) -> type:
    """The SLURM job class of dask-jobqueue, with our script, and submitted by our call of
    sbatch."""

    status = require("distributed.core", "cluster").Status

    class WorkerJob(jobqueue.slurm.SLURMJob):  # type: ignore[misc]
        def job_script(self) -> str:
            return kept.jobs.script(self.scheduler, self.name)

        async def _submit_job(self, script_filename: str) -> str:
            # In another thread, because the scheduler shares this one.
            script = Path(script_filename).read_text()
            ended = await asyncio.to_thread(ask_slurm, ["sbatch", "--parsable"], script)
            if ended.returncode:
                raise PenstockError(f"sbatch refused the job of a worker: {complaint_of(ended)}")
            kept.submitted.append(ended.stdout.strip().partition(";")[0])
            return kept.submitted[-1]

        async def start(self) -> None:
            try:
                await super().start()
            except PenstockError as error:  # Dask would only log it
                kept.refused.append(error)
                self.status = status.running

        async def close(self) -> None:
            await super().close()
            self.status = status.closed

    return WorkerJob


def own_address() -> str:
    """The address of this host on the network of SLURM's controller, where workers can reach it.

    Raises:
        PenstockError: SLURM does not answer, or this host has no address.
    """
    ended = ask_slurm(["scontrol", "show", "config"])
    if ended.returncode:
        raise PenstockError(f"SLURM does not answer: {complaint_of(ended)}")
    hosts: list[tuple[str, str]] = re.findall(
        r"^SlurmctldHost\[\d+\]\s*=\s*([^\s(]+)(?:\((\S+)\))?", ended.stdout, re.MULTILINE
    )
    for name, address in hosts:
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect((address or name, 1))  # a UDP connect sends nothing
            mine: str = probe.getsockname()[0]
            if not mine.startswith("127."):
                return mine
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise PenstockError(f"this host's name {name} has no address: {error}") from error
