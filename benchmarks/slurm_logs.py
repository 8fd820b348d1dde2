"""How fast ``penstock scaling`` reads the log of a job, and in how much memory.

    python benchmarks/slurm_logs.py                        the numbers of README.md: 300 MB and 2 GB
    python benchmarks/slurm_logs.py --mb 20 --rounds 1     a smoke test; README stays as it is

Every line of a log is of an epoch or a step, and eight ranks take turns. Contenders take turns as
well, each in a fresh process. The limit is a loop over the same lines that does nothing.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import readme

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "slurm-logs.jsonl"
TARGET_MB_S, TARGET_BYTES = 40, 100e6
LARGE_MB = 2000
RANKS, STEPS = 8, 1000
HEADER = (
    "Job ID: 77\nNumber of nodes: 2\nNumber of tasks: 8\nMax epochs: 50\n"
    "Batch size (per GPU): 32\nEffective batch size (batch_size x num_gpus): 256\n"
)
ALONE = """
import resource, sys, time
from pathlib import Path
path, kind = Path(sys.argv[1]), sys.argv[2]
if kind == "penstock":
    from penstock.scaling.sources.slurm_log import read_log
before = time.process_time()
if kind == "penstock":
    (run,) = read_log(path)
    assert run.steps or run.val_loss is not None
else:
    import gzip
    with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
        for line in file:
            pass
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(time.process_time() - before, peak)
"""


def bars(rng: random.Random) -> Iterator[str]:
    """Bars of progress, as Lightning prints them."""
    for step in range(STEPS):
        full = "█" * (step // 100)
        for _ in range(RANKS):
            yield (
                f"Epoch {{epoch}}: {step // 10:3d}%|{full:<10}| {step + 1}/{STEPS} "
                f"[00:{step % 60:02d}<00:01, {rng.uniform(1, 50):.2f}it/s, v_num=1, "
                f"val_loss={rng.random():.3f}, val_acc={rng.random():.3f}, "
                f"train_loss={rng.random():.3f}]\n"
            )


def epochs(rng: random.Random) -> Iterator[str]:
    """Lines of an epoch, as ``penstock train`` prints them."""
    for step in range(RANKS * STEPS):
        yield (
            f"epoch {{epoch}}, step {step + 1} of {RANKS * STEPS}: loss {rng.random():.4f}; "
            f"val_loss {rng.random():.4f}, val_acc {rng.random():.4f}\n"
        )


def labelled(rng: random.Random) -> Iterator[str]:
    """The same bars under ``srun --label``."""
    for number, line in enumerate(bars(rng)):
        yield f"{number % RANKS}: {line}"


def make(path: Path, lines: Callable[[random.Random], Iterator[str]], megabytes: float) -> None:
    """A log of so many megabytes. What an epoch prints is drawn once."""
    text = "".join(lines(random.Random(0)))
    with path.open("w") as file:
        file.write(HEADER)
        epoch = 0
        while file.tell() < megabytes * 1e6:
            file.write(text.replace("{epoch}", str(epoch)))
            epoch += 1


def launch(path: Path, size: int, kind: str) -> dict[str, float]:
    command = [sys.executable, "-c", ALONE, str(path), kind]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, peak = map(float, done.stdout.split())
    return {"mb_s": size / 1e6 / seconds, "peak_bytes": peak}


def measured(folder: Path, megabytes: float, rounds: int, large: float) -> Iterator[dict[str, Any]]:
    logs: dict[str, tuple[Path, int]] = {}
    for lines in (bars, labelled, epochs):
        path = folder / f"{lines.__name__}-1.out"
        make(path, lines, megabytes)
        logs[lines.__name__] = path, path.stat().st_size
    packed = folder / "bars-2.out.gz"
    with logs["bars"][0].open("rb") as source, gzip.open(packed, "wb", 1) as target:
        shutil.copyfileobj(source, target)
    logs["bars, .gz"] = packed, logs["bars"][1]
    for number in range(rounds):
        for name, (path, size) in logs.items():
            for kind in ("lines alone", "penstock"):
                yield {"log": name, "size": size, "contender": kind, "round": number,
                       **launch(path, size, kind)}  # fmt: skip
    path = folder / "large-3.out"
    make(path, bars, large)
    size = path.stat().st_size
    yield {"log": "large", "size": size, "contender": "penstock", "round": 0,
           **launch(path, size, "penstock")}  # fmt: skip


def report(rows: list[dict[str, Any]]) -> str:
    rounds = 1 + max(row["round"] for row in rows)
    lines = [
        f"{date.today()}, {platform.machine()}, Python {platform.python_version()}.",
        f"MB of decompressed text in a second of one core; median (least to most) of {rounds}.",
        "",
        "| log | lines alone | penstock | peak memory |",
        "|---|---|---|---|",
    ]
    slowest, most = float("inf"), 0.0
    for log in dict.fromkeys(row["log"] for row in rows):
        cells, peak = [], 0.0
        for kind in ("lines alone", "penstock"):
            of_kind = [row for row in rows if (row["log"], row["contender"]) == (log, kind)]
            rates = [row["mb_s"] for row in of_kind]
            middle = statistics.median(rates) if rates else None
            cells.append(
                "" if middle is None else f"{middle:.0f} ({min(rates):.0f} to {max(rates):.0f})"
            )
            if kind == "penstock" and middle is not None:
                slowest, peak = min(slowest, middle), max(row["peak_bytes"] for row in of_kind)
        most = max(most, peak)
        size = max(row["size"] for row in rows if row["log"] == log)
        lines.append(f"| {log}, {size / 1e6:.0f} MB | {' | '.join(cells)} | {peak / 1e6:.0f} MB |")
    speed = "met" if slowest >= TARGET_MB_S else "**NOT MET**"
    memory = "met" if most < TARGET_BYTES else "**NOT MET**"
    lines += [
        "",
        f"- {speed}: {TARGET_MB_S} MB/s; the slowest log is read at {slowest:.0f}",
        f"- {memory}: under {TARGET_BYTES / 1e6:.0f} MB of memory; {most / 1e6:.0f} MB were taken",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, default=300, help="megabytes of each log")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    whole = args.mb >= 300 and args.rounds >= 5
    with tempfile.TemporaryDirectory() as folder:
        large = LARGE_MB if whole else args.mb
        rows = list(measured(Path(folder), args.mb, args.rounds, large))
    text = report(rows)
    print(text)
    if whole:
        RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows))
        readme.write("slurm-logs", text)


if __name__ == "__main__":
    main()
