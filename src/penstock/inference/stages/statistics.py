"""Finds the scaling of each volume before its first block is read: exact percentiles, or fixed."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import Flow
from ...data import Box, ChunkCounter, Grid, Histogram, Scaling, Source
from ..opening.job import Job
from ..opening.net import fixed_scaling
from ..run_folder.journal import Journal
from .watch import Watch

STATISTICS_VOXELS = 2**22
"""Most voxels in a piece of a volume that is read for the histogram."""


def find_scalings(job: Job, journal: Journal, watch: Watch) -> dict[int, Scaling]:
    """The scaling of each volume by its index. Empty if each block has its own.

    A resumed run takes the percentiles that its journal holds.
    """
    if job.config.normalize == "percentile":
        return {}
    fixed = fixed_scaling(job.config)
    numbers = range(len(job.volumes))
    return {number: fixed or _global_scaling(job, journal, watch, number) for number in numbers}


def _global_scaling(job: Job, journal: Journal, watch: Watch, number: int) -> Scaling:
    config = job.config
    saved = journal.statistics.get(str(number))
    if saved is not None:
        return Scaling(saved["lower"], saved["scale"])
    histogram = Histogram(job.norm_source.dtype)
    while not histogram.done:
        stream(job, watch, number, histogram, iter(pieces_of(job.norm_source)))
        histogram.advance((config.norm_lower, config.norm_upper))
    saved = noted(job, number, histogram)
    with watch.stage("statistics", journal.named("statistics.json"), timed=False):
        journal.save_statistics(number, saved)
    return Scaling(saved["lower"], saved["scale"])


def noted(job: Job, number: int, histogram: Histogram) -> dict[str, Any]:
    """The entry of a volume in statistics.json, from the histogram of all its values."""
    config, volume = job.config, job.volumes[number]
    scaling = histogram.scaling(config.norm_lower, config.norm_upper, config.eps)
    return {
        "t": volume.t,
        "c": list(volume.channels),
        "percentiles": [config.norm_lower, config.norm_upper],
        "count": histogram.count,
        **asdict(scaling),
    }


def stream(
    job: Job, watch: Watch, number: int, histogram: Histogram, pieces: Iterator[Box]
) -> None:
    """Pass pieces of a volume through the histogram, each in whole chunks. As many threads read as
    the planned memory allows."""
    source, volume, memory = job.norm_source, job.volumes[number], job.plan.memory
    flow, lock, step = Flow(), threading.Lock(), pieces_of(source).step
    chunks = ChunkCounter(source, job.volumes, job.config.missing)
    room = memory.total - memory.base - memory.runtime
    # Twice: the decoded chunks, and the array that they are copied to.
    held = 2 * math.prod(step) * len(volume.channels) * source.dtype.itemsize

    def work() -> None:
        while not flow.failed:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            with watch.stage("read", f"statistics at {piece} of {source.name}"):
                array = np.empty((len(volume.channels), *piece.shape), source.dtype)

                def read(piece: Box = piece, array: NDArray[Any] = array) -> None:
                    volume.read(source, piece, array)
                    # Without --missing error, chunks are counted when blocks are read.
                    if job.config.missing == "error":
                        chunks.look(number, piece, piece, array)

                watch.retries.run(flow, source.name, f"statistics at {piece}", read)
            with lock, watch.probe.span("statistics", piece):
                histogram.add(array)

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
