"""The values of a job's volumes, counted in shares by several processes and merged exactly.

    statistics/round-1-of-64/3.npz    what element 3 of 64 counted

Values of more than 16 bits take two rounds: the first finds where the percentiles lie, the second
their exact values. The number of elements may differ from round to round and from start to start,
as all the shares of a number cover each value once.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...data import Histogram, MeanAndDeviation
from ..opening.job import Job
from ..run_folder.folder import Folder
from ..run_folder.journal import Journal
from ..run_folder.names import STATISTICS_FOLDER

Counters = list[Histogram | MeanAndDeviation]
"""Counters of the values of a volume: one for all its channels, or one for each."""


def new_counters(job: Job) -> Counters:
    """The counters of a volume, which have counted nothing."""
    return [each.counter(job.norm_source.dtype) for each in job.values.each]


def all_done(counters: Counters) -> bool:
    """True once nothing is left to count."""
    return all(counter.done for counter in counters)


def advance(job: Job, counters: Counters) -> None:
    """End a pass of the counters of a volume."""
    for how, counter in zip(job.values.each, counters, strict=True):
        if not counter.done:
            how.advance(counter)


class Counting:
    """The rounds in which several processes count the values of all volumes of a job.

    It keeps what it has merged, as the files of a complete round stay as they are.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.merged = 0
        """Number of rounds that are merged."""
        self.counters: list[Counters] = []
        """Those of each volume, ready for the next round. Empty before the first."""

    def advance(self, journal: Journal) -> bool:
        """Merge each round of which all shares are there. Returns whether all is counted."""
        if not self.counters:
            self.counters = [new_counters(self.job) for _ in self.job.volumes]
        while not all(map(all_done, self.counters)):
            files = self._whole_round(journal)
            if files is None:
                return False
            counters = deepcopy(self.counters)
            for file in files:
                _merge(_folder(journal).read(file), counters)
            for each in counters:
                advance(self.job, each)
            self.merged, self.counters = self.merged + 1, counters
        return True

    def _whole_round(self, journal: Journal) -> list[str] | None:
        """The files of the next round, in any number of shares of which none is missing."""
        there: dict[str, list[str]] = {}
        pattern = f"{STATISTICS_FOLDER}/round-{self.merged + 1}-of-*/*.npz"
        for file in _folder(journal).names(pattern):
            there.setdefault(Path(file).parent.name.rpartition("-")[2], []).append(file)
        whole = (files for elements, files in there.items() if len(files) == int(elements))
        return next(whole, None)

    def save(self, journal: Journal, element: int, elements: int, counters: list[Counters]) -> None:
        """Save what an element has counted in this round."""
        name = _file(self.merged + 1, element, elements)
        _folder(journal).write(name, _packed(counters))

    def missing(self, journal: Journal, elements: int) -> list[int]:
        """The elements, from 1, that have not counted their shares of the next round."""
        files = {_file(self.merged + 1, each, elements): each for each in range(1, elements + 1)}
        there = _folder(journal).names(
            f"{STATISTICS_FOLDER}/round-{self.merged + 1}-of-{elements}/*"
        )
        return sorted(files[file] for file in files.keys() - there)


def _folder(journal: Journal) -> Folder:
    assert journal.folder is not None, "several processes share a job only in a run folder"
    return journal.folder


def _file(number: int, element: int, elements: int) -> str:
    return f"{STATISTICS_FOLDER}/round-{number}-of-{elements}/{element}.npz"


def _packed(counters: list[Counters]) -> bytes:
    arrays: dict[str, Any] = {
        f"{place}.{name}": array
        for place, counter in _waiting(counters)
        for name, array in counter.counts.items()
    }
    packed = BytesIO()
    np.savez_compressed(packed, **arrays)
    return packed.getvalue()


def _merge(packed: bytes | None, counters: list[Counters]) -> None:
    assert packed is not None  # it was listed, and these files stay
    with np.load(BytesIO(packed), allow_pickle=False) as arrays:
        for place, counter in _waiting(counters):
            counts: dict[str, NDArray[Any]] = {
                name.rpartition(".")[2]: arrays[name]
                for name in arrays.files
                if name.startswith(f"{place}.")
            }
            counter.merge(counts)


def _waiting(counters: list[Counters]) -> Iterator[tuple[str, Histogram | MeanAndDeviation]]:
    """The counters that are not done, with their places: those of volume and normalisation."""
    for volume, each in enumerate(counters):
        for number, counter in enumerate(each):
            if not counter.done:
                yield f"{volume}.{number}", counter
