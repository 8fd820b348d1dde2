"""xbatcher: a `BatchGenerator` over xarray and dask, asked for one batch after another.

A batch of xbatcher is a window of neighbouring samples, so it can follow no shuffled order; only
batches in stored order can be compared, on one rank, and all of one size.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError, require
from ..order import Order
from .contenders import whole_samples
from .dask_xarray import open_arrays


class Xbatcher:
    """``generator[batch]``, where a batch is so many samples and all of the other axes."""

    name = "xbatcher"

    def __init__(self, data: Any, order: Order, *, threads: int) -> None:
        whole_samples(order, self.name)
        if order.shuffle != "none" or order.world_size != 1:
            raise UsageError(
                "loader xbatcher delivers neighbouring samples in stored order to one rank; it "
                f"cannot follow shuffle {order.shuffle!r} on {order.world_size} ranks"
            )
        if not order.drop_last and order.num_samples % order.batch_size:
            raise UsageError(
                f"loader xbatcher drops a short last batch: {order.num_samples} samples are not "
                f"a multiple of batch size {order.batch_size}"
            )
        xbatcher = require("xbatcher", "loaders")
        xarray = require("xarray", "loaders")
        self._dask = require("dask", "loaders")
        arrays = {
            # Axes of one name must have one length; here each array has its own.
            name: array.rename({dim: f"{name}_{dim}" for dim in array.dims[1:]})
            for name, array in open_arrays(data, self.name).items()
        }
        dataset = xarray.Dataset(arrays)
        sample = next(iter(arrays.values())).dims[0]
        window = {sample: order.batch_size}
        window |= {dim: size for dim, size in dataset.sizes.items() if dim != sample}
        self._generator: Any = xbatcher.BatchGenerator(dataset, window)
        self._order = order
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=self.name)

    def batches(self, epoch: int = 0) -> Iterator[dict[str, NDArray[Any]]]:
        for number in range(self._order.num_batches):
            with self._dask.config.set(scheduler="threads", pool=self._pool):
                batch = self._generator[number]
                arrays = {str(name): np.asarray(array) for name, array in batch.items()}
            yield arrays

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._generator = None
