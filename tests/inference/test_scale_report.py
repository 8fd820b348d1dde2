"""What plan says of a job on many workers: cuts compared, flags checked, nothing made up."""

from __future__ import annotations

import cProfile
import functools
import json
import re
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

import penstock
from penstock.base.config.at_scale import ScaleConfig
from penstock.base.config.knobs import build
from penstock.base.errors import Refused, UsageError
from penstock.base.units import format_bytes, format_count
from penstock.cli import main
from penstock.inference.planning.at_scale import Fleet, expect, load_of, patches_of_one
from penstock.inference.planning.plan import Plan, make_plan, plans_by_parts
from penstock.inference.planning.scale_report import at_rate, measured_rate, scale_lines
from penstock.inference.planning.simulation import simulate

from .kit import SEED, arange, config, facts

PETABYTE = facts((80_000,) * 3)


@functools.cache
def plan_of(**knobs: Any) -> Plan:
    return make_plan(config(**knobs), PETABYTE, SEED)


def lines(plan: Plan, workers: int = 1000, **scale: Any) -> dict[str, str]:
    return dict(scale_lines(config(workers=workers), build(ScaleConfig, scale), plan))


@pytest.mark.parametrize(
    "normalize",
    ["global", *(pytest.param(each, marks=pytest.mark.slow) for each in ("percentile", "none"))],
)
def test_parts_that_are_compared_are_those_that_the_flag_gives(normalize: str) -> None:
    knobs = config(workers=1000, normalize=normalize)
    plans = [*plans_by_parts(knobs, PETABYTE, SEED)]
    numbers = [len(plan.parts) for plan in plans if plan.parts is not None]
    assert len(numbers) > 5 and numbers == sorted(numbers)
    for plan, number in [*zip(plans, numbers, strict=True)][:2]:
        again = make_plan(config(workers=1000, normalize=normalize, parts=number), PETABYTE, SEED)
        assert again.parts == plan.parts
        assert again.num_patches == plan.num_patches


@pytest.mark.parametrize(
    ("workers", "mtbf"),
    [(20, "2000"), *(pytest.param(n, "200", marks=pytest.mark.slow) for n in (20, 1000))],
)
def test_a_petabyte_is_compared_in_constant_memory(workers: int, mtbf: str) -> None:
    plan = plan_of(workers=workers)
    tracemalloc.start()
    lines(plan, workers, rate="1.5e6", mtbf=mtbf, restart="10min", bandwidth="50GB", simulate=[1])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert plan.input_bytes == 1.024e15
    assert peak < 50e6


def test_borders_count_against_a_rate_that_was_measured_without_them() -> None:
    for normalize in ("global", "percentile"):
        knobs = config(workers=1000, normalize=normalize)
        plan = plan_of(workers=1000, normalize=normalize)
        fleet = Fleet(1, rate=1e6)
        load = load_of(knobs, plan, fleet)
        borders = plan.num_patches / patches_of_one(knobs, plan)
        assert load.work.total == plan.num_patches
        assert (normalize == "percentile") == (borders == 1)
        seconds = expect(load, fleet).seconds
        assert seconds == pytest.approx(plan.voxels / 1e6 * borders, rel=1e-3)


def test_without_a_rate_there_is_no_time() -> None:
    said = lines(plan_of(workers=1000), bandwidth="10GB")
    assert "--rate" in said["time"]
    assert said["store"].endswith("9.31 GiB/s")
    assert not {"expected", "simulated", "choice", "workers"} & said.keys()


def test_percentiles_take_the_time_that_the_store_needs_or_are_named_as_not_counted() -> None:
    plan = plan_of(workers=1000)
    counted = lines(plan, rate="1.5e6", bandwidth="50GB")
    assert counted["  statistics"].startswith("5 h 41 min")
    assert "--bandwidth counts it" in lines(plan, rate="1.5e6")["note"]


