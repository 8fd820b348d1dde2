"""How soon Penstock refuses a file that claims, nests or waits without end.

    python benchmarks/refusals.py            five rounds; the table of README.md
    python benchmarks/refusals.py --quick    one round, README untouched

Each launch is ``penstock infer`` in a fresh process. A path that is missing is refused first in
each round, and every hostile input of that round is compared with it, so that a busy machine slows
both. An input must end with exit 2 and one sentence. Samples go to ``results/refusals.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import readme

SAMPLES = Path(__file__).resolve().parent / "results" / "refusals.jsonl"
ROUNDS = 5
LIMIT_S = 1.0
HUGE, DEEP = 2**62, 100_000
KNOBS = "--out-spec out.zarr --model-type identity --patch 8 --overlap 2 --devices cpu".split()
V2 = {
    "zarr_format": 2, "chunks": [8, 8, 8], "dtype": "|u1", "compressor": None, "fill_value": 0,
    "order": "C", "filters": None, "shape": [8, HUGE, 8],
}  # fmt: skip


def written(name: str, text: str) -> list[str]:
    Path("in.zarr").mkdir()
    Path("in.zarr", name).write_text(text)
    return ["--in-spec", "in.zarr"]


def of_a_pipe() -> list[str]:
    Path("in.zarr").mkdir()
    os.mkfifo("in.zarr/zarr.json")
    return ["--in-spec", "in.zarr"]


def of_aliases() -> list[str]:
    lines = (f"- &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
    Path("a.yaml").write_text("tag:\n- &a0 [x]\n" + "".join(lines))
    return ["--in-spec", "missing.zarr", "--config", "a.yaml"]


MISSING = "a path that is missing"
INPUTS: dict[str, Callable[[], list[str]]] = {
    MISSING: lambda: ["--in-spec", "missing.zarr"],
    "a shape of 2**62": lambda: written(".zarray", json.dumps(V2)),
    "JSON nested 100,000 deep": lambda: written("zarr.json", "[" * DEEP + "]" * DEEP),
    "a pipe called zarr.json": of_a_pipe,
    "a YAML of aliases": of_aliases,
}


def refused(name: str, round_: int) -> dict[str, Any]:
    """One launch in an empty folder: its seconds, exit code and sentence."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        command = [sys.executable, "-m", "penstock", "infer", *INPUTS[name](), *KNOBS]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        took = time.perf_counter() - began
        os.chdir(here)
    return {
        "input": name, "round": round_, "seconds": took, "exit": done.returncode,
        "sentence": done.stderr.strip(),
    }  # fmt: skip


def table(samples: list[dict[str, Any]]) -> str:
    """The table of README.md, and its verdict."""
    rounds = sorted({sample["round"] for sample in samples})
    seconds = {(sample["input"], sample["round"]): sample["seconds"] for sample in samples}
    worst, lines = (
        0.0,
        [
            "| input | seconds, median | beyond the missing path: median [least to most] |",
            "|---|---|---|",
        ],
    )
    for name in INPUTS:
        median = statistics.median(seconds[name, i] for i in rounds)
        more = sorted(seconds[name, i] - seconds[MISSING, i] for i in rounds)
        worst = max(worst, more[-1])
        beyond = f"{statistics.median(more):+.2f} [{more[0]:+.2f} to {more[-1]:+.2f}]"
        lines.append(f"| {name} | {median:.2f} | {'' if name == MISSING else beyond} |")
    good = sum(sample["exit"] == 2 and "\n" not in sample["sentence"] for sample in samples)
    met = "met" if worst <= LIMIT_S else "missed"
    verdict = (
        f"{good} of {len(samples)} launches ended with exit 2 and one sentence. "
        f"At most {LIMIT_S:g} s beyond the missing path: {met}."
    )
    machine = f"{platform.system()}, {os.cpu_count()} cores; rounds: {len(rounds)}."
    return "\n".join([machine, "", *lines, "", verdict])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round; README stays as it is")
    quick = parser.parse_args().quick
    samples = [refused(name, i) for i in range(1 if quick else ROUNDS) for name in INPUTS]
    print(table(samples))
    if not quick:
        SAMPLES.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        readme.write("refusals", table(samples))


if __name__ == "__main__":
    main()
