"""Zarr v2 and v3 on a local disk, chunk by chunk: read, decode, scatter.

    inputs.zarr/3.0.0.7 ──pread──▶ bytes ──decode──▶ scratch ──scatter──▶ batch[row, :, :, 91:104]

A task is one chunk of a batch, or several chunks that lie side by side. All three steps run without
Python's lock, in reused memory: a batch costs no page faults. The engine refuses shards, remote
stores and unusual codecs; TensorStore reads those.

Three things make it quick. Blosc's own threads are off in the whole process: with one chunk to a
thread they would only be started and joined. Values that are adjacent in the chunk and in the batch
are copied as one element: 13 float32 channels (52 bytes) move at 1.8 times the speed of 13 single
values. Where such runs are short, chunks that lie side by side are copied together: see
`SideBySide`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import Pool, StageError, UsageError
from ..fields import ChunkRead, Field, chunk_reads
from ..permutation import Items
from .engine import Arrays, Check, Engine, EngineKnobs, Location, Selection, Task
from .zarr_chunks import ChunkLayout, copy_runs, decode_chunk, read_chunk_file, read_layout

_SLACK = 1 << 16
"""Most bytes by which an incompressible chunk may exceed its data."""
_SHORT = 512
"""Bytes of eight cache lines. Chunks are copied together where adjacent values take less: a copy
of one chunk alone would then touch many cache lines that belong to other chunks too."""
_BESIDE = 256 << 20
"""The most bytes that all workers decode before they copy them."""
_FEWEST = 4
"""The fewest chunks that are copied together. Numpy starts anew for every line: two took a tenth
more processor time than one by one, four a tenth less, fourteen a quarter less (ufs-p1)."""
_LARGE = 1 << 20
"""Bytes of a large chunk: its decoding takes much longer than a change of Python's lock."""
_FILL = np.empty(0, np.uint8)
"""Stands for the bytes of a missing chunk that becomes the fill value."""


class NativeEngine(Engine):
    """Reads local Zarr arrays of regular chunks. `Unsupported` for others."""

    name = "native"

    def __init__(
        self, places: Mapping[str, Location], selection: Selection, knobs: EngineKnobs
    ) -> None:
        if knobs.fetch:
            raise UsageError("fetch is of engine tensorstore; in engine native the workers read")
        if knobs.cache_bytes:
            raise UsageError("cache is of engine tensorstore; engine native keeps no chunks")
        self.drivers, self.missing = knobs.workers, knobs.missing
        self.layouts = {name: read_layout(place.url) for name, place in places.items()}
        self.fields = {
            name: selection.field(name, places[name], layout.shape, layout.chunks, layout.dtype)
            for name, layout in self.layouts.items()
        }
        self.most_stored = max(f.chunk_nbytes for f in self.fields.values()) + _SLACK
        """The most bytes of a chunk's file."""
        self.stored = Pool(self.most_stored)
        self._set_aside({n: _beside(f, knobs.workers) for n, f in self.fields.items()})

    def is_quicker(self) -> bool:
        """Whether it reads more quickly than TensorStore: most of a batch is of large chunks that
        lie side by side. TensorStore copies these one by one, and Python's lock between two of them
        costs little."""
        large = sum(
            field.item_nbytes
            for name, field in self.fields.items()
            if field.chunk_nbytes >= _LARGE and self._beside[name] > 1
        )
        return 2 * large > sum(field.item_nbytes for field in self.fields.values())

    def save_memory(self) -> None:
        self._set_aside(dict.fromkeys(self.fields, 1))

    def _set_aside(self, beside: Mapping[str, int]) -> None:
        """Plan memory for tasks of so many chunks of each array."""
        self._beside = beside
        # A worker has one task at a time, so one size of room does for all arrays.
        room = max(beside[name] * field.chunk_nbytes for name, field in self.fields.items())
        self.decoded = Pool(room)
        copies = max(
            self.layouts[name].copies * field.chunk_nbytes for name, field in self.fields.items()
        )
        self.scratch_bytes = self.drivers * (self.most_stored + room + copies)

    def clear(self) -> None:
        self.stored.clear()
        self.decoded.clear()

    def tasks(self, samples: Items, patches: Items | None = None) -> Sequence[Task]:
        chunks = self.chunks(samples, patches)
        share = len(chunks) // (2 * self.drivers)  # else a small batch would occupy few of them
        groups: list[list[ChunkTask]] = []
        for chunk in chunks:
            most = min(share, self._beside[chunk.field.name])
            if groups and len(groups[-1]) < most and chunk.follows(groups[-1][-1]):
                groups[-1].append(chunk)
            else:
                groups.append([chunk])
        return [
            task
            for group in groups
            for task in ([SideBySide(group)] if len(group) >= _FEWEST else group)
        ]

    def chunks(self, samples: Items, patches: Items | None) -> list[ChunkTask]:
        """The chunks of a batch, each as a task."""
        return [
            ChunkTask(self, field, self.layouts[name], read)
            for name, field in self.fields.items()
            for read in chunk_reads(field, samples, patches)
        ]


