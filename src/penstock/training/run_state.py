"""The state of a run, which is saved to a checkpoint and restored from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..base import TRAIN_FIXED, PenstockError, TrainConfig, UsageError, describe
from ..loading import Order, Position
from .checkpoint import Checkpoints, State, random_state, read, set_random_state
from .ranks import gather
from .step import Stepper, StepTaken


@dataclass
class Tally:
    """The sums over the steps of the current epoch, on one rank."""

    steps: int = 0
    samples: int = 0
    """The number of samples, of all ranks together."""
    seconds: float = 0.0
    """The wall-clock seconds of the steps, of the time between them, and of checkpoints."""
    sums: dict[str, float] = field(default_factory=dict)
    """The sums over steps of the loss and of the workload's metrics, of this rank."""

    def add(self, taken: StepTaken, ranks: int) -> None:
        self.steps += 1
        self.samples += taken.samples * ranks  # equally many on every rank
        for name, value in {"train_loss": taken.loss, **taken.metrics}.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def means(self) -> dict[str, float]:
        """The mean loss and metrics of a step."""
        return {name: total / max(1, self.steps) for name, total in self.sums.items()}


class RunState:
    """The state of a run on one rank. All ranks call `save` and `resume`."""

    def __init__(
        self,
        fabric: Any,
        stepper: Stepper,
        order: Order,
        checkpoints: Checkpoints,
        name: str,
        config: TrainConfig,
    ) -> None:
        self._fabric, self._stepper, self.order = fabric, stepper, order
        self._checkpoints, self._name, self._config = checkpoints, name, config
        self.position = Position(0, 0)
        self.step = 0
        """The number of steps done."""
        self.tally = Tally()
        self.history: list[dict[str, Any]] = []
        """The results of each validated epoch, as one row of numbers."""
        self.resumed: list[int] = []
        """The step at which each resumption of the run began."""

    def save(self) -> None:
        """Write the state as the last checkpoint."""
        fabric, stepper, ranks = self._fabric, self._stepper, self._fabric.world_size
        self._checkpoints.save(
            {
                "workload": self._name,
                "settings": self._settings(),
                "model": stepper.module.state_dict(),
                "optimizer": stepper.optimizer.state_dict(),
                "scheduler": {"last_epoch": stepper.scheduler.last_epoch},
                "scaler": fabric._precision.state_dict(),
                "order": self.order.state_dict(*self.position),
                "random": gather(random_state(fabric.device), ranks),
                "step": self.step,
                "tallies": gather(vars(self.tally), ranks),
                "history": self.history,
                "best": self._checkpoints.best,
                "resumed": self.resumed,
            }
        )

    def resume(self) -> None:
        """Restore the state from the last checkpoint. Raises `UsageError` if the checkpoint is of
        another run or damaged."""
        state = read(self._checkpoints.last, self._name)
        try:
            self._load(state)
            self._make_up_for_the_end_of_an_epoch()
        except PenstockError:
            raise
        except Exception as error:  # a damaged file may hold anything
            kind = f"{type(error).__name__}: {describe(error)}"
            where = f"--resume: {self._checkpoints.last}"
            raise UsageError(f"{where} is damaged, or of another model ({kind})") from error

    def _settings(self) -> dict[str, Any]:
        """The settings that must be unchanged for a run to resume."""
        settings = self._config.model_dump(mode="json", include=set(TRAIN_FIXED))
        return {**settings, "world_size": self._fabric.world_size}

    def _load(self, state: State) -> None:
        stepper, rank = self._stepper, self._fabric.global_rank
        where = f"--resume: {self._checkpoints.last}"
        was, now = state["settings"], self._settings()
        for name in now:
            if was.get(name) != now[name]:
                raise UsageError(
                    f"{where} is of a run with {name} {was.get(name)}, and this has {now[name]}; a "
                    "run goes on as it began, or begins anew with --weights"
                )
        stepper.module.load_state_dict(state["model"])
        _, self.position = self.order.resume(state["order"])  # with the same global batches
        stepper.optimizer.load_state_dict(state["optimizer"])
        self._fabric._precision.load_state_dict(state["scaler"])
        self.step = state["step"]
        stepper.scheduler.last_epoch = state["scheduler"]["last_epoch"]
        self.tally = Tally(**state["tallies"][rank])
        self.history = state["history"]
        self._checkpoints.best = state["best"]
        self.resumed = [*state["resumed"], self.step]
        set_random_state(state["random"][rank], self._fabric.device)

    def _make_up_for_the_end_of_an_epoch(self) -> None:
        """Correct the state if the run ended before, during or after an epoch's validation."""
        if self.tally.steps and self.position.batch == 0:
            self.position = Position(self.position.epoch - 1, self.order.num_batches)
        last = self.history[-1]["epoch"] if self.history else None
        if last == self.position.epoch:  # --max-steps ended inside this epoch, which goes on now
            self.history.pop()
        elif last == self.position.epoch - 1 and not self.tally.steps:
            # The run may have been killed after this checkpoint and before the best was written.
            best = self._checkpoints.best
            if best is not None and best["epoch"] == last:
                self._checkpoints.save_weights(self._stepper.module.state_dict())
