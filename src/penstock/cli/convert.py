"""``penstock convert IN OUT``: write an array into another format, as it is."""

from __future__ import annotations

import argparse
import contextlib

from ..base import InferConfig, Labels, Unattended, UsageError, add_flags, from_flags, one_heap
from ..data import is_labels, open_source
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
    given.update({"head_kind": _kind_of(given.get("in_spec", "")), **plain, **given})
    config = from_flags(InferConfig, args)
    if config.head_kind == ("labels",) and config.out_dtype is None:
        settings = {name: getattr(config, name) for name in ("level", "raw", "axes", "series")}
        dtype = open_source(config.in_spec, **settings).dtype
        config = config.model_copy(update={"out_dtype": (dtype.name,)})
    return run_config(config, dry=args.dry_run)


def _kind_of(place: str) -> str:
    """The kind of the values of an input. Only an OME-Zarr says that it is of labels."""
    with contextlib.suppress(UsageError):
        return "labels" if is_labels(place, "") else "intensity"
    return "intensity"
