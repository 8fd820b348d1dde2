"""Speed-ups: the issue's numbers, the baseline, studies never mixed."""

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import NotComparable
from penstock.scaling import TrainingRun, points_to_csv, summary_table
from penstock.scaling.estimates import Amdahl, Usl, karp_flatt, peak, usl
from penstock.scaling.study import in_no_study, studies

from .kit import SEED, only, run, seed_runs, strong, weak


def test_the_vector_of_the_issue() -> None:
    study = only(seed_runs())
    assert study.kind == "hybrid"
    assert [f"{p.speedup.value:.4f}" for p in study.points] == ["1.0000", "3.8060", "6.3432"]
    assert [f"{100 * p.efficiency.value:.2f}" for p in study.points[1:]] == ["95.15", "79.29"]
    shares = [p.karp_flatt for p in study.points]
    assert shares[0] is None
    assert [f"{share.value:.6f}" for share in shares[1:] if share] == ["0.016986", "0.037314"]
    assert isinstance(study.amdahl, Amdahl)
    assert f"{study.amdahl.serial.value:.6f}" == "0.028704"
    assert f"{study.amdahl.most:.1f}" == "34.8"
    assert study.points[0].throughput == pytest.approx(10000 * 50 / 362.45)
    sigma, kappa = usl([1, 4, 8], [SEED[1] / seconds for seconds in SEED.values()])
    assert sigma == 0
    assert f"{kappa:.6f}" == "0.004646"
    assert round(float(peak(sigma, kappa)), 1) == 14.7


def test_without_one_device_the_fewest_are_the_baseline() -> None:
    study = only([run(4, 100), run(8, 55), run(16, 30)])
    assert study.base.devices == 4
    assert study.points[1].speedup.value == pytest.approx(100 / 55)
    assert study.points[1].efficiency.value == pytest.approx(100 / 55 / 2)
    share = study.points[1].karp_flatt
    assert share is not None and share.value == pytest.approx(float(karp_flatt(100 / 55, 2)))


def test_weak_scaling_is_named_and_its_speedup_is_of_samples() -> None:
    study = only([weak(1, 100), weak(2, 104), weak(4, 110), weak(8, 120)])
    assert study.kind == "weak"
    assert study.points[3].speedup.value == pytest.approx(8 * 100 / 120)
    assert study.points[3].efficiency.value == pytest.approx(100 / 120)
    assert study.points[3].karp_flatt is None
    assert "weak scaling adds work" in str(study.amdahl)
    assert isinstance(study.usl, Usl)


@pytest.mark.parametrize(
    ("runs", "kind"),
    [
        # the last batch is filled up
        ([run(n, 9 / n, samples=None, steps=-(-7000 // (32 * n))) for n in (1, 2, 4, 8)], "hybrid"),
        # gradients are accumulated
        ([run(1, 100, batch=8, global_batch=32), run(4, 30, batch=8, global_batch=32)], "strong"),
        ([run(1, 10), run(2, 6, batch=None, global_batch=None)], "undetermined"),
        ([run(2, 10), run(2, 11, job="b")], "undetermined"),
    ],
)
def test_the_kind_of_a_study(runs: list[TrainingRun], kind: str) -> None:
    study = only(runs)
    assert study.kind == kind
    assert len(study.points) == len({run.devices for run in runs})


def test_kinds_are_never_in_one_study() -> None:
    runs = [run(1, 100), run(4, 30), strong(4, 33), weak(4, 108), strong(8, 20)]
    by_kind = studies(runs, False)
    kinds = {study.kind: [p.at.first.job for p in study.points] for study in by_kind}
    assert kinds == {"hybrid": ["101", "104"], "strong": ["101", "s4", "s8"], "weak": ["101", "w4"]}


@given(
    st.sampled_from(("strong", "weak", "hybrid")),
    st.integers(1, 8).map(lambda power: 2**power),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((2, 4, 8)),
    st.integers(2, 300),
    st.integers(0, 31),
)
def test_each_kind_is_named_whatever_its_size(kind, batch, base, times, steps, rest) -> None:
    """An epoch has two steps of all devices at least, and a last batch that is filled up."""
    alone = batch * times if kind == "strong" else batch
    samples = alone * base * times * steps + min(rest, alone - 1)
    one = run(base, 10, batch=alone, global_batch=alone * base, samples=samples)
    more = samples * times if kind == "weak" else samples
    all_ = batch * base * times
    many = run(base * times, 5, batch=batch, global_batch=all_, samples=-(-more // all_) * all_)
    assert only([one, many]).kind == kind


def test_mixed_experiments_are_refused_with_the_difference() -> None:
    runs = [run(1, 100, settings={"learning rate": "0.001"}), run(4, 30)]
    runs += [run(8, 20, settings={"learning rate": "0.01"})]
    words = "mixed experiments: the learning rate is 0.001 in slurm-1.out and 0.01 in slurm-8.out"
    with pytest.raises(NotComparable, match=words) as raised:
        studies(runs, False)
    assert raised.value.exit_code == 4
    assert len(only(runs, anyway=True).points) == 3


def test_work_of_no_kind_is_refused_with_the_difference() -> None:
    runs = [run(1, 100), run(4, 30, samples=5000, batch=64, global_batch=256)]
    with pytest.raises(NotComparable, match=r"10,000 samples .* 5,000 samples .*64 a batch"):
        studies(runs, False)
    with pytest.raises(NotComparable, match="neither weak, strong nor hybrid"):
        studies([run(1, 100), run(1, 60, batch=64, global_batch=64)], False)


def test_runs_that_broke_off_are_not_compared() -> None:
    broken = run(4, None, status="cancelled", epochs=20)
    resumed = run(8, 20.0, epochs=30)
    assert [p.at.devices for p in only([run(1, 100), broken, resumed]).points] == [1]
    assert studies([broken], False) == []


def test_a_run_in_no_study_is_named_with_its_reason() -> None:
    runs = [run(1, 100), run(1, 60, job="other", batch=None, global_batch=None), run(4, 30)]
    compared = studies(runs, False)
    assert [one.job for one in in_no_study(runs, compared)] == ["other"]
    assert summary_table(runs, compared)[-1] == (
        "other (slurm-1.out): its batch or its samples are not known, and those of other runs on 1 "
        "GPU are; it is in no study."
    )
    rows = list(csv.DictReader(io.StringIO(points_to_csv(compared, runs))))
    assert [(row["kind"], row["seconds"]) for row in rows][-1] == ("not compared", "60")


@given(
    st.lists(
        st.tuples(st.sampled_from((1, 2, 4)), st.sampled_from((None, 16, 32)), st.booleans()),
        min_size=1,
        max_size=6,
    )
)
def test_every_complete_run_is_compared_or_named(sizes: list[tuple[int, int | None, bool]]) -> None:
    runs = [
        run(n, 10.0 + i, job=str(i), batch=batch, global_batch=batch and batch * n,
            status="complete" if ended else "crashed")
        for i, (n, batch, ended) in enumerate(sizes)
    ]  # fmt: skip
    assert in_no_study(runs, studies(runs, True)) == []
    try:
        compared = studies(runs, False)
    except NotComparable as error:
        assert "slurm-" in str(error)
        return
    text = "\n".join(summary_table(runs, compared))
    taken = {id(one) for study in compared for point in study.points for one in point.at.runs}
    for one in runs:
        assert id(one) in taken or f"\n{one.job} (" in text or f"\n* {one.job}:" in text
