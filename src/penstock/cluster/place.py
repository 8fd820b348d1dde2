"""The rank of this process, from the variables that its launcher set.

    torchrun     RANK, WORLD_SIZE, LOCAL_RANK      and where to meet: MASTER_ADDR, MASTER_PORT
    srun         SLURM_PROCID, SLURM_STEP_...      the step's own counts, not the job's
    neither      one rank, or those that Fabric starts itself

A batch script also has the counts of its job (SLURM_NTASKS), but it is no rank, and a step may have
other counts than its job. So only the counts of a step are used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..base import UsageError

PORT, PORTS = 15_000, 10_000
"""The ranks of a job meet at port PORT + (number of the job modulo PORTS)."""
NOT_A_RANK = "another rank has ended and printed why; this one cannot go on without it"


def job_of(environ: Mapping[str, str]) -> str:
    """The number of this process's SLURM job: 12, or 12_3 in an array; empty without a job.

    Args:
        environ: Variables of the environment.

    Returns:
        The number as SLURM writes it.
    """
    if "SLURM_ARRAY_JOB_ID" in environ and "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ.get("SLURM_JOB_ID", "")


def restarts_of(environ: Mapping[str, str]) -> int:
    """How often SLURM has started this process's job again; 0 without a job."""
    restarts = environ.get("SLURM_RESTART_COUNT", "")
    return int(restarts) if restarts.isdecimal() else 0


def own_job(environ: Mapping[str, str]) -> str:
    """The number of the job in which this process runs.

    Raises:
        UsageError: This process runs in no job.
    """
    if not (job := job_of(environ)):
        raise UsageError(
            "launch slurm runs inside a job, and SLURM_JOB_ID is not set; penstock slurm submit "
            "makes a job, salloc an interactive one"
        )
    return job


@dataclass(frozen=True, slots=True)
class Place:
    """A rank among ranks."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Number of the rank on its node, from 0."""
    node: int = 0
    nodes: int = 1
    address: str = "127.0.0.1"
    """Host where all ranks meet."""
    port: int = 0
    started: bool = False
    """True if torchrun or srun started this process as a rank."""

    def variables(self) -> dict[str, str]:
        """The variables that torchrun would set for this rank."""
        named = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": self.nodes,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
        }
        return {name: str(value) for name, value in named.items()}


def find_place(environ: Mapping[str, str]) -> Place:
    """The place of a process among its ranks.

    Args:
        environ: Variables of the environment, as torchrun, srun or Fabric set them.

    Returns:
        Its rank, the number of ranks, and where they meet; one rank if no launcher started it.

    Raises:
        UsageError: A variable is no number, or the first host of several nodes is not known.
    """
    if all(name in environ for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return Place(
            rank=_number(environ, "RANK"),
            world_size=_number(environ, "WORLD_SIZE"),
            local_rank=_number(environ, "LOCAL_RANK"),
            node=_number(environ, "GROUP_RANK", 0),
            nodes=_number(environ, "GROUP_WORLD_SIZE", 1),
            address=environ.get("MASTER_ADDR", "127.0.0.1"),
            port=_number(environ, "MASTER_PORT", PORT),
            started=True,
        )
    if "SLURM_PROCID" in environ and "SLURM_STEP_NUM_TASKS" in environ:
        nodes = _number(environ, "SLURM_STEP_NUM_NODES", 1)
        return Place(
            rank=_number(environ, "SLURM_PROCID"),
            world_size=_number(environ, "SLURM_STEP_NUM_TASKS"),
            local_rank=_number(environ, "SLURM_LOCALID"),
            node=_number(environ, "SLURM_NODEID", 0),
            nodes=nodes,
            address=environ.get("MASTER_ADDR") or _meeting_point(environ, nodes),
            port=_number(
                environ, "MASTER_PORT", PORT + _number(environ, "SLURM_JOB_ID", 0) % PORTS
            ),
            started=True,
        )
    # Ranks that Fabric starts on the devices of one machine have these two.
    rank = _number(environ, "LOCAL_RANK", 0)
    return Place(rank=rank, world_size=_number(environ, "WORLD_SIZE", 1), local_rank=rank)


def tasks_elsewhere(environ: Mapping[str, str]) -> int:
    """How many tasks the SLURM job of this process has, if this process is not one of them.

    This is the case in a batch script, and in the shell of an interactive job, which is a step of
    one task.

    Args:
        environ: Variables of the environment.

    Returns:
        The number of tasks; 0 if this process is a rank or in no job.
    """
    started = "LOCAL_RANK" in environ or find_place(environ).world_size > 1
    return 0 if started or "SLURM_JOB_ID" not in environ else _number(environ, "SLURM_NTASKS", 1)


def first_host(nodes: str) -> str:
    """The first host of a list that SLURM wrote.

    >>> first_host("raven[0123,0124]"), first_host("n[1-2],m3"), first_host("rack[1-2]n[3-4]")
    ('raven0123', 'n1', 'rack1n3')
    """
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", nodes).split(",")[0]


def _meeting_point(environ: Mapping[str, str], nodes: int) -> str:
    """The host where ranks meet: the first node, or loopback if there is one node."""
    if nodes == 1:
        return "127.0.0.1"
    if not (hosts := environ.get("SLURM_STEP_NODELIST")):
        raise UsageError(f"{nodes} nodes, and neither MASTER_ADDR nor SLURM_STEP_NODELIST is set")
    return first_host(hosts)


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name, "" if default is None else str(default))
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise UsageError(f"{name} is {text!r}, which is not a number of ranks, nodes or ports")
    return int(text)
