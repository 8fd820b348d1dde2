"""The state of a training on disk, written completely or not at all.

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
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..base import BEST, CHECKPOINTS, UsageError, replacing
from ..models import read_tensors

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
