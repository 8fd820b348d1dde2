"""``penstock demo``: a synthetic volume on disk, a denoiser run over it, and a picture of both."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..base import (
    InferConfig,
    Replacing,
    add_flags,
    begin_output,
    build,
    check_folder,
    check_outputs,
    check_replaceable,
    from_flags,
)
from ..data import Box, clean_volume, noisy, open_sink, open_source, psnr
from ..reports import plot_before_after
from .infer import print_plan, shown_progress


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
    add_flags(parser, Replacing)


def run(args: argparse.Namespace) -> int:
    from ..inference import Job, run_job

    shape, replace = tuple(args.shape), from_flags(Replacing, args).replace
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
            "replace": replace,
        },
    )
    job = Job(config)
    print_plan(job.plan)
    with shown_progress() as progress:
        summary = run_job(job, progress)
    print("\n".join(summary.lines()))

    whole = Box.of((0, 0), (1, 1)) + Box.of((0, 0, 0), shape)
    before, after = (open_source(path).read(whole)[0, 0] for path in (store, result))
    gains = [psnr(clean, image) for image in (before, after)]
    gain = f"PSNR {gains[0]:.1f} dB before, {gains[1]:.1f} dB after: {gains[1] - gains[0]:+.1f} dB"
    plane = shape[0] // 2
    picture = plot_before_after(
        {"before": before[plane], "after": after[plane]},
        args.out / "before_after.png",
        f"Plane {plane} of the demo volume. {gain}",
        replace,
    )
    print(gain)
    print(f"Picture: {picture}")
    print(f"Records: {job.run_dir}; figures of them: penstock plot {args.out / 'metrics.json'}")
    return 0


def _check_output(out: Path, stores: Sequence[Path], replace: bool) -> None:
    """Refuse a folder in which a file of the user's has the name of one of the demo's."""
    check_folder(out, "--out")
    names = ("metrics.json", "trace.json", "before_after.png")
    check_outputs(*(("--out", out / name) for name in names), replace=replace)
    for store in stores:
        if not replace:
            check_replaceable(store, "--out")
    out.mkdir(parents=True, exist_ok=True)
    for store in stores:
        begin_output(store)


def _store(volume: Any, path: Path) -> None:
    domain = Box.of((0, 0), (1, 1)) + Box.of((0, 0, 0), volume.shape)
    sink = open_sink(
        str(path), domain=domain, dtype=volume.dtype, like=open_source(volume), overwrite=True
    )
    sink.create()
    sink.write(domain, volume[None, None])
    sink.close()
