"""The memory boundary: the exact edge of any staircase, in few launches, and always an end."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import UsageError
from penstock.bench.boundary import Limit, Trial, find_limits, pixels_of


def most_trials(max_batch: int) -> int:
    """The batches 1 and 2 for the line, the guess, then steps that double and halve."""
    return 2 * max_batch.bit_length() + 3


Fits = Callable[[str, int], Trial]


class Asked:
    """What a search asked for, and the answer of a function to each."""

    def __init__(self, answer: Fits) -> None:
        self.answer = answer
        self.asked: list[tuple[str, int]] = []

    def __call__(self, tile: str, batch: int) -> Trial:
        self.asked.append((tile, batch))
        return self.answer(tile, batch)


def straight(base: int, per_pixel: float, budget: int) -> Fits:
    def fits(tile: str, batch: int) -> Trial:
        peak = int(base + per_pixel * batch * pixels_of(tile))
        return Trial("ok", peak, budget) if peak <= budget else Trial("oom", None, budget)

    return fits


def staircase(edges: dict[str, int], *, peaks: bool = False) -> Fits:
    """Fits up to an edge that is given for each tile; its peaks, if any, are of no use."""

    def fits(tile: str, batch: int) -> Trial:
        ok = batch <= edges[tile]
        return Trial("ok" if ok else "oom", 977 * batch**2 % 1009 if peaks else None, 1000)

    return fits


# tables


def test_a_constant_error_of_the_line_is_paid_once() -> None:
    """Resident pages and mapped pages differ by a constant: the tile before shows by how much."""

    def fits(tile: str, batch: int) -> Trial:
        mapped = 1_000_000 + 200 * batch * pixels_of(tile)
        return Trial("ok" if mapped <= 10_000_000 else "oom", mapped - 900_000, 10_000_000)

    first, *others = find_limits(("8", "16", "32"), fits, 4096)
    assert first.batch == 703 and first.trials > 6
    assert all(limit.trials <= 3 for limit in others)
    assert [limit.batch for limit in others] == [175, 43]


def test_a_tolerance_ends_the_search_early_and_the_answer_is_that_near() -> None:
    """Memory with a step that no line foretells."""

    def fits(tile: str, batch: int) -> Trial:
        peak = 1000 + 50 * batch + (200_000 if batch > 3000 else 0)
        return Trial("ok" if peak <= 300_000 else "oom", peak, 300_000)

    (exact,) = find_limits(("8",), fits, 1 << 16)
    assert (exact.batch, exact.failing_batch) == (3000, 3001)
    (near,) = find_limits(("8",), fits, 1 << 16, tolerance=0.01)
    assert 0.99 * 3000 <= near.batch <= 3000 < near.failing_batch <= 1.01 * near.batch
    assert near.trials < exact.trials
    assert f"; {near.failing_batch} does not, and what lies between was not" in near.sentence


def test_another_failure_ends_its_tile_and_no_other() -> None:
    honest = straight(1000, 2, 10_000)

    def fits(tile: str, batch: int) -> Trial:
        if tile == "16":
            return Trial("failed", reason="killed by SIGSEGV")
        return honest(tile, batch)

    small, broken, large = find_limits(("8", "16", "32"), fits, 512)
    assert (small.batch, large.batch) == (70, 4)
    assert (broken.batch, broken.failing_batch, broken.trials) == (None, None, 1)
    assert "SIGSEGV" in broken.sentence and "17" in broken.sentence  # the batch that it tried


def test_a_failure_in_the_middle_of_a_search_leaves_no_limit() -> None:
    def fits(tile: str, batch: int) -> Trial:
        return Trial("ok") if batch < 8 else Trial("failed", reason="no answer in 600 s")

    (limit,) = find_limits(("8",), fits, 512)
    assert limit.batch is None and "batch of 8" in limit.reason and limit.trials == 4


def test_nothing_to_search() -> None:
    with pytest.raises(UsageError, match="batch of 0"):
        find_limits(("8",), straight(0, 1, 1), 0)


LIMIT = Limit("256", 12, 13, 900, 1000, alloc_retries=0, trials=4)


@pytest.mark.parametrize(
    ("fields", "margin", "cliff"),
    [
        ({}, 0.1, False),
        ({"peak": 950}, 0.05, False),
        ({"peak": 951}, 0.049, True),
        ({"peak": 1100}, -0.1, True),  # resident library pages are outside of a data limit
        ({"alloc_retries": 1}, 0.1, True),
        ({"peak": None}, None, False),
        ({"budget": None}, None, False),
        ({"peak": 990, "failing_batch": None}, 0.01, False),  # nothing was seen to fail
    ],
)
def test_margin_and_cliff(fields: dict[str, Any], margin: float | None, cliff: bool) -> None:
    of = replace(LIMIT, **fields)
    assert of.margin == (None if margin is None else pytest.approx(margin))
    assert of.cliff is cliff
    assert ("cliff" in of.sentence) == (cliff and of.margin is not None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "a batch of 12 fits with a peak of 900 B in 1000 B (margin 10.0 %); 13 does not."),
        ({"failing_batch": None}, "no larger one was allowed"),
        ({"batch": None, "failing_batch": 1, "peak": None}, "not even a batch of 1 fits"),
        ({"alloc_retries": 2}, "had to retry 2 times"),
    ],
)  # fmt: skip
def test_sentences(fields: dict[str, Any], words: str) -> None:
    assert words in replace(LIMIT, **fields).sentence


# laws

edges = st.lists(st.integers(0, 300), min_size=1, max_size=6).map(
    lambda sizes: {str(8 * i + 8): edge for i, edge in enumerate(sorted(sizes, reverse=True))}
)


@given(edges, st.integers(1, 300), st.booleans())
def test_any_staircase_is_found_exactly(edges: dict[str, int], max_batch: int, peaks: bool) -> None:
    fits = Asked(staircase(edges, peaks=peaks))
    limits = find_limits(list(edges), fits, max_batch)
    for limit in limits:
        edge = min(edges[limit.tile], max_batch)
        assert limit.batch == (edge or None)
        assert limit.failing_batch == (edge + 1 if edge < max_batch else None)
        assert limit.trials <= most_trials(max_batch)
        # both sides were run
        assert not edge or (limit.tile, edge) in fits.asked
        assert edge == max_batch or (limit.tile, edge + 1) in fits.asked
    assert len(set(fits.asked)) == len(fits.asked) == sum(limit.trials for limit in limits)


@given(
    st.integers(0, 10**9),
    st.integers(1, 500),
    st.integers(10**6, 10**11),
    st.lists(st.integers(1, 64), min_size=1, max_size=8, unique=True),
)
def test_straight_memory_costs_two_launches_a_tile(base, per_pixel, budget, sides) -> None:
    tiles = [str(8 * side) for side in sorted(sides)]
    limits = find_limits(tiles, straight(base, per_pixel, budget), 1 << 20)
    # Where the edge is a whole number of batches, the rounding of the line may miss it by one.
    assert all(limit.trials <= (5 if i == 0 else 3) for i, limit in enumerate(limits))


@given(
    st.dictionaries(st.tuples(st.sampled_from(["8", "16"]), st.integers(1, 100)),
                    st.tuples(st.sampled_from(["ok", "oom", "failed"]), st.integers(0, 999))),
    st.integers(1, 100),
)  # fmt: skip
def test_noise_never_hangs_a_search(answers, max_batch) -> None:
    def fits(tile: str, batch: int) -> Trial:
        outcome, peak = answers.get((tile, batch), ("ok" if batch % 3 else "oom", 7))
        return Trial(outcome, peak, 1000, reason="noise")  # type: ignore[arg-type]

    asked = Asked(fits)
    for limit in find_limits(("8", "16"), asked, max_batch):
        assert limit.trials <= most_trials(max_batch)
        if limit.batch is not None:  # what is reported was run, and says so
            assert fits(limit.tile, limit.batch).outcome == "ok"
            assert (limit.tile, limit.batch) in asked.asked
        if limit.batch is not None and limit.failing_batch is not None:
            assert limit.failing_batch == limit.batch + 1
    assert len(set(asked.asked)) == len(asked.asked)
