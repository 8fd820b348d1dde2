"""A scaling study of one and two processes on the cores of this machine: a demonstration.

    python benchmarks/study.py            the page of README.md, about five minutes
    python benchmarks/study.py --quick    a smoke test, README untouched

``torchrun`` trains the spiral on one process and on two, in turns, each with a
thread, and ``penstock scaling`` says what that gave. Two processes of one machine share its memory
and caches, and sum gradients by gloo: what is shown is the way, and nothing of GPUs or a network.
"""

from __future__ import annotations

import argparse
import csv
import platform
import shutil
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import readme
from penstock.instruments.environment import collect_environment

HERE = Path(__file__).resolve().parent
PENSTOCK = [sys.executable, "-m", "penstock"]
COLUMNS = (
    "kind devices runs seconds speedup speedup_low speedup_high efficiency samples_per_s "
    "exposed_communication val_loss val_acc"
).split()


def train(out: Path, ranks: int, flags: list[str]) -> None:
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    words = ["penstock", "train", "spiral", "--distributed", "--device", "cpu"]
    command = [sys.executable, "-m", *launch, *words, "--output-dir", str(out), *flags]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _short(cell: str) -> str:
    """A number of a table in three figures."""
    return f"{float(cell):.3g}" if "." in cell else cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test; README untouched")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    rounds, flags = 5, ["--num-samples", "40000", "--epochs", "3", "--threads", "1"]
    if args.quick:
        rounds, flags = 1, ["--num-samples", "200", "--epochs", "1", "--threads", "1"]
    day = datetime.now(UTC).date().isoformat()
    report = args.results / f"{day}-study"
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for ranks in (1, 2):
                train(Path(folder) / "runs" / f"{ranks}-{number}", ranks, flags)
        shutil.rmtree(report, ignore_errors=True)
        words = [
            "scaling",
            "runs",
            "--output",
            str(report.resolve()),
            "--machine",
            platform.system(),
        ]
        subprocess.run([*PENSTOCK, *words], check=True, cwd=folder)
    here = collect_environment()["machine"]
    rows = list(csv.DictReader((report / "scaling.csv").open(newline="")))
    page = f"results/{report.name}/scaling.md"
    of = f"{here['processor']}, {here['cores']} cores, {rounds} runs of each in turns"
    lines = [
        f"{day}, {of} ([page]({page})).",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
        *("| " + " | ".join(_short(row[name]) for name in COLUMNS) + " |" for row in rows),
    ]
    print("\n".join(lines))
    if not args.quick:
        readme.write("study", "\n".join(lines))


if __name__ == "__main__":
    main()
