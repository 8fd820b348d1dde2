"""A cache of chunks that knows which chunks will be used.

    batches to come ──▶ Foresight ──▶ announced uses ──▶ NextUseCache ──▶ evicts the chunk that is
                                                                          used furthest ahead

`NextUseCache` evicts the chunk whose next use is furthest ahead. `Foresight` announces future uses
to it, as many as a bound of memory allows. Neither depends on what a chunk is or reads files.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")
Batch = TypeVar("Batch")


@dataclass(slots=True)
class _Resident(Generic[Value]):
    value: Value
    nbytes: int
    rank: tuple[float, int]
    """The next use (negative) and the last touch. The chunk with the smallest rank goes first."""


class NextUseCache(Generic[Key, Value]):
    """Keeps the chunks that are used soonest, within a budget of bytes (Belady's rule).

    `expect` announces uses in the order in which they come; `get` removes a use. When room is
    needed, the chunk that is used furthest ahead goes first. A chunk without an announced use
    counts as furthest of all. Of two equal chunks the one touched longer ago goes. So without
    announced uses this is an LRU cache, and with all of them and chunks of one size no cache has
    fewer misses.

    Threads may share it, and their uses may overtake one another. Of threads that miss a chunk at
    once, one gets None and makes it, and the others wait for its `put`. A caller that abandons
    announced uses must call `forget`.

    >>> cache = NextUseCache(budget=2)
    >>> cache.expect("abca")
    0
    >>> for use, key in enumerate("abc"):
    ...     _ = cache.get(key, use) or cache.put(key, key.upper(), 1)
    >>> cache.get("a", 3)  # an LRU cache would have lost it
    'A'
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        # Reentrant: the garbage collector may end an iterator, which calls `forget`, at any line.
        self._changed = threading.Condition(threading.RLock())
        self._making: set[Key] = set()
        """Chunks that a thread has missed and not yet put."""
        self._uses = 0
        """The number of uses ever announced, which is the number of the next one."""
        # Lists, since most have one or two numbers: an empty deque alone takes 600 bytes.
        self._ahead: dict[Key, list[int]] = {}
        self._residents: dict[Key, _Resident[Value]] = {}
        self._heap: list[tuple[tuple[float, int], Key]] = []
        self._touches = 0

    def __contains__(self, key: object) -> bool:
        return key in self._residents

    def expect(self, keys: Iterable[Key]) -> int:
        """Announce that chunks will be used, one after another. Returns the first use's number."""
        with self._changed:
            first = self._uses
            for key in keys:
                uses = self._ahead.setdefault(key, [])
                uses.append(self._uses)
                self._uses += 1
                if len(uses) == 1 and key in self._residents:
                    self._rank(key, touch=False)
            return first

    def get(self, key: Key, use: int) -> Value | None:
        """The chunk for an announced use. None asks the caller to `put` it, or to `give_up`.

        Waits for a chunk that another thread has missed.
        """
        with self._changed:
            self._changed.wait_for(lambda: key not in self._making)
            uses = self._ahead.get(key)
            if uses and use in uses:  # batches in flight may ask out of order
                uses.remove(use)
                if not uses:
                    del self._ahead[key]
            resident = self._residents.get(key)
            if resident is None:
                self._making.add(key)
                return None
            self._rank(key, touch=True)
            return resident.value

    def put(self, key: Key, value: Value, nbytes: int) -> bool:
        """Offer a chunk. False if it is not kept, because the cached chunks are used sooner."""
        with self._changed:
            kept = self._keep(key, value, nbytes)
            self.give_up(key)
            return kept

    def give_up(self, key: Key) -> None:
        """Stop making a missed chunk. A thread that waits for it makes it instead."""
        with self._changed:
            self._making.discard(key)
            self._changed.notify_all()

    def let_go(self) -> None:
        """Wake every thread that waits for a chunk of another thread: the chunk may never come."""
        with self._changed:
            self._making.clear()
            self._changed.notify_all()

    def _keep(self, key: Key, value: Value, nbytes: int) -> bool:
        if key in self._residents:
            return True
        if nbytes > self.budget:
            return False
        self._touches += 1
        rank = self._rank_of(key, self._touches)
        victims, room = [], self.budget - self.used
        while room < nbytes:
            entry = heapq.heappop(self._heap)
            resident = self._residents.get(entry[1])
            if resident is None or resident.rank != entry[0]:
                continue  # a stale entry
            victims.append(entry)
            if entry[0] > rank:
                for kept in victims:
                    heapq.heappush(self._heap, kept)
                return False
            room += resident.nbytes
        for _, victim in victims:
            self.used -= self._residents.pop(victim).nbytes
        self._residents[key] = _Resident(value, nbytes, rank)
        self.used += nbytes
        self._push(rank, key)
        return True

    def forget(self) -> None:
        """Drop every announced use. The chunks stay in the cache."""
        with self._changed:
            self._ahead.clear()
            for key in self._residents:
                self._rank(key, touch=False)

    def _rank_of(self, key: Key, touched: int) -> tuple[float, int]:
        uses = self._ahead.get(key)
        return (-uses[0] if uses else -math.inf, touched)

    def _rank(self, key: Key, touch: bool) -> None:
        resident = self._residents[key]
        self._touches += touch
        resident.rank = self._rank_of(key, self._touches if touch else resident.rank[1])
        self._push(resident.rank, key)

    def _push(self, rank: tuple[float, int], key: Key) -> None:
        # Entries of older ranks stay in the heap. They are swept out before there are too many.
        if len(self._heap) > 2 * len(self._residents) + 64:
            self._heap = [(r.rank, k) for k, r in self._residents.items() if k != key]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (rank, key))


