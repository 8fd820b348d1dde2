"""Changes to `lightning_fabric`: for ranks that it did not start, for mixed precision and for
checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins import HalfPrecision, MixedPrecision, TorchCheckpointIO
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning_fabric.strategies.ddp import DDPStrategy

from ..base import TrainConfig
from ..cluster import Place


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


class StraightToDisk(TorchCheckpointIO):
    """Writes a state to the path that it is given, which is that of a draft. Fabric's own would
    write it to the folder of temporary files first, so that no reader meets half of it."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        with Path(path).open("wb") as file:  # by a path, torch would write its name as well
            torch.save(checkpoint, file)


def strategy_of(place: Place) -> DDPStrategy:
    """The strategy of several ranks."""
    return (OneDevice if place.started else DDPStrategy)(gradient_as_bucket_view=True)


def plugins_of(place: Place, config: TrainConfig, device: torch.device) -> list[Any]:
    """The environment of the ranks, how checkpoints are written, and the training's precision."""
    # By itself, Fabric would use the counts of a SLURM job, and warn wherever there is an srun.
    plugins: list[Any] = [StartedRanks() if place.started else LightningEnvironment()]
    plugins.append(StraightToDisk())
    if config.amp:
        plugins.append(Autocast("16-mixed" if device.type == "cuda" else "bf16-mixed", device.type))
    elif config.dtype != "float32":
        plugins.append(HalfPrecision("bf16-true" if config.dtype == "bfloat16" else "16-true"))
    return plugins
