"""Emulated computing: takes the place of a training step while batches are read beside it.

    none    nothing: the batches come as fast as they are read
    sleep   the processor is idle, as while an accelerator works
    busy    one core multiplies matrices, for the given time if nothing else runs
    train   a training step of a real network on its own seeded input

``busy`` and ``train`` compete with the workers for cores; ``sleep`` does not. ``seconds`` is the
time of a step that never waits: given for ``sleep``, timed beforehand for the others. Only that
timing needs a clock.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...base import UsageError
from ...instruments import Clock
from . import backend_of

_STACK, _SIDE = 64, 48
"""The matrices of a piece of busy work. They are so small that every BLAS uses one thread, and so
many that the interpreter's lock is free for about a millisecond."""
_TRIALS = 3


def make_compute(case: Mapping[str, Any], clock: Clock = time.perf_counter) -> Compute:
    """The step of kind ``case["compute"]``; ``sleep`` and ``busy`` take ``case["compute_time"]``
    seconds.
    """
    kinds: dict[str, Callable[[], Compute]] = {
        "none": lambda: Sleep(0.0),
        "sleep": lambda: Sleep(case["compute_time"]),
        "busy": lambda: Busy(case["compute_time"], clock),
        "train": lambda: Train(case, clock),
    }
    kind = case["compute"]
    if kind not in kinds:
        raise UsageError(f"--compute {kind!r} is not one of {', '.join(kinds)}")
    return kinds[kind]()


class Sleep:
    """A step between two batches. ``seconds`` is the time of a step that never waits."""

    def __init__(self, seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self.seconds, self._sleep = seconds, sleep

    def run(self) -> None:
        if self.seconds:
            self._sleep(self.seconds)

    def close(self) -> None:
        pass


class Busy:
    """A step that keeps one core busy."""

    def __init__(self, seconds: float, clock: Clock) -> None:
        random = np.random.default_rng(0)
        self._matrices = random.standard_normal((_STACK, _SIDE, _SIDE), np.float32)
        self._product = np.empty_like(self._matrices)
        self.pieces = calibrated(self._piece, seconds, clock)
        self.seconds = timed(self.run, clock)

    def run(self) -> None:
        for _ in range(self.pieces):
            self._piece()

    def close(self) -> None:
        pass

    def _piece(self) -> None:
        np.matmul(self._matrices, self._matrices, out=self._product)


class Train:
    """A step of scenario ``model`` in mode ``train``, with as many samples as a batch."""

    def __init__(self, case: Mapping[str, Any], clock: Clock) -> None:
        from .model import ModelScenario, check

        asked = {
            "model": case["model"],
            "weights": None,
            "mode": "train",
            "tile": case["tile"],
            "batch": case["batch"],
            "channels": None,
            "dtype": "float32",
            "amp": False,
            "compile": False,
            "channels_last": False,
            "checkpointing": False,
            "halo": 0,
            "device": case["device"],
            "threads": None,
            "seed": case["seed"],
            "budget": None,
            "trust_model": case.get("trust_model", False),
        }
        resolved, _ = check(asked)
        self._model = ModelScenario(resolved)
        backend = backend_of(self._model.device)
        self._wait: Callable[[], None] = backend.synchronize if backend else lambda: None
        self.run()  # the first makes what all others use
        self.seconds = timed(self.run, clock)

    def run(self) -> None:
        self._model.step(_untimed)
        self._wait()

    def close(self) -> None:
        self._model.close()


Compute = Sleep | Busy | Train


def calibrated(piece: Callable[[], None], seconds: float, clock: Clock) -> int:
    """The number of times that ``piece`` must run to take these seconds."""
    piece()
    count = 1
    while True:
        began = clock()
        for _ in range(count):
            piece()
        took = clock() - began
        if took >= seconds / 4:
            return max(1, round(count * seconds / took))
        count *= 2


def timed(run: Callable[[], None], clock: Clock) -> float:
    """The median seconds of a few runs."""
    took = []
    for _ in range(_TRIALS):
        began = clock()
        run()
        took.append(clock() - began)
    return statistics.median(took)


def _untimed(name: str) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()
