"""Workers that may not take part: tasks keep off them, and wait where there is no other."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.base import Incomplete, OutOfMemory, StageError, StoreFull
from penstock.cluster import Absence, TaskFailure, Tasks, UnfitWorker, Workers, news
from penstock.cluster import tasks as of_tasks

distributed = pytest.importorskip("distributed")
COUNT = 8


def work(order: float, number: int) -> int:
    """A task that takes so many seconds, and that no worker of an odd name may do."""
    if "odd" in str(distributed.get_worker().name):
        raise UnfitWorker("another kind")
    time.sleep(order)
    return number


class Cluster:
    """A scheduler and workers in this process, which come and go by name."""

    def __init__(self, *names: str) -> None:
        loopback = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
        self.one = {"cls": distributed.Worker, "options": {**loopback, "nthreads": 1}}
        options = {**loopback, "port": 0, "dashboard": False}
        self.dask = distributed.SpecCluster(
            dict.fromkeys(names, self.one),
            scheduler={"cls": distributed.Scheduler, "options": options},
            silence_logs=logging.CRITICAL,
        )

    def change(self, gone: str = "", come: str = "") -> None:
        self.dask.worker_spec.pop(gone, None)
        if come:
            self.dask.worker_spec[come] = self.one
        self.dask.sync(self.dask._correct_state)


@contextlib.contextmanager
def tasks_on(
    *names: str, function: Callable[..., Any] = work, timeout_s: float = 100
) -> Iterator[tuple[Cluster, Tasks]]:
    cluster = Cluster(*names)
    with cluster.dask, distributed.Client(cluster.dask, set_as_default=False) as client:
        workers = Workers(client, "here", Absence(timeout_s))
        yield cluster, Tasks(workers, function, 0.02, "a topic", retries=2)


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_tasks, "LOOK_S", 0.05)
    monkeypatch.setattr(news, "TICK_S", 0.05)


def test_tasks_go_on_elsewhere_when_the_worker_that_they_were_kept_to_is_gone() -> None:
    """Once a worker is left out, tasks name the others. Dask waits for these for ever."""
    with tasks_on("odd", "fit") as (cluster, tasks):
        results = set()

        def tick(word: Any) -> None:
            if "fit" in cluster.dask.worker_spec and tasks.placement.unfit and len(results) >= 3:
                cluster.change(gone="fit", come="late")

        for outcome in tasks.run(range(COUNT), tick):
            results.add(outcome.result)
        assert "late" in cluster.dask.worker_spec
    assert results == {*range(COUNT)}
    assert [*tasks.placement.unfit.values()] == ["another kind"]


def test_a_job_that_was_served_waits_for_another_worker_that_fits() -> None:
    with tasks_on("fit") as (cluster, tasks):
        results, looks = set(), 0

        def tick(word: Any) -> None:
            nonlocal looks
            if "fit" in cluster.dask.worker_spec and len(results) >= 3:
                cluster.change(gone="fit", come="odd")
            looks += tasks.placement.fit == frozenset()
            if looks == 5:
                cluster.change(come="late")

        for outcome in tasks.run(range(COUNT), tick):
            results.add(outcome.result)
        assert looks >= 5 and tasks.placement.lanes == 1
    assert results == {*range(COUNT)}


def test_the_wait_for_a_worker_that_fits_ends() -> None:
    with tasks_on("fit", timeout_s=0.2) as (cluster, tasks):
        results = set()

        def tick(word: Any) -> None:
            if "fit" in cluster.dask.worker_spec and len(results) >= 3:
                cluster.change(gone="fit", come="odd")

        with pytest.raises(Incomplete, match="no worker of here that may take part was there for"):
            for outcome in tasks.run(range(COUNT), tick):
                results.add(outcome.result)
        assert 3 <= len(results) < COUNT


def test_a_job_that_no_worker_has_served_ends_at_once() -> None:
    with tasks_on("odd", "odder") as (_, tasks):
        outcome = next(iter(tasks.run(range(COUNT), lambda word: None)))
    assert isinstance(outcome.result, TaskFailure)
    assert (outcome.result.sentence, outcome.result.exit_code) == ("another kind", 2)


@pytest.mark.parametrize("error", [StoreFull, OutOfMemory])
def test_what_would_fail_everywhere_is_not_tried_again(error: type[Incomplete]) -> None:
    def fail(order: Any, number: int) -> None:
        cause = error("no room")
        raise StageError("write", "block 1", cause) from cause

    with tasks_on("fit", function=fail) as (_, tasks):
        (outcome,) = tasks.run([0], lambda word: None)
    assert isinstance(outcome.result, TaskFailure)
    assert outcome.result.ends_job and outcome.tries == 1 and outcome.result.exit_code == 3
