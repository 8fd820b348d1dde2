"""Any array that TensorStore opens, read straight into the batch: shards, S3, GCS, HTTP, N5.

    ts.array(batch).write(array[samples])

TensorStore reads, decodes and copies in threads of its own: ``workers`` of them copy, and up to
``fetch`` requests are under way. The loader starts a read, and the next one before the last has
ended. The thread that takes the batch waits for it.

Two things make it quick. Files of this machine are mapped: a chunk is decoded from the page cache,
without a buffer of its own. Samples that follow one another are read as a slice: by an index array
TensorStore copies value by value where a chunk has several samples.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import Deferred, StageError, UsageError, scrub
from ...data import explained_errors, kvstore_of, plainly, read_key
from ...instruments import is_safe_to_map
from ..fields import Field
from ..permutation import Items
from .engine import Arrays, Check, Engine, EngineKnobs, Location, Selection

ts = Deferred("tensorstore", "infer")

_IN_FLIGHT = 4
"""The most reads at once. Each is one array of one batch; there are two of each array."""
REQUESTS = tuple(
    f"{kind}_concurrency" for kind in ("file_io", "s3_request", "gcs_request", "http_request")
)
"""The resources of TensorStore that bound how many reads are under way."""
_PATIENCE = {
    f"{kind}_request_retries": {"max_retries": 5, "initial_delay": "1s"}
    for kind in ("s3", "gcs", "http")
}
"""Waits of 1, 2, 4, 8 and 16 s, half a minute for a network that falters. By default TensorStore
waits silently for a quarter of an hour, while a training stands still."""
_MARKERS = {".zarray": "zarr", "zarr.json": "zarr3", "attributes.json": "n5"}
_UNFILLED = {"fill_missing_data_reads": False}
"""Have TensorStore raise an error for a missing chunk."""
_UNCHANGED = {"recheck_cached_metadata": "open", "recheck_cached_data": "open"}
"""Have TensorStore look for changes of the store only when it opens it."""


class TensorStoreEngine(Engine):
    """Reads any array that TensorStore opens, through a context of its own."""

    name = "tensorstore"
    reads_alone = True

    def __init__(
        self, places: Mapping[str, Location], selection: Selection, knobs: EngineKnobs
    ) -> None:
        self.drivers = min(_IN_FLIGHT, 2 * len(places))
        settings: dict[str, Any] = {
            **_PATIENCE,
            "data_copy_concurrency": {"limit": knobs.workers},
            "cache_pool": {"total_bytes_limit": knobs.cache_bytes},
        }
        if knobs.fetch:
            settings |= {kind: {"limit": knobs.fetch} for kind in REQUESTS}
        elif all(is_safe_to_map(place.url) for place in places.values()):
            # A mapped file needs no waiting: as many reads as threads that decode are enough.
            settings |= {
                "file_io_mode": {"mode": "memmap"},
                "file_io_concurrency": {"limit": knobs.workers},
            }
        context = ts.Context(settings)
        self.arrays: dict[str, Any] = {}
        fields: dict[str, Field] = {}
        for name, place in places.items():
            array = _open(place.url, knobs.missing, context)
            chunks = array.chunk_layout.read_chunk.shape or array.shape
            fields[name] = selection.field(
                name, place, array.shape, chunks, array.dtype.numpy_dtype
            )
            volume = len(fields[name].shape) > array.ndim
            self.arrays[name] = array[ts.newaxis] if volume else array
        self.fields = fields
        self.locations = {name: scrub(place.url) for name, place in places.items()}
        largest = max(field.chunk_nbytes for field in fields.values())
        self.scratch_bytes = knobs.cache_bytes + knobs.workers * largest
        self.pending: set[Any] = set()
        _let_heap_keep_what_is_freed()
        self.lock = threading.Lock()

    def tasks(self, samples: Items, patches: Items | None = None) -> list[FieldTask]:
        return [FieldTask(self, field, samples, patches) for field in self.fields.values()]

    def bytes_in_flight(self, rows: int, batches: int) -> int:
        """All chunks of a task may wait in memory, to be decoded or to be copied. Chunks that are
        being decoded count as scratch."""
        tasks = [
            field.most_chunks(rows) * field.chunk_nbytes
            for field in self.fields.values()
            for _ in range(batches)
        ]
        return sum(sorted(tasks, reverse=True)[: self.drivers])

    @contextlib.contextmanager
    def explained(self, name: str) -> Iterator[None]:
        """Make errors of TensorStore name the array that was read."""
        try:
            with plainly():
                yield
        except (ValueError, OSError, NotImplementedError) as error:
            raise StageError("read", self.locations[name], error) from error

    def cancel(self) -> None:
        with self.lock:
            pending = list(self.pending)
        for future in pending:
            future.cancel()


@dataclass(frozen=True, eq=False)
class FieldTask:
    """One array of one batch."""

    engine: TensorStoreEngine
    field: Field
    samples: Items
    patches: Items | None

    @property
    def nbytes(self) -> int:
        return self.field.item_nbytes * len(self.samples)

    def run(self, out: Arrays, check: Check) -> None:
        self.begin(out).wait(check)

    def begin(self, out: Arrays) -> FieldReading:
        """Start reading into the batch."""
        batch, engine = out[self.field.name], self.engine
        with engine.explained(self.field.name):
            futures = [
                ts.array(batch[rows]).write(view)
                for rows, view in self._views(engine.arrays[self.field.name])
            ]
        with engine.lock:
            engine.pending.update(futures)
        return FieldReading(engine, self.field.name, futures)

    def _views(self, array: Any) -> list[tuple[Any, Any]]:
        """Rows of the batch (... for all) and the view of the array that goes there. Each patch is
        a view of its own."""
        field = self.field
        # The sample of each row, (row,), or those at each offset, (row, time).
        wanted: NDArray[Any] = self.samples[:, None] + np.array(field.offsets)
        wanted = wanted[:, 0] if len(field.offsets) == 1 else wanted
        if self.patches is None or field.patch is None:
            whole = [slice(None)] * (len(field.shape) - 1)
            return [(..., _outer(array, self._inner(whole))[_plain(wanted)])]
        boxes = field.patch_boxes(self.patches)
        if field.channels is None and wanted.ndim == 1:
            # TensorStore copies a box of one sample quicker by numbers than by arrays of them.
            samples = enumerate(wanted.tolist())
            return [(row, array[(i, *box)]) for (row, i), box in zip(samples, boxes, strict=True)]
        return [
            (slice(row, row + 1), _outer(array, self._inner(box))[_plain(wanted[row : row + 1])])
            for row, box in enumerate(boxes)
        ]

    def _inner(self, box: Iterable[slice]) -> list[Any]:
        """A box of an item, with only its chosen channels."""
        inner: list[Any] = list(box)
        if self.field.channels is not None:
            inner[self.field.channel_axis - 1] = np.array(self.field.channels)
        return inner


@dataclass(frozen=True, eq=False)
class FieldReading:
    """The read of one array of one batch."""

    engine: TensorStoreEngine
    name: str
    futures: list[Any]

    def done(self) -> bool:
        return all(future.done() for future in self.futures)

    def end_within(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for future in self.futures:
            with contextlib.suppress(Exception):
                future.exception(timeout=max(0.0, until - time.monotonic()))

    def wait(self, check: Check) -> None:
        try:
            check()  # a `cancel` before the futures were known would have missed them
            with self.engine.explained(self.name):
                for future in self.futures:
                    future.result()
        finally:
            with self.engine.lock:
                self.engine.pending.difference_update(self.futures)


def _plain(wanted: NDArray[Any]) -> Any:
    """Samples as a slice where they follow one another. Others, and those with a time axis, stay.

    >>> _plain(np.array([3, 4, 5])), _plain(np.array([3, 5, 4]))
    (slice(3, 6, None), array([3, 5, 4]))
    """
    if wanted.ndim > 1 or (np.diff(wanted) != 1).any():
        return wanted
    return slice(int(wanted[0]), int(wanted[-1]) + 1)


def _outer(array: Any, inner: list[Any]) -> Any:
    """``array[:, inner...]``, with each index along its own axis."""
    if all(isinstance(index, slice) and index == slice(None) for index in inner):
        return array
    return array.oindex[(slice(None), *inner)]


def _let_heap_keep_what_is_freed() -> None:
    """Have glibc keep up to 32 MiB of freed memory for the next allocation of a thread.

    At first glibc gives the memory of every decoded chunk back to the system and takes it anew for
    the next chunk: some 350 page faults for a batch of small images. Its threshold grows with the
    largest block that was freed. Nothing is written into this block, so it costs no memory.
    """
    block = np.empty(16 << 20, np.uint8)
    del block


def open_plainly(url: str, context: Any = None) -> Any:
    """An array as TensorStore opens it with its defaults."""
    with explained_errors(url):
        spec = {"driver": "auto", "kvstore": kvstore_of(f"{url}/")}
        return ts.open(spec, read=True, open=True, context=context).result()


def _holds(url: str, marker: str) -> bool:
    if Path(url).is_dir():  # this starts no threads of TensorStore
        return Path(url, marker).is_file()
    return read_key(url, marker) is not None


def _open(url: str, missing: str, context: Any) -> Any:
    driver = next((d for marker, d in _MARKERS.items() if _holds(url, marker)), None)
    if driver is None:
        for marker in _MARKERS:
            read_key(url, marker, strict=True)  # raises where reading was forbidden
        raise UsageError(f"{scrub(url)}: there is none of {', '.join(_MARKERS)}")
    spec = {"driver": driver, "kvstore": kvstore_of(f"{url}/"), **_UNCHANGED}
    with explained_errors(url):
        opened = ts.open({**spec, **_UNFILLED}, context=context, read=True, open=True).result()
        # N5 fills with zero. For Zarr without a fill value TensorStore would make one up.
        if missing == "fill" and (driver == "n5" or opened.fill_value is not None):
            opened = ts.open(spec, context=context, read=True, open=True).result()
        return opened
