"""What the measuring core costs, and whether it measures what it says.

    python benchmarks/harness.py             the numbers of README.md, about a minute
    python benchmarks/harness.py --quick     a smoke test, README untouched

Three questions, each a ratio within one run:

    overhead     a step that spins for exactly 1 ms by its own clock, as `measure` sees it
    agreement    the same op timed by `measure` and by torch.utils.benchmark, taking turns
    ledger       1,000 recorded launches: loaded, compared, summarised and exported

Every sample goes to ``results/<date>-harness.json``; the table in README.md is computed from it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.benchmark import Timer

import readme
from penstock.bench.measure import Rules, measure_scenario
from penstock.instruments import environment
from penstock.instruments.ledger import Ledger, ledger_to_csv, read_ledger
from penstock.instruments.record import Record, case_key
from penstock.reports.compare import compare_records

HERE = Path(__file__).resolve().parent
STEP_S = 1e-3
OVERHEAD, AGREEMENT, LEDGER_S = 0.01, 0.02, 2.0


class Spin:
    """A step of exactly ``STEP_S`` by its own clock; what it took is kept."""

    device = "cpu"
    facts: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self.began: list[float] = []
        self.own: list[float] = []

    def step(self, phase: Any) -> Mapping[str, float]:
        began = now = time.perf_counter()
        while now - began < STEP_S:
            now = time.perf_counter()
        self.began.append(began)
        self.own.append(now - began)
        return {"steps": 1}

    def close(self) -> None: ...


class Op:
    """A matrix product on one thread."""

    device = "cpu"
    facts: Mapping[str, Any] = {}

    def __init__(self, side: int = 256) -> None:
        self.a, self.b = torch.rand(side, side), torch.rand(side, side)

    def step(self, phase: Any) -> Mapping[str, float]:
        self.a @ self.b
        return {"products": 1}

    def close(self) -> None: ...


def overhead(seconds: float) -> dict[str, Any]:
    """Seconds per step: the step's own, the harness's sample, and the wall clock over all steps."""
    spin = Spin()
    warm: list[int] = []

    def report(stage: str) -> None:
        warm.append(len(spin.own))

    # A precision that is never reached: the run ends by its budget.
    measurement = measure_scenario(spin, Rules(seconds=seconds, precision=1e-9), report)
    first = warm[-1]
    wall = (spin.began[-1] - spin.began[first]) / (len(spin.own) - 1 - first)
    step = statistics.median(spin.own[first:])
    sample = statistics.median(measurement["samples_s"]["step"])
    return {
        "own_s": step,
        "sample_s": sample,
        "wall_s": wall,
        "sample_over_own": sample / step - 1,
        "wall_over_own": wall / statistics.fmean(spin.own[first:-1]) - 1,
        "samples": measurement["samples_s"]["step"],
    }


def agreement(rounds: int, seconds: float) -> dict[str, Any]:
    """Medians of both harnesses on one op, in turns: ours, theirs, theirs, ours."""
    op = Op()
    torch.set_num_threads(1)
    timer = Timer("a @ b", globals={"a": op.a, "b": op.b}, num_threads=1)

    def ours() -> float:
        rules = Rules(seconds=seconds, precision=1e-9)
        return statistics.median(
            measure_scenario(op, rules, lambda stage: None)["samples_s"]["step"]
        )

    def theirs() -> float:
        return float(timer.blocked_autorange(min_run_time=seconds).median)

    rows = []
    for number in range(rounds):
        first, second = (ours, theirs) if number % 2 == 0 else (theirs, ours)
        times = {first.__name__: first(), second.__name__: second()}
        rows.append(times)
    ratios = [row["ours"] / row["theirs"] for row in rows]
    return {"rounds": rows, "ratios": ratios, "ratio": statistics.median(ratios)}


def ledger_of(folder: Path, launches: int) -> dict[str, Any]:
    """Seconds to load, compare and export a ledger of so many launches of 50 samples each."""
    rng = np.random.default_rng(0)
    surroundings = environment.collect_environment()
    for side in "ab":
        ledger = Ledger(folder / side)
        lines = []
        for number in range(launches // 2):
            case = {"tile": str(number // 5), "batch": 1}
            samples = tuple(0.01 * rng.lognormal(sigma=0.02, size=50))
            lines.append(
                Record(
                    schema=1,
                    id=f"{side}{number}",
                    time="2026-01-01T00:00:00+00:00",
                    scenario="model",
                    case=case,
                    key=case_key("model", case),
                    launch=number % 5,
                    status="ok",
                    work={"samples": 1},
                    samples_s={"step": samples},
                    environment=surroundings,
                )
            )
        ledger.append(lines[0])  # makes the folder; the rest without a sync each
        with ledger.path.open("a") as file:
            file.writelines(record.line() + "\n" for record in lines[1:])
    began = time.perf_counter()
    a, b = read_ledger(folder / "a"), read_ledger(folder / "b")
    loaded = time.perf_counter()
    verdicts = compare_records(a, b, threshold=None, anyway=False, metric="step")
    compared = time.perf_counter()
    ledger_to_csv([*a, *b], folder / "all.csv")
    exported = time.perf_counter()
    return {
        "launches": len(a) + len(b),
        "cases": len(verdicts.rows),
        "load_s": loaded - began,
        "compare_s": compared - loaded,
        "export_s": exported - compared,
        "total_s": exported - began,
    }


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """The README's table."""
    cost, same, kept = result["overhead"], result["agreement"], result["ledger"]
    ratios = same["ratios"]

    def row(what: str, value: str, target: str, met: bool) -> str:
        return f"| {what} | {value} | {target} | {'met' if met else '**NOT MET**'} |"

    return [
        f"{result['time'][:10]}, {result['machine']}, load average {result['load']:.1f} before.",
        "",
        "| what | measured | target | |",
        "|---|---|---|---|",
        row(
            "overhead inside a sample, step of 1 ms",
            f"{cost['sample_over_own']:.3%} (median of {len(cost['samples'])} samples)",
            "< 1 %",
            cost["sample_over_own"] < OVERHEAD,
        ),
        f"| statistics between samples, part of no number | {cost['wall_over_own']:.2%} | | |",
        row(
            "256 x 256 matrix product, one thread: ours / torch.utils.benchmark",
            f"{same['ratio']:.4f} [{min(ratios):.4f} - {max(ratios):.4f}], {len(ratios)} rounds",
            "1 +- 0.02",
            abs(same["ratio"] - 1) <= AGREEMENT,
        ),
        row(
            f"{kept['launches']:,} launches, {kept['cases']} cases: load, compare, export",
            f"{kept['load_s']:.2f} + {kept['compare_s']:.2f} + {kept['export_s']:.2f} s",
            "< 2 s",
            kept["total_s"] < LEDGER_S,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test; README untouched")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    machine = environment.collect_environment()["machine"]
    result: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{machine['processor']}, {machine['cores']} cores, {platform.system()}",
        "load": os.getloadavg()[0],
        "overhead": overhead(0.3 if args.quick else 10.0),
        "agreement": agreement(2 if args.quick else 12, 0.05 if args.quick else 1.0),
    }
    with tempfile.TemporaryDirectory() as folder:
        result["ledger"] = ledger_of(Path(folder), 100 if args.quick else 1000)
    lines = lines_of(result)
    print("\n".join(lines))
    args.results.mkdir(parents=True, exist_ok=True)
    raw = args.results / f"{result['time'][:10]}-harness.json"
    raw.write_text(json.dumps(result) + "\n")
    if not args.quick:
        readme.write("harness", "\n".join(lines))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
