"""``penstock repair``: compute the lost and damaged blocks of an output again, and nothing else.

Levels that are not those of the blocks are made anew.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

from ..base import InferConfig, UsageError, VerifyConfig, add_flags, from_flags, plural
from ..data import count_differing
from . import pyramid, verify
from .infer import shown_progress
from .progress import counted_progress

EXAMPLES = """
penstock repair denoised.ome.zarr
penstock repair denoised.ome.zarr --model net.py:make   # if the model is not one of Penstock's own
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verify.add_arguments(parser)
    add_flags(parser, InferConfig, only={"take_over"})


def run(args: argparse.Namespace) -> int:
    config = from_flags(VerifyConfig, args)
    run, proof = verify.proven(args, config)
    unlike = [] if proof.bad else _with_other_levels(run.specs, config.readers)
    if not proof.bad and not unlike:
        print("Nothing is to be repaired")
        return 0
    if len(args.output) < len(run.outputs):  # we write nowhere that only the run folder names
        names = ", ".join(stored.written.name for stored in run.outputs)
        raise UsageError(f"the run wrote several outputs; name all of them: {names}")
    take_over = bool(vars(args).get("take_over"))
    if unlike:
        for image, count in unlike:
            pyramid.make_levels(image, count + 1, take_over=take_over, name="OUTPUT")
            print(f"Repaired: {plural(count, 'level')} of {image} made anew")
        return 0
    from ..inference import open_run, repair_run, verify_run

    with shown_progress() as progress:
        summary = repair_run(run, proof, config, progress, take_over=take_over)
    print(f"Repaired: {plural(summary.blocks_written, 'block')} computed again")
    written = None if proof.unlisted else sorted(proof.bad)
    count = run.num_blocks if written is None else len(written)
    with counted_progress(count, "block", "verifying") as counted:
        again = open_run(args.output, config.run_dir)
        left = verify_run(again, config.readers, config.retry_for, counted, written)
    for finding in left.findings:
        print(f"{finding.kind.capitalize()}: {again.named(finding.key)} of {finding.output}")
    return verify.exit_code(left)


def _with_other_levels(specs: Iterable[Any], threads: int) -> list[tuple[Any, int]]:
    """The images of which a level is not that of the one above, each with its number of levels."""
    counted = [(spec, count_differing(spec, threads)) for spec in specs]
    return [(spec, len(counts)) for spec, counts in counted if any(n for _, n in counts.values())]
