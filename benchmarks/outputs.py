r"""What levels, a mask and a Cloud Optimized GeoTIFF cost, each beside the same work without them,
and how fast a folder of planes is read beside tifffile alone.

    python benchmarks/outputs.py            1 Gvox, a scene of 20,000 squared; README.md's table
    python benchmarks/outputs.py --small    a 64th of that, README untouched
    python benchmarks/outputs.py --only pyramid --peers ngff-zarr=PYTHON ome-zarr=PYTHON \
        bioio-ome-zarr=PYTHON               beside other writers of levels, each by its own Python

Each launch is a fresh process, and both sides of a pair run in turn, so that a busy machine slows
both. The volume is a block of synthetic microscopy that is repeated, on the disk of this folder.
Samples go to ``results/outputs.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import readme
from penstock.instruments import drop_pages

SAMPLES = Path(__file__).resolve().parent / "results" / "outputs.jsonl"
WRITERS = SAMPLES.with_name("pyramid.jsonl")
PENSTOCK = [sys.executable, "-m", "penstock"]
PLAIN = "--model-type identity --normalize none --patch 64 --overlap 0 --overwrite".split()
WINDOWS = """
import sys, rasterio
from rasterio.windows import Window
options = {"tiled": True, "blockxsize": 512, "blockysize": 512, "compress": "deflate",
           "zlevel": 1, "predictor": 2, "num_threads": "all_cpus", "BIGTIFF": "IF_SAFER"}
with rasterio.open("scene.tif") as scene:
    with rasterio.open(sys.argv[1], "w", **{**scene.profile, **options}) as out:
        for row in range(0, scene.height, 512):
            window = Window(0, row, scene.width, min(512, scene.height - row))
            out.write(scene.read(window=window), window=window)
"""
PEAK = [sys.executable, "-S", "-c", """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print("cpu:", used.ru_utime + used.ru_stime)
print("peak", used.ru_maxrss)
sys.exit(code)"""]  # fmt: skip
"""Runs a command from a small process: one that is forked counts the memory of its parent too."""
IDLE = {
    "penstock pyramid": "import penstock, tensorstore",
    "penstock convert": "import penstock, tensorstore, torch",
    "ngff-zarr": "import ngff_zarr, dask.array",
    "ome-zarr": "import ome_zarr.writer, dask.array",
    "bioio-ome-zarr": "import zarr, bioio_ome_zarr.writers",
}
"""What each imports, to count the memory that is above it."""
PEERS = {
    "ngff-zarr": """
import ngff_zarr
image = ngff_zarr.from_ngff_zarr("levels.ome.zarr").images[0]
made = ngff_zarr.to_multiscales(
    image, [2, 4], method=ngff_zarr.Methods.DASK_BIN_SHRINK, chunks=128)
ngff_zarr.to_ngff_zarr("peer.ome.zarr", made, version="0.5")
""",
    "ome-zarr": """
import dask.array
from ome_zarr.scale import Methods
from ome_zarr.writer import write_image
factors = [dict.fromkeys("zyx", by) for by in (2, 4)]
image = dask.array.from_zarr("levels.ome.zarr/0")
write_image(image, "peer.ome.zarr", factors, method=Methods.LOCAL_MEAN, axes="zyx")
""",
    "bioio-ome-zarr": """
