"""Threads, channels and budgets: order kept, bytes bounded, the first error first."""

import random
import threading

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.base.threads import Budget, Channel, Flow, Pool


def test_an_ordered_channel_restores_order_whatever_the_delays() -> None:
    flow = Flow()
    channel: Channel[int] = Channel(flow, producers=4)
    tickets, lock, got = iter(range(200)), threading.Lock(), []
    rng = random.Random(0)

    def produce() -> None:
        while True:
            with lock:
                number = next(tickets, None)
                pause = rng.random() / 2000
            if number is None:
                return channel.close()
            threading.Event().wait(pause)
            channel.put(number, number)

    def consume() -> None:
        while (item := channel.get()) is not None:
            got.append(item)

    for i in range(4):
        flow.spawn(f"produce-{i}", produce)
    flow.spawn("consume", consume)
    flow.join()
    assert got == list(range(200))


def test_what_came_out_of_turn_is_not_ready() -> None:
    channel: Channel[str] = Channel(Flow())
    lengths = []
    for place in (1, 3, 0, 2):
        channel.put(str(place), place)
        lengths.append(len(channel))
    assert lengths == [0, 0, 2, 4]
    assert channel.get() == "0" and len(channel) == 3


def test_a_budget_is_never_exceeded_and_lets_one_oversized_request_through() -> None:
    flow = Flow()
    budget = Budget(flow, 10)

    def work() -> None:
        for size in (3, 7, 10, 25):
            budget.acquire(size)
            assert budget.used <= 10 or budget.used == 25
            budget.release(size)

    for i in range(6):
        flow.spawn(f"work-{i}", work)
    flow.join()
    assert budget.used == 0
    assert budget.peak == 25


def test_the_first_error_wins_and_wakes_everyone() -> None:
    flow = Flow()
    channel: Channel[int] = Channel(flow)
    budget = Budget(flow, 1)
    budget.acquire(1)
    failed = threading.Event()

    def fail() -> None:
        failed.set()
        raise RuntimeError("the first")

    def follow() -> None:
        failed.wait()
        with flow.changed:
            flow.changed.wait_for(lambda: flow.failed)
        raise ValueError("a later one")

    flow.spawn("waits for an item", lambda: channel.get() and None)
    flow.spawn("waits for room", lambda: budget.acquire(1))
    flow.spawn("follow", follow)
    flow.spawn("fail", fail)
    with pytest.raises(RuntimeError, match="the first"):
        flow.join()
    assert not flow.alive


def test_an_interrupt_in_the_main_thread_stops_the_others() -> None:
    flow = Flow()
    channel: Channel[int] = Channel(flow)
    flow.spawn("waits for ever", lambda: channel.get() and None)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        flow.join(interrupt)
    assert not flow.alive


def test_a_gap_in_the_order_is_a_fault_and_not_a_hang() -> None:
    flow = Flow()
    channel: Channel[int] = Channel(flow)
    channel.put(1, 1)
    channel.close()
    with pytest.raises(AssertionError, match="item 0 was never put"):
        channel.get()


def test_dear_buffers_are_few_and_an_array_too_many_has_memory_of_its_own_size() -> None:
    made: list[NDArray[np.uint8]] = []

    def make(nbytes: int) -> NDArray[np.uint8]:
        made.append(np.zeros(nbytes, np.uint8))
        return made[-1]

    pool, shape = Pool(64, make, 2), (2, 3)
    first, second, third = (pool.take(shape, np.dtype("int16")) for _ in range(3))
    assert [buffer.nbytes for buffer in made] == [64, 64]
    assert first.base is made[0] and second.base is made[1]
    assert third.base is not None and third.base.nbytes == 12
    for array in (third, first):
        pool.give(array)
    assert pool.take((64,), np.dtype("uint8")).base is made[0], "not the small one"
    assert pool.take(shape, np.dtype("int16")).base is not third.base
    assert len(made) == 2
