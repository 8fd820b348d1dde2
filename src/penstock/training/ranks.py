"""Devices, precision and ranks of a training, by `lightning_fabric`; how ranks agree to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..base import (
    Incomplete,
    PenstockError,
    TrainConfig,
    UsageError,
    for_children,
    installed_version,
    require,
    signals_handled,
)
from ..cluster import NOT_A_RANK, Place, find_place, job_of, restarts_of, tasks_elsewhere
from .feed import SIGNALS

T = TypeVar("T")

_NO_MEMORY = ("out of memory", "_STATUS_ALLOC_FAILED", "DefaultCPUAllocator")
"""The words of errors for too little memory: of a device, of its libraries, and of the host. Torch
has an error type for the first only."""


@contextlib.contextmanager
def ranks_of(config: TrainConfig) -> Iterator[Any]:
    """Start or join the ranks of a training, and end their process group when all ranks end.

    A rank that fails does not destroy the group: NCCL destroys it on all ranks together, but the
    others wait in a sum that this rank does not join. Their launcher (Fabric, torchrun or srun)
    ends them.
    """
    ours = not dist.is_initialized()
    fabric = _fabric(config)
    children = getattr(fabric.strategy.launcher, "procs", [])
    stopped: Incomplete | None = None
    try:
        yield fabric
    except Incomplete as error:
        # All ranks raise it, and the first rank still has to write the results. Fabric would end
        # all ranks when one leaves, so its list of processes is cleared.
        children.clear()
        fabric.barrier()
        stopped = error
    except BaseException as error:
        while children:
            children.pop().kill()
        sentence = _no_defect(error, config, fabric.world_size)
        if sentence is not None:
            raise PenstockError(sentence) from error
        raise
    if ours and dist.is_initialized():
        dist.destroy_process_group()
    if stopped is not None:
        raise stopped


def _no_defect(error: BaseException, config: TrainConfig, ranks: int) -> str | None:
    """A sentence for an error of torch that is not a bug: too little memory, or a lost rank."""
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    for line in text.splitlines():
        if not any(words in line for words in _NO_MEMORY):
            continue
        how_much = ". ".join(line.split(". ")[:3]).rstrip(".")
        return (
            f"{how_much}; less is needed with --batch-size below {config.batch_size} (and "
            "--grad-accum-steps for steps as large), --checkpointing or --amp"
        )
    if ranks > 1 and (isinstance(error, dist.DistError) or "gloo" in text):
        return NOT_A_RANK
    return None


def this_place(config: TrainConfig) -> Place:
    """The place of this process among its ranks, before Fabric starts any.

    Args:
        config: The settings of the training.

    Returns:
        The place, with the number of ranks that there will be.
    """
    place = find_place(os.environ)
    if config.distributed and not place.started and config.device in ("auto", "cuda"):
        return replace(place, world_size=torch.cuda.device_count() or 1)
    return place


@contextlib.contextmanager
def torchmetrics_by_version() -> Iterator[None]:
    """Within it ``torchmetrics`` is a module that has its version and nothing else.

    Fabric imports it for that version, which its detection of spikes asks for. All of it brings
    SciPy and Matplotlib, which take a second.
    """
    name = "torchmetrics"
    version = installed_version(name)
    if version is None or not sys.modules.keys().isdisjoint((name, "lightning_fabric")):
        yield
        return
    stand_in: Any = ModuleType(name)
    stand_in.__version__ = version
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        del sys.modules[name]


def _fabric(config: TrainConfig) -> Any:
    with torchmetrics_by_version():
        fabric = require("lightning_fabric", "train")
    from .fabric_plugins import plugins_of, strategy_of

    place = find_place(os.environ)
    _check_started(place, config)
    device = device_of(config.device)
    devices = _devices(place, config, device)
    several = place.world_size > 1 or (isinstance(devices, int) and devices > 1)
    if place.started:
        os.environ.update(place.variables())
    made = fabric.Fabric(
        accelerator=device.type,
        devices=devices,
        num_nodes=place.nodes,
        strategy=strategy_of(place) if several else "auto",
        plugins=plugins_of(place, config, device),
    )
    if several and not place.started:  # Fabric starts the others
        os.environ |= for_children()
    made.launch()
    return made


def _check_started(place: Place, config: TrainConfig) -> None:
    """Refuse ranks that would each train alone."""
    if place.world_size > 1 and not config.distributed:
        raise UsageError(
            f"{place.world_size} ranks were started, and without --distributed each would train "
            "alone"
        )
    if config.distributed and (tasks := tasks_elsewhere(os.environ)) > 1:
        raise UsageError(
            f"--distributed: the {tasks} tasks of SLURM's job are not started; say penstock "
            "launch slurm -- train ..."
        )


def _devices(place: Place, config: TrainConfig, device: torch.device) -> int | list[int]:
    """The number of devices that Fabric starts ranks on, or a list with the device of this rank."""
    if device.type != "cuda":
        return 1
    if place.started:
        return [own_device(place, torch.cuda.device_count())]
    return torch.cuda.device_count() if config.distributed else 1


def device_of(name: str) -> torch.device:
    """The device that ``--device`` names; ``auto`` is a CUDA device if there is one, else the CPU.

    Raises:
        UsageError: Torch finds no such device.
    """
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = "cuda" if there["cuda"] else "cpu"
    if not there[name]:
        raise UsageError(f"--device {name}: torch finds no such device here")
    return torch.device(name)


def own_device(place: Place, visible: int) -> int:
    """The number of a rank's GPU: the rank's number on its node, or 0 if it sees one GPU only."""
    if visible == 1:
        return 0
    if place.local_rank >= visible:
        raise UsageError(
            f"rank {place.rank} is number {place.local_rank} of its node, which has {visible} "
            "GPUs: start as many ranks"
        )
    return place.local_rank


class Stop:
    """A flag that signals set. All ranks read the same value at the same step."""

    def __init__(self) -> None:
        self.raised: str | None = None
        self._handled = contextlib.ExitStack()
        self._group: Any = None
        self._vote: tuple[Any, Tensor] | None = None

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # others may set no handlers
            self._handled.enter_context(signals_handled(dict.fromkeys(SIGNALS, self._raise)))
        return self

    def __exit__(self, *_: object) -> None:
        self._handled.close()

    def _raise(self, number: int, frame: object) -> None:
        self.raised = signal.Signals(number).name
        if number == signal.SIGINT:  # a second Ctrl-C does not wait for the step's end
            signal.signal(number, signal.default_int_handler)

    def agreed(self) -> bool:
        """Whether to stop after this step: the same answer on every rank.

        A single rank returns its own flag. Several ranks sum their flags: the sum begins after one
        step and is read after the next, so that no rank waits for it. It uses the gloo backend, so
        that no GPU waits either.
        """
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return self.raised is not None
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        stop = False
        if self._vote is not None:
            work, votes = self._vote
            work.wait()
            stop = bool(votes.item())
        votes = torch.tensor([int(self.raised is not None)])
        self._vote = dist.all_reduce(votes, group=self._group, async_op=True), votes
        return stop

    def forget(self) -> None:
        """Wait for the running sum; every rank calls this before it ends."""
        if self._vote is not None:
            self._vote[0].wait()
            self._vote = None


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def host_name() -> str:
    """The name of this node: SLURM's name if there is one, since its nodes may share a machine."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def job_facts(hosts: Sequence[str]) -> dict[str, Any]:
    """The nodes and the SLURM job of a run, from the host of each rank."""
    return {
        "nodes": len(set(hosts)),
        "hosts": list(dict.fromkeys(hosts)),
        "job_id": job_of(os.environ) or None,
        "job_name": os.environ.get("SLURM_JOB_NAME"),
        "restarts": restarts_of(os.environ),
    }


def gather(mine: T, ranks: int) -> list[T]:
    """The values of all ranks, in order, on every rank."""
    every = [mine] * ranks
    if ranks > 1:
        dist.all_gather_object(every, mine)
    return every
