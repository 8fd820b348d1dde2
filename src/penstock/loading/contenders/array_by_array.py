"""Loaders that read one array of a batch after another: zarr-python, and xarray over dask.

xarray over dask has the seed's two loaders. Per sample, each array of each sample is a computation
of its own, and the rows are collated as in a map-style data set. Stacked, the batch of each array
is one computation. Threads are those of dask's threaded scheduler.

zarr decodes in a pool of threads that it makes once in a process. So the number of ``threads`` that
the first contender of a process asks for holds for all of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import require
from ..order import Order
from ..permutation import Items
from .stacked import Peer, open_zarr, reading


class _ArrayByArray(Peer):
    """Reads one array after another, within settings of its library."""

    def __init__(self, data: Any, order: Order, library: str, settings: dict[str, Any]) -> None:
        super().__init__(data, order)
        # For opening and reading alone, since these settings hold for the whole process.
        config = require(library, "loaders").config
        self._within: Callable[[], Any] = lambda: config.set(settings)
        with self._within():
            self._arrays = {
                name: self._open(place.url, place.axes) for name, place in self.places.items()
            }

    @abstractmethod
    def _open(self, url: str, axes: tuple[str, ...]) -> Any: ...

    @abstractmethod
    def _read(self, array: Any, samples: Items) -> NDArray[Any]: ...

    def batches(self) -> Iterator[dict[str, NDArray[Any]]]:
        for samples in self.samples:
            batch = {}
            with self._within():
                for name, array in self._arrays.items():
                    with reading(self.places[name].url):
                        batch[name] = self._read(array, samples)
            yield batch

    def close(self) -> None:
        self._arrays = {}


class Zarr(_ArrayByArray):
    """``array[sample]`` for each sample, copied into its row."""

    name = "zarr"

    def __init__(self, data: Any, order: Order, *, threads: int) -> None:
        settings = {"async.concurrency": threads, "threading.max_workers": threads}
        super().__init__(data, order, "zarr", settings)

    def _open(self, url: str, axes: tuple[str, ...]) -> Any:
        return open_zarr(url, self.name)

    def _read(self, array: Any, samples: Items) -> NDArray[Any]:
        out = np.empty((len(samples), *array.shape[1:]), array.dtype)
        for row, sample in enumerate(samples.tolist()):
            out[row] = array[sample]
        return out


class DaskStacked(_ArrayByArray):
    """``array.isel(sample=samples).values``."""

    name = "dask-stacked"

    def __init__(self, data: Any, order: Order, *, threads: int) -> None:
        # Dask would make the same pool for num_workers, and never end it.
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=self.name)
        super().__init__(data, order, "dask", {"scheduler": "threads", "pool": self._pool})

    def _open(self, url: str, axes: tuple[str, ...]) -> Any:
        """A ``DataArray`` over dask, with a task for each stored chunk. Nothing is decoded in the
        sense of CF: that would look for missing values in every chunk."""
        array = require("dask.array", "loaders").from_zarr(open_zarr(url, self.name))
        return require("xarray", "loaders").DataArray(array, dims=axes or None)

    def _read(self, array: Any, samples: Items) -> NDArray[Any]:
        return np.asarray(array.isel({array.dims[0]: samples}).values)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        super().close()


class DaskSample(DaskStacked):
    """``array.isel(sample=i).values`` for each i, then `numpy.stack`."""

    name = "dask-sample"

    def _read(self, array: Any, samples: Items) -> NDArray[Any]:
        rows = [array.isel({array.dims[0]: int(sample)}).values for sample in samples]
        return np.stack(rows)