def test_small_parts_are_chosen_where_large_ones_would_not_end_together() -> None:
    """And large ones where the scheduler could not hold the small ones."""
    plan = plan_of(workers=1000)
    slow = lines(plan, rate="1.5e6", stragglers="2%:10")
    assert (match := re.match(r"--parts (\d+): ", slow["choice"]))
    assert int(match[1]) > len(plan.parts or ())
    many = plan_of(workers=1000, parts=3_000_000)
    said = lines(many, rate="5e8")
    assert "bound by the scheduler" in said["expected"]
    assert (match := re.match(r"--parts (\d+): ", said["choice"]))
    assert int(match[1]) < 3_000_000


@pytest.mark.parametrize(
    "normalize", [pytest.param("global", marks=pytest.mark.slow), "percentile"]
)
def test_the_choice_by_formula_and_its_neighbours_are_played(normalize: str) -> None:
    knobs = config(workers=500, normalize=normalize)
    plan = make_plan(knobs, PETABYTE, SEED)

    def said(**simulate: Any) -> dict[str, str]:
        scale = build(ScaleConfig, {"rate": "3e6", "stragglers": "2%:3", **simulate})
        return dict(scale_lines(knobs, scale, plan))

    paper, played = said(), said(simulate=[1])
    rows = [name for name in paper if name.endswith(" parts")]
    assert 3 <= len([name for name in played if name.endswith(" parts")]) <= 4 < len(rows)
    (by_formula,) = re.findall(r"--parts (\d+):", paper["choice"])
    assert any(name.strip() == f"{format_count(int(by_formula))} parts" for name in played)


def test_runs_that_do_not_end_are_counted() -> None:
    said = lines(plan_of(workers=1000), rate="1.5e6", mtbf="10", simulate=[2])
    assert said["expected"].startswith("no end within 10 times")
    assert said["simulated"].startswith("2 of 2 simulated runs (--seed 0) have no end")
    assert said["parts"] == "the job does not end with any number of parts"


def test_a_simulation_says_where_its_numbers_lie() -> None:
    said = lines(plan_of(workers=100), 100, rate="1.5e7", mtbf="200", restart="1h", simulate=[4])
    interval = r"[\d,.]+ h \d+ min \[[\d,.]+ h \d+ min - [\d,.]+ h \d+ min\]: the median of 4 sim"
    assert re.match(interval, said["simulated"])
    assert said["  failures"].count("-") == 1 and said["  redone"].count("%") == 3


