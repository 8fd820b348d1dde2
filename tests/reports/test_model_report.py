"""What a report of models says: sentences that follow the data, tables, groups."""

import re
from collections.abc import Sequence

import pytest

from penstock.base import UsageError
from penstock.instruments.record import Record
from penstock.reports import report_of_records
from penstock.reports.cell import cell_ratio
from penstock.reports.model.cell import ModelCell, model_cells
from penstock.reports.model.report import labelled, model_sections
from penstock.reports.page import append_csv
from penstock.reports.table import MB, in_text

from .kit import MEASURED, launch, sweep


def told(records: Sequence[Record]) -> list[str]:
    return [line for section in model_sections(records) for line in section.sentences]


def test_the_seeds_sentences_come_out_of_the_seeds_numbers() -> None:
    lines = told(sweep(MEASURED))
    assert [re.sub(r"[\d.]+-[\d.]+", "..", line) for line in lines] == [
        "Batch 1: 384 is 1.54x slower per sample than 256 [.., 5 launches each].",
        "Batch 1: 384 processes 46 % more pixels per second than 256 [.. %, 5 launches each].",
        "Batch 2: 384 is 1.69x slower per sample than 256 [.., 5 launches each].",
        "Batch 2: 384 processes 33 % more pixels per second than 256 [.. %, 5 launches each].",
        (
            "Batch 2 improves throughput over batch 1 by 36 % (256) [.. %, 5 launches each] and "
            "24 % (384) [.. %, 5 launches each]."
        ),
    ]


@pytest.mark.parametrize("damage", [{"environment": {"machine": 5}}, {"case": {"tile": "256"}}])
def test_a_damaged_record_is_no_defect(damage: dict[str, object]) -> None:
    records = [each.model_copy(update=damage) for each in sweep(MEASURED)]
    with pytest.raises(UsageError, match="b holds a record that is not as Penstock wrote it"):
        report_of_records(records, "b")


def test_a_sentences_interval_is_that_of_the_ratio() -> None:
    records = sweep(MEASURED)
    small, large = (c for c in model_cells(records) if c.batch == 1)
    time = cell_ratio(small, large)
    first, second = told(records)[:2]
    assert f"[{time.low:.2f}-{time.high:.2f}, 5 launches each]" in first
    pixels = [(384 / 256) ** 2 / end for end in (time.high, time.low)]
    assert f"[{pixels[0] * 100 - 100:.0f}-{pixels[1] * 100 - 100:.0f} %, 5" in second


def test_other_data_other_text() -> None:
    faster = told(sweep(MEASURED | {(384, 1): 20.0}))
    assert faster[0].startswith("Batch 1: 384 is 1.49x faster per sample than 256 [")
    assert "384 processes 234 % more pixels" in faster[1]
    slower = told(sweep({(256, 1): 10.0, (384, 1): 40.0, (256, 2): 21.0}))
    assert "384 processes 44 % fewer pixels per second than 256" in slower[1]
    assert "Batch 2 lowers throughput over batch 1 by 4.8 % (256)" in slower[2]


def test_what_an_interval_covers_is_not_distinguishable() -> None:
    same = {(256, 2): 20.0, (384, 2): 20.1, (256, 4): 40.1, (512, 4): 160.0}
    lines = told(sweep(same))
    assert lines[0].startswith("Batch 2: 384 and 256 are not distinguishable per sample [0.9")
    assert lines[0].endswith("5 launches each].")
    assert lines[3].startswith("Batch 4: 512 and 256 are not distinguishable in pixels per second")
    assert lines[4].startswith("Batch 4 and batch 2 are not distinguishable in throughput (256)")
    apart = told(sweep(same, spread=0.0001))
    assert not any("not distinguishable per sample" in line for line in apart)


def test_of_many_tiles_neighbours_are_compared() -> None:
    lines = told(sweep({(64 * i, 1): 10.0 * i for i in range(1, 7)}))
    pairs = [re.findall(r"\b(\d+) is .* than (\d+)", line) for line in lines]
    assert [pair for (pair,) in filter(None, pairs)] == [
        *[("128", "64"), ("192", "128"), ("256", "192"), ("320", "256"), ("384", "320")]
    ]


def test_one_launch_is_never_compared() -> None:
    assert told(sweep(MEASURED, launches=1)) == ["One launch each: not compared."]
    uneven = sweep({(256, 1): 30.0}) + sweep({(384, 1): 60.0, (256, 2): 50.0}, launches=1)
    assert told(uneven) == [
        "Batch 1: 384 and 256: 1 and 5 launches, not compared.",
        "Batch 2 and 1 (256): 1 and 5 launches, not compared.",
    ]


def test_useful_pixels_decide_and_are_named() -> None:
    """A halo turns the ranking of tiles round: the point that the seed missed."""
    times = {(128, 1): 10.0, (256, 1): 44.0}
    assert "256 processes 9.1 % fewer pixels per second" in told(sweep(times))[1]
    haloed = told(sweep(times, case={"halo": 32}))[1]
    assert "256 processes 105 % more useful pixels (halo 32) per second" in haloed


