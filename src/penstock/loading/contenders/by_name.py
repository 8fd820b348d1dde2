"""The loaders that are compared, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pkgutil import resolve_name
from typing import Any, Protocol

from numpy.typing import NDArray

from ...base import UsageError
from ..order import Order

CONTENDERS = {
    "penstock": "penstock.loading.contenders.ours:Ours",
    "penstock-tensorstore": "penstock.loading.contenders.ours:by_tensorstore",
    "penstock-native": "penstock.loading.contenders.ours:native",
    "tensorstore-loop": "penstock.loading.contenders.peers:TensorStoreLoop",
    "tensorstore-read": "penstock.loading.contenders.peers:TensorStoreRead",
    "torch": "penstock.loading.contenders.peers:TorchWorkers",
    "dask-sample": "penstock.loading.contenders.peers:DaskSample",
    "dask-stacked": "penstock.loading.contenders.peers:DaskStacked",
    "zarr": "penstock.loading.contenders.peers:Zarr",
}
"""The loaders that a benchmark compares, each ``module:Class``. `make_contender` calls them."""


class Contender(Protocol):
    """A loader as a benchmark sees it: the batches of one epoch, in a given order."""

    def batches(self) -> Iterator[Mapping[str, NDArray[Any]]]:
        """The batches of an epoch: each array by name, shape (rows, ...)."""

    def close(self) -> None:
        """End its threads or processes."""


def make_contender(name: str, data: Any, order: Order, *, threads: int, **knobs: Any) -> Contender:
    """Open a contender by name.

    Args:
        name: A name of `CONTENDERS`.
        data: A packed data set, one array, or a mapping of names to paths or URLs.
        order: The order of its batches.
        threads: Threads or worker processes that read.
        knobs: Further settings of Penstock's own loader.

    Returns:
        The contender.

    Raises:
        UsageError: There is no such loader, or it cannot read the data.
        MissingDependency: Its library is not installed. The message has the line that installs it.
    """
    if name not in CONTENDERS:
        raise UsageError(f"there is no loader {name!r}; known are {', '.join(CONTENDERS)}")
    return resolve_name(CONTENDERS[name])(data, order, threads=threads, **knobs)
