"""zarr-python: a slice for each sample, or one orthogonal index for the batch, with its own codecs
or those of zarrs, which are in Rust.

zarr decodes in a pool of threads that it makes once in a process. So the number of ``threads`` that
the first contender of a process asks for holds for all of them. The same is true of zarrs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base import require
from ..order import Order
from ..permutation import Items
from .stacked import arrays_of, open_zarr, reading, samples_of, whole_samples

Batch = dict[str, NDArray[Any]]


class Zarr:
    """``array[sample : sample + 1]`` for each sample, copied into its row."""

    name = "zarr"
    settings: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, data: Any, order: Order, *, threads: int) -> None:
        whole_samples(order, self.name)
        self._zarr = require("zarr", "loaders")
        self._order = order
        self._settings = {
            "async.concurrency": threads,
            "threading.max_workers": threads,
            **self.settings,
        }
        self._places = arrays_of(data, self.name)
        with self._zarr.config.set(self._settings):
            self._arrays = {
                name: open_zarr(place.url, self.name) for name, place in self._places.items()
            }

    def batches(self, epoch: int = 0) -> Iterator[Batch]:
        for samples in samples_of(self._order, epoch):
            # For the read alone, since these settings hold for the whole process.
            batch = {}
            with self._zarr.config.set(self._settings):
                for name, array in self._arrays.items():
                    with reading(self._places[name].url):
                        batch[name] = self._read(array, samples)
            yield batch

    def _read(self, array: Any, samples: Items) -> NDArray[Any]:
        out = np.empty((len(samples), *array.shape[1:]), array.dtype)
        for row, sample in enumerate(samples.tolist()):
            out[row : row + 1] = array[sample : sample + 1]  # zarrs takes slices and no numbers
        return out

    def close(self) -> None:
        self._arrays = {}


class ZarrStacked(Zarr):
    """``array.oindex[samples]``: the whole batch of an array in one call."""

    name = "zarr-stacked"

    def _read(self, array: Any, samples: Items) -> NDArray[Any]:
        return np.asarray(array.oindex[samples])


class Zarrs(Zarr):
    """`Zarr` with the codecs of zarrs. Strict: where zarrs cannot decode, it raises an error and
    does not fall back to zarr-python."""

    name = "zarrs"
    settings = {  # noqa: RUF012
        "codec_pipeline.path": "zarrs.ZarrsCodecPipeline",
        "codec_pipeline.strict": True,
    }

    def __init__(self, data: Any, order: Order, *, threads: int) -> None:
        require("zarrs", "loaders")
        super().__init__(data, order, threads=threads)