@dataclass(slots=True, eq=False)
class ChunkTask:
    """One chunk of a batch: `fetch`, `decode`, `scatter`; `run` is the three of them."""

    engine: NativeEngine
    field: Field
    layout: ChunkLayout
    read: ChunkRead

    @property
    def path(self) -> str:
        return self.layout.path(self.read.index)

    @property
    def nbytes(self) -> int:
        return self.field.chunk_nbytes

    def fetch(self) -> NDArray[np.uint8]:
        """The bytes of the chunk's file, in a buffer of ``engine.stored``."""
        engine = self.engine
        try:
            return read_chunk_file(self.path, engine.stored, engine.most_stored)
        except FileNotFoundError:
            fill = self.layout.fill_value
            if fill is not None and engine.missing == "fill":
                return _FILL
            message = (
                "the chunk is missing, and the store sets no fill value"
                if fill is None
                else f"the chunk is missing; missing='fill' would take {fill}, as the store says"
            )
            raise StageError("read", self.path, FileNotFoundError(message)) from None
        except OSError as error:
            raise StageError("read", self.path, OSError(error.strerror or str(error))) from error

    def decode(self, stored: NDArray[np.uint8], chunk: NDArray[Any]) -> None:
        """Decode the file's bytes into an array of the chunk's shape."""
        if stored is _FILL:
            chunk[...] = self.layout.fill_value
            return
        try:
            decode_chunk(self.layout, stored, chunk)
        except Exception as error:
            raise StageError("decode", self.path, error) from error

    def scatter(self, chunk: NDArray[Any], out: Arrays) -> None:
        """Copy the part of the chunk that belongs to the batch into the batch."""
        batch = out[self.field.name]
        for to, of in self.read.copies:
            copy_runs(batch[to], chunk[of])

    def run(self, out: Arrays, check: Check) -> None:
        check()
        pool = self.engine.decoded
        chunk = pool.take(self.field.chunks, self.layout.dtype)
        self.fill(chunk)
        self.scatter(chunk, out)
        pool.give(chunk)

    def fill(self, chunk: NDArray[Any]) -> None:
        """Read and decode the chunk into an array of its shape."""
        stored = self.fetch()
        self.decode(stored, chunk)
        if stored is not _FILL:
            self.engine.stored.give(stored)

    def follows(self, other: ChunkTask) -> bool:
        """Whether this chunk comes right behind another along the last axis of the batch. The batch
        must take both whole along that axis, and the same part of both along the others.
        """
        copies, before = self.read.copies, other.read.copies
        whole = self.field.chunks[-1]
        return (
            self.field is other.field
            and self.read.index[:-1] == other.read.index[:-1]
            and len(copies) == len(before)
            and all(
                to[:-1] == to_before[:-1]
                and of[:-1] == of_before[:-1]
                and to[-1].start == to_before[-1].stop
                and all(part[-1].indices(whole) == (0, whole, 1) for part in (of, of_before))
                for (to, of), (to_before, of_before) in zip(copies, before, strict=True)
            )
        )


@dataclass(slots=True, eq=False)
class SideBySide:
    """Chunks that follow one another along the last axis: decoded one by one, copied together.

        a a a a
        b b b b  ──▶  batch[row]: a b c a b c a b c a b c
        c c c c

    A batch is often larger than a processor's cache. Copied chunk by chunk, each cache line would
    be fetched and written once for every chunk that has a part of it. Together it is written once.
    """

    tasks: list[ChunkTask]

    @property
    def nbytes(self) -> int:
        return sum(task.nbytes for task in self.tasks)

    def run(self, out: Arrays, check: Check) -> None:
        first = self.tasks[0]
        pool = first.engine.decoded
        chunks = pool.take((len(self.tasks), *first.field.chunks), first.layout.dtype)
        try:
            for task, chunk in zip(self.tasks, chunks, strict=True):
                check()
                task.fill(chunk)
            self._scatter(chunks, out[first.field.name])
        finally:
            pool.give(chunks)

    def _scatter(self, chunks: NDArray[Any], batch: NDArray[Any]) -> None:
        for (to, of), (end, _) in zip(
            self.tasks[0].read.copies, self.tasks[-1].read.copies, strict=True
        ):
            rows = batch[to[:-1]][..., to[-1].start : end[-1].stop]
            beside = np.moveaxis(chunks[(slice(None), *of[:-1])], 0, -2)
            copy_runs(rows.reshape((*rows.shape[:-1], *beside.shape[-2:])), beside)


def _beside(field: Field, workers: int) -> int:
    """The most chunks of an array that each worker decodes before it copies them."""
    if len(field.shape) < 2 or field.run_nbytes >= _SHORT:
        return 1
    room = _BESIDE // workers // field.chunk_nbytes
    most = min(min(field.shape[-1], field.item_shape[-1]) // field.chunks[-1], room)
    return most if most >= _FEWEST else 1
