"""Plain TensorStore: one ``read()`` of the batch's samples for each array, all started at once.

This is what its documentation shows. That reading into memory which is there already is worth more
than twice as much is why Penstock's own engine does that instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from ..errors import require
from ..order import Order
from .contenders import arrays_of, samples_of, whole_samples


class TensorStoreRead:
    """``array[samples].read()``."""

    name = "tensorstore-read"

    def __init__(self, data: Any, order: Order, *, threads: int) -> None:
        whole_samples(order, self.name)
        ts = require("tensorstore", "loaders")
        from ..stores.tensorstore import explaining, kvstore
        from .tensorstore import REQUESTS

        self._order = order
        # As many requests as threads: it is requests that hide latency, for every contender.
        context = ts.Context(
            {kind: {"limit": threads} for kind in ("data_copy_concurrency", *REQUESTS)}
        )
        self._arrays = {}
        for name, place in arrays_of(data, self.name).items():
            spec = {"driver": "auto", "kvstore": kvstore(f"{place.url}/")}
            with explaining(place.url):
                self._arrays[name] = ts.open(spec, read=True, context=context).result()

    def batches(self, epoch: int = 0) -> Iterator[dict[str, NDArray[Any]]]:
        for samples in samples_of(self._order, epoch):
            reads = {name: array[samples].read() for name, array in self._arrays.items()}
            yield {name: read.result() for name, read in reads.items()}

    def close(self) -> None:
        self._arrays = {}
