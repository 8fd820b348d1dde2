"""Lightning modules of one layer, and Lightning itself, imported as it wants to be."""

from __future__ import annotations

import warnings
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    # First, as Lightning imports a torchvision that may not load.
    from penstock.training.lightning import Records as Records  # isort: skip
    import pytorch_lightning as lightning


class Line(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        points, values = batch
        loss: torch.Tensor = ((self.net(points) - values) ** 2).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Slow(Line):
    """A step takes a second and the validation of a batch a hundred, by a clock of its own."""

    now = 0.0

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.now += 1
        return super().training_step(batch, number)

    def validation_step(self, batch: Any, number: int) -> None:
        self.now += 100
