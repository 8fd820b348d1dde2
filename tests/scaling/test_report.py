"""The seed's tables to the letter, sentences that follow the data, the verb and its exit codes."""

from __future__ import annotations

import csv
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.base.outputs import REGISTER
from penstock.cli import main
from penstock.scaling.figures import draw_efficiency, draw_epoch, draw_speedup, draw_utilisation
from penstock.scaling.intervals import difference
from penstock.scaling.report import (
    metrics_table,
    points_to_csv,
    runs_to_csv,
    scaling_markdown,
    scaling_sections,
)
from penstock.scaling.runs import Rank, TrainingRun
from penstock.scaling.study import Study, studies
from penstock.scaling.tables import results_table as results_block
from penstock.scaling.tables import speedup_table, summary_table

from .zoo import log, repeated, results, run, seed_runs, write

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


def only(runs: list[TrainingRun], baseline: int | None = None) -> Study:
    (study,) = studies(runs, baseline, False)
    return study


def sentences(runs: list[TrainingRun], baseline: int | None = None) -> str:
    (section,) = scaling_sections(only(runs, baseline), baseline is not None)
    return "\n".join(section.told)


# --- the seed's ---------------------------------------------------------------------------------


def test_the_seeds_tables_to_the_letter() -> None:
    assert "\n".join(summary_table(seed_runs())) + "\n" == SUMMARY
    study = only(seed_runs())
    assert "\n".join(speedup_table(study)) + "\n" == SPEEDUPS
    assert "\n".join(results_block(study, "MPCDF Raven")) + "\n" == RESULTS


def seed_logs(folder: Path) -> list[Path]:
    """The seed's three jobs as their logs."""
    jobs = ((1, 362.45, 1), (4, 95.23, 1), (8, 57.14, 2))
    return write(
        folder,
        {
            f"slurm-{123456 + i}.out": log(str(123456 + i), n, seconds, nodes=nodes, ranks=n)
            for i, (n, seconds, nodes) in enumerate(jobs)
        },
    )


def test_the_seeds_tables_from_logs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = seed_logs(tmp_path)
    assert main(["scaling", *map(str, paths), "--machine", "MPCDF Raven"]) == 0
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
    for told in ("Baseline (Single device)", "Multi-Device (2 devices, 1 node):", "32 per device"):
        assert told in text


def test_a_run_that_diverged_is_named_and_its_scores_are_not_compared() -> None:
    runs = repeated(lambda n: n, (1, 4), val_loss=0.12)
    runs[-1] = replace(runs[-1], diverged=True, job="77", source="slurm-77.out")
    told = "\n".join([*summary_table(runs), sentences(runs)])
    assert "Job 77 diverged (slurm-77.out): a loss that it told is not a number" in told
    assert sum(line.split()[-2:] == ["nan", "-"] for line in summary_table(runs)) == 1
    assert "Validation loss is 0.1200 to 0.1200 over 9 runs" in told
    assert "+nan" not in told
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
    assert lines[5].startswith(
        "7          4 GPUs (1 node)                4      1      -*         -"
    )
    assert lines[7].split()[7:9] == ["20.00*", "0.67"]
    assert lines[-3:] == [
        "* 7: was cancelled after 20 of 50 epochs; not compared.",
        "* 8, attempt 2: was preempted after 0 of 50 epochs; not compared.",
        "* 9: its time is of 30 of 50 epochs; not compared.",
    ]


def test_nothing_that_is_not_known_is_zero() -> None:
    bare = run(1, None, nodes=None, epochs=None, status="crashed")
    assert summary_table([bare])[4].split()[4:] == ["-", "-*", "-", "-", "-"]


# --- sentences ----------------------------------------------------------------------------------


