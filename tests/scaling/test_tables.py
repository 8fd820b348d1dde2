"""The seed's tables to the letter; CSV and a page."""

import csv
import io
from dataclasses import replace

import pytest

from penstock.cli import main
from penstock.scaling import metrics_table, points_to_csv, runs_to_csv, speedup_table, summary_table
from penstock.scaling.tables import results_table as results_block

from .kit import only, repeated, run, seed_logs, seed_runs, sentences

SUMMARY = """\
BENCHMARK RESULTS SUMMARY
====================================================================================================
Job ID     Configuration                  GPUs   Nodes  Time (s)   Time/Epoch (s) Val Loss  Val Acc
----------------------------------------------------------------------------------------------------
123456     Single GPU                     1      1      362.45     7.25           0.1187    0.9530
123457     4 GPUs (1 node)                4      1      95.23      1.90           0.1192    0.9525
123458     8 GPUs (2 nodes)               8      2      57.14      1.14           0.1190    0.9527
====================================================================================================
"""


SPEEDUPS = """\
SPEEDUP ANALYSIS
================================================================================
Baseline (Single GPU): 362.45 seconds

Single GPU:
  Average time: 362.45 seconds
  Speedup: 1.00x
  Parallel efficiency: 100.0%

Multi-GPU (4 GPUs, 1 node):
  Average time: 95.23 seconds
  Speedup: 3.81x
  Parallel efficiency: 95.2%

Multi-Node (8 GPUs, 2 nodes):
  Average time: 57.14 seconds
  Speedup: 6.34x
  Parallel efficiency: 79.3%
================================================================================
"""


RESULTS = """\
Training Results on MPCDF Raven
=================================
Dataset: 10,000 spiral pattern samples
Model: MLP [64, 32, 16]
Epochs: 50
Base batch size: 32 per GPU

Configuration       Time      Speedup   Efficiency
--------------------------------------------------
1 GPU (baseline)    6.0 min   1.0×      100%
4 GPUs (1 node)     1.6 min   3.8×      95%
8 GPUs (2 nodes)    1.0 min   6.3×      79%

All configurations achieved ~95% validation accuracy.
"""


def test_the_seeds_tables_from_logs(tmp_path, capsys) -> None:
    assert main(["scaling", *map(str, seed_logs(tmp_path)), "--machine", "MPCDF Raven"]) == 0
    out = capsys.readouterr().out
    assert SPEEDUPS in out
    assert RESULTS in out
    expected = SUMMARY.replace("0.1192", "0.1187").replace("0.1190", "0.1187")
    for accuracy in ("0.9530", "0.9525", "0.9527"):
        expected = expected.replace(accuracy, "0.9490")
    assert expected in out
    for digits in ("3.8060", "6.3432", "95.15 %", "79.29 %", "0.016986", "0.037314", "0.028704"):
        assert digits in out
    assert "8 ranks took 56.44 to 57.14 s; the slowest counts" in out


def test_runs_on_cpus_are_not_called_gpus() -> None:
    runs = [run(n, 10 / n, nodes=n, device="cpu") for n in (1, 2)]
    text = "\n".join(
        [*summary_table(runs), *speedup_table(only(runs)), *results_block(only(runs), "x")]
    )
    assert "GPU" not in text
    assert "Single process" in text
    assert "Multi-Node (2 processes, 2 nodes):" in text
    assert "10.0 s" in text


def test_a_run_that_did_not_tell_its_device_is_of_devices() -> None:
    """A job on CPUs that broke off early was called one of GPUs."""
    whole, partial = run(1, 10.0, device="cpu"), run(2, None, device=None, status="unfinished")
    lines = summary_table([whole, partial])
    assert lines[2].split()[3] == "Count"
    assert lines[5].startswith("102        2 devices (1 node) ")
    runs = [run(n, 10 / n, device=None) for n in (1, 2)]
    text = "\n".join([*speedup_table(only(runs)), *results_block(only(runs), "x"), sentences(runs)])
    assert "GPU" not in text and "process" not in text
    for line in ("Baseline (Single device)", "Multi-Device (2 devices, 1 node):", "32 per device"):
        assert line in text


