"""The simulation of the queue: the seed's table, hand cases, laws."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.reports.queue import simulation as queueing
from penstock.reports.queue.simulation import QueueModel, simulate, utilisation


def test_examples_of_the_page() -> None:
    assert doctest.testmod(queueing).failed == 0


SEED = [
    (0, 0, 3.6, None), (1, 1, 2.5, 0), (1, 2, 2.4, 3), (1, 3, 2.3, 4), (1, 4, 2.2, 6),
    (1, 8, 1.9, 13), (2, 2, 2.4, 3), (2, 4, 2.2, 7), (4, 4, 2.3, 7), (4, 8, 2.0, 11),
]  # fmt: skip
"""Workers, queue, mean seconds of an iteration, and "queue cleared after iter"."""


@pytest.mark.parametrize(("workers", "queue", "seconds", "cleared"), SEED)
def test_the_simulation_meets_what_the_seed_measured(workers, queue, seconds, cleared) -> None:
    """Seconds to a tenth, as they were published, and the cleared queue within an iteration.

    The seed read a batch in 2.66 s and computed for 1 s, 30 times. Its readers held one lock from
    the beginning of a read until the batch was in the queue, so that they worked as one.
    """
    as_one = min(workers, 1)
    timeline = simulate(QueueModel(queue, 2.66, 1.0), 30, in_hand=as_one)
    assert timeline.mean_s == pytest.approx(seconds, abs=0.11)
    assert (timeline.cleared is None) == (cleared is None)
    assert abs((timeline.cleared or 0) - (cleared or 0)) <= 1


def test_a_queue_of_two_by_hand() -> None:
    """R = 3, C = 1: at 0 two in the queue and one in hand, from then on one more every 3 s.

    time    0   1   2   3   6   9     taken at
    ready   3   2   1   1   1   1     before it is taken, in hand too
    """
    timeline = simulate(QueueModel(2, read_s=3.0, compute_s=1.0), 6, in_hand=1)
    assert timeline.seconds == [1, 1, 1, 1, 3, 3]
    assert timeline.left == [2, 1, 1, 0, 0, 0]
    assert timeline.cleared == 3
    feed = QueueModel(8, read_s=2.0, compute_s=0.0)
    assert simulate(feed, 1, in_hand=1).left == [8], (
        "what is in hand takes the place of what is taken"
    )
    assert simulate(feed, 1).left == [7]


def test_no_reader_and_reads_of_unequal_length_by_hand() -> None:
    timeline = simulate(QueueModel(0, read_s=2.0, compute_s=1.0), 3)
    assert (timeline.seconds, timeline.left) == ([3, 3, 3], [])
    assert timeline.cleared is None
    feed = QueueModel(1, read_s=1.0, compute_s=0.0)
    assert simulate(feed, 7, in_hand=1, reads=(1.0, 5.0)).seconds == [0, 0, 1, 5, 1, 5, 1]


times = st.integers(1, 400).map(lambda n: n / 100)


@given(in_hand=st.integers(0, 2), queue=st.integers(1, 8), read=times, compute=times)
def test_every_feed_is_steady_later(in_hand: int, queue: int, read: float, compute: float) -> None:
    timeline = simulate(QueueModel(queue, read, compute), 400, in_hand=in_hand)
    late = timeline.seconds[200:]
    steady_s = max(compute, read)
    assert sum(late) / 200 == pytest.approx(steady_s, rel=0.03)
    assert utilisation(late, compute) == pytest.approx(compute / steady_s, rel=0.03)
    assert all(0 <= depth <= queue for depth in timeline.left)


@given(read=times, compute=times, queue=st.integers(1, 8), in_hand=st.integers(0, 2))
def test_a_deeper_queue_is_no_slower(read: float, compute: float, queue: int, in_hand: int) -> None:
    means = [
        simulate(QueueModel(q, read, compute), 40, in_hand=in_hand).mean_s
        for q in (queue, queue + 1)
    ]
    assert means[1] <= means[0] + 1e-9
