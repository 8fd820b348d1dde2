"""Finds the scalings of each volume before its first brick is read: counted exactly, or given.

A process that does a job alone counts the values of one volume after the other. Several processes
count shares of all volumes, which `counting` merges.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import Flow, UsageError
from ...data import Box, ChunkCounter, Grid, Scaling, Source
from ..opening.job import Job
from ..run_folder.journal import Journal
from .counting import Counters, advance, all_done, new_counters
from .run import Run

Scalings = tuple[Scaling, ...]
"""One for all channels of a volume, or one for each."""

STATISTICS_VOXELS = 2**22
"""Most voxels in a piece of a volume that is read for the histogram."""


def find_scalings(run: Run) -> dict[int, Scalings]:
    """The scalings of each volume by its index, for a process that does the job alone. Empty if
    each block has its own.

    A resumed run takes the numbers that its journal holds.
    """
    job, journal = run.job, run.journal
    if job.values.counted:
        for number in range(len(job.volumes)):
            if str(number) not in journal.statistics:
                _count_volume(run, number)
    return known_scalings(job, journal)


def known_scalings(job: Job, journal: Journal) -> dict[int, Scalings]:
    """The scalings of each volume that are given, or that the journal holds."""
    if job.values.by_block:
        return {}
    volumes = range(len(job.volumes))
    if not job.values.counted:
        given = tuple(each.given or Scaling() for each in job.values.each)
        return dict.fromkeys(volumes, given)
    saved = {number: journal.statistics.get(str(number)) for number in volumes}
    return {
        number: tuple(
            how.of_numbers(each["lower"], each["scale"])
            for how, each in zip(job.values.each, counted["channels"], strict=True)
        )
        for number, counted in saved.items()
        if counted
    }


def _count_volume(run: Run, number: int) -> None:
    """Count all values of a volume, and save its numbers."""
    counters = new_counters(run.job)
    while not all_done(counters):
        _stream(run, number, counters, iter(pieces_of(run.job.norm_source)))
        advance(run.job, counters)
    _save(run, number, counters)


def _save(run: Run, number: int, counters: Counters) -> None:
    """Save the numbers of a volume, of all whose values are in the counters."""
    config, volume = run.job.config, run.job.volumes[number]
    each = []
    for how, counter in zip(run.job.values.each, counters, strict=True):
        scaling = how.scaling(counter)
        each.append({"count": counter.count, "lower": scaling.lower, "scale": scaling.scale})
    with run.watch.stage("statistics", run.journal.named("statistics.json"), timed=False):
        run.journal.save_statistics(
            number,
            {
                "t": volume.t,
                "c": list(volume.channels),
                "percentiles": [config.norm_lower, config.norm_upper],
                **each[0],
                "channels": each,
            },
        )


def _stream(run: Run, number: int, counters: Counters, pieces: Iterator[Box]) -> None:
    """Pass pieces of a volume through the counters, each in whole chunks. As many threads read as
    the planned memory allows."""
    job, watch, sample = run.job, run.watch, run.job.sample
    source, volume, memory = job.norm_source, job.volumes[number], job.plan.memory
    flow, lock, step = Flow(), threading.Lock(), pieces_of(source).step
    chunks = ChunkCounter(source, [(v.t, v.channels) for v in job.volumes], job.config.missing)
    room = memory.total - memory.base - memory.runtime
    # Twice: the decoded chunks, and the array that they are copied to. Values inside a mask are
    # copied once more, and found by flags.
    copied = sample is not None or any(each.nonzero for each in job.values.each)
    held = (4 if copied else 2) * math.prod(step) * len(volume.channels) * source.dtype.itemsize

    def count(piece: Box) -> None:
        with watch.stage("read", f"statistics at {piece} of {source.name}"):
            array = np.empty((len(volume.channels), *piece.shape), source.dtype)
            inside = np.ones(piece.shape, np.bool_)

            def read() -> None:
                if sample is not None:
                    inside[...] = sample.inside(volume, piece, source)
                    if not inside.any():
                        return
                volume.read(source, piece, array)
                # Without --missing error, chunks are counted when bricks are read.
                if job.config.missing == "error":
                    chunks.look(number, piece, piece, array)

            watch.retries.run(flow, source.name, f"statistics at {piece}", read)
        with lock, watch.probe.span("statistics", piece):
            _add(job, counters, array if sample is None else array[:, inside])

    threads = max(1, min(job.config.prep_workers, room // held))
    flow.each("statistics", pieces, count, threads)
    flow.join(lambda: watch.check(0))


def _add(job: Job, counters: Counters, values: NDArray[Any]) -> None:
    """Count the values of a piece, of which the first axis is channels."""
    parts = [values] if len(counters) == 1 else values
    jointly = any(how.jointly for how in job.values.each)
    empty = (values == 0).all(axis=0) if jointly else None
    for how, counter, part in zip(job.values.each, counters, parts, strict=True):
        if not counter.done:
            how.add(counter, part, empty)


def pieces_of(source: Source) -> Grid:
    """A volume cut into boxes of whole chunks, each small enough to hold in memory."""
    domain, step = source.domain[2:], list(source.chunks[2:])
    for axis in (2, 1, 0):
        room = max(1, STATISTICS_VOXELS // math.prod(step))
        step[axis] *= min(room, -(-domain.shape[axis] // step[axis]))
    return Grid(domain, tuple(step), source.grid_origin[2:])


def count_share(run: Run, element: int, elements: int) -> str:
    """Count one element's share of the values of all volumes, in the round that is due.

    Returns a sentence on what was done, and is still to be done.
    """
    counting, journal = run.counting, run.journal
    if counting.advance(journal):
        return "Counted before; the percentiles are known, next is --part"
    number = counting.merged + 1
    if element in counting.missing(journal, elements):
        grid, counters = pieces_of(run.job.norm_source), deepcopy(counting.counters)
        first, stop = ((k * len(grid)) // elements for k in (element - 1, element))
        for volume, each in enumerate(counters):
            if not all_done(each):  # a volume without any finite value is done at once
                pieces = map(grid.__getitem__, range(first, stop))
                _stream(run, volume, each, pieces)
        counting.save(journal, element, elements, counters)
    if counting.advance(journal):
        return "Counted; the percentiles are known, next is --part"
    if counting.merged == number:
        return f"Counted all of round {number}; the exact values take a second round"
    left = counting.missing(journal, elements)
    return f"Counted in round {number}; {len(left)} of {elements} shares are missing"


def shared_scalings(run: Run, elements: int) -> dict[int, Scalings]:
    """The scalings of each volume by its index, from what all processes have counted. Empty if each
    block has its own.

    Raises `UsageError` if the values are not counted yet; it names the step that counts them.
    """
    job, journal, counting = run.job, run.journal, run.counting
    if job.values.counted and len(journal.statistics) < len(job.volumes):
        while not counting.advance(journal):
            # None is missing if the last share came since the look; then the next look merges it.
            if missing := counting.missing(journal, elements):
                raise UsageError(
                    f"the values of the input are not counted yet, for percentiles of the whole "
                    f"volume: {len(missing)} of {elements} shares of round {counting.merged + 1} "
                    f"are missing; run --statistics {missing[0]}/{elements} first"
                )
        for number, counters in enumerate(counting.counters):
            _save(run, number, counters)
    return known_scalings(job, journal)