def test_the_kind_is_named_with_what_it_does() -> None:
    assert "the global batch grows from 32 to 256, so an epoch has fewer steps" in sentences(
        seed_runs()
    )
    strong = [run(n, 100 / n, batch=32 // n, global_batch=32) for n in (1, 2)]
    assert "a device's batch falls from 32 to 16" in sentences(strong)
    weak = [run(n, 100, samples=10000 * n) for n in (1, 2)]
    assert "grow from 10,000 to 20,000; speed-up is of samples a second" in sentences(weak)
    assert "cannot be told apart" in sentences([run(1, 10), run(2, 6, samples=None)])


def test_what_differs_among_runs_compared_anyway_is_said() -> None:
    rates = [run(n, t, settings={"learning rate": r}) for n, t, r in ((1, 40, "1"), (4, 10, "2"))]
    (study,) = studies(rates, None, True)
    (section,) = scaling_sections(study)
    told = "These runs differ: the learning rate is 1 in slurm-1.out and 2 in slurm-4.out."
    assert told in section.told
    assert "differ" not in sentences([run(1, 40), run(4, 10)])
    # The work is known, and another.
    (study,) = studies([run(1, 40), run(4, 10, samples=50000, batch=64)], None, True)
    (section,) = scaling_sections(study)
    assert "do not tell" not in "".join(section.told)
    assert section.told[0].endswith(
        "10,000 samples an epoch, 32 a batch and device (32 in all) on 1 GPU, and 50,000 samples "
        "an epoch, 64 a batch and device (128 in all) on 4 GPUs. Speed-up is of time alone, "
        "whatever was done in it."
    )
    (study,) = studies([run(1, 40), run(4, 10, batch=None)], None, True)
    assert "do not tell batch and samples of every run" in scaling_sections(study)[0].told[0]


def test_one_size_alone_and_more_than_linear_are_said() -> None:
    assert sentences([run(4, 10)]).startswith(
        "All runs are of 4 GPUs (1 node): there is nothing to compare them with."
    )
    doubted = "more than devices can give, but for caches"
    told = sentences([run(1, 636), run(4, 100)])
    assert f"4 GPUs (1 node): 159.0 % of linear [one run on a side: no interval], {doubted}" in told
    assert "that is good" not in told, "one verdict"
    told = sentences([run(1, 430), run(4, 100)])
    assert doubted not in told
    assert "107.5 % of linear [one run on a side: no interval], above the 85 % that is good" in told


def weak_and_strong() -> list[TrainingRun]:
    more = {"samples": 40000, "source": "weak.out"}
    return [run(1, 40), run(4, 44, **more), run(4, 12, batch=8, global_batch=32)]


def test_of_several_kinds_each_stands_above_its_own_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = studies(weak_and_strong(), None, False)
    page = scaling_markdown(weak_and_strong(), found, "M", False, [])
    kinds = [f"{study.kind.capitalize()} scaling" for study in found]
    assert sorted(kinds) == ["Strong scaling", "Weak scaling"]
    marks = [*kinds, "SPEEDUP ANALYSIS", "Training Results on M\n="]
    order = [kinds[0], *marks[2:], kinds[1], *marks[2:]]
    assert re.findall("|".join(marks), page) == order
    blocks = {study.kind: "\n".join(results_block(study, "M")) for study in found}
    assert "Dataset: 10,000 to 40,000 samples\n" in blocks["weak"]
    assert "Dataset: 10,000 samples\n" in blocks["strong"]

    for name, samples, batch in (("a", 10000, 32), ("b", 40000, 32), ("c", 10000, 8)):
        n = 1 if name == "a" else 4
        text = log(name, n, 40.0 / n, samples=samples, batch=batch)
        write(tmp_path, {f"{name}.out": text})
    code, out, _ = said([str(tmp_path), "--machine", "M"], capsys)
    assert code == 0
    told = re.findall("|".join(marks), out)
    assert told in (order, [*order[3:], *order[:3]])


def test_a_baseline_of_several_devices_is_said() -> None:
    runs = [run(4, 100), run(8, 60)]
    assert "no complete run of 1 device: all is normalised to 4" in sentences(runs)
    assert "relative to 8 GPUs, as was asked for" in sentences(runs, 8)
    assert "more than devices can give" not in sentences(runs, 8)
    assert speedup_table(only(runs))[2] == "Baseline (Multi-GPU (4 GPUs, 1 node)): 100.00 seconds"


@pytest.mark.parametrize(
    "devices, efficiency, words",
    [
        (4, 0.86, "86.0 % of linear [one run on a side: no interval], above the 85 % that is good"),
        (4, 0.84, "neither good (above 85 % in a node) nor poor"),
        (8, 0.76, "above the 75 % that is good across nodes"),
        (8, 0.74, "neither good (above 75 % across nodes) nor poor"),
        (8, 0.69, "below 70 %, which is poor, though not surely: nothing here tells why, for no"),
    ],
)
def test_good_and_poor_by_the_seeds_bounds(devices: int, efficiency: float, words: str) -> None:
    assert words in sentences([run(1, 100), run(devices, 100 / devices / efficiency)])


def test_an_interval_that_crosses_the_bound_is_not_sure() -> None:
    runs = repeated(lambda n: n * (0.87 if n > 1 else 1), (1, 4), noise=0.05)
    assert ", though not surely" in sentences(runs)
    sure = sentences(repeated(lambda n: n * (0.95 if n > 1 else 1), (1, 4), noise=0.005))
    assert "above the 85 % that is good in a node." in sure
    assert "5 runs each]" in sure
    assert "5 and 4 runs]" in sentences(repeated(lambda n: n, (1, 4))[1:])


def phased(devices: int, seconds: float, **phases: float) -> TrainingRun:
    """A run of 100 s of steps on each rank, split by phases."""
    totals = {"step": sum(phases.values()), **phases}
    return run(devices, seconds, ranks=tuple(Rank(i, totals) for i in range(devices)))


@pytest.mark.parametrize(
    "phases, said, unsaid",
    [
        ({"forward": 15, "backward": 25, "communication": 20}, "holds up 33% of a step", "data"),
        (
            {"forward": 5, "backward": 10, "communication": 40},
            "the model or batch is small",
            "data",
        ),
        ({"forward": 15, "backward": 25, "data_wait": 15}, "wait for data for 27%", "the sum over"),
        ({"forward": 40, "backward": 60}, "computing takes 2.00 times as long a sample", "data"),
        ({"forward": 18, "backward": 32, "data_wait": 2}, "no phase that was measured", "the sum"),
    ],
)
def test_causes_are_named_where_phases_show_them(
    phases: dict[str, float], said: str, unsaid: str
) -> None:
    base = phased(1, 210, forward=40, backward=60)
    told = sentences([base, phased(2, 200, **phases)])
    line = next(line for line in told.splitlines() if "which is poor" in line)
    assert said in line
    assert unsaid not in line


def test_a_cause_in_strong_scaling_is_the_small_batch() -> None:
    base = phased(1, 210, forward=40, backward=60)
    few = replace(phased(2, 200, forward=40, backward=60), batch=16, global_batch=32)
    assert "a batch of 16 on a device is small" in sentences([base, few])


def test_quality_that_stayed_and_that_did_not() -> None:
    runs = repeated(lambda n: n, (1, 4))
    scores = [0.95, 0.951, 0.949, 0.9505, 0.9495]

    def scored(shift: float) -> list[TrainingRun]:
        shifts = {1: 0.0, 4: shift}
        return [
            replace(one, val_acc=scores[i % 5] + shifts[one.devices]) for i, one in enumerate(runs)
        ]

    same = sentences(scored(0.0))
    assert (
        "Validation accuracy is 0.9490 to 0.9510 over 10 runs; no difference from Single GPU"
        in (same)
    )
    assert re.search(
        r"is shown: 4 GPUs \(1 node\) by \+0.0000 \[-0.001\d to \+0.001\d, 5 and", same
    )
    told = sentences(scored(-0.05))
    assert "differs from that of Single GPU: 4 GPUs (1 node) by -0.0500 [-0.0" in told
    assert "5 and 5 runs]" in told
    alone = "what chance does to it is not known [one run on a side: no interval]."
    assert alone in sentences(seed_runs())
    equal = [replace(one, val_acc=0.95 - 0.01 * (one.devices > 1)) for one in runs]
    assert "is not known [runs equal to the last digit: no interval]." in sentences(equal)
    told = sentences([*scored(-0.05), run(8, 20, val_acc=0.95)])
    assert "runs]; what chance does to it is not known of 8 GPUs (2 nodes) [one run" in told


def test_of_many_sizes_one_may_differ_by_chance() -> None:
    """Each of nine tells of a difference at 95 % alone, and by chance one of them often does."""
    runs = repeated(lambda n: n, (1, 2, 4, 8, 16, 32), runs=3)
    shifts = {32: 0.005}
    scores = [0.950, 0.952, 0.954]
    two = [
        replace(one, val_acc=scores[i % 3] + shifts.get(one.devices, 0.0))
        for i, one in enumerate(runs)
    ]
    assert difference(scores, [score + 0.005 for score in scores]).excludes(0)
    assert "Validation accuracy is" in sentences(two)
    assert "differs" not in sentences(two)


def test_neither_good_nor_poor_may_not_be_sure_either() -> None:
    noisy = repeated(lambda n: n * (0.84 if n > 1 else 1), (1, 4), noise=0.05)
    assert "nor poor, though not surely." in sentences(noisy)
    sure = repeated(lambda n: n * (0.78 if n > 1 else 1), (1, 4), noise=0.002)
    assert "nor poor." in sentences(sure)


# --- what the numbers bear ----------------------------------------------------------------------


def test_a_share_that_rises_or_falls_is_said_with_its_interval() -> None:
    sizes = (1, 2, 4, 8)
    rising = sentences(repeated(lambda n: n / (1 + 0.02 * n * (n - 1)), sizes, noise=0.002))
    assert re.search(
        r"on 2 devices and \S+ on 8, \+0.\d+ \[\+.*\]: overhead grows with the", rising
    )
    falling = sentences(repeated(lambda n: n / (1 + 0.1 * (n > 1)), sizes, noise=0.002))
    assert re.search(r"on 8, -0.\d+ \[-.*\]: no fixed serial share explains it", falling)
    fixed = sentences(repeated(lambda n: 1 / (0.05 + 0.95 / n), sizes, noise=0.01))
    assert re.search(
        r"a change of [+-]\S+ \[-\S+ to \+\S+, 5 runs of each size\] may be none", fixed
    )
    alone = sentences(seed_runs())
    assert "0.016986 on 4 devices and 0.037314 on 8; whether it changes is not known [one" in alone
    assert "overhead" not in alone


def test_a_peak_beyond_what_was_measured_is_called_so() -> None:
    runs = repeated(lambda n: n / (1 + 0.02 * (n - 1) + 0.004 * n * (n - 1)), (1, 2, 4, 8))
    assert "more than the 8 that were measured" in sentences(runs)
    straight = sentences([run(n, 100 / n, job=str(n)) for n in (1, 2, 4, 8)])
    assert "nothing shows a number of devices that is too many" in straight


def test_accuracies_that_differ_are_not_called_equal() -> None:
    runs = seed_runs()
    worse = run(8, 57.14, val_acc=0.80)
    assert (
        results_block(only([*runs[:2], worse]), "x")[-1]
        == "Validation accuracy is from 80% to 95%."
    )


def test_the_straggler_is_in_the_report() -> None:
    local, waits = ((0.1,) * 50, (0.15,) * 50), ((0.06,) * 50, (0.01,) * 50)
    two = [Rank(r, {"step": 8.0}, local[r], waits[r], host=f"n{r}") for r in range(2)]
    told = sentences([run(1, 10), run(2, 6, ranks=tuple(two))])
    assert "Job 102: rank 1 on n1 holds the others up: 50.0 ms a step more" in told
    assert "10.0 ms against 60.0 ms" in told


def test_four_sizes_fit_both_laws() -> None:
    told = sentences(
        repeated(lambda n: n / (1 + 0.02 * (n - 1) + 0.004 * n * (n - 1)), (1, 2, 4, 8))
    )
    assert "Amdahl: a serial share of 0.0" in told
    assert "USL: sigma 0.0" in told
    assert "5 runs of each size]" in told
    assert "fastest on" in told
    assert "the USL is refused" not in told.lower()
    assert "USL is refused with 3 sizes; it takes 4" in sentences(seed_runs())


# --- CSV, Markdown ------------------------------------------------------------------------------


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


def test_csv_of_runs_keeps_those_that_broke_off() -> None:
    rows = list(csv.DictReader(io.StringIO(runs_to_csv([run(1), run(4, None, status="crashed")]))))
    assert [(row["status"], row["seconds"]) for row in rows] == [
        ("complete", "10"),
        ("crashed", ""),
    ]


def test_metrics_answer_the_three_greps() -> None:
    used = run(1, 362.45, val_loss=0.1187, utilisation=(96.0, 98.0))
    _, line = metrics_table([used]).table
    assert line[2:] == ("362.45 seconds (6.04 minutes)", "0.1187", "97 % (2 readings)")
    _, line = metrics_table([run(1, None, status="crashed", source="a\nb")]).table
    assert line[2:] == ("not told", "-", "not logged")
    assert line[0] == "a b"
    _, line = metrics_table([replace(used, utilisation=(96.0,))]).table
    assert line[-1] == "96 % (1 reading)"


def test_markdown_holds_all_of_it() -> None:
    text = scaling_markdown(seed_runs(), [only(seed_runs())], "MPCDF Raven", False, ["speedup.png"])
    for part in (SUMMARY, SPEEDUPS, RESULTS, "**Hybrid scaling**", "![speedup](speedup.png)"):
        assert part in text
    assert "| Single GPU | 1 |" in text


# --- figures ------------------------------------------------------------------------------------


def test_figures_show_what_was_measured() -> None:
    base = phased(1, 210, forward=40, backward=60)
    two = replace(
        phased(2, 140, forward=20, backward=30, communication=10), utilisation=(40.0, 60.0)
    )
    study = only([base, two])
    speed, bars, epoch, used = (
        draw(study) for draw in (draw_speedup, draw_efficiency, draw_epoch, draw_utilisation)
    )
    assert speed is not None and epoch is not None and used is not None
    lines = {line.get_label(): line for line in speed.axes[0].lines}
    assert list(lines["measured"].get_ydata()) == [1.0, 1.5]
    assert list(lines["ideal"].get_ydata())[-1] == pytest.approx(2.0)
    assert [bar.get_height() for bar in bars.axes[0].patches] == pytest.approx([100.0, 75.0])
    assert [list(line.get_ydata()) for line in bars.axes[0].lines] == [[75.0, 75.0]]
    tops: dict[int, float] = {}
    for bar in epoch.axes[0].patches:
        place = round(bar.get_x() + bar.get_width() / 2)
        tops[place] = max(tops.get(place, 0), bar.get_y() + bar.get_height())
    assert tops == pytest.approx({0: 210 / 50, 1: 140 / 50})  # of 50 epochs, the rest on top
    names = [text.get_text() for text in epoch.axes[0].get_legend().get_texts()]
    assert names == [
        "forward", "backward", "communication",
        "validation, checkpoints\nbefore it, between steps",
    ]  # fmt: skip
    assert [bar.get_height() for bar in used.axes[0].patches] == [50.0]


def test_several_numbers_of_nodes_are_told_apart() -> None:
    study = only([run(1, 40), run(4, 10), run(4, 16, nodes=2), run(4, 20, nodes=4)])
    figure = draw_speedup(study)
    assert figure is not None
    _, line, points = figure.axes[0].lines
    assert list(line.get_xdata()) == [1, 4] and list(line.get_ydata()) == [1.0, 4.0]
    assert list(points.get_ydata()) == [1.0, 4.0, 2.5, 2.0]
    assert [text.get_text() for text in figure.axes[0].texts] == [
        "4.00x, 1 node", "2.50x, 2 nodes", "2.00x, 4 nodes",
    ]  # fmt: skip


def test_no_utilisation_is_told_from_none_that_was_logged() -> None:
    study = only([run(1, 40, utilisation=(0.0, 0.0)), run(4, 10)])
    figure = draw_utilisation(study)
    assert figure is not None
    assert [t.get_text() for t in figure.axes[0].texts] == ["0 %, n = 2", "not logged"]
    assert any("in the order in which they were logged" in t.get_text() for t in figure.texts)


def test_what_there_is_nothing_of_is_not_drawn() -> None:
    study = only([run(2, 10), run(2, 11, job="b")])
    assert draw_speedup(study) is None
    assert draw_utilisation(study) is None
    assert draw_epoch(only([run(1, 10, epochs=None, planned_epochs=None)])) is None


# --- the verb -----------------------------------------------------------------------------------


def said(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(["scaling", *argv])
    out, err = capsys.readouterr()
    return code, out, err


def test_output_writes_a_page_tables_and_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed_logs(tmp_path)
    code, _, err = said([str(tmp_path), "--output", str(tmp_path / "report")], capsys)
    assert code == 0
    names = {path.name for path in (tmp_path / "report").iterdir()} - {REGISTER}
    assert names == {
        "scaling.md", "scaling.csv", "runs.csv", "speedup.png", "efficiency.png", "epoch.png",
    }  # fmt: skip
    assert f"Written: {tmp_path / 'report' / 'scaling.md'}" in err
    assert "![speedup](speedup.png)" in (tmp_path / "report" / "scaling.md").read_text("utf-8")


def test_csv_and_metrics_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed_logs(tmp_path)
    code, out, _ = said([str(tmp_path), "--csv"], capsys)
    assert code == 0
    assert out.splitlines()[0].startswith("kind,devices,nodes")
    assert len(out.splitlines()) == 4
    write(tmp_path, {"x.out": log("9", 4, None, done=3, end="Traceback (most recent call last)\n")})
    code, out, err = said([str(tmp_path), "--csv"], capsys)
    assert (code, len(out.splitlines())) == (0, 5)
    assert err == "penstock scaling: 9: crashed after 3 of 50 epochs; not compared.\n"
    (tmp_path / "x.out").unlink()
    code, out, _ = said([str(tmp_path), "--metrics"], capsys)
    assert code == 0
    assert out.count("(6.04 minutes)") == 1


def test_mixed_experiments_exit_with_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"a.out": log("1", 1, 50.0), "b.out": log("2", 4, 20.0, rate="0.01")})
    code, out, err = said([str(tmp_path)], capsys)
    assert (code, out) == (4, "")
    assert "mixed experiments: the learning rate is 0.001 in" in err
    code, out, _ = said([str(tmp_path), "--anyway"], capsys)
    assert code == 0
    assert "Speedup: 2.50x" in out


def test_only_broken_runs_exit_with_3_and_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, {"a.out": log("1", 4, None, done=3, end="Traceback (most recent call last)\n")})
    code, out, err = said([str(tmp_path / "a.out")], capsys)
    assert code == 3
    assert "* 1: crashed after 3 of 50 epochs; not compared." in out
    assert "no run is complete" in err


