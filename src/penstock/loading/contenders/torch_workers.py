"""torch's `DataLoader` over a map-style data set, its worker processes spawned.

Each worker reads samples by zarr-python, collates its batch and hands it over in shared memory.
Workers are spawned and not forked: the libraries that read have threads, and a fork of a process
with threads may wait for ever. Workers live from epoch to epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from ...base import require
from ..order import Order
from .stacked import Peer, open_zarr, reading

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
