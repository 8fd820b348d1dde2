"""What the contenders share: they open arrays and give the samples of each batch.

Each contender is a few lines that use a library as its experts do. None is tuned beyond its
library's documentation, and none is held back: nothing is decoded without need.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base import StageError, UsageError, describe, require
from ..engines.chunk_selection import locate
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
                f"loader {self.name} reads whole samples, not {order.patches_per_sample} patches "
                "of each"
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
    try:
        return zarr.open_array(store, mode="r")
    except (OSError, ValueError) as error:
        raise UsageError(f"loader {who}: no Zarr array at {url}: {describe(error)}") from error


@contextmanager
def reading(url: str) -> Iterator[None]:
    """Make errors name the array. Most of these libraries do not name the chunk that failed."""
    try:
        yield
    except Exception as error:
        raise StageError("read", url, error) from error
