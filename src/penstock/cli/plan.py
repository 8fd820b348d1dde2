"""``penstock plan``: say what ``infer`` would do with the same flags, and write nothing."""

from __future__ import annotations

import argparse
import re

from ..base import InferConfig, ScaleConfig, UsageError, add_flags, from_flags
from ..models import check_model_name
from .infer import print_plan

EXAMPLES = r"""
penstock plan --in-spec noisy.ome.zarr --out-spec denoised.ome.zarr \
    --model-type denoise-tiny --patch 48 64 64 --overlap 16
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, ScaleConfig)
    add_flags(parser, InferConfig, config_file=True)


def run(args: argparse.Namespace) -> int:
    config = from_flags(InferConfig, args, args.config)
    if config.workers is None and (local := re.fullmatch(r"local:(\d+)", config.cluster or "")):
        config = config.model_copy(update={"workers": int(local[1])})
    scale = from_flags(ScaleConfig, args)
    if scale.model_fields_set and config.workers is None:
        flag = min(scale.model_fields_set).replace("_", "-")
        raise UsageError(f"--{flag} has no effect without --workers N or --cluster local:N")
    check_model_name(config.model_type, "--model-type")
    from ..inference import Job, scale_lines

    plan = Job(config).plan
    print_plan(plan)
    plan.refuse()
    if config.workers is not None:
        for what, how_much in scale_lines(scale, plan):
            print(f"{what:<14} {how_much}")
    return 0