class Foresight(Generic[Batch, Key]):
    """Batches to come. It announces them to a cache ahead of their turn.

    `take` hands batches on, one after another, and keeps further ones in sight. Two bounds limit
    the sight. For memory, at most ``most`` uses are in sight ahead of the batches that were taken,
    and one batch to its end. For time, since the first reader waits meanwhile, sight begins with
    `_AT_FIRST` uses and grows by `_FOR_EACH` for each use that was taken.

    A bounded sight costs few reads. Cut the epoch into stretches, each as long as the sight at its
    beginning. Within a stretch the cache does the best from where it began, since all uses to the
    stretch's end are in sight. So with a cache of C chunks a stretch reads at most C more than in
    the best course of the epoch, and none more in the first stretch, where both begin empty. The
    best course reads at least L - C in a stretch of L different chunks. Together that is at most
    L / (L - C) times the reads of the best, with the smallest L of all stretches but the last.
    """

    _AT_FIRST = 1024
    """The uses that may be in sight before any was taken."""
    _FOR_EACH = 4
    """The uses by which sight grows with each use that is taken."""

    def __init__(
        self,
        cache: NextUseCache[Key, Any],
        batches: Iterator[Batch],
        keys: Callable[[Batch], Iterable[Key]],
        most: int,
    ) -> None:
        self._cache, self._batches, self._keys, self._most = cache, batches, keys, most
        self._seen: deque[tuple[Batch, int, int]] = deque()
        """Batches that were announced and not taken: batch, first use, number of uses."""
        self._ahead = 0
        """The number of uses of these batches."""
        self._taken = 0
        """The number of uses of the batches that were taken."""

    def take(self) -> tuple[Batch, int] | None:
        """The next batch and the number of its first use. None after the last."""
        enough = min(self._most, self._AT_FIRST + self._FOR_EACH * self._taken)
        # The batch that is handed on is not ahead any more, so one is always announced.
        while not self._seen or self._ahead - self._seen[0][2] < enough:
            batch = next(self._batches, None)
            if batch is None:
                break
            keys = list(self._keys(batch))
            self._seen.append((batch, self._cache.expect(keys), len(keys)))
            self._ahead += len(keys)
        if not self._seen:
            return None
        batch, first, count = self._seen.popleft()
        self._ahead -= count
        self._taken += count
        return batch, first

    def close(self) -> None:
        """Drop all batches to come, with the uses that were announced."""
        self._batches = iter(())
        self._seen.clear()
        self._cache.forget()
