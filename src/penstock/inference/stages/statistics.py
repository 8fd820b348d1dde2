"""Finds the scalings of each volume before its first brick is read: counted exactly, or given.

A process that does a job alone counts the values of one volume after the other. Several processes
count shares of all volumes, which are merged exactly.

    statistics/round-1-of-64/3.npz    what element 3 of 64 counted

Values of more than 16 bits take two rounds: the first finds where the percentiles lie, the second
their exact values. The number of elements may differ from round to round and from start to start,
as all the shares of a number cover each value once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import Flow, UsageError, group_by, nth_share, plural
from ...data import (
    Box,
    ChannelValues,
    ChunkCounter,
    FilledMask,
    Grid,
    Histogram,
    MeanAndDeviation,
    Scaling,
    Source,
    ValueLimits,
)
from ..opening.job import Job
from ..opening.selection import Volume
from ..run_folder.journal import Journal
from ..run_folder.names import STATISTICS_FOLDER
from .run import Run

Counter = Histogram | MeanAndDeviation | ValueLimits
Counters = list[Counter]
"""Counters of the values of a volume: one for all its channels or one for each, and last its limits
where they are wanted."""
Scalings = tuple[Scaling, ...]
"""One for all channels of a volume, or one for each."""

STATISTICS_VOXELS = 2**22
"""Most voxels in a piece of a volume that is read for the histogram."""


def new_counters(job: Job) -> Counters:
    """The counters of a volume, which have counted nothing."""
    counters: Counters = [each.counter(job.norm_source.dtype) for each in job.values.each]
    if job.values.limited and job.way is not None:
        slices = 1 if job.way.nearest is None else job.way.over[0].shape[job.way.nearest]
        counters.append(ValueLimits(job.net.model.in_channels, slices))
    return counters


def all_done(counters: Counters) -> bool:
    """True once nothing is left to count."""
    return all(counter.done for counter in counters)


def advance(counters: Counters) -> None:
    """End a pass of the counters of a volume."""
    for counter in counters:
        if not counter.done:
            counter.advance()


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
            how.of_numbers(each["lower"], each["scale"], each["zeros"])
            for how, each in zip(job.values.each, counted["channels"], strict=True)
        )
        for number, counted in saved.items()
        if counted
    }


def known_values(
    run: Run, scalings: Mapping[int, Scalings]
) -> dict[tuple[int, int], ChannelValues]:
    """How each channel is normalised, by time point and number, where that is done as voxels are
    read."""
    values = {}
    for number, volume in enumerate(run.job.volumes):
        mask, counted = mask_of(run, number), run.journal.statistics.get(str(number), {})
        each = zip(volume.channels, run.job.values.each, scalings[number], strict=True)
        for place, (channel, how, scaling) in enumerate(each):
            limits = counted["channels"][place].get("limits") if counted else None
            least, most = map(np.array, limits) if limits else (None, None)
            values[volume.t, channel] = ChannelValues(
                scaling, mask if how.masked else None, least, most
            )
    return values


def mask_of(run: Run, number: int) -> FilledMask | None:
    """The voxels of a volume that are not 0 in some channel, and those that they enclose; None if
    they do not matter. The first process that needs it finds it, and the run folder keeps it."""
    job, folder, name = run.job, run.journal.folder, f"{STATISTICS_FOLDER}/mask-{number}.npz"
    if not job.values.masked or number in run.masks:
        return run.masks.get(number)
    if folder is not None and (packed := folder.read(name)) is not None:
        with np.load(BytesIO(packed), allow_pickle=False) as arrays:
            run.masks[number] = FilledMask(job.masked_box, arrays["bits"])
        return run.masks[number]
    mask, source, volume = FilledMask(job.masked_box), job.norm_source, job.volumes[number]
    for piece in pieces_of(source):
        part = piece & mask.box
        if part.size:
            run.watch.retries.run(
                Flow(), source.name, f"mask at {part}",
                partial(_put_nonzero, mask, volume, source, part),
            )  # fmt: skip
    mask.fill()
    if folder is not None:
        folder.write(name, _zipped(bits=mask.bits))
    run.masks[number] = mask
    return mask


def _put_nonzero(mask: FilledMask, volume: Volume, source: Source, part: Box) -> None:
    mask.put(part, (volume.array(source, part) != 0).any(axis=0))


def _count_volume(run: Run, number: int) -> None:
    """Count all values of a volume, and save its numbers."""
    counters = new_counters(run.job)
    while not all_done(counters):
        _stream(run, number, counters, iter(pieces_of(run.job.norm_source)))
        advance(counters)
    _save(run, number, counters)


def _save(run: Run, number: int, counters: Counters) -> None:
    """Save the numbers of a volume, of all whose values are in the counters."""
    job, volume = run.job, run.job.volumes[number]
    each, limits = list[dict[str, Any]](), counters[-1]
    for how, counter in zip(job.values.each, counters, strict=False):
        assert not isinstance(counter, ValueLimits)
        scaling = how.scaling(counter)
        numbers = {"lower": scaling.lower, "scale": scaling.scale, "zeros": scaling.zeros}
        each.append({"count": counter.count, **numbers})
        if isinstance(limits, ValueLimits):
            kind = job.source.dtype
            each[-1]["limits"] = limits.normalised(len(each) - 1, scaling, kind).tolist()
    first = {name: value for name, value in each[0].items() if name != "limits"}
    with run.watch.stage("statistics", run.journal.named("statistics.json"), timed=False):
        run.journal.save_statistics(
            number,
            {
                "t": volume.t,
                "c": list(volume.channels),
                "percentiles": [job.config.norm_lower, job.config.norm_upper],
                **first,
                "channels": each,
            },
        )


def _stream(run: Run, number: int, counters: Counters, pieces: Iterator[Box]) -> None:
    """Pass pieces of a volume through the counters, each in whole chunks. As many threads read as
    the planned memory allows."""
    job, watch, sample = run.job, run.watch, run.job.sample
    source, volume, memory = job.norm_source, job.volumes[number], job.plan.memory
    flow, lock, step = Flow(), threading.Lock(), pieces_of(source).step
    chunks, mask = ChunkCounter(source, job.volumes, job.config.missing), mask_of(run, number)
    # What the plan has for bricks and blocks is free as long as values are counted.
    room = memory.total - memory.base - memory.runtime
    # Twice: the decoded chunks, and the array that they are copied to. Values inside a mask are
    # copied once more, and found by flags.
    copied = sample is not None or any(each.nonzero for each in job.values.each)
    held = (4 if copied else 2) * math.prod(step) * len(volume.channels) * source.dtype.itemsize
    if job.way is not None and job.values.as_seen(job.way):
        held += job.way.bytes_for(step, source.dtype.itemsize)

    def count(piece: Box) -> None:
        with watch.stage("read", f"statistics at {piece} of {source.name}"):
            array = np.empty((len(volume.channels), *piece.shape), source.dtype)
            inside: NDArray[np.bool_] = np.broadcast_to(np.True_, piece.shape)

            def read() -> None:
                nonlocal inside
                if sample is not None:
                    inside = sample.inside(volume, piece, source)
                    if not inside.any():
                        return
                volume.read(source, piece, array)
                # Without --missing error, chunks are counted when bricks are read.
                if job.config.missing == "error":
                    chunks.look(number, piece, piece, array)

            watch.retries.run(flow, source.name, f"statistics at {piece}", read)
        with lock, watch.probe.span("statistics", piece):
            _add(job, counters, piece, array, inside, None if mask is None else mask.read(piece))

    threads = max(1, min(job.config.prep_workers, room // held))
    flow.each("statistics", pieces, count, threads)
    # A request to end is obeyed at once: no block is under way that could be finished.
    flow.join(lambda: watch.check(0))


def _add(
    job: Job,
    counters: Counters,
    piece: Box,
    array: NDArray[Any],
    inside: NDArray[np.bool_],
    mask: NDArray[np.bool_] | None,
) -> None:
    """Count the values of a piece, of which the first axis is channels."""
    values, some = array, mask
    if job.sample is not None:
        values, some = array[:, inside], None if mask is None else mask[inside]
    parts = [values] if len(job.values.each) == 1 else values
    for how, counter, part in zip(job.values.each, counters, parts, strict=False):
        if not counter.done and not isinstance(counter, ValueLimits):
            how.add(counter, part, some)
    limits = counters[-1]
    if isinstance(limits, ValueLimits) and not limits.done and job.way is not None:
        held = piece & job.way.over[0]
        within, nearest = held.within(piece), job.way.nearest
        first = 0 if nearest is None else held.start[nearest] - job.way.over[0].start[nearest]
        each = [mask if how.masked else None for how in job.values.each]
        where = [inside[within] if one is None else (inside & one)[within] for one in each]
        limits.add(array[:, *within], where, nearest, first)


def pieces_of(source: Source) -> Grid:
    """A volume cut into boxes of whole chunks, each small enough to hold in memory."""
    domain, step = source.domain[2:], list(source.chunks[2:])
    for axis in (2, 1, 0):
        room = max(1, STATISTICS_VOXELS // math.prod(step))
        step[axis] *= min(room, -(-domain.shape[axis] // step[axis]))
    return Grid(domain, tuple(step), source.grid_origin[2:])


class Counting:
    """The rounds in which several processes count the values of all volumes of a run.

    It keeps what it has merged, as the files of a complete round stay as they are.
    """

    def __init__(self, run: Run) -> None:
        assert run.journal.folder is not None, "several processes share a run only in a run folder"
        self.run, self.job, self.folder = run, run.job, run.journal.folder
        self.merged = 0
        """Number of rounds that are merged."""
        volumes = self.job.volumes if self.job.values.counted else ()
        self.counters: list[Counters] = [new_counters(self.job) for _ in volumes]
        """Those of each volume, ready for the next round."""

    def advance(self) -> bool:
        """Merge each round of which all shares are there. Returns whether all is counted."""
        while not all(map(all_done, self.counters)):
            files = self._whole_round()
            if files is None:
                return False
            # Of a copy: if a file cannot be read, the next look begins with what was merged before.
            counters = deepcopy(self.counters)
            for file in files:
                _merge(self.folder.read(file), counters)
            for each in counters:
                advance(each)
            self.merged, self.counters = self.merged + 1, counters
        return True

    def _whole_round(self) -> list[str] | None:
        """The files of the next round, in any number of shares of which none is missing."""
        files = self.folder.names(f"{STATISTICS_FOLDER}/round-{self.merged + 1}-of-*/*.npz")
        there = group_by(files, lambda file: Path(file).parent.name.rpartition("-")[2])
        whole = (files for elements, files in there.items() if len(files) == int(elements))
        return next(whole, None)

    def _file(self, element: int, elements: int) -> str:
        """The file of an element's share of the next round."""
        return f"{STATISTICS_FOLDER}/round-{self.merged + 1}-of-{elements}/{element}.npz"

    def missing(self, elements: int) -> list[int]:
        """The elements, from 1, that have not counted their shares of the next round."""
        there = self.folder.names(str(Path(self._file(1, elements)).with_name("*")))
        each = range(1, elements + 1)
        return [element for element in each if self._file(element, elements) not in there]

    def count(self, element: int, elements: int) -> str:
        """Count one element's share of the values of all volumes, in the round that is due.

        Returns a sentence on what was done, and is still to be done.
        """
        if self.advance():
            return "Counted before; the percentiles are known, next is --part"
        number = self.merged + 1
        if element in self.missing(elements):
            grid, counters = pieces_of(self.job.norm_source), deepcopy(self.counters)
            for volume, each in enumerate(counters):
                if not all_done(each):  # a volume without any finite value is done at once
                    pieces = map(grid.__getitem__, nth_share(element - 1, elements, len(grid)))
                    _stream(self.run, volume, each, pieces)
            self.folder.write(self._file(element, elements), _packed(counters))
        if self.advance():
            return "Counted; the percentiles are known, next is --part"
        if self.merged == number:
            return f"Counted all of round {number}; the exact values take a second round"
        left = self.missing(elements)
        return f"Counted in round {number}; {len(left)} of {elements} shares are missing"

    def scalings(self, elements: int) -> dict[int, Scalings]:
        """The scalings of each volume by its index, from what all processes have counted. Empty if
        each block has its own.

        Raises `UsageError` if the values are not counted yet; it names the step that counts them.
        """
        job, journal = self.job, self.run.journal
        if job.values.counted and len(journal.statistics) < len(job.volumes):
            while not self.advance():
                # None is missing if the last share came since the look: the next look merges it.
                if missing := self.missing(elements):
                    raise UsageError(
                        f"the values of the input are not counted yet, for percentiles of the "
                        f"whole volume: {len(missing)} of {plural(elements, 'share')} of round "
                        f"{self.merged + 1} are missing; run --statistics {missing[0]}/{elements} "
                        "first"
                    )
            for number, counters in enumerate(self.counters):
                _save(self.run, number, counters)
        return known_scalings(job, journal)


def _packed(counters: list[Counters]) -> bytes:
    return _zipped(
        **{
            f"{place}.{name}": array
            for place, counter in _waiting(counters)
            for name, array in counter.counts.items()
        }
    )


def _zipped(**arrays: Any) -> bytes:
    """Arrays as in a file of ``np.savez_compressed``."""
    file = BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


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


def _waiting(counters: list[Counters]) -> Iterator[tuple[str, Counter]]:
    """The counters that are not done, with their places: those of volume and normalisation."""
    for volume, each in enumerate(counters):
        for number, counter in enumerate(each):
            if not counter.done:
                yield f"{volume}.{number}", counter
