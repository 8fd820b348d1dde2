"""The model of the queue: the seed's table, hand cases, laws that join it to the simulation."""

from __future__ import annotations

import doctest
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.reports.queue import simulation as queueing
from penstock.reports.queue.simulation import (
    SEED,
    SEED_ITERATIONS,
    QueueModel,
    queue_verdict,
    seed_feed,
    simulate,
    utilisation,
)


def test_examples_of_the_page() -> None:
    assert doctest.testmod(queueing).failed == 0


# --- the seed's table ---------------------------------------------------------------------------


MEANS = (3.66, 2.57, 2.48, 2.39, 2.31, 1.95, 2.48, 2.31, 2.31, 1.95)
DRAINS = (None, 1.6, 3.2, 4.8, 6.4, 12.8, 3.2, 6.4, 6.4, 12.8)


@pytest.mark.parametrize(
    ("row", "mean", "drain"),
    list(zip(SEED, MEANS, DRAINS, strict=True)),
    ids=[f"{row.workers},{row.queue}" for row in SEED],
)
def test_the_model_gives_the_numbers_that_explain_the_seed(
    row: queueing.SeedRow, mean: float, drain: float | None
) -> None:
    feed = seed_feed(row)
    assert round(feed.mean_s(SEED_ITERATIONS), 2) == mean
    assert (feed.drain if feed.drain is None else round(feed.drain, 1)) == drain


@pytest.mark.parametrize("row", SEED, ids=lambda row: f"{row.workers},{row.queue}")
def test_the_simulation_meets_what_the_seed_measured(row: queueing.SeedRow) -> None:
    """Seconds to a tenth, as they were published, and the cleared queue within an iteration."""
    timeline = simulate(seed_feed(row), SEED_ITERATIONS)
    assert timeline.mean_s == pytest.approx(row.seconds, abs=0.11)
    if row.cleared is None:
        assert timeline.cleared is None
    else:
        assert timeline.cleared is not None
        assert abs(timeline.cleared - row.cleared) <= 1


# --- by hand ------------------------------------------------------------------------------------


def test_a_queue_of_two_by_hand() -> None:
    """R = 3, C = 1: at 0 two in the queue and one in hand, from then on one more every 3 s.

    time    0   1   2   3   6   9     taken at
    ready   3   2   1   1   1   1     before it is taken, in hand too
    """
    timeline = simulate(QueueModel(1, 2, read_s=3.0, compute_s=1.0), 6)
    assert timeline.waits == [0, 0, 0, 0, 2, 2]
    assert timeline.seconds == [1, 1, 1, 1, 3, 3]
    assert timeline.taken == [2, 1, 0, 0, 0, 0]
    assert timeline.left == [2, 1, 1, 0, 0, 0]
    assert timeline.cleared == 3
    feed = QueueModel(1, 8, read_s=2.0, compute_s=1.0)
    assert simulate(feed, 1).taken == [8], "what is in hand takes the place of what is taken"
    assert simulate(feed, 1, in_hand=0).taken == [7]


def test_no_reader_and_reads_of_unequal_length_by_hand() -> None:
    timeline = simulate(QueueModel(0, 0, read_s=2.0, compute_s=1.0), 3)
    assert (timeline.seconds, timeline.waits, timeline.left) == ([3, 3, 3], [2, 2, 2], [])
    assert timeline.cleared is None
    feed = QueueModel(1, 1, read_s=1.0, compute_s=0.0)
    assert simulate(feed, 7, reads=(1.0, 5.0)).waits == [0, 0, 1, 5, 1, 5, 1]


def test_two_readers_read_at_once_where_there_is_room() -> None:
    """Two finished batches wait at first; then two come every 3 s, or with one place one by one."""
    feed = QueueModel(2, 2, read_s=3.0, compute_s=0.0)
    assert simulate(feed, 6, in_hand=0).waits == [0, 0, 3, 0, 3, 0]
    assert simulate(replace(feed, queue=1), 4, in_hand=0).waits == [0, 3, 3, 3]


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.9, "90.0 % passes the 90 % of 3D U-Net and ResNet-50"),
        (0.7, "70.0 % passes the 70 % of CosmoFlow and fails the 90 % of 3D U-Net and ResNet-50"),
        (0.5, "50.0 % fails the 70 % of CosmoFlow and the 90 % of 3D U-Net and ResNet-50"),
    ],
)
def test_the_verdict_has_two_bars(share: float, said: str) -> None:
    assert queue_verdict(share) == said


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ((1, 0, 1.0, 1.0), "1 workers need a queue of 1 at least, not 0"),
        ((-1, 1, 1.0, 1.0), "-1 workers"),
        ((1, 1, 0.0, 1.0), "cannot take 0.0 s to read"),
        ((1, 1, math.nan, 1.0), "cannot take nan s to read"),
    ],
)
def test_a_feed_that_cannot_be_is_refused(
    feed: tuple[int, int, float, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        QueueModel(*feed)


# --- laws ---------------------------------------------------------------------------------------

times = st.integers(1, 400).map(lambda n: n / 100)


@given(read=times, compute=times, queue=st.integers(1, 16))
def test_the_closed_form_is_the_simulation_within_an_iteration(
    read: float, compute: float, queue: int
) -> None:
    feed = QueueModel(1, queue, read, compute)
    timeline = simulate(feed, 200)
    if feed.drain is None:
        assert timeline.cleared is None
        assert sum(timeline.waits) == pytest.approx(0)
    elif feed.drain + read / (read - compute) < 199:
        # Whole batches: the closed form has none half read, and they are C / (R - C) late at most.
        slack = 1 + compute / (read - compute)
        assert timeline.cleared is not None
        assert abs(timeline.cleared - feed.drain) <= slack
        assert timeline.mean_s == pytest.approx(feed.mean_s(200), abs=2 * read / 200 + 1e-9)


@given(
    workers=st.integers(1, 6),
    queue=st.integers(1, 8),
    read=times,
    compute=times,
)
def test_in_the_long_run_every_feed_is_steady(
    workers: int, queue: int, read: float, compute: float
) -> None:
    feed = QueueModel(workers, queue, read, compute)
    timeline = simulate(feed, 400)
    late = timeline.seconds[200:]
    assert sum(late) / 200 == pytest.approx(feed.steady_s, rel=0.03)
    assert utilisation(late, compute) == pytest.approx(feed.utilisation, rel=0.03)
    assert all(0 <= depth <= queue for depth in timeline.left + timeline.taken)


@given(read=times, compute=times, queue=st.integers(1, 8), in_hand=st.integers(0, 2))
def test_a_deeper_queue_is_never_slower(
    read: float, compute: float, queue: int, in_hand: int
) -> None:
    means = [
        simulate(QueueModel(2, q, read, compute), 40, in_hand=in_hand).mean_s
        for q in (queue, queue + 1)
    ]
    assert means[1] <= means[0] + 1e-9
