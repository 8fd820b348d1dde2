"""The plan of an epoch: permutations, orders, shares of ranks, resume."""

import doctest
import json
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock.loading.order
from penstock.base.errors import UsageError
from penstock.loading.order import Order, Position, Shuffle
from penstock.loading.permutation import Items, Words, invert, make_key, permute

from ..parameters import mainly
from ..traced import traced

SHUFFLES: tuple[Shuffle, ...] = ("none", "sample", "block", "global")


def test_the_examples_in_the_docstrings_hold() -> None:
    assert doctest.testmod(penstock.loading.order).failed == 0


@pytest.mark.parametrize(
    "sizes", [range(1, 70), (127, 128, 129), (255, 256, 257), (4095, 4096), (99_991,)], ids=str
)
def test_a_permutation_is_one_to_one_and_its_inverse_undoes_it(sizes: Sequence[int]) -> None:
    for n in sizes:
        key = make_key(n, 1)
        image = permute(np.arange(n), n, key)
        assert np.array_equal(np.sort(image), np.arange(n)), n
        assert np.array_equal(invert(image, n, key), np.arange(n)), n


@given(n=st.integers(1, 2**40), data=st.data())
def test_parts_of_a_huge_permutation_are_distinct_and_inside(n: int, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=50, unique=True))
    key = make_key(data.draw(st.integers()))
    image = permute(index, n, key)
    assert ((image >= 0) & (image < n)).all()
    assert len(np.unique(image)) == len(index)
    assert invert(image, n, key).tolist() == index


def chi_square(counts: np.ndarray[Any, Any], cells: int) -> float:
    """The statistic over its degrees of freedom: about 1 for uniform counts."""
    expected = counts.sum() / cells
    rest = (cells - len(counts)) * expected  # cells never hit
    return float((((counts - expected) ** 2 / expected).sum() + rest) / (cells - 1))


KEYS = 6000


@cache
def many_keys() -> Words:
    return np.concatenate([make_key(seed) for seed in range(KEYS)])


@cache
def over_keys(n: int) -> Items:
    """The images of all of ``[0, n)`` under many keys: (keys, n)."""
    keys = many_keys()
    return np.stack([permute(np.full(KEYS, i), n, keys) for i in range(n)], axis=1)


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_of_a_few_are_equally_frequent(n: int) -> None:
    codes = over_keys(n) @ n ** np.arange(n)
    assert chi_square(np.unique(codes, return_counts=True)[1], math.factorial(n)) < {
        2: 11, 3: 4.2, 4: 2.2, 5: 1.6,
    }[n]  # 1 in a thousand, with some room for the network's own unevenness  # fmt: skip


@pytest.mark.parametrize("n", [8, 31])
def test_neighbours_are_not_kept_at_any_distance(n: int) -> None:
    steps = np.diff(over_keys(n), axis=1) % n
    counts = np.bincount(steps.ravel(), minlength=n)[1:]
    assert chi_square(counts, n - 1) < 1 + 5 * math.sqrt(2 / (n - 2))


def test_the_order_is_pinned() -> None:
    """A saved state names the algorithm; a change of it must change the number in the plan."""
    order = Order(1000, 8, seed=7, shuffle="global")
    block = Order(1000, 8, seed=7, shuffle="block", window=4, chunk=10)
    assert order.plan["algorithm"] == 1
    assert order.items(3, 5).tolist() == PINNED_GLOBAL
    assert block.items(3, 5).tolist() == PINNED_BLOCK


PINNED_GLOBAL = [671, 922, 557, 628, 836, 758, 1, 735]
PINNED_BLOCK = [45, 77, 54, 44, 70, 65, 63, 58]


@st.composite
def orders(draw: st.DrawFn) -> Order:
    world_size = draw(st.integers(1, 4))
    num_samples, patches = draw(st.integers(1, 60)), draw(st.integers(1, 4))
    batch_size = draw(st.integers(1, 7))
    return Order(
        num_samples,
        batch_size,
        seed=draw(st.integers(-5, 2**65)),
        shuffle=draw(st.sampled_from(SHUFFLES)),
        window=draw(st.integers(1, 5)),
        chunk=draw(st.integers(1, 9)),
        patches_per_sample=patches,
        world_size=world_size,
        drop_last=draw(st.booleans()) and num_samples * patches >= batch_size * world_size,
    )


