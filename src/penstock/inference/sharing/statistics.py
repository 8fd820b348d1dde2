"""Percentiles of whole volumes, counted by several processes and merged.

Each process counts its share of a volume's values into a file of the run folder. A histogram of
values of more than 16 bits takes two rounds; the second begins when all shares of the first are
there.

    statistics/round-1-of-64/3.npz    what element 3 counted
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import UsageError
from ...data import Histogram, Scaling
from ..opening.job import Job
from ..opening.net import fixed_scaling
from ..run_folder.journal import STATISTICS_FOLDER, Journal
from ..run_folder.local import Folder
from ..stages.statistics import noted, pieces_of, stream
from ..stages.watch import Watch


@dataclass(slots=True)
class Round:
    """A pass over the values of which shares are still to be counted."""

    number: int
    missing: list[int]
    """Numbers of the elements that have not counted their shares, from 1."""
    histograms: list[Histogram]
    """One histogram for each volume, ready for this pass."""


@dataclass(slots=True)
class Merged:
    """The rounds of a job that this process has read: their shares stay as they are."""

    rounds: int = 0
    histograms: list[Histogram] = field(default_factory=list)
    """One histogram for each volume, ready for the next round. Empty before the first."""


def needs_counting(job: Job) -> bool:
    """Whether the scalings of a job are percentiles of whole volumes."""
    return job.config.normalize != "percentile" and fixed_scaling(job.config) is None


def shared_scalings(
    job: Job, journal: Journal, elements: int, merged: Merged | None = None
) -> dict[int, Scaling]:
    """The scaling of each volume by its index. Empty if each block has its own.

    Raises `UsageError` if the values are not counted yet; it names the step that counts them.
    """
    if job.config.normalize == "percentile":
        return {}
    volumes = range(len(job.volumes))
    if (fixed := fixed_scaling(job.config)) is not None:
        return dict.fromkeys(volumes, fixed)
    if not all(str(number) in journal.statistics for number in volumes):
        counted = open_round(job, folder_of(journal), elements, merged)
        if isinstance(counted, Round):
            raise UsageError(
                f"the values of the input are not counted yet, for percentiles of the whole "
                f"volume: {len(counted.missing)} of {elements} shares of round {counted.number} "
                f"are missing; run --statistics {counted.missing[0]}/{elements} first"
            )
        for number, histogram in enumerate(counted):
            journal.save_statistics(number, noted(job, number, histogram))
    saved = (journal.statistics[str(number)] for number in volumes)
    return {i: Scaling(each["lower"], each["scale"]) for i, each in enumerate(saved)}


def open_round(
    job: Job, folder: Folder, elements: int, merged: Merged | None = None
) -> Round | list[Histogram]:
    """The round to count next, or the histograms of all volumes if all are counted.

    ``merged`` are the rounds that this process has read before; those that it reads are added.
    """
    merged = Merged() if merged is None else merged
    merged.histograms = merged.histograms or [Histogram(job.norm_source.dtype) for _ in job.volumes]
    percentiles = (job.config.norm_lower, job.config.norm_upper)
    while not all(histogram.done for histogram in merged.histograms):
        number, histograms = merged.rounds + 1, deepcopy(merged.histograms)
        files = [_file(number, element, elements) for element in range(1, elements + 1)]
        there = {*folder.names(files[0].rpartition("/")[0] + "/*")}
        missing = [element for element, file in enumerate(files, 1) if file not in there]
        if missing:
            return Round(number, missing, histograms)
        for file in files:
            _merge(folder.read(file), histograms)
        for histogram in histograms:
            if not histogram.done:
                histogram.advance(percentiles)
        merged.rounds, merged.histograms = number, histograms
    return merged.histograms


def count_share(
    job: Job,
    watch: Watch,
    folder: Folder,
    element: int,
    elements: int,
    merged: Merged | None = None,
) -> Round | None:
    """Count one element's share of the values of all volumes.

    Returns the round that was counted, with the elements that are still missing. None if everything
    was counted already.
    """
    opened = open_round(job, folder, elements, merged)
    if not isinstance(opened, Round):
        return None
    if element in opened.missing:
        for number, histogram in enumerate(opened.histograms):
            if not histogram.done:  # a volume without any finite value is done at once
                stream(job, watch, number, histogram, _share(job, element, elements))
        file = _file(opened.number, element, elements)
        folder.write(file, _packed(opened.histograms))
        opened.missing.remove(element)
    return opened


def folder_of(journal: Journal) -> Folder:
    """The folder of the run. Raises `UsageError` if it has none."""
    if journal.folder is None:
        raise UsageError("a job that several processes share needs a --run-dir")
    return journal.folder


def _share(job: Job, element: int, elements: int) -> Iterator[Any]:
    """The pieces of a volume that an element counts."""
    grid = pieces_of(job.norm_source)
    first, stop = ((k * len(grid)) // elements for k in (element - 1, element))
    return map(grid.__getitem__, range(first, stop))


def _file(number: int, element: int, elements: int) -> str:
    return f"{STATISTICS_FOLDER}/round-{number}-of-{elements}/{element}.npz"


def _packed(histograms: list[Histogram]) -> bytes:
    arrays: dict[str, Any] = {
        f"{volume}.{name}": array
        for volume, histogram in enumerate(histograms)
        if not histogram.done
        for name, array in histogram.counts.items()
    }
    packed = BytesIO()
    np.savez_compressed(packed, **arrays)
    return packed.getvalue()


def _merge(packed: bytes | None, histograms: list[Histogram]) -> None:
    assert packed is not None  # it was listed, and these files stay
    with np.load(BytesIO(packed), allow_pickle=False) as arrays:
        for volume, histogram in enumerate(histograms):
            if histogram.done:
                continue
            counts: dict[str, NDArray[np.int64]] = {
                name.partition(".")[2]: arrays[name]
                for name in arrays.files
                if name.startswith(f"{volume}.")
            }
            histogram.merge(counts)
