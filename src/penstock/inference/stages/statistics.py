"""Finds the scaling of each volume before its first brick is read: exact percentiles, or fixed.

A process that does a job alone counts the values of one volume after the other. Several processes
count shares of all volumes, which `counting` merges.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import Flow, InferConfig, UsageError
from ...data import Box, ChunkCounter, Grid, Histogram, Scaling, Source
from ..opening.job import Job
from ..opening.normalisation import fixed_scaling
from ..run_folder.journal import Journal
from .run import Run

STATISTICS_VOXELS = 2**22
"""Most voxels in a piece of a volume that is read for the histogram."""


def needs_counting(config: InferConfig) -> bool:
    """Whether the scalings of a job are percentiles of whole volumes."""
    return config.normalize != "percentile" and fixed_scaling(config) is None


def find_scalings(run: Run) -> dict[int, Scaling]:
    """The scaling of each volume by its index, for a process that does the job alone. Empty if each
    block has its own.

    A resumed run takes the percentiles that its journal holds.
    """
    job, journal = run.job, run.journal
    if needs_counting(job.config):
        for number in range(len(job.volumes)):
            if str(number) not in journal.statistics:
                _count_volume(run, number)
    return known_scalings(job, journal)


def known_scalings(job: Job, journal: Journal) -> dict[int, Scaling]:
    """The scaling of each volume that is fixed, or that the journal holds."""
    if job.config.normalize == "percentile":
        return {}
    volumes = range(len(job.volumes))
    if (fixed := fixed_scaling(job.config)) is not None:
        return dict.fromkeys(volumes, fixed)
    saved = {number: journal.statistics.get(str(number)) for number in volumes}
    return {n: Scaling(each["lower"], each["scale"]) for n, each in saved.items() if each}


def _count_volume(run: Run, number: int) -> None:
    """Count all values of a volume, and save its percentiles."""
    job, config = run.job, run.job.config
    histogram = Histogram(job.norm_source.dtype)
    while not histogram.done:
        _stream(run, number, histogram, iter(pieces_of(job.norm_source)))
        histogram.advance((config.norm_lower, config.norm_upper))
    _save(run, number, histogram)


def _save(run: Run, number: int, histogram: Histogram) -> None:
    """Save the percentiles of a volume, of all whose values are in the histogram."""
    config, volume = run.job.config, run.job.volumes[number]
    scaling = histogram.scaling(config.norm_lower, config.norm_upper, config.eps)
    with run.watch.stage("statistics", run.journal.named("statistics.json"), timed=False):
        run.journal.save_statistics(
            number,
            {
                "t": volume.t,
                "c": list(volume.channels),
                "percentiles": [config.norm_lower, config.norm_upper],
                "count": histogram.count,
                **asdict(scaling),
            },
        )


def _stream(run: Run, number: int, histogram: Histogram, pieces: Iterator[Box]) -> None:
    """Pass pieces of a volume through the histogram, each in whole chunks. As many threads read as
    the planned memory allows."""
    job, watch, sample = run.job, run.watch, run.job.sample
    source, volume, memory = job.norm_source, job.volumes[number], job.plan.memory
    flow, lock, step = Flow(), threading.Lock(), pieces_of(source).step
    chunks = ChunkCounter(source, [(v.t, v.channels) for v in job.volumes], job.config.missing)
    room = memory.total - memory.base - memory.runtime
    # Twice: the decoded chunks, and the array that they are copied to. Values inside a mask are
    # copied once more, and found by flags.
    held = (
        (2 if sample is None else 4)
        * math.prod(step)
        * len(volume.channels)
        * source.dtype.itemsize
    )

    def work() -> None:
        while not flow.failed:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            with watch.stage("read", f"statistics at {piece} of {source.name}"):
                array = np.empty((len(volume.channels), *piece.shape), source.dtype)
                inside = np.ones(piece.shape, np.bool_)

                def read(
                    piece: Box = piece,
                    array: NDArray[Any] = array,
                    inside: NDArray[np.bool_] = inside,
                ) -> None:
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
                histogram.add(array if sample is None else array[:, inside])

    for i in range(max(1, min(job.config.prep_workers, room // held))):
        flow.spawn(f"statistics-{i}", work)
    flow.join(lambda: watch.check(0))


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
        grid, histograms = pieces_of(run.job.norm_source), deepcopy(counting.histograms)
        first, stop = ((k * len(grid)) // elements for k in (element - 1, element))
        for volume, histogram in enumerate(histograms):
            if not histogram.done:  # a volume without any finite value is done at once
                pieces = map(grid.__getitem__, range(first, stop))
                _stream(run, volume, histogram, pieces)
        counting.save(journal, element, elements, histograms)
    if counting.advance(journal):
        return "Counted; the percentiles are known, next is --part"
    if counting.merged == number:
        return f"Counted all of round {number}; the exact values take a second round"
    left = counting.missing(journal, elements)
    return f"Counted in round {number}; {len(left)} of {elements} shares are missing"


def shared_scalings(run: Run, elements: int) -> dict[int, Scaling]:
    """The scaling of each volume by its index, from what all processes have counted. Empty if each
    block has its own.

    Raises `UsageError` if the values are not counted yet; it names the step that counts them.
    """
    job, journal, counting = run.job, run.journal, run.counting
    if needs_counting(job.config) and len(journal.statistics) < len(job.volumes):
        while not counting.advance(journal):
            # None is missing if the last share came since the look; then the next look merges it.
            if missing := counting.missing(journal, elements):
                raise UsageError(
                    f"the values of the input are not counted yet, for percentiles of the whole "
                    f"volume: {len(missing)} of {elements} shares of round {counting.merged + 1} "
                    f"are missing; run --statistics {missing[0]}/{elements} first"
                )
        for number, histogram in enumerate(counting.histograms):
            _save(run, number, histogram)
    return known_scalings(job, journal)
