"""The cost of an order in reads, and how well it mixes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .cache import Foresight, NextUseCache
from .order import Order
from .permutation import Items


class Need(NamedTuple):
    """The chunks that some items read."""

    chunks: Mapping[Hashable, int]
    """Bytes of each decoded chunk, with its padding."""
    used: int
    """Bytes of the items themselves."""


@dataclass(frozen=True, slots=True)
class Price:
    """The cost of an order in reads, and how well it mixes."""

    read_amplification: float
    """Bytes decoded / bytes used, where each batch reads each of its chunks once."""
    read_amplification_cached: float
    """The same with the cache. The cache starts empty, so over a part of an epoch this is rather
    too high than too low."""
    mixing: float
    """Distinct chunks in which the items of a global batch begin / items of that batch. It is 1
    where every item is of another chunk."""
    lag: float
    """The mean distance between consecutive items, relative to that of a random order (1)."""
    num_batches: int
    """The number of batches that were measured."""
    exact: bool
    """True if these were all batches of the epoch."""

    def __str__(self) -> str:
        cached = ""
        if self.read_amplification_cached != self.read_amplification:
            cached = f" ({self.read_amplification_cached:.2f} with the cache)"
        looked = "" if self.exact else f", by {self.num_batches} batches"
        return (
            f"{self.read_amplification:.2f} bytes decoded for each that is used{cached}; "
            f"{self.mixing:.2f} distinct chunks to an item, and one item {self.lag:.2f} times as "
            f"far from the next as at random{looked}"
        )


_MOST_ITEMS = 200_000
"""The most items that `price_order` looks at."""
_MOST_PATCHES = 8192
"""The most patches for which `price_order` looks up the chunk that each begins in."""


def price_order(
    order: Order,
    need: Callable[[Items], Need],
    *,
    epoch: int = 0,
    num_batches: int = 256,
    cache_bytes: int = 0,
    foreseen: int = 0,
) -> Price:
    """The price of an order for one rank.

    A block order is followed through whole windows, since a chunk that is half used would count in
    full.

    Args:
        order: The order.
        need: A function that gives the chunks that some items read; see `need_of`.
        epoch: The epoch.
        num_batches: The most batches of the epoch to look at.
        cache_bytes: Bytes of the cache, 0 without one.
        foreseen: Uses of chunks that the cache sees ahead of a batch; see `Foresight`.

    Returns:
        The price. It is exact where the epoch has no more batches than were looked at.
    """
    run = min(num_batches, order.num_batches)
    if order.shuffle == "block" and order.window_items <= _MOST_ITEMS:
        windows = -(-run * order.global_batch // order.window_items)
        run = min(-(-windows * order.window_items // order.global_batch), order.num_batches)

    decoded = used = 0
    for items in _in_runs(order, epoch, _spread(order.num_batches, run)):
        chunks, nbytes = need(items)
        decoded, used = decoded + sum(chunks.values()), used + nbytes
    plain = decoded / used
    cached = (
        _cached_amplification(order, need, epoch, run, cache_bytes, foreseen)
        if cache_bytes
        else plain
    )

    # Patches are looked at one by one, so with many to a batch fewer batches are looked at.
    looked = run if order.patches_per_sample == 1 else -(-_MOST_PATCHES // order.global_batch)
    batches = _spread(order.num_batches, min(run, looked))
    globally = _in_runs(order, epoch, batches, globally=True)
    shares = [_num_chunks(order, need, items) / len(items) for items in globally]
    return Price(
        read_amplification=plain,
        read_amplification_cached=cached,
        mixing=float(np.mean(shares)),
        lag=_lag(order, epoch),
        num_batches=run,
        exact=run == order.num_batches,
    )


def _in_runs(order: Order, epoch: int, batches: Items, globally: bool = False) -> Iterator[Items]:
    """The items of each batch, looked up some batches at a time: as many as memory is no matter."""
    runs = 1 + len(batches) * order.global_batch // _MOST_ITEMS
    for run in np.array_split(batches, min(runs, len(batches))):
        yield from order.run_of_items(epoch, run, globally)


def _num_chunks(order: Order, need: Callable[[Items], Need], items: Items) -> int:
    """The number of distinct chunks in which some items begin."""
    if order.patches_per_sample == 1:
        return len(np.unique(order.split(items)[0] // order.chunk))
    return len({next(iter(need(items[i : i + 1]).chunks)) for i in range(len(items))})


def _spread(length: int, count: int) -> Items:
    """``count`` numbers of ``range(length)``, evenly apart: (count,)."""
    whole, rest = divmod(length, count)
    i = np.arange(count, dtype=np.int64)
    return i * whole + i * rest // count


def _cached_amplification(
    order: Order,
    need: Callable[[Items], Need],
    epoch: int,
    run: int,
    cache_bytes: int,
    foreseen: int,
) -> float:
    cache: NextUseCache[Hashable, bool] = NextUseCache(cache_bytes)
    needs = (need(order.items(epoch, batch)) for batch in range(order.num_batches))
    foresight = Foresight(cache, needs, lambda need: need.chunks, foreseen)
    decoded = used = 0
    for _ in range(run):
        taken = foresight.take()
        assert taken is not None
        (chunks, useful), first = taken
        used += useful
        for use, (key, nbytes) in enumerate(chunks.items(), first):
            if cache.get(key, use) is None:
                decoded += nbytes
                cache.put(key, True, nbytes)
    return decoded / used


def _lag(order: Order, epoch: int) -> float:
    if order.num_items < 2:
        return 1.0
    pairs = order.num_items - 1
    positions = _spread(pairs, min(pairs, _MOST_ITEMS))
    here, there = order.items_at(epoch, positions), order.items_at(epoch, positions + 1)
    at_random = (order.num_items + 1) / 3  # of two distinct items
    return float(np.abs(there - here).mean() / at_random)