import zarr
from bioio_ome_zarr.writers import OMEZarrWriter
image = zarr.open_array("levels.ome.zarr/0", mode="r")
shapes = [[side // by for side in image.shape] for by in (1, 2, 4)]
writer = OMEZarrWriter("peer.ome.zarr", shapes, image.dtype, chunk_shape=(128,) * 3)
for z in range(0, image.shape[0], 128):
    region = (slice(z, z + 128), *(slice(0, side) for side in image.shape[1:]))
    writer.write_region(image[region], region)
writer.close()
""",
}
"""How others write an image with three levels, by means of eight voxels where they offer that. Each
writes the first level too: Penstock does so by ``convert``, and not by ``pyramid``."""

GDAL_COG = (
    WINDOWS
    + """
import os, rasterio.shutil
cog = {"compress": "deflate", "level": 1, "predictor": "yes", "num_threads": "all_cpus"}
rasterio.shutil.copy(sys.argv[1], "gdal.tif", driver="COG", bigtiff="if_safer", **cog)
"""
)
PLANES, HIGH, WIDE = 200, 2048, 2048
OUR_PLANES = """
import sys, time
import numpy as np
from penstock.base import in_order, usable_cores
from penstock.data import Grid, open_source
began, cpu = time.perf_counter(), time.process_time()
# A row of bricks and a little more, as a plan has it.
source = open_source(sys.argv[1] + "/*.tif", cache_bytes=5 * 2**25)
bricks = Grid(source.domain, (1, 1, 64, 512, 512))
arrays = [np.empty((1, 1, 64, 512, 512), source.dtype) for _ in range(usable_cores())]
def read(brick):
    array = arrays.pop()
    source.read(brick, array[:, :, : brick.shape[2]])
    arrays.append(array)
for brick in in_order(read, bricks, usable_cores()):
    pass
print("cpu:", time.process_time() - cpu, "seconds:", time.perf_counter() - began)
"""
TIFFFILE_PLANES = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import tifffile
from penstock.base import usable_cores
began, cpu = time.perf_counter(), time.process_time()
with ThreadPoolExecutor(usable_cores()) as pool:
    read = lambda path: len(tifffile.imread(path, maxworkers=1))
    sum(pool.map(read, sorted(Path(sys.argv[1]).glob("*.tif"))))
print("cpu:", time.process_time() - cpu, "seconds:", time.perf_counter() - began)
"""
TIFFFILE_STACKS = TIFFFILE_PLANES.replace("import tifffile", "import numpy as np\nimport tifffile")
TIFFFILE_STACKS = TIFFFILE_STACKS.replace("with ThreadPool", """
out = np.empty((64, 2048, 2048), "u2")
def put(number, path):
    with tifffile.TiffFile(path) as file:
        return len(file.asarray(out=out[number % 64], maxworkers=1))
with ThreadPool""").replace(
    "pool.map(read, sorted", "pool.map(put, range(10**6), sorted"
)  # fmt: skip
"""All print what reading takes without the start of Python. tifffile drops each plane, which then
never leaves the cache of the processor, or keeps 64 of them, as many as our bricks do."""


def make_planes(small: bool) -> None:
    """Folders of planes, deflated and raw."""
    import tifffile

    values = np.random.default_rng(0).poisson(300, (HIGH, WIDE)).astype("uint16")
    for name, codec in (("deflate", {"compression": "zlib", "predictor": True}), ("raw", {})):
        Path(name).mkdir()
        for number in range(PLANES // 10 if small else PLANES):
            plane = np.roll(values, 37 * number, axis=0)
            tifffile.imwrite(f"{name}/{number:03}.tif", plane, **codec)


def make_volume(name: str, shape: tuple[int, ...]) -> None:
    """A Zarr of a generated block, repeated."""
    import zarr

    block = tuple(min(128, side) for side in shape)
    command = [*PENSTOCK, "generate", "volume", "block.zarr", "--shape", *map(str, block)]
    subprocess.run([*command, "--overwrite"], check=True, capture_output=True)
    values = zarr.open_group("block.zarr", mode="r")["0"][:]
    out = zarr.create_array(name, shape=shape, chunks=block, dtype="uint16", zarr_format=3)
    for start in np.ndindex(*(-(-n // b) for n, b in zip(shape, block, strict=True))):
        place = tuple(slice(i * b, (i + 1) * b) for i, b in zip(start, block, strict=True))
        sides = (len(range(*s.indices(n))) for s, n in zip(place, shape, strict=True))
        out[place] = values[tuple(slice(0, n) for n in sides)]


def make_scene(side: int) -> None:
    import rasterio
    from rasterio.windows import Window

    rng = np.random.default_rng(0)
    tile = rng.integers(0, 3000, (3, 512, side), "uint16") // 16 * 16
    profile: dict[str, Any] = {"driver": "GTiff", "width": side, "height": side, "count": 3,
               "dtype": "uint16", "crs": "EPSG:32633", "tiled": True, "blockxsize": 512,
               "transform": rasterio.Affine(10, 0, 5e5, 0, -10, 6e6), "blockysize": 512,
               "compress": "deflate", "zlevel": 1, "BIGTIFF": "IF_SAFER"}  # fmt: skip
    with rasterio.open("scene.tif", "w", **profile) as scene:
        for row in range(0, side, 512):
            high = min(512, side - row)
            scene.write(tile[:, :high], window=Window(0, row, side, high))


def launch(command: list[str], cold: str = "") -> dict[str, Any]:
    """The seconds and the most memory of a fresh process, and what it said of patches. The files of
    the folder ``cold`` are dropped from the page cache before it."""
    if cold:
        drop_pages(Path(cold).iterdir())
    began = time.perf_counter()
    done = subprocess.run([*PEAK, *command], capture_output=True, text=True)
    took = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr[-500:]}")
    text, _, peak = done.stdout.rpartition("peak")
    cpu = re.search(r"cpu: (\S+)", text)  # the first, of reading alone where a script says it
    assert cpu is not None
    if inside := re.search(r"seconds: (\S+)", text):
        took = float(inside[1])
    if "net.zarr" in command and (job := re.search(r"Total time: (\S+) s", text)):
        took = float(job[1])  # most of a fifth of a small volume would be the start of Python
    patches = re.search(r"Sample: (\S+) of (\S+) patches", text.replace(",", ""))
    share = int(patches[1]) / int(patches[2]) if patches else None
    return {"seconds": took, "cpu": float(cpu[1]), "share": share, "mebibytes": int(peak) / 1024}


def infer(source: str, out: str, *more: str) -> list[str]:
    return [*PENSTOCK, "infer", "--in-spec", source, "--out-spec", out, *more]


def pairs() -> dict[str, tuple[list[str], list[str]]]:
    """The command of each pair with what it is about, and without."""
    net = "--model-type denoise-net --weights net.pt --head-kind intensity --normalize fixed"
    net += " --norm-lower 0 --norm-upper 4000 --patch 64 --overlap 10"
    cog = [*PENSTOCK, "convert", "scene.tif", "cog.tif", "--overwrite"]
    return {
        "levels beside identity": (
            infer("big.zarr", "out.ome.zarr", *PLAIN),
            infer("big.zarr", "out.ome.zarr", *PLAIN, "--levels", "none"),
        ),
        "denoise-net with a mask of 20 %": (
            infer("net.zarr", "out.ome.zarr", *net.split(), "--overwrite", "--mask", "mask.zarr"),
            infer("net.zarr", "out.ome.zarr", *net.split(), "--overwrite"),
        ),
        "a raster of three bands": (
            [*cog, "--levels", "none"],
            [sys.executable, "-c", WINDOWS, "windows.tif"],
        ),
        "a COG of three bands": (cog, [sys.executable, "-c", WINDOWS, "windows.tif"]),
        "a COG of three bands, by GDAL too": (cog, [sys.executable, "-c", GDAL_COG, "windows.tif"]),
        **{
            f"planes, {codec}, {kept}{cache}": tuple(
                [sys.executable, "-c", script, codec] for script in (OUR_PLANES, peer)
            )
            for codec in ("deflate", "raw")
            for kept, peer in (("", TIFFFILE_PLANES), ("64 kept, ", TIFFFILE_STACKS))
            for cache in ("cold", "warm")
        },
    }


def make_inputs(small: bool) -> None:
    make_volume("big.zarr", (256, 256, 256) if small else (1024, 1024, 1024))
    sides = (32, 96, 96) if small else (96, 256, 512)
    make_volume("net.zarr", sides)
    import torch
    import zarr

    from penstock.models import load_model

    torch.manual_seed(0)
    torch.save(load_model("denoise-net", untrained=True).module.state_dict(), "net.pt")
    mask = np.zeros(sides, np.uint8)
    mask[..., : round(sides[2] * 0.2)] = 1
    zarr.create_array("mask.zarr", data=mask, zarr_format=3)
    make_scene(2500 if small else 20_000)
    make_planes(small)


def table(samples: list[dict[str, Any]]) -> str:
    """The table of README.md."""
    lines = ["| pair | with, s | without, s | ratio: median [least to most] | of CPU | goal |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for name in dict.fromkeys(sample["pair"] for sample in samples):
        rows = [sample for sample in samples if sample["pair"] == name]
        ratios = sorted(row["with"] / row["without"] for row in rows)
        goal = {"l": "<= 1.20", "a": "<= 1.20", "p": "<= 1.15"}.get(name[0], "")
        if (share := rows[0]["share"]) is not None:
            goal = f"<= 1.15 x {share:.3f}, the share of patches"
        medians = (statistics.median(row[side] for row in rows) for side in ("with", "without"))
        spread = f"{statistics.median(ratios):.2f} [{ratios[0]:.2f} to {ratios[-1]:.2f}]"
        cpu = [row["cpu"] / row["cpu_without"] for row in rows if "cpu" in row]
        in_cpu = f"{statistics.median(cpu):.2f}" if cpu else ""
        both = " | ".join(f"{m:.1f}" for m in medians)
        lines.append(f"| {name} | {both} | {spread} | {in_cpu} | {goal} |")
    machine = f"{platform.system()}, {os.cpu_count()} cores"
    return "\n".join([f"{machine}; rounds: {max(s['round'] for s in samples) + 1}.", "", *lines])


def measure(rounds: int, only: str, say: Callable[[str], None]) -> list[dict[str, Any]]:
    samples = []
    for name, (with_it, without) in pairs().items():
        if only not in name:
            continue
        for round_ in range(rounds):
            cold = without[-1] if name.endswith("cold") else ""
            done, plain = launch(with_it, cold), launch(without, cold)
            samples.append({
                "pair": name, "round": round_, "with": done["seconds"],
                "without": plain["seconds"], "share": done["share"],
                "cpu": done["cpu"], "cpu_without": plain["cpu"],
            })  # fmt: skip
            say(json.dumps(samples[-1]))
    return samples


def writers(peers: dict[str, str]) -> dict[str, tuple[list[str], list[str]]]:
    """For each writer of levels its command, and one that only imports it."""
    ours = {
        "penstock pyramid": "pyramid levels.ome.zarr --overwrite --levels 3",
        "penstock convert": "convert levels.ome.zarr out.ome.zarr --overwrite --levels 3",
    }
    commands = {name: [*PENSTOCK, *words.split()] for name, words in ours.items()}
    commands |= {name: [python, "-c", PEERS[name]] for name, python in peers.items()}
    pythons = dict.fromkeys(ours, sys.executable) | peers
    return {name: (each, [pythons[name], "-c", IDLE[name]]) for name, each in commands.items()}


def measure_pyramid(
    rounds: int, peers: dict[str, str], small: bool, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Each writer in turn, in each round."""
    sides = ["256"] * 3 if small else ["1024"] * 3
    make_volume("big.zarr", tuple(map(int, sides)))
    launch([*PENSTOCK, *"convert big.zarr levels.ome.zarr --levels none".split()])
    shutil.rmtree("big.zarr")
    samples = []
    for round_ in range(rounds):
        for name, (command, idle) in writers(peers).items():
            shutil.rmtree("peer.ome.zarr", ignore_errors=True)
            done, alone = launch(command), launch(idle)
            samples.append({
                "writer": name, "round": round_, "seconds": done["seconds"],
                "mebibytes": done["mebibytes"], "idle": alone["mebibytes"],
                "load": os.getloadavg()[0],
            })  # fmt: skip
            say(json.dumps(samples[-1]))
    return samples


def table_of_writers(samples: list[dict[str, Any]]) -> str:
    """README.md's table of writers of levels."""
    ours = {s["round"]: s["seconds"] for s in samples if s["writer"] == "penstock convert"}
    lines = ["| writer | s | time / convert's: median [least to most] | MiB above import | load |",
             "|---|---|---|---|---|"]  # fmt: skip
    for name in dict.fromkeys(sample["writer"] for sample in samples):
        rows = [sample for sample in samples if sample["writer"] == name]
        ratios = sorted(row["seconds"] / ours[row["round"]] for row in rows)
        seconds = statistics.median(row["seconds"] for row in rows)
        above = max(row["mebibytes"] - row["idle"] for row in rows)
        spread = f"{statistics.median(ratios):.2f} [{ratios[0]:.2f} to {ratios[-1]:.2f}]"
        load = statistics.median(row["load"] for row in rows)
        lines.append(f"| {name} | {seconds:.1f} | {spread} | {above:.0f} | {load:.1f} |")
    machine = f"{platform.system()}, {os.cpu_count()} cores"
    return "\n".join([f"{machine}; rounds: {max(s['round'] for s in samples) + 1}.", "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="one small round, README untouched")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="the pairs whose name holds this")
    parser.add_argument(
        "--peers", nargs="*", default=[], metavar="NAME=PYTHON",
        help="with --only pyramid: other writers, and a Python that has each",
    )  # fmt: skip
    args, here = parser.parse_args(), Path.cwd()
    only_levels = args.only == "pyramid"
    folder = tempfile.mkdtemp(dir=here)
    os.chdir(folder)
    try:
        rounds = 1 if args.small else args.rounds
        if only_levels:
            peers = dict(each.split("=", 1) for each in args.peers)
            samples = measure_pyramid(rounds, peers, args.small, print)
        else:
            make_inputs(args.small)
            samples = measure(rounds, args.only, print)
    finally:
        os.chdir(here)
        shutil.rmtree(folder)
    if only_levels:
        print(table_of_writers(samples))
        if not args.small:
            WRITERS.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
            readme.write("pyramid", table_of_writers(samples))
        return
    print(table(samples))
    if not args.small:
        measured = {sample["pair"] for sample in samples}
        earlier = map(json.loads, SAMPLES.read_text().splitlines())
        samples = [each for each in earlier if each["pair"] not in measured] + samples
        SAMPLES.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        readme.write("outputs", table(samples))


if __name__ == "__main__":
    main()