def test_a_run_that_diverged_is_named_and_its_scores_are_not_compared() -> None:
    runs = repeated(lambda n: n, (1, 4), val_loss=0.12)
    runs[-1] = replace(runs[-1], diverged=True, job="77", source="slurm-77.out")
    text = "\n".join([*summary_table(runs), sentences(runs)])
    assert "Job 77 diverged (slurm-77.out): one of its losses is not a number" in text
    assert sum(line.split()[-2:] == ["nan", "-"] for line in summary_table(runs)) == 1
    assert "Validation loss is 0.1200 to 0.1200 over 9 runs" in text
    assert "+nan" not in text
    alone = [run(1, 40, val_loss=0.1), run(4, 10, val_loss=0.1, diverged=True)]
    assert "Validation loss" not in sentences(alone)
    assert metrics_table(alone).table[2][3] == "nan"


def test_what_broke_off_has_a_star_and_a_line() -> None:
    runs = [
        run(1, 362.45),
        run(4, None, job="7", status="cancelled", epochs=20, val_loss=0.2),
        run(8, None, job="8", status="preempted", epochs=None, restarts=1),
        run(8, 20.0, job="9", epochs=30),
    ]
    lines = summary_table(runs)
    assert lines[5].startswith("7          4 GPUs (1 node)                4      1      -*")
    assert lines[7].split()[7:9] == ["20.00*", "0.67"]
    assert lines[-3:] == [
        "* 7: was cancelled after 20 of 50 epochs; not compared.",
        "* 8, attempt 2: was preempted; not compared.",
        "* 9: its time is of 30 of 50 epochs; not compared.",
    ]


def test_csv_has_a_row_for_each_configuration() -> None:
    rows = list(csv.DictReader(io.StringIO(points_to_csv([only(seed_runs())], []))))
    assert [row["devices"] for row in rows] == ["1", "4", "8"]
    assert float(rows[2]["efficiency"]) == pytest.approx(0.7929, abs=1e-4)
    assert rows[0]["karp_flatt"] == rows[0]["efficiency_low"] == ""
    assert rows[1]["val_loss"] == "0.1192"
    runs = [*seed_runs(), run(4, 3.0, status="crashed"), run(8, 7.0, epochs=7)]
    *same, crashed, partial = csv.DictReader(io.StringIO(points_to_csv([only(runs)], runs)))
    assert same == rows and {row["status"] for row in rows} == {"complete"}
    assert [(r["kind"], r["seconds"], r["status"]) for r in (crashed, partial)] == [
        ("not compared", "3", "crashed"), ("not compared", "7", "partial"),
    ]  # fmt: skip
    bare = run(1, None, nodes=None, epochs=None, status="crashed")
    *_, row = csv.DictReader(io.StringIO(runs_to_csv([run(1), bare])))
    assert (row["status"], row["seconds"]) == ("crashed", "")
    assert summary_table([bare])[4].split()[4:] == ["-", "-*", "-", "-", "-"]


def test_metrics_answer_the_three_greps() -> None:
    used = run(1, 362.45, val_loss=0.1187, utilisation=(96.0, 98.0))
    _, line = metrics_table([used]).table
    assert line[2:] == ("362.45 seconds (6.04 minutes)", "0.1187", "97 % (2 readings)")
    _, line = metrics_table([run(1, None, status="crashed", source="a\nb")]).table
    assert line[2:] == ("not logged", "-", "not logged")
    assert line[0] == "a b"
    _, line = metrics_table([replace(used, utilisation=(96.0,))]).table
    assert line[-1] == "96 % (1 reading)"


def test_accuracies_that_differ_are_not_called_equal() -> None:
    runs = seed_runs()
    *_, last = results_block(only([*runs[:2], run(8, 57.14, val_acc=0.80)]), "x")
    assert last == "Validation accuracy is from 80% to 95%."


@pytest.mark.parametrize("seconds", [93784.0, 12.0, 5_400_000.0])
def test_every_cell_stands_below_the_head_of_its_column(seconds: float) -> None:
    """Also 1563.1 min, a job of an array, and a time of a week."""
    runs = [run(1, 1.5 * seconds, job="1234567_12345"), run(4, seconds, job="b" * 40)]
    block, summary = results_block(only(runs), "x"), summary_table(runs)
    for lines, heads in ((block, ("Time", "Speedup", "Efficiency")),
                         (summary, ("Configuration", "Time (s)", "Val Acc"))):  # fmt: skip
        row = next(i for i, line in enumerate(lines) if heads[0] in line and heads[-1] in line)
        for head in heads:
            place = lines[row].index(head)
            for line in lines[row + 2 : row + 4]:
                assert line[place - 1] == " " and line[place] != " ", line
