"""The order of samples in an epoch, as a function and never as a list.

    position   0 1 2 3 │ 4 5 6 7 │ 8 9 …      in the epoch; cut into global batches
    item       7 2 9 0 │ 5 …                  a keyed permutation of the positions
    rank       0 1 0 1 │ 0 1 …                rank r takes rows r, r + world_size, … of each batch

An *item* is one patch of one sample: ``item = sample * patches_per_sample + patch``. The item at a
position follows from (seed, epoch, position) alone, by arithmetic. So batches can be computed in
any order, and a plan of 100 million samples takes no more memory than one of ten. The sequence does
not depend on workers, ranks or batch sizes: a job may resume with others, at any item.

Nothing here touches an array or a file; `fields` says which chunks an item reads.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base import UsageError, plural
from .permutation import Items, make_key, permute, permute_windows

_AT_ONCE = 1024
"""Items that `batches_from` looks up at once."""
Shuffle = Literal["none", "sample", "block", "global"]
Uneven = Literal["repeat", "short"]


class Position(NamedTuple):
    """A place in a run: an epoch, and how many of its batches are done."""

    epoch: int
    batch: int


@dataclass(frozen=True, slots=True)
class Order:
    """The items of every batch of every epoch, for one rank of ``world_size``.

    Every rank has equally many batches of equal length, which ranks that sum gradients need. With
    ``drop_last``, items that do not fill a last global batch are dropped; with a shuffle each epoch
    drops different ones. Without it the last batch is shorter, filled up to a multiple of
    ``world_size`` with the epoch's first items, which `mask` tells from the others. So a single
    rank sees every item exactly once. With ``uneven="short"`` several ranks do too: the last batch
    of some has an item less, or is none.

    >>> Order(num_samples=5, batch_size=2).items(epoch=0, batch=2).tolist()
    [4]
    >>> last = Order(num_samples=3, batch_size=1, rank=1, world_size=2)
    >>> last.items(epoch=0, batch=1).tolist(), last.mask(batch=1).tolist()
    ([0], [False])
    """

    num_samples: int
    batch_size: int
    """The items in a batch of one rank."""
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
    uneven: Uneven = "repeat"
    """repeat: the last batch of each rank has as many items, some twice. short: each item once."""
    skip: int = 0
    """Items at the beginning of the epoch that are in no batch. So the rest of an epoch can be cut
    into other batches than its beginning: see `resume`."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise UsageError(
                f"rank {self.rank} is not one of the {plural(self.world_size, 'rank')} from 0"
            )
        if self.drop_last and self.num_batches == 0:
            raise UsageError(
                f"an epoch of {self.num_items} items does not fill one global batch of "
                f"{self.global_batch} ({self.batch_size} x {plural(self.world_size, 'rank')}); "
                "lower batch_size, or keep the last batch with drop_last=False"
            )

    @property
    def num_items(self) -> int:
        """Items in an epoch, of all ranks together."""
        return self.num_samples * self.patches_per_sample

    @property
    def global_batch(self) -> int:
        """Items in a batch of all ranks together."""
        return self.batch_size * self.world_size

    @property
    def num_batches(self) -> int:
        """Batches in an epoch, the same on every rank unless ``uneven="short"`` takes the last."""
        cut = self.num_items - self.skip
        if self.drop_last:
            return cut // self.global_batch
        short = self.rank if self.uneven == "short" else 0
        return max(0, -(-(cut - short) // self.global_batch))

    @property
    def num_positions(self) -> int:
        """The position after the epoch's last batch: skipped and repeated items count."""
        if self.drop_last:
            return self.skip + self.num_batches * self.global_batch
        if self.uneven == "short":
            return self.num_items
        cut = self.num_items - self.skip
        return self.skip + -(-cut // self.world_size) * self.world_size

    @property
    def num_repeated(self) -> int:
        """The items of an epoch that a rank gets and another one has had, of all ranks together."""
        return max(0, self.num_positions - self.num_items)

    def mask(self, batch: int) -> NDArray[np.bool_]:
        """True for each of the `items` of a batch, False for those that only fill it up."""
        return self._positions(batch) < self.num_items

    def items(self, epoch: int, batch: int) -> Items:
        """This rank's items of a batch.

        Args:
            epoch: The epoch, from 0.
            batch: The batch of the epoch, from 0. `IndexError` past the last.

        Returns:
            The items: (batch_size,), or fewer in a short last batch.
        """
        (items,) = self.run_of_items(epoch, [batch])
        return items

    def run_of_items(self, epoch: int, batches: Iterable[int]) -> list[Items]:
        """The `items` of each of some batches, quicker than one by one."""
        positions = [self._positions(batch) for batch in batches]
        ends = np.cumsum([len(part) for part in positions])[:-1]
        return np.split(self.items_at(epoch, np.concatenate(positions)), ends)

    def _positions(self, batch: int) -> Items:
        """This rank's positions of a batch: rank r has r, r + world_size, ..."""
        if not 0 <= batch < self.num_batches:
            raise IndexError(f"batch {batch} is not one of the {self.num_batches} of an epoch")
        start = self.skip + batch * self.global_batch
        stop = min(start + self.global_batch, self.num_positions)
        return np.arange(start + self.rank, stop, self.world_size, dtype=np.int64)

    def items_at(self, epoch: int, positions: Items) -> Items:
        """The items at some positions of an epoch.

        Args:
            epoch: The epoch, from 0.
            positions: Places in the epoch: (positions,). Past its end the epoch begins again.

        Returns:
            The item at each position: (positions,).
        """
        positions = positions % self.num_items
        key = make_key(self.seed, epoch)
        if self.shuffle == "none":
            return positions
        if self.shuffle == "global":
            return permute(positions, self.num_items, key)
        if self.shuffle == "sample":
            sample, patch = np.divmod(positions, self.patches_per_sample)
            return permute(sample, self.num_samples, key) * self.patches_per_sample + patch
        of_window = self.window * self.chunk * self.patches_per_sample
        return permute_windows(positions, self.num_items, of_window, key)

    def split(self, items: Items) -> tuple[Items, Items]:
        """The sample and the patch of each item."""
        sample, patch = np.divmod(items, self.patches_per_sample)
        return sample, patch

    # --- state -----------------------------------------------------------------------------------

    @property
    def plan(self) -> dict[str, Any]:
        """The settings that define the sequence of items, for JSON: no ranks and batch sizes."""
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
        """The state after some batches of an epoch, a few numbers for JSON.

        Args:
            epoch: The epoch, from 0.
            batch: The batches of the epoch that are done.

        Returns:
            The seed, the epoch, the items that are done, and `plan`.
        """
        done = min(self.skip + batch * self.global_batch, self.num_items)
        epoch = operator.index(epoch)  # JSON takes no numbers of numpy
        return {"seed": self.seed, "epoch": epoch, "items_done": done, "plan": self.plan}

    def resume(self, state: Mapping[str, Any]) -> tuple[Order, Position]:
        """The order of the rest of a state's epoch, and where in it to go on.

        The state may come from other ranks or batch sizes, after any item. The items that remain
        keep their global sequence, and are cut into batches of this order from there.

        Args:
            state: The result of `state_dict`.

        Returns:
            The order, and the next batch. The batches of the order begin ``skip`` items later than
            those of a whole epoch.

        Raises:
            UsageError: The state is damaged, or of another plan or seed.
        """
        _check_state(state, {"seed": self.seed, **self.plan}, self.num_items)
        epoch, done = state["epoch"], state["items_done"]
        left = self.num_items - done
        if left < (self.global_batch if self.drop_last else 1):
            return replace(self, skip=0), Position(epoch + 1, 0)
        batch, skip = divmod(done, self.global_batch)
        return replace(self, skip=skip), Position(epoch, batch)


def _check_state(state: Mapping[str, Any], plan: Mapping[str, Any], num_items: int) -> None:
    """Refuse a state that is damaged, or of another plan or seed."""
    given = state if isinstance(state, Mapping) else {}
    missing = [key for key in ("seed", "epoch", "items_done", "plan") if key not in given]
    if missing:
        raise UsageError(f"the loader state lacks {', '.join(missing)}")
    if not isinstance(state["plan"], Mapping):
        raise UsageError(f"the loader state's plan {state['plan']!r} is not a mapping")
    saved = {"seed": state["seed"], **state["plan"]}
    for name in {**plan, **saved}:
        if plan.get(name) != saved.get(name):
            raise UsageError(
                f"the loader state was saved with {name} {saved.get(name)!r} and cannot be "
                f"resumed with {name} {plan.get(name)!r}"
            )
    for name, most in (("epoch", None), ("items_done", num_items)):
        number = state[name]
        whole = isinstance(number, int) and not isinstance(number, bool) and number >= 0
        if not whole or (most is not None and number > most):
            raise UsageError(
                f"the loader state's {name} {number!r} is not a whole number from 0"
                + (f" to {most}" if most is not None else "")
            )


@dataclass(frozen=True)
class Endless(Order):
    """Whole batches of one rank, epoch after epoch without a break.

    For benchmarks, whose loaders should neither run out of samples nor begin anew.
    """

    reshuffled: bool = False
    """True where each epoch has an order of its own, False where the first order is repeated."""

    @property
    def num_batches(self) -> int:
        """More batches than any benchmark takes."""
        return 2**48

    def mask(self, batch: int) -> NDArray[np.bool_]:
        """True for each of the `items` of a batch."""
        return np.ones(self.batch_size, bool)

    def run_of_items(self, epoch: int, batches: Iterable[int]) -> list[Items]:
        """The `items` of each of some batches, quicker than one by one.

        Args:
            epoch: The first epoch, from 0.
            batches: The batches, counted from the first epoch's begin.

        Returns:
            The items of each batch.
        """
        turn_length, items = self.num_items // self.batch_size, list[Items]()
        alike = groupby(batches, lambda batch: batch // turn_length * self.reshuffled)
        for later, numbers in alike:  # all that share an order
            places = np.array([number % turn_length for number in numbers]) * self.batch_size
            positions = places[:, None] + np.arange(self.batch_size)
            whole = self.items_at(epoch + later, positions.ravel())
            items.extend(whole.reshape(positions.shape))
        return items


def batches_from(order: Order, at: Position) -> Iterator[tuple[int, Items]]:
    """The batches of the rest of an epoch. The items of several are looked up at once, which takes
    little longer than for one.

    Args:
        order: The order of the items.
        at: The epoch, and the first batch.

    Yields:
        The number of each batch, and its `Order.items`.
    """
    some = max(1, _AT_ONCE // order.batch_size)
    for first in range(at.batch, order.num_batches, some):
        numbers = range(first, min(first + some, order.num_batches))
        yield from zip(numbers, order.run_of_items(at.epoch, numbers), strict=True)
