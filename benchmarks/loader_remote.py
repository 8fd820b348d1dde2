"""Batches of data that are far away: the seed's remote rows, on loopback.

    python benchmarks/loader_remote.py            the numbers of README.md, about ten minutes
    python benchmarks/loader_remote.py --quick    a smoke test, README untouched

A small ufs-p1 data set is read over HTTP with every answer late by a stated delay, by 1 to 16
threads, and from an S3 server in a process of its own (moto), whose answers cost a processor time.
The seed's remote batch of 4 took 35, 18, 13, 10 and 10 s with 1, 2, 4, 8 and 16 threads. Its
network is not ours, so it is the shape over threads that is compared, each to its own one thread.
"""

from __future__ import annotations

import argparse
import gzip
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import readme
from penstock.base.units import format_seconds
from penstock.instruments import ledger
from penstock.instruments.record import Record
from penstock.reports.loader import cell as loader_cell

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests"))
from slow_server import Loopback  # noqa: E402

PENSTOCK = [sys.executable, "-m", "penstock"]
SEED_SECONDS = {1: 35.0, 2: 18.0, 4: 13.0, 8: 10.0, 16: 10.0}
LOADERS = ("penstock", "tensorstore-read", "dask-stacked", "dask-sample")
LATENCY_MS = 50


@contextmanager
def s3_server(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """An S3 server that holds a folder in its bucket ``data``: its URL, and whom it lets in."""
    import boto3

    keys = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [
        str(Path(sys.executable).with_name("moto_server")),
        "-H",
        "127.0.0.1",
        "-p",
        str(port),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _wait_for(url)
            client = boto3.client(
                "s3", endpoint_url=url, region_name="us-east-1",
                aws_access_key_id="testing", aws_secret_access_key="testing",
            )  # fmt: skip
            client.create_bucket(Bucket="data")
            for file in sorted(path for path in folder.rglob("*") if path.is_file()):
                client.upload_file(str(file), "data", str(file.relative_to(folder)))
            yield url, keys
        finally:
            server.terminate()


def _wait_for(url: str) -> None:
    for _ in range(100):
        with suppress(URLError), urlopen(url):
            return
        time.sleep(0.2)
    raise SystemExit(f"moto_server does not answer at {url}")


def measured(data: str, out: Path, threads: Sequence[int], flags: Sequence[str]) -> list[Record]:
    words = ["--threads", *map(str, threads), "--batch-sizes", "4"]
    words += ["--no-ladder", "--warmup", "1", "--output", str(out), *flags]
    subprocess.run([*PENSTOCK, "bench", "loader", data, *words], check=False)
    return ledger.read_ledger(out.with_suffix(".ledger"))


def table(records: Sequence[Record]) -> list[str]:
    """Seconds of a batch by threads, and how many times as fast as with one."""
    cells = [cell for cell in loader_cell.loader_cells(records) if cell.launches]
    threads = sorted({cell.threads for cell in cells})
    lines = ["| loader | " + " | ".join(f"{n} thread{'s' * (n > 1)}" for n in threads) + " |"]
    lines.append("|" + "---|" * (len(threads) + 1))
    for loader in LOADERS:
        took = {
            cell.threads: cell.time.value for cell in cells if cell.loader == loader and cell.time
        }
        if threads[0] not in took:
            continue
        cells_of_row = (
            f"{format_seconds(took[n])} ({took[threads[0]] / took[n]:.1f}x)"
            if n in took
            else "failed"
            for n in threads
        )
        lines.append(f"| {loader} | " + " | ".join(cells_of_row) + " |")
    seed = (f"{SEED_SECONDS[n]:g} s ({SEED_SECONDS[1] / SEED_SECONDS[n]:.1f}x)" for n in threads)
    lines.append("| *the seed's, its network* | " + " | ".join(seed) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test; README untouched")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    args = parser.parse_args()
    threads, batches, grid, latency = (1, 2, 4, 8, 16), "5", ["48", "96"], LATENCY_MS
    if args.quick:
        threads, batches, grid, latency = (1, 2), "1", ["8", "16"], 5
    loaders = LOADERS[:1] if args.quick else LOADERS
    flags = ["--batches", batches, "--effort", "quick", "--loaders", *loaders]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "ufs-p1"
        made = ["generate", "ufs-p1", str(data), "--samples", "24", "--grid", *grid]
        subprocess.run([*PENSTOCK, *made], check=True)
        with Loopback(data, latency / 1e3) as server:
            delayed = measured(server.url, Path(folder) / "delayed.csv", threads, flags)
        with s3_server(data) as (url, keys):
            os.environ.update(keys, AWS_ENDPOINT_URL=url)
            s3 = measured("s3://data/", Path(folder) / "s3.csv", threads[:3], flags)
    names = [(delayed, "ufs-p1"), (s3, "s3://data/")]
    records = [
        record.model_copy(update={"case": {**record.case, "data": name}})
        for launches, name in names
        for record in launches
    ]
    day, machine = records[0].time[:10], records[0].environment["machine"]
    args.results.mkdir(parents=True, exist_ok=True)
    with gzip.open(args.results / f"{day}-loader-remote.jsonl.gz", "wt") as file:
        file.writelines(record.line() + "\n" for record in records)
    head = (
        f"{day}, {machine['processor']}, {machine['cores']} cores. Seconds of a batch of 4, one "
        "launch each; in brackets how many times as fast as with one thread."
    )
    lines = [
        head,
        "",
        f"Every answer {latency} ms late:",
        "",
        *table(delayed),
        "",
        "From an S3 server on this machine, which shares its processors:",
        "",
        *table(s3),
    ]
    print("\n".join(lines))
    if not args.quick:
        readme.write("loader-remote", "\n".join(lines))


if __name__ == "__main__":
    main()
