"""``penstock convert IN OUT``: write an array into another format, as it is."""

from __future__ import annotations

import argparse

from ..base import InferConfig, Labels, Unattended, add_flags, from_flags, one_heap
from .infer import run_config

EXAMPLES = """
penstock convert brain.nii.gz brain.ome.zarr
penstock convert denoised.ome.zarr denoised.ome.tif
penstock convert scene.vrt scene.tif                     # a Cloud Optimized GeoTIFF
"""
_KNOBS = {
    *"in_spec out_spec level series axes t c missing raw head_kind out_dtype block".split(),
    *"chunks shards levels ome_zarr plain overwrite resume".split(),
    *"prep_workers writer_workers max_memory".split(),
    *Unattended.model_fields, *Labels.model_fields,
}  # fmt: skip
"""The knobs of ``infer`` that have to do with input, output and how the job goes on."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="plan and stop")
    add_flags(parser, InferConfig, only=_KNOBS)


def run(args: argparse.Namespace) -> int:
    one_heap()
    plain = {"model_type": "identity", "normalize": "none", "devices": "cpu"}
    given = vars(args)
    given.update(plain | given)
    return run_config(from_flags(InferConfig, args), dry=args.dry_run)
