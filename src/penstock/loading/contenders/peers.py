"""The loaders of other libraries that Penstock's is compared with.

Each is a few lines that use a library as its experts do. None is tuned beyond its library's
documentation, and none is held back: nothing is decoded without need.

    zarr-python     one array of a batch after another, sample by sample
    xarray, dask    the seed's two: each array of each sample is a computation of its own, and rows
                    are collated as in a map-style data set; or stacked, where the batch of an array
                    is one computation, in the threads of dask's scheduler
    TensorStore     as its documentation shows, one read of the batch's samples for each array, all
                    started at once; or a loop into buffers that are used again, up to twice as fast
    torch           a `DataLoader` over a map-style data set. Each worker reads samples by
                    zarr-python, collates its batch and hands it over in shared memory. Workers live
                    from epoch to epoch, and are spawned: the libraries that read have threads, and
                    a fork of a process with threads may wait for ever

zarr decodes in a pool of threads that it makes once in a process. So the number of ``threads`` that
the first contender of a process asks for holds for all of them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import StageError, UsageError, as_usage_error, plural, require
from ..engines.engine import locate
from ..engines.tensorstore_engine import REQUESTS, open_plainly
from ..order import Order
from ..permutation import Items


@dataclass(frozen=True)
class BatchSamples:
    """The samples of each batch of this rank, anew for each loop."""

    order: Order

    def __iter__(self) -> Iterator[Items]:
        return (self.order.items(0, batch) for batch in range(self.order.num_batches))


class Peer:
    """A loader of another library, which reads whole samples of the arrays of a data set."""

    name: str

    def __init__(self, data: Any, order: Order) -> None:
        if order.patches_per_sample != 1:
            raise UsageError(
                f"loader {self.name} reads whole samples, not "
                f"{plural(order.patches_per_sample, 'patch')} of each"
            )
        self.samples, self.batch_size = BatchSamples(order), order.batch_size
        self.places = locate(data)
        for place in self.places.values():
            if "://" not in place.url and not Path(place.url).is_dir():
                raise UsageError(f"loader {self.name}: there is no array at {place.url}")


def open_zarr(url: str, who: str) -> Any:
    """A Zarr array of zarr-python, over a network by obstore."""
    zarr = require("zarr", "loaders")
    store: Any = url
    if "://" in url:
        # It follows the environment's settings, such as AWS_ENDPOINT_URL.
        remote = require("obstore.store", "loaders").from_url(
            url, client_options={"allow_http": True}
        )
        store = require("zarr.storage", "loaders").ObjectStore(remote, read_only=True)
    with as_usage_error(f"loader {who}: no Zarr array at {url}", OSError, ValueError):
        return zarr.open_array(store, mode="r")


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Make errors name the array. Most of these libraries do not name the chunk that failed."""
    try:
        yield
    except Exception as error:
        raise StageError("read", url, error) from error


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
        return np.stack([array.isel({array.dims[0]: int(i)}).values for i in samples])


class TensorStoreRead(Peer):
    """``array[samples].read()``."""

    name = "tensorstore-read"

    def __init__(self, data: Any, order: Order, *, threads: int) -> None:
        super().__init__(data, order)
        self._ts = ts = require("tensorstore", "loaders")
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


_AHEAD = 2
"""The batches that each worker reads ahead, torch's default."""


class Samples:
    """A map-style data set. Paths are pickled for a worker, which opens the arrays itself."""

    def __init__(self, urls: dict[str, str]) -> None:
        self._urls = urls
        self._arrays: dict[str, Any] | None = None

    def __getitem__(self, sample: int) -> dict[str, NDArray[Any]]:
        if self._arrays is None:
            self._arrays = {name: open_zarr(url, "torch") for name, url in self._urls.items()}
        row = {}
        for name, array in self._arrays.items():
            with reading(self._urls[name]):
                row[name] = array[sample]
        return row


def _one_thread(worker: int) -> None:
    """Read with one thread in a worker: there are several workers."""
    require("zarr", "loaders").config.set({"async.concurrency": 1, "threading.max_workers": 1})


class TorchWorkers(Peer):
    """``DataLoader(num_workers=threads)``; with 0 it reads in this process."""

    name = "torch"

    def __init__(self, data: Any, order: Order, *, threads: int) -> None:
        super().__init__(data, order)
        data_module = require("torch.utils.data", "loaders")
        require("zarr", "loaders")
        urls = {name: place.url for name, place in self.places.items()}
        self.ahead = _AHEAD * threads
        self._running: Iterator[dict[str, NDArray[Any]]] | None = None
        self._loader: Any = data_module.DataLoader(
            Samples(urls),
            batch_sampler=self.samples,
            num_workers=threads,
            prefetch_factor=_AHEAD if threads else None,
            multiprocessing_context="spawn" if threads else None,
            persistent_workers=threads > 0,
            worker_init_fn=_one_thread if threads else None,
        )

    def batches(self) -> Iterator[dict[str, NDArray[Any]]]:
        self._running = self._epoch()
        return self._running

    def _epoch(self) -> Iterator[dict[str, NDArray[Any]]]:
        for batch in self._loader:
            yield {name: tensor.numpy() for name, tensor in batch.items()}

    def close(self) -> None:
        """End the workers, which live as long as the loader's iterator."""
        if self._running is not None:
            self._running.close()  # type: ignore[attr-defined]
        self._running = self._loader = None
