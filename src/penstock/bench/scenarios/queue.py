"""Scenario ``queue``: a real loader, its queue, and a step that takes batches from it.

    first step         get a batch, then wait until the queue is full: the prefill
    every other step   | get | compute |   and then the depth of the queue is read

So the measurement begins with a full queue, however long it took to fill. The loader reads the
batches from the data into its buffers. A step holds its batch while it computes, as a training loop
does. Without workers the same engine reads in the step itself.

What a step computes takes the place of a training step:

    none    nothing: the batches come as fast as they are read
    sleep   the processor is idle, as while an accelerator works
    train   a training step of a real network on its own seeded input

``train`` competes with the workers for cores; ``sleep`` does not.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from ...base import StageError, Stopped, UsageError
from ...instruments import Clock
from ...loading import Endless, Loader
from . import Phase, Work, WrongResult, backend_of

_TRIALS = 3
"""Runs of a step that are timed for its median."""


class QueueScenario:
    """A loader and a step beside it."""

    def __init__(
        self,
        case: Mapping[str, Any],
        batches: FromLoader | InPlace | None = None,
        compute: Compute | None = None,
    ) -> None:
        self.device = "cpu"  # a step waits for its work on a GPU
        # Timed before the workers read, so without contention.
        self._compute = compute or make_compute(case)
        self._batches = batches or (FromLoader(case) if case["workers"] else InPlace(case))
        self._queue: Any = self._batches if case["workers"] else None
        self._taken: list[int] = []
        self._left: list[int] = []
        self._filled = False
        self._held: Mapping[str, Any] | None = None
        self.work: Work = {"samples": case["batch"]}
        self.facts: dict[str, Any] = {
            "compute_s": self._compute.seconds,
            "in_hand": 0,  # a batch is begun only when there is room for it
            "taken": self._taken,
            "left": self._left,
        }

    def step(self, phase: Phase) -> Work:
        self._held = None  # its buffer may be filled again
        self._held = self._batches.get()
        phase("get")
        rows = {len(array) for array in self._held.values()}
        if rows != {self.work["samples"]}:
            raise WrongResult(f"a batch of {self.work['samples']} came with {sorted(rows)} samples")
        if not self._filled:
            self._filled = True
            if self._queue is not None:
                self._queue.fill()
            return self.work
        if self._queue is not None:
            self._taken.append(self._queue.depth())
        phase("")
        self._compute.run()
        phase("compute")
        if self._queue is not None:
            self._left.append(self._queue.depth())
        return self.work

    def close(self) -> None:
        self._held = None
        self._batches.close()
        self._compute.close()


def check(case: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, Any]]:
    """The case as it is; raises `UsageError` for data that cannot be read in such batches."""
    _loader(case, workers=1, queue=0).close()
    return case, {}


class FromLoader:
    """The loader, with the threads and the depth of queue of the case."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        self._queue = case["queue"]
        self._loader = _loader(case, workers=case["workers"], queue=self._queue)
        self._batches = iter(self._loader)

    def get(self) -> Mapping[str, Any]:
        """The next batch."""
        return next(self._batches)

    def depth(self) -> int:
        """The number of batches that are ready and not taken."""
        return self._loader.ready

    def fill(self) -> None:
        """Wait until the queue is full."""
        run = self._loader._run
        assert run is not None
        # The next `get` raises the error of the readers.
        with contextlib.suppress(Stopped, StageError):
            if not run.fill(self._queue):
                raise WrongResult(f"the batches ended before a queue of {self._queue} was full")

    def close(self) -> None:
        self._loader.close()


class InPlace:
    """No workers: `get` reads each batch, into the same memory each time."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        loader = _loader(case, workers=1, queue=0)  # for its engine and its order; never iterated
        self._engine, self._order, self._place = loader.engine, loader.order, 0
        self._first = loader.first_sample
        self._arrays = {
            name: np.empty(field.out_shape(case["batch"]), field.dtype)
            for name, field in loader.fields.items()
        }

    def get(self) -> Mapping[str, Any]:
        samples, patches = self._order.split(self._order.items(0, self._place))
        self._place += 1
        cut = patches if self._order.patches_per_sample > 1 else None
        self._engine.read_into(samples + self._first, self._arrays, patches=cut)
        return self._arrays

    def close(self) -> None:
        pass


def _loader(case: Mapping[str, Any], *, workers: int, queue: int) -> Loader:
    loader = Loader(
        case["data"],
        batch_size=case["batch"],
        shuffle=case["shuffle"],
        seed=case["seed"],
        workers=workers,
        queue=queue,
        missing=case.get("missing", "error"),
        patch=case.get("patch"),
    )
    samples = loader.order.num_items
    if case["batch"] > samples:
        raise UsageError(
            f"--batch-size {case['batch']} is more than the {samples} samples of {case['data']}"
        )
    loader.order = Endless(**asdict(loader.order), reshuffled=True)
    return loader


def make_compute(case: Mapping[str, Any], clock: Clock = time.perf_counter) -> Compute:
    """The step of kind ``case["compute"]``; ``sleep`` takes ``case["compute_time"]`` seconds."""
    kinds: dict[str, Callable[[], Compute]] = {
        "none": lambda: Sleep(0.0),
        "sleep": lambda: Sleep(case["compute_time"]),
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
        self._model.step(lambda phase: None)
        self._wait()

    def close(self) -> None:
        self._model.close()


Compute = Sleep | Train


def timed(run: Callable[[], None], clock: Clock) -> float:
    """The median seconds of a few runs."""
    took = []
    for _ in range(_TRIALS):
        began = clock()
        run()
        took.append(clock() - began)
    return statistics.median(took)
