"""Changes to `lightning_fabric`: for ranks that it did not start, and for mixed precision."""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric.plugins import MixedPrecision
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.strategies.ddp import DDPStrategy


class StartedRanks(TorchElasticEnvironment):
    """Ranks that torchrun or srun has started, any number on each of any number of nodes."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None: ...


class OneDevice(DDPStrategy):
    """DDP for a rank that was started and so has one device, whatever its rank is."""

    @property
    def root_device(self) -> torch.device:
        (device,) = self.parallel_devices or []
        return device


class Autocast(MixedPrecision):
    """Mixed precision that leaves inputs as they are: autocast casts what an operator needs, and
    coordinates of boxes must not be rounded."""

    def convert_input(self, data: Any) -> Any:
        return data
