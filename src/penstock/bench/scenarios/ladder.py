"""Scenario ``ladder``: the same batches, one step more at each rung; see `reports.loader`.

    L1  open and read the file of each chunk
    L2  and decode it, into reused memory
    L3  and copy it into the batch, whose memory is reused
    L4  the whole loader
    L5  the loader, and the copy of its batch to the device

Up to L3, the threads take one chunk after the other until the batch is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, require
from ...loading import EngineKnobs, PatchGrid, Selection, locate, open_engine
from . import Phase, Scenario, Work
from .loader_scenario import OURS, LoaderScenario
from .sources import CaseData


def rung(case: Mapping[str, Any]) -> Scenario:
    """The scenario of a rung."""
    return _RUNGS[case["rung"]](case)


class Rung:
    """Reads batches one after the other, and begins again after the last."""

    device = "cpu"

    def __init__(self, case: Mapping[str, Any]) -> None:
        self.case, self.data = case, CaseData(case)
        self.batches = self.data.batches()
        self._pool = ThreadPoolExecutor(self.data.threads)
        self.work: Work = {
            "samples": case["batch"],
            "bytes": case["batch"] * self.data.packed.sample_bytes,
        }
        self.facts: dict[str, Any] = dict(self.data.facts)
        try:
            self.set_up()
        except BaseException:
            self.close()
            raise
        self.facts |= self.data.prepare()
        self._next = 0

    def set_up(self) -> None: ...

    def read(self, batch: int) -> None:
        raise NotImplementedError

    def step(self, phase: Phase) -> Work:
        self.read(self._next)
        self._next = (self._next + 1) % len(self.batches)
        return self.work

    def together(self, work: Callable[[Any], None], pieces: Sequence[Any]) -> None:
        """Work through some pieces in all threads."""
        rest = iter(pieces)  # whose next piece only one thread can get

        def take() -> None:
            for piece in rest:
                work(piece)

        for future in [self._pool.submit(take) for _ in range(self.data.threads)]:
            future.result()

    def close(self) -> None:
        self._pool.shutdown()
        self.data.close()


class FilesRead(Rung):
    """L1: the threads read the files of the chunks."""

    def set_up(self) -> None:
        if self.data.remote:
            raise UsageError("the data is not on a disk of this machine")
        self.engine = engine_of(self.data, "native")
        self.tasks = [self.engine.chunks(*self.data.rows(items)) for items in self.batches]

    def read(self, batch: int) -> None:
        self.together(self.one, self.tasks[batch])

    def one(self, task: Any) -> None:
        self.engine.stored.give(task.fetch())


class Decode(FilesRead):
    """L2: the threads read and decode the chunks."""

    def one(self, task: Any) -> None:
        stored = task.fetch()
        pool = self.engine.decoded
        chunk = pool.take(task.field.chunks, task.layout.dtype)
        task.decode(stored, chunk)
        self.engine.stored.give(stored)
        pool.give(chunk)


class Scatter(Rung):
    """L3: the threads read, decode and copy the chunks into a batch."""

    def set_up(self) -> None:
        self.engine = engine_of(self.data, "auto")
        self.tasks = [self.engine.tasks(*self.data.rows(items)) for items in self.batches]
        self.out: dict[str, NDArray[Any]] = {
            name: np.empty(field.out_shape(self.case["batch"]), field.dtype)
            for name, field in self.engine.fields.items()
        }

    def read(self, batch: int) -> None:
        self.together(lambda task: task.run(self.out, lambda: None), self.tasks[batch])

    def verify(self) -> None:
        """Read the batches once more and check every row of them."""

        def delivered() -> Iterator[Mapping[str, NDArray[Any]]]:
            for index in range(len(self.batches)):
                self.read(index)
                yield self.out

        self.data.audit(self.batches, delivered(), self.facts)


class Queue(LoaderScenario):
    """L4: Penstock's loader."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        super().__init__({**case, "loader": OURS[0]})


class Transfer(Queue):
    """L5: Penstock's loader, and its batch copied to a GPU."""

    def __init__(self, case: Mapping[str, Any]) -> None:
        self._torch = require("torch", "infer")
        if not self._torch.cuda.is_available():
            raise UsageError("torch sees no CUDA device here")
        super().__init__(case)
        self.facts["device_name"] = self._torch.cuda.get_device_name()

    def step(self, phase: Phase) -> Work:
        work = super().step(phase)
        assert self._batch is not None
        for array in self._batch.values():
            self._torch.from_numpy(array).to("cuda")
        self._torch.cuda.synchronize()
        return work


_RUNGS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "L1": FilesRead,
    "L2": Decode,
    "L3": Scatter,
    "L4": Queue,
    "L5": Transfer,
}


def engine_of(data: CaseData, name: str) -> Any:
    """The engine of this name for the data of a case; ``auto`` is the loader's own choice."""
    places = locate(data.place)
    grids = dict.fromkeys(places, PatchGrid(tuple(data.patch))) if data.patch else {}
    return open_engine(
        name,
        places,
        Selection(patch=grids),
        EngineKnobs(data.threads, data.requests, cache_bytes=0, missing="error"),
    )
