"""The report of a loader benchmark, its ladder and its figures, from records made up."""

from typing import Any

import pytest

from penstock.instruments.record import Record
from penstock.reports.ledger_report import loader_pictures
from penstock.reports.loader import cell as loader_cell
from penstock.reports.loader import report as loader_report
from penstock.reports.loader import rungs
from penstock.reports.loader.report import draw_ladders
from penstock.reports.table import in_text

from ..bench.kit_loader import record


def launches(seconds: float, **knobs: Any) -> list[Record]:
    return [record(i, seconds * (1 + i / 100), **knobs) for i in range(5)]


def said(records: list[Record]) -> str:
    return "\n".join(in_text(loader_report.loader_sections(records)))


def ladder_records(*seconds: float) -> list[Record]:
    records = []
    for name, value in zip(("L1", "L2", "L3", "L4"), seconds, strict=True):
        records += launches(value, rung=name)
    return records


def test_numbers_are_those_of_the_waits() -> None:
    cell = loader_cell.loader_cells(launches(0.4))[0]
    assert cell.seconds == pytest.approx(0.408)  # the median launch
    assert cell.row["decoded_mb_per_sec"] == str(round(8 / 0.408, 3)) or float(
        cell.row["decoded_mb_per_sec"]
    ) == pytest.approx(8 / 0.408, rel=1e-3)
    assert float(cell.row["samples_per_sec"]) == pytest.approx(4 / 0.408, rel=1e-3)
    assert float(cell.row["wait_max_s"]) == pytest.approx(0.4 * 1.04 * 1.5, rel=1e-3)
    assert cell.row["read_amplification"] == "1.25"
    assert [cell.row[n] for n in ("duplicates", "missing", "wrong")] == ["0", "0", "0"]


def test_a_wait_in_which_an_epoch_begins_is_not_among_the_waits() -> None:
    (one,) = [record(0, 1.0)]
    begun = one.model_copy(update={"facts": {**one.facts, "begun": [2]}})
    assert loader_cell.loader_cells([begun])[0].seconds == pytest.approx(0.75)
    assert loader_cell.loader_cells([one])[0].seconds == pytest.approx(1.0)


def test_sections_of_other_machines_name_them_and_nothing_is_compared_across() -> None:
    def there(records: list[Record]) -> list[Record]:
        return [r.model_copy(update={"environment": {"machine_key": "b"}}) for r in records]

    def here(records: list[Record]) -> list[Record]:
        return [r.model_copy(update={"environment": {"machine_key": "a"}}) for r in records]

    ours, theirs = here(launches(0.4)), there(launches(0.9, loader="zarr"))
    steps = [*launches(0.2, rung="L1", loader=None), *launches(0.5, rung="L2", loader=None)]
    text = said([*ours, *theirs, *here(steps), *there(steps)])
    assert "faster than" not in text
    assert text.count("machine a") == text.count("machine b") == 2
    assert "machine a" not in said([*ours, *here(launches(0.9, loader="zarr")), *here(steps)])


def test_sentences_follow_the_numbers() -> None:
    ours, theirs = launches(0.4), launches(0.9, loader="zarr")
    assert "penstock is 2.25x faster than zarr [" in said(ours + theirs)
    assert "2.25x slower than zarr [" in said(launches(0.9) + launches(0.4, loader="zarr"))
    same = [record(i, 0.4 * f, loader="zarr") for i, f in enumerate((0.9, 1.1, 1.0, 1.2, 0.95))]
    assert "penstock and zarr are not distinguishable [" in said(ours + same)
    assert "one launch each, not compared" in said(ours[:1] + theirs[:1])


def test_who_failed_is_told_and_a_cache_that_was_not_as_asked_for() -> None:
    text = said([*launches(0.4), record(0, 0.0, "unsupported", loader="zarr")])
    assert "zarr is not supported here: pip install 'penstock-dl[loaders]'" in text
    warm = [r.model_copy(update={"facts": {**r.facts, "resident": 0.5}}) for r in launches(0.4)]
    assert "The cache was not warm: as little as 50 % of the data was in memory" in said(warm)
    cold = [r.model_copy(update={"case": {**r.case, "cache": "cold"}}) for r in launches(0.4)]
    assert "The cache was not cold: up to 100 % of the data was in memory" in said(cold)


