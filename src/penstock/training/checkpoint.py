"""The state of a training, and the checkpoints that hold it: written completely or not at all.

    OUT/checkpoints/last.pt    the state after the last checkpoint
    OUT/best_model.pth         only the weights of the best epoch, by the workload's judge

Every file is written under another name and then renamed, so a killed run leaves the old file.
Files hold tensors, numbers, strings, lists and dicts only. They are read with
``weights_only=True``, which executes no code.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..base import (
    BEST,
    CHECKPOINTS,
    TRAIN_FIXED,
    PenstockError,
    TrainConfig,
    UsageError,
    describe,
    replacing,
)
from ..loading import Order, Position
from ..models import read_tensors
from .ranks import gather
from .step import Stepper, StepTaken

FORMAT, VERSION = "penstock-training", 3
LAST = "last.pt"

State = dict[str, Any]
Write = Callable[[Path, Mapping[str, Any]], None]
"""Writes a state to a path. All ranks call it, and one of them writes."""


class Checkpoints:
    """The checkpoints of one output folder. Every rank makes the same calls."""

    def __init__(self, out: Path, write: Write, *, writes: bool, judge: str, higher: bool) -> None:
        self._out, self._folder = out, out / CHECKPOINTS
        self.last = self._folder / LAST
        self._write, self._writes = write, writes
        self._judge, self._sign = judge, 1.0 if higher else -1.0
        self.best: dict[str, Any] | None = None
        """The best epoch: its ``score``, ``epoch`` and ``scores``."""

    def save(self, state: State) -> None:
        """Write a state as the last checkpoint."""
        self._put(self.last, {"format": FORMAT, "version": VERSION, **state})

    def rank(self, epoch: int, scores: Mapping[str, float]) -> bool:
        """Note the scores of an epoch. Returns whether it is the best; of equal epochs the earlier
        is, and one without a finite score only if it is the first."""
        score = scores[self._judge]
        if self.best is not None:
            before = self._sign * self.best["score"]
            if not (self._sign * score > before or (math.isnan(before) and math.isfinite(score))):
                return False
        self.best = {"score": score, "epoch": epoch, "scores": dict(scores)}
        return True

    def save_weights(self, weights: Mapping[str, Any]) -> None:
        """Write the weights of the best epoch, `best_model.pth`."""
        self._put(self._out / BEST, weights)

    def _put(self, path: Path, state: Mapping[str, Any]) -> None:
        if not self._writes:
            self._write(path, state)  # every rank must call it
            return
        with replacing(path) as draft:
            try:
                self._write(draft, state)
            except RuntimeError:  # torch's, which does not say that the disk is full
                with draft.open("ab") as file:  # the system does
                    file.write(bytes(1 << 20))
                raise


def read(path: Path, workload: str) -> State:
    """The state in a file. Raises `UsageError` if it holds none, or one of another workload."""
    state = read_tensors(path, "--resume")
    made_by = (state.get("format"), state.get("version")) if isinstance(state, dict) else None
    if made_by != (FORMAT, VERSION):
        raise UsageError(f"--resume: {path} is not a checkpoint of this Penstock's train")
    if state.get("workload") != workload:
        raise UsageError(
            f"--resume: {path} is a checkpoint of {state.get('workload')}, not {workload}"
        )
    return state


def random_state(device: torch.device) -> State:
    """The states of this process's random numbers: torch's, numpy's and Python's."""
    numpys: Any = np.random.get_state(legacy=False)
    words = torch.from_numpy(numpys["state"]["key"].astype(np.int64))
    state = {
        "torch": torch.get_rng_state(),
        "numpy": {**numpys, "state": {**numpys["state"], "key": words}},
        "python": random.getstate(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: State, device: torch.device) -> None:
    """Set the random numbers of torch, numpy and Python to what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    numpys = state["numpy"]
    words = numpys["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state({**numpys, "state": {**numpys["state"], "key": words}})
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def seed_rank(seed: int, rank: int) -> None:
    """Seed torch, numpy and Python, so that each rank draws its own random numbers."""
    drawn = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    torch.manual_seed(drawn)
    np.random.seed(drawn)
    random.seed(drawn)


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
            raise UsageError(
                f"--resume: {self._checkpoints.last} is damaged, or of another model "
                f"({type(error).__name__}: {describe(error)})"
            ) from error

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
        # An order takes the end of an epoch for the begin of the next. A tally that is not closed
        # tells that this one is still to be validated.
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
