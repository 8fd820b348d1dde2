"""``penstock label IN OUT``: number the objects of a volume of any size."""

from __future__ import annotations

import argparse

from ..base import LabelConfig, add_flags, from_flags, one_heap
from .progress import counted_progress

EXAMPLES = """
penstock label scores.ome.zarr cells.ome.zarr --threshold 0.5 --min-size 20
penstock label mask.ome.zarr parts.ome.zarr --connectivity 26 --fill-holes
penstock label mask.ome.zarr image.ome.zarr/labels/cells --table cells.parquet
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "in_spec", metavar="IN", help="a mask, scores or labels: a path, URL or spec"
    )
    parser.add_argument("out_spec", metavar="OUT", help="the labels: an OME-Zarr, or any spec")
    add_flags(parser, LabelConfig, only=LabelConfig.model_fields.keys() - {"in_spec", "out_spec"})


def run(args: argparse.Namespace) -> int:
    one_heap()
    from ..inference import Labelling

    labelling = Labelling(from_flags(LabelConfig, args))
    with counted_progress(labelling.voxels, "voxels", "labelling") as show:
        done = labelling.run(show)
    what = {"mask": "all that is not 0", "labels": "voxels of equal value",
            "scores": f"what is above {labelling.config.threshold:g}"
            if labelling.config.threshold is not None else ""}  # fmt: skip
    print(f"objects   {done.objects:,}, numbered by their first voxels; {done.left_out:,} left out")
    print(f"taken     {what[done.matter]}, with {done.connectivity} neighbours")
    print(f"blocks    {done.blocks:,} of {' x '.join(map(str, done.block))} (z y x)")
    print(f"output    {done.dtype}, {done.levels} levels below")
    if labelling.config.table is not None:
        print(f"table     {labelling.config.table}")
    return 0
