"""The report of a queue benchmark and its figures, from records as the simulation has them."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from penstock.cli import main
from penstock.instruments.record import Failure, Record, case_key
from penstock.reports.ledger_report import queue_pictures
from penstock.reports.queue import cell as queue_cell
from penstock.reports.queue import report as queue_report
from penstock.reports.queue.simulation import QueueModel, simulate
from penstock.reports.table import in_text

from ..bench.kit_queue import record
from ..rows import rows_of


def run(
    read: float, queues: Sequence[int] = (1, 8), launches: int = 2, slow: float = 1.0
) -> Iterator[Record]:
    """Records as they would be if the simulation were the world; ``slow`` makes reading beside a
    step so many times slower than alone."""
    for number in range(launches):
        alone = {"compute": "none", "compute_time": 0.0}
        for workers, queue in ((0, 0), (1, 8)):
            course = simulate(QueueModel(queue if workers else 0, read, 0.0), 30)
            yield record(course, number, workers=workers, queue=queue, **alone)
        feed = QueueModel(0, read * slow, 1.0)
        yield record(simulate(feed, 30), number, workers=0, queue=0)
        for queue in queues:
            feed = QueueModel(queue, read * slow, 1.0)
            yield record(simulate(feed, 30), number, queue=queue)


def test_a_world_like_the_simulation_is_simulated_without_an_error() -> None:
    (group,) = queue_cell.queue_cells(run(2.66))
    names = ["0 workers", "1 worker, queue 1", "1 worker, queue 8"]
    assert [course.name for course in group] == names
    for course in group:
        assert course.alone is not None and course.alone.value == pytest.approx(2.66)
        assert course.simulated.mean_s == pytest.approx(course.means[0])
        assert set(course.cleared) <= {course.simulated.cleared}
    row = group[2].row
    assert row["cleared"] == row["simulated_cleared"] == "11"
    assert float(row["steady_s"]) == pytest.approx(2.66)
    assert row["depth"].split()[:4] == ["7", "6", "6", "5"]


def test_sentences_follow_the_data() -> None:
    (slow,) = queue_cell.queue_cells(run(2.66))
    said = queue_report.sentences(slow)
    assert said[0] == (
        "With 0 workers a step took 3.66 s [3.66 s - 3.66 s, 58 iterations] in the steady state. "
        "While nobody computed a batch came every 2.66 s [2.66 s - 2.66 s, 58 batches], and each "
        "step waits for it."
    )
    assert said[1].startswith("With 1 worker a step took 2.66 s [2.66 s - 2.66 s, 56 iterations]")
    assert "(queue 1), 2.66 s [" in said[1] and "(queue 8) in the steady state." in said[1]
    assert said[1].endswith("more than a step alone, 1.00 s.")
    assert said[2] == (
        "With 1 worker a queue of 8 in place of 1 does not change the steady state: +0.0 % "
        "[+0.0 to +0.0 %, 2 launches]."
    )
    assert said[-1].startswith("Bound by reading: ")
    (fast,) = queue_cell.queue_cells(run(0.5))
    said = queue_report.sentences(fast)
    assert "no more than a step alone, 1.00 s, so the queue would stay full." in said[1]
    assert "the accelerator waited 0% of the time" in said[-1]


def test_a_queue_that_is_not_cleared_yet_shows_no_steady_state() -> None:
    """R is 1.25 s: a queue of 8 lasts for 35 of 30 steps."""
    (group,) = queue_cell.queue_cells(list(run(1.25, queues=(1, 2, 4, 8))))
    deep = group[-1]
    assert deep.queue == 8 and set(deep.cleared) == {None}
    assert deep.steady is None and deep.row["steady_s"] == deep.row["steady_utilisation"] == ""
    said = queue_report.sentences(group)
    (one,) = queue_report.sentences([deep])[:1]
    assert one.startswith("With 1 worker no case reached the steady state. While nobody")
    assert any("queue of 4 in place of 1 does not change the steady state" in line for line in said)
    unseen = "The steady state was not reached within the 30 iterations with 1 worker, queue 8: "
    assert f"{unseen}use more --iterations of bench queue." in said
    assert not any("queue of 8" in line for line in said)


@pytest.mark.parametrize("alone", [None, 0.9])
def test_a_queue_that_sinks_is_not_full_for_good_whatever_was_foreseen(alone: float | None) -> None:
    """Nothing is foreseen, or that reading keeps up; beside a step it does not."""
    records = list(run(1.25)) if alone is None else list(run(alone, slow=1.25 / alone))
    if alone is None:
        records = [one for one in records if one.case["compute"] != "none"]
    (group,) = queue_cell.queue_cells(records)
    assert [course.steady is None for course in group] == [False, False, True]
    (full,) = queue_cell.queue_cells(run(0.5))
    assert [course.steady and course.steady.value for course in full] == [1.5, 1.0, 1.0]


def test_what_a_full_queue_held_passes_no_verdict() -> None:
    """The drain of benchmarks/results: 26.7 ms are 64 % of the 41.9 ms that a batch takes."""
    (group,) = queue_cell.queue_cells(run(41.9 / 26.7))
    deep = group[-1]
    (utilisation,) = set(np.round(deep.steady_utilisations, 9))
    assert utilisation == pytest.approx(26.7 / 41.9)
    assert min(deep.utilisations) > 0.7
    best = "waited 36% of the time [36% - 36%, 2 launches] at best, with 1 worker, queue 1."
    assert best in queue_report.sentences(group)[-1]
    (heads, *lines) = queue_report.table(group)
    at = [heads.index(name) for name in ("queue", "AU steady", "AU of all")]
    assert [lines[-1][column] for column in at] == ["8", "63.7 %", "84.0 %"]
    assert float(deep.row["utilisation"]) > 0.7  # by the formula alone, as ever


def test_reading_that_a_step_slows_down_is_not_as_simulated() -> None:
    (group,) = queue_cell.queue_cells(run(1.5, slow=2.0))
    deep = group[-1]
    assert (deep.row["cleared"], deep.row["simulated_cleared"]) == ("10", "21")


def test_one_launch_is_not_compared() -> None:
    (group,) = queue_cell.queue_cells(run(2.66, launches=1))
    assert any("which is not compared" in line for line in queue_report.sentences(group))


def test_a_failed_case_is_a_row_and_a_sentence() -> None:
    records = list(run(2.66))
    error = Failure(stage="measure", message="it fell")
    failed = {"status": "crash", "samples_s": {}, "facts": {}, "error": error}
    fell = records[3].model_copy(update=failed)
    others = [r for r in records if r.key != fell.key]
    (group,) = queue_cell.queue_cells([*others, fell])
    assert "1 worker, queue 1: crash: it fell." in queue_report.sentences(group)
    assert any("crash" in line for line in in_text(queue_report.queue_sections([*others, fell])))


@pytest.mark.usefixtures("undrawn")
def test_readings_alone_are_a_page_of_their_own(tmp_path) -> None:
    """What ``tune loader`` leaves."""
    ledger = tmp_path / "tuned.jsonl"
    readings = [
        record(simulate(QueueModel(4, 0.5, 0.0), 12), number, workers=workers,
               compute="none", compute_time=0.0)
        for number in range(2) for workers in (1, 2)
    ]  # fmt: skip
    ledger.write_text("".join(f"{one.model_dump_json(by_alias=True)}\n" for one in readings))
    assert main(["report", str(ledger)]) == 0
    folder = tmp_path / "tuned.report"
    assert {path.name for path in folder.iterdir()} == {"report.md", "queue.csv", "queue.png"}
    page = (folder / "report.md").read_text()
    assert "read while nobody computes" in page
    assert "| 2 | 4 | 0.500 | 0.500 - 0.500 | 4.00 | 14 | 2 | ok |" in page
    rows = rows_of(folder / "queue.csv")
    assert [(r["read_s"], r["utilisation"]) for r in rows] == [("0.5", "")] * 2
    # Beside steps, a reading is what these are predicted from, and no row.
    assert len(queue_cell.queue_cells(run(2.66))) == 1


def test_steps_of_two_lengths_have_a_figure_each() -> None:
    records = list(run(2.66, launches=1))
    longer = [
        one.model_copy(update={"case": case, "key": case_key("queue", case), "id": f"{one.id}-2"})
        for one in records
        if one.case["compute"] != "none"
        for case in [{**one.case, "compute_time": 2.0}]
    ]
    names = [picture.name for picture in queue_pictures(records + longer)]
    assert names == ["queue_1", "queue_2"]


def test_depths_and_seconds_are_measured_and_simulated() -> None:
    (group,) = queue_cell.queue_cells(run(5.0, queues=(1,)))
    depth, seconds = queue_report.draw_queue(group, "records").panels
    assert depth.x.whole and depth.y.whole
    assert [each.label for each in depth.series] == ["queue 1", "queue 1, simulated"]
    assert [each.label for each in seconds.series] == ["measured", "simulated"]
    assert seconds.y.unit == "s"
