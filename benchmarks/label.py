"""Components of a volume that does not fit: `penstock label` beside cc3d on the whole in memory.

    python benchmarks/label.py                          1 Gvox with some 10^5 blobs
    python benchmarks/label.py --side 512               an eighth of that
    python benchmarks/label.py --dask-image PYTHON      also dask-image, of that interpreter
    python benchmarks/label.py --patchworks PYTHON      also patchworks, by cc3d for each tile

Each launch is a fresh process that reads the same Zarr and writes one of the same chunks and codec.
The sides take turns, so that a busy machine slows all, and the processor's time is noted too.
Memory is the highest sum of the shares (PSS) of a process and its children, ten times a second. It
is not asked of those that are pinned to cores: to ask takes a part of a core, which is free beside
one worker and not beside two. Samples go to ``results/label.jsonl``, and the table to README.md.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import readme

SAMPLES = Path(__file__).resolve().parent / "results" / "label.jsonl"
CHUNK, TILE = 128, 256
ONE, TWO = "label, 1 worker on 1 core", "label, 2 workers on 2 cores"
PENSTOCK = [sys.executable, "-m", "penstock", "label", "mask.zarr", "out.zarr", "--overwrite",
            "--connectivity", "26", "--levels", "none"]  # fmt: skip
WHOLE = f"""
import cc3d, numpy as np, zarr
mask = zarr.open_group("mask.zarr", mode="r")["0"][:]
labels, count = cc3d.connected_components(mask, connectivity=26, return_N=True)
codec = zarr.codecs.BloscCodec(cname="zstd", clevel=5, shuffle="shuffle")
out = zarr.create_array("out.zarr", shape=labels.shape, chunks=({CHUNK},) * 3, dtype=labels.dtype,
                        compressors=codec, overwrite=True)
out[:] = labels
print(count)
"""
DASK_IMAGE = f"""
import dask.array as da, numpy as np
from dask_image.ndmeasure import label
mask = da.from_zarr("mask.zarr", component="0").rechunk(({TILE},) * 3)
labels, count = label(mask, np.ones((3, 3, 3)))
labels.rechunk(({CHUNK},) * 3).to_zarr("out.zarr", overwrite=True)
print(int(count))
"""
PATCHWORKS = f"""
import cc3d, dask.array as da
from patchworks import tile_process
def label(tile):
    return cc3d.connected_components(tile, connectivity=26).astype("int32")
if __name__ == "__main__":
    mask = da.from_zarr("mask.zarr", component="0")
    tile_process(mask, label, tile_shape=({CHUNK}, {TILE}, {TILE}), overlap=0, progress=False,
                 sequential_labels=True, write_to="out.zarr", max_workers=2)
"""


def make_mask(side: int) -> None:
    """A volume of a tile of blobs that goes on at its faces."""
    import zarr
    from scipy import ndimage

    noise = np.random.default_rng(0).standard_normal((TILE,) * 3, np.float32)
    smooth = ndimage.gaussian_filter(noise, 4.2, mode="wrap")
    tile = (smooth > 1.6 * smooth.std()).astype(np.uint8)
    group = zarr.create_group("mask.zarr", zarr_format=3, overwrite=True)
    out = group.create_array("0", shape=(side,) * 3, chunks=(CHUNK,) * 3, dtype="uint8")
    for start in np.ndindex(*(side // TILE,) * 3):
        out[tuple(slice(i * TILE, (i + 1) * TILE) for i in start)] = tile
    axes = [{"name": name, "type": "space"} for name in "zyx"]
    scale = [{"type": "scale", "scale": [1.0, 1.0, 1.0]}]
    sets = [{"path": "0", "coordinateTransformations": scale}]
    group.attrs["ome"] = {"version": "0.5", "multiscales": [{"axes": axes, "datasets": sets}]}


def used() -> float:
    """Seconds of the processor of all processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def launch(command: Sequence[str], *, watched: bool) -> dict[str, Any]:
    """The seconds of a fresh process, and the peak of its memory if it is watched, else 0."""
    shutil.rmtree("out.zarr", ignore_errors=True)
    began, peak, before = time.perf_counter(), 0, used()
    with Path("printed.txt").open("w+") as printed:
        process = psutil.Popen(command, stdout=printed, stderr=subprocess.STDOUT)
        while watched and process.poll() is None:
            with contextlib.suppress(psutil.Error):
                tree = [process, *process.children(recursive=True)]
                peak = max(peak, sum(each.memory_full_info().pss for each in tree))
            time.sleep(0.1)
        process.wait()
        seconds = time.perf_counter() - began
        printed.seek(0)
        text = printed.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)[:200]}\n{text}")
    return {"seconds": seconds, "cpu_seconds": used() - before, "peak_bytes": peak,
            "printed": text.splitlines()}  # fmt: skip


