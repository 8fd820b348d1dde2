"""The verdict of a ledger of loaders or of queues: it turns with the records."""

import pytest

from penstock.base import UsageError
from penstock.instruments.record import Record
from penstock.reports.ledger_report import report_of_records
from penstock.reports.loader.report import loader_headlines, loader_sections
from penstock.reports.queue.report import queue_headlines
from penstock.reports.queue.simulation import QueueModel, simulate

from ..bench import kit_queue
from ..bench.kit_loader import record

FAILED = {"status": "crash", "samples_s": {}}


def ladder(*seconds: float, launches: int = 5, threads: int = 2) -> list[Record]:
    """Launches of each step of a loader, each a hundredth slower than the one before."""
    return [
        record(i, value * (1 + i / 100), rung=f"L{step}", threads=threads)
        for step, value in enumerate(seconds)
        for i in range(launches)
    ]


def queued(read: float, *, iterations: int = 30) -> list[Record]:
    """Reading alone, and a queue of 8 beside a step of a second, as the model foresees them."""
    alone, beside = QueueModel(8, read, 0.0), QueueModel(8, read, 1.0)
    course = simulate(alone, iterations)
    none = {"compute": "none", "compute_time": 0.0}
    return [
        line
        for number in range(2)
        for line in (
            kit_queue.record(course, number, workers=1, queue=8, **none),
            kit_queue.record(simulate(beside, iterations), number, queue=8),
        )
    ]


def failed(records: list[Record]) -> list[Record]:
    return [one.model_copy(update=FAILED) for one in records]


def test_the_dearest_step_of_a_loader_is_named_with_what_it_would_give() -> None:
    records = ladder(0.1, 0.2, 0.3, 0.8, 0.9)[5:]
    (line,) = loader_headlines(records)
    assert line in loader_sections(records)[-1].sentences
    (line,) = loader_headlines(ladder(0.1, 0.2, 0.3, 0.8, 0.9))
    assert line == (
        "Bound by scatter (batch 4, 2 threads): 510 ms of 918 ms a batch, 56%; if it cost nothing, "
        "batches would come at most 2.25x as fast [2.15-2.36, 5 launches of each step]."
    )
    (line,) = loader_headlines(ladder(0.1, 0.7, 0.8, 0.85, 0.9))
    assert line.startswith("Bound by ") and "scatter" not in line
    (line,) = loader_headlines(ladder(0.1, 0.2, 0.3, 0.8, 0.9, launches=1))
    assert line.endswith("at most 2.25x as fast [one launch of each step, no interval].")


def test_many_ladders_are_counted() -> None:
    records = [one for n in range(1, 6) for one in ladder(0.1, 0.2, 0.3, 0.8, 0.9, threads=n)]
    *named, more = loader_headlines(records)
    assert len(named) == 3
    assert more == "2 more combinations of batch and threads are below."


def test_the_fastest_loader_is_named() -> None:
    slow = [record(i, 0.8, loader="zarr") for i in range(3)]
    (line,) = loader_headlines([*slow, *[record(i, 0.4) for i in range(3)]])
    assert line.startswith("Most samples a second of 2 cases: penstock, batch 4, 2 threads: 10.0,")
    (line,) = loader_headlines([*slow, *[record(i, 1.6) for i in range(3)]])
    assert "of 2 cases: zarr, batch 4" in line
    even = [*[record(i, 0.4 + i / 50) for i in range(3)],
            *[record(i, 0.41 + i / 50, loader="zarr") for i in range(3)]]  # fmt: skip
    (line,) = loader_headlines(even)
    assert line.endswith("3 launches], not distinguishable from 1 other.")
    (line,) = loader_headlines([record(0, 0.4), record(0, 0.9, loader="zarr")])
    assert line.endswith(", not compared with 1 other.")


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (2.66, "Bound by reading: a batch comes every 2.66 s [2.66 s - 2.66 s, 42 batches] and a "),
        (0.5, "Bound by computing: a batch comes every 500 ms [500 ms - 500 ms, 42 batch"),
    ],
)
def test_a_queue_is_bound_by_reading_or_by_computing(read: float, said: str) -> None:
    (line,) = queue_headlines(queued(read))
    assert line.startswith(said)
    assert ("A reader 2.66x as fast would keep it fed." in line) == (read == 2.66)


def test_a_queue_of_endless_iterations_is_not_simulated() -> None:
    """A damaged record took all memory."""
    records = [
        each.model_copy(update={"case": each.case | {"iterations": 10**50}}) for each in queued(2.0)
    ]
    with pytest.raises(UsageError, match=r"q holds a record .*: a case has 1e\+50 iterations"):
        report_of_records(records, "q")


def test_what_a_queue_lacks_is_said() -> None:
    records = queued(2.66)
    (line,) = queue_headlines(one for one in records if one.case["compute"] == "none")
    assert line.startswith("While nobody computes, a batch comes every 2.66 s [")
    (line,) = queue_headlines(one for one in records if one.case["compute"] != "none")
    assert line.startswith("The accelerator waited 62% of the time [")
    assert line.endswith("; reading alone was not measured.")
    (line,) = queue_headlines(queued(2.66, iterations=12))
    assert line.startswith("No case of 1 reached the steady state")
    (line,) = queue_headlines(queued(2.66, iterations=9))  # no more than the queue held at first
    assert line.startswith("No case of 1 reached the steady state")
    few = [one for one in queued(2.66, iterations=9) if one.case["compute"] == "none"]
    assert queue_headlines(few) == []


def test_a_kind_of_which_nothing_was_measured_says_so_beside_others() -> None:
    """Steps of a loader count as launches of it, and those of other kinds do not."""
    steps = ladder(0.1, 0.2, 0.3, 0.8, 0.9)[5:]
    nothing = "Nothing was measured: of 20 launches none was ok (20 crash), so the speed is not "
    verdict = report_of_records([*failed(steps), *queued(2.66)], "both").verdict
    assert verdict[0] == f"{nothing}known." and verdict[1].startswith("Bound by reading")
    verdict = report_of_records([*failed(queued(2.66)), *steps], "both").verdict
    assert verdict[0].startswith("Bound by ")
    assert verdict[1] == f"{nothing.replace('20', '4')}known."
