"""Whether a full queue drains when the model says: on this machine, on real chunks.

    python benchmarks/drain.py            the numbers of README.md, about ten minutes
    python benchmarks/drain.py --quick    a smoke test, README untouched

Reading alone is measured first, R seconds a batch; then steps that sleep 0.4 and 0.6 of R begin
with a full queue, and n0 = q R / (R - C) is when it should be empty. The seed's step was 0.38 of
its R. The nearer C is to R, the more a change of either moves n0: at 0.6, five hundredths of R move
it by an eighth.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import readme
from penstock.base.units import format_seconds
from penstock.instruments import ledger
from penstock.instruments.record import Record
from penstock.reports import ledger_report, page
from penstock.reports.queue import cell as queue_cell

HERE = Path(__file__).resolve().parent
PENSTOCK = [sys.executable, "-m", "penstock"]
SHARES = (0.4, 0.6)
WITHIN = 1


def bench(data: Path, out: Path, flags: Sequence[str]) -> Path:
    words = ["--workers", "1", "--batch-size", "4", "--output", str(out), *flags]
    subprocess.run([*PENSTOCK, "bench", "queue", str(data), *words], check=True)
    return out


def misses(course: queue_cell.QueueCell) -> list[int]:
    """Iterations between the simulated clearing of the queue and each launch's, least first.

    It is empty without a simulation, and if neither clears the queue within the iterations.
    """
    if course.simulated is None or not course.workers:
        return []
    last, at = course.iterations, course.simulated.cleared
    if at is None and not any(k is not None for k in course.cleared):
        return []
    last_at = last if at is None else at
    return sorted(abs((last if k is None else k) - last_at) for k in course.cleared)


def lines(records: Sequence[Record], where: str) -> list[str]:
    machine = records[0].environment["machine"]
    courses = [c for group in queue_cell.queue_cells(records) for c in group if misses(c)]
    day = records[0].time[:10]
    rows = [
        f"{day}, {machine['processor']}, {machine['cores']} cores: [tables and figures]({where}).",
        "",
        "| R, reading | C, a step | queue | simulated | cleared in each launch |",
        "|---|---|---|---|---|",
    ]
    for course in courses:
        assert course.simulated is not None and course.alone is not None
        cleared = ", ".join("never" if k is None else str(k) for k in course.cleared)
        rows.append(
            f"| {format_seconds(course.alone.value)} | {format_seconds(course.compute_s)} | "
            f"{course.queue} | {course.simulated.cleared} | {cleared} |"
        )
    rows.append("")
    for compute_s in sorted({course.case["compute_time"] for course in courses}):
        alike = [course for course in courses if course.case["compute_time"] == compute_s]
        off = [misses(course) for course in alike]
        near = sum(each[len(each) // 2] <= WITHIN for each in off)
        launches = sum(miss <= WITHIN for each in off for miss in each)
        verdict = "met" if near == len(alike) else f"**NOT MET in {len(alike) - near}**"
        share = compute_s / alike[0].alone.value if alike[0].alone else 0.0
        rows.append(
            f"- {verdict}: with a step of {share:.2f} R, cleared within {WITHIN} iteration of the "
            f"simulation in {near} of {len(alike)} cases by the median of their launches, and in "
            f"{launches} of {sum(map(len, off))} launches"
        )
    return rows


def measured(quick: bool) -> list[Record]:
    grid, queues, effort, steps = ["96", "192"], ["1", "2", "4", "8"], "standard", "36"
    if quick:
        grid, queues, effort, steps = ["16", "32"], ["1", "2"], "quick", "8"
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "ufs-p1", Path(folder) / "queue.csv"
        made = ["generate", "ufs-p1", str(data), "--samples", "32", "--grid", *grid]
        subprocess.run([*PENSTOCK, *made], check=True)
        flags = ["--iterations", steps, "--effort", effort]
        flags += ["--queue-sizes", queues[-1], "--compute-time", "0.001"]
        with bench(data, Path(folder) / "alone.csv", flags).open(newline="") as file:
            reading = float(next(csv.DictReader(file))["read_s"])
        for share in SHARES:
            compute = f"{share * reading:.4f}"
            flags = ["--iterations", steps, "--effort", effort, "--resume"]
            flags += ["--queue-sizes", *queues, "--compute-time", compute]
            bench(data, out, flags)
        records = ledger.read_ledger(out.with_suffix(".ledger"))
    return [r.model_copy(update={"case": {**r.case, "data": "ufs-p1"}}) for r in records]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test; README untouched")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--report", type=Path, metavar="LEDGER", help="of this; measure nothing")
    args = parser.parse_args()
    records = ledger.read_ledger(args.report) if args.report else measured(args.quick)
    day = records[0].time[:10]
    args.results.mkdir(parents=True, exist_ok=True)
    kept = args.results / f"{day}-drain.jsonl.gz"
    if not args.report:
        with gzip.open(kept, "wt") as file:
            file.writelines(record.line() + "\n" for record in records)
    folder_of_page = args.results / f"{day}-drain.report"
    said = ledger_report.report_of_records(records, kept.name)
    report, *_ = page.write_report(said, folder_of_page, overwrite=True, records=records)
    block = lines(records, f"results/{report.parent.name}/{report.name}")
    print("\n".join(block))
    if not args.quick:
        readme.write("drain", "\n".join(block))


if __name__ == "__main__":
    main()
