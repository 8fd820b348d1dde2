"""Plain TensorStore, in two ways: as its documentation shows, and as an expert writes it.

The first is one ``read()`` of the batch's samples for each array, all started at once. The second
is a loop that reads into buffers that are used again, which is up to twice as fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import require
from ..order import Order
from ..permutation import Items
from .stacked import Peer


class TensorStoreRead(Peer):
    """``array[samples].read()``."""

    name = "tensorstore-read"

    def __init__(self, data: Any, order: Order, *, threads: int) -> None:
        super().__init__(data, order)
        self._ts = ts = require("tensorstore", "loaders")
        from ..engines.tensorstore_engine import REQUESTS, open_plainly

        # As many requests as threads, for every contender: requests hide latency.
        context = ts.Context(
            {kind: {"limit": threads} for kind in ("data_copy_concurrency", *REQUESTS)}
        )
        self._arrays = {
            name: open_plainly(place.url, context) for name, place in self.places.items()
        }

    def batches(self) -> Iterator[dict[str, NDArray[Any]]]:
        for samples in self.samples:
            reads = {name: array[samples].read() for name, array in self._arrays.items()}
            yield {name: read.result() for name, read in reads.items()}

    def close(self) -> None:
        self._arrays = {}


class TensorStoreLoop(TensorStoreRead):
    """``ts.array(buffer).write(array[samples])`` into two buffers, one batch ahead.

    A batch is overwritten when the one after the next is asked for.
    """

    name = "tensorstore-loop"
    ahead = 1

    def batches(self) -> Iterator[dict[str, NDArray[Any]]]:
        shapes = {n: (self.batch_size, *a.shape[1:]) for n, a in self._arrays.items()}
        buffers = [
            {n: np.empty(shapes[n], a.dtype.numpy_dtype) for n, a in self._arrays.items()}
            for _ in range(2)
        ]
        under_way = None
        for number, samples in enumerate(self.samples):
            batch = {n: rows[: len(samples)] for n, rows in buffers[number % 2].items()}
            reads = [self._write(rows, self._arrays[n], samples) for n, rows in batch.items()]
            if under_way is not None:
                yield self._done(*under_way)
            under_way = batch, reads
        if under_way is not None:
            yield self._done(*under_way)

    def _write(self, rows: NDArray[Any], array: Any, samples: Items) -> Any:
        if (np.diff(samples) == 1).all():  # in a row: a slice is quicker than an index
            first, last = int(samples[0]), int(samples[-1])
            return self._ts.array(rows).write(array[first : last + 1].translate_to[0])
        return self._ts.array(rows).write(array[samples])

    @staticmethod
    def _done(batch: dict[str, NDArray[Any]], reads: list[Any]) -> dict[str, NDArray[Any]]:
        for read in reads:
            read.result()
        return batch
