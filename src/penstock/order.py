"""Which samples, in which order: an epoch as a function, never as a list.

    position   0 1 2 3 │ 4 5 6 7 │ 8 9 …      in the epoch; cut into global batches
    item       7 2 9 0 │ 5 …                  a keyed permutation of the positions
    rank       0 1 0 1 │ 0 1 …                rank r takes rows r, r + world_size, … of each batch

An *item* is one patch of one sample: ``item = sample * patches_per_sample + patch``. The item at a
position follows from (seed, epoch, position) alone, by arithmetic: so any batch can be asked for
first, a plan of 100 million samples takes no more memory than one of ten, and the order knows
nothing of workers, ranks or batch sizes. That is why a job may resume with other ones, at any item.

`price` says what an order costs in reads and what it buys in mixing. Nothing here touches an array
of data or a file; which chunks an item needs is told by `penstock.batches`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import UsageError
from .nextuse import Foresight, NextUseCache

Shuffle = Literal["none", "sample", "block", "global"]
Items = NDArray[np.int64]
_Words = NDArray[np.uint64]

# --- a keyed permutation ------------------------------------------------------------------------

_ROUNDS = 12  # fewer leave orders of five or six items visibly uneven
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1


def _mix(words: _Words) -> _Words:
    """The finaliser of splitmix64: every bit of a word sways every bit of the result."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def make_key(*numbers: int) -> _Words:
    """A key of shape (1,) that depends on every number and on their order."""
    key = np.zeros(1, np.uint64)
    for number in numbers:
        key = _mix((key + _GOLDEN) ^ np.uint64(operator.index(number) & _WORD))
    return key


def permute(index: ArrayLike, n: ArrayLike, key: _Words) -> Items:
    """Where the permutation of ``[0, n)`` that a key names sends each index.

    A Feistel network over pairs ``(high, low)`` with ``index = high * low's radix + low``: each
    round adds to one half a hash of the other, which can be undone whatever the hash. Both
    radices are near the root of n, so few pairs lie past n; one that does is sent on until it
    falls inside (cycle walking), which keeps the map one to one. ``n`` and ``key`` broadcast.

    >>> sorted(permute(range(5), 5, make_key(7)).tolist())
    [0, 1, 2, 3, 4]
    """
    return _walk(index, n, key, forward=True)


def invert(value: ArrayLike, n: ArrayLike, key: _Words) -> Items:
    """The index that `permute` sends to each value.

    >>> invert(permute([3], 5, make_key(7)), 5, make_key(7)).tolist()
    [3]
    """
    return _walk(value, n, key, forward=False)


def _walk(start: ArrayLike, n: ArrayLike, key: _Words, forward: bool) -> Items:
    at = np.array(start, np.uint64, ndmin=1)
    n = np.broadcast_to(np.asarray(n, np.uint64), at.shape)
    key = np.broadcast_to(key, at.shape)
    at = _rounds(at, n, key, forward)
    while (outside := at >= n).any():
        at[outside] = _rounds(at[outside], n[outside], key[outside], forward)
    return at.astype(np.int64)


def _rounds(at: _Words, n: _Words, key: _Words, forward: bool) -> _Words:
    # Any radices whose product reaches n would do; a square wastes least and mixes best.
    radix_high = np.ceil(np.sqrt(n.astype(np.float64))).astype(np.uint64)
    radix_low = (n + radix_high - np.uint64(1)) // radix_high
    numbers = np.arange(1, _ROUNDS + 1, dtype=np.uint64)[:, None]
    keys = _mix(key + numbers * _GOLDEN)
    high, low = at // radix_low, at % radix_low
    for i in range(_ROUNDS) if forward else reversed(range(_ROUNDS)):
        if i % 2 == 0:
            step = _mix(low ^ keys[i]) % radix_high
            high = (high + (step if forward else radix_high - step)) % radix_high
        else:
            step = _mix(high ^ keys[i]) % radix_low
            low = (low + (step if forward else radix_low - step)) % radix_low
    result: _Words = high * radix_low + low
    return result


# --- the order of an epoch ----------------------------------------------------------------------


class Position(NamedTuple):
    """A place in a run: so many batches of this epoch are done."""

    epoch: int
    batch: int