@pytest.mark.parametrize(
    "argv, words",
    [
        (["{}", "--baseline", "3"], "--baseline 3: the complete runs are of 1, 4, 8 devices"),
        (["{}", "--between", "1GB"], "--between is of penstock scaling simulate"),
        (["{}", "--metrics", "--output", "x"], "--metrics prints one table and no more; --output"),
        (["{}", "--csv", "--metrics"], "--metrics prints one table and no more; --csv does not go"),
        (["simulate", "--csv"], "--csv is not of penstock scaling simulate"),
        (["simulate"], "simulate needs a RUN of one device, or --compute-time"),
        (["simulate", "{}"], "holds 3 runs; simulate takes one"),
        (
            ["simulate", "a", "b", "c"],
            "simulate takes a RUN of one device and one of several, and got 3",
        ),
        (["simulate", "--seen", "4"], "give a number of devices and seconds, such as 4 0.115"),
        (["{}/nothing"], "cannot be read: No such file or directory"),
    ],
)
def test_wrong_usage_exits_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    seed_logs(tmp_path)
    code, out, err = said([word.replace("{}", str(tmp_path)) for word in argv], capsys)
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1


def test_zero_times_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = write(tmp_path, {"a.out": "Job ID: 1\nTotal training time: 0.00 seconds\n"})
    code, _, err = said([str(path)], capsys)
    assert code == 2
    assert "the training time is 0 s; a time is above 0" in err