def test_what_of_a_cold_cache_was_read_again_is_told() -> None:
    def cold(again: float) -> list[Record]:
        return [
            r.model_copy(
                update={
                    "case": {**r.case, "cache": "cold"},
                    "facts": {**r.facts, "resident": 0.0, "again": again},
                }
            )
            for r in launches(0.4)
        ]

    text = said(cold(0.94))
    assert "cold (0 % resident), 94 % read again from memory" in text
    assert (
        "After the first batch, 94 % of the bytes had been read for an earlier batch, because a "
        "chunk holds several samples: they came from memory, even with a cold cache."
    ) in text
    assert "again" not in said(cold(0.0)) and "came from memory" not in said(cold(0.0))


@pytest.mark.usefixtures("undrawn")
def test_a_cell_of_which_a_launch_failed_is_drawn() -> None:
    records = [record(0, 0.4), record(1, 0.0, "timeout"), record(0, 0.0, "crash", loader="zarr")]
    assert [c.row["status"] for c in loader_cell.loader_cells(records)] == ["timeout", "crash"]
    figure = loader_pictures(records)[0].draw()
    (bars,) = figure.panels[0].series
    assert list(bars.y) == [pytest.approx(0.4)]
    assert figure.note.endswith("2 threads; 1 case of records")


def test_loaders_of_several_threads_are_lines_on_a_logarithmic_axis() -> None:
    records = [record(0, 0.4, loader=a, threads=n) for a in ("penstock", "zarr") for n in (1, 2)]
    (panel,) = loader_pictures(records)[0].draw().panels
    assert panel.y.log and [each.label for each in panel.series] == ["penstock", "zarr"]


def test_panels_of_ladders_hold_their_bars_whatever_the_order() -> None:
    slow = ladder_records(0.2, 0.3, 0.4, 0.5)
    fast = [r for n in ("L1", "L2") for r in launches(0.01, rung=n, threads=8)]
    figure = draw_ladders(rungs.ladders_of(slow + fast))
    assert [panel.title for panel in figure.panels] == [
        "Batches of 4, 2 threads", "Batches of 4, 8 threads",
    ]  # fmt: skip
    late = [r for n in ("L3", "L4") for r in launches(0.5, rung=n, data="s3://b/d")]
    pictures = loader_pictures(slow + fast + late)
    assert [each.name for each in pictures] == ["ladder_1", "ladder_2"]


@pytest.mark.parametrize(
    ("seconds", "sentence", "refuted"),
    [
        (  # a step alone said to cost more than the whole
            (0.00394, 0.0493, 0.0147, 0.0272),
            "Bound by loader (batch 4, 2 threads): 12.5 ms of 27.2 ms a batch, 46%",
            {"L2": "L3"},
        ),
        (
            (0.0024, 0.0302, 0.0132, 0.0161),
            "Bound by scatter with decode (batch 4, 2 threads): 10.8 ms of 16.1 ms",
            {"L2": "L3"},
        ),
    ],
)
def test_a_step_that_one_above_beats_is_not_said_to_cost_most(seconds, sentence, refuted) -> None:
    records = [r for r in ladder_records(*seconds) if r.launch == 0]
    (ladder,) = rungs.ladders_of(records)
    assert ladder.refuted == refuted
    assert sentence in ladder.sentence()
    assert "which does the same and more" in said(records)
    (sure,) = rungs.ladders_of(ladder_records(*seconds))
    assert sure.refuted == refuted, "five launches that agree say so, too"


def test_noise_refutes_no_step() -> None:
    records = ladder_records(0.12, 0.2, 0.42, 0.4)
    for number, factor in enumerate((0.8, 1.3, 1.0, 0.9, 1.2)):
        records[10 + number] = record(number, 0.42 * factor, rung="L3")
    (ladder,) = rungs.ladders_of(records)
    assert ladder.refuted == {} and ladder.limiting == "L3"


def test_far_data_is_no_share_of_a_device_and_its_network_is_named() -> None:
    far = {"data": "s3://b/d"}
    records = launches(0.5, rung="L3", **far) + launches(0.49, rung="L4", **far)
    (ladder,) = rungs.ladders_of(records)
    assert ladder.sentence().startswith(
        "Bound by all up to scatter, with the network (batch 4, 2 threads): 510 ms of 500 ms a "
    )
