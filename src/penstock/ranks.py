"""Devices, precision and ranks of a training, by `lightning_fabric`; how ranks agree to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import TrainConfig
from .errors import UsageError, require
from .feed import SIGNALS


@contextlib.contextmanager
def launched(config: TrainConfig) -> Iterator[Any]:
    """Devices and ranks. A process group that is made here ends here."""
    ours = not dist.is_initialized()
    try:
        yield _fabric(config)
    finally:
        if ours and dist.is_initialized():
            dist.destroy_process_group()


def _fabric(config: TrainConfig) -> Any:
    fabric = require("lightning_fabric", "train")
    from lightning_fabric.plugins import MixedPrecision
    from lightning_fabric.strategies.ddp import DDPStrategy

    class Autocast(MixedPrecision):
        """Leaves inputs as they are. Autocast casts what an operator should have in half, and
        coordinates of boxes are not to be rounded to it."""

        def convert_input(self, data: Any) -> Any:
            return data

    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1 and not config.distributed:
        raise UsageError(
            f"{ranks} ranks were started, and without --distributed each would train alone"
        )
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: torch finds no CUDA device here")
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE")
    nodes = os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("SLURM_NNODES") or "1"
    devices: int | str = 1
    if config.distributed:
        devices = int(local.partition("(")[0]) if local else torch.cuda.device_count() or 1
    plugins: list[Any] = []
    if config.amp:
        kind = "cuda" if cuda else "cpu"
        plugins.append(Autocast("16-mixed" if cuda else "bf16-mixed", kind))
    made = fabric.Fabric(
        accelerator=config.device,
        devices=devices,
        num_nodes=int(nodes) if config.distributed else 1,
        strategy=DDPStrategy(gradient_as_bucket_view=True) if config.distributed else "auto",
        plugins=plugins,
    )
    made.launch()
    return made


def set_flags(config: TrainConfig) -> None:
    torch.backends.cudnn.benchmark = config.cudnn_benchmark
    torch.backends.cuda.matmul.allow_tf32 = config.tf32
    torch.backends.cudnn.allow_tf32 = config.tf32
    if config.threads:
        torch.set_num_threads(config.threads)


class Stop:
    """A flag that signals set, and on which the ranks agree."""

    def __init__(self) -> None:
        self.raised: str | None = None
        self._before: dict[int, Any] = {}
        self._group: Any = None
        self._vote: tuple[Any, Tensor] | None = None

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():  # no other may set handlers
            self._before = {number: signal.signal(number, self._raise) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _raise(self, number: int, frame: object) -> None:
        self.raised = signal.Signals(number).name

    def agreed(self) -> bool:
        """Whether to stop at this boundary: the same answer on every rank.

        A rank alone knows at once. Of several, each casts its vote at one boundary and reads the
        sum at the next, when it has long arrived; the group is gloo's, so that no GPU waits.
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
        """Read the vote that is under way, as every rank does before it ends."""
        if self._vote is not None:
            self._vote[0].wait()
            self._vote = None