def of_rank(order: Order, rank: int, **changes: Any) -> Order:
    names = (
        "num_samples batch_size seed shuffle window chunk patches_per_sample world_size drop_last"
    )
    return Order(**{name: getattr(order, name) for name in names.split()} | changes, rank=rank)


def of_all_ranks(order: Order, epoch: int, batch: int) -> Items:
    """The items of a batch, as the ranks have them in turns."""
    parts = [of_rank(order, rank).items(epoch, batch) for rank in range(order.world_size)]
    return np.stack(parts, axis=1).ravel()


def epoch_of(order: Order, epoch: int = 0) -> Items:
    return np.concatenate([of_all_ranks(order, epoch, b) for b in range(order.num_batches)])


@given(order=orders(), epoch=st.integers(0, 3))
def test_an_epoch_holds_every_item_exactly_once(order: Order, epoch: int) -> None:
    seen = epoch_of(order, epoch)
    assert len(seen) == order.num_positions
    whole = order.items_at(epoch, np.arange(order.num_items))
    assert np.array_equal(np.sort(whole), np.arange(order.num_items))
    if order.drop_last:
        assert np.array_equal(seen, whole[: len(seen)])
        assert 0 <= order.num_items - len(seen) < order.global_batch
    else:
        assert len(np.unique(seen)) == order.num_items
        assert 0 <= len(seen) - order.num_items < order.world_size


@given(order=orders(), epoch=st.integers(0, 3), skip=st.integers(0, 9))
def test_a_mask_or_short_batches_give_each_item_once(order: Order, epoch: int, skip: int) -> None:
    """Also in the rest of an epoch, that begins after some items."""
    skip = min(skip, order.num_items)
    whole = np.sort(order.items_at(epoch, np.arange(skip, order.num_items)))
    for uneven in ("repeat", "short"):
        ranks = [
            of_rank(order, rank, uneven=uneven, skip=skip, drop_last=False)
            for rank in range(order.world_size)
        ]
        pairs = [
            (one.items(epoch, batch), one.mask(batch))
            for one in ranks
            for batch in range(one.num_batches)
        ]
        empty = np.zeros(0, np.int64)
        counted = np.concatenate([empty, *(items[mask] for items, mask in pairs)])
        assert np.array_equal(np.sort(counted), whole)
        repeated = sum(int((~mask).sum()) for _, mask in pairs)
        assert (
            repeated
            == ranks[0].num_repeated
            == (-len(whole) % order.world_size) * (uneven == "repeat")
        )
        assert all(len(items) == len(mask) > 0 for items, mask in pairs)


@given(order=orders(), epoch=st.integers(0, 3))
def test_ranks_share_each_batch_in_equal_rows(order: Order, epoch: int) -> None:
    world = order.world_size
    ranks = [of_rank(order, rank) for rank in range(world)]
    for batch in range(order.num_batches):
        parts = [rank.items(epoch, batch) for rank in ranks]
        assert len({len(part) for part in parts}) == 1
        assert all(part.dtype == np.int64 for part in parts)
        if order.drop_last or batch < order.num_batches - 1:
            assert len(parts[0]) == order.batch_size
        positions = np.arange(batch * order.global_batch, (batch + 1) * order.global_batch)
        whole = order.items_at(epoch, positions[: len(parts[0]) * world])
        assert np.array_equal(np.stack(parts, axis=1).ravel(), whole)


def test_shuffle_none_is_in_order() -> None:
    assert epoch_of(Order(10, 4), 3).tolist() == list(range(10))


def test_shuffle_sample_keeps_the_patches_of_a_sample_together() -> None:
    order = Order(20, 5, shuffle="sample", patches_per_sample=6)
    samples, patches = order.split(epoch_of(order).reshape(20, 6))
    assert (samples == samples[:, :1]).all()
    assert (patches == np.arange(6)).all()
    assert samples[:, 0].tolist() != list(range(20))
    assert sorted(samples[:, 0]) == list(range(20))


