"""Two workers of a cluster against one process on the same cores, and the client against bare Dask.

    python benchmarks/cluster.py                           the numbers of README.md: 512 cubed
    python benchmarks/cluster.py --size 128 --rounds 1     a smoke test; README stays as it is

Contenders take turns. Each launch is a fresh process, and its output is compared with that of one
thread. Computing seconds run from the first part to the last unit; the rest is the start and the
end of processes. A run begins its first patch when it takes the first sample of its memory.
No-op items are timed through `cluster.share` and through bare Dask, in turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

import readme
from infer import make_volume, warm
from penstock import open_source
from penstock.base import OnWorkers, usable_cores
from penstock.cluster import connect, share

HERE = Path(__file__).resolve().parent
CONTENDERS = {
    "one process": ["--threads", "2"],
    "one thread": ["--threads", "1"],
    "two workers": ["--threads", "1", "--cluster", "local:2"],
}
NOOPS = 2000
Row = dict[str, Any]


def launch(source: Path, out: Path, net: str, words: list[str]) -> Row:
    """One run of a contender in a fresh process."""
    command = [
        sys.executable, "-m", "penstock", "infer", "--in-spec", str(source),
        "--out-spec", str(out), "--model-type", f"{HERE / 'models.py'}:{net}", "--devices", "cpu",
        "--normalize", "none", "--head-kind", "intensity", "--overlap", "16",
        "--block", "128", "--overwrite", *words,
    ]  # fmt: skip
    warm(source)
    began = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wall = time.time() - began
    folder = Path(f"{out}.penstock")
    summary = json.loads((folder / "summary.json").read_text())
    computing = summary["seconds"] - summary["startup_seconds"]
    kept = sum(summary["stages"][name]["busy"] for name in ("checksum", "note"))
    rows = [path.read_text().splitlines()[1] for path in folder.glob("metrics*.jsonl")]
    return {
        "computing": computing,
        "first": min(json.loads(row)["time"] for row in rows) - began,
        "rest": wall - computing,
        "cpu": summary["cpu_seconds"],
        "kept": kept,
    }


def same(one: Path, other: Path) -> bool:
    """Whether two outputs hold the same values."""
    values = [(store := open_source(path)).read(store.domain) for path in (one, other)]
    return np.array_equal(*values)


def launches(folder: Path, size: int, rounds: int, nets: list[str]) -> Iterator[Row]:
    source = folder / "in.zarr"
    make_volume(source, size)
    for number in range(rounds):
        for net in nets:
            for name, words in CONTENDERS.items():
                out = folder / f"{name.replace(' ', '-')}.zarr"
                yield {"net": net, "contender": name, "round": number, "size": size,
                       **launch(source, out, net, words)}  # fmt: skip
            if not same(folder / "one-thread.zarr", folder / "two-workers.zarr"):
                raise SystemExit(f"{net}: two workers did not write what one thread wrote")


def noop(number: int) -> int:
    return number


def rates() -> Iterator[Row]:
    """No-op items a second, ours and bare, three times in turns."""
    with connect(OnWorkers(cluster="local:2")) as workers:
        for number in range(3):
            began = time.monotonic()
            done = sum(1 for _ in share(workers, noop, range(NOOPS)))
            ours = done / (time.monotonic() - began)
            began = time.monotonic()
            futures = workers.client.map(noop, range(NOOPS), pure=False)
            workers.client.gather(futures)
            bare = NOOPS / (time.monotonic() - began)
            yield {"contender": "no-op", "round": number, "ours": ours, "bare": bare}


def lines(rows: list[Row]) -> Iterator[str]:
    """The report: medians, and the ratios of each round."""
    yield (
        f"{date.today()}, {platform.processor() or platform.machine()}, {usable_cores()} cores. "
        "Ratios are taken within a round; the range is over rounds."
    )
    yield ""
    yield (
        "| net | size | one process | two workers | ratio | first patch, one | two "
        "| begin and end, one | two | checksum, log |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    runs = [row for row in rows if "net" in row]
    for net in dict.fromkeys(row["net"] for row in runs):
        by = {
            name: sorted(
                (row for row in runs if (row["net"], row["contender"]) == (net, name)),
                key=lambda row: row["round"],
            )
            for name in CONTENDERS
        }
        one, two = by["one process"], by["two workers"]
        ratios = [b["computing"] / a["computing"] for a, b in zip(one, two, strict=True)]
        share = statistics.median(row["kept"] / row["cpu"] for row in two)
        yield (
            f"| {net} | {one[0]['size']} | {_median(one, 'computing')} "
            f"| {_median(two, 'computing')} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
            f"| {_median(one, 'first')} | {_median(two, 'first')} "
            f"| {_median(one, 'rest')} | {_median(two, 'rest')} | {share:.2%} of CPU seconds |"
        )
    yield ""
    shares = [row["ours"] / row["bare"] for row in rows if row["contender"] == "no-op"]
    rates_ = [row["ours"] for row in rows if row["contender"] == "no-op"]
    yield (
        f"The client does {statistics.median(rates_):.0f} no-op tasks a second, "
        f"{statistics.median(shares):.2f} of bare Dask ({min(shares):.2f} to {max(shares):.2f})."
    )


def _median(rows: list[Row], what: str) -> str:
    return f"{statistics.median(row[what] for row in rows):.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nets", nargs="+", default=["three_conv", "unet"])
    parser.add_argument(
        "--results", type=Path, default=HERE / "results", help="folder of raw samples"
    )
    parser.add_argument("--readme", action="store_true", help="write the report into README.md")
    args = parser.parse_args()
    rows: list[Row] = []
    samples = args.results / "cluster.jsonl"
    with tempfile.TemporaryDirectory() as folder, samples.open("w") as results:
        place = Path(folder)
        for each in (launches(place, args.size, args.rounds, args.nets), rates()):
            for row in each:
                rows.append(row)
                results.write(json.dumps(row) + "\n")
                results.flush()
                print(row, flush=True)
    text = "\n".join(lines(rows))
    print(text)
    if args.readme or (args.size, args.rounds) == (512, 3):
        readme.write("cluster", text)


if __name__ == "__main__":
    main()
