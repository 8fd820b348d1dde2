"""Phases of steps: shares, and what a training prints of them."""

from pathlib import Path

import pytest

from penstock.cli.train import summary_lines as lines
from penstock.scaling.runs import Rank, phases_of, share
from penstock.scaling.sources.trainings import own_work

from .kit import run


def test_rows_that_are_cut_short_are_passed_over() -> None:
    rows = [
        {"forward_s": "0.1", "data_wait_s": "0.2", "communication_s": "0.01"},
        {"forward_s": "x"},
        {"step": "3", "forward_s": ""},
    ]
    assert own_work(rows) == (pytest.approx(0.3),)


def test_shares_of_phases() -> None:
    one = run(2, epochs=2, ranks=(Rank(0, {"step": 8.0, "communication": 2.0, "forward": 4.0}),))
    assert share([one], "communication") == pytest.approx(2 / 6)
    assert share([one], "data_wait") is None
    assert phases_of([one]) == {"step": 4.0, "communication": 1.0, "forward": 2.0}
    assert share([run()], "communication") is None


def test_no_share_passes_all_of_it_where_the_host_ran_ahead_of_a_gpu() -> None:
    """The phases are the device's; the host's step ends before their times are asked for."""
    totals = {"step": 2.0, "data_wait": 0.5, "forward": 3.0, "communication": 4.0, "backward": 0.5}
    one = run(2, epochs=2, ranks=(Rank(0, totals),))
    assert share([one], "communication") == 0.5
    assert share([one], *(name for name in totals if name != "step")) == 1.0


def test_the_shares_that_a_training_prints_are_of_its_steps() -> None:
    def phase(seconds: float) -> dict[str, float]:
        return {"total_s": seconds, "median_s": seconds}

    took = {"step": 8.0, "data_wait": 1.0, "forward": 3.0, "communication": 4.0}
    rank = {
        "rank": 0,
        "phases": {**{name: phase(s) for name, s in took.items()}, "transfer": None},
        "memory": {"host_peak": 1, "device_peak": None},
    }
    results = {
        "workload": "spiral", "parameters": 1, "world_size": 1, "device": "a GPU", "steps": 1,
        "global_batch_size": 1, "samples_per_s": None, "best": None, "ranks": [rank],
    }  # fmt: skip
    printed = lines(results, Path("out"))
    assert "rank 0: 8.00 s a step: data_wait 12%, forward 38%, communication 50%" in printed
    assert "repeated" not in " ".join(printed)
    padded = lines({**results, "world_size": 4, "repeated_samples": 3}, Path("out"))
    assert any("3 samples of each epoch repeated, so that all 4 ranks" in line for line in padded)
