"""``penstock demo``: a synthetic volume on disk, a denoiser run over it, and a page about it."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..base import (
    InferConfig,
    Labels,
    MissingDependency,
    Overwriting,
    Refused,
    UsageError,
    add_flags,
    begin_output,
    build,
    check_folder,
    check_outputs,
    check_replaceable,
    format_bytes,
    from_flags,
    missing,
    one_heap,
)
from ..data import Box, clean_volume, noisy, open_sink, open_source, psnr
from ..instruments import available_memory
from ..reports import (
    before_after_figure,
    places_of,
    reports_of_places,
    save_figures,
    write_report,
)
from .infer import print_plan, shown_progress

NEEDED = ("torch", "tensorstore", "matplotlib", "jinja2")
PAGE = "report.html"
BYTES_OF_VOXEL = 40
"""Peak memory of the demo in bytes per voxel: the clean, noisy and denoised volumes together."""
EXAMPLES = """
penstock demo
penstock demo --out demo --shape 32 64 64
penstock demo --name first-try --tag machine=laptop
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder (default: demo)")
    parser.add_argument(
        "--shape",
        type=int,
        nargs=3,
        default=(96, 240, 240),
        metavar="N",
        help="z y x of the volume (default: 96 240 240)",
    )
    parser.add_argument(
        "--seed", type=int, default=7, help="seed of the volume and its noise (default: 7)"
    )
    add_flags(parser, Labels)
    add_flags(parser, Overwriting)


def run(args: argparse.Namespace) -> int:
    for package in NEEDED:  # fail before the work starts, not after it
        if find_spec(package) is None:
            raise MissingDependency(missing(package, "demo"))
    from ..inference import Job, run_job

    one_heap()
    shape, replace = tuple(args.shape), from_flags(Overwriting, args).overwrite
    _check_shape(shape)
    store, result = args.out / "noisy.ome.zarr", args.out / "denoised.ome.zarr"
    _check_output(args.out, (store, result), replace)
    clean = clean_volume(shape, args.seed)
    print(f"A volume of {' x '.join(map(str, shape))} voxels, with noise, goes to {store}")
    _store(noisy(clean, args.seed), store)
    config = build(
        InferConfig,
        {
            "in_spec": store,
            "out_spec": result,
            "model_type": "denoise-tiny",
            "patch": (64,),
            "overlap": (16,),
            "normalize": "global",
            "overwrite": True,
            "metrics_json": args.out / "metrics.json",
            "metrics_interval": 0.2,
            "trace": args.out / "trace.json",
            **from_flags(Labels, args).model_dump(exclude_unset=True),
        },
    )
    job = Job(config)
    print_plan(job.plan)
    with shown_progress() as progress:
        summary = run_job(job, progress)
    begin_output(result)
    print("\n".join(summary.lines()))

    whole = Box.of((0, 0), (1, 1)) + Box.of((0, 0, 0), shape)
    before, after = (open_source(path).read(whole)[0, 0] for path in (store, result))
    gains = [psnr(clean, image) for image in (before, after)]
    gain = f"PSNR {gains[0]:.1f} dB before, {gains[1]:.1f} dB after: {gains[1] - gains[0]:+.1f} dB"
    plane = shape[0] // 2
    images = {"before": before[plane], "after": after[plane]}
    figure = before_after_figure(images, f"Plane {plane} of the demo volume. {gain}")
    (picture,) = save_figures({args.out / "before_after.png": figure}, replace)
    print(gain)
    print(f"Picture: {picture}")
    print(f"Records: {job.run_dir}")
    print(f"Report: {_report(result, args.out / PAGE, gain)}; open it in a browser")
    return 0


def _check_shape(shape: Sequence[int]) -> None:
    """Refuse a volume without voxels, and one that does not fit into memory."""
    if min(shape) < 1:
        raise UsageError(f"--shape {' '.join(map(str, shape))}: give three numbers above 0, z y x")
    needs, free = math.prod(shape) * BYTES_OF_VOXEL, available_memory()
    if needs > free:
        raise Refused(
            f"--shape {' '.join(map(str, shape))}: the demo would hold {format_bytes(needs)}, and "
            f"{format_bytes(free)} are free; give a smaller one (penstock generate volume makes "
            "any size)"
        )


def _report(result: Path, page: Path, gain: str) -> Path:
    """Write the report of the run, with the gain, and return its absolute path."""
    (report,) = reports_of_places(places_of(result))
    report = dataclasses.replace(report, title="Penstock's demo", about=[gain, *report.about])
    write_report(report, page, overwrite=True)
    return page.resolve()


def _check_output(out: Path, stores: Sequence[Path], replace: bool) -> None:
    """Refuse a folder that has a file of the user under a name that the demo writes."""
    check_folder(out, "--out")
    names = ("metrics.json", "trace.json", "before_after.png", PAGE)
    check_outputs(*(("--out", out / name) for name in names), replace=replace)
    for store in stores:
        if not replace:
            check_replaceable(store, "--out")
    out.mkdir(parents=True, exist_ok=True)
    for store in stores:
        store.mkdir(exist_ok=True)
        begin_output(store)


def _store(volume: Any, path: Path) -> None:
    domain = Box.of((0, 0), (1, 1)) + Box.of((0, 0, 0), volume.shape)
    sink = open_sink(
        str(path), domain=domain, dtype=volume.dtype, like=open_source(volume), overwrite=True
    )
    sink.create()
    begin_output(path)
    sink.write(domain, volume[None, None])
    sink.close()
