"""How near the loader comes to what this machine can read, decode and copy, and to other loaders.

    python benchmarks/loader.py               the numbers of README.md, about half an hour
    python benchmarks/loader.py --quick       a smoke test, README untouched
    python benchmarks/loader.py --grid        other layouts, in parts if you like: loader_grid.py

``penstock generate`` makes a ufs-p1 data set and ``penstock bench loader`` measures it, warm, on
two threads: contenders in fresh processes, interleaved, every batch checked against its checksums.
The targets are computed from the ledger, which is kept in ``results/`` with all raw waits, beside
the page that ``penstock report`` makes of it.
"""

from __future__ import annotations

import argparse
import gzip
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import loader_grid
import readme
from penstock.instruments import ledger
from penstock.instruments.record import Record
from penstock.instruments.stats.intervals import Interval
from penstock.loading.order import Order
from penstock.reports import ledger_report, page
from penstock.reports.cell import cell_ratio, inverse
from penstock.reports.loader import cell as loader_cell

HERE = Path(__file__).resolve().parent
OURS = "penstock"
LEAST = {"dask-stacked": 2.0, "tensorstore-read": 1.5}
"""How many times as fast as these the loader is to be; as any other, at least as fast."""
OF_SCATTER = 0.9
SAMPLES = 100_000_000


def measured(folder: Path, samples: int, grid: Sequence[int], flags: Sequence[str]) -> list[Record]:
    """Generate, measure, and give back the records."""
    penstock = [sys.executable, "-m", "penstock"]
    data, out = folder / "ufs-p1", folder / "loader.csv"
    sides = [str(side) for side in grid]
    made = ["generate", "ufs-p1", str(data), "--samples", str(samples), "--grid", *sides]
    subprocess.run([*penstock, *made], check=True)
    flags = ["--threads", "2", "--output", str(out), *flags]
    subprocess.run([*penstock, "bench", "loader", str(data), *flags], check=False)
    return ledger.read_ledger(folder / "loader.ledger")


def plan_seconds() -> float:
    """To plan an epoch of 100 million samples and ask for its first, middle and last batch."""
    began = time.perf_counter()
    order = Order(SAMPLES, 16, shuffle="global")
    for batch in (0, order.num_batches // 2, order.num_batches - 1):
        assert len(np.unique(order.items(0, batch))) == 16
    return time.perf_counter() - began


def target(what: str, speed: Interval, least: float) -> str:
    """One line of the verdict: met where the estimate is, with its interval beside it."""
    spread = "one launch"
    if speed.low is not None and speed.high is not None:
        spread = f"{speed.low:.2f} - {speed.high:.2f}, {speed.n} launches"
    verdict = "met" if speed.value >= least else f"**NOT MET by {least - speed.value:.2f}**"
    return f"- {verdict}: {what} is {speed.value:.2f} [{spread}], target at least {least:g}"


def targets(records: Sequence[Record]) -> list[str]:
    lines = []
    cells = loader_cell.loader_cells(records)
    rungs = loader_cell.loader_cells(records, "ladder")
    for batch in sorted({cell.batch for cell in cells}):
        of_batch = [cell for cell in cells if cell.batch == batch]
        ours = next((cell for cell in of_batch if cell.loader == OURS and cell.launches), None)
        if ours is None:
            lines.append(f"- **NOT MET**: batch {batch}: {OURS} was not measured")
            continue
        scatter, whole = (
            next((c for c in rungs if c.batch == batch and c.case["rung"] == name), None)
            for name in ("L3", "L4")
        )
        if scatter is not None and whole is not None and scatter.launches and whole.launches:
            speed = inverse(cell_ratio(scatter, whole))
            lines.append(target(f"batch {batch}: speed of L4 / L3", speed, OF_SCATTER))
        else:
            lines.append(f"- **not measured**: batch {batch}: speed of L4 / L3")
        for other in of_batch:
            if other is ours or not other.launches:
                continue
            name = f"batch {batch}: speed of the loader / {other.loader}'s"
            lines.append(target(name, cell_ratio(ours, other), LEAST.get(other.loader, 1.0)))
    seconds = plan_seconds()
    verdict = "met" if seconds < 1 else "**NOT MET**"
    lines.append(f"- {verdict}: a plan of 100 million samples took {seconds:.3f} s, target under 1")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test; README untouched")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument(
        "--report",
        type=Path,
        nargs="*",
        metavar="LEDGER",
        help="from these, measure nothing; of the grid, from its file in --results",
    )
    parser.add_argument("--samples", type=int, default=112)
    parser.add_argument("--grid", action="store_true", help="many layouts, see loader_grid.py")
    parser.add_argument("--only", nargs="+", default=[], help="these layouts of the grid")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="for bench loader")
    args = parser.parse_args()
    if args.grid:
        loader_grid.main(args.results, args.quick, args.only, args.report is not None)
        return
    if args.report == []:
        parser.error("--report names no LEDGER")
    flags = ["--batch-sizes", "4", "16", "--batches", "4", "--warmup", "4", *args.flags]
    samples, grid = args.samples, [192, 384]
    if args.quick:
        flags = ["--batch-sizes", "4", "--batches", "2", "--warmup", "1", "--effort", "quick"]
        samples, grid = 16, [16, 32]
    if args.report:
        records = [record for path in args.report for record in ledger.read_ledger(path)]
    else:
        with tempfile.TemporaryDirectory() as folder:
            records = measured(Path(folder), samples, grid, flags)

    # By its name alone: where it lay for a while is nobody's concern.
    names = {r.id: Path(r.case["data"]).name for r in records}
    records = [r.model_copy(update={"case": {**r.case, "data": names[r.id]}}) for r in records]
    day = records[0].time[:10]
    kept = args.results / f"{day}-loader.jsonl.gz"
    kept.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(kept, "wt") as file:
        # Without the place of this checkout, which stands in the tracebacks of what failed.
        here = f"{HERE.parent}/"
        file.writelines(record.line().replace(here, "") + "\n" for record in records)
    folder_of_page = args.results / f"{day}-loader.report"
    said = ledger_report.report_of_records(records, kept.name)
    report, *_ = page.write_report(said, folder_of_page, overwrite=True, records=records)
    machine = records[0].environment["machine"]
    where = f"results/{report.parent.name}/{report.name}"
    head = (
        f"{day}, {machine['processor']}, {machine['cores']} cores: [tables and figures]({where})."
    )
    lines = [head, "", *targets(records)]
    print("\n".join(lines))
    if not args.quick:
        readme.write("loader", "\n".join(lines))


if __name__ == "__main__":
    main()
