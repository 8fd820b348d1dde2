"""Workloads that are sent SIGTERM as they look at a batch, one for each way to be fed."""

import itertools
import os
import signal
from typing import Any, ClassVar

from penstock.base.config.train import TrainConfig
from penstock.training.workloads.emulator_workload import EmulatorWorkload
from penstock.training.workloads.pairs import Pairs
from penstock.training.workloads.spiral import Spiral


class Struck:
    """A workload that is sent SIGTERM as a batch, by its number in this process, is looked at:
    one that it is trained on, or validated."""

    moment: ClassVar[int | None] = None

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self._batches = itertools.count()

    def _strike(self) -> None:
        if next(self._batches) == Struck.moment:
            os.kill(os.getpid(), signal.SIGTERM)

    def loss(self, model: Any, batch: Any) -> Any:
        self._strike()
        return super().loss(model, batch)  # type: ignore[misc]

    def answers(self, model: Any, batch: Any) -> Any:
        self._strike()
        return super().answers(model, batch)  # type: ignore[misc]


class StruckSpiral(Struck, Spiral):
    """Fed by torch; dropout draws random numbers."""


class StruckPairs(Struck, Pairs):
    """Fed by threads."""


class StruckEmulator(Struck, EmulatorWorkload):
    """Fed by the loader."""
