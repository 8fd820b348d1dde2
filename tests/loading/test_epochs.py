"""Every item once and in order, whatever the threads: epochs, resume, and how an iteration ends."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.base.errors import StageError, UsageError
from penstock.loading import Loader, Order
from penstock.loading.batch import Batch

from ..laws import COSTLY
from ..parameters import mainly
from .kit import ENGINES, arrays, seen, slow, threads_of_loaders

pytest.importorskip("numcodecs")
pytest.importorskip("tensorstore")


@COSTLY
@given(
    workers=st.integers(1, 16),
    queue=st.integers(0, 5),
    batch_size=st.integers(1, 7),
    shuffle=st.sampled_from(["none", "sample", "block", "global"]),
    seed=st.integers(0, 99),
)
def test_each_item_once_and_in_one_order_whatever_the_threads(
    data: dict[str, Path], workers: int, queue: int, batch_size: int, shuffle: Any, seed: int
) -> None:
    whole = arrays(data)
    order = Order(12, batch_size, seed, shuffle, window=3)
    with (
        pytest.MonkeyPatch.context() as patch,
        Loader(
            data, batch_size=batch_size, shuffle=shuffle, window=3, seed=seed, workers=workers,
            queue=queue, engine="native",
        ) as loader,
    ):  # fmt: skip
        slow(patch, seed)
        for epoch in range(2):
            items = []
            for number, batch in enumerate(loader):
                assert (batch.epoch, batch.number) == (epoch, number)
                assert batch.indices.tolist() == order.items(epoch, number).tolist()
                for name, array in batch.items():
                    assert np.array_equal(array, whole[name][batch.samples])
                items += batch.samples.tolist()
            assert sorted(items) == list(range(12))


@pytest.mark.parametrize(("world", "engine"), mainly([*product((9, 5, 1), ENGINES)], 0))
def test_an_epoch_says_what_it_repeats(data: dict[str, Path], world: int, engine: str) -> None:
    """12 samples: on 9 ranks 6 repeat, or with short batches some ranks have one less or none."""
    seen: dict[str, list[int]] = {"repeat": [], "short": []}
    for uneven, samples in seen.items():
        for rank in range(world):
            how: dict[str, Any] = {"uneven": uneven, "engine": engine, "shuffle": "global"}
            with Loader(data, batch_size=2, rank=rank, world_size=world, **how) as loader:
                loader.set_epoch(3)
                for batch in loader:
                    samples += batch.samples[batch.mask].tolist()
                    assert uneven == "repeat" or batch.mask.all()
                repeats = -12 % world if uneven == "repeat" else 0
                assert (f"{repeats} items repeated" in loader.summary) == bool(repeats)
                assert loader.epoch == 4
    assert sorted(seen["repeat"]) == sorted(seen["short"]) == list(range(12))


@given(
    stop=st.integers(0, 6),
    first=st.tuples(st.sampled_from([1, 2]), st.integers(1, 8)),
    second=st.tuples(st.sampled_from([1, 2]), st.integers(1, 8)),
    seed=st.integers(0, 9),
)
def test_a_resumed_epoch_is_the_rest_of_it_to_the_bit(data, stop, first, second, seed) -> None:
    """Stopped at any batch, gone on with as many ranks and workers as one likes."""

    def ranks(world: int, workers: int) -> list[Loader]:
        return [
            Loader(
                data, batch_size=2 // world, shuffle="global", seed=seed, workers=workers,
                rank=rank, world_size=world,
            )
            for rank in range(world)
        ]  # fmt: skip

    def rows(loaders: list[Loader], count: int) -> list[bytes]:
        """The rows of all ranks, in the order of the global batches."""
        got = []
        iterators = [iter(loader) for loader in loaders]
        for _ in range(count):
            batches = [next(iterator) for iterator in iterators]
            for row in range(len(batches[0].samples)):
                got += [b"".join(a[row].tobytes() for a in b.values()) for b in batches]
        return got

    (plain,) = ranks(1, 1)
    wanted = rows([plain], 6)
    before = ranks(*first)
    got = rows(before, stop)
    state = json.loads(json.dumps(before[-1].state_dict()))
    after = ranks(*second)
    for loader in after:
        loader.load_state_dict(state)
        assert loader.epoch == (1 if stop == 6 else 0)
    if stop < 6:
        got += rows(after, 6 - stop)
    assert got == wanted
    assert [s.state_dict() for s in after] == [after[0].state_dict()] * len(after)
    for loader in [plain, *before, *after]:
        loader.close()


def test_the_end_is_told_however_often_one_asks(data: dict[str, Path]) -> None:
    with Loader(data, batch_size=6) as loader:
        batches = iter(loader)
        assert len([*batches]) == 2
        assert next(batches, None) is None and next(batches, None) is None
        assert loader.epoch == 1
        other = iter(loader)
        next(other)
        assert next(batches, None) is None, "and it does not end the one that came after"
        assert next(other, None) is not None


def test_epochs_advance_and_a_break_ends_one(data: dict[str, Path]) -> None:
    with Loader(data, batch_size=4, shuffle="global", seed=1) as loader:
        epochs = [[b.samples.tolist() for b in loader] for _ in range(2)]
        assert epochs[0] != epochs[1]
        for batch in loader:
            assert batch.epoch == 2
            break
        assert {b.epoch for b in loader} == {3}
        loader.set_epoch(0)
        assert [b.samples.tolist() for b in loader] == epochs[0]
        next(iter(loader))
        state = loader.state_dict()
        assert (state["epoch"], state["items_done"]) == (1, 4)
        loader.load_state_dict(state)
        wrong: Any
        for wrong in (-1, 1.5, "1", None):  # a state of such an epoch could never be loaded
            with pytest.raises(UsageError, match=f"epoch {wrong!r} is not a whole number from 0"):
                loader.set_epoch(wrong)
        loader.set_epoch(1)  # what a training loop says at each epoch does not undo the state
        assert [b.samples.tolist() for b in loader] == epochs[1][1:]


def test_two_loaders_at_once_do_not_meet(data: dict[str, Path]) -> None:
    with (
        Loader(data, batch_size=3, workers=3, shuffle="global", seed=1) as one,
        Loader(data, batch_size=3, workers=2, shuffle="global", seed=2) as two,
    ):
        alone = seen(one), seen(two)
        one.set_epoch(0), two.set_epoch(0)
        both = [(a.samples.tolist(), b.samples.tolist()) for a, b in zip(one, two, strict=True)]
    pairs = zip(*([items for _, items, _ in epoch] for epoch in alone), strict=True)
    assert both == list(pairs)


def test_a_transform_changes_replaces_or_fails(data: dict[str, Path]) -> None:
    whole, calls = arrays(data), []

    def change(batch: Batch) -> None:
        calls.append(batch.number)
        batch["inputs"] *= 2

    with Loader(data, batch_size=2, workers=8, queue=6, transform=change) as loader:
        for batch in loader:
            assert np.array_equal(batch["inputs"], 2 * whole["inputs"][batch.samples])
    assert calls == list(range(6)), "one after another, in order"

    def replace(batch: Batch) -> dict[str, NDArray[Any]]:
        return {"sum": batch["inputs"].sum((1, 2, 3))}

    def run(workers: int) -> list[tuple[int, list[int], dict[str, bytes]]]:
        with Loader(data, batch_size=2, workers=workers, transform=replace) as loader:
            return seen(loader)

    assert run(1) == run(7)

    def fail(batch: Batch) -> None:
        if batch.number == 3:
            raise ZeroDivisionError("by nought")

    loader = Loader(data, batch_size=2, transform=fail)
    message = r"transform failed at batch 3 of epoch 0 \(samples 6, 7\): .*: by nought"
    with pytest.raises(StageError, match=message) as caught:
        list(loader)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    wrong: Any = len  # whose number is no mapping of arrays
    with pytest.raises(StageError, match="transform failed at batch 0 of epoch 0"):
        list(Loader(data, batch_size=2, transform=wrong))


@pytest.mark.parametrize("engine", ENGINES)
def test_leaving_early_closing_and_coming_back(data: dict[str, Path], engine: str) -> None:
    loader = Loader(data, batch_size=1, queue=3, workers=4, engine=engine)
    for _ in loader:
        break
    assert threads_of_loaders() == [], "the iterator is gone, so are its threads"
    old = iter(loader)
    next(old)
    assert len(list(loader)) == 12
    with pytest.raises(UsageError, match="closed or iterated anew"):
        next(old)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    loader.close()
    assert threads_of_loaders() == []
    with pytest.raises(UsageError, match="closed or iterated anew"):
        next(iterator)
    assert len(list(loader)) == 12
    never_begun = iter(loader)
    del never_begun
    assert threads_of_loaders() == []


def test_a_fork_is_told_in_one_sentence(data: dict[str, Path]) -> None:
    loader = Loader(data, batch_size=2)
    loader._process -= 1  # as a fork would see it
    with pytest.raises(UsageError, match="do not live on in the fork"):
        iter(loader)
