"""Scenario ``loader``: the wait for one batch, of Penstock's loader or of a contender.

    setup     import the library; fill or empty the page cache, as the case says
    step 1    open the data and wait for the first batch; this starts all threads
    step ...  wait for the next batch, in the same order for every loader
    verify    read the same batches again with a new loader, and compare checksums

If the data set has fewer batches than the case needs, they repeat in one endless epoch: at the end
of an epoch a loader could not prefetch, and would wait longer than usual.

Batches that were prefetched before the samples would seem free. So the warm-up takes at least as
many batches as a loader prefetches.

A step is the wait alone. Computing the checksums of a batch takes as long as reading it, and a
loader would prefetch in that time. So all timed batches are delivered once more, untimed, and every
byte of every row is checked then. The result is wrong unless there are 0 duplicates, 0 missing and
0 wrong rows.

Bytes and processor time are counted from the first batch to the last, over the whole process tree,
so that prefetching at both ends cancels out.

Scenario ``ladder``: the same batches, one step more at each rung; see `reports.loader`.

    L1  open and read the file of each chunk
    L2  and decode it, into reused memory
    L3  and copy it into the batch, whose memory is reused
    L4  the whole loader
    L5  the loader, and the copy of its batch to the device

Up to L3, the threads take one chunk after the other until the batch is done.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError, frozen_garbage, plural, require
from ...loading import (
    Contender,
    Endless,
    EngineKnobs,
    Field,
    PatchGrid,
    Selection,
    chunk_reads,
    cut_of,
    locate,
    make_contender,
    open_engine,
)
from . import Phase, Scenario, Work, WrongResult
from .sources import CaseData, Counters

Batch = Mapping[str, NDArray[Any]]
OURS = ("penstock", "penstock-native", "penstock-tensorstore")
_PRICED = 64
"""The number of batches whose reads are counted beforehand."""


class LoaderScenario:
    """A loader and the batches that it delivers."""

    device = "cpu"

    def __init__(self, case: Mapping[str, Any]) -> None:
        self._case = case
        self._data = CaseData(case)
        self._packed, self._order = self._data.packed, self._data.order
        self._timed_from = 1 + case["warmup"]
        self.work: Work = {
            "samples": case["batch"],
            "bytes": case["batch"] * self._packed.sample_bytes,
        }
        try:  # opened once beforehand: imports are done then, and a missing package is reported
            contender = self._make()
            self._ahead = ahead_of(contender)
            contender.close()
        except BaseException:
            self._data.close()
            raise
        self._further = max(0, self._ahead - case["warmup"])
        spare = self._order.num_batches - self._timed_from - case["batches"]
        if case["cache"] == "cold" and spare < self._further:
            self._data.close()
            raise UsageError(
                f"--cache cold: {case['loader']} reads {plural(self._ahead, 'batch')} ahead, and "
                f"the data has {self._order.num_batches} of --batch-sizes {case['batch']} in all; "
                f"lower --batches by {self._further - max(0, spare)}"
            )
        self._data.further = self._further + self._ahead
        self.facts: dict[str, Any] = {**self._data.facts, **self._data.prepare()}
        self.facts["ahead"] = self._ahead
        self._still = contextlib.ExitStack()
        self._contender: Contender | None = None
        self._batches: Iterator[Batch] = iter(())
        self._batch: Batch | None = None
        self._before: Counters | None = None
        self._taken = 0
        """The number of batches so far: those of the steps, and those that `_settle` takes."""

    def step(self, phase: Phase) -> Work:
        if self._taken == self._timed_from - 1:
            self._settle()
        self._batch = self._next()
        if self._before is None:
            self._before = self._data.counters()
        rows = {len(array) for array in self._batch.values()}
        if rows != {self._case["batch"]}:
            raise WrongResult(f"a batch has {sorted(rows)} rows, not {self._case['batch']}")
        return self.work

    def verify(self) -> None:
        """Deliver the batches once more and check every row of them."""
        assert self._before is not None
        self._count(self._data.counters() - self._before, self._taken - 1)
        self._close()
        # A further epoch of the same seed would be the same batches again.
        number = min(self._taken, self._order.num_batches)
        self._contender = self._make()
        self._batches = self._contender.batches()
        delivered = (next(self._batches, {}) for _ in range(number))
        items = [self._order.items(0, index) for index in range(number)]
        self._data.audit(items, delivered, self.facts)

    def close(self) -> None:
        self._still.close()
        self._close()
        self._data.close()

    def _make(self) -> Contender:
        case = self._case
        knobs: dict[str, Any] = {}
        if case["loader"] in OURS:
            knobs = {"fetch": self._data.requests, "patch": self._data.patch}
        order = Endless(**asdict(self._order))
        contender = make_contender(
            case["loader"], self._data.place, order, threads=case["threads"], **knobs
        )
        if case["loader"] in OURS:
            contender.loader.order = order  # type: ignore[attr-defined]
        return contender

    def _settle(self) -> None:
        """Before the last wait of the warm-up, take the prefetched batches."""
        # `measure` collects garbage between warm-up and samples. Done here, it takes no time there,
        # in which a loader could prefetch.
        gc.collect()
        self._still.enter_context(frozen_garbage())
        for _ in range(self._further):
            self._next()

    def _next(self) -> Batch:
        if self._contender is None:
            self._contender = self._make()
            self._batches = self._contender.batches()
        batch = next(self._batches, None)
        if batch is None:
            raise WrongResult(f"{self._case['loader']} ended after {plural(self._taken, 'batch')}")
        self._taken += 1
        return batch

    def _count(self, spent: Counters, batches: int) -> None:
        if not batches:
            return
        delivered = batches * self.work["bytes"]
        self.facts["cpu_s_per_gb"] = spent.cpu_s / (delivered / 1e9)
        if spent.stored is None:
            return
        stored = spent.stored / batches
        share = self._case["batch"] / self._packed.num_samples
        self.facts["stored_bytes"] = stored
        self.facts["read_amplification"] = stored / (self._data.stored_bytes * share)

    def _close(self) -> None:
        self._batch, self._batches = None, iter(())
        if self._contender is not None:
            self._contender.close()
            self._contender = None


def ahead_of(contender: Any) -> int:
    """The maximum number of batches that a contender prefetches."""
    ours = getattr(contender, "loader", None)
    return int(ours.config.queue if ours is not None else getattr(contender, "ahead", 0))


def check(case: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The case with the hash of its data set, and its facts. Raises `UsageError` if the data cannot
    be read in such batches."""
    with contextlib.closing(CaseData(case)) as data:
        facts = {**data.facts, "decoded_per_used": decoded_per_used(data)}
        return {**case, "dataset": data.facts["dataset"]}, facts


def decoded_per_used(data: CaseData) -> float:
    """Bytes that are decoded for each byte that is used, where each batch reads each of its chunks
    once: by the first batches of the order."""
    decoded = used = 0
    for name, array in data.packed.arrays.items():
        field = cut_of(array) or Field(name, array.shape, array.chunks, array.dtype)
        for batch in range(min(_PRICED, data.order.num_batches)):
            items = data.order.items(0, batch)
            decoded += len(chunk_reads(field, *data.order.split(items))) * field.chunk_nbytes
            used += len(items) * field.item_nbytes
    return decoded / used


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