# --- simulate -----------------------------------------------------------------------------------


def test_simulate_from_a_run_prints_its_assumptions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = {"forward": 0.03, "backward": 0.06, "optimizer": 0.01}
    told: dict[str, Any] = results(1, 30.0, phases=phases) | {"parameters": 25_000_000}
    (tmp_path / "training_results.json").write_text(json.dumps(told))
    code, out, _ = said(["simulate", str(tmp_path), "--gpus-per-node", "8"], capsys)
    assert code == 0
    sizes = [line.split()[0] for line in out.splitlines()[3:13]]
    assert sizes == ["8", "16", "32", "64", "128", "256", "512", "1,024", "2,048", "4,096"]
    assert "computes 100 ms a step, 60.0 ms of it backward, on 32 samples." in out
    assert "95.4 MiB of gradients are summed by a tree" in out
    guessed = "each of 25,000,000 is taken to have a gradient of 4 bytes."
    assert guessed in out
    assert "Data is always there in time." in out
    _, out, _ = said(["simulate", str(tmp_path), "--gradient-bytes", "1MiB"], capsys)
    assert guessed not in out
    told |= {"trainable_parameters": 1_000_000, "gradient_bytes": 2 * 2**20}
    (tmp_path / "training_results.json").write_text(json.dumps(told))
    _, out, _ = said(["simulate", str(tmp_path)], capsys)
    assert "2.00 MiB of gradients are summed by a tree" in out
    assert guessed not in out


