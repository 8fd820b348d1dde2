"""The records of a training, from a user's own Lightning ``Trainer``.

    from penstock.training.lightning import Records
    Trainer(callbacks=[Records("OUT")]).fit(model, data)

It writes the same records of steps as `train`: OUT/steps/rankN.csv, and OUT/training_results.json
with the totals of the phases, the number of samples and the peaks of memory of every rank.
Validation time is counted separately, also within an epoch. Lightning moves a batch to its device
before any callback, so the transfer is part of ``data_wait`` here. The callback is for automatic
optimisation with one optimiser step for each batch.

Import it before Lightning itself: where torchvision's compiled operators do not load beside torch,
Lightning can only be imported after the stand-ins that this room registers.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..base import RESULTS, MissingDependency, write_json
from ..instruments import Clock, DevicePhaseTimer, PhaseTimer
from ..models import import_torchvision
from .ranks import gather
from .step import mark_computed
from .step_log import StepLog, memory


def _callback() -> Any:
    """Lightning's class ``Callback``, from whichever of its two packages is installed.

    Lightning's metrics import torchvision, if it is installed.
    """
    with contextlib.suppress(MissingDependency):
        import_torchvision()
    for package in ("pytorch_lightning", "lightning.pytorch"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(package).Callback
    raise MissingDependency(
        "pytorch_lightning is not installed; run: pip install 'pytorch-lightning!=2.6.2,!=2.6.3'"
    )


class Records(_callback()):  # type: ignore[misc]
    """A callback that times every step of a Trainer."""

    def __init__(self, out: str | Path, clock: Clock = time.perf_counter) -> None:
        self.out, self._clock = Path(out), clock
        self._pending: list[tuple[int, int, int, Tensor]] = []
        self._samples = 0
        self._seconds = {"training_s": 0.0, "validation_s": 0.0}
        self._in_epoch = False

    def on_train_start(self, trainer: Any, module: Any) -> None:
        device: torch.device = module.device
        self._cuda = device.type == "cuda"
        self._timer: Any = DevicePhaseTimer(torch.cuda) if self._cuda else PhaseTimer(self._clock)
        self._sums = isinstance(trainer.strategy.model, DistributedDataParallel)
        self._log = StepLog(self.out, trainer.global_rank, trainer.global_step)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self._in_epoch = True
        self._since = self._clock()
        self._timer.begin()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Validation inside or at the end of an epoch is counted; before the first epoch, or alone,
        it is not."""
        if self._in_epoch:
            self._account("training_s")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if self._in_epoch:
            self._account("validation_s")
            self._timer.begin()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        self._timer.end_phase("data_wait")

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self._timer.end_phase("forward")
        self._loss = loss.detach()
        if self._sums:
            mark_computed(loss, self._timer)

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        self._timer.end_phase("communication" if self._sums else "backward")

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int
    ) -> None:
        self._timer.end_phase("optimizer")
        self._timer.end()
        tensor = next(_tensors(batch), None)
        samples = 0 if tensor is None else len(tensor)
        self._pending.append((trainer.global_step, trainer.current_epoch, samples, self._loss))
        if len(self._pending) >= self._timer.drain_every:
            self._drain()
        self._timer.begin()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self._account("training_s")
        self._in_epoch = False

    def on_train_end(self, trainer: Any, module: Any) -> None:
        mine = {
            "rank": trainer.global_rank,
            "samples": self._samples,
            "phases": self._log.summary(),
            "memory": memory(module.device),
        }
        self._log.close()
        every = gather(mine, trainer.world_size)
        samples, trained = sum(rank["samples"] for rank in every), self._seconds["training_s"]
        results = {
            "workload": type(module).__name__,
            "status": "stopped" if trainer.interrupted else "complete",
            "parameters": sum(p.numel() for p in module.parameters()),
            "world_size": trainer.world_size,
            "steps": trainer.global_step,
            "samples": samples,
            **self._seconds,
            "samples_per_s": samples / trained if trained else None,
            "ranks": every,
        }
        if trainer.is_global_zero:
            write_json(self.out / RESULTS, results)

    def _account(self, name: str) -> None:
        """Add the time since the last call to a total; wait for the device first."""
        if self._cuda:
            torch.cuda.synchronize()
        self._drain()
        now = self._clock()
        self._seconds[name] += now - self._since
        self._since = now

    def _drain(self) -> None:
        for (step, epoch, samples, loss), seconds in zip(
            self._pending, self._timer.drain(), strict=True
        ):
            self._log.add(step, epoch, samples, float(loss), seconds)
            self._samples += samples
        self._pending.clear()


def _tensors(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, depth first. The first axis of the first one counts the samples."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(part)