@dataclass(frozen=True, slots=True)
class Order:
    """The items of every batch of every epoch, for one rank of ``world_size``.

    Every rank has equally many batches of equal length. The items that do not fill a last global
    batch are dropped with ``drop_last`` (other ones each epoch, unless the shuffle is "none");
    else the last batch is shorter: what is left, filled up to a multiple of ``world_size`` with
    the epoch's first items again. One rank alone therefore sees every item exactly once.

    >>> Order(num_samples=5, batch_size=2).items(epoch=0, batch=2).tolist()
    [4]
    """

    num_samples: int
    batch_size: int
    """Items in a batch of one rank."""
    seed: int = 0
    shuffle: Shuffle = "none"
    """none: in order. sample: samples permuted, the patches of a sample together and in order.
    block: windows of neighbouring chunks permuted, and the items within each. global: all items."""
    window: int = 1
    """Chunks in a window of the block shuffle."""
    chunk: int = 1
    """Samples in a chunk."""
    patches_per_sample: int = 1
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    skip: int = 0
    """Items at the beginning of the epoch that are in no batch, so that the rest of an epoch can be
    cut into other batches than it began with: see `resume`."""

    def __post_init__(self) -> None:
        for name in "num_samples batch_size window chunk patches_per_sample world_size".split():
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)} must be at least 1")
        if self.shuffle not in get_args(Shuffle):
            raise UsageError(
                f"shuffle {self.shuffle!r} is not one of {', '.join(get_args(Shuffle))}"
            )
        if not 0 <= self.rank < self.world_size:
            raise UsageError(f"rank {self.rank} is not one of the {self.world_size} ranks from 0")
        if self.num_batches == 0:
            raise UsageError(
                f"an epoch of {self.num_items} items does not fill one global batch of "
                f"{self.global_batch} ({self.batch_size} x {self.world_size} ranks); "
                "lower batch_size, or keep the last batch with drop_last=False"
            )

    @property
    def num_items(self) -> int:
        return self.num_samples * self.patches_per_sample

    @property
    def global_batch(self) -> int:
        """Items in a batch of all ranks together."""
        return self.batch_size * self.world_size

    @property
    def num_batches(self) -> int:
        """Batches in an epoch, the same on every rank."""
        cut = self.num_items - self.skip
        return cut // self.global_batch if self.drop_last else -(-cut // self.global_batch)

    @property
    def num_positions(self) -> int:
        """Where an epoch's last batch ends: the items handed out by all ranks, those seen twice
        counted twice, and what is skipped."""
        if self.drop_last:
            return self.skip + self.num_batches * self.global_batch
        cut = self.num_items - self.skip
        return self.skip + -(-cut // self.world_size) * self.world_size

    def items(self, epoch: int, batch: int) -> Items:
        """This rank's items of a batch, shape (batch_size,), or less for a short last batch."""
        return self._items_of(epoch, batch, self.rank, self.world_size)

    def run_of_items(self, epoch: int, batches: range) -> list[Items]:
        """`items` of consecutive batches, for less than each by itself: numpy is asked but once."""
        positions = [self._positions(batch, self.rank, self.world_size) for batch in batches]
        ends = np.cumsum([len(own) for own in positions])[:-1]
        return np.split(self.items_at(epoch, np.concatenate(positions)), ends)

    def global_items(self, epoch: int, batch: int) -> Items:
        """The items of all ranks; those of rank r are rows r, r + world_size, ..."""
        return self._items_of(epoch, batch, 0, 1)

    def _items_of(self, epoch: int, batch: int, first: int, step: int) -> Items:
        return self.items_at(epoch, self._positions(batch, first, step))

    def _positions(self, batch: int, first: int, step: int) -> Items:
        if not 0 <= batch < self.num_batches:
            raise IndexError(f"batch {batch} is not one of the {self.num_batches} of an epoch")
        start = self.skip + batch * self.global_batch
        stop = min(start + self.global_batch, self.num_positions)
        return np.arange(start + first, stop, step, dtype=np.int64)

    def items_at(self, epoch: int, positions: Items) -> Items:
        """The items at some positions of an epoch; past its end it begins again."""
        positions = positions % self.num_items
        key = make_key(self.seed, epoch)
        if self.shuffle == "none":
            return positions
        if self.shuffle == "global":
            return permute(positions, self.num_items, key)
        if self.shuffle == "sample":
            sample, patch = np.divmod(positions, self.patches_per_sample)
            return permute(sample, self.num_samples, key) * self.patches_per_sample + patch
        return self._in_windows(positions, key)

    @property
    def window_items(self) -> int:
        """Items in a full window of the block shuffle."""
        return self.window * self.chunk * self.patches_per_sample

    def _in_windows(self, positions: Items, key: _Words) -> Items:
        size = self.window_items
        last = (self.num_items - 1) // size  # the last window may be short
        short = self.num_items - last * size
        visited = int(invert([last], last + 1, key)[0])  # when it is its turn
        missing = np.where(positions >= visited * size + short, size - short, 0)
        turn, inside = np.divmod(positions + missing, size)  # as if every window were full
        window = permute(turn, last + 1, key)
        inner = _mix(key ^ (_mix(window.astype(np.uint64) + _GOLDEN)))
        return window * size + permute(inside, np.where(window == last, short, size), inner)

    def split(self, items: Items) -> tuple[Items, Items]:
        """The sample and the patch of each item."""
        sample, patch = np.divmod(items, self.patches_per_sample)
        return sample, patch

    # --- state -----------------------------------------------------------------------------------

    @property
    def plan(self) -> dict[str, Any]:
        """What defines the sequence of items, whatever the ranks and batch sizes; JSON values."""
        plan: dict[str, Any] = {
            "algorithm": 1,
            "num_samples": self.num_samples,
            "patches_per_sample": self.patches_per_sample,
            "shuffle": self.shuffle,
        }
        if self.shuffle == "block":
            plan["window"], plan["chunk"] = self.window, self.chunk
        return plan

    def state_dict(self, epoch: int, batch: int) -> dict[str, Any]:
        """The state after ``batch`` batches of an epoch; its size does not depend on anything."""
        done = min(self.skip + batch * self.global_batch, self.num_items)
        epoch = operator.index(epoch)  # of numpy too, and JSON takes it
        return {"seed": self.seed, "epoch": epoch, "items_done": done, "plan": self.plan}

    def resume(self, state: Mapping[str, Any]) -> tuple[Order, Position]:
        """The order of the rest of a state's epoch, and where in it to go on.

        The state may have been saved with other ranks or batch sizes, after any item. The items
        that remain are those that remained then, in the same global sequence: they are cut into
        batches of this order from where the state stands. So the first of them need not begin where
        a batch of a whole epoch does, and `skip` of the order that is returned says by how much;
        the next epoch is this order's own again. A state of another plan or seed is refused.
        """
        missing = [key for key in ("seed", "epoch", "items_done", "plan") if key not in state]
        if missing:
            raise UsageError(f"the loader state lacks {', '.join(missing)}")
        if not isinstance(state["plan"], Mapping):
            raise UsageError(f"the loader state's plan {state['plan']!r} is not a mapping")
        saved, own = {"seed": state["seed"], **state["plan"]}, {"seed": self.seed, **self.plan}
        for name in own | saved:
            if own.get(name) != saved.get(name):
                raise UsageError(
                    f"the loader state was saved with {name} {saved.get(name)!r} and cannot be "
                    f"resumed with {name} {own.get(name)!r}"
                )
        epoch, done = state["epoch"], state["items_done"]
        for name, number, most in (("epoch", epoch, None), ("items_done", done, self.num_items)):
            whole = isinstance(number, int) and not isinstance(number, bool) and number >= 0
            if not whole or (most is not None and number > most):
                raise UsageError(
                    f"the loader state's {name} {number!r} is not a whole number from 0"
                    + (f" to {most}" if most is not None else "")
                )
        left = self.num_items - done
        if left < (self.global_batch if self.drop_last else 1):
            return replace(self, skip=0), Position(epoch + 1, 0)
        batch, skip = divmod(done, self.global_batch)
        return replace(self, skip=skip), Position(epoch, batch)

    def from_state(self, state: Mapping[str, Any]) -> Position:
        """Where this order goes on from a state, for those who keep to its batches.

        As `resume`, but a state is refused that stands inside a batch of this order.
        """
        order, position = self.resume(state)
        if order.skip:
            done = state["items_done"]
            raise UsageError(
                f"the loader state stands after {done} items, inside a global batch of "
                f"{self.global_batch} ({self.batch_size} x {self.world_size} ranks); "
                f"choose a batch_size for which {done} is a whole number of global batches"
            )
        return position


@dataclass(frozen=True)
class Endless(Order):
    """Whole batches of one rank, epoch after epoch without a break: for benchmarks whose loaders
    should neither run dry for want of samples nor begin anew."""

    reshuffled: bool = False
    """Each epoch in an order of its own; else the first one's comes again."""

    @property
    def num_batches(self) -> int:
        return 2**48

    def items(self, epoch: int, batch: int) -> Items:
        turn, place = divmod(batch, self.num_items // self.batch_size)
        first = place * self.batch_size
        return self.items_at(
            epoch + turn * self.reshuffled, np.arange(first, first + self.batch_size)
        )

    def run_of_items(self, epoch: int, batches: range) -> list[Items]:
        return [self.items(epoch, batch) for batch in batches]


# --- what an order costs and what it buys -------------------------------------------------------


class Need(NamedTuple):
    """What some items need."""

    chunks: Mapping[Hashable, int]
    """Bytes of each chunk when decoded, padding and all."""
    used: int
    """Bytes that the items have of their own."""


@dataclass(frozen=True, slots=True)
class Price:
    """What an order costs in reads, and how well it mixes."""

    read_amplification: float
    """Bytes decoded / bytes used, when each batch reads each of its chunks once."""
    read_amplification_cached: float
    """The same with the cache. It starts empty, so over a part of an epoch this is too high, rather
    than too low."""
    mixing: float
    """Distinct chunks that the items of a global batch begin in / items in it: 1 when every item is
    of another chunk."""
    lag: float
    """Mean distance between consecutive items, relative to that of a random order (1)."""
    num_batches: int
    """Batches that were looked at."""
    exact: bool
    """Whether they were all of the epoch's."""

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
"""Items that `price` looks at rather than sample fewer."""
_MOST_PATCHES = 8192
"""Patches of which `price` asks for the chunk that each begins in."""


def price(
    order: Order,
    need: Callable[[Items], Need] | None = None,
    *,
    epoch: int = 0,
    num_batches: int = 256,
    cache_bytes: int = 0,
    foreseen: int = 0,
) -> Price:
    """The price of an order for one rank, from at most ``num_batches`` batches of an epoch.

    ``need`` says which chunks some items need (`penstock.batches.need_of`); without it whole
    chunks of ``order.chunk`` samples are counted, an item as one byte. The cache sees at most
    ``foreseen`` uses of chunks ahead of a batch, see `Foresight`. A block order is followed through
    whole windows, since a chunk that is half used would count in full.
    """
    need = need or _whole_chunks(order)
    run = min(num_batches, order.num_batches)
    if order.shuffle == "block" and order.window_items <= _MOST_ITEMS:
        windows = -(-run * order.global_batch // order.window_items)
        run = min(-(-windows * order.window_items // order.global_batch), order.num_batches)

    decoded = used = 0
    for batch in _spread(order.num_batches, run):
        chunks, own = need(order.items(epoch, batch))
        decoded, used = decoded + sum(chunks.values()), used + own
    plain = decoded / used
    cached = plain
    if cache_bytes:
        cached = _cached_amplification(order, need, epoch, run, cache_bytes, foreseen)

    # Of patches each is looked at by itself, so that many to a batch are so many batches fewer.
    looked = run if order.patches_per_sample == 1 else -(-_MOST_PATCHES // order.global_batch)
    shares = []
    for batch in _spread(order.num_batches, min(run, looked)):
        items = order.global_items(epoch, batch)
        shares.append(_num_chunks(order, need, items) / len(items))
    return Price(
        read_amplification=plain,
        read_amplification_cached=cached,
        mixing=float(np.mean(shares)),
        lag=_lag(order, epoch),
        num_batches=run,
        exact=run == order.num_batches,
    )


def _num_chunks(order: Order, need: Callable[[Items], Need], items: Items) -> int:
    """Distinct chunks that some items begin in."""
    if order.patches_per_sample == 1:
        return len(np.unique(order.split(items)[0] // order.chunk))
    return len({next(iter(need(items[i : i + 1]).chunks)) for i in range(len(items))})


def _whole_chunks(order: Order) -> Callable[[Items], Need]:
    def need(items: Items) -> Need:
        chunks = np.unique(order.split(items)[0] // order.chunk).tolist()
        return Need(dict.fromkeys(chunks, order.chunk * order.patches_per_sample), len(items))

    return need


def _spread(length: int, count: int) -> list[int]:
    """``count`` numbers of ``range(length)``, evenly apart."""
    return [i * length // count for i in range(count)]


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
        (chunks, own), first = taken
        used += own
        for use, (key, nbytes) in enumerate(chunks.items(), first):
            if cache.get(key, use) is None:
                decoded += nbytes
                cache.put(key, True, nbytes)
    return decoded / used


def _lag(order: Order, epoch: int) -> float:
    if order.num_items < 2:
        return 1.0
    pairs = order.num_items - 1
    positions = np.array(_spread(pairs, min(pairs, _MOST_ITEMS)), np.int64)
    here, there = order.items_at(epoch, positions), order.items_at(epoch, positions + 1)
    at_random = (order.num_items + 1) / 3  # of two distinct items
    return float(np.abs(there - here).mean() / at_random)
