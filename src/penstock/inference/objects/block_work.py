"""The work on single blocks, which any process may do: count its objects, and write them.

folder/objects/000012.npz    what is counted of block 12; `run_folder.names` lists the other files
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import multiprocessing
import os
import platform
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from ...base import (
    PenstockError,
    end_with_parent,
    environment_kept,
    for_children,
    in_order,
    one_heap,
    script_hidden,
)
from ...cluster import UnfitWorker
from ...data import Box, OutputLock, Sink, Source, open_source
from ..run_folder.block_log import digest_of
from ..run_folder.folder import read_run
from ..run_folder.names import HOLES_FILE, IDS_FILE, OWNERS_FILE, STARTS_FILE
from .block_record import BlockRecord, Measures, load_table, measure_block, record_of, save_table
from .components import ComponentRule, HoleTable, LocalLabels
from .decoded_views import Owners, ViewWork, painted
from .label_output import RoundWork, output_of


@dataclass(frozen=True)
class BlockWork(RoundWork):
    """The work that counts the objects of blocks, and writes them."""

    rule: ComponentRule
    views: ViewWork | None = None
    """The views that a decoder sees, if one makes the objects."""
    dtype: str = ""
    """The dtype of the output, and the run that writes it; empty until there is one."""
    run: str = ""

    @property
    def measured(self) -> bool:
        """True if objects are measured, for a table or as a decoder made them."""
        return (self.config.table is not None or self.config.decodes) and not self.rule.inverted

    @cached_property
    def image(self) -> Source | None:
        """The image whose intensities are measured."""
        if self.config.intensity is None or not self.measured:
            return None
        return open_source(self.config.intensity, name="--intensity")

    @cached_property
    def sink(self) -> Sink:
        """The output, which must exist."""
        sink = output_of(
            self.config, self.source, self.grid.domain, self.dtype, overwrite=False, resume=True
        )
        sink.create()
        return sink

    @cached_property
    def lock(self) -> OutputLock:
        """The lock of the output, which names the run."""
        return OutputLock.take([self.sink], self.run, folder=self.folder.parent, member=True)

    @cached_property
    def labels_of(self) -> Callable[[Box, int], LocalLabels]:
        """The function that gives the objects of a block, by what the round before has found."""
        if (views := self.views) is not None:
            owners = load_table(self.folder.parent / OWNERS_FILE, Owners)
            return lambda box, number: painted(views, owners, box)
        rule = self.rule
        if self.config.fill_holes and not rule.inverted:
            rule = replace(rule, holes=load_table(self.folder.parent / HOLES_FILE, HoleTable))
        return partial(rule.labels_of, self.source)

    def load(self, number: int, without: str) -> BlockRecord:
        """Read what is counted of a block, without its ``faces`` or ``measures``."""
        return load_table(self.files(number)[0], BlockRecord, [without])

    def count(self, number: int) -> str:
        """Count the objects of a block. Returns no check."""
        box = self.grid[number]
        labels = self.labels_of(box, number)
        measures: Measures = {}
        if self.measured:
            measures = measure_block(labels, box, self.image, self.image_channels)
        flat = "z" not in self.source.axes
        record = record_of(labels, box, self.grid.domain, flat, measures)
        save_table(self.files(number)[0], record)
        return ""

    def write(self, number: int) -> str:
        """Write a block with final numbers. Returns the check of its values."""
        box = self.grid[number]
        labels = self.labels_of(box, number)
        start, stop = self._starts[number : number + 2]
        if stop - start != labels.count:
            raise PenstockError(
                f"IN {self.source.name}: has changed since its objects were counted; begin anew "
                "with --overwrite"
            )
        ids = self._ids[start:stop].astype(self.sink.dtype)
        values = labels.as_numbered(ids)[None, None]
        check = digest_of([values])
        self.lock.check()  # a process that was stopped long ago must not write into another run's
        self.sink.write(box, values)
        return check

    @property
    def image_channels(self) -> tuple[int, ...]:
        """The channels of the image that are measured."""
        if self.image is None:
            return ()
        first, stop = self.image.domain.start[1], self.image.domain.stop[1]
        return self.config.channels or tuple(range(first, stop))

    @cached_property
    def _ids(self) -> Any:
        return np.load(self.folder.parent / IDS_FILE, mmap_mode="r", allow_pickle=False)

    @cached_property
    def _starts(self) -> Any:
        return np.load(self.folder.parent / STARTS_FILE, allow_pickle=False)


class Round(NamedTuple):
    """What is done with each block before anything else can be."""

    name: Literal["decode", "fill", "count", "write"]
    step: str
    """The method of the work."""
    work: BlockWork | ViewWork
    run: str

    def do(self, number: int) -> str:
        """Do the step on a block, with the work opened. Returns what the step returns."""
        return str(getattr(self.work, self.step)(number))


Over = Callable[[Round, Sequence[int]], Iterator[tuple[int, str]]]
"""Does a round for some blocks, and gives the number of each with what its step returns."""

_ROUND: dict[str, Round] = {}
"""The round of this process, one of a pool or of a cluster, by its `BlockOrder.topic`."""
_OPENED = contextlib.ExitStack()
"""The context of its work."""


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """A block of a round, for another process."""

    round: Round
    number: int
    topic: str
    """A name that only this round has."""


def do_order(order: BlockOrder) -> str:
    """Do the step of a round on a block. Returns what the step returns.

    Raises `UnfitWorker` if the worker does not see the run.
    """
    work = order.round.work
    folder = work.folder.parent
    if order.topic not in _ROUND:
        if read_run(folder).get("run") != order.round.run:
            raise UnfitWorker(
                f"the worker on {platform.node()} does not see the run in {folder}; give "
                "--run-dir with a folder that all workers share"
            )
        _OPENED.close()
        _ROUND.clear()
        _OPENED.enter_context(work.opened())
        _ROUND[order.topic] = order.round
    return _ROUND[order.topic].do(order.number)


def _begin() -> None:
    atexit.register(gc.freeze)  # the others wait for the end, of which the last search is the most
    one_heap()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that began this one ends it
    end_with_parent()


@contextlib.contextmanager
def processes(workers: int) -> Iterator[Over]:
    """Yield what does rounds on this machine: in so many processes, of which this is one. The
    others begin with the first round that needs them, and stay until the context ends.

    A round raises `PenstockError` if a process died.
    """
    with contextlib.ExitStack() as stack:
        yield partial(_done_by, cache(lambda: stack.enter_context(_pool(workers - 1))), workers)


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    # A fork would copy the locks that threads of this process hold, and none of the threads.
    context = multiprocessing.get_context("spawn")
    with environment_kept():
        os.environ.update(for_children())
        with ProcessPoolExecutor(workers, context, _begin) as pool:
            with script_hidden():
                pool.submit(os.getpid)  # which starts all of them
            yield pool


def _done_by(
    pool: Callable[[], ProcessPoolExecutor], workers: int, each: Round, numbers: Sequence[int]
) -> Iterator[tuple[int, str]]:
    others = min(workers, len(numbers) // 4) - 1  # to start one takes as long as a block
    with each.work.opened():
        if others < 1:
            yield from ((number, each.do(number)) for number in numbers)
            return
        begun, topic, free = pool(), uuid.uuid4().hex, threading.Lock()

        def do(number: int) -> str:
            if not free.acquire(blocking=False):  # this process does a block itself
                return begun.submit(do_order, BlockOrder(each, number, topic)).result()
            try:
                return each.do(number)
            finally:
                free.release()

        try:
            # Each of the others has its next block at hand, as cc3d holds this one's threads.
            yield from zip(numbers, in_order(do, numbers, 1 + 2 * others, ahead=8), strict=True)
        except BrokenProcessPool as error:
            raise PenstockError(
                "a process that labelled blocks was killed, perhaps as the memory was full; "
                "--workers or --block takes less, and --resume goes on"
            ) from error