def test_the_rate_of_a_run_is_taken_from_its_folder(tmp_path: Path) -> None:
    source = arange((8, 8, 8))
    run = tmp_path / "run"
    penstock.run_inference(
        source, np.zeros_like(source), model="identity", patch=8, overlap=2, devices="cpu",
        normalize="none", run_dir=run,
    )  # fmt: skip
    plan = plan_of(workers=1000)
    rate, notes = measured_rate(run, plan)
    summary = json.loads((run / "summary.json").read_bytes())
    assert rate == summary["voxels"] / summary["seconds"]
    assert "patches of 8 x 8 x 8" in notes[0]
    shares = [{"name": str(n), "voxels": n * 100, "seconds": 10.0} for n in (1, 4, 2, 0)]
    (run / "summary.json").write_text(json.dumps(summary | {"workers": shares}))
    assert measured_rate(run, plan)[0] == 20.0
    (run / "summary.json").write_text(json.dumps(summary | {"voxels": 0}))
    with pytest.raises(UsageError, match="computed nothing"):
        measured_rate(run, plan)
    (run / "summary.json").write_text("{}")
    with pytest.raises(UsageError, match="damaged"):
        measured_rate(run, plan)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--rate 1e6", "--rate has no effect without --workers N"),
        ("--workers 4 --mtbf 3", "--mtbf has no effect without --rate"),
        ("--workers 4 --simulate", "--simulate has no effect without --rate"),
        ("--workers 4 --rate 1e6 --restart 5min", "--restart has no effect without --mtbf"),
        ("--workers 4 --rate 0", "not a number of voxels per second above 0"),
        ("--workers 4 --rate nowhere", "--rate nowhere: No such file or directory"),
        ("--workers 4 --rate 1e6 --mtbf 0", "--mtbf"),
        ("--workers 4 --rate 1e6 --mtbf soon", "'soon' is not a time"),
        ("--workers 4 --rate 1e6 --stragglers 3", "is not SHARE:FACTOR, such as 2%:3"),
        ("--workers 4 --rate 1e6 --stragglers 300%:3", "is not SHARE:FACTOR, such as 2%:3"),
        ("--workers 4 --rate 1e6 --simulate 0", "greater than or equal to 1"),
        ("--workers 4 --rate 1e6 --bandwidth 0", "greater than or equal to 1"),
        ("--workers 4 --rate 1e6 --tasks-per-second 0", "greater than 0"),
    ],
)
def test_bad_input_is_one_sentence(
    words: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    zarr.create_array("in.zarr", shape=(64,) * 3, chunks=(16,) * 3, dtype="uint16")
    job = "plan --in-spec in.zarr --out-spec out.zarr --model-type identity --devices cpu"
    assert main([*job.split(), *words.split()]) == 2
    assert sentence in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.zarr"]


def test_the_command_of_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    zarr.create_array("in.zarr", shape=(8_000,) * 3, chunks=(128,) * 3, dtype="uint16")
    job = (
        "plan --in-spec in.zarr --out-spec out.zarr --model-type identity --devices cpu "
        "--normalize global --workers 100 --rate 2e7 --mtbf 100 --restart 5min --simulate 2"
    )
    assert main(job.split()) == 0
    said = capsys.readouterr().out
    assert "100 of 20.0 Mvox/s; each fails every 100 h 0 min and is back after 5 min 0 s" in said
    assert "the median of 2 simulated runs (--seed 0)" in said
    assert "\nchoice " in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.zarr"]


def test_the_cheaper_way_with_borders_is_taken_by_the_rate_and_both_are_shown() -> None:
    """A fast net is sooner done with twice the patches than its output with a disk."""
    cube = facts((512,) * 3, write_grids=((64,) * 3,), sum_itemsizes=(4,))
    knobs = config(workers=8, cluster="local:8", block=64)
    for rate, spills in (("1e4", True), ("1e10", False)):
        scale = build(ScaleConfig, {"rate": rate})
        unknown = make_plan(knobs, cube, SEED)
        assert "the time of a patch is unknown" in dict(unknown.lines())["  taken"]
        plan = at_rate(knobs, scale, unknown)
        said, once = dict(plan.lines()), patches_of_one(knobs, plan)
        assert plan.geometry.spills == spills == (plan.spill is not None)
        assert (plan.num_patches == once) == spills
        assert said["  taken"].startswith("spill: " if spills else "recompute: ")
        assert "1.00 of one process's" in said["  spill"] and "predicted" in said["  spill"]
        assert (
            " a patch (--rate), 191 MiB/s of scratch for each worker (assumed; " in said["  rates"]
        )
        assert "spilled in all, at most" in said["  spill"]
        assert "1.00" not in said["  recompute"] and "predicted" in said["  recompute"]
        assert expect(load_of(knobs, plan, Fleet(8, 1e4)), Fleet(8, 1e4)).seconds > 0
        assert "borders" in dict(scale_lines(knobs, scale, plan))


def test_what_is_spilled_passes_the_store_twice_and_its_joins_the_client() -> None:
    cube = facts((512,) * 3, write_grids=((64,) * 3,), patch_seconds=1.0)
    knobs = {"workers": 8, "cluster": "local:8", "block": 64, "parts": 8, "normalize": "none"}
    both = [make_plan(config(**knobs, spill=spill), cube, SEED) for spill in ("always", "never")]
    fleet = Fleet(8, 1e6, bandwidth=1e3, tasks_per_second=1e9)
    spilled, plain = (load_of(config(**knobs), plan, fleet) for plan in both)
    spill, parts = both[0].spill, len(spilled.work)
    assert spill is not None and (spilled.joins, plain.joins) == (parts, 0)
    moved = both[0].read_bytes + both[0].output_bytes + 2 * spill.bytes
    assert spilled.work.total / spilled.store == pytest.approx(moved / 1e3)
    assert plain.work.total / plain.scheduler == pytest.approx(len(plain.work) / 1e9)
    assert spilled.work.total / spilled.scheduler == pytest.approx(2 * parts / 1e9)
    assert expect(spilled, fleet).tasks == simulate(spilled, fleet, 1, 0)[0].tasks == 2 * parts
    scale = build(ScaleConfig, {"rate": 1e6, "bandwidth": 1e3, "simulate": (1,)})
    text = dict(scale_lines(config(**knobs), scale, both[0]))
    assert text["store"].startswith(f"{format_bytes(moved)} to read and write")


def test_what_is_spilled_at_once_is_refused_or_avoided_where_it_is_more_than_is_allowed() -> None:
    cube = facts((512,) * 3, write_grids=((64,) * 3,), patch_seconds=1.0)
    knobs = {"workers": 8, "cluster": "local:8", "block": 64}
    plan = make_plan(config(**knobs, spill="always"), cube, SEED)
    assert plan.spill is not None and 10**6 < plan.spill.peak <= plan.spill.bytes
    plan.refuse()
    small = {**knobs, "max_spill": "1MB"}
    with pytest.raises(Refused, match=r"may spill 977 KiB; give a larger --max-spill or --spi"):
        make_plan(config(**small, spill="always"), cube, SEED).refuse()
    plan = make_plan(config(**small), cube, SEED)
    plan.refuse()
    assert not plan.geometry.spills
    assert "--max-spill 977 KiB is less" in dict(plan.lines())["  taken"]
    assert make_plan(config(**knobs), cube, SEED).geometry.spills
    assert make_plan(config(**knobs, spill="never"), cube, SEED).ways is None


def test_workers_of_this_machine_are_counted_and_both_ways_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    zarr.create_array("in.zarr", shape=(256,) * 3, chunks=(64,) * 3, dtype="uint16")
    job = (
        "plan --in-spec in.zarr --out-spec out.zarr --model-type identity --devices cpu "
        "--patch 64 --overlap 10 --normalize none --cluster local:2 --rate 1e4"
    )
    assert main(job.split()) == 0
    lines = [
        re.split("  +", line.strip(), maxsplit=1) for line in capsys.readouterr().out.splitlines()
    ]
    said = {words[0]: words[1] for words in lines if len(words) == 2}
    assert said["parts"].startswith("2 of ") and said["workers"].startswith("2 of ")
    for way in ("recompute", "spill"):
        assert re.search(r" patches, .* [KM]iB read, .* s predicted", said[way])
    assert " spilled in all, at most " in said["spill"]
    assert said["taken"].endswith(": it is predicted to end first")


def test_the_work_of_planning_grows_no_faster_than_an_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wanted is less than 2 s for a petabyte, without imports. Calls are counted, which no load of
    the machine changes. It took 0.3 s of CPU; the bound on the seconds is a guard, no more."""
    monkeypatch.chdir(tmp_path)
    calls, seconds = [], 0.0
    for side in (200, 8_000, 80_000):
        zarr.create_array(f"{side}.zarr", shape=(side,) * 3, chunks=(128,) * 3, dtype="uint16")
        words = (
            f"plan --in-spec {side}.zarr --out-spec out.zarr --model-type identity --devices cpu "
            "--normalize global --workers 1000 --rate 2e6 --mtbf 100 --bandwidth 50GB"
        )
        if side == 200:  # imports, and is not counted
            assert main(words.split()) == 0
            continue
        began, profile = time.process_time(), cProfile.Profile()
        assert profile.runcall(main, words.split()) == 0
        seconds = time.process_time() - began
        calls.append(sum(entry.callcount for entry in profile.getstats()))
    assert calls[1] < 10 * calls[0]
    assert seconds < 10