def test_simulate_from_a_run_of_one_and_one_of_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = {"forward": 0.03, "backward": 0.06, "optimizer": 0.01}
    for devices, seconds, took in ((1, 30.0, phases), (4, 33.0, phases | {"communication": 0.01})):
        told: dict[str, Any] = results(devices, seconds, phases=took) | {"parameters": 100}
        (tmp_path / str(devices)).mkdir()
        (tmp_path / str(devices) / "training_results.json").write_text(json.dumps(told))
    folders = [str(tmp_path / name) for name in ("1", "4")]
    flags = ["--inside-latency", "0", "--between-latency", "0", "--devices", "4", "64"]
    code, out, _ = said(["simulate", *folders, *flags], capsys)
    assert code == 0
    assert [line.count(" 90.9% ") for line in out.splitlines()[3:5]] == [3, 3]
    assert "A step of 4 devices took 110 ms, which is 10.0 ms more than all of this" in out
    assert "the most that is to be had" not in out
    code, _, err = said(["simulate", *folders, "--batch-size", "64"], capsys)
    assert code == 2
    assert "has batches of 32 on each device, and what is simulated has 64" in err
    code, _, err = said(["simulate", folders[0], folders[0]], capsys)
    assert code == 2
    assert "is of one device, too" in err
    told = results(4, 33.0, phases=phases) | {"parameters": 5}
    (tmp_path / "4" / "training_results.json").write_text(json.dumps(told))
    code, _, err = said(["simulate", *folders], capsys)
    assert code == 4
    assert "the parameters is 100 in" in err


