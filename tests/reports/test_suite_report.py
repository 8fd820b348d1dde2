"""The report of a suite, from records made up."""

import json

import pytest

from penstock.instruments.record import Record
from penstock.reports import ledger_report
from penstock.reports.suite import cell as suite_cell
from penstock.reports.suite import report as suite_report

from ..bench.kit_suite import cases, made_up


def test_a_row_holds_what_was_measured_and_null_where_nothing_was(tmp_path) -> None:
    record = made_up(cases(tmp_path)[1], 0, 5.0, data_wait=7.0)
    record.facts["training"]["ranks"][0]["phases"]["communication"] = {"total_s": 1.0}
    row = suite_cell.suite_cells([record])[0].values()
    assert row["world_size"] == 1
    assert (row["batch_size"], row["num_workers"], row["status"]) == (1, 2, "ok")
    assert row["throughput_samples_per_s"] == 5.0
    assert (row["throughput_low"], row["launches"]) == (None, 1), "one launch has no interval"
    assert (row["training_time_s"], row["epoch_times_s"]) == (13.0, [[6.0, 4.0]])
    assert (row["map"], row["loc_fscore"], row["map50"]) == (0.25, 0.5, None)
    assert (row["gpu_memory_peak_bytes"], row["gpu_utilization_percent"]) == (None, None)
    assert (row["host_memory_peak_bytes"], row["cpu_utilization_percent"]) == (3 * 2**30, 150.0)
    assert row["shares"] == {"data": 0.7, "transfer": None, "compute": 0.4, "communication": 0.1}
    assert row["limited_by"] == "data"
    assert row["folders"] == ["benchmark_quick_batch1_workers2"]


def test_what_is_not_to_be_profiled_is_null(tmp_path) -> None:
    case = cases(tmp_path, profile_memory=False, profile_gpu=False)[0]
    row = suite_cell.suite_cells([made_up(case, 0, 5.0, peak=2**30)])[0].values()
    assert row["gpu_memory_peak_bytes"] is None
    assert row["host_memory_peak_bytes"] is None
    assert row["gpu_utilization_percent"] is None
    case = cases(tmp_path)[0]
    row = suite_cell.suite_cells([made_up(case, 0, 5.0, peak=9)])[0].values()
    assert row["gpu_memory_peak_bytes"] == 9


def told(records: list[Record]) -> list[str]:
    (section,) = suite_report.suite_sections(records, [])
    return list(section.sentences)


def test_sentences_follow_the_records(tmp_path) -> None:
    slow, fast, *_ = cases(tmp_path)
    once = [made_up(slow, 0, 5.0), made_up(fast, 0, 7.0, data_wait=9.0)]
    limits, best, *_ = told(once)
    assert best == (
        "Most samples a second: batch 1, 2 workers, 7.00 [1 launch]; next is batch 1, 0 workers, "
        "5.00 [1 launch], not compared."
    )
    assert limits == (
        "Compute limits 1 of 2 runs, data limits 1 of 2 runs; batch 1, 2 workers waits longest for "
        "data, 90% of its epochs [1 launch]."
    )
    often = [made_up(slow, n, 5.0 + n / 100) for n in range(5)]
    often += [made_up(fast, n, 10.0 + n / 100) for n in range(5)]
    assert told(often)[1].startswith(
        "Most samples a second: batch 1, 2 workers, 10.0 [10.0 - 10.0, 5 launches], 2.00x as many "
        "as batch 1, 0 workers [1.9"
    )
    alike = [made_up(case, n, 5.0 + n) for case in (slow, fast) for n in range(5)]
    assert "not distinguishable from" in told(alike)[1]


def test_failures_are_rows(tmp_path) -> None:
    first, second, *_ = cases(tmp_path)
    records = [made_up(first, 0, 5.0), made_up(second, 0, 0.0, status="oom_device")]
    (section,) = suite_report.suite_sections(records, [])
    head, good, bad = section.table
    assert "GPU peak" not in head, "nobody has a value for it"
    assert (good[-1], bad[-1]) == ("ok", "oom_device")
    failed = "Batch 1, 2 workers ran out of device memory in 1 of 1 launch: no room."
    assert failed in section.sentences
    (section,) = suite_report.suite_sections(records[1:], [])
    assert section.sentences == [section.sentences[0]], "nothing else can be said"


@pytest.mark.usefixtures("undrawn")
def test_the_files_of_a_report(tmp_path) -> None:
    records = [made_up(case, 0, 5.0 + i) for i, case in enumerate(cases(tmp_path))]
    figures = ledger_report.plot_records("train", records, tmp_path / "benchmark_report")
    assert [path.name for path in figures] == ["benchmark_report.png"]
    system = {
        "machine": {"processor": "P", "cores": 2, "memory_bytes": 2**30},
        "libraries": {"torch": "2.0"}, "devices": [],
    }  # fmt: skip
    note = "preset quick is for 8 GPUs and torch finds 0 GPUs here; --anyway runs it without a GPU"
    written = suite_report.write_suite_report(tmp_path, records, [], system, [note], figures)
    document = json.loads(written[0].read_text())
    assert [run["throughput_samples_per_s"] for run in document["runs"]] == [5.0, 6.0, 7.0, 8.0]
    assert document["best"]["throughput_samples_per_s"] == 8.0
    page = written[1].read_text()
    assert "- P, 2 cores, 1.00 GiB, no GPU, torch 2.0" in page
    assert f"- {note}." in page
    assert "![benchmark_report](benchmark_report.png)" in page
    assert document["notes"] == [note]


def test_a_page_names_the_hosts_of_a_cluster(tmp_path) -> None:
    records = [
        record.model_copy(
            update={"environment": {**record.environment, "worker": {"host": f"node{n % 2}"}}}
        )
        for n, record in enumerate(made_up(case, 0, 5.0) for case in cases(tmp_path)[:3])
    ]
    (line,) = ledger_report.of_machines(records)
    assert line.endswith("; launches by host: 2 on node0 and 1 on node1")
