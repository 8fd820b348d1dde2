"""``penstock label IN OUT``: number the objects of a volume of any size."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from ..base import LabelConfig, add_flags, from_flags, one_heap, plural
from ..inference import Cutout, Labelling, LabelSummary
from .progress import counted_progress, figures_of, picture, say

EXAMPLES = """
penstock label scores.ome.zarr cells.ome.zarr --threshold 0.5 --min-size 20
penstock label mask.ome.zarr parts.ome.zarr --connectivity 26 --fill-holes
penstock label mask.ome.zarr image.ome.zarr/labels/cells --table cells.parquet
penstock label scores.ome.zarr cells.ome.zarr --decoder watershed --threshold 0.3 \\
    --seed-threshold 0.7 --object-size 24
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "in_spec", metavar="IN", help="a mask, scores or labels: a path, URL or spec"
    )
    parser.add_argument("out_spec", metavar="OUT", help="the labels: an OME-Zarr, or any spec")
    add_flags(parser, LabelConfig, only=LabelConfig.model_fields.keys() - {"in_spec", "out_spec"})


def run(args: argparse.Namespace) -> int:
    one_heap()
    return run_labelling(from_flags(LabelConfig, args))


def run_labelling(config: LabelConfig) -> int:
    """Carry out a labelling, and print what was done. Returns the exit code."""
    with contextlib.ExitStack() as stack:

        def begins(labelling: Labelling) -> Callable[[int], None]:
            # --prepare has said them.
            for word, text in () if config.joins else labelling.plan_lines():
                print(f"{word:<9} {text}")
            progress = counted_progress(labelling.voxels, "voxel", "labelling")
            return stack.enter_context(progress)

        if config.cluster is not None:
            from ..inference import label_on_cluster  # it loads asyncio

            print_summary(label_on_cluster(config, begins, say), config)
            return 0
        labelling = Labelling(config)
        show = begins(labelling)
        if not config.is_element:
            print_summary(labelling.run(show), config)
            return 0
        sentence, summary = labelling.step(show)
    if summary is not None:
        print_summary(summary, config)
    print(sentence)
    return 0


def print_summary(done: LabelSummary, config: LabelConfig) -> None:
    print(f"objects   {done.objects:,}, numbered by their first voxels; {done.left_out:,} left out")
    print(f"taken     {done.taken}, with {done.connectivity} neighbours")
    if done.joined is not None:
        print(f"joined    {done.joined:,} that several blocks see")
        print(f"cut       {done.cut:,} by the halo: give a larger --object-size if not 0")
        print(f"ambiguous {done.ambiguous:,}{_shown(done)}")
    if done.ends is not None and done.ends.planes:
        print(f"ends      {done.ends.sentence()}")
    print(f"output    {done.dtype}, {plural(done.levels, 'level')} below")
    if config.table is not None:
        print(f"table     {config.table}")


def _shown(done: LabelSummary) -> str:
    """The numbers of the largest ambiguous objects, and the files that show them."""
    if (listed := done.ambiguous_file) is None:
        return ""
    drawn = listed.with_suffix(".png")
    if done.cutouts:
        figures_of(lambda: [_drawn(drawn, done.cutouts)])
    numbers = ", ".join(map(str, done.largest))
    files = ", ".join(str(file) for file in (listed, drawn) if file.is_file())
    return f", the largest are {numbers}: see {files}"


def _drawn(file: Path, cutouts: Sequence[Cutout]) -> Path:
    """Draw objects over scores: each in orange, those around it in blue."""
    columns = min(3, len(cutouts))
    rows = -(-len(cutouts) // columns)
    with picture(file, (3 * columns, 3.3 * rows), rows, columns, replace=True) as panels:
        for panel, cutout in zip(panels.flat, cutouts, strict=False):
            panel.imshow(cutout.scores, cmap="gray")
            panel.imshow(cutout.around[..., None] * (0.2, 0.5, 1, 0.35))
            panel.imshow(cutout.body[..., None] * (1, 0.5, 0, 0.5))
            place = " ".join(map(str, cutout.low))
            title = f"{cutout.number}: {plural(cutout.voxels, 'voxel')}\nfrom z y x {place}"
            panel.set_title(title, fontsize=8)
    return file
