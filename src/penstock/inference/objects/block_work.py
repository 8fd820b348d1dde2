"""The work on single blocks, which any process may do: count its objects, and write them.

folder/objects/000012.npz    what is counted of block 12
folder/ids.npy               the final numbers of all objects, once all blocks are counted
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...base import (
    LabelConfig,
    PenstockError,
    end_with_parent,
    environment_kept,
    for_children,
    in_order,
)
from ...data import Box, Grid, Sink, Source, open_source
from .block_record import BlockRecord, record_of
from .components import ComponentRule, LocalLabels
from .decoded_views import ViewWork
from .label_output import LabelOutput, open_input
from .object_measures import Measures, measure_block
from .view_joins import DecodedRule

IDS_FILE, STARTS_FILE = "ids.npy", "starts.npy"


@dataclass(frozen=True)
class BlockWork:
    """What is done with each block. It is handed to other processes, which open arrays anew."""

    config: LabelConfig
    rule: ComponentRule | DecodedRule
    grid: Grid
    folder: Path
    measured: bool = False
    """True if objects are measured for a table."""
    dtype: str = ""
    """The dtype of the output."""

    @cached_property
    def source(self) -> Source:
        """The input."""
        return open_input(self.config)

    @cached_property
    def image(self) -> Source | None:
        """The image whose intensities are measured."""
        if self.config.intensity is None or not self.measured:
            return None
        return open_source(self.config.intensity, name="--intensity")

    @cached_property
    def sink(self) -> Sink:
        """The output, which is there."""
        output = LabelOutput(self.config, self.source, self.grid.domain)
        sink = output.sink(self.dtype, overwrite=False, resume=True)
        sink.create()
        return sink

    def opened(self) -> AbstractContextManager[None]:
        """The context in which blocks are done."""
        return contextlib.nullcontext()

    def record(self, number: int) -> Path:
        """The file of what is counted of a block."""
        return self.folder / f"{number:06}.npz"

    def load(self, number: int) -> BlockRecord:
        """Read what is counted of a block."""
        return BlockRecord.load(self.record(number))

    def count(self, number: int) -> int:
        """Count the objects of a block. Returns its number of voxels."""
        box = self.grid[number]
        labels = self.labels(number, box)
        measures: Measures = {}
        if self.measured:
            measures = measure_block(labels, box, self.image, self.image_channels)
        voxels = labels.runs.voxels(len(labels.first))
        flat = "z" not in self.source.axes
        record = record_of(labels, box, self.grid.domain, flat, voxels, measures)
        record.save(self.record(number))
        return box.size

    def write(self, number: int) -> int:
        """Write a block with final numbers. Returns its number of voxels."""
        box = self.grid[number]
        labels = self.labels(number, box)
        start, stop = self._starts[number : number + 2]
        if stop - start != len(labels.first):
            raise PenstockError(
                f"IN {self.source.name}: has changed since its objects were counted; run again "
                "without --resume"
            )
        ids = np.concatenate([[0], self._ids[start:stop]]).astype(self.sink.dtype)
        self.sink.write(box, ids[labels.array][None, None])
        return box.size

    def labels(self, number: int, box: Box) -> LocalLabels:
        """The objects of a block."""
        return self.rule.labels_of(self.source, box, number)

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


_WORK: list[BlockWork | ViewWork] = []
"""The work of this process, one of a pool."""
_OPENED = contextlib.ExitStack()
"""The context of that work."""


def _begin(work: BlockWork | ViewWork) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that began this one ends it
    end_with_parent()
    _OPENED.enter_context(work.opened())
    _WORK[:] = [work]


def _do(step: str, number: int) -> int:
    return int(getattr(_WORK[0], step)(number))


@contextlib.contextmanager
def doing(work: BlockWork | ViewWork, step: str, workers: int) -> Iterator[Callable[[int], int]]:
    """Yield a function that does a step of the work on a block, here or in a process of a pool.

    Args:
        work: The work.
        step: ``decode``, ``count`` or ``write``.
        workers: The number of processes; for 1 this one does the work.

    Yields:
        The function. It may be called by as many threads as there are workers.
    """
    if workers == 1:
        with work.opened():
            yield getattr(work, step)
        return
    context = multiprocessing.get_context("spawn")
    with environment_kept():
        os.environ.update(for_children())
        with ProcessPoolExecutor(workers, context, _begin, (replace(work),)) as pool:
            yield lambda number: pool.submit(_do, step, number).result()


def over_blocks(
    work: BlockWork | ViewWork, step: str, numbers: Iterable[int], workers: int
) -> Iterator[tuple[int, int]]:
    """Do a step for each of some blocks.

    Args:
        work: The work.
        step: ``decode``, ``count`` or ``write``.
        numbers: The numbers of the blocks.
        workers: The number of processes.

    Yields:
        The number and the voxels of each block that is done, in order.

    Raises:
        PenstockError: A process died.
    """
    rest = list(numbers)
    workers = max(1, min(workers, len(rest) // 4))  # to start a process takes as long as a block
    try:
        with doing(work, step, workers) as do:
            yield from zip(rest, in_order(do, rest, workers, ahead=1), strict=True)
    except BrokenProcessPool as error:
        raise PenstockError(
            "a process that labelled blocks was killed, perhaps as the memory was full; --workers "
            "or --block takes less, and --resume goes on"
        ) from error
