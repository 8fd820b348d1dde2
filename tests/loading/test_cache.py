"""The cache that knows what will be used, against every choice there is, Belady's rule and LRU."""

from __future__ import annotations

import doctest
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock.loading.cache
from penstock.loading.cache import Foresight, NextUseCache

from .kit import hits_of_lru, reads_of_belady


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(penstock.loading.cache).failed == 0


def hits_of_next_use(uses: Sequence[int], capacity: int) -> int:
    cached: NextUseCache[int, int] = NextUseCache(capacity)
    hits = 0
    for use, key in enumerate(uses):
        assert cached.expect([key]) == use
        if cached.get(key, use) is None:
            cached.put(key, key + 1, 1)
        else:
            hits += 1
        assert cached.used == len(cached._residents) <= capacity
    return hits


def most_hits(uses: Sequence[int], capacity: int) -> int:
    """The best that any cache can do, by trying every choice."""

    @cache
    def best(step: int, held: frozenset[int]) -> int:
        if step == len(uses):
            return 0
        key = uses[step]
        if key in held:
            return 1 + best(step + 1, held)
        options = [held]  # not kept
        if len(held) < capacity:
            options.append(held | {key})
        options += [held - {victim} | {key} for victim in held]
        return max(best(step + 1, option) for option in options)

    return best(0, frozenset())


@given(uses=st.lists(st.integers(0, 9), max_size=80), capacity=st.integers(1, 6))
def test_a_cache_that_looks_not_ahead_is_lru(uses: list[int], capacity: int) -> None:
    assert hits_of_next_use(uses, capacity) == hits_of_lru(uses, capacity)


@given(
    steps=st.lists(st.dictionaries(st.integers(0, 9), st.none(), max_size=4), max_size=30),
    sizes=st.lists(st.integers(1, 5), min_size=10, max_size=10),
    budget=st.integers(0, 12),
    swaps=st.randoms(use_true_random=False),
)
def test_bytes_stay_within_the_budget_and_values_true_whatever_the_order_of_requests(
    steps: list[dict[int, None]], sizes: list[int], budget: int, swaps: random.Random
) -> None:
    cached: NextUseCache[int, str] = NextUseCache(budget)
    requests = []
    for step, keys in enumerate(steps):
        first = cached.expect(keys)
        requests += [(step + swaps.uniform(0, 3), use, key) for use, key in enumerate(keys, first)]
    for _, use, key in sorted(requests):
        value = cached.get(key, use)
        assert value in (None, f"chunk {key}")
        if value is None:
            cached.put(key, f"chunk {key}", sizes[key])
        assert cached.used == sum(sizes[k] for k in range(10) if k in cached) <= budget
    assert not cached._ahead  # nothing is left behind


def test_a_chunk_used_later_than_all_it_would_drive_out_is_not_kept() -> None:
    cached: NextUseCache[str, int] = NextUseCache(4)
    cached.expect("abcabc")
    offers = [("a", 2, True), ("b", 2, True), ("c", 3, False), ("d", 5, False)]
    for use, (key, size, kept) in enumerate(offers):
        cached.get(key, use)
        assert cached.put(key, 0, size) is kept
    assert "a" in cached and "b" in cached and cached.used == 4


def test_a_long_life_does_not_fill_the_cache_with_notes() -> None:
    cached: NextUseCache[int, int] = NextUseCache(10)
    for use in range(5000):
        cached.expect([use % 7])
        if cached.get(use % 7, use) is None:
            cached.put(use % 7, 0, 1)
    assert len(cached._heap) < 200 and not cached._ahead


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (lambda cached: cached.put("a", 1, 1), 1),
        (lambda cached: cached.give_up("a"), None),
        (lambda cached: cached.let_go(), None),
    ],
    ids=["put", "given-up", "let-go"],
)
def test_who_misses_what_another_is_making_waits_for_it(
    end: Callable[[NextUseCache[str, int]], Any], expected: int | None
) -> None:
    cached: NextUseCache[str, int] = NextUseCache(1)
    cached.expect("aab")
    assert cached.get("a", 0) is None
    waits, wait_for, got = threading.Event(), cached._changed.wait_for, list[int | None]()

    def waiting(ready: Callable[[], bool]) -> bool:
        waits.set()
        return wait_for(ready)

    cached._changed.wait_for = waiting  # type: ignore[method-assign, assignment]
    other = threading.Thread(target=lambda: got.append(cached.get("a", 1)), daemon=True)
    other.start()
    assert waits.wait(60)
    assert not got and cached.get("b", 2) is None, "nobody is making that"
    end(cached)
    other.join(60)
    assert got == [expected]
    assert ("a" in cached._making) is (expected is None), "it makes it itself then"


