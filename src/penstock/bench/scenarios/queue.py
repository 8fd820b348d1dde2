"""Scenario ``queue``: a real loader, its queue, and a step that takes batches from it.

    first step         get a batch, then wait until the queue is full: the prefill
    every other step   | get | compute |   and then the depth of the queue is read

So the measurement begins with a full queue, however long it took to fill. The loader reads the
batches from the data into its buffers. A step holds its batch while it computes, as a training loop
does. Without workers the same engine reads in the step itself.

A step sleeps, as a processor is idle while an accelerator works; or it takes no time, and batches
come as fast as they are read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from ...base import StageError, Stopped, UsageError, plural
from ...loading import Endless, Loader
from . import Phase, Work, WrongResult


class QueueScenario:
    """A loader and a step beside it."""

    def __init__(
        self, case: Mapping[str, Any], batches: FromLoader | InPlace | None = None
    ) -> None:
        self.device = "cpu"
        self._compute_s = float(case["compute_time"])
        self._batches = batches or (FromLoader(case) if case["workers"] else InPlace(case))
        self._queue: Any = self._batches if case["workers"] else None
        self._held: Mapping[str, Any] | None = None
        self.work: Work = {"samples": case["batch"]}
        self.facts: dict[str, list[int]] = {"left": []}

    def step(self, phase: Phase) -> Work:
        first = self._held is None
        self._held = None  # its buffer may be filled again
        self._held = self._batches.get()
        phase("get")
        rows = {len(array) for array in self._held.values()}
        if rows != {self.work["samples"]}:
            raise WrongResult(f"a batch of {self.work['samples']} came with {sorted(rows)} samples")
        if first:
            if self._queue is not None:
                self._queue.fill()
            return self.work
        phase("")
        if self._compute_s:
            time.sleep(self._compute_s)
        phase("compute")
        if self._queue is not None:
            self.facts["left"].append(self._queue.depth())
        return self.work

    def close(self) -> None:
        self._held = None
        self._batches.close()


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
            f"--batch-size {case['batch']} is more than the {plural(samples, 'sample')} of "
            f"{case['data']}"
        )
    loader.order = Endless(**asdict(loader.order), reshuffled=True)
    return loader
