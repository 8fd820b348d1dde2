"""Two spirals that something happens to: workloads that tests name, some in other processes."""

import os
import signal
import time
from functools import partial
from typing import Any

import torch

from penstock.base.errors import PenstockError
from penstock.training.workloads.spiral import Spiral


class Struck(Spiral):
    """Two spirals, and a signal that reaches only one of the ranks, as its seventh step begins."""

    steps = 0

    def loss(self, model: Any, batch: Any) -> Any:
        self.steps += 1
        if self.steps == 7 and os.environ["RANK"] == os.environ.get("STRUCK"):
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch)


class Damaged(Spiral):
    """Two spirals with a point that is nowhere."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.train.tensors[0][17] = torch.nan

    def name_of(self, index: int) -> str:
        return f"point {index}"


class DamagedForOne(Spiral):
    """Two spirals whose third batch one rank cannot take, in a group that ends as NCCL's does:
    for all ranks at once."""

    steps = 0

    def loss(self, model: Any, batch: Any) -> Any:
        torch.distributed.destroy_process_group = partial(time.sleep, 600)
        self.steps += 1
        if self.steps == 3 and os.environ["RANK"] == "1":
            raise PenstockError("sample 17 is damaged")
        return super().loss(model, batch)


class Slowed(Spiral):
    """Two spirals whose steps take a moment, from the 41st of a process on, while there is a file
    ``hold`` beside the folder of the run: so it does not end before a signal has come."""

    steps = 0

    def loss(self, model: Any, batch: Any) -> Any:
        self.steps += 1
        if self.steps > 40 and (self.config.output_dir.parent / "hold").exists():
            time.sleep(0.2)
        return super().loss(model, batch)


class Frozen(Spiral):
    """Two spirals with a first layer that stays as it is."""

    def model(self) -> torch.nn.Module:
        module = super().model()
        for parameter in next(
            m for m in module.modules() if isinstance(m, torch.nn.Linear)
        ).parameters():
            parameter.requires_grad_(False)
        return module


class Full(Spiral):
    """Two spirals for which there is no room: on a device that is told of, or on the host."""

    def loss(self, model: Any, batch: Any) -> Any:
        if os.environ["FULL"] == "host":
            torch.empty(2**60, dtype=torch.uint8)
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 "
            "GiB of which 1.20 GiB is free. Of the allocated memory 70 GiB is allocated by PyTorch"
        )