def test_troubles_are_told() -> None:
    oom = [launch(512, 4, n, status="oom_host", memory={"host_peak": 3 * 2**30}) for n in range(3)]
    unsteady = [launch(256, 1, n, warmup={"settled": n > 1}) for n in range(5)]
    cliff = [launch(384, 1, n, memory={"alloc_retries": 3}, status="ok") for n in range(5)]
    lines = told([*unsteady, *cliff, launch(384, 1, 5, status="timeout"), *oom])
    assert lines[:3] == [
        "Batch 1: 256 was still unsteady after warm-up in 2 of 5 launches.",
        (
            "Batch 1: 384 did not end in time in 1 of 6 launches and was short of memory: the "
            "allocator gave its cache back 3 times."
        ),
        "Batch 4: 512 ran out of host memory in 3 of 3 launches (last peak 3.00 GiB).",
    ]


def test_only_tile_and_batch_are_compared() -> None:
    other = {"amp": True}, {"mode": "train"}, {"dtype": "bfloat16"}, {"device": "cuda:0"}
    records = [record for case in other for record in sweep({(384, 2): 50.0}, case=case)]
    records += sweep({(256, 1): 30.0}) + sweep(
        {(384, 1): 10.0}, environment={"machine_key": "elsewhere"}
    )
    assert told(records) == []
    assert [section.title for section in model_sections(records)] == [
        "prithvi-refiner-tiny, inference, cpu, machine here",
        "prithvi-refiner-tiny, inference, cpu, machine elsewhere",
        "prithvi-refiner-tiny, inference, cpu, amp, machine here",
        "prithvi-refiner-tiny, train, cpu, machine here",
        "prithvi-refiner-tiny, inference, cpu, dtype bfloat16, machine here",
        "prithvi-refiner-tiny, inference, cuda:0, machine here",
    ]


def test_groups_of_rows_and_of_cells_are_the_same(tmp_path) -> None:
    records = sweep(MEASURED) + sweep(MEASURED, case={"compile": True})
    append_csv("model", records, tmp_path / "bench.csv")
    measured = labelled(model_cells(records))
    read = labelled(ModelCell.of_csv(tmp_path / "bench.csv"))
    assert [label for label, _ in read] == [label for label, _ in measured]
    for (_, one), (_, other) in zip(read, measured, strict=True):
        assert [cell.row for cell in one] == [cell.row for cell in other]
        assert [(c.tile, c.batch) for c in one] == [(c.tile, c.batch) for c in other]
    assert labelled([]) == []


def test_the_table_says_what_is_known() -> None:
    records = sweep(MEASURED, memory={"host_peak": 2**30})
    records.append(launch(512, 4, status="oom_host"))
    lines = in_text(model_sections(records))
    assert lines[0] == "prithvi-refiner-tiny, inference, cpu"
    head = re.split(r"  +", lines[2].strip())
    assert head == [
        *("tile", "batch", "step", "95 %", "samples/s", "px/s"),
        *("host peak", "launches", "status"),
    ]
    first = re.split(r"  +", lines[3].strip())
    assert first[:3] + first[4:] == [
        *("256", "1", "29.7 ms"),
        *("33.6", "2.21 M", "1.00 GiB", "5", "ok"),
    ]
    assert re.split(r"  +", lines[7].strip()) == ["512", "4", *"-----", "0", "oom_host"]
    assert lines[9] == "- Batch 4: 512 ran out of host memory in 1 of 1 launch."
    assert "useful px/s" in in_text(model_sections(sweep(MEASURED, case={"halo": 8})))[2]


def test_a_hot_card_is_told() -> None:
    hot = [{"throttle_reasons": 0x1}, {"throttle_reasons": 0x64}, {"throttle_reasons": None}]
    lines = told(launch(384, 1, n, clocks=hot) for n in range(2))
    assert lines[0] == "Batch 1: 384 had its clocks held down by its power cap and heat."


def test_a_line_of_the_table_is_of_one_kind_and_a_long_tail_is_told() -> None:
    """2 samples in a step of 56.8 ms were told as 23.4 a second, which was of the mean."""
    tailed = [launch(256, 2, n, (0.0568,) * 9 + (0.4,) * 2) for n in range(3)]
    (section,) = model_sections(tailed)
    head, line = section.table
    cells = dict(zip(head, line, strict=True))
    assert (cells["step"], cells["samples/s"]) == ("56.8 ms", "35.2")
    assert any("took 119 ms in the mean and 56.8 ms in the median" in s for s in section.sentences)
    (row,) = (cell.row for cell in model_cells(tailed))
    assert float(row["throughput_samples_per_sec"]) == pytest.approx(
        2e3 / float(row["avg_time_ms"])
    )
    even = [launch(256, 2, n, (0.0568,) * 9) for n in range(3)]
    assert not any("in the mean" in s for s in model_sections(even)[0].sentences)


def test_under_a_budget_the_peak_is_what_the_kernel_counts() -> None:
    """922 MiB were resident, with a "margin of 10 %", where the kernel had counted 1,024."""
    memory = {"host_peak": 922 * MB, "host_counted": 1024 * MB}
    (free,) = model_cells([launch(256, 1, memory=memory)])
    (bound,) = model_cells([launch(256, 1, memory=memory, case={"budget": 1024 * MB})])
    assert (free.memory, bound.memory) == (922 * MB, 1024 * MB)
