"""The rank that the others wait for, and shares of phases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from penstock.cli.train import summary_lines as lines
from penstock.scaling.runs import Rank
from penstock.scaling.straggler import phases_of, rank_of, share, straggler

from .kit import run


def ranks(slow: int | None, n: int = 4, steps: int = 200, seed: int = 0) -> tuple[Rank, ...]:
    """Ranks whose steps end together; one may have 50 ms more to do."""
    rng = np.random.default_rng(seed)
    local = 0.1 * rng.lognormal(0, 0.02, (n, steps))
    if slow is not None:
        local[slow] += 0.05
    waits = local.max(axis=0) - local + 0.002
    every = []
    for rank in range(n):
        rows = [
            {"data_wait_s": "0.01", "forward_s": str(step_s - 0.01), "communication_s": str(wait)}
            for step_s, wait in zip(local[rank], waits[rank], strict=True)
        ]
        step = float((local[rank] + waits[rank]).sum())
        totals = {"step": step, "communication": float(waits[rank].sum())}
        every.append(replace(rank_of(rank, totals, rows), host=f"n{rank}"))
    return tuple(every)


@pytest.mark.parametrize("slow", [0, 2])
def test_a_rank_slowed_by_50_ms_is_named(slow: int) -> None:
    slowest = straggler(run(4, ranks=ranks(slow)))
    assert slowest is not None
    assert (slowest.rank, slowest.host) == (slow, f"n{slow}")
    assert slowest.excess.value == pytest.approx(0.05, rel=0.05)
    assert slowest.excess.low is not None and slowest.excess.low > 0.045
    assert slowest.wait < slowest.others_wait
    assert slowest.spread is not None and slowest.spread < 0.01


def test_nobody_is_named_without_the_most_work_and_the_least_wait_of_all_ranks() -> None:
    assert [straggler(run(4, ranks=ranks(None, seed=seed))) for seed in range(10)] == [None] * 10
    work = Rank(0, {}, (0.2,) * 9, (0.1,) * 9), Rank(1, {}, (0.1,) * 9, (0.05,) * 9)
    assert straggler(run(2, ranks=work)) is None
    assert straggler(run(4, ranks=ranks(1)[:3])) is None
    assert straggler(run(4)) is None


def test_rows_that_are_cut_short_are_passed_over() -> None:
    rows = [
        {"forward_s": "0.1", "communication_s": "0.01"},
        {"forward_s": "x"},
        {"step": "3", "forward_s": "0."},
    ]
    rank = rank_of(0, {}, rows)
    assert (rank.local, rank.waits) == ((0.1,), (0.01,))
    alone = rank_of(0, {}, [{"forward_s": "0.1", "communication_s": ""}] * 3)
    assert (alone.local, alone.waits) == ((0.1,) * 3, ()), "one that is alone waits for nobody"


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
    assert any(
        "3 samples of each epoch repeated, so that all 4 ranks have" in line for line in padded
    )
