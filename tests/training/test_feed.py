"""Batches in the order of an `Order`, from any batch on; a sample that is damaged."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base import TrainConfig, UsageError, build
from penstock.loading.order import Order

if find_spec("lightning_fabric") is None:
    pytest.skip("lightning_fabric is not installed", allow_module_level=True)


pytestmark = pytest.mark.usefixtures("one_thread")


class Listed:
    def collate(self, samples: Sequence[Any]) -> list[Any]:
        return list(samples)


class Damaged:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 2:
            raise UsageError("chips/a.zarr cannot be read at chip 2")
        return index


def feed_of(threads: bool, data: Any, order: Order, workers: int) -> Any:
    """One that reads by threads, or by processes of torch's; by neither without workers."""
    from penstock.training.feed import ThreadFeed, TorchFeed

    config = build(TrainConfig, {"num_workers": workers})
    kind: Any = ThreadFeed if threads else TorchFeed
    return contextlib.closing(kind(data, order, Listed(), config, pin=False))


@pytest.mark.parametrize("threads", [False, True])
@given(
    samples=st.integers(1, 60),
    batch=st.integers(1, 7),
    ranks=st.integers(1, 4),
    first=st.integers(0, 5),
    workers=st.sampled_from([0, 1, 4]),
)
def test_a_feed_gives_the_order_from_any_batch_on(
    threads: bool, samples: int, batch: int, ranks: int, first: int, workers: int
) -> None:
    data = [100 + index for index in range(samples)]
    seen: list[int] = []
    for rank in range(ranks):
        order = Order(samples, batch, 5, "global", rank=rank, world_size=ranks)
        first = min(first, order.num_batches)
        with feed_of(threads, data, order, workers if threads else 0) as feed:
            got = list(feed.epoch(3, first))
            next(iter(feed.epoch(3, 0)))  # left early
        expected = [order.items(3, number) for number in range(first, order.num_batches)]
        assert [items.tolist() for items, _ in got] == [items.tolist() for items in expected]
        assert [values for _, values in got] == [(100 + items).tolist() for items in expected]
        seen += [index for items, _ in got for index in items.tolist()]
    if first == 0:
        assert set(seen) == set(range(samples))


@pytest.mark.parametrize(("threads", "workers"), [(False, 0), (False, 1), (True, 2)])
def test_a_wrong_sample_is_one_sentence_from_a_worker_too(threads: bool, workers: int) -> None:
    with feed_of(threads, Damaged(), Order(4, 2), workers) as feed:
        batches = iter(feed.epoch(0, 0))
        assert next(batches)[1] == [0, 1]
        with pytest.raises(UsageError) as caught:
            next(batches)
    assert str(caught.value) == "chips/a.zarr cannot be read at chip 2"


@pytest.mark.slow
def test_a_worker_that_is_signalled_as_it_begins_works_all_the_same(tmp_path, monkeypatch) -> None:
    """A batch system signals every process of a job, whatever it is at."""
    from torch.utils.data._utils import signal_handling

    from penstock.training.feed import TorchFeed

    begin = signal_handling._set_worker_signal_handlers

    def struck() -> None:
        begin()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)

    monkeypatch.setattr(signal_handling, "_set_worker_signal_handlers", struck)
    config = build(TrainConfig, {"output_dir": tmp_path, "num_workers": 2})
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    with contextlib.closing(TorchFeed([1, 2, 3, 4], Order(4, 1), Listed(), config, False)) as feed:
        assert [batch for _, batch in feed.epoch(0, 0)] == [[1], [2], [3], [4]]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before


FAILING = """
from penstock import run_training
from penstock.training.workloads.spiral import Spiral

class Fails(Spiral):
    def loss(self, model, batch):
        raise ValueError("a loss of the user's")

if __name__ == "__main__":
    run_training("failing:Fails", num_samples=203, num_workers=2, device="cpu", output_dir="out")
"""


@pytest.mark.slow
def test_a_script_whose_training_fails_comes_to_its_end(tmp_path) -> None:
    """Its traceback holds the iterator whose workers multiprocessing would wait for."""
    (tmp_path / "failing.py").write_text(FAILING)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "failing.py"],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1
    assert "ValueError: a loss of the user's" in done.stderr
