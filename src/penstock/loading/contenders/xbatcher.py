"""xbatcher: a `BatchGenerator` over xarray and dask, asked for one batch after another.

A batch of xbatcher is a window of neighbouring samples. Batches in stored order are windows of the
data set; for any other order the samples of a batch are selected first, and are one window.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import require
from ..order import Order
from .dask_xarray import open_arrays
from .stacked import arrays_of, reading, samples_of, whole_samples


class Xbatcher:
    """``generator[batch]``, where a batch is some samples and all of the other axes."""

    name = "xbatcher"

    def __init__(self, data: Any, order: Order, *, threads: int) -> None:
        whole_samples(order, self.name)
        self._xbatcher = require("xbatcher", "loaders")
        xarray = require("xarray", "loaders")
        self._dask = require("dask", "loaders")
        arrays = {
            # Axes of one name must have one length. Here each array has axes of its own.
            name: array.rename({dim: f"{name}_{dim}" for dim in array.dims[1:]})
            for name, array in open_arrays(data, self.name).items()
        }
        self._where = " or ".join(place.url for place in arrays_of(data, self.name).values())
        self._dataset = xarray.Dataset(arrays)
        self._sample = next(iter(arrays.values())).dims[0]
        self._order = order
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=self.name)

    def batches(self, epoch: int = 0) -> Iterator[dict[str, NDArray[Any]]]:
        order = self._order
        windows = order.shuffle == "none" and order.world_size == 1
        whole = self._generator(self._dataset, order.batch_size) if windows else None
        for number, samples in enumerate(samples_of(order, epoch)):
            # It reads all arrays of a batch at once.
            with reading(self._where), self._dask.config.set(scheduler="threads", pool=self._pool):
                if whole is not None and len(samples) == order.batch_size:
                    batch = whole[number % len(whole)]
                else:
                    chosen = self._dataset.isel({self._sample: samples})
                    batch = self._generator(chosen, len(samples))[0]
                arrays = {str(name): np.asarray(array) for name, array in batch.items()}
            yield arrays

    def _generator(self, dataset: Any, batch_size: int) -> Any:
        window = {dim: size for dim, size in dataset.sizes.items() if dim != self._sample}
        return self._xbatcher.BatchGenerator(dataset, {self._sample: batch_size, **window})

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._dataset = None
