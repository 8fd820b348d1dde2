"""Sentences that follow the data."""

import re
from dataclasses import replace

import pytest

from penstock.scaling import TrainingRun, speedup_table, studies
from penstock.scaling.estimates import difference
from penstock.scaling.study_text import report_of_studies, scaling_sections
from penstock.scaling.tables import results_table as results_block

from .kit import log, only, phased, repeated, run, said, seed_runs, sentences, write


def test_the_kind_is_named_with_what_it_does() -> None:
    assert "global batch grows from 32 to 256, so an epoch has fewer" in sentences(seed_runs())
    strong = [run(n, 100 / n, batch=32 // n, global_batch=32) for n in (1, 2)]
    assert "a device's batch falls from 32 to 16" in sentences(strong)
    weak = [run(n, 100, samples=10000 * n) for n in (1, 2)]
    assert "grow from 10,000 to 20,000; speed-up is of samples a second" in sentences(weak)
    assert "cannot be told apart" in sentences([run(1, 10), run(2, 6, samples=None)])


def test_what_differs_among_runs_compared_anyway_is_said() -> None:
    rates = [run(n, t, settings={"learning rate": r}) for n, t, r in ((1, 40, "1"), (4, 10, "2"))]
    (study,) = studies(rates, True)
    (section,) = scaling_sections(study)
    sentence = "These runs differ: the learning rate is 1 in slurm-1.out and 2 in slurm-4.out."
    assert sentence in section.sentences
    assert "differ" not in sentences([run(1, 40), run(4, 10)])
    # The work is known, and another.
    (study,) = studies([run(1, 40), run(4, 10, samples=50000, batch=64)], True)
    (section,) = scaling_sections(study)
    assert "do not tell" not in "".join(section.sentences)
    assert section.sentences[0].endswith(
        "10,000 samples an epoch, 32 a batch and device (32 in all) on 1 GPU, and 50,000 samples "
        "an epoch, 64 a batch and device (128 in all) on 4 GPUs. Speed-up is of time alone, "
        "whatever the work."
    )
    (study,) = studies([run(1, 40), run(4, 10, batch=None)], True)
    assert "lack batch or samples of some runs" in scaling_sections(study)[0].sentences[0]


def test_one_size_alone_and_more_than_linear_are_said() -> None:
    assert sentences([run(4, 10)]).startswith(
        "All runs are of 4 GPUs (1 node): there is nothing to compare them with."
    )
    doubted = "more than the devices can add unless caches help"
    text = sentences([run(1, 636), run(4, 100)])
    assert f"4 GPUs (1 node): 159.0 % of linear [one run on a side: no interval], {doubted}" in text
    assert "that is good" not in text, "one verdict"
    text = sentences([run(1, 430), run(4, 100)])
    assert doubted not in text
    assert "107.5 % of linear [one run on a side: no interval], above the 85 % that is good" in text


def weak_and_strong() -> list[TrainingRun]:
    more = {"samples": 40000, "source": "weak.out"}
    return [run(1, 40), run(4, 44, **more), run(4, 12, batch=8, global_batch=32)]


def test_of_several_kinds_each_stands_above_its_own_tables(tmp_path, capsys) -> None:
    by_kind = studies(weak_and_strong(), False)
    report = report_of_studies(weak_and_strong(), by_kind, "M")
    kinds = [chapter.title for chapter in report.chapters]
    assert sorted(kinds) == ["Runs", "Scaling, strong", "Scaling, weak"]
    blocks = {study.kind: "\n".join(results_block(study, "M")) for study in by_kind}
    assert "Dataset: 10,000 to 40,000 samples\n" in blocks["weak"]
    assert "Dataset: 10,000 samples\n" in blocks["strong"]

    for name, samples, batch in (("a", 10000, 32), ("b", 40000, 32), ("c", 10000, 8)):
        n = 1 if name == "a" else 4
        text = log(name, n, 40.0 / n, samples=samples, batch=batch)
        write(tmp_path, {f"{name}.out": text})
    code, out, _ = said([str(tmp_path), "--machine", "M"], capsys)
    assert code == 0
    marks = ["Strong scaling", "Weak scaling", "SPEEDUP ANALYSIS", "Training Results on M\n="]
    order = [marks[0], *marks[2:], marks[1], *marks[2:]]
    assert re.findall("|".join(marks), out) in (order, [*order[3:], *order[:3]])


def test_a_baseline_of_several_devices_is_said() -> None:
    runs = [run(4, 100), run(8, 60)]
    assert "no complete run of 1 device: all is normalised to 4" in sentences(runs)
    assert speedup_table(only(runs))[2] == "Baseline (Multi-GPU (4 GPUs, 1 node)): 100.00 seconds"


@pytest.mark.parametrize(
    "devices, efficiency, words",
    [
        (4, 0.86, "86.0 % of linear [one run on a side: no interval], above the 85 % that is good"),
        (4, 0.84, "neither good (above 85 % in a node) nor poor"),
        (8, 0.76, "above the 75 % that is good across nodes"),
        (8, 0.74, "neither good (above 75 % across nodes) nor poor"),
        (8, 0.69, "below 70 %, which is poor, though not surely: the cause is unknown, because"),
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
    noisy = repeated(lambda n: n * (0.84 if n > 1 else 1), (1, 4), noise=0.05)
    assert "nor poor, though not surely." in sentences(noisy)
    sure = sentences(repeated(lambda n: n * (0.78 if n > 1 else 1), (1, 4), noise=0.002))
    assert "nor poor." in sure


@pytest.mark.parametrize(
    "phases, said, unsaid",
    [
        ({"forward": 15, "backward": 25, "communication": 20}, "holds up 33% of a step", "data"),
        ({"forward": 5, "backward": 10, "communication": 40}, "the model or batch is", "data"),
        ({"forward": 15, "backward": 25, "data_wait": 15}, "wait for data for 27%", "the sum over"),
        ({"forward": 40, "backward": 60}, "computing takes 2.00 times as long a sample", "data"),
        ({"forward": 18, "backward": 32, "data_wait": 2}, "none of the measured phases", "the sum"),
    ],
)
def test_causes_are_named_by_phases(phases: dict[str, float], said: str, unsaid: str) -> None:
    base = phased(1, 210, forward=40, backward=60)
    text = sentences([base, phased(2, 200, **phases)])
    line = next(line for line in text.splitlines() if "which is poor" in line)
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
    said_of = "Validation accuracy is 0.9490 to 0.9510 over 10 runs; no difference from Single GPU"
    assert said_of in same
    assert re.search(
        r"is shown: 4 GPUs \(1 node\) by \+0.0000 \[-0.001\d to \+0.001\d, 5 and", same
    )
    text = sentences(scored(-0.05))
    assert "differs from that of Single GPU: 4 GPUs (1 node) by -0.0500 [-0.0" in text
    assert "5 and 5 runs]" in text
    alone = "what chance does to it is not known [one run on a side: no interval]."
    assert alone in sentences(seed_runs())
    equal = [replace(one, val_acc=0.95 - 0.01 * (one.devices > 1)) for one in runs]
    assert "is not known [runs equal to the last digit: no interval]." in sentences(equal)
    text = sentences([*scored(-0.05), run(8, 20, val_acc=0.95)])
    assert "runs]; what chance does to it is not known of 8 GPUs (2 nodes) [one run" in text


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


def test_four_sizes_fit_both_laws() -> None:
    text = sentences(
        repeated(lambda n: n / (1 + 0.02 * (n - 1) + 0.004 * n * (n - 1)), (1, 2, 4, 8))
    )
    assert "Amdahl: a serial share of 0.0" in text
    assert "USL: sigma 0.0" in text
    assert "5 runs of each size]" in text
    assert "fastest on" in text and "more than the 8 that were measured" in text
    once = sentences(repeated(lambda n: n / (1 + 0.05 * n * (n - 1)), (1, 2, 4, 8), runs=1))
    assert "its curve is highest on 4 devices" in once and "fastest" not in once
    straight = sentences([run(n, 100 / n, job=str(n)) for n in (1, 2, 4, 8)])
    assert "nothing shows a number of devices that is too many" in straight
    assert "the USL is refused" not in text.lower()
    assert "USL is refused with 3 sizes; it takes 4" in sentences(seed_runs())
