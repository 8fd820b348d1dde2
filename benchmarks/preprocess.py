"""Scenes to chips: `penstock preprocess` against the method of the xView3 reference.

    python benchmarks/preprocess.py             the numbers of README.md, some minutes
    python benchmarks/preprocess.py --quick     a smoke test, README untouched
    python benchmarks/preprocess.py --report benchmarks/results/DATE-preprocess.json

Contenders, each launch a fresh process, in turns, on the same scenes (page cache warm):

    reference            the reference's method, written anew from its description: each channel
                         whole in memory, coarse ones enlarged to the full grid, padded, cut, one
                         .npy for each channel of each chip
    penstock             a sharded Zarr for each scene, overlapping chips of float16 and a manifest,
                         synced to disk, which the reference's files are not
    penstock, 2 workers  the same, two scenes at once; the reference can do only one

A ratio is taken between two launches of one round: of chips/s, of which Penstock makes more where
they overlap, and of scenes, which are the same work for all. Seconds run from the first read until
the last file is closed. Memory is the peak of the process, of imports too. Bytes read are those
that the process asked of the kernel (`rchar`), so that a page cache hides nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

import readme
from penstock.data.scenes.objects import read_labels
from penstock.data.scenes.preprocess import preprocess_scenes
from penstock.data.scenes.scene import CHANNELS, scene_folders
from penstock.data.scenes.synthetic import write_data_set
from penstock.instruments import environment
from penstock.instruments.machine import peak_rss

HERE = Path(__file__).resolve().parent
SELECTED = ("vh", "vv", "bathymetry")
SCENES = 2
FASTER, SMALLER = 5.0, 0.1
HEADER = ("contender", "chips", "s", "chips/s", "s per scene", "CPU s", "peak MiB",
          "MB read per chip", "MB written per chip", "files")  # fmt: skip


def reference(data: Path, out: Path, chip: int) -> int:
    """The reference's way, step for step as its users describe it."""
    import rasterio
    from rasterio.enums import Resampling

    labels = read_labels(data / "labels" / "train.csv")
    number = 0
    for scene, folder in scene_folders(data, "train").items():
        whole: dict[str, np.ndarray] = {}
        cut: dict[str, np.ndarray] = {}
        for name in SELECTED:
            (out / scene / name).mkdir(parents=True)
            with rasterio.open(folder / CHANNELS[name].file) as file:
                whole[name] = file.read(1)
                shape = whole[SELECTED[0]].shape
                if whole[name].shape != shape:
                    enlarged = file.read(out_shape=(1, *shape), resampling=Resampling.bilinear)
                    whole[name] = enlarged[0]
            rows, columns = (-(-side // chip) for side in shape)
            below, beside = rows * chip - shape[0], columns * chip - shape[1]
            padded = np.pad(whole[name], ((0, below), (0, beside)))
            blocks = padded.reshape(rows, chip, columns, chip).swapaxes(1, 2)
            cut[name] = blocks.reshape(-1, chip, chip)
            for index in range(len(cut[name])):
                np.save(out / scene / name / f"{index}_{name}.npy", cut[name][index])
        offsets = [(column * chip, row * chip) for row in range(rows) for column in range(columns)]
        (out / scene / "coords.json").write_text(json.dumps({"offsets": offsets}))
        for row, column in labels[scene].points:
            offsets.index((int(column) // chip * chip, int(row) // chip * chip))
        number += len(offsets)
    return number


def ours(workers: int) -> Callable[[Path, Path, int], int]:
    def run(data: Path, out: Path, chip: int) -> int:
        file = data / "labels" / "train.csv"
        done = preprocess_scenes(
            scene_folders(data, "train"),
            read_labels(file),
            file,
            out,
            channels=SELECTED,
            chip_size=chip,
            overlap=64,
            workers=workers,
            overwrite=False,
        )
        return done.chips

    return run


CONTENDERS: dict[str, Callable[[Path, Path, int], int]] = {
    "reference": reference,
    "penstock": ours(1),
    "penstock, 2 workers": ours(2),
}


def launch(name: str, data: Path, out: Path, chip: int) -> dict[str, Any]:
    """One contender in this process."""

    def asked() -> int:
        text = Path("/proc/self/io").read_text()
        return int(text.split("rchar:")[1].split()[0])

    import numcodecs
    import rasterio
    import tifffile

    assert numcodecs and rasterio and tifffile  # imported before the clock starts
    before, began = asked(), time.perf_counter()
    chips = CONTENDERS[name](data, out, chip)
    seconds = time.perf_counter() - began
    usage = resource.getrusage(resource.RUSAGE_SELF)
    files = [path for path in out.rglob("*") if path.is_file()]
    return {
        "contender": name,
        "chips": chips,
        "seconds": seconds,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_rss": peak_rss(),
        "bytes_read": asked() - before,
        "bytes_written": sum(path.stat().st_size for path in files),
        "files": len(files),
    }


def measure(data: Path, chip: int, rounds: int) -> list[dict[str, Any]]:
    """Every contender in every round, each in a fresh process that finds its input in memory."""
    launches = []
    for number in range(rounds):
        for name in CONTENDERS:
            for path in data.rglob("*.tif"):
                path.read_bytes()
            with tempfile.TemporaryDirectory(dir=data.parent) as out:
                os.sync()
                words = ["--launch", name, "--data", str(data), "--out", f"{out}/chips"]
                command = [sys.executable, __file__, *words, "--chip", str(chip)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            launches.append({"round": number, **json.loads(done.stdout.splitlines()[-1])})
    return launches


def lines_of(result: Mapping[str, Any]) -> list[str]:
    """The README's table and verdicts, from the launches."""
    launches = result["launches"]
    of = {name: [row for row in launches if row["contender"] == name] for name in CONTENDERS}

    def middle(name: str, value: Callable[[Mapping[str, Any]], float]) -> float:
        return statistics.median(value(row) for row in of[name])

    def ratios(name: str, value: Callable[[Mapping[str, Any]], float]) -> list[float]:
        pairs = zip(of[name], of["reference"], strict=True)
        return [value(one) / value(other) for one, other in pairs]

    def spread(values: list[float]) -> str:
        lowest_highest = f"[{min(values):.3g} - {max(values):.3g}]"
        return f"{statistics.median(values):.3g} {lowest_highest}, {len(values)} rounds"

    def verdict(what: str, values: list[float], target: str, met: bool) -> str:
        state = "met" if met else "**NOT MET**"
        return f"- {state}: {what} is {spread(values)}; target {target}."

    about = (
        f"{SCENES} scenes of {' x '.join(map(str, result['size']))} pixels, {result['tiff']}; "
        f"{', '.join(SELECTED)}; chips of {result['chip']}."
    )
    lines = [
        f"{result['time'][:10]}, {result['machine']}, load average {result['load']:.1f} before.",
        about,
        "",
        f"| {' | '.join(HEADER)} |",
        "|---" * len(HEADER) + "|",
    ]
    for name in CONTENDERS:
        lines.append(
            f"| {name} | {middle(name, lambda row: row['chips']):.0f} "
            f"| {middle(name, lambda row: row['seconds']):.3g} "
            f"| {middle(name, lambda row: row['chips'] / row['seconds']):.3g} "
            f"| {middle(name, lambda row: row['seconds'] / SCENES):.3g} "
            f"| {middle(name, lambda row: row['cpu_s']):.3g} "
            f"| {middle(name, lambda row: row['peak_rss'] / 2**20):.0f} "
            f"| {middle(name, lambda row: row['bytes_read'] / row['chips'] / 1e6):.3g} "
            f"| {middle(name, lambda row: row['bytes_written'] / row['chips'] / 1e6):.3g} "
            f"| {middle(name, lambda row: row['files']):.0f} |"
        )
    lines.append("")
    for name in ("penstock", "penstock, 2 workers"):
        rates = ratios(name, lambda row: row["chips"] / row["seconds"])
        peaks = ratios(name, lambda row: row["peak_rss"])
        met = statistics.median(rates) >= FASTER, statistics.median(peaks) <= SMALLER
        scenes = ratios(name, lambda row: 1 / row["seconds"])
        chips = middle(name, lambda row: row["chips"]) / middle("reference", lambda r: r["chips"])
        lines += [
            verdict(f"chips/s of {name} over the reference's", rates, f">= {FASTER:g}", met[0]),
            f"- as scenes, with {chips:.3g} times the chips by overlap, it is {spread(scenes)}.",
            verdict("its peak memory over the reference's", peaks, f"<= {SMALLER:g}", met[1]),
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke test; README untouched")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--size", type=int, nargs=2, default=(10_000, 12_000))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiff", default="strips", help="strips, deflate or tiled")
    parser.add_argument("--chip", type=int, default=800)
    parser.add_argument("--data", type=Path, help="make the scene here, and use it if it is there")
    parser.add_argument(
        "--report", type=Path, metavar="JSON", help="write README.md anew from kept results"
    )
    parser.add_argument("--launch", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.launch:
        print(json.dumps(launch(args.launch, args.data, args.out, args.chip)))
        return
    if args.report is not None:
        readme.write("preprocess", "\n".join(lines_of(json.loads(args.report.read_text()))))
        return
    if args.quick:
        args.size, args.rounds = (900, 1100), 1
    machine = environment.collect_environment()["machine"]
    result: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{machine['processor']}, {machine['cores']} cores, {platform.system()}",
        "load": os.getloadavg()[0],
        "size": args.size,
        "chip": args.chip,
        "tiff": args.tiff,
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        data = args.data or folder / "data"
        if not data.exists():
            write_data_set(
                data,
                tuple(args.size),
                scenes=SCENES + 1,
                validation=1,
                objects=100,
                tiff=args.tiff,
                seed=0,
            )
            shutil.rmtree(data / "validation")
        result["launches"] = measure(data, args.chip, args.rounds)
    lines = lines_of(result)
    print("\n".join(lines))
    args.results.mkdir(parents=True, exist_ok=True)
    raw = args.results / f"{result['time'][:10]}-preprocess.json"
    raw.write_text(json.dumps(result) + "\n")
    if not args.quick:
        readme.write("preprocess", "\n".join(lines))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
