"""xarray over dask: the seed's two loaders.

Per sample, each array of each sample is a computation of its own, and the rows are collated as in a
map-style data set. Stacked, the batch of each array is one computation, and the arrays follow one
another, as in the seed. Threads are those of dask's threaded scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import require
from ..order import Order
from ..permutation import Items
from .stacked import arrays_of, open_zarr, reading, samples_of, whole_samples


def open_arrays(data: Any, who: str) -> dict[str, Any]:
    """Every array of a data set as a ``DataArray`` over dask, with a task for each stored chunk.

    Nothing is decoded in the sense of CF: that would look for missing values in every chunk.
    """
    xarray = require("xarray", "loaders")
    dask = require("dask.array", "loaders")
    require("zarr", "loaders")
    return {
        name: xarray.DataArray(dask.from_zarr(open_zarr(place.url, who)), dims=place.axes or None)
        for name, place in arrays_of(data, who).items()
    }


class DaskStacked:
    """``array.isel(sample=samples).values``."""

    name = "dask-stacked"

    def __init__(self, data: Any, order: Order, *, threads: int) -> None:
        whole_samples(order, self.name)
        self._dask = require("dask", "loaders")
        self._places = arrays_of(data, self.name)
        self._arrays = open_arrays(data, self.name)
        self._order = order
        # Dask would make the same pool for num_workers, and never end it.
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=self.name)

    def batches(self, epoch: int = 0) -> Iterator[dict[str, NDArray[Any]]]:
        for samples in samples_of(self._order, epoch):
            batch = {}
            with self._dask.config.set(scheduler="threads", pool=self._pool):
                for name, array in self._arrays.items():
                    with reading(self._places[name].url):
                        batch[name] = self._read(array, samples)
            yield batch

    def _read(self, array: Any, samples: Items) -> NDArray[Any]:
        return np.asarray(array.isel({array.dims[0]: samples}).values)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._arrays = {}


class DaskSample(DaskStacked):
    """``array.isel(sample=i).values`` for each i, then `numpy.stack`."""

    name = "dask-sample"

    def _read(self, array: Any, samples: Items) -> NDArray[Any]:
        rows = [array.isel({array.dims[0]: int(sample)}).values for sample in samples]
        return np.stack(rows)
