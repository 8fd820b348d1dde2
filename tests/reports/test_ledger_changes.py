"""What benchmarks speak for: twice the threads or workers, and what became of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.instruments.record import Record
from penstock.reports import mfu
from penstock.reports.ledger_changes import explain_records
from penstock.reports.queue.model import QueueModel, simulate

from ..bench.kit_queue import record as queue_record
from ..bench.kit_suite import cases, made_up
from .test_loader_report import launches


def ladder(threads: int, *seconds: float, cores: int = 8) -> list[Record]:
    """A ladder of 5 launches of each step on a machine of so many cores."""
    records = [
        record
        for name, value in zip(("L1", "L2", "L4"), seconds, strict=True)
        for record in launches(value, rung=name, threads=threads)
    ]
    limits = {"limits": {"affinity": cores}}
    return [r.model_copy(update={"environment": {**r.environment, **limits}}) for r in records]


def test_a_ladder_speaks_for_threads_and_twice_of_them_test_it() -> None:
    two, four = ladder(2, 0.1, 0.7, 0.8), ladder(4, 0.1, 0.4, 0.5)
    (change,), held, _ = explain_records(two)
    assert held == [] and change.settings == {"threads": 4}
    assert change.gain.value == pytest.approx(1.6), "0.6 of 0.8 s is decoding; half of it goes"
    assert change.gain.low == 1.0 and "--threads 4" in change.command
    assert "decode takes 612 ms of a batch, 75%" in change.why
    (change,), (held,), _ = explain_records([*two, *four])
    assert change.settings == {"threads": 8}
    assert held.verdict == "held" and held.measured.value == pytest.approx(1.6, rel=0.01)
    assert "the test in this ledger was 1.60x as fast" in held.sentence()


def test_threads_beyond_the_cores_are_not_advised() -> None:
    (change,), _, _ = explain_records(ladder(2, 0.1, 0.7, 0.8, cores=2))
    assert change.what == "4 cores in place of 2 (batch 4)"
    assert change.settings == {} and change.command == ""
    (change,), _, _ = explain_records(ladder(2, 0.7, 0.75, 0.8, cores=2))
    assert change.settings == {"threads": 4}, "reading files takes no core"


def test_a_step_that_no_thread_relieves_speaks_for_nothing() -> None:
    assert explain_records(ladder(2, 0.1, 0.15, 0.8)) == ([], [], [])


def queue(read: float, workers: int, steps: int = 30) -> list[Record]:
    feed = QueueModel(1, 2, read, 1.0)
    return [
        queue_record(simulate(feed, steps, in_hand=0), number, workers=workers, queue=2)
        for number in range(3)
    ]


def test_a_queue_speaks_for_workers_as_far_as_computing_allows() -> None:
    (change,), held, _ = explain_records(queue(1.5, 1))
    assert held == [] and change.settings == {"workers": 2}
    assert change.gain.value == pytest.approx(1.5), "then computing binds"
    assert "steps of 1.00 s wait for batches for 33% of the time" in change.why
    changes, (held,), _ = explain_records([*queue(1.5, 1), *queue(1.0, 2)])
    assert changes == [], "two workers keep it fed"
    assert held.verdict == "held" and held.measured.value == pytest.approx(1.5)
    _, (held,), _ = explain_records([*queue(1.5, 1), *queue(3.0, 2)])
    assert held.verdict == "did not hold"


def test_the_fastest_training_of_a_suite_is_set_beside_the_roof(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roofs = {("another", "cpu", "float32"): 100e9}
    monkeypatch.setattr(mfu, "known_roof", lambda *asked: roofs.get(asked))
    facts = {"flops_per_sample": 1e9, "flops_note": "", "machine_key": "another"}
    made = [made_up(case, 0, rate) for case, rate in zip(cases(tmp_path), (5.0, 9.0), strict=False)]
    for record in made:
        record.facts["training"].update(facts)
    failed = made_up(cases(tmp_path)[2], 0, 0.0, status="crash")
    (line,) = explain_records([*made, failed])[2]
    assert line.startswith("MFU (model FLOPs utilisation) 9.0% [2 epochs of one run]: it computed")


def test_a_suite_that_waits_for_data_speaks_for_workers(tmp_path: Path) -> None:
    none, two, *_ = cases(tmp_path)
    waiting = [made_up(none, number, 5.0, data_wait=5.0) for number in range(2)]
    (change,), held, _ = explain_records(waiting)
    assert held == [] and change.settings == {"num_workers": 2}
    assert change.gain.value == 2.0 and "steps wait for data for 50% of the epochs" in change.why
    fed = [made_up(two, number, 9.0, data_wait=0.1) for number in range(2)]
    changes, (held_one,), _ = explain_records([*waiting, *fed])
    assert changes == [] and held_one.verdict == "held"
    assert "[1.80-1.80, 2 launches each]; 2.00x [1.00-2.00] was expected" in held_one.sentence()
    once = [made_up(none, 0, 5.0, data_wait=5.0), made_up(two, 0, 12.0, data_wait=0.1)]
    _, (held_one,), _ = explain_records(once)
    assert held_one.verdict == "gave more" and "[1 launch each]" in held_one.sentence()