def pinned(*cores: int) -> list[str]:
    """As many workers as cores, which may run nowhere else."""
    where = ["taskset", "--cpu-list", ",".join(map(str, cores))]
    return [*where, *PENSTOCK, "--workers", str(len(cores))]


def sides_of(dask_image: str | None, patchworks: str | None) -> dict[str, list[str]]:
    sides = {
        "cc3d on the whole": [sys.executable, "-c", WHOLE],
        "label": PENSTOCK,
        "label --table": [*PENSTOCK, "--table", "cells.parquet"],
        ONE: pinned(0),
        TWO: pinned(0, 1),
    }
    if dask_image is not None:
        sides["dask-image"] = [dask_image, "-c", DASK_IMAGE]
    if patchworks is not None:
        sides["patchworks"] = [patchworks, "-c", PATCHWORKS]
    return sides


def measure(side: int, rounds: int, sides: dict[str, list[str]]) -> list[dict[str, Any]]:
    samples = []
    for number in range(rounds):
        for name, command in sides.items():
            took = launch(command, watched=name not in (ONE, TWO))
            sample = {"side": name, "round": number, "voxels": side**3, **took}
            samples.append(sample)
            print(f"{name:20} {sample['seconds']:7.1f} s {sample['peak_bytes'] / 2**20:7.0f} MiB",
                  flush=True)  # fmt: skip
    return samples


def table(samples: Sequence[dict[str, Any]]) -> str:
    """The table of README.md."""
    head = "| | seconds | of cc3d | CPU seconds | of cc3d | peak MiB | of cc3d |"
    rows = [f"{samples[0]['voxels']:,} voxels.", "", head, "|---|---|---|---|---|---|---|"]
    names = list(dict.fromkeys(sample["side"] for sample in samples))
    middle = {
        name: [
            statistics.median(s[key] for s in samples if s["side"] == name)
            for key in ("seconds", "cpu_seconds", "peak_bytes")
        ]
        for name in names
    }
    base = middle[names[0]]
    for name in names:
        seconds, cpu, peak = middle[name]
        memory = f"{peak / 2**20:.0f} | {peak / base[2]:.2f}" if peak else "|"
        rows.append(
            f"| {name} | {seconds:.1f} | {seconds / base[0]:.2f} | {cpu:.1f} | {cpu / base[1]:.2f} "
            f"| {memory} |"
        )
    one, two = ([s["seconds"] for s in samples if s["side"] == name] for name in (ONE, TWO))
    gains = [a / b for a, b in zip(one, two, strict=True)]  # of each round
    times = f"{statistics.median(gains):.2f} [{min(gains):.2f} to {max(gains):.2f}]"
    return "\n".join([*rows, "", f"Two workers on two cores are {times} times as fast as one."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", type=int, default=1024, help="voxels, a multiple of 256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dask-image", metavar="PYTHON")
    parser.add_argument("--patchworks", metavar="PYTHON")
    args = parser.parse_args()
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:  # of TMPDIR
        os.chdir(folder)
        make_mask(args.side)
        sides = sides_of(args.dask_image, args.patchworks)
        samples = measure(args.side, args.rounds, sides)
        os.chdir(here)
    machine = {"machine": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()}
    SAMPLES.write_text("".join(json.dumps(s | machine) + "\n" for s in samples))
    readme.write("label", table(samples))
    print(table(samples))


if __name__ == "__main__":
    main()
