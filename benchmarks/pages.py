"""How long a report of 1,000 records and a page of 100,000 runs take.

    python benchmarks/pages.py                                            the sizes of the targets
    python benchmarks/pages.py --cases 4 --runs 100 --rounds 1            a smoke test

Prints a JSON line for each measurement, and writes nothing. Processor seconds (user and system) say
more than those of a clock where others use the cores, so both are there.

    report    `penstock report` of a sweep of models, five launches a case, in a fresh process
    help      `penstock report --help`, in a fresh process
    page      the data of a page of runs: its rows, and the details of the newest
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.reports.kit import sized

from penstock.reports import Catalogue, ShownRun, page_data

DAY = 86_400.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ledger, page = Path(folder) / "models.jsonl", Path(folder) / "page.html"
        sides = range(1, max(1, asked.cases // 10) + 1)
        cases = [(32 * side, batch) for side in sides for batch in range(1, 11)][: asked.cases]
        records = sized({(tile, batch): tile * batch / 100 for tile, batch in cases})
        ledger.write_text("".join(f"{record.line()}\n" for record in records))
        words = ["report", str(ledger), "--output", str(page), "--overwrite"]
        for number in range(asked.rounds):
            show("report", number, *alone(words), records=len(records), bytes=page.stat().st_size)
            show("help", number, *alone(["report", "--help"]))
    for number in range(asked.rounds):
        spent, data = here(page_data, Catalogue.holding(list(listed(asked.runs))))
        show("page", number, *spent, records=asked.runs, rows=len(data["rows"]))


def listed(count: int) -> Iterator[Any]:
    for number in range(count):
        yield ShownRun(
            f"{number}", f"{number // 3}", f"spiral {number}", "training", "complete", "/runs",
            workload="spiral" if number % 2 else "detector",
            machine=("raven", "viper", "cobra")[number % 3], began=number % 90 * DAY,
            seconds=float(number % 977), tags={"node": ("a100", "h200")[number % 4 // 2]},
        )  # fmt: skip


def alone(words: Sequence[str]) -> tuple[float, float]:
    """Seconds of the processor and of the clock that a command of Penstock takes."""
    before, began = os.times(), time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "penstock", *words], check=True, stdout=subprocess.DEVNULL
    )
    seconds, after = time.perf_counter() - began, os.times()
    user = after.children_user - before.children_user
    return user + after.children_system - before.children_system, seconds


def here(does: Callable[[Any], Any], of: Any) -> tuple[tuple[float, float], Any]:
    """The same of a function in this process, and what it returns."""
    cpu, began = time.process_time(), time.perf_counter()
    made = does(of)
    return (time.process_time() - cpu, time.perf_counter() - began), made


def show(what: str, round_number: int, cpu: float, seconds: float, **facts: int) -> None:
    row = {"what": what, "round": round_number, "cpu_s": round(cpu, 4), "s": round(seconds, 4)}
    print(json.dumps(row | facts), flush=True)


if __name__ == "__main__":
    main()