def test_simulate_from_flags(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--compute-time 0.1 --gradient-bytes 100MB --batch-size 32 --devices 8 --overlap 0"
    flags += " --algorithm ring --between 1GB --sample-bytes 1MB --data-rate 1GB"
    code, out, _ = said(["simulate", *flags.split()], capsys)
    assert code == 0
    # 8 x 32 MB from a store of 1 GB/s: 256 ms a step, 32 ms alone, which the 100 ms hide.
    assert "1,000" in out.splitlines()[3]
    assert out.splitlines()[3].endswith("data")
    assert "39.1%" in out
    for sizes in (["8,16"], ["8", "16"]):
        code, out, _ = said(["simulate", *flags.split(), "--devices", *sizes], capsys)
        assert [line.split()[0] for line in out.splitlines()[3:5]] == ["8", "16"]


def test_simulate_takes_another_batch_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = {"data_wait": 0.1, "forward": 0.03, "backward": 0.06, "optimizer": 0.01}
    told: dict[str, Any] = results(1, 30.0, phases=phases)
    (tmp_path / "training_results.json").write_text(json.dumps(told))
    code, out, _ = said(["simulate", str(tmp_path), "--batch-size", "64"], capsys)
    assert code == 0
    assert "computes 200 ms a step, 120 ms of it backward, on 64 samples." in out
    assert "A batch of 32 was measured, and one of 64 is taken to be as quick a sample" in out
    assert "makes 160 samples/s, as the run had" in out
    assert out.splitlines()[3].endswith("data")
    flags = ["--batch-size", "64", "--compute-time", "0.15"]
    code, out, _ = said(["simulate", str(tmp_path), *flags], capsys)
    assert "computes 150 ms a step, 100 ms of it backward, on 64 samples." in out
    assert "was measured" not in out


def test_a_folder_called_simulate_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "simulate").mkdir()
    seed_logs(tmp_path / "simulate")
    code, out, _ = said(["./simulate", "--metrics"], capsys)
    assert code == 0
    assert out.count("(6.04 minutes)") == 1


def test_what_is_passed_over_is_said_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seed_logs(tmp_path)
    (tmp_path / "torn.zip").write_bytes(b"PK\x03\x04")
    code, _, err = said([str(tmp_path), "--csv"], capsys)
    assert code == 0
    assert err.startswith(f"penstock scaling: {tmp_path / 'torn.zip'} is not an archive of Comet")
