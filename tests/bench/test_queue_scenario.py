"""Scenario ``queue`` against scripted loaders and clocks, and the verb."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.base import BenchQueueConfig, StageError, UsageError, build
from penstock.bench import Rules, case_namer, measure_scenario, queue_cases, series_rules
from penstock.bench.scenarios import WrongResult
from penstock.bench.scenarios.queue import FromLoader, InPlace, QueueScenario
from penstock.cli import main
from penstock.cli.bench import queue_outcome as outcome
from penstock.instruments import Failure, Ledger, Record
from penstock.loading.order import Endless, Order
from penstock.reports.queue.simulation import QueueModel, simulate

from ..rows import rows_of
from .kit_loader import weather
from .kit_queue import CASE
from .records import made_record


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return weather(tmp_path_factory.mktemp("packed") / "data", samples=7)


class World:
    """A clock, and a loader and a step that take time on it: the simulation as a stand-in."""

    def __init__(self, feed: QueueModel, iterations: int) -> None:
        self.now = 0.0
        self.timeline = simulate(feed, iterations)
        self.waits = [took - feed.compute_s for took in self.timeline.seconds]
        self.said: list[str] = []
        self._iteration = -1

    def clock(self) -> float:
        return self.now

    def get(self) -> Mapping[str, Any]:
        if self._iteration >= 0:
            self.now += self.waits[self._iteration]
        self.said.append("get")
        return {"inputs": np.zeros((2, 3)), "targets": np.zeros((2, 1))}

    def fill(self) -> None:
        self.said.append("fill")
        self.now += 100.0
        self._iteration = 0

    def depth(self) -> int:
        self._iteration += 1
        return self.timeline.left[self._iteration - 1]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def close(self) -> None:
        self.said.append("close")


def test_a_launch_is_an_iteration_for_each_sample_from_a_full_queue(monkeypatch) -> None:
    world = World(QueueModel(4, read_s=2.0, compute_s=1.0), 12)
    monkeypatch.setattr(time, "sleep", world.sleep)
    scenario = QueueScenario(CASE, world)
    result = measure_scenario(scenario, Rules(**series_rules(12)), lambda stage: None, world.clock)
    assert result["samples_s"]["step"] == pytest.approx(world.timeline.seconds)
    assert result["samples_s"]["get"] == pytest.approx(world.waits)
    assert result["samples_s"]["compute"] == pytest.approx([1.0] * 12)
    assert result["warmup"]["first_s"] == 100.0  # the prefill is told apart
    assert result["facts"]["left"] == world.timeline.left == [3, 3, 2, 2, 1, 1, 0, *[0] * 5]
    assert result["work"] == {"samples": 2}
    assert world.said[:2] == ["get", "fill"]
    assert world.said.count("fill") == 1


def test_a_batch_of_another_length_is_wrong() -> None:
    world = World(QueueModel(1, 1.0, 1.0), 1)
    with pytest.raises(WrongResult, match=r"a batch of 3 came with \[2\] samples"):
        QueueScenario({**CASE, "batch": 3}, world).step(lambda name: None)


def same(a: Mapping[str, NDArray[Any]], b: Mapping[str, NDArray[Any]]) -> bool:
    return set(a) == set(b) and all(np.array_equal(a[name], b[name]) for name in a)


def test_batches_are_the_same_with_and_without_readers_over_many_epochs(data: Path) -> None:
    case = {**CASE, "data": str(data), "queue": 2}
    with contextlib.ExitStack() as closing:
        ways = [FromLoader({**case, "workers": 2}), InPlace({**case, "workers": 0})]
        for way in ways:
            closing.callback(way.close)
        seen = []
        for _ in range(8):  # of seven samples, three batches of two to the epoch
            a, b = (way.get() for way in ways)
            assert same(a, b)
            seen.append(a["inputs"][:, 0, 0, 0].tolist())
            del a, b
    epochs = [sorted(np.concatenate(seen[i : i + 3])) for i in (0, 3)]
    assert all(len(set(epoch)) == 6 for epoch in epochs)  # no sample twice within an epoch
    assert seen[:3] != seen[3:6]


def test_the_queue_of_the_loader_fills_and_is_counted(data: Path) -> None:
    way = FromLoader({**CASE, "data": str(data), "queue": 3})
    way.get()
    way.fill()
    assert way.depth() == 3
    way.close()


def test_a_reader_that_fails_ends_the_prefill_and_is_told(data: Path, tmp_path) -> None:
    import shutil

    torn = shutil.copytree(data, tmp_path / "torn")
    for chunk in (torn / "targets.zarr").glob("*.0.0.0"):
        chunk.write_bytes(b"")
    way = FromLoader({**CASE, "data": str(torn), "queue": 2})
    way.fill()
    with pytest.raises(StageError, match=r"targets\.zarr"):
        way.get()


def test_an_endless_order_is_its_epochs_one_after_the_other() -> None:
    order = Order(num_samples=7, batch_size=2, seed=3, shuffle="sample", drop_last=True)
    for reshuffled in (False, True):
        endless = Endless(**asdict(order), reshuffled=reshuffled)
        for batch in range(9):
            turn, place = divmod(batch, 3)
            wanted = order.items(turn * reshuffled, place)
            assert endless.items(0, batch).tolist() == wanted.tolist()
        each = [endless.items(1, batch).tolist() for batch in range(2, 9)]
        assert [items.tolist() for items in endless.run_of_items(1, range(2, 9))] == each


def config(**knobs: Any) -> BenchQueueConfig:
    return build(BenchQueueConfig, knobs)


def test_for_each_number_of_workers_one_case_only_reads(tmp_path) -> None:
    cases = queue_cases(str(tmp_path), config(workers=(0, 2), queue_sizes=(1, 8, 1)))
    assert list(map(case_namer(cases, "workers", "queue"), cases)) == [
        "workers 0, queue 0, compute none, compute_time 0.0",
        "workers 0, queue 0, compute sleep, compute_time 1.0",
        "workers 2, queue 8, compute none, compute_time 0.0",
        "workers 2, queue 1, compute sleep, compute_time 1.0",
        "workers 2, queue 8, compute sleep, compute_time 1.0",
    ]
    assert len({frozenset(case) for case in cases}) == 1  # the same knobs in each


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"iterations": 10}, "--iterations 10 must be 4 more at least than .* --queue-sizes, 8"),
        ({"iterations": 2}, "--iterations"),
        ({"compute_time": 0}, "--compute-time 0"),
        ({"queue_sizes": (0,)}, "--queue-sizes"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        queue_cases(str(tmp_path), config(**knobs))


def failed(status: Any, message: str) -> Any:
    """A sweep whose every launch ends so."""

    def sweep(scenario: str, cases: Sequence[dict[str, Any]], *_: Any, **__: Any) -> list[Record]:
        error = Failure(stage="setup", message=message)
        return [made_record(scenario, case, status=status, error=error) for case in cases]

    return sweep


@pytest.mark.parametrize(
    ("status", "message", "code"),
    [
        ("crash", "it fell", 1),
        ("wrong_result", "a batch came with [2] samples", 1),
        ("unsupported", "--model none: there is no such model", 1),
        ("unsupported", "torch is not installed; run: pip install 'penstock-dl[infer]'", 0),
    ],
)
def test_the_exit_code_of_launches_that_failed(
    data: Path, tmp_path, monkeypatch, capsys, status: str, message: str, code: int
) -> None:
    fine = SimpleNamespace(error=None)
    monkeypatch.setattr("penstock.cli.bench.ask_worker", lambda scenario, case, *_: fine)
    monkeypatch.setattr("penstock.cli.benchmarks.run_sweep", failed(status, message))
    words = ["bench", "queue", str(data), "--output", str(tmp_path / "queue.csv")]
    assert main([*words, "--batch-size", "2", "--workers", "1", "--queue-sizes", "1"]) == code
    assert message in capsys.readouterr().out
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.slow
@pytest.mark.usefixtures("launches_here")
def test_a_small_benchmark_from_end_to_end(data: Path, tmp_path, capsys) -> None:
    out = tmp_path / "queue.csv"
    flags = "--workers 1 --queue_sizes 2 --batch_size 2 --iterations 8 --compute_time 0.01"
    assert main(["bench", "queue", str(data), *flags.split(), "--output", str(out)]) == 0
    (row,) = rows_of(out)
    assert (row["workers"], row["queue"], row["status"]) == ("1", "2", "ok")
    assert float(row["compute_time"]) == 0.01
    assert len(row["iteration_s"].split()) == len(row["depth"].split()) == 8
    assert float(row["seconds_per_iteration"]) >= 0.01
    records = Ledger(out.with_suffix(".ledger")).records()
    assert {record.case["compute"] for record in records} == {"none", "sleep"}
    assert all(set(record.samples_s) == {"step", "get", "compute"} for record in records)
    assert "iteration" in outcome(next(r for r in records if r.case["compute"] == "sleep"))
    assert out.with_suffix(".png").exists()
    said = capsys.readouterr().out
    assert "- With 1 worker " in said
    assert "While nobody computed a batch came every" in said
