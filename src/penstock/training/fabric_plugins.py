"""What `lightning_fabric` is to do otherwise: about ranks that it did not start, and in half."""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric.plugins import MixedPrecision
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.strategies.ddp import DDPStrategy


class StartedRanks(TorchElasticEnvironment):
    """Ranks that torchrun or srun has started, on any number of nodes, on each any number."""

    def validate_settings(self, num_devices: int, num_nodes: int) -> None: ...


class OneDevice(DDPStrategy):
    """A rank that was started has one device, whatever its number among the ranks."""

    @property
    def root_device(self) -> torch.device:
        (device,) = self.parallel_devices or []
        return device


class Autocast(MixedPrecision):
    """Leaves inputs as they are. Autocast casts what an operator should have in half, and
    coordinates of boxes are not to be rounded to it."""

    def convert_input(self, data: Any) -> Any:
        return data
