"""``penstock tune infer``: the settings that pay, from made-up launches and from real ones."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.bench.cases.infer_cases import other_cases, patch_cases
from penstock.bench.launch.sweep import ROUNDS, halved
from penstock.cli import main
from penstock.instruments.record import Record
from penstock.reports.tune.settings_advice import (
    TriedSettings,
    best_trial,
    prediction,
    whole_seconds,
)

from ..bench.conftest import launches_here
from ..bench.records import made_record

__all__ = ["launches_here"]  # a fixture


def launch(patch: int, seconds: list[float], number: int = 0) -> Record:
    """A launch whose runs over 10 patches took so long, of a volume of 100 patches."""
    return made_record(
        "infer", {"settings": {"patch": patch}}, number, work={"patches": 10},
        samples_s={"step": seconds, "run": seconds}, facts={"patches": 100},
        warmup={"setup_s": 2.0},
    )  # fmt: skip


def trial(patch: int, *launches: list[float]) -> TriedSettings:
    records = [launch(patch, seconds, n) for n, seconds in enumerate(launches)]
    return TriedSettings(f"patch {patch}", {}, records)


def test_a_setting_wins_only_beyond_the_noise() -> None:
    usual = trial(64, [2.0, 2.1], [2.05, 1.95])
    assert whole_seconds(usual.records[0]) == pytest.approx([20, 21])
    assert usual.seconds.value == pytest.approx(20.25)
    fast = trial(144, [1.0, 1.1], [1.05, 0.95])
    best, said = best_trial([usual, trial(96, [1.9, 2.2], [1.8, 2.3]), fast])
    assert best is fast and "0.51 of the time of patch 64" in said[2]
    said_before = prediction(best)
    assert "100 patches, takes about 10.2 s" in said_before and "of 2.00 s" in said_before
    for other in (trial(96, [1.9, 2.2], [1.8, 2.3]), trial(96, [1.0, 1.0])):
        best, said = best_trial([usual, other])
        assert best is usual and len(said) == 3


def test_the_slower_half_leaves_after_each_round_and_the_first_case_stays() -> None:
    launched: list[tuple[int, int]] = []

    def measure(case: int, number: int) -> Record:
        launched.append((case, number))
        return (
            launch(case, [float(case)]) if case != 2 else made_record("infer", {}, status="crash")
        )

    def cost(record: Record) -> float:
        return record.samples_s["run"][0]

    records = halved([9, 4, 2, 3, 5], measure, cost, lambda: False, seed=0)
    assert [len(each) for each in records] == [ROUNDS, 2, 1, ROUNDS, 1]
    assert launched[0] == (9, 0)
    launched.clear()
    assert [len(each) for each in halved([9, 4], measure, cost, lambda: True, seed=0)] == [1, 0]


def test_cases_differ_in_one_setting_that_the_user_does_not_name() -> None:
    facts = {"patch": [64, 64, 64], "volume": [40, 200, 300], "batch": 2, "threads": 4,
             "block": [32, 64, 64]}  # fmt: skip
    case: dict[str, Any] = {"settings": {}, "seconds": 1.0}
    patches = [each["settings"]["patch"] for each in patch_cases(case, facts)]
    assert patches[0] == [32, 64, 64] and patches[-1] == [32, 192, 192]
    changed = [each["settings"] for each in other_cases(case, facts)]
    assert {"threads": 2} in changed and {"block": [64, 128, 128]} in changed
    named = {"settings": {"patch": [48], "threads": 4, "block": [32]}, "seconds": 1.0}
    assert not patch_cases(named, facts) and not other_cases(named, facts)
    assert {"batch": 8} in [one["settings"] for one in other_cases(case, facts | {"threads": None})]
    flat = facts | {"volume": [1, 200, 300], "block": [1, 64, 64]}  # half a plane is no block
    assert {"block": [1, 32, 32]} in [one["settings"] for one in other_cases(case, flat)]


@pytest.mark.usefixtures("launches_here")
def test_settings_for_a_job_of_ones_own(capsys, here) -> None:
    assert main("generate volume in.ome.zarr --shape 8 48 48".split()) == 0
    words = "in.ome.zarr out.ome.zarr --model identity --patch 16 --overlap 4".split()
    tuned = ["--output", "fast.yaml", "--launch-seconds", "0.01", "--most-seconds", "0.2"]
    assert main(["tune", "infer", *words, *tuned]) == 0
    said = capsys.readouterr().out
    assert "The whole volume, " in said and not Path("out.ome.zarr").exists()
    settings = yaml.safe_load(Path("fast.yaml").read_text())
    assert settings["patch"] == [16] and "in_spec" not in settings
    command = next(line for line in said.splitlines() if "penstock infer" in line)
    assert main(command.split()[1:]) == 0
    assert Path("out.ome.zarr").exists()

    assert main(["tune", "infer", *words, "--cluster", "local", "--output", "other.yaml"]) == 2
    assert "leave out --cluster" in capsys.readouterr().err
    assert main(["tune", "infer", "gone.zarr", *words[1:], "--output", "other.yaml"]) == 2
    assert not Path("other.yaml").exists()
