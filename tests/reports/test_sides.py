"""Sides of a comparison: runs phase by phase, a gate, a summary."""

import json

import numpy as np
import pytest

from penstock.base.errors import UsageError
from penstock.reports import in_text, launches_named, launches_of, places_of, report_of_comparison

from .pages import HOSTILE, run_folder
from .test_compare import judged, launches, record, run, store
from .test_training_report import COMPUTING, WAITING, training

READ = {"read": (36.0, 2.0, 4), "forward": (5.0, 5.0, 1)}


def test_two_trainings_phase_by_phase(tmp_path, capsys) -> None:
    a, b = training(tmp_path / "a", WAITING), training(tmp_path / "b", COMPUTING)
    assert run(a, b) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "training 31.2 ms 31.2 ms 1.000 1 + 1 inconclusive" in out  # 1 s over 32 samples
    assert "data_wait 650 ms 200 ms 0.3077 [0.2857 to 0.3333] one launch each" in out
    assert "forward changed most: 450 ms more, 2.800 [2.333 to 3.500] times as long." in out
    assert "it says nothing about another launch. - No setting differs." in out
    assert "samples/s 640 640 1.000 no interval" in out


def test_runs_of_each_side_are_judged_and_what_differs_is_named(tmp_path, capsys) -> None:
    for side, workers, base in (("a", 1, 10.0), ("b", 2, 5.0)):
        for number in range(4):
            folder = tmp_path / side / str(number)
            settings = {"prep_workers": workers, "out_spec": str(number), "model_type": HOSTILE}
            run_folder(folder, READ, base + number / 100, run={"settings": settings})
    assert run(tmp_path / "b", tmp_path / "a", "--fail-if-slower", "5%") == 1
    out = capsys.readouterr().out
    assert "infer: slower: B takes 1.997" in out
    assert "prep-workers  2  1" in out and "out-spec" not in out
    assert out.splitlines()[-1] == ("The gate fails: 1 case slower by more than 5 %, or failing.")
    assert run(tmp_path / "a", tmp_path / "b", "--fail-if-slower", "0.05") == 0
    assert "The gate holds: no case of 1 is slower by more than 5 %." in capsys.readouterr().out


def test_settings_that_vary_within_a_side_tell_its_cases_apart(tmp_path, capsys) -> None:
    for side in "ab":
        for batch in (1, 2):
            settings = {"batch": batch, "amp": side == "b"}
            run_folder(tmp_path / side / str(batch), READ, run={"settings": settings})
    assert run(tmp_path / "a", tmp_path / "b") == 0
    out = capsys.readouterr().out
    assert "batch=1: inconclusive" in out and "batch=2: inconclusive" in out
    assert out.count("amp  false  true") == 2


def test_a_gate_that_cannot_tell_ends_with_three(tmp_path, capsys) -> None:
    rng = np.random.default_rng(0)
    a = store(tmp_path / "a", launches(rng, n=1))
    b = store(tmp_path / "b", launches(rng, n=1))
    assert run(a, b, "--fail-if-slower", "5%", "--markdown", tmp_path / "m.md") == 3
    line = "The gate is undecided: 1 of 1 case may be slower by more than 5 %; run more launches."
    assert line in capsys.readouterr().out
    assert f"**{line}**\n" in (tmp_path / "m.md").read_text()
    assert run(a, b) == 0  # no gate


def test_a_summary_shows_changes_first_and_takes_names_as_text(tmp_path) -> None:
    rng = np.random.default_rng(0)
    a, b = (
        [
            each
            for knob in (HOSTILE, *map(str, range(21)))
            for each in launches(
                rng, noise=1e-3, knobs={"model": knob}, level=level if knob == HOSTILE else 1
            )
        ]
        for level in (1, 2)
    )
    a, b = store(tmp_path / "a", a), store(tmp_path / "b", b)
    assert run(a, b, "--markdown", tmp_path / "m.md", "--json", tmp_path / "m.json") == 1
    text = (tmp_path / "m.md").read_text()
    table = [line for line in text.splitlines() if line.startswith("|")]
    assert table[2].endswith("| 5 + 5 | slower |") and len(table) == 24
    assert "<script>" not in text
    assert json.loads((tmp_path / "m.json").read_text())["gate"] == ""


def test_a_run_that_is_not_done_has_no_times(tmp_path) -> None:
    with pytest.raises(UsageError, match="is no file or folder"):
        launches_named(str(tmp_path / "main"))
    with pytest.raises(UsageError, match="holds neither records"):
        launches_named(str(tmp_path))
    with pytest.raises(UsageError, match="is not done, and has no times yet"):
        launches_of(places_of(run_folder(tmp_path / "a")))
    folder = training(tmp_path / "t", WAITING, epoch_times_s=[])
    with pytest.raises(UsageError, match="no epoch has ended"):
        launches_of(places_of(folder))
    broken = run_folder(tmp_path / "u.penstock", READ)
    (broken / "summary.json").write_text('{"seconds": 1.0}')
    with pytest.raises(UsageError, match="not what Penstock left there"):
        launches_of(places_of(tmp_path / "u.penstock"))


def test_one_quantity_has_one_ratio() -> None:
    """In the table of the cases, phase by phase and in the sentences, whatever is resampled."""
    rng = np.random.default_rng(5)
    a, b = (launches(rng, noise=0.05, level=level) for level in (1.0, 1.3))
    comparison = judged(a, b, detailed=True)
    (row,), (detail,) = comparison.rows, comparison.details
    (step,) = (each for each in detail.quantities if each.name == "step")
    assert step.ratio == row.ratio is not None and step.verdict == row.verdict
    (chapter,) = report_of_comparison(comparison, "a to b").chapters
    ends = f"{row.ratio.value:.3f} [{row.ratio.low:.3f} to {row.ratio.high:.3f}]"
    assert "\n".join(in_text(chapter.sections)).count(ends) == 3


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_the_ratio_of_two_runs_is_that_of_the_times_beside_it(factor: float) -> None:
    """Also where medians of stretches of their steps are other ones."""
    rng = np.random.default_rng(1)
    a, b = (
        [record(times, samples_s={"step": times, "forward": times})]
        for level in (1.0, factor)
        for times in [(level * np.exp(rng.normal(0, 0.4, 61))).tolist()]
    )
    comparison = judged(a, b, detailed=True)
    (row,) = comparison.rows
    for each in comparison.details[0].quantities:
        assert each.ratio is not None and each.a and each.b
        assert each.ratio.value == pytest.approx(each.b / each.a)
        assert each.ratio.low <= each.ratio.value <= each.ratio.high
        assert row.ratio is not None and row.ratio.value == each.ratio.value


def test_a_number_that_no_float_holds_is_one_sentence(tmp_path, capsys) -> None:
    a, b = training(tmp_path / "a", WAITING), training(tmp_path / "b", COMPUTING)
    file = b / "training_results.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"samples_per_s": 10**399}))
    kept = record().model_copy(update={"facts": {"score": 10**399}})
    ledger = tmp_path / "big.jsonl"
    ledger.write_text(kept.model_dump_json(by_alias=True) + "\n")
    for side, place in ((b, file), (ledger, f"{ledger}, line 1")):
        assert run(a, side) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert str(place) in line and line.endswith("it has a number of 400 digits")
