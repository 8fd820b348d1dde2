"""What is made of outputs whose blocks are all written: the levels of those that are OME-Zarr
images, and files. Only the first level is made of blocks as they come.

The metadata names levels only while they are those of the blocks. So a run that will write blocks
into an image with levels takes these away first, and whoever ends the job makes them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...base import SUMMARY_FILE, Incomplete, format_seconds, plural, usable_cores
from ...data import (
    Box,
    Grid,
    LevelBelow,
    OutputLock,
    Rule,
    Sink,
    add_levels,
    add_windows,
    begin_first_level,
    indices,
    levels_below,
    make_file,
    reduced,
    register_label,
    remove_levels,
)
from ..planning.memory import LEVEL_VOXEL_BYTES
from ..run_folder.journal import EndRequest, Journal
from .remote_job import Runnable
from .retries import forgoing, patiently
from .summary import Summary

if TYPE_CHECKING:
    from ..opening.job import Job


class FirstLevel:
    """The first level below an image, made of its blocks while they are in memory. It takes them in
    any order, from any threads, and writes whole cells.

        block ──▶ halved ──▶ cell of the level (a chunk or shard), open until its last block

    It holds an eighth of the voxels, and all further levels are made of it. So nothing of the image
    has to be read and decoded again. What does not line up, or does not fit into its planned
    memory, is left out here. It is made at the end, as all other levels are.
    """

    def __init__(
        self, image: Sink, level: LevelBelow, sink: Sink, rule: Rule, most_bytes: int
    ) -> None:
        """``level`` says how ``sink`` is made of ``image``; ``most_bytes`` is what the open cells
        may take."""
        self.image, self.level, self.sink, self.rule = image.domain, level, sink, rule
        self.cells = Grid(sink.domain, sink.write_grid, (0,) * 5)
        self._most, self._lock = most_bytes, threading.Lock()
        self._halving = threading.Lock()
        """Held by one thread at a time, as halving takes memory for a block."""
        self._missing: dict[tuple[int, ...], int] = {}
        """Number of voxels that have not arrived, of each cell that has some."""
        self._open: dict[tuple[int, ...], NDArray[Any]] = {}
        """These cells, without those for which there was no room."""
        self._held = 0

    def forget(self) -> None:
        """Forget what has arrived, as an error leaves open which blocks will come once more. Cells
        that lack a block then are never whole."""
        with self._lock:
            self._missing, self._open, self._held = {}, {}, 0

    def add(
        self, box: Box, array: NDArray[Any], write: Callable[[Box, NDArray[Any]], None]
    ) -> None:
        """Take a block of the image.

        Args:
            box: Its place in the image, t c z y x.
            array: Its values, which are not kept.
            write: A function that writes a cell of the level; called for each that is whole.
        """
        box = box.shift(tuple(-start for start in self.image.start))
        halved, sides = self.level.halved, self.image.shape
        ends = zip(box.start, box.stop, halved, sides, strict=True)
        if any(a % by or (b % by and b != side) for a, b, by, side in ends):
            return  # it ends within a voxel of the level
        with self._halving:
            made = reduced(array, halved, self.rule)
        start = tuple(a // by for a, by in zip(box.start, halved, strict=True))
        part = Box.of(start, made.shape)
        for index in indices(self.cells.touching(part)):
            with self._lock:
                whole = self._merge(index, part, made)
            # Outside of the lock, as a write takes long, and nobody else has a cell that is whole.
            if whole is not None:
                write(self.cells.cell(index), whole)

    def _merge(self, index: tuple[int, ...], part: Box, made: NDArray[Any]) -> NDArray[Any] | None:
        """Put voxels into a cell. Returns the cell if it is whole."""
        box = self.cells.cell(index)
        if index not in self._missing:
            self._open[index], self._missing[index] = np.empty(box.shape, made.dtype), box.size
            self._held += self._open[index].nbytes
        shared = part & box
        self._missing[index] -= shared.size
        whole = not self._missing[index]
        if whole:
            del self._missing[index]
        if index in self._open:
            self._open[index][shared.within(box)] = made[shared.within(part)]
            if whole:
                return self._close(index)
            while self._held > self._most:  # the oldest go
                self._close(next(iter(self._open)))
        return None

    def _close(self, index: tuple[int, ...]) -> NDArray[Any]:
        array = self._open.pop(index)
        self._held -= array.nbytes
        return array


def _images(job: Runnable) -> Iterator[tuple[int, str, Sink]]:
    """The outputs that are images: their numbers, places and sinks. An output that is given by a
    TensorStore spec is an array alone."""
    for number, (place, sink) in enumerate(zip(job.config.out_spec, job.sinks, strict=True)):
        if getattr(sink, "documents", None):
            yield number, str(place), sink


def first_levels(job: Job) -> dict[int, FirstLevel]:
    """The first level below each output, by the output's number, for a process that will write
    blocks. Several processes make one level: each writes what lies in its own blocks, and what lies
    in those of two is made at the end."""
    config, plan = job.config, job.plan
    # Halving a block takes its memory first; cells that are open get the rest.
    most = plan.memory.levels - LEVEL_VOXEL_BYTES * math.prod(plan.geometry.block)
    if config.levels == "none" or most <= 0:
        return {}
    begun = {}
    for number, place, sink in _images(job):
        work = partial(begin_first_level, place, config.levels, "--out-spec")
        level = patiently(config.retry_for, sink.name, work)
        if level is not None:
            begun[number] = FirstLevel(
                sink, *level, job.head_facts[number].rule, most // len(job.sinks)
            )
    return begun


def take_levels_away(job: Runnable) -> None:
    """Remove the levels of images into which a run that goes on will write blocks. An output that a
    run begins has none: to look for them would ask a store for a list, which it may refuse."""
    for _, place, sink in _images(job) if job.config.levels != "none" else ():
        patiently(job.config.retry_for, sink.name, partial(remove_levels, place))


def completed(
    job: Runnable, journal: Journal, lock: OutputLock, summary: Summary, request: EndRequest
) -> Summary:
    """Complete a run of which all blocks are written: its outputs must be there still, and its own.
    They get the levels that they lack, or become files. What an earlier start has made stays.

    Args:
        job: The job.
        journal: Its journal.
        lock: The lock of its outputs.
        summary: What was done before; its time is that without levels.
        request: Asks the job to end early.

    Returns:
        The summary with a sentence for each output that got levels, or was made, as the run folder
        has it, too.

    Raises:
        Incomplete: The job was asked to end.
    """
    # The last look before the run is called complete: another run may have taken the outputs.
    patiently(job.config.retry_for, "the lock", lock.check)
    for sink in job.sinks:
        patiently(job.config.retry_for, sink.name, sink.close)

    def going_on(what: str, _: int) -> None:
        if request.why:
            raise Incomplete(
                f"all blocks are written and {what}, when {request.why} ended the job; run "
                "again with --resume"
            )

    made = (
        *_add_levels(job, partial(going_on, "levels are not")),
        *_make_files(job, going_on),
    )
    summary = replace(summary, notes=(*summary.notes, *made))
    _describe(job)
    with forgoing(f"--run-dir {job.run_dir}: {SUMMARY_FILE}"):
        journal.save(SUMMARY_FILE, asdict(summary))
    return summary


def _add_levels(job: Runnable, going_on: Callable[[int], None]) -> Iterator[str]:
    """Add the levels that images lack, with a sentence for each image. One of labels is marked as
    such, also if it gets none."""
    count = 1 if job.config.levels == "none" else job.config.levels
    for number, place, sink in _images(job):
        rule = job.head_facts[number].rule
        if rule == "mean" and not levels_below(sink.domain.shape, count=count):
            continue  # opening a small image costs more
        began = time.monotonic()
        work = partial(
            add_levels, place, rule=rule, count=count, again=False,
            threads=usable_cores(), progress=going_on, name="--out-spec",
        )  # fmt: skip
        if made := patiently(job.config.retry_for, sink.name, work):
            took = format_seconds(time.monotonic() - began)
            yield f"Levels: {plural(len(made), 'level')} below {sink.name}, in {took}"


def _make_files(job: Runnable, going_on: Callable[[str, int], None]) -> Iterator[str]:
    """Make the outputs that become files, with a sentence for each."""
    count = 1 if job.config.levels == "none" else job.config.levels
    for sink, head in zip(job.sinks, job.head_facts, strict=True):
        began = time.monotonic()
        if getattr(sink, "kind", None) is None:
            continue
        file: Any = sink
        if make_file(file, head.rule, count, partial(going_on, f"{sink.name} is not")):
            took = format_seconds(time.monotonic() - began)
            yield f"File: {sink.name}, made of its blocks in {took}"


def _describe(job: Runnable) -> None:
    """List images that are labels of another one, and add windows of the channels of others."""
    for number, place, sink in _images(job):
        image: Any = sink
        work = partial(register_label, place, "--out-spec")
        patiently(job.config.retry_for, sink.name, work)
        if job.head_facts[number].rule == "mean":
            work = partial(add_windows, place, image.channels, "--out-spec")
            patiently(job.config.retry_for, sink.name, work)