@given(uses=st.lists(st.integers(0, 5), max_size=14), capacity=st.integers(0, 4))
def test_the_oracle_is_the_best_there_is(uses: list[int], capacity: int) -> None:
    assert reads_of_belady(uses, capacity) == len(uses) - most_hits(uses, capacity)


class Sight(Foresight[Any, Any]):
    """Of batches that are lists of chunks; counts what is in sight."""

    most_ahead = 0

    def take(self) -> tuple[Any, int] | None:
        taken = super().take()
        self.most_ahead = max(self.most_ahead, self._ahead)
        return taken

    def reads(self, cached: NextUseCache[Any, bool]) -> Iterator[int]:
        """How many chunks each batch reads."""
        while (taken := self.take()) is not None:
            batch, first = taken
            reads = 0
            for use, key in enumerate(batch, first):
                if cached.get(key, use) is None:
                    reads += 1
                    cached.put(key, True, 1)
                assert len(cached._residents) <= cached.budget
            yield reads
        assert not cached._ahead and not self._ahead and not cached._making


def sight(batches: Sequence[Sequence[Any]], capacity: int, most: int) -> Sight:
    cached: NextUseCache[Any, bool] = NextUseCache(capacity)
    return Sight(cached, iter(batches), lambda batch: batch, most)


def total(sight: Sight) -> int:
    return sum(sight.reads(sight._cache))


BATCHES = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=6), max_size=40)


@given(batches=BATCHES, capacity=st.integers(0, 13))
def test_where_nothing_bounds_it_no_cache_reads_less(
    batches: list[list[int]], capacity: int
) -> None:
    uses = [key for batch in batches for key in batch]
    assert total(sight(batches, capacity, 10**6)) == reads_of_belady(uses, capacity)


@given(
    batches=BATCHES,
    capacity=st.integers(1, 8),
    most=st.integers(0, 60),
    at_first=st.integers(0, 30),
    for_each=st.integers(0, 2),
)
def test_whatever_bounds_it_lru_is_never_better(
    batches: list[list[int]], capacity: int, most: int, at_first: int, for_each: int
) -> None:
    uses = [key for batch in batches for key in batch]
    looks = sight(batches, capacity, most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Foresight, "_AT_FIRST", at_first)
        patch.setattr(Foresight, "_FOR_EACH", for_each)
        reads = total(looks)
    assert reads_of_belady(uses, capacity) <= reads <= len(uses) - hits_of_lru(uses, capacity)
    assert looks.most_ahead <= max(0, most + 5), "and one batch to its end"


@given(
    uses=st.lists(st.integers(0, 40), min_size=40, max_size=300),
    capacity=st.integers(1, 12),
    most=st.integers(8, 80),
)
def test_too_little_sight_costs_no_more_than_is_said(
    uses: list[int], capacity: int, most: int
) -> None:
    reads = total(sight([[use] for use in uses], capacity, most))
    stretches = [uses[at : at + most] for at in range(0, len(uses), most)]
    distinct = min((len(set(stretch)) for stretch in stretches[:-1]), default=10**6)
    if distinct > capacity:
        assert reads * (distinct - capacity) <= distinct * reads_of_belady(uses, capacity)


def test_sight_is_bounded_and_grows_with_what_was_taken() -> None:
    looks = sight([[n] for n in range(12_000)], 10, 6_000)
    ahead = [looks._ahead for _ in looks.reads(looks._cache)]
    assert ahead[0] == 1024, "some is seen at once"
    assert 4900 < ahead[1000] < 5100 and max(ahead) <= 6_000
    assert ahead[5_000] > 5_990 and ahead[-1] == 0