@given(
    samples=st.integers(1, 80),
    window=st.integers(1, 5),
    chunk=st.integers(1, 7),
    patches=st.integers(1, 3),
    seed=st.integers(0, 50),
)
def test_shuffle_block_visits_each_window_once_and_whole(
    samples: int, window: int, chunk: int, patches: int, seed: int
) -> None:
    order = Order(
        samples, 3, seed=seed, shuffle="block", window=window, chunk=chunk,
        patches_per_sample=patches,
    )  # fmt: skip
    windows = epoch_of(order) // (window * chunk * patches)
    visits = windows[np.flatnonzero(np.diff(windows, prepend=-1))]
    assert len(visits) == len(set(visits.tolist()))  # a window is not come back to


def test_shuffle_block_permutes_windows_and_items_anew_each_epoch() -> None:
    order = Order(100, 4, shuffle="block", window=2, chunk=5)
    first, second = (epoch_of(order, e).reshape(10, 10) for e in (0, 1))
    assert (first // 10)[:, 0].tolist() != (second // 10)[:, 0].tolist()
    inner = {tuple(row % 10) for row in np.concatenate([first, second])}
    assert len(inner) == 20  # no two windows are permuted alike


@pytest.mark.parametrize("shuffle", mainly(SHUFFLES[1:], 2))
def test_seeds_and_epochs_give_different_orders(shuffle: Shuffle) -> None:
    orders = {
        tuple(epoch_of(Order(50, 25, seed=seed, shuffle=shuffle, window=2, chunk=5), epoch))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_a_plan_of_100_million_samples_takes_constant_memory(shuffle: Shuffle) -> None:
    with traced() as peak:
        order = Order(100_000_000, 16, seed=1, shuffle=shuffle, window=8, chunk=24)
        for batch in (0, order.num_batches // 2, order.num_batches - 1):
            assert len(order.items(0, batch)) == 16
        assert peak() < 1_000_000


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": 2, "world_size": 2}, "rank 2 is not one of the 2 ranks from 0"),
        (
            {"batch_size": 6, "world_size": 2, "drop_last": True},
            r"an epoch of 10 items does not fill one global batch of 12 \(6 x 2 ranks\)",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Order(**{"num_samples": 10, "batch_size": 2, **changes})


def test_a_batch_past_the_epoch_is_an_index_error() -> None:
    with pytest.raises(IndexError, match="batch 5 is not one of the 5"):
        Order(10, 2).items(0, 5)
    with pytest.raises(IndexError):
        Order(10, 2).items(0, -1)


@given(order=orders(), data=st.data())
def test_resume_at_any_item_cuts_what_remains_anew(order: Order, data: st.DataObject) -> None:
    batch = data.draw(st.integers(0, order.num_batches))
    state = json.loads(json.dumps(order.state_dict(4, batch)))
    done = state["items_done"]
    world = data.draw(st.integers(1, 5))
    size = data.draw(st.integers(1, 9))
    drop = data.draw(st.booleans()) and order.num_items >= world * size
    new = of_rank(order, 0, world_size=world, batch_size=size, drop_last=drop)
    ranks = [of_rank(new, rank).resume(state) for rank in range(world)]
    places = {position for _, position in ranks}
    left = order.num_items - done
    if left < (world * size if drop else 1):
        assert places == {Position(5, 0)}
        assert all(of_one.skip == 0 for of_one, _ in ranks)
        return
    ((epoch, first),) = places
    assert epoch == 4
    whole, _ = ranks[0]
    rest: list[int] = []
    for later in range(first, whole.num_batches):
        rows = [of_one.items(4, later).tolist() for of_one, _ in ranks]
        assert len({len(row) for row in rows}) == 1  # every rank has equally many
        rest += [item for row in zip(*rows, strict=True) for item in row]
        after = whole.state_dict(4, later + 1)
        assert after["items_done"] == min(done + len(rest), order.num_items)
    wanted = order.items_at(4, np.arange(done, order.num_items)).tolist()
    common = min(len(rest), len(wanted))
    assert rest[:common] == wanted[:common]
    if drop:
        assert len(wanted) - world * size < len(rest) <= len(wanted)
    else:
        assert len(wanted) <= len(rest) < len(wanted) + world


def test_a_state_counts_items_not_what_fills_the_last_batch() -> None:
    order = Order(10, 2, world_size=3)
    assert [order.state_dict(0, batch)["items_done"] for batch in (0, 1, 2)] == [0, 6, 10]
    assert order.num_positions == 12
    assert order.resume(Order(10, 6).state_dict(0, 2))[1] == Position(1, 0)  # ended alone at 10


def test_a_state_is_small_and_says_what_the_sequence_depends_on() -> None:
    order = Order(10**8, 16, seed=9, shuffle="block", window=4, chunk=24, rank=1, world_size=2)
    assert order.state_dict(1, 5) == {
        "seed": 9,
        "epoch": 1,
        "items_done": 160,
        "plan": {
            "algorithm": 1, "num_samples": 10**8, "patches_per_sample": 1, "shuffle": "block",
            "window": 4, "chunk": 24,
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"seed": 2}, "saved with seed 1 and cannot be resumed with seed 2"),
        ({"num_samples": 41}, "saved with num_samples 40 .* be resumed with num_samples 41"),
        ({"patches_per_sample": 2}, "patches_per_sample 1 .* patches_per_sample 2"),
        ({"shuffle": "global"}, "shuffle 'block' .* shuffle 'global'"),
        ({"window": 3}, "window 2 .* window 3"),
        ({"chunk": 5}, "chunk 4 .* chunk 5"),
    ],
)
def test_another_plan_is_refused_by_naming_what_differs(changes: dict[str, Any], said: str) -> None:
    plan: dict[str, Any] = {"seed": 1, "num_samples": 40, "window": 2, "chunk": 4}
    plan["shuffle"] = "block"
    state = Order(batch_size=4, **plan).state_dict(0, 2)
    with pytest.raises(UsageError, match=said):
        Order(batch_size=4, **{**plan, **changes}).resume(state)


def test_window_and_chunk_matter_to_the_block_shuffle_only() -> None:
    state = Order(40, 4, shuffle="global", window=2, chunk=4).state_dict(0, 2)
    assert Order(40, 4, shuffle="global", window=9).resume(state)[1] == Position(0, 2)


def test_a_broken_state_is_refused() -> None:
    with pytest.raises(UsageError, match="lacks items_done, plan"):
        Order(40, 4).resume({"seed": 0, "epoch": 0})
    nothing: Any = None
    with pytest.raises(UsageError, match="lacks seed, epoch, items_done, plan"):
        Order(40, 4).resume(nothing)
    with pytest.raises(UsageError, match="plan 'x' is not a mapping"):
        Order(40, 4).resume({"seed": 0, "epoch": 0, "items_done": 0, "plan": "x"})
    order = Order(40, 4)
    state = order.state_dict(1, 2)
    for name in ("epoch", "items_done"):
        for wrong in (-4, 5.5, "x", None, True):
            with pytest.raises(UsageError, match=f"{name} {wrong!r} is not a whole number from 0"):
                order.resume({**state, name: wrong})
    with pytest.raises(UsageError, match="items_done 41 is not a whole number from 0 to 40"):
        order.resume({**state, "items_done": 41})


def test_numbers_of_numpy_are_numbers() -> None:
    order = Order(100, 4, shuffle="global")
    state = order.state_dict(np.int64(3), 2)  # type: ignore[arg-type]
    assert order.items(np.int64(3), 2).tolist() == order.items(3, 2).tolist()  # type: ignore[arg-type]
    assert json.loads(json.dumps(state)) == state and order.resume(state)[1] == Position(3, 2)
    assert np.array_equal(make_key(np.int64(-1)), make_key(-1))  # type: ignore[arg-type]
